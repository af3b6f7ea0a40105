"""Prepare samples: the same ones whichever process does it, on whichever host.

The random numbers of a sample depend on its `Chunk` and its place there alone: before each sample
the generators of Python, NumPy and torch are seeded, and those that the Dataset holds.
"""

import contextlib
import os
import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch._utils import ExceptionWrapper
from torch.utils._pytree import tree_flatten
from torch.utils.data import IterableDataset
from torch.utils.data._utils import worker as torch_worker

from feed.wire import encode, is_plain


class Asker(NamedTuple):
    """Who asks, as far as a Dataset can tell."""

    ranks: tuple[int, int] | None = None  # torch.distributed's rank and world size, if initialised
    environment: dict[str, str] = {}  # RANK and WORLD_SIZE
    init_fn: bytes = b""  # the DataLoader's pickled worker_init_fn


class Chunk(NamedTuple):
    """Some samples of a batch, and all that they depend on."""

    indices: list = []  # whatever the sampler yields
    start: int = 0  # the first one's place in the batch
    batch: int = 0  # its number in the epoch
    seed: tuple[int, ...] = ()  # of the epoch
    asker: Asker = Asker()


def check_is_map_style(dataset: Any) -> None:
    """Raise TypeError if it is not."""
    name = type(dataset).__name__
    if isinstance(dataset, IterableDataset):
        raise TypeError(
            f"a callable has made {name}: give RemoteDataset that IterableDataset itself"
        )
    if not hasattr(dataset, "__getitem__"):
        raise TypeError(
            f"{name} is no Dataset: neither map-style, with __getitem__ and __len__, nor an "
            "IterableDataset"
        )


def make(given: Callable) -> Any:
    """Return the Dataset that a callable makes, the same one in each process."""
    begin(None, [], Chunk(), 0, None)
    dataset = given()
    check_is_map_style(dataset)
    return dataset


def prepare(
    dataset: Any, generators: list, chunk: Chunk, collate_fn: Callable | None = None
) -> Any:
    """Return the samples of a chunk as a list, or what `collate_fn` makes of them.

    generators: that the Dataset holds.
    """
    if hasattr(dataset, "__getitems__"):
        begin(dataset, generators, chunk, chunk.start, chunk.indices)
        samples = dataset.__getitems__(chunk.indices)
    else:
        samples = []
        for place, index in enumerate(chunk.indices, chunk.start):
            begin(dataset, generators, chunk, place, index)
            samples.append(dataset[index])
    if not collate_fn:
        return samples
    begin(dataset, generators, chunk, -1, chunk.indices)
    return collate_fn(samples)


def begin(dataset: Any, generators: list, chunk: Chunk, place: int, index: Any) -> None:
    """Seed all generators for what comes next, and let get_worker_info() tell that seed."""
    random.seed(repr((chunk.seed, chunk.batch, place, index)))
    seed = random.getrandbits(63)  # torch's are signed
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed GPUs, too
    for number, generator in enumerate(generators, 1):
        if isinstance(generator, np.random.Generator):
            bits = generator.bit_generator
            bits.state = type(bits)([seed, number]).state
        elif isinstance(generator, torch.Generator):
            generator.manual_seed(seed ^ number)
        else:  # random.Random, np.random.RandomState
            generator.seed(number + seed % 2**31)
    torch_worker._worker_info = torch_worker.WorkerInfo(
        id=0, num_workers=1, seed=seed, dataset=dataset
    )


@contextlib.contextmanager
def undisturbed(generators: list) -> Iterator[None]:
    """Prepare samples in a process of the training script, whose random numbers shall not change.

    One thread, as on data hosts, because more may add up in another order.
    """
    held = [*map(state_of, generators)]
    held += [(random.setstate, random.getstate()), (np.random.set_state, np.random.get_state())]
    held.append((torch.set_rng_state, torch.get_rng_state()))
    info, threads = torch_worker._worker_info, torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(threads)
        torch_worker._worker_info = info
        for put_back, state in held:
            put_back(state)


def state_of(generator: Any) -> tuple[Callable, Any]:
    """Return what puts a generator's state back, and its state."""
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        return lambda state: setattr(bits, "state", state), bits.state
    get = getattr(generator, "getstate", None) or generator.get_state
    return getattr(generator, "setstate", None) or generator.set_state, get()


def stand_in_for_ranks() -> Callable[[Asker], None]:
    """Have torch.distributed tell a Dataset on a data host the rank that asks for its samples.

    To be called before the Dataset's modules are imported. Returns what to call for each chunk.
    """
    asking: list[tuple[int, int] | None] = [None]
    dist.is_initialized = lambda: asking[0] is not None
    dist.get_rank = lambda group=None: asking[0][0] if asking[0] else -1
    dist.get_world_size = lambda group=None: asking[0][1] if asking[0] else -1

    def set_ranks(asker: Asker) -> None:
        asking[0] = asker.ranks
        for name in ("RANK", "WORLD_SIZE"):
            os.environ.pop(name, None)
        os.environ.update(asker.environment)

    return set_ranks


def summary(dataset: Any, generators: list) -> tuple[int | None, bool, list[str], list[float]]:
    """Return what is to be the same on all hosts, and what the training process asks of a Dataset.

    Its length, whether it has `__getitems__`, facts of some samples, and means of their numbers.
    """
    is_whole = hasattr(dataset, "__getitems__")
    if not hasattr(dataset, "__len__"):
        return None, is_whole, [], []
    indices = [*range(0, len(dataset), max(1, len(dataset) // 3))]
    leaves, structure = tree_flatten(prepare(dataset, generators, Chunk(indices)))
    facts, means = [str(structure)], []
    for leaf in leaves:
        if isinstance(leaf, (int, str)):
            facts.append(repr(leaf))
            continue
        facts.append(f"{type(leaf)} {getattr(leaf, 'dtype', '')} {getattr(leaf, 'shape', '')}")
        if isinstance(leaf, torch.Tensor) and is_plain(leaf):
            leaf = leaf.double().numpy()
        if isinstance(leaf, (float, np.ndarray)) and np.asarray(leaf).dtype.kind in "biuf":
            means.append(float(np.mean(leaf)))
    return len(dataset), is_whole, facts, means


def differ(one: tuple, other: tuple) -> bool:
    """Whether two summaries are of different Datasets. CPUs may round differently."""
    return one[:3] != other[:3] or not np.allclose(one[3], other[3], 1e-3, 1e-3, equal_nan=True)


def as_error(text: str = "") -> bytes:
    """Return the exception that is being handled, or a RuntimeError, as it travels."""
    wrapper, kind = ExceptionWrapper() if not text else None, RuntimeError
    if wrapper and issubclass(wrapper.exc_type, Exception):
        kind = wrapper.exc_type
    try:
        kind = encode(kind)[0]
    except Exception:  # such as a class within a function
        kind = encode(RuntimeError)[0]
    return encode((kind, text or wrapper.exc_msg))[0]


def raised_again(where: str, kind: bytes, text: str) -> Exception:
    """Return an exception of a data host as torch makes those of its workers."""
    wrapper = ExceptionWrapper.__new__(ExceptionWrapper)
    wrapper.exc_type, wrapper.exc_msg, wrapper.where = RuntimeError, text, where
    with contextlib.suppress(Exception):  # such as of a module that is not there
        wrapper.exc_type = pickle.loads(kind)
    try:
        wrapper.reraise()
    except Exception as error:
        return error
