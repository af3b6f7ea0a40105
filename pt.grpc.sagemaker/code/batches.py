"""Which samples are in which batch, and with which random numbers: the same on every machine.

Batch i of a rank in an epoch is a pure function of a `BatchPlan`, the epoch and i. The samples
and their order are those of `torch.utils.data.DistributedSampler` and `DataLoader`; the random
generators of Python, NumPy and torch are seeded anew for each batch, from (seed, epoch, rank, the
batch's place in the epoch). So any process can prepare any batch, and a run can resume at any step,
on more or fewer ranks too. (Two models of CPU may still round differently: for equality to the last
bit, use one.)

`LocalLoader` prepares batches on this machine, `feed_client.FeedLoader` has data hosts do it; they
are used alike:

    loader = LocalLoader(dataset, batch_size=64, shuffle=True, num_workers=4)
    for epoch in range(3):
        loader.set_epoch(epoch)
        for batch in loader:
            ...
"""

import contextlib
import multiprocessing
import multiprocessing.util
import os
import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    default_collate,
)


@dataclass(frozen=True)
class BatchPlan:
    """How an epoch is cut into batches; `len()` is the number of this rank's batches.

    An epoch has one order of all samples, whatever the number of ranks: each step takes the next
    `world_size * batch_size` of them, the ranks in turns. So a plan can begin anywhere in an epoch
    that another world size or batch size has begun. Raises ValueError for numbers that make no
    sense together.
    """

    dataset_length: int  # samples
    batch_size: int  # samples per batch of one rank
    shuffle: bool = False
    drop_last: bool = False  # as both DistributedSampler and DataLoader understand it
    seed: int = 0
    rank: int = 0
    world_size: int = 1
    first_sample: int = 0  # samples of the epoch, of all ranks, that come before batch 0

    def __post_init__(self) -> None:
        rules = {
            "the dataset must hold at least one sample": self.dataset_length >= 1,
            "batch_size must be at least 1": self.batch_size >= 1,
            "seed must be from 0 to 2**63 - 1": 0 <= self.seed < 2**63,
            "rank must be from 0 to world_size - 1": 0 <= self.rank < self.world_size,
            "first_sample must be from 0 to dataset_length": (
                0 <= self.first_sample <= self.dataset_length
            ),
        }
        for rule, is_kept in rules.items():
            if not is_kept:
                raise ValueError(f"{rule}, but this is {self}")

    def __len__(self) -> int:
        return self._share(self.world_size * self.batch_size)

    def _share(self, parts: int) -> int:
        """Return how many of the samples each of `parts` gets: rounded down, or padded."""
        samples = self.dataset_length - self.first_sample
        return samples // parts if self.drop_last else -(-samples // parts)

    def order(self, epoch: int) -> np.ndarray:
        """Return this rank's samples in `epoch`: their indices, int64, of shape (samples,)."""
        everyone = DistributedSampler(
            range(self.dataset_length), num_replicas=1, rank=0, shuffle=self.shuffle, seed=self.seed
        )
        everyone.set_epoch(epoch)
        everyones_order = np.fromiter(everyone, np.int64, self.dataset_length)
        positions = np.arange(self._share(self.world_size)) * self.world_size + self.rank
        # Past its end, the order begins again: DistributedSampler's padding.
        return everyones_order[(self.first_sample + positions) % self.dataset_length]

    def keys(self, epoch: int) -> Iterator["BatchKey"]:
        """Yield the keys of this rank's batches in `epoch`, one after the other."""
        order = self.order(epoch)
        for number in range(len(self)):
            indices = order[number * self.batch_size : (number + 1) * self.batch_size].tolist()
            before = self.samples_before(number)
            yield BatchKey(self.seed, epoch, self.rank, before, indices)

    def samples_before(self, number: int) -> int:
        """Return how many samples of the epoch, of all ranks, come before batch `number`.

        Before batch `len(self)`, the end: all, those too that `drop_last` leaves out.
        """
        if number == len(self):
            return self.dataset_length
        return self.first_sample + number * self.world_size * self.batch_size


class BatchKey(NamedTuple):
    """All that it takes to prepare one batch."""

    seed: int
    epoch: int
    rank: int
    samples_before: int  # the batch's place in its epoch, whatever batch its plan began with
    indices: list[int]


class KeySampler:
    """A DataLoader's sampler: BatchKeys, set before each iteration."""

    def __init__(self) -> None:
        self.keys: Iterator[BatchKey] = iter(())

    def __iter__(self) -> Iterator[BatchKey]:
        return self.keys


class SeededBatches(Dataset):
    """A user's Dataset as a Dataset of whole batches, looked up by BatchKey.

    Samples are fetched as DataLoader does (`__getitems__` where there is one) and joined by
    `collate_fn`, all under the batch's own seed. Raises TypeError unless `dataset` is map-style.
    """

    def __init__(self, dataset: Dataset, collate_fn: Callable[[list], Any] | None = None):
        if isinstance(dataset, IterableDataset):
            raise TypeError(
                f"{type(dataset).__name__} is an IterableDataset, which only its own process can "
                "step through: batches could be neither shared among hosts nor asked for again. "
                "Use a Dataset with __getitem__ and __len__."
            )
        if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
            raise TypeError(f"{type(dataset).__name__} lacks __getitem__ or __len__.")
        self.dataset = dataset
        self.collate_fn = collate_fn or default_collate

    def __getitem__(self, key: BatchKey) -> Any:
        with _seeded(key):
            if hasattr(self.dataset, "__getitems__"):
                samples = self.dataset.__getitems__(key.indices)
            else:
                samples = [self.dataset[index] for index in key.indices]
            return self.collate_fn(samples)


