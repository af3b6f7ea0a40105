"""Which samples are in which batch, and with which random numbers: the same on every machine.

Batch i of a rank in an epoch is a pure function of a `BatchPlan`, the epoch and i. The samples
and their order are those of `torch.utils.data.DistributedSampler` and `DataLoader`; the random
generators of Python, NumPy and torch are seeded anew for each batch, from (seed, epoch, rank, i).
So any process can prepare any batch, and a run can resume at any step.  (Two models of CPU may
still round differently: for equality to the last bit, use one.)

`LocalLoader` prepares batches on this machine, `feed_client.FeedLoader` has data hosts do it; they
are used alike:

    loader = LocalLoader(dataset, batch_size=64, shuffle=True, num_workers=4)
    for epoch in range(3):
        loader.set_epoch(epoch)
        for batch in loader:
            ...
"""

import contextlib
import random
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
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
    """How a dataset is cut into batches; `len()` is the number of batches per epoch of this rank.

    Raises ValueError when the numbers make no sense together.
    """

    dataset_length: int  # samples
    batch_size: int  # samples per batch of one rank
    shuffle: bool = False
    drop_last: bool = False  # as both DistributedSampler and DataLoader understand it
    seed: int = 0
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        rules = {
            "the dataset must hold at least one sample": self.dataset_length >= 1,
            "batch_size must be at least 1": self.batch_size >= 1,
            "seed must be from 0 to 2**63 - 1": 0 <= self.seed < 2**63,
            "rank must be from 0 to world_size - 1": 0 <= self.rank < self.world_size,
        }
        for rule, is_kept in rules.items():
            if not is_kept:
                raise ValueError(f"{rule}, but this is {self}")

    def __len__(self) -> int:
        samples = len(self.sampler(epoch=0))
        return samples // self.batch_size if self.drop_last else -(-samples // self.batch_size)

    def sampler(self, epoch: int) -> DistributedSampler:
        """Return torch's sampler of this rank's samples in `epoch`."""
        sampler = DistributedSampler(
            range(self.dataset_length),
            num_replicas=self.world_size,
            rank=self.rank,
            shuffle=self.shuffle,
            seed=self.seed,
            drop_last=self.drop_last,
        )
        sampler.set_epoch(epoch)
        return sampler


class BatchKey(NamedTuple):
    """All that it takes to prepare one batch."""

    seed: int
    epoch: int
    rank: int
    number: int  # of the batch in its epoch
    indices: list[int]


class BatchKeys:
    """A DataLoader's sampler: the keys of some batches of an epoch, set before each iteration."""

    def __init__(self) -> None:
        self._keys: Iterator[BatchKey] = iter(())

    def choose(self, plan: BatchPlan, epoch: int, numbers: range) -> None:
        """Set what the next iteration goes over."""
        order = array("q", plan.sampler(epoch))  # 8 bytes per sample, where a list would take 40
        size = plan.batch_size
        self._keys = (
            BatchKey(plan.seed, epoch, plan.rank, i, order[i * size : (i + 1) * size].tolist())
            for i in numbers
        )

    def __iter__(self) -> Iterator[BatchKey]:
        return self._keys


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
    seeds = np.random.SeedSequence([key.seed, key.epoch, key.rank, key.number])
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


def key_loader(batches: SeededBatches, num_workers: int, **options: Any) -> DataLoader:
    """Return a DataLoader of `batches`, its sampler a BatchKeys; its workers outlive an epoch."""
    return DataLoader(
        batches,
        sampler=BatchKeys(),
        batch_size=None,  # our "samples" are batches already
        collate_fn=_unchanged,  # the default would turn NumPy arrays into tensors
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        generator=torch.Generator(),  # else each epoch draws from the training's own generator
        **options,
    )


def _unchanged(batch: Any) -> Any:
    return batch


class EpochLoader(ABC):
    """A rank's batches, epoch by epoch, resumable: what LocalLoader and FeedLoader share."""

    def __init__(self, plan: BatchPlan):
        self.plan = plan
        self._epoch = 0
        self._resume_at = 0  # where the next iteration starts
        self._next_batch = 0  # after the batch that was handed out last

    @property
    def dataset_length(self) -> int:
        """Samples in the whole dataset."""
        return self.plan.dataset_length

    def __len__(self) -> int:
        return len(self.plan)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration; a loaded state stays if it is of this epoch."""
        if epoch != self._epoch:
            self._epoch, self._resume_at, self._next_batch = epoch, 0, 0

    def state_dict(self) -> dict[str, Any]:
        """Return where the iteration is, counting the batch handed out last as done."""
        # One rank saves the checkpoint that all ranks resume from: so the rank is left out.
        plan = asdict(replace(self.plan, rank=0))
        return {"epoch": self._epoch, "next_batch": self._next_batch, "plan": plan}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration continue where `state` was taken.

        Raises ValueError when it was taken with another dataset length, batch size, seed, world
        size, ...: its place would mean other samples here.
        """
        own_plan = self.state_dict()["plan"]
        if state["plan"] != own_plan:
            raise ValueError(f"the state is of a loader with {state['plan']}; this is {own_plan}")
        self._epoch = state["epoch"]
        self._resume_at = self._next_batch = state["next_batch"]

    def __iter__(self) -> Iterator[Any]:
        numbers = range(self._resume_at, len(self))
        self._resume_at, self._next_batch = 0, numbers.start
        with contextlib.closing(self._batches(self._epoch, numbers)) as batches:
            for number, batch in zip(numbers, batches, strict=True):
                self._next_batch = number + 1
                yield batch

    @abstractmethod
    def _batches(self, epoch: int, numbers: range) -> Iterator[Any]:
        """Yield the batches `numbers` of `epoch`, in order; closing it frees what it holds."""


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
        self._loader = key_loader(batches, num_workers, pin_memory=pin_memory)

    def _batches(self, epoch: int, numbers: range) -> Iterator[Any]:
        self._loader.sampler.choose(self.plan, epoch, numbers)
        yield from self._loader
