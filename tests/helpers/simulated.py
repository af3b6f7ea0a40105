"""Simulated training, with a simulated clock, so that tests know each time exactly."""

import json

from shared.measured_line import BEGINNING


def numbers(printed: str) -> dict:
    """Return the numbers in the line of JSON."""
    [line] = [line for line in printed.splitlines() if line.startswith(BEGINNING)]
    return json.loads(line)["measured"]


class SimulatedLoader:
    """Takes as long as a DataLoader whose workers each prepare every num_workers-th batch."""

    def __init__(self, clock, num_workers, seconds, length=400, prefetch_factor=2):
        self.clock, self.num_workers, self.seconds = clock, num_workers, seconds
        self.length, self.prefetch_factor = length, prefetch_factor

    def __len__(self):
        return self.length

    def __iter__(self):
        self.ready = []  # when each requested batch is ready
        for number in range(self.length):
            if self.num_workers:
                self.ask(number)
                self.clock.now = max(self.clock.now, self.ready[number])
                self.ask(number + 1)
            else:
                self.clock.now += self.seconds
            yield {"number": number}

    def ask(self, number):
        """Let the workers prefetch batches from `number` on, as many as they may."""
        for n in range(len(self.ready), number + self.prefetch_factor * self.num_workers):
            free = self.ready[n - self.num_workers] if n >= self.num_workers else 0.0
            self.ready.append(max(free, self.clock.now) + self.seconds)


def train(clock, loader, seconds: float) -> list:
    """Train for one epoch; return the numbers of its batches."""
    seen = []
    for batch in loader:
        seen.append(batch.pop("number"))  # changes the batch, as scripts may do
        clock.now += seconds
    return seen
