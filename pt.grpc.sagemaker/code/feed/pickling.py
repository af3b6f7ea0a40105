"""Pickles a Dataset for the data hosts, with cloudpickle.

cloudpickle handles lambdas, closures and classes of the training script. Beyond that, a tensor is
pickled without the rest of the memory that it is a view of, and an np.memmap as the name of its
file. The random generators that the Dataset holds are found on the way.
"""

import contextlib
import copyreg
import functools
import hashlib
import mmap
import os
import pickle
import random
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import ForkingPickler
from types import FunctionType, GenericAlias, MappingProxyType, ModuleType
from typing import IO, Any

import cloudpickle
import numpy as np
import torch
from torch.utils.data import IterableDataset

from feed.modules import globals_there, imported_in, own_modules
from feed.wire import FRAME, MAIN, class_at, is_plain, reduced

RNGS = np.random.Generator, np.random.RandomState, random.Random, torch.Generator
SIMPLE = int, float, str, bytes, bool, type(None), type, ModuleType, FunctionType
MADE_ANEW = {type(make()): make for make in (threading.Lock, threading.RLock, threading.local)}
SET_BY_CACHE = "__wrapped__", "cache_parameters"  # attributes that functools.lru_cache sets


class DatasetPickler(cloudpickle.Pickler):
    """Pickles a Dataset; keeps the random generators that it finds, and which globals it includes.

    by_reference: leave out the classes of the script, since the process that loads it has them.
    """

    def __init__(
        self, file: IO[bytes], by_reference: bool = False, buffer_callback: Callable | None = None
    ):
        super().__init__(file, protocol=5, buffer_callback=buffer_callback)
        self.by_reference = by_reference
        self.rngs: list[Any] = []
        self.globals: dict[str, str] = {}  # of the training script -> where they are used
        self.modules: set[str] = set()  # that the Dataset refers to
        self.is_shared = False  # whether it has memory that another process may change
        # For a process that is being spawned: how it gets tensors from this one, in shared memory.
        self.shared = ForkingPickler._extra_reducers if get_spawning_popen() else {}
        self.shared_memory: list[range] | None = None  # until it is needed
        for module in filter(None, map(sys.modules.get, MAIN)):
            self.globals_ref[id(vars(module))] = ScriptGlobals(__name__="__main__")

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, (type, FunctionType)):
            self.modules.add(str(value.__module__))
        elif isinstance(value, ModuleType):
            self.modules.add(value.__name__)
        if isinstance(value, FunctionType):
            self.modules |= imported_in(value)
        elif isinstance(value, (torch.Tensor, np.ndarray)) and not self.is_shared:
            if self.shared_memory is None:
                self.shared_memory = shared_memory()
            self.is_shared = any(address_of(value) in span for span in self.shared_memory)
        if share := self.shared.get(type(value)):
            return share(value)
        if is_rng(value):
            self.rngs.append(value)
        elif isinstance(value, np.memmap):
            return open_memmap, memmap_place(value)
        elif type(value) is torch.Tensor and is_plain(value):
            return reduced(value)
        elif how_to_make := made_anew(value):
            return how_to_make
        elif is_class(value) and not cloudpickle.cloudpickle._should_pickle_by_reference(value):
            is_of_script = value.__module__ in MAIN and "<locals>" not in value.__qualname__
            if self.by_reference and is_of_script:
                return class_at, (value.__module__, value.__qualname__)
            copyreg._slotnames(value)  # what Python leaves in it when an object of it is pickled
            # cloudpickle's random id would give the Dataset a different digest in each process.
            ids, name = cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS, value.__qualname__
            while value not in ids and name in ids.values():  # another class has this name
                name += "'"
            ids.setdefault(value, name)
        elif isinstance(value, FunctionType) and value.__module__ in MAIN:
            for name in value.__code__.co_names:
                used = value.__globals__.get(name)
                if not isinstance(used, SIMPLE):
                    line = value.__code__.co_firstlineno
                    what = f"{name} ({type(used).__name__})"
                    self.globals[what] = f"{value.__qualname__}, line {line}"
        return super().reducer_override(value)


