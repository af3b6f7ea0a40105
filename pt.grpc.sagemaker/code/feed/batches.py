"""Which samples are in which batch, and with which random numbers: the same on every machine.

A batch is a pure function of its `BatchKey`, so any process can prepare it, and prepare it again.
(Two models of CPU may round differently.) The keys come from any batch sampler:

    keys = BatchKeys(BatchSampler(sampler, batch_size=64, drop_last=True), seed=0)

and the batches from this machine, or, with `client.RemoteBatches`, from data hosts:

    loader = DataLoader(SeededBatches(dataset), sampler=keys, batch_size=None, collate_fn=as_is)
    for epoch in range(3):
        keys.set_epoch(epoch)
        for batch in loader:
            ...
"""

import contextlib
import hashlib
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, default_collate

NOT_BATCHED = (
    "These are batches already, which DataLoader would put into batches again: give it "
    "batch_size=None and collate_fn=as_is."
)


class BatchKey(NamedTuple):
    """All that it takes to prepare one batch."""

    seed: int
    epoch: int
    number: int  # of the batch, counted from the epoch's beginning, also after resuming
    indices: list[int]


class BatchKeys(Sampler):
    """The keys of an epoch's batches, one after the other.

    batch_sampler: yields lists of indices and has a length: torch's BatchSampler around any
    sampler, one of yours, or a list of lists. Before each epoch, `set_epoch` is called on it and on
    its sampler; one that has none gets a newly seeded `generator`. Samplers that do not share the
    samples out among ranks, such as WeightedRandomSampler, need another seed on each rank.
    """

    def __init__(self, batch_sampler: Iterable[list[int]], seed: int = 0):
        if not 0 <= seed < 2**63:
            raise ValueError(f"seed must be from 0 to 2**63 - 1, but is {seed}")
        self.batch_sampler, self.seed = batch_sampler, seed
        self.epoch = self.first_batch = 0

    def set_epoch(self, epoch: int, first_batch: int = 0) -> None:
        """Choose the epoch of the next iteration; to resume, the number of its first batch."""
        if epoch < 0 or first_batch < 0:
            raise ValueError(f"epoch {epoch} and batch {first_batch} must not be negative")
        self.epoch, self.first_batch = epoch, first_batch

    def __len__(self) -> int:
        return len(self.batch_sampler)  # the whole epoch's, which torch expects also when resumed

    def __iter__(self) -> Iterator[BatchKey]:
        sampler = self.batch_sampler
        while sampler is not None:
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(self.epoch)
            elif hasattr(sampler, "generator"):
                seed = int.from_bytes(digest(self.seed, self.epoch)[:8], "little")
                sampler.generator = torch.Generator().manual_seed(seed)
            sampler = getattr(sampler, "sampler", None)
        for number, indices in enumerate(self.batch_sampler):
            if not isinstance(indices, Iterable):
                raise TypeError(
                    "BatchKeys needs a batch sampler, as BatchSampler(sampler, 64, True)"
                )
            if number >= self.first_batch:
                yield BatchKey(self.seed, self.epoch, number, [int(index) for index in indices])


class SeededBatches(Dataset):
    """A Dataset of yours as a Dataset of whole batches, looked up by BatchKey.

    Samples are fetched as DataLoader does (`__getitems__` where there is one) and joined by
    `collate_fn`, with random numbers that depend on the key alone. Raises TypeError unless
    `dataset` is map-style: others cannot be asked for a batch again.
    """

    def __init__(self, dataset: Dataset, collate_fn: Callable[[list], Any] | None = None):
        has_all = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
        if isinstance(dataset, IterableDataset) or not has_all:
            name = type(dataset).__name__
            raise TypeError(f"{name} is no map-style Dataset, with __getitem__ and __len__")
        self.dataset, self.collate_fn = dataset, collate_fn or default_collate

    def __len__(self) -> int:
        return len(self.dataset)  # samples, as scripts expect of a DataLoader's dataset

    def __getitem__(self, key: BatchKey) -> Any:
        if not isinstance(key, BatchKey):
            raise TypeError("SeededBatches needs DataLoader(..., sampler=BatchKeys(batch_sampler))")
        with seeded(key):
            if hasattr(self.dataset, "__getitems__"):
                samples = self.dataset.__getitems__(key.indices)
            else:
                samples = [self.dataset[index] for index in key.indices]
            return self.collate_fn(samples)

    def __getitems__(self, keys: list[BatchKey]) -> None:
        """Raise TypeError: torch calls this only to make batches of several items."""
        raise TypeError(NOT_BATCHED)


def as_is(batch: Any) -> Any:
    """Return the batch. torch's own way makes lists of its tuples, and tensors of its arrays."""
    return batch


def digest(*values: Any) -> bytes:
    """Return 32 bytes that depend on the values only."""
    return hashlib.sha256(repr(values).encode()).digest()


@contextlib.contextmanager
def seeded(key: BatchKey) -> Iterator[None]:
    """Seed the CPU random generators of Python, NumPy and torch; restore them afterwards.

    Without workers this runs in the training process, whose own random numbers must not change.
    One thread, as in a DataLoader's workers, because more may add up in another order.
    """
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    threads, seed = torch.get_num_threads(), digest(*key)
    try:
        torch.set_num_threads(1)
        random.seed(seed)
        np.random.seed(np.frombuffer(seed, np.uint32))
        torch.default_generator.manual_seed(int.from_bytes(seed[:8], "little"))  # CPU only
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        torch.set_num_threads(threads)
