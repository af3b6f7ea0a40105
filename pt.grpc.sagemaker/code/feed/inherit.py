"""What a worker forked from the training script has besides the Dataset, for the data hosts.

The environment goes with each request, since it may differ between ranks. The variables of the
script's own modules, which data hosts import anew, go with the Dataset: those that its code can
reach, and the attributes of classes. A data host sets what differs there. compare.py notices what
is missing here, such as the settings of an installed library.
"""

import contextlib
import enum
import functools
import importlib
import io
import itertools
import operator
import os
import pickle
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from feed.travel import DatasetPickler, imported_in, is_generator, own_modules

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
OF_THE_TRAINING = torch.nn.Module, DataLoader, Dataset
SIMPLE = int, float, str, bytes, type(None)
ORDINARY = object, dict, list, OrderedDict, SimpleNamespace
HEAP_TYPE = 1 << 9  # the flag of classes that are defined in Python


class Limited(io.BytesIO):
    """A file that becomes no larger than a variable may be."""

    def write(self, data: Any) -> int:
        if self.tell() + memoryview(data).nbytes > MOST:
            raise OverflowError
        return super().write(data)


def variables(reached: Iterable[str]) -> bytes:
    """Return the pickled variables of own modules: those that are reached, or that these refer to.

    For each, it has the module, the class or "", the name and the value. They are one pickle, so
    that what several modules have in common is one object on data hosts, too. What cannot be
    pickled, is large, or belongs to the training stays here.
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
            content, its_modules = pickled(value)
            todo += its_modules
            if content:
                found[module, owner, name] = value
    DatasetPickler(file := io.BytesIO()).dump([(*key, found[key]) for key in sorted(found)])
    return file.getvalue()


def variables_of(module: str, space: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield a module's variables, and the attributes of its classes: the class, name and value."""
    for name, value in [*space.items()]:
        if not name.startswith("__"):
            yield "", name, value
        is_class = isinstance(value, type) and value.__module__ == module
        if is_class and not issubclass(value, enum.Enum) and "<" not in value.__qualname__:
            for attribute, part in [*vars(value).items()]:
                is_data = not attribute.startswith("__") and not hasattr(type(part), "__get__")
                if is_data or isinstance(part, FunctionType):
                    yield value.__qualname__, attribute, part


def pickled(value: Any) -> tuple[bytes, set[str]]:
    """Return a value's pickle, or nothing if it stays here, and the modules that it refers to."""
    with contextlib.suppress(Exception):
        if not isinstance(value, OF_THE_TRAINING) and not is_generator(value):
            pickler = DatasetPickler(file := Limited())
            pickler.dump(value)
            return file.getvalue(), pickler.modules
    return b"", set()


def set_variables(content: bytes) -> None:
    """Set what differs on this data host, in place where that is possible."""
    update, names = Update(), []
    try:
        there = pickle.loads(content)
    except (Exception, SystemExit) as error:  # such as of a module that reads arguments
        print(f"feed: cannot set what the script has set in its modules: {error!r}", flush=True)
        return
    for module, owner, name, new in there:
        # What cannot be imported here is not used here.
        with contextlib.suppress(Exception, SystemExit):
            space: Any = importlib.import_module(module)
            space = functools.reduce(getattr, filter(None, owner.split(".")), space)
            old, before = vars(space).get(name, update), update.changes
            if (result := update.of(old, new)) is not old:
                setattr(space, name, result)
            if update.changes > before:
                names.append(".".join(filter(None, (module, owner, name))))
    if names:
        shown = ", ".join(names[:9]) + (f" and {len(names) - 9} more" if len(names) > 9 else "")
        print(f"feed: set as in the training script: {shown}", flush=True)


class Update:
    """Changes objects of this host into those of the script, which are one graph, too."""

    def __init__(self) -> None:
        self.changes = 0
        self.results: dict[int, Any] = {}  # by the id of the script's object
        self.used: set[int] = set()  # ids of this host's objects, each for one of the script's

    def of(self, old: Any, new: Any) -> Any:
        """Return `old`, changed into `new` for all that refers to it, or else `new`."""
        if isinstance(new, SIMPLE):
            self.changes += not is_equal(old, new)
            return old if is_equal(old, new) else new
        if id(new) in self.results:
            self.changes += old is not self.results[id(new)]
        elif type(new) is tuple:
            olds = old if type(old) is tuple else ()
            parts = (*itertools.starmap(self.of, zip_to(olds, new)),)
            is_same = len(olds) == len(parts) and all(map(operator.is_, olds, parts))
            self.results[id(new)] = old if is_same else parts
        elif has_only_state(new) and type(old) is type(new) and id(old) not in self.used:
            self.results[id(new)] = old
            self.used.add(id(old))
            self.change(old, new)
        else:
            is_same = old is new or is_equal(old, new)
            self.changes += not is_same
            self.results[id(new)] = old if is_same else new
        return self.results[id(new)]

    def change(self, old: Any, new: Any) -> None:
        """Give an object the items and attributes of another one of its type."""
        if isinstance(new, dict):
            self.items(old, new)
        elif isinstance(new, list):
            self.changes += len(old) != len(new)
            parts = [*itertools.starmap(self.of, zip_to(old, new))]
            old.clear(), old.extend(parts)
        if hasattr(new, "__dict__"):
            self.items(vars(old), vars(new))

    def items(self, old: dict, new: dict) -> None:
        self.changes += old.keys() != new.keys()
        items = {key: self.of(dict.get(old, key), value) for key, value in dict.items(new)}
        dict.clear(old), dict.update(old, items)


def zip_to(old: Iterable, new: Sequence) -> Iterator[tuple]:
    """Pair each part of `new` with that of `old`, or with None."""
    return zip(itertools.chain(old, itertools.repeat(None)), new, strict=False)


def has_only_state(value: Any) -> bool:
    """Return whether an object is nothing but its items and attributes.

    Others, such as loggers and members of an enum, are made in a way of their own.
    """
    kind = type(value)
    base = next(base for base in kind.__mro__ if not base.__flags__ & HEAP_TYPE)
    is_made_as_usual = (
        kind.__reduce_ex__ is object.__reduce_ex__ and kind.__reduce__ is base.__reduce__
    )
    return base in ORDINARY and is_made_as_usual


def is_equal(old: Any, new: Any) -> bool:
    """Return whether two values are the same, as far as that is known."""
    if type(old) is not type(new):
        return False
    if isinstance(new, (*SIMPLE, set, frozenset)):
        return old == new
    content, _ = pickled(new)
    return bool(content) and pickled(old)[0] == content


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
