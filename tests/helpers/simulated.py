"""Training in a world of its own, where only what is asked for takes time: to the millisecond."""

import json

from shared.advisor import sources


def numbers(printed: str) -> dict:
    """What the line of JSON says."""
    [line] = [line for line in printed.splitlines() if line.startswith(sources.NUMBERS)]
    return json.loads(line)["measured"]


class SimulatedLoader:
    """Takes its time as a DataLoader does: each worker makes every num_workers-th batch in turn."""

    def __init__(self, clock, num_workers, seconds, length=400, prefetch_factor=2):
        self.clock, self.num_workers, self.seconds = clock, num_workers, seconds
        self.length, self.prefetch_factor = length, prefetch_factor

    def __len__(self):
        return self.length

    def __iter__(self):
        self.ready = []  # when each batch that has been asked for is
        for number in range(self.length):
            if self.num_workers:
                self.ask(number)
                self.clock.now = max(self.clock.now, self.ready[number])
                self.ask(number + 1)
            else:
                self.clock.now += self.seconds
            yield {"number": number}

    def ask(self, number):
        """Have the workers prepare as many batches from `number` on as they may."""
        for n in range(len(self.ready), number + self.prefetch_factor * self.num_workers):
            free = self.ready[n - self.num_workers] if n >= self.num_workers else 0.0
            self.ready.append(max(free, self.clock.now) + self.seconds)


def train(clock, loader, seconds: float) -> list:
    """One epoch: the batches that there were."""
    seen = []
    for batch in loader:
        seen.append(batch.pop("number"))  # as scripts do
        clock.now += seconds
    return seen
