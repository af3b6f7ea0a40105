"""How many samples a second reach the training, per core of the hosts that prepare them.

    python benchmarks/pipeline.py

The PyTorch example's Dataset and augmentation, prepared on one core: by our data host, by a torch
DataLoader, and by Ray Data; the consumer does nothing with the batches. All are measured in turn,
ten times, and the medians compared. benchmarks/README.md says more.
"""

import logging
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import torch
from common import at_least_two_cores, data_host, use, write_results
from torch.utils.data import DataLoader, Dataset

from dataset import MnistDataset
from feed import RemoteDataset

TIMES, SECONDS, WARM_UP = 10, 3.0, 5  # measured each time; batches
BATCH_SIZE, AUGMENT = 128, 2
OURS, DATALOADER, RAY = "data host of this loader", "DataLoader", "Ray Data"


def make_dataset() -> MnistDataset:
    """Noise in MNIST's format, augmented as in the notebook."""
    with tempfile.TemporaryDirectory() as folder:
        for name, shape in {"images-idx3": (6000, 28, 28), "labels-idx1": (6000,)}.items():
            sizes = b"".join(size.to_bytes(4, "big") for size in shape)
            values = torch.randint(10, shape, dtype=torch.uint8).numpy().tobytes()
            data = (0x0800 + len(shape)).to_bytes(4, "big") + sizes + values
            Path(folder, f"train-{name}-ubyte").write_bytes(data)
        return MnistDataset(folder, augment=AUGMENT)


def prepare_remotely(address: str) -> Iterator:
    use(address)
    yield from batches_of(RemoteDataset(make_dataset()))


def prepare_with_dataloader() -> Iterator:
    yield from batches_of(make_dataset())


def batches_of(dataset: Dataset) -> Iterator:
    options = {"shuffle": True, "drop_last": True, "persistent_workers": True, "num_workers": 1}
    options["multiprocessing_context"] = "fork"  # not as this process was started
    loader = DataLoader(dataset, BATCH_SIZE, **options)
    while True:
        yield from loader


class Augment:
    """What Ray Data maps over the samples' numbers."""

    def __init__(self):
        torch.set_num_threads(1)  # as in a DataLoader's workers
        self.dataset = make_dataset()

    def __call__(self, numbers: dict) -> dict:
        images, labels = zip(*(self.dataset[n % 6000] for n in numbers["id"]), strict=True)
        return {"images": torch.stack(images).numpy(), "labels": torch.tensor(labels).numpy()}


def prepare_with_ray() -> Iterator:
    import ray

    logging.disable(logging.WARNING)  # what Ray Data says is no result
    cores = len(os.sched_getaffinity(0))
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # Ray's own processes import from there
    # One more than there are: reading, too, must be let go on beside the actors.
    ray.init(
        num_cpus=cores + 1, include_dashboard=False, log_to_driver=False, logging_level="error"
    )
    ray.data.DataContext.get_current().enable_progress_bars = False
    ray.cloudpickle.register_pickle_by_value(sys.modules[Augment.__module__])  # it is a program
    numbers = ray.data.range(10_000_000, override_num_blocks=10_000)
    batches = numbers.map_batches(
        Augment, batch_size=BATCH_SIZE, compute=ray.data.ActorPoolStrategy(size=cores)
    )
    for batch in batches.iter_torch_batches(batch_size=BATCH_SIZE, prefetch_batches=2):
        yield batch["images"], batch["labels"]


def measure(pipe: Connection, core: int, prepare: Callable, *arguments) -> None:
    """A consumer's process: whenever asked to, measure samples per second."""
    os.sched_setaffinity(0, {core})
    batches = prepare(*arguments)
    while pipe.recv():
        for _ in range(WARM_UP):
            next(batches)
        samples, start = 0, time.perf_counter()
        while (seconds := time.perf_counter() - start) < SECONDS:
            samples += len(next(batches)[0])
        pipe.send(samples / seconds)
    batches.close()
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()
    os._exit(0)


def measure_in_turn(ways: dict[str, tuple]) -> dict[str, list[float]]:
    """Return samples per second, each time; ways: core, function and its arguments."""
    found, pipes, processes = {way: [] for way in ways}, {}, []
    spawn = multiprocessing.get_context("spawn")
    try:
        for way, how in ways.items():
            pipes[way], its = spawn.Pipe()
            processes.append(spawn.Process(target=measure, args=(its, *how)))
            processes[-1].start()
            its.close()  # so that its end is noticed here
        for _ in range(TIMES):
            for way, pipe in pipes.items():
                pipe.send(True)
                found[way].append(pipe.recv())
        for pipe in pipes.values():
            pipe.send(False)
        for process in processes:
            process.join()
    finally:  # else Python would wait for them
        for process in processes:
            process.terminate()
            process.join()
    return found


def main() -> None:
    """Measure; print a table; fail if a target is missed."""
    first, *_, last = at_least_two_cores()
    with data_host(1, "taskset", "--cpu-list", str(first), sys.executable) as (address, _):
        found = measure_in_turn(
            {OURS: (last, prepare_remotely, address), DATALOADER: (first, prepare_with_dataloader)}
        )
    with tempfile.TemporaryDirectory() as folder:
        os.environ["RAY_TMPDIR"] = folder  # Ray does not remove what it writes there
        # By itself, since its own processes are never quite idle.
        found |= measure_in_turn({RAY: (first, prepare_with_ray)})

    medians = {way: median(values) for way, values in found.items()}
    print(f"\nSamples per second, prepared on one core of this machine, medians of {TIMES}:\n")
    print("| | samples per second |\n|---|---|")
    for way, value in medians.items():
        print(f"| {way} | {value:.0f} |")
    missed = []
    for peer, least in {DATALOADER: 0.95, RAY: 1.0}.items():
        ratio = medians[OURS] / medians[peer]
        print(f"{OURS} / {peer}: {ratio:.2f} (target: {least} or more)")
        missed += [peer] if ratio < least else []
    write_results("pipeline", found)
    if missed:
        sys.exit(f"Targets missed: {missed}")


if __name__ == "__main__":
    main()
