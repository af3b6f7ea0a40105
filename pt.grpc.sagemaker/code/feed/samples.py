"""Prepares samples, which are the same in each process and on each host.

A sample's random numbers depend only on its `Chunk` and its place there. Before each sample, the
random generators of Python, NumPy and torch are seeded, and those that the Dataset holds.
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
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from feed.wire import encode, is_plain

# For the case that a version has moved a private part of torch.
USE_TESTED_TORCH = f"use a torch that feed was tested with, such as 2.13, not {torch.__version__}"


class Caller(NamedTuple):
    """What a Dataset can find out about who wants its samples, and who prepares them."""

    ranks: tuple[int, int] | None = None  # torch.distributed's rank and world size, if initialized
    environment: dict[str, str | None] = {}  # that differ here; None: removed
    dtype: torch.dtype = torch.float32  # torch's default
    pickled_init_fn: bytes = b""  # the DataLoader's worker_init_fn
    data_host: tuple[int, int] = (0, 1)  # number of the data host, and of how many
    data_worker: tuple[int, int] = (0, 1)  # number of the process there, and of how many


class Chunk(NamedTuple):
    """Some samples of a batch, and everything that they depend on."""

    indices: list = []  # whatever the sampler yields
    start: int = 0  # the first sample's place in the batch
    batch: int = 0  # the batch's number in the epoch
    seed: tuple[int, ...] = ()  # of the epoch
    caller: Caller = Caller()


def check_is_map_style(dataset: Any) -> None:
    """Raise TypeError if the Dataset is not map-style."""
    name = type(dataset).__name__
    if isinstance(dataset, IterableDataset):
        raise TypeError(
            f"the callable returned an IterableDataset ({name}): give RemoteDataset that one itself"
        )
    if not hasattr(dataset, "__getitem__"):
        raise TypeError(
            f"{name} is not a Dataset: it must be map-style, with __getitem__ and __len__, or an "
            "IterableDataset"
        )


def make_dataset(given: Callable) -> Any:
    """Return the Dataset that a callable makes, with the same random numbers in each process."""
    seed_rngs(None, {}, Chunk(), 0, None)
    dataset = given()
    check_is_map_style(dataset)
    return dataset


def prepare(dataset: Any, rngs: dict, chunk: Chunk, collate_fn: Callable | None = None) -> Any:
    """Return the samples of a chunk as a list, or what `collate_fn` makes of them.

    rngs: its random generators, as pickling.rngs_of returns them.
    """
    if hasattr(dataset, "__getitems__"):
        seed_rngs(dataset, rngs, chunk, chunk.start, chunk.indices)
        samples = dataset.__getitems__(chunk.indices)
    else:
        samples = []
        for place, index in enumerate(chunk.indices, chunk.start):
            seed_rngs(dataset, rngs, chunk, place, index)
            samples.append(dataset[index])
    if not collate_fn:
        return samples
    seed_rngs(dataset, rngs, chunk, -1, chunk.indices)
    return collate_fn(samples)


def seed_rngs(dataset: Any, rngs: dict, chunk: Chunk, place: Any, index: Any) -> None:
    """Seed all random generators for the next sample; get_worker_info() reports that seed, too."""
    random.seed(repr((chunk.seed, chunk.batch, place, index)))
    seed = random.getrandbits(63)  # torch's seeds are signed
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed GPUs, too
    for number, rng in rngs.items():
        if isinstance(rng, np.random.Generator):
            bits = rng.bit_generator
            bits.state = type(bits)([seed, number]).state
        elif isinstance(rng, torch.Generator):
            rng.manual_seed(seed ^ number)
        else:  # random.Random, np.random.RandomState
            rng.seed(number + seed % 2**31)
    worker, workers = chunk.caller.data_worker
    set_worker_info(
        torch_worker.WorkerInfo(id=worker, num_workers=workers, seed=seed, dataset=dataset)
    )


def initialize(dataset: Any, chunk: Chunk) -> None:
    """Call worker_init_fn in a process of a data host, with random numbers of its own."""
    [init_fn] = pickle.loads(chunk.caller.pickled_init_fn)
    seed_rngs(dataset, {}, chunk, "worker_init_fn", chunk.caller.data_worker)
    init_fn(chunk.caller.data_worker[0])


def set_worker_info(info: Any) -> None:
    """Have torch's get_worker_info() return this; raise RuntimeError if it does not."""
    torch_worker._worker_info = info
    if get_worker_info() is not info:
        raise RuntimeError(f"feed cannot set what get_worker_info() returns: {USE_TESTED_TORCH}")


