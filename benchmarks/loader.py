"""How fast the loader is, compared with torch's DataLoader and Ray Data.

    .venv/bin/python benchmarks/loader.py      five minutes

- How many samples does one core prepare? With the PyTorch example's Dataset and augmentation.
- How much does it cost to receive batches? The Dataset has its samples in memory and does nothing
  to them, so that only the transfer is measured.
- How long does an epoch take to start if the Dataset is large?

For the first two, the data host is pinned to the first core, and the process that trains on its
batches to the last, with its DataLoader's workers. For the first, the other loaders prepare samples
on the first core too. All ways are measured in turn, and their medians are compared.
"""

import contextlib
import io
import itertools
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from common import (
    ROOT,
    at_least_two_cores,
    cpu_seconds,
    data_host,
    family,
    table,
    use,
    write_results,
)
from torch.utils.data import DataLoader, Dataset, IterableDataset

from dataset import MnistDataset
from feed import RemoteDataset, samples
from feed.wire import encode

OURS, STREAM, DATALOADER, RAY = "data host", "data host, stream", "DataLoader", "Ray Data"
TIMES, SECONDS = 5, 3.0  # of each measurement; Linux counts CPU time in steps of 10 ms
WARM_UP = 8, 0.25  # batches and seconds, at least: until no prefetched batches are left
IMAGES, BATCH_SIZE, AUGMENT = 6000, 128, 2  # of the example's Dataset
LARGE_WORKERS = 4  # of the DataLoader and of the data host, for the large Datasets

LEAST = {DATALOADER: 0.95, RAY: 1.0}  # times the samples that a core prepares with the other loader
MOST_CPU = 1.1  # times the CPU time of the training process with torch's own workers
MOST_GB = 2.0  # that a data host may have in memory for a Dataset of 1 GB


@dataclass
class Way:
    """A way to get batches in a process on this core, and what was measured each time."""

    core: int
    stream: Iterator
    workers: list[psutil.Process]  # of the DataLoader
    last: Any = None  # the last batch
    rate: list[float] = field(default_factory=list)  # batches per second
    # CPU seconds per batch: of this process, of the DataLoader's workers, and of the data host's
    # process that sends and its workers
    cpu: list[list[float]] = field(default_factory=list)

    def result(self) -> dict[str, list]:
        """Return what was measured, to be written to the file."""
        return {"batches per second": self.rate, "CPU seconds": self.cpu}


def measure(
    ways: dict[str, tuple[int, Callable[[], Iterator]]], host: psutil.Process
) -> dict[str, Way]:
    """Measure all ways in turn.

    ways: for each way, its core, and a function that returns its batches. host: the data host.
    """
    me, found = psutil.Process(), {}
    sender = min(host.children(), key=lambda process: process.create_time())
    for name, (core, make) in ways.items():
        os.sched_setaffinity(0, {core})  # the workers inherit it
        before, stream = {*me.children()}, make()
        next(stream)
        found[name] = Way(core, stream, [*{*me.children()} - before])
    for _ in range(TIMES):
        for way in found.values():
            os.sched_setaffinity(0, {way.core})
            if len(found) > 1:
                wait_until_idle()
            warm_up(way.stream)
            preparing = [each for each in host.children(recursive=True) if each != sender]
            groups = [me], way.workers, [sender], preparing
            before, start, count = [*map(cpu_seconds, groups)], time.perf_counter(), 0
            while (passed := time.perf_counter() - start) < SECONDS:
                way.last = next(way.stream)
                count += 1
            way.rate.append(count / passed)
            after = map(cpu_seconds, groups)
            way.cpu.append([(new - old) / count for new, old in zip(after, before, strict=True)])
    for way in found.values():
        del way.stream, way.workers  # ends the workers
    return found


def wait_until_idle() -> None:
    """Wait until no other way is still prefetching."""
    everyone, before = family(psutil.Process()), float("-inf")
    while (now := cpu_seconds(everyone)) - before >= 0.02:
        before = now
        time.sleep(0.2)


def warm_up(stream: Iterator) -> None:
    """Take the prefetched batches, and some more."""
    batches, seconds = WARM_UP
    start = time.perf_counter()
    while batches > 0 or time.perf_counter() < start + seconds:
        next(stream)
        batches -= 1


def batches_of(dataset: Dataset, batch_size: int, num_workers: int) -> Iterator:
    return iter(DataLoader(dataset, batch_size, num_workers=num_workers))


# ------------------------------------------------------- how many samples does a core prepare?