@contextlib.contextmanager
def _seeded(key: BatchKey) -> Iterator[None]:
    """Seed all CPU random generators for one batch; give them back as they were.

    Without workers this runs in the training process, whose own random numbers must not change.
    One thread, as in a DataLoader's workers, because more may add up in another order.
    """
    threads = torch.get_num_threads()
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    seeds = np.random.SeedSequence([key.seed, key.epoch, key.rank, key.samples_before])
    python_seed, numpy_seed, torch_seed = seeds.generate_state(3)
    try:
        torch.set_num_threads(1)
        random.seed(int(python_seed))
        np.random.seed(numpy_seed)
        torch.default_generator.manual_seed(int(torch_seed))  # not torch.manual_seed: CPU only
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        torch.set_num_threads(threads)


def end_with_parent() -> None:
    """Let this worker process end when the one that uses it does, however that ends.

    DataLoader's own check does not help a worker that waits to hand a large batch over.
    """

    def watch() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def leave_process_group(worker_id: int) -> None:
    """Let this worker process serve until its rank ends.

    SIGTERM is for the rank, which may need more batches until all ranks have stopped after the same
    step; but torchrun sends it to the rank's whole process group.
    """
    os.setpgid(0, 0)
    end_with_parent()


class EpochLoader(ABC):
    """A rank's batches, epoch by epoch, resumable: what LocalLoader and FeedLoader share."""

    def __init__(self, plan: BatchPlan):
        self.plan = plan  # of a whole epoch
        self._epoch = 0
        self._next_plan = plan  # of the next iteration, which may begin within its epoch
        self._samples_done = 0  # of all ranks, up to the batch that was handed out last

    @property
    def dataset_length(self) -> int:
        """Samples in the whole dataset."""
        return self.plan.dataset_length

    def __len__(self) -> int:
        return len(self.plan)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration; a loaded state stays if it is of this epoch."""
        if epoch < 0:
            raise ValueError(f"epoch must be 0 or more, but is {epoch}")
        if epoch != self._epoch:
            self._epoch, self._next_plan, self._samples_done = epoch, self.plan, 0

    def state_dict(self) -> dict[str, Any]:
        """Return where the iteration is, counting the batch handed out last as done on all ranks.

        It is the same on all ranks, which take their steps together.
        """
        return {"epoch": self._epoch, "samples_done": self._samples_done, **self._order_settings()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration continue where `state` was taken, on whichever number of ranks.

        It goes over the samples that were left; with the same world size and batch size, its
        batches are those of the run that was interrupted. Raises ValueError when the state was
        taken with another dataset length, shuffle or seed: its place would mean other samples here.
        """
        own = self._order_settings()
        theirs = {name: state.get(name) for name in own}
        if theirs != own:
            raise ValueError(f"the state is of a loader with {theirs}; this is {own}")
        self._next_plan = replace(self.plan, first_sample=state["samples_done"])
        self._epoch, self._samples_done = state["epoch"], state["samples_done"]

    def _order_settings(self) -> dict[str, Any]:
        """Return what the order of all samples depends on, besides the epoch."""
        return {name: getattr(self.plan, name) for name in ("dataset_length", "shuffle", "seed")}

    def __iter__(self) -> Iterator[Any]:
        plan, self._next_plan = self._next_plan, self.plan
        self._samples_done = plan.first_sample
        with contextlib.closing(self._batches(plan, self._epoch)) as batches:
            for number, batch in zip(range(len(plan)), batches, strict=True):
                self._samples_done = plan.samples_before(number + 1)
                yield batch

    @abstractmethod
    def _batches(self, plan: BatchPlan, epoch: int) -> Iterator[Any]:
        """Yield the batches of `plan` in `epoch`, in order; closing it frees what it holds."""


class LocalLoader(EpochLoader):
    """Prepares this rank's batches on this machine, in `num_workers` processes (0: in this one)."""

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        shuffle: bool = False,
        drop_last: bool = False,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        num_workers: int = 0,
        collate_fn: Callable[[list], Any] | None = None,
        pin_memory: bool = False,
    ):
        batches = SeededBatches(dataset, collate_fn)
        super().__init__(
            BatchPlan(len(dataset), batch_size, shuffle, drop_last, seed, rank, world_size)
        )
        if num_workers:
            multiprocessing.util.get_temp_dir()  # else each makes one, left if it is killed
        self._loader = DataLoader(
            batches,
            sampler=KeySampler(),
            batch_size=None,  # our "samples" are batches already
            collate_fn=_unchanged,  # the default would turn NumPy arrays into tensors
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            worker_init_fn=leave_process_group,
            pin_memory=pin_memory,
            generator=torch.Generator(),  # else each epoch draws from the training's own generator
        )

    def _batches(self, plan: BatchPlan, epoch: int) -> Iterator[Any]:
        self._loader.sampler.keys = plan.keys(epoch)
        yield from self._loader


def _unchanged(batch: Any) -> Any:
    return batch
