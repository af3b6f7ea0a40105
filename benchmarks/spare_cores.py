"""What a spare core of the training host adds to a data host's, and what it costs the training.

    python benchmarks/spare_cores.py

The data host has the last core of this machine, the training the first. A batch takes 40 ms of CPU
time. First the training's core is idle while an accelerator computes, 10 ms a step (it sleeps), and
a data server of the training host's own has that core too: how many more steps are there in a
second? Then the training computes 30 ms a step on its core, and the server of its own keeps the
last core busy: how much longer is a step, without the wait for its batch?
"""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

CODE = Path(__file__).resolve().parent.parent / "pt.grpc.sagemaker" / "code"
sys.path[:0] = [str(CODE), str(Path(__file__).resolve().parent)]

import torch  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402
from transfer import TOKEN, at_least_two_cores, free_port, write_results  # noqa: E402

from feed.batches import BatchKeys, as_is  # noqa: E402
from feed.client import RemoteBatches, RemoteDataset  # noqa: E402
from feed.server import serve  # noqa: E402

OWN = f"unix-abstract:benchmark {os.getpid()}"  # the training host's own server
BATCH_SECONDS, ACCELERATOR_SECONDS, STEP_SECONDS = 0.040, 0.010, 0.030
WARM_UP, STEPS, TIMES = 30, 150, 5
MORE, LONGER = 1.6, 0.03  # steps per second with the spare core, at least; of a step, at most


class Work(Dataset):
    """Batches of 1 MB that take BATCH_SECONDS of CPU time each."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        until = time.process_time() + BATCH_SECONDS
        while time.process_time() < until:
            sum(range(1000))
        return [torch.zeros(262_144) for _ in indices]


@contextlib.contextmanager
def serving(address: str, *start: str) -> Iterator[None]:
    """Run this file as a data server; start: what the command line begins with."""
    command = [*start, __file__, address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert "serving" in server.stdout.readline()
            yield
        finally:
            server.terminate()


def train(hosts: list[str], step: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds of a step with its wait for data, and without: means over STEPS."""
    keys = BatchKeys([[0]] * (WARM_UP + STEPS))
    batches = RemoteBatches(RemoteDataset(hosts, TOKEN), keys)
    computing = 0.0
    for number, _ in enumerate(DataLoader(batches, batch_size=None, collate_fn=as_is)):
        if number == WARM_UP:
            start, computing = time.perf_counter(), 0.0
        begun = time.perf_counter()
        step()
        computing += time.perf_counter() - begun
    return (time.perf_counter() - start) / STEPS, computing / STEPS


def compute() -> Callable[[], object]:
    """Return a step of about STEP_SECONDS, on one core."""
    torch.set_num_threads(1)
    weights = torch.rand(256, 256) / 256

    def step(times: int) -> None:
        values = weights
        for _ in range(times):
            values = torch.relu(values @ weights)

    start = time.perf_counter()
    step(1000)
    times = int(1000 * STEP_SECONDS / (time.perf_counter() - start))
    return lambda: step(times)


def main() -> None:
    """Measure in turns; print medians; fail if a target is missed."""
    first, *_, last = at_least_two_cores()
    os.sched_setaffinity(0, {first})
    data_host = f"127.0.0.1:{free_port()}"
    spare = [sys.executable, str(CODE / "feed" / "spare.py")]
    accelerator, cpu = (lambda: time.sleep(ACCELERATOR_SECONDS)), compute()
    with serving(data_host, "taskset", "--cpu-list", str(last), sys.executable):
        found: dict[str, list[float]] = {"more": [], "longer": []}
        with serving(OWN, *spare, str(first)):
            for _ in range(TIMES):
                alone, both = (train(h, accelerator)[0] for h in ([data_host], [OWN, data_host]))
                found["more"].append(alone / both)
        with serving(OWN, *spare, str(last)):
            for _ in range(TIMES):
                alone, both = (train(h, cpu)[1] for h in ([data_host], [OWN, data_host]))
                found["longer"].append(both / alone - 1)
    more, longer = (median(values) for values in found.values())
    print(f"Steps a second, 1 data core + 1 spare core to the data core alone: {more:.2f}")
    print(f"A step without its wait for data, with the spare core busy: {longer:+.1%}")
    print(f"Targets: at least {MORE:.1f} x, at most {LONGER:.0%} longer", flush=True)
    write_results("spare_cores", found)
    if more < MORE or longer > LONGER:
        sys.exit("Target missed: is the machine busy?")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        serve(Work(), sys.argv[1], TOKEN, num_workers=1)
    else:
        main()