class Digits(MnistDataset):
    """Noise in MNIST's format, augmented as in the notebook. The images repeat."""

    def __init__(self):
        with tempfile.TemporaryDirectory() as folder:
            for name, shape in {"images-idx3": (IMAGES, 28, 28), "labels-idx1": (IMAGES,)}.items():
                sizes = b"".join(size.to_bytes(4, "big") for size in shape)
                values = torch.randint(10, shape, dtype=torch.uint8).numpy().tobytes()
                data = (0x0800 + len(shape)).to_bytes(4, "big") + sizes + values
                Path(folder, f"train-{name}-ubyte").write_bytes(data)
            super().__init__(folder, augment=AUGMENT)

    def __len__(self) -> int:
        return 10_000_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return super().__getitem__(index % IMAGES)


class Prepare:
    """The function that Ray Data maps over the samples' numbers."""

    def __init__(self):
        torch.set_num_threads(1)  # as in a DataLoader's workers
        self.dataset = Digits()

    def __call__(self, numbers: dict) -> dict:
        images, labels = zip(*(self.dataset[number] for number in numbers["id"]), strict=True)
        return {"images": torch.stack(images).numpy(), "labels": torch.tensor(labels).numpy()}


def batches_of_ray() -> Iterator:
    import ray

    logging.disable(logging.WARNING)
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # Ray's own processes import from there
    # Ray must believe that this core is two, so that it reads while the actor runs.
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    ray.data.DataContext.get_current().enable_progress_bars = False
    numbers = ray.data.range(10_000_000, override_num_blocks=10_000)
    one = ray.data.ActorPoolStrategy(size=1)
    batches = numbers.map_batches(Prepare, batch_size=BATCH_SIZE, compute=one)
    yield from batches.iter_torch_batches(batch_size=BATCH_SIZE, prefetch_batches=2)


def prepare(first: int, last: int, host: psutil.Process) -> tuple[dict, list[str]]:
    """Print samples per second; return all values, and the targets that were missed.

    The data host's batches go to two workers, so that it prepares one while another is received.
    """
    dataset = Digits()
    ours = partial(batches_of, RemoteDataset(dataset), BATCH_SIZE, 2)
    own = partial(batches_of, dataset, BATCH_SIZE, 1)
    found = measure({OURS: (last, ours), DATALOADER: (first, own)}, host)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["RAY_TMPDIR"] = folder  # Ray leaves files there
        # Measure it alone, because its processes are never quite idle. Hide its output.
        with contextlib.redirect_stdout(io.StringIO()):
            found |= measure({RAY: (first, batches_of_ray)}, host)
            sys.modules["ray"].shutdown()
    rates, rows = {name: BATCH_SIZE * median(way.rate) for name, way in found.items()}, []
    for name, rate in rates.items():
        us = [
            f"{1e6 * median(part) / BATCH_SIZE:.0f}" for part in zip(*found[name].cpu, strict=True)
        ]
        known = {OURS: us[1:], DATALOADER: [us[1], "", ""], RAY: ["", "", ""]}[name]
        rows.append((name, f"{rate:.0f}", f"{rates[OURS] / rate:.2f}", *known))
    heads = "prepared on one core by | samples/s | data host / this | CPU us a sample"
    table(f"{heads}: DataLoader's workers | data host's sending process | its workers", rows)
    missed = [
        f"at least {n} of {peer}" for peer, n in LEAST.items() if rates[OURS] < n * rates[peer]
    ]
    chunk = samples.Chunk([*range(BATCH_SIZE)])
    batch = samples.prepare(dataset, {}, chunk)
    indices = chunk.indices
    seeding = spent(lambda: [samples.seed_rngs(dataset, {}, chunk, 0, i) for i in indices])
    encoding = spent(partial(encode, batch))
    print(f"Of these, seeding takes {seeding:.1f} us, and encoding {encoding:.1f} us.")
    return {name: way.result() for name, way in found.items()}, missed


def spent(of_batch: Callable) -> float:
    """Return the CPU microseconds for each sample of a function that works on a batch."""
    times = []
    for _ in range(100):
        before = time.process_time()
        of_batch()
        times.append(1e6 * (time.process_time() - before) / BATCH_SIZE)
    return median(times)


# ------------------------------------------------------- how much does it cost to receive batches?


class Repeated(Dataset):
    """The samples of one batch, repeated."""

    def __init__(self, batch: torch.Tensor):
        self.batch = batch

    def __len__(self) -> int:
        return len(self.batch) * 1_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.batch[index % len(self.batch)]


class RepeatedStream(IterableDataset):
    """The same samples, repeated forever."""

    def __init__(self, batch: torch.Tensor):
        self.batch = batch

    def __iter__(self) -> Iterator[torch.Tensor]:
        return itertools.cycle(self.batch)


