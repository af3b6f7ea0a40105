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
import os
import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

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
OF_THE_TRAINING = torch.nn.Module, DataLoader, Dataset, set, frozenset  # a set has no fixed order
CONTAINERS: dict[Any, Callable] = {dict: dict.update, list: list.extend, deque: deque.extend}


class Variable(NamedTuple):
    """A variable of a module, or an attribute of a class."""

    module: str
    owner: str  # the class, or empty
    name: str
    pickled: bytes


class Limited(io.BytesIO):
    """A file that becomes no larger than a variable may be."""

    def write(self, data: Any) -> int:
        if self.tell() + memoryview(data).nbytes > MOST:
            raise OverflowError
        return super().write(data)


def variables(reached: Iterable[str]) -> list[Variable]:
    """Return the variables of own modules: those that are reached, and those that these refer to.

    Variables that cannot be pickled, are large, or belong to the training stay here.
    """
    own, todo, done, found = own_modules(), [*reached], {"__main__"}, []
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
                found.append(Variable(module, owner, name, content))
    return sorted(found)


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


def set_variables(there: list[Variable]) -> None:
    """Set what differs on this data host, in place where that is possible."""
    names = []
    for module, owner, name, content in there:
        # What cannot be imported here, such as a module that reads arguments, is not used here.
        with contextlib.suppress(Exception, SystemExit):
            space: Any = importlib.import_module(module)
            space = functools.reduce(getattr, filter(None, owner.split(".")), space)
            old = vars(space).get(name)
            if pickled(old)[0] == content and name in vars(space):
                continue
            new = pickle.loads(content)
            if not (become(old, new) and pickled(old)[0] == content):
                setattr(space, name, new)
            names.append(".".join(filter(None, (module, owner, name))))
    if names:
        shown = ", ".join(names[:9]) + (f" and {len(names) - 9} more" if len(names) > 9 else "")
        print(f"feed: set as in the training script: {shown}", flush=True)


def become(old: Any, new: Any) -> bool:
    """Change an object into `new`, as far as possible, for everything that refers to it."""
    if type(old) is not type(new) or isinstance(old, (type, FunctionType)):
        return False
    for container, extend in CONTAINERS.items():
        if isinstance(old, container):
            container.clear(old)
            extend(old, new)
    if isinstance(attributes := getattr(old, "__dict__", None), dict):
        attributes.clear()
        attributes.update(vars(new))
    return True


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
