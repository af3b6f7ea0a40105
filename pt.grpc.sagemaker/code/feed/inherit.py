"""What a worker forked from the training script has besides the Dataset, for the data hosts.

The environment goes with each request, since it may differ between ranks. The variables of the
script's own modules, which data hosts import anew, go with the Dataset: those that its code can
reach, and the attributes of classes. A data host sets what differs there. compare.py notices what
is missing here, such as the settings of an installed library.
"""

import contextlib
import copyreg
import enum
import functools
import hashlib
import importlib
import io
import itertools
import os
import pickle
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from feed.log import logger
from feed.modules import imported_in, own_modules
from feed.pickling import MADE_ANEW, DatasetPickler, is_rng

# torchrun's variables, and the beginnings of those that each host has for itself.
OF_A_RANK = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("NODE_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
)
OF_A_HOST = (
    *("CUDA", "NVIDIA", "NCCL", "GLOO", "OMP_", "MKL_", "KMP_", "OPENBLAS", "OPENCV_FOR"),
    *("HETERO", "SM_", "SAGEMAKER", "HOME", "HOSTNAME", "LD_", "PATH", "PWD", "PYTHON", "TMPDIR"),
)
MOST = 8 << 20  # bytes of a variable
MOST_COPIES = 20  # of a function or class in a variable that is pickled without a memo
OF_THE_TRAINING = torch.nn.Module, DataLoader, Dataset
SIMPLE = int, float, str, bytes, type(None), type, FunctionType, ModuleType
HEAP_TYPE = 1 << 9  # the flag of classes that are defined in Python


class Limited(io.BytesIO):
    """A file that becomes no larger than a variable may be."""

    def write(self, data: Any) -> int:
        if self.tell() + memoryview(data).nbytes > MOST:
            raise OverflowError
        return super().write(data)


def variables(reached: Iterable[str]) -> tuple[bytes, bool]:
    """Return the pickled variables of own modules: those that are reached, or that these refer to.

    For each, it has the module, the class or "", the name, the fingerprint and the value. They are
    one pickle, so that what several modules have in common is one object on data hosts, too. What
    cannot be pickled, is large, or belongs to the training stays here. Also returns whether they
    have memory that other processes may change.
    """
    own, todo, done, found = own_modules(), [*reached], {"__main__"}, {}
    for module in todo:  # which grows
        if module in done or module not in own:
            continue
        done.add(module)
        for owner, name, value in variables_of(module, own[module]):
            if type(value) is ModuleType:
                todo.append(value.__name__)
                continue
            is_code = isinstance(value, (type, FunctionType))
            todo.append(str(value.__module__ if is_code else type(value).__module__))
            if type(value) is FunctionType:
                todo += imported_in(value)
            defined_as = f"{owner}.{name}" if owner else name
            if is_code and (value.__module__, value.__qualname__) == (module, defined_as):
                continue
            mark, its_modules = fingerprint(value)
            todo += its_modules
            home = type(value).__module__
            is_there = home not in own and getattr(sys.modules.get(home), name, None) is value
            if mark and not is_there:  # such as os.environ
                found[module, owner, name] = mark, value
    pickler = DatasetPickler(file := io.BytesIO())
    pickler.dump([(*key, *found[key]) for key in sorted(found)])
    return file.getvalue(), pickler.is_shared


