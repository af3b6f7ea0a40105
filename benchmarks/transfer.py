"""What it costs to get batches into the training: from a data host, and from torch's own workers.

    python benchmarks/transfer.py

A Dataset has its samples in memory and does nothing to them. The data host is pinned to the first
core; the training process and its DataLoader's workers to the last. Its peers are a DataLoader
without data hosts, with as many workers, and raw TCP, which is what the machine can do at most. All
are measured in turn, and the medians compared. benchmarks/README.md says more.
"""

import contextlib
import itertools
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from statistics import median

import psutil
import torch
from common import (
    at_least_two_cores,
    cpu_seconds,
    data_host,
    free_port,
    table,
    use,
    wait_for,
    wait_until_idle,
    write_results,
)
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from feed import RemoteDataset, as_is

SHAPES = "64 x 3 x 224 x 224 uint8", "64 x 3 x 224 x 224 float32"
TINY = "1 x 4 float32"
TIMES, SECONDS = 5, 2.0  # measured each time; of CPU time Linux tells hundredths of a second
WARM_UP = 8, 0.25  # batches and seconds, at least: until nothing is left of what was held ready
# Ways with a data host, and those without one that they are compared with.
THERE = {"joined here": "no data host", "joined there": "no data host"}
THERE |= {"stream there": "stream, no data host"}
MOST = 1.1  # times the CPU time of the training process with torch's own workers


def make_batch(shape: str) -> torch.Tensor:
    """The batch that is sent again and again: random bytes, the same in every process."""
    *sizes, dtype = shape.replace(" x ", " ").split()
    random = torch.Generator().manual_seed(1)
    if dtype == "uint8":
        return torch.randint(256, [*map(int, sizes)], dtype=torch.uint8, generator=random)
    return torch.rand([*map(int, sizes)], generator=random)


class Repeated(Dataset):
    """The samples of one batch, again and again."""

    def __init__(self, batch: torch.Tensor):
        self.batch = batch

    def __len__(self) -> int:
        return len(self.batch) * 1_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.batch[index % len(self.batch)]


class RepeatedStream(IterableDataset):
    """The same samples, without end."""

    def __init__(self, batch: torch.Tensor):
        self.batch = batch

    def __iter__(self) -> Iterator[torch.Tensor]:
        return itertools.cycle(self.batch)


# ------------------------------------------------------- ways: streams of batches


def local(batch: torch.Tensor, num_workers: int) -> Iterator[torch.Tensor]:
    return iter(DataLoader(Repeated(batch), len(batch), num_workers=num_workers))


def joined_here(batch: torch.Tensor, num_workers: int) -> Iterator[torch.Tensor]:
    return iter(DataLoader(RemoteDataset(Repeated(batch)), len(batch), num_workers=num_workers))


def joined_there(batch: torch.Tensor, num_workers: int) -> Iterator[torch.Tensor]:
    dataset = RemoteDataset(Repeated(batch), collate_fn=default_collate)
    return iter(DataLoader(dataset, len(batch), num_workers=num_workers, collate_fn=as_is))


def stream_here(batch: torch.Tensor, num_workers: int) -> Iterator[torch.Tensor]:
    return iter(DataLoader(RepeatedStream(batch), len(batch), num_workers=num_workers))


def stream_there(batch: torch.Tensor, num_workers: int) -> Iterator[torch.Tensor]:
    dataset = RemoteDataset(RepeatedStream(batch))
    return iter(DataLoader(dataset, len(batch), num_workers=num_workers))


def raw_tcp(batch: torch.Tensor, core: int) -> Iterator[torch.Tensor]:
    tensor, port = torch.empty_like(batch), free_port()
    memory = memoryview(tensor.numpy()).cast("B")
    fork = multiprocessing.get_context("fork")
    fork.Process(target=serve_tcp, args=(batch, port, core), daemon=True).start()
    wait_for(port)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        while True:
            filled = 0
            while filled < len(memory):
                filled += connection.recv_into(memory[filled:])
            yield tensor


def serve_tcp(batch: torch.Tensor, port: int, core: int) -> None:
    os.sched_setaffinity(0, {core})
    with socket.create_server(("127.0.0.1", port)) as server:
        while True:
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):
                while True:
                    connection.sendall(memoryview(batch.numpy()).cast("B"))


# ------------------------------------------------------- measuring


@dataclass
class Way:
    """A stream of batches, and what was measured of it, each time."""

    stream: Iterator[torch.Tensor]
    workers: list[psutil.Process]  # of the DataLoader
    rate: list[float] = field(default_factory=list)  # batches per second
    # CPU seconds for a batch:
    training_process: list[float] = field(default_factory=list)
    training_workers: list[float] = field(default_factory=list)
    front: list[float] = field(default_factory=list)  # the data host's process that sends
    host: list[float] = field(default_factory=list)  # all processes of the data host