def made_anew(value: Any) -> tuple | None:
    """Return how to make an object that cannot be pickled, but has nothing that would be missed.

    These are locks, which are free in a new process, what belongs to a thread, and functions with
    a cache, which is empty.
    """
    if type(value) in MADE_ANEW:
        return MADE_ANEW[type(value)], ()
    if type(value) is functools.cached_property:  # has a lock before Python 3.12
        state = {name: part for name, part in vars(value).items() if name != "lock"}
        return functools.cached_property, (value.func,), state
    if type(value) is functools._lru_cache_wrapper and value.__module__ in MAIN:
        state = {name: part for name, part in vars(value).items() if name not in SET_BY_CACHE}
        return cached, (value.__wrapped__, value.cache_parameters()), state
    if isinstance(value, FunctionType) and value.__module__ in MAIN:
        registry = getattr(value, "registry", None)
        if isinstance(registry, MappingProxyType) and hasattr(value, "dispatch"):
            return dispatched, (dict(registry),)
    return None


def cached(function: Callable, parameters: dict) -> Callable:
    """Return the function with a new functools.lru_cache."""
    return functools.lru_cache(**parameters)(function)


def dispatched(registry: dict[type, Callable]) -> Callable:
    """Return a functools.singledispatch function, which calls one of these."""
    function = functools.singledispatch(registry[object])
    for kind, its in registry.items():
        function.register(kind, its)
    return function


class RngFinder(DatasetPickler):
    """Goes through a Dataset, and leaves out what cannot be pickled."""

    def reducer_override(self, value: Any) -> Any:
        with contextlib.suppress(Exception):
            how = super().reducer_override(value)
            if how is not NotImplemented or isinstance(value, (type, FunctionType)):
                return how
            reduce = self.dispatch_table.get(type(value))
            return reduce(value) if reduce else value.__reduce_ex__(5)
        return str, ()


class ScriptGlobals(dict):
    """Stands for the globals of the script's functions, which are one dict, as in the script.

    cloudpickle would give the functions of each pickle a dict of their own, so that what a
    worker_init_fn sets would not reach the Dataset.
    """

    def __reduce__(self) -> tuple:
        return script_globals, ()


def script_globals() -> dict[str, Any]:
    """Return the dict in which this process has the script's globals."""
    return globals_there


def is_class(value: Any) -> bool:
    """Return whether this is a class. In Python 3.10, list[int] passes for one."""
    return isinstance(value, type) and not isinstance(value, GenericAlias)


def memmap_place(array: np.memmap) -> tuple:
    """Return where an array is in its file."""
    root = array
    while isinstance(root, np.ndarray) and not isinstance(root.base, mmap.mmap):
        root = root.base
    if not isinstance(root, np.memmap) or root.mode != "r":
        raise pickle.PicklingError("an np.memmap must be opened for reading only, with mode='r'")
    spans = [(n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True)]
    first = array.ctypes.data + sum(min(0, span) for span in spans)
    size = sum(map(abs, spans)) + array.itemsize if array.size else 0
    place = root.offset + first - root.ctypes.data, size, array.ctypes.data - first
    length = os.stat(root.filename).st_size
    return (str(root.filename), length, *place, array.dtype, array.shape, array.strides)


def open_memmap(
    name: str, length: int, offset: int, size: int, start: int, dtype: Any, *shape: Any
) -> np.ndarray:
    """Open an array in a file of a data host."""
    if (there := os.stat(name).st_size) != length:
        raise ValueError(f"{name} has {there} bytes here, but {length} on the training host")
    if not size:
        return np.empty(shape[0], dtype)
    memory = np.memmap(name, np.uint8, "r", offset, (size,))
    return np.ndarray(shape[0], dtype, memory, start, shape[1])


def shared_memory() -> list[range]:
    """Return where this process has memory that others can change, too."""
    with open("/proc/self/maps") as file:
        spans = [line.split(maxsplit=2)[:2] for line in file]
    shared = [span.split("-") for span, access in spans if access == "rw-s"]
    return [range(int(first, 16), int(end, 16)) for first, end in shared]