def variables_of(module: str, space: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield a module's variables, and the attributes of its classes: the class, name and value."""
    for name, value in space.copy().items():
        if not name.startswith("__"):
            yield "", name, value
        is_class = isinstance(value, type) and value.__module__ == module
        if is_class and not issubclass(value, enum.Enum) and "<" not in value.__qualname__:
            for attribute, part in vars(value).copy().items():
                is_data = not attribute.startswith("__") and not hasattr(type(part), "__get__")
                if is_data or isinstance(part, FunctionType):
                    yield value.__qualname__, attribute, part


class ValuePickler(DatasetPickler):
    """Without a memo, soon gives up where functions and classes refer to each other in a cycle.

    Python itself notices such a cycle only when its stack is full, which may take seconds.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.copies: Counter[int] = Counter()  # of a function or class, by its id

    def reducer_override(self, value: Any) -> Any:
        how = super().reducer_override(value)
        if self.fast and how is not NotImplemented and isinstance(value, (type, FunctionType)):
            self.copies[id(value)] += 1
            if self.copies[id(value)] > MOST_COPIES:
                raise RecursionError
        return how


def fingerprint(value: Any) -> tuple[bytes, set[str]]:
    """Return a digest of a value, or nothing if it stays here, and the modules that it refers to.

    The digest does not depend on which equal parts are the same object, unless there are cycles, or
    more than MOST_COPIES of a function or class.
    """
    is_sent = not isinstance(value, OF_THE_TRAINING) and not is_rng(value)
    for without_memo in (True, False) if is_sent else ():
        with contextlib.suppress(Exception):
            pickler = ValuePickler(file := Limited())
            pickler.fast, pickler.shared_memory = without_memo, []
            pickler.dump(value)
            return hashlib.sha256(file.getvalue()).digest(), pickler.modules
    return b"", set()


class Missing:
    """Stands for a class or function that cannot be imported here, and for what it makes."""

    def __new__(cls, *arguments: Any) -> "Missing":
        return super().__new__(cls)

    def ignore(self, *arguments: Any) -> None:
        """Take part of a state."""

    __init__ = __setstate__ = __setitem__ = append = extend = ignore


class Unpickler(pickle.Unpickler):
    """Replaces what cannot be imported here, such as from a module that reads arguments."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return super().find_class(module, name)
        except (Exception, SystemExit):
            return Missing


def set_variables(content: bytes) -> None:
    """Set what differs on this data host, in place where that is possible."""
    update, differ, names = Update(), [], []
    for module, owner, name, mark, new in Unpickler(io.BytesIO(content)).load():
        # What cannot be imported here is not used here.
        with contextlib.suppress(Exception, SystemExit):
            space: Any = importlib.import_module(module)
            space = functools.reduce(getattr, filter(None, owner.split(".")), space)
            if name in vars(space) and fingerprint(vars(space)[name])[0] == mark:
                update.keep(vars(space)[name], new)
            else:
                differ.append((space, name, new, ".".join(filter(None, (module, owner, name)))))
    for space, name, new, full_name in differ:
        with contextlib.suppress(Exception):
            setattr(space, name, update.of(vars(space).get(name), new))
            names.append(full_name)
    if names:
        shown = ", ".join(names[:9]) + (f" and {len(names) - 9} more" if len(names) > 9 else "")
        logger.info("set as in the training script: %s", shown)


class Update:
    """Changes objects of this host into new ones, which came from the script, in place.

    Then all that refers to an object here, such as other modules and default arguments, sees it.
    """

    def __init__(self) -> None:
        self.results: dict[int, Any] = {}  # which object here stands for a new one, by its id
        self.used: set[int] = set()  # the ids of these objects: each stands for one new object

    def keep(self, old: Any, new: Any) -> None:
        """Let an object stand for one that is the same, and its parts for those of that one."""
        if type(old) is type(new) and not isinstance(new, SIMPLE) and id(new) not in self.results:
            self.results[id(new)] = old
            self.used.add(id(old))
            for parts in zip(parts_of(old), parts_of(new), strict=False):
                self.keep(*parts)

    def of(self, old: Any, new: Any) -> Any:
        """Return the object that stands for `new`: `old`, changed into it, if that is possible."""
        if isinstance(new, Missing) or new is Missing:
            raise ImportError
        if isinstance(new, SIMPLE) or id(new) in self.results:
            return self.results.get(id(new), new)
        if type(new) is tuple:
            olds = old if type(old) is tuple else ()
            return tuple(itertools.starmap(self.of, zip_to(olds, new)))
        target = new
        if has_only_state(new):
            if type(old) is type(new) and id(old) not in self.used:
                target = old
            self.results[id(new)] = target
            self.used.add(id(target))
            if isinstance(new, dict):
                self.fill(target, new)
            elif isinstance(new, list):
                parts = [*itertools.starmap(self.of, zip_to([*target], new))]
                list.clear(target), list.extend(target, parts)
            if hasattr(new, "__dict__"):
                self.fill(vars(target), vars(new))
        return target

    def fill(self, target: dict, new: dict) -> None:
        """Give a dict the items of a new one."""
        items = {}
        for key, value in dict.items(new):
            key = self.results.get(id(key), key)
            items[key] = self.of(dict.get(target, key), value)
        dict.clear(target), dict.update(target, items)


def zip_to(old: Iterable, new: Sequence) -> Iterator[tuple]:
    """Pair each part of `new` with that of `old`, or with None."""
    return zip(itertools.chain(old, itertools.repeat(None)), new, strict=False)


def parts_of(value: Any) -> Iterator[Any]:
    """Yield the keys, items and attributes of an object."""
    if isinstance(value, dict):
        yield from itertools.chain.from_iterable(dict.items(value))
    elif isinstance(value, (list, tuple)):
        yield from value
    if has_only_state(value) and hasattr(value, "__dict__"):
        yield from itertools.chain.from_iterable(vars(value).items())


def has_only_state(value: Any) -> bool:
    """Return whether pickle knows all of an object as its items and its `__dict__`."""
    kind = type(value)
    base = next(base for base in kind.__mro__ if not base.__flags__ & HEAP_TYPE)
    usual = "__reduce_ex__", "__reduce__", "__getstate__", "__setstate__"
    return (
        base in (object, dict, list)
        and (base is not object or hasattr(value, "__dict__"))
        and kind not in (*MADE_ANEW, *copyreg.dispatch_table)
        and not copyreg._slotnames(kind)
        and all(getattr(kind, name, None) == getattr(object, name, None) for name in usual)
    )


def environment_at_start() -> dict[str, str]:
    """Return the environment that this process was started with, as far as Linux still has it."""
    with contextlib.suppress(OSError), open("/proc/self/environ", "rb") as file:
        lines = [os.fsdecode(line).partition("=") for line in file.read().split(b"\0")]
        if "PATH" in (found := {name: value for name, _, value in lines if name}):
            return found
    return dict(os.environ)  # some program has written over it


def environment(before: dict[str, str]) -> dict[str, str | None]:
    """Return the variables that data hosts need: torchrun's, and what the script has changed."""
    now = os.environ
    changed = {name: now.get(name) for name in {*now, *before} if now.get(name) != before.get(name)}
    shared = {k: v for k, v in changed.items() if not k.startswith(OF_A_HOST)}
    return shared | {name: now[name] for name in OF_A_RANK if name in now}
