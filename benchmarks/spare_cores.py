"""What a spare core of the training host adds, and how much it slows down the training.

    python benchmarks/spare_cores.py

The data host has the last core of this machine, and the training has the first. A batch takes 40 ms
of CPU time. First, the training's core is idle while an accelerator computes for 10 ms per step
(the step sleeps), and the training host's own data server uses that core: how many more steps per
second does this give? Then the training computes for 30 ms per step on its core, and its own data
server keeps the last core busy: how much longer is a step, without the wait for its batch?
"""

import os
import sys
import time
from collections.abc import Callable
from statistics import median

import torch
from common import at_least_two_cores, data_host, use, write_results
from torch.utils.data import DataLoader, Dataset

from feed import RemoteDataset

OWN = f"unix-abstract:benchmark {os.getpid()}"  # the training host's own server
BATCH_SECONDS, ACCELERATOR_SECONDS, STEP_SECONDS = 0.040, 0.010, 0.030
BATCH_SIZE = 8
WARM_UP, STEPS, TIMES = 30, 150, 5
MORE, LONGER = 1.6, 0.03  # steps per second, at least; increase of a step's time, at most


class Work(Dataset):
    """Samples that take CPU time. A batch of BATCH_SIZE takes BATCH_SECONDS and has 1 MiB."""

    def __len__(self) -> int:
        return (WARM_UP + STEPS) * BATCH_SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        until = time.process_time() + BATCH_SECONDS / BATCH_SIZE
        while time.process_time() < until:
            sum(range(1000))
        return torch.zeros(262_144 // BATCH_SIZE)


def train(hosts: list[str], step: Callable[[], object]) -> tuple[float, float]:
    """Return the mean seconds of a step, with and without its wait for data."""
    use(*hosts)
    computing = 0.0
    loader = DataLoader(RemoteDataset(Work()), BATCH_SIZE, num_workers=2)
    for number, _ in enumerate(loader):
        if number == WARM_UP:
            start, computing = time.perf_counter(), 0.0
        begun = time.perf_counter()
        step()
        computing += time.perf_counter() - begun
    return (time.perf_counter() - start) / STEPS, computing / STEPS


def compute() -> Callable[[], object]:
    """Return a function that computes for about STEP_SECONDS on one core."""
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
    accelerator, cpu = (lambda: time.sleep(ACCELERATOR_SECONDS)), compute()
    found: dict[str, list[float]] = {"more": [], "longer": []}
    with data_host(1, "taskset", "--cpu-list", str(last)) as (far, _):
        for core, step, kind in ((first, accelerator, "more"), (last, cpu, "longer")):
            # As hetero/spare_cores.py runs it.
            idle = "taskset", "--cpu-list", str(core), "chrt", "--idle", "0"
            with data_host(1, *idle, address=OWN):
                for _ in range(TIMES):
                    alone, both = (train(hosts, step) for hosts in ([far], [OWN, far]))
                    ratio = alone[0] / both[0] if kind == "more" else both[1] / alone[1] - 1
                    found[kind].append(ratio)
    more, longer = (median(values) for values in found.values())
    print(f"Steps per second with 1 data core and 1 spare core, to 1 data core alone: {more:.2f}")
    print(f"Step time without the wait for data, with a busy spare core: {longer:+.1%}")
    print(f"Targets: at least {MORE:.1f} x, at most {LONGER:.0%} longer", flush=True)
    write_results("spare_cores", found)
    if more < MORE or longer > LONGER:
        sys.exit("Target missed: is the machine busy?")


if __name__ == "__main__":
    main()
