"""What the start of an epoch costs, when the Dataset is large, and what a data host holds of it.

    python benchmarks/epoch_start.py 8          with so many ranks; 1 if none are given

The Datasets: 1.28 million paths with their classes, as torchvision's ImageFolder has them of
ImageNet, and a tensor of 1 GB. Each rank has a DataLoader with 4 workers, with a data host, which
has 4 workers too, and without. Each rank holds the Dataset, as with torchrun, and with data hosts
each of its workers makes sure that they have it: 8 ranks take about 12 GB.
"""

import multiprocessing
import sys
import time
from multiprocessing.connection import Connection
from statistics import mean

import psutil
import torch
from common import cpu_seconds, data_host, family, table, use, write_results
from torch.utils.data import DataLoader, Dataset

from feed import RemoteDataset

NUM_WORKERS, WORKERS = 4, 4  # of a DataLoader; of the data host
EPOCHS = 2
MOST_GB = 2.0  # that a data host may have in memory for a Dataset of 1 GB


class Paths(Dataset):
    """As ImageFolder of ImageNet: a list of pairs."""

    def __init__(self):
        folder, images = "/opt/ml/input/data/training/n{0:08}/n{0:08}_{1}.JPEG", range(1281)
        self.samples = [(folder.format(n, image), n) for n in range(1000) for image in images]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> int:
        return self.samples[index][1]


class Images(Dataset):
    """A tensor of 1 GB."""

    def __init__(self):
        self.images = torch.full((10_000, 100_000), 7, dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.images[index, :10]


def train(address: str, kind: type[Dataset], pipe: Connection) -> None:
    """A rank: whenever asked to, begin an epoch, and say what that has cost."""
    dataset, me = kind(), psutil.Process()
    if address:
        use(address)
        dataset = RemoteDataset(dataset)
    loader = DataLoader(dataset, 64, num_workers=NUM_WORKERS, multiprocessing_context="fork")
    pipe.send("ready")
    while pipe.recv():
        start, before = time.perf_counter(), cpu_seconds([me])
        batches = iter(loader)
        for _ in range(NUM_WORKERS):  # one of each worker
            next(batches)
        found = {
            "seconds": time.perf_counter() - start,
            "CPU s, training process": cpu_seconds([me]) - before,
            "CPU s, its workers": cpu_seconds(me.children()),
            "private MB, training process": me.memory_full_info().uss / 1e6,
            "private MB, its workers": sum(p.memory_full_info().uss for p in me.children()) / 1e6,
        }
        pipe.send(found)
        pipe.recv()  # the others' memory is measured while these workers are there
        del batches


def measure(address: str, kind: type[Dataset], ranks: int) -> list[dict[str, float]]:
    """Return what the start of each epoch has cost: means of the ranks."""
    context, found = multiprocessing.get_context("forkserver"), []
    pipes = [context.Pipe() for _ in range(ranks)]
    processes = [context.Process(target=train, args=(address, kind, its)) for _, its in pipes]
    try:
        for process, (ours, _) in zip(processes, pipes, strict=True):
            process.start()
            ours.recv()
        for _ in range(EPOCHS):
            for ours, _ in pipes:
                ours.send(True)
            costs = [ours.recv() for ours, _ in pipes]
            for ours, _ in pipes:
                ours.send(True)
            found.append({what: mean(cost[what] for cost in costs) for what in costs[0]})
    finally:
        for process in processes:
            process.kill()
            process.join()
    return found


def main() -> None:
    """Measure; print tables; fail if the target is missed."""
    ranks, results, missed = int((sys.argv[1:] or ["1"])[0]), {}, []
    for kind in (Paths, Images):
        rows = []
        with data_host(WORKERS) as (address, host):
            for way, where in (("no data host", ""), ("a data host", address)):
                for number, costs in enumerate(measure(where, kind, ranks), 1):
                    results[f"{kind.__name__}, {way}, epoch {number}"] = costs
                    heads, first = " | ".join(costs), costs["seconds"]
                    values = (f"{value:.0f}" for value in [*costs.values()][-2:])
                    cpu = (f"{value:.2f}" for value in [*costs.values()][1:-2])
                    rows.append((way, number, f"{first:.2f}", *cpu, *values))
            held = sum(process.memory_full_info().pss for process in family(host)) / 1e9
        results[f"{kind.__name__}, GB of the data host"] = held
        print(f"\n{kind.__doc__} Means of {ranks} ranks:")
        table(f"way | epoch | {heads}", rows)
        print(f"The data host has {held:.2f} GB in memory, with {WORKERS} workers.", flush=True)
        missed += [kind.__name__] if held > MOST_GB else []
    write_results(f"epoch_start_{ranks}", results)
    if missed:
        sys.exit(f"Target missed, {MOST_GB} GB: {missed}")


if __name__ == "__main__":
    main()