@contextlib.contextmanager
def undisturbed(rngs: dict) -> Iterator[None]:
    """Keep the random state of the training script's process while it prepares samples itself.

    Uses one thread, as on data hosts, because several threads may add numbers in another order.
    """
    held = [*map(state_of, rngs.values())]
    held += [(random.setstate, random.getstate()), (np.random.set_state, np.random.get_state())]
    held.append((torch.set_rng_state, torch.get_rng_state()))
    info, threads = torch_worker._worker_info, torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(threads)
        set_worker_info(info)
        for put_back, state in held:
            put_back(state)


def state_of(rng: Any) -> tuple[Callable, Any]:
    """Return a function that restores a random generator's state, and the state."""
    if isinstance(rng, np.random.Generator):
        bits = rng.bit_generator
        return lambda state: setattr(bits, "state", state), bits.state
    get = getattr(rng, "getstate", None) or rng.get_state
    return getattr(rng, "setstate", None) or rng.set_state, get()


def stand_in_for_ranks() -> Callable[[Caller], None]:
    """Have torch.distributed report, on a data host, the rank that wants samples.

    The environment, and torch's default dtype, are that rank's, too. Call this before the Dataset's
    modules are imported. Returns a function to call for each chunk.
    """
    calling: list[tuple[int, int] | None] = [None]
    own, has = dict(os.environ), {}
    dist.is_initialized = lambda: calling[0] is not None
    dist.get_rank = lambda group=None: calling[0][0] if calling[0] else -1
    dist.get_world_size = lambda group=None: calling[0][1] if calling[0] else -1

    def set_ranks(caller: Caller) -> None:
        nonlocal has
        calling[0] = caller.ranks
        torch.set_default_dtype(caller.dtype)
        if caller.environment != has:
            wanted = own | caller.environment
            for name in (*has, *caller.environment):
                if wanted.get(name) is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = wanted[name]
            has = caller.environment

    return set_ranks


class Summary(NamedTuple):
    """What is known of a Dataset that a callable has made, and must be the same on all hosts."""

    length: int | None  # None without `__len__`
    takes_batches: bool  # whether it has `__getitems__`, so that batches are not divided
    kinds: list[str] = []  # types, dtypes and shapes in some samples
    means: list[float] = []  # of their parts

    def is_like(self, other: "Summary") -> bool:
        """Return whether both may be of the same Dataset. CPUs may round differently."""
        means = self.means, other.means
        return self[:3] == other[:3] and np.allclose(*means, 1e-3, 1e-3, equal_nan=True)


def summary(dataset: Any, rngs: dict) -> Summary:
    """Describe a Dataset by some of its samples."""
    takes_batches = hasattr(dataset, "__getitems__")
    if not hasattr(dataset, "__len__"):
        return Summary(None, takes_batches)
    indices = [*range(0, len(dataset), max(1, len(dataset) // 3))]
    leaves, structure = tree_flatten(prepare(dataset, rngs, Chunk(indices)))
    kinds, means = [str(structure)], []
    for leaf in leaves:
        if isinstance(leaf, (int, str)):
            kinds.append(repr(leaf))
            continue
        kinds.append(f"{type(leaf)} {getattr(leaf, 'dtype', '')} {getattr(leaf, 'shape', '')}")
        if isinstance(leaf, torch.Tensor) and is_plain(leaf):
            leaf = leaf.double().numpy()
        if isinstance(leaf, (float, np.ndarray)) and np.asarray(leaf).dtype.kind in "biuf":
            means.append(float(np.mean(leaf)))
    return Summary(len(dataset), takes_batches, kinds, means)


def as_error(text: str = "") -> bytes:
    """Pickle the exception that is being handled, or a RuntimeError with this text."""
    wrapper, kind = ExceptionWrapper() if not text else None, RuntimeError
    if wrapper and issubclass(wrapper.exc_type, Exception):
        kind = wrapper.exc_type
    try:
        kind = encode(kind)[0]
    except Exception:  # such as a class that is defined in a function
        kind = encode(RuntimeError)[0]
    return encode((kind, text or wrapper.exc_msg))[0]


def raised_again(where: str, kind: bytes, text: str) -> Exception:
    """Return an exception of a data host, rebuilt as torch rebuilds those of its workers."""
    wrapper = ExceptionWrapper.__new__(ExceptionWrapper)
    wrapper.exc_type, wrapper.exc_msg, wrapper.where = RuntimeError, text, where
    with contextlib.suppress(Exception):  # such as a class from a module that is missing here
        wrapper.exc_type = pickle.loads(kind)
    try:
        wrapper.reraise()
    except Exception as error:
        return error