def measure(
    shape: str, names: dict[str, Callable], core: int, times: int = TIMES, seconds: float = SECONDS
) -> dict[str, Way]:
    """Measure in turn all ways with a batch of this shape; the data host is on this core."""
    batch, me = make_batch(shape), psutil.Process()
    with data_host(1, "taskset", "--cpu-list", str(core), sys.executable) as (address, host):
        use(address)
        ways = {}
        for name, make in names.items():
            before, stream = {*me.children()}, make(batch)
            assert torch.equal(next(stream), batch), name
            is_loader = make.func is not raw_tcp
            ways[name] = Way(stream, [*{*me.children()} - before] if is_loader else [])
        front = min(host.children(), key=lambda process: process.create_time())
        for _ in range(times):
            for name, way in ways.items():
                wait_until_idle()
                warm_up(way.stream)
                groups = [me], way.workers, [front], [host, *host.children(recursive=True)]
                before, start, count = [*map(cpu_seconds, groups)], time.perf_counter(), 0
                while (passed := time.perf_counter() - start) < seconds:
                    arrived = next(way.stream)
                    count += 1
                assert torch.equal(arrived, batch), name
                way.rate.append(count / passed)
                lists = way.training_process, way.training_workers, way.front, way.host
                for found, group, old in zip(lists, groups, before, strict=True):
                    found.append((cpu_seconds(group) - old) / count)
        for way in ways.values():
            del way.stream, way.workers  # ends the workers
    return ways


def warm_up(stream: Iterator[torch.Tensor]) -> None:
    """Take what was held ready, and some more."""
    batches, seconds = WARM_UP
    start = time.perf_counter()
    while batches > 0 or time.perf_counter() < start + seconds:
        next(stream)
        batches -= 1


def loaders(counts: tuple[int, ...], *kinds: Callable) -> dict[str, Callable]:
    """Return the ways of these kinds with so many workers of the DataLoader."""
    names = {local: "no data host", joined_here: "joined here", joined_there: "joined there"}
    names |= {stream_here: "stream, no data host", stream_there: "stream there"}
    return {f"{names[k]}, {n}": partial(k, num_workers=n) for n in counts for k in kinds}


def main() -> None:
    """Measure and print all; fail if a target is missed."""
    data_core, *_, training_core = at_least_two_cores()
    os.sched_setaffinity(0, {training_core})
    results, missed = {}, []
    names = loaders((1, 2), local, joined_here, joined_there, stream_here, stream_there)
    names |= {"raw TCP": partial(raw_tcp, core=data_core)}
    for shape in SHAPES:
        found = measure(shape, names, data_core)
        size = make_batch(shape).nbytes / 1e9
        print(f"\nBatches of {shape}, medians of {TIMES}; the data host has one worker:")
        rows = []
        for name, way in found.items():
            parts = way.training_process, way.training_workers, way.front, way.host
            costs = [f"{median(part) / size:.2f}" for part in parts]
            costs = costs if name.split(",")[0] in THERE else [*costs[:2], "", ""]
            rows.append((name, f"{size * median(way.rate):.2f}", *costs))
        heads = "way, DataLoader's workers | GB/s | CPU s/GB: training process | its workers "
        table(heads + "| data host's process that sends | all of the data host", rows)
        for name, way in found.items():
            if own := THERE.get(name.split(",")[0]):
                own = found[f"{own}, {name[-1]}"].training_process
                ratio = median(way.training_process) / median(own)
                print(f"{name}: the training process takes {ratio:.2f} of the CPU time that it")
                print(f"takes without data hosts (target: {MOST} or less)", flush=True)
                missed += [f"{shape}, {name}"] if ratio > MOST else []
        results[shape] = {name: vars(way) for name, way in found.items()}

    found = measure(TINY, loaders((1, 2, 4), local, joined_here, stream_there), data_core)
    print("\nBatches of one sample of 16 bytes:")
    rows = []
    for name, way in found.items():
        costs = (1e3 * median(part) for part in (way.training_process, way.training_workers))
        rows.append((name, f"{median(way.rate):.0f}", *(f"{cost:.2f}" for cost in costs)))
    table("way, workers | batches/s | CPU ms a batch: training process | its workers", rows)
    results[TINY] = {name: vars(way) for name, way in found.items()}
    write_results("transfer", results)
    if missed:
        sys.exit(f"Targets missed: {missed}: is the machine busy?")


if __name__ == "__main__":
    main()