def receive(first: int, last: int, host: psutil.Process) -> tuple[dict, list[str]]:
    """Print speed and CPU time; return all values, and the targets that were missed."""
    batches = {
        "64 images, uint8": torch.randint(256, (64, 3, 224, 224), dtype=torch.uint8),
        "64 images, float32": torch.rand(64, 3, 224, 224),
        "one sample of 16 bytes": torch.rand(1, 4),
    }
    rows, results, missed = [], {}, []
    for what, batch in batches.items():
        datasets = {
            DATALOADER: Repeated(batch),
            OURS: RemoteDataset(Repeated(batch)),
            STREAM: RemoteDataset(RepeatedStream(batch)),
        }
        makers = {name: partial(batches_of, its, len(batch), 2) for name, its in datasets.items()}
        found = measure({name: (last, make) for name, make in makers.items()}, host)
        tiny = batch.nbytes < 1e6
        each = 1 if tiny else batch.nbytes / 1e6
        cpu = {}
        for name, way in found.items():
            assert torch.equal(way.last, batch), (what, name)
            rate = median(way.rate)
            speed = f"{rate:,.0f} batches/s" if tiny else f"{rate * each / 1e3:.2f} GB/s"
            cpu[name] = [1e3 * median(part) / each for part in zip(*way.cpu, strict=True)][:3]
            shown = [f"{ms:.2f}" for ms in cpu[name]]
            shown[-1] = "" if name == DATALOADER else shown[-1]
            rows.append((what, name, speed, "batch" if tiny else "MB", *shown))
            if not tiny and cpu[name][0] > MOST_CPU * cpu[DATALOADER][0]:
                missed.append(f"CPU time of the training process, {what}, {name}")
        results[what] = {name: way.result() for name, way in found.items()}
    heads = "batches of | from | speed | CPU ms per | training process | its workers"
    table(f"{heads} | data host's sending process", rows)
    return results, missed


# ------------------------------------------------------- how long does an epoch take to start?


class Paths(Dataset):
    """1.28 million paths"""

    def __init__(self):  # those of torchvision's ImageFolder on ImageNet
        folder, images = "/opt/ml/input/data/training/n{0:08}/n{0:08}_{1}.JPEG", range(1281)
        self.samples = [(folder.format(n, image), n) for n in range(1000) for image in images]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> int:
        return self.samples[index][1]


class Images(Dataset):
    """a tensor of 1 GB"""

    def __init__(self):
        self.images = torch.full((10_000, 100_000), 7, dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.images[index, :10]


def begin(loader: DataLoader) -> float:
    """Return the seconds from an epoch's start until each worker has given a batch."""
    start, batches = time.perf_counter(), iter(loader)
    for _ in range(loader.num_workers):
        next(batches)
    return time.perf_counter() - start  # then the workers end


def epoch_start() -> tuple[dict, list[str]]:
    """Print how long two epochs take to start; return all values, and the missed targets."""
    rows, results, missed = [], {}, []
    for kind in (Paths, Images):
        dataset = kind()
        with data_host(LARGE_WORKERS) as (address, host):
            use(address)
            for name, given in {DATALOADER: dataset, OURS: RemoteDataset(dataset)}.items():
                loader = DataLoader(given, 64, num_workers=LARGE_WORKERS)
                seconds = [begin(loader) for _ in range(2)]
                held = sum(process.memory_full_info().pss for process in family(host)) / 1e9
                shown = "" if name == DATALOADER else f"{held:.2f}"
                rows.append((kind.__doc__, name, *(f"{s:.2f}" for s in seconds), shown))
                results[f"{kind.__doc__}, {name}"] = {"seconds": seconds, "GB": held}
        missed += [f"memory for {kind.__doc__}"] if held > MOST_GB else []
    heads = "Dataset | way | s until the first batches, first epoch | second epoch"
    table(f"{heads} | GB of the data host", rows)
    return results, missed


def main() -> None:
    """Measure and print all; fail if a target is missed."""
    cores = at_least_two_cores()
    first, last = cores[0], cores[-1]
    results, missed = {}, {}
    results["epoch_start"], missed["epoch_start"] = epoch_start()  # on all cores
    with data_host(1, "taskset", "--cpu-list", str(first)) as (address, host):
        use(address)
        results["receive"], missed["receive"] = receive(first, last, host)
        results["prepare"], missed["prepare"] = prepare(first, last, host)
    write_results("loader", results)
    print(f"\nTargets: at most {MOST_GB} GB on a data host for 1 GB; at most {MOST_CPU} times the")
    print(f"training process's CPU time with a DataLoader; at least {LEAST[DATALOADER]} times the")
    print(f"DataLoader's samples, and {LEAST[RAY]} times those of Ray Data.")
    if any(missed.values()):
        sys.exit(f"Targets missed: {sum(missed.values(), [])}: is the machine busy?")


if __name__ == "__main__":
    sys.path.append(str(ROOT / "build" / "bench" / "packages"))
    if not find_spec("ray"):
        sys.exit("Ray Data is missing: run `make bench` once, which installs it in build/bench/.")
    main()