def address_of(value: torch.Tensor | np.ndarray) -> int:
    """Return where a tensor or an array has its first element, or 0 if it has no plain memory."""
    if isinstance(value, np.ndarray):
        return value.__array_interface__["data"][0]
    return value.data_ptr() if is_plain(value) else 0


class Digest:
    """Computes the digest and the size of what is written, and writes it to a file, if any."""

    def __init__(self, file: IO[bytes] | None = None):
        self.sha256, self.size, self.file = hashlib.sha256(), 0, file

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        if self.file:
            self.file.write(data)
        size = memoryview(data).nbytes
        self.size += size
        return size


def dump(file: Any, by_reference: bool = False, **parts: Any) -> DatasetPickler:
    """Pickle a tuple of these parts; raise a TypeError that names what cannot be pickled."""
    main = sys.modules.get("__mp_main__")  # the training script in a spawned process
    if main and main.__name__ not in cloudpickle.list_registry_pickle_by_value():
        cloudpickle.register_pickle_by_value(main)
    pickler = DatasetPickler(file, by_reference)
    try:
        pickler.dump((*parts.values(),))
    except OSError:  # from writing the file
        raise
    except Exception as error:
        paths = (name + path for name, part in parts.items() if (path := culprit(part)) is not None)
        path, way_out = next(paths, "dataset"), "open it when it is first used"
        if path.startswith("dataset") and not isinstance(parts.get("dataset"), IterableDataset):
            way_out += ", or give RemoteDataset a callable that makes the Dataset"
        raise TypeError(f"{path} cannot be sent to the data hosts ({error}): {way_out}") from error
    return pickler


def culprit(value: Any, depth: int = 8) -> str | None:
    """Return the path, such as .transform.file, of the innermost part that cannot be pickled.

    Returns None if everything can be pickled.
    """
    with contextlib.suppress(Exception):
        DatasetPickler(Digest()).dump(value)
        return None
    parts: dict[str, Any] = {}
    if isinstance(value, dict):
        parts = {f"[{key!r}]": part for key, part in value.items()}
    elif isinstance(value, (list, tuple)):
        parts = {f"[{number}]": part for number, part in enumerate(value)}
    elif isinstance(value, FunctionType):
        used = {name: value.__globals__.get(name) for name in value.__code__.co_names}
        free = zip(value.__code__.co_freevars, value.__closure__ or (), strict=False)
        parts = {f" -> {name}": part for name, part in used.items()}
        parts |= {f" -> {name}": cell.cell_contents for name, cell in free}
    elif hasattr(value, "__dict__") and not isinstance(value, (type, ModuleType, np.ndarray)):
        parts = {f".{name}": part for name, part in vars(value).items()}
    for path, part in parts.items() if depth else ():
        if (rest := culprit(part, depth - 1)) is not None:
            return path + rest
    return ""


def frames_of(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the content of a file, in frames. Several threads may do so at the same time."""
    file.flush()
    at = 0
    while frame := os.pread(file.fileno(), FRAME, at):
        yield frame
        at += len(frame)


def rngs_of(*values: Any) -> dict[int, Any]:
    """Return the random generators of the values, and those that are variables of own modules.

    The keys are the same in each process.
    """
    pickler = RngFinder(Digest(), buffer_callback=lambda memory: None)  # skips the memory
    with contextlib.suppress(Exception):  # such as RecursionError, which cloudpickle replaces
        pickler.dump(values)
    found = dict(enumerate(pickler.rngs, 1))
    known = {id(rng) for rng in pickler.rngs}
    for name, space in own_modules().items():
        for variable, value in space.copy().items():
            if is_rng(value) and id(value) not in known:
                known.add(id(value))
                found[zlib.crc32(f"{name}.{variable}".encode()) >> 1] = value
    return found


def is_rng(value: Any) -> bool:
    """Return whether this is a random generator that can be seeded."""
    return isinstance(value, RNGS) and not isinstance(value, random.SystemRandom)
