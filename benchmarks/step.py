"""How much longer a training step takes while batches arrive at 400 MB/s: our loader and raw TCP.

    python benchmarks/step.py

The training's thread has the last core to itself. The loader's threads, in the same process, have
the others, and the data process what they leave. Steps that take the next batch, and steps that
repeat one, are measured in turn, thirty times. benchmarks/README.md says what that shows, and what
it does not.
"""

import functools
import itertools
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median, quantiles

import torch

sys.path.append(str(Path(__file__).resolve().parent))

from transfer import (  # noqa: E402
    OURS,
    TCP,
    at_least_two_cores,
    receive_ours,
    receive_tcp,
    serve_ours,
    serve_tcp,
    started,
    wait_until_idle,
    write_results,
)

RATE = 400e6  # bytes of batches per second
MOST = 0.03  # that a step may take longer
TIMES, WARM_UP, STEPS = 30, 5, 20  # turns; steps in each, before those that count, and those
LAYERS, WIDTH = 100, 256  # of the step: 30 to 40 ms on one of our cores


def in_background(serve: Callable, batch: torch.Tensor, port: int) -> None:
    """Yield to the loader's threads, from which a data host on its own machine takes nothing."""
    os.nice(19)
    serve(batch, port)


def receive_tcp_in_thread(port: int, like: torch.Tensor) -> Iterator[torch.Tensor]:
    """Receive into new memory in a thread, beside the training: the least that a loader can do."""
    ready: queue.Queue[torch.Tensor] = queue.Queue(4)

    def receive() -> None:
        for batch in receive_tcp(port, like):
            ready.put(batch.clone())

    threading.Thread(target=receive, daemon=True).start()
    while True:
        yield ready.get()


def step(weights: list[torch.Tensor], batch: torch.Tensor) -> None:
    """Make 200 calls of torch's. They read a part of the batch: all of it costs any loader's."""
    values = batch[: WIDTH * WIDTH].view(WIDTH, WIDTH)
    for weight in weights:
        values = torch.relu(values @ weight)


def seconds_per_step(weights: list[torch.Tensor], batches: Iterator[torch.Tensor]) -> float:
    """Return the mean of a turn's steps, each with the time that it takes to get its batch."""
    wait_until_idle()
    for number in range(WARM_UP + STEPS):
        if number == WARM_UP:
            start = time.perf_counter()
        step(weights, next(batches))
    return (time.perf_counter() - start) / STEPS


def main() -> None:
    """Measure; print the medians; fail if the target is missed."""
    *other_cores, training_core = at_least_two_cores()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    weights = [torch.rand(WIDTH, WIDTH) / WIDTH for _ in range(LAYERS)]
    os.sched_setaffinity(0, {training_core})
    alone = seconds_per_step(weights, itertools.repeat(torch.rand(WIDTH * WIDTH)))
    size = int(RATE * alone / 4)

    os.sched_setaffinity(0, other_cores)  # also those of threads that are yet to be started
    ways = {
        OURS: (functools.partial(in_background, serve_ours), receive_ours),
        TCP: (functools.partial(in_background, serve_tcp), receive_tcp_in_thread),
    }
    with started(ways, f"{size} float32", other_cores) as streams:
        os.sched_setaffinity(threading.get_native_id(), {training_core})
        kinds = {"repeated": itertools.repeat(next(streams[OURS])), **streams}
        found: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(TIMES):
            for kind, batches in kinds.items():
                found[kind].append(seconds_per_step(weights, batches))

    print(f"\nA step that repeats one batch takes {1e3 * median(found['repeated']):.1f} ms. Longer")
    print("when it takes the next, the median and half of all times:\n")
    print("| | longer | | batches arrive at |\n|---|---|---|---|")
    longer = {}
    for way in ways:
        pairs = zip(found["repeated"], found[way], strict=True)
        low, longer[way], high = quantiles(arriving / repeated - 1 for repeated, arriving in pairs)
        rate = 4e-6 * size / median(found[way])
        print(f"| {way} | {longer[way]:+.1%} | {low:+.1%} to {high:+.1%} | {rate:.0f} MB/s |")
    print(f"Target of {OURS}: {MOST:.0%} at most", flush=True)
    write_results("step", found)
    if longer[OURS] > MOST:
        sys.exit("Target missed: is the machine busy?")


if __name__ == "__main__":
    main()
