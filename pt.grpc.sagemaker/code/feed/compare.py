"""Compares a sample of a data host with the one that a worker forked from this process prepares.

A forked worker has everything that the script has set. A data host has the Dataset and what
inherit.py sends, but not, for example, the settings of a library. So in each epoch, two new
processes on each side prepare the first sample. The Dataset is refused if each side agrees with
itself, but not with the other side. If a side does not agree with itself, as when a sample has the
process's id, nothing is known.
"""

import contextlib
import gc
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection, Pipe
from typing import Any

import numpy as np
import torch

from feed.fetch import Task
from feed.pickling import rngs_of
from feed.samples import Chunk, as_error, prepare
from feed.wire import DONE, RAISED, encode
from feed.worker import fork

PROCESSES = 2  # on each side
SAME_ON_AVERAGE = 1e-3  # of the largest value: CPUs may round differently
SAME_AT_MOST = 1e-2, 0.02  # the same, for each value; one step of 255 in a normalized image
WHERE = "'What data hosts have' in loader.md"
WHY = (
    "Data hosts lack what the script has set in installed modules, such as a setting of a library: "
    f"set it in a worker_init_fn, or pass it to the Dataset ({WHERE})"
)


class HereProcess:
    """A process, forked from this one, that prepares samples and sends them back."""

    def __init__(
        self,
        dataset: Any,
        collate_fn: Callable | None,
        chunk: Chunk,
        seconds: float,
        has_rngs: bool,
    ):
        self.pipe, its = Pipe(duplex=False)
        self.pid = fork(prepare_apart, its, dataset, collate_fn, chunk, has_rngs)
        its.close()
        self.seconds, self.until = seconds, time.monotonic() + seconds
        self.samples: Any = None  # or an exception
        self.is_over = False

    def look(self) -> None:
        """Take the samples if they have come, or an exception if it is too late."""
        if self.is_over or not (self.pipe.poll() or time.monotonic() > self.until):
            return
        self.samples = TimeoutError(f"no sample after {self.seconds:g} s")
        with contextlib.suppress(EOFError):
            if self.pipe.poll():
                self.samples = RuntimeError("the process has died")
                state, value, parts = self.pipe.recv()
                self.samples = pickle.loads(value, buffers=parts)
                if state == RAISED:
                    self.samples = RuntimeError(self.samples[1].strip().splitlines()[-1])
        self.end()

    def end(self) -> None:
        if not self.is_over:
            self.is_over = True
            os.kill(self.pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):  # somebody waits for all children
                os.waitpid(self.pid, 0)
            self.pipe.close()


def prepare_apart(
    pipe: Connection, dataset: Any, collate_fn: Callable | None, chunk: Chunk, has_rngs: bool
) -> None:
    """Prepare samples, and send them through the pipe. Runs in a process of its own."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1), os.dup2(nowhere, 2)  # what it prints, the data hosts print, too
    torch.set_num_threads(1)
    gc.disable()  # the training's objects, such as tensors on a GPU, must not be freed here
    try:
        rngs = rngs_of(*((dataset, collate_fn) if has_rngs else ()))
        value, parts = encode(prepare(dataset, rngs, chunk, collate_fn))
        state = DONE
    except BaseException:
        state, value, parts = RAISED, as_error(), []
    pipe.send((state, value, [bytes(part) for part in parts]))


class Comparison:
    """A comparison that is under way: new processes here, and tasks for the Fetcher.

    name: of the Dataset. here: starts a process here that prepares a chunk.
    """

    def __init__(self, name: str, chunk: Chunk, here: Callable[[Chunk], HereProcess]):
        self.name, self.is_one = name, len(chunk.indices) == 1
        chunks = [
            chunk._replace(caller=chunk.caller._replace(data_worker=(number, PROCESSES)))
            for number in range(PROCESSES)
        ]
        self.here = [here(chunk) for chunk in chunks]
        self.tasks = [Task(chunk, is_fresh=True) for chunk in chunks]

    def is_over(self) -> bool:
        for process in self.here:
            process.look()
        return all(each.is_over for each in (*self.here, *self.tasks))

    def result(self) -> str:
        """Return why nothing is known, or an empty string; raise RuntimeError if they differ."""
        try:
            why, what = self.compare()
        except Exception as error:  # of an unusual type
            return f"they cannot be compared ({error})"
        if what:
            raise RuntimeError(
                f"a data host prepares another sample of {self.name} than a worker of this "
                f"script would: {what}. {WHY}"
            )
        return why

    def compare(self) -> tuple[str, str]:
        """Return why nothing is known, and how they differ; either may be an empty string."""
        here, there = ([self.first(each) for each in side] for side in (self.here, self.tasks))
        for side, samples in (("on this host", here), ("on a data host", there)):
            for sample in samples:
                if isinstance(sample, BaseException):
                    return f"{side}, a new process failed ({sample})", ""
            if what := difference(*samples, ("in one process", "in another one")):
                return f"{side}, new processes prepare different ones: {what}", ""
        return "", difference(there[0], here[0], ("there", "here"))

    def first(self, prepared: Any) -> Any:
        """Return what a process or a task has prepared: a sample, a batch, or an exception."""
        is_sample = self.is_one and isinstance(prepared.samples, list)
        return prepared.samples[0] if is_sample and prepared.samples else prepared.samples

    def end(self) -> None:
        for process in self.here:
            process.end()


def explain(error: Exception, process: HereProcess) -> None:
    """Add to a data host's exception that these samples can be prepared here, if that is so."""
    process.pipe.poll(process.seconds)
    process.look()
    process.end()
    if not isinstance(process.samples, BaseException):
        text = (
            f"This host can prepare these samples. {WHY}. Or a file is missing there: data hosts "
        )
        add(error, text + "need it at the same path")


def add(error: Exception, text: str) -> None:
    """Add a line to the message of a data host's exception."""
    message = error.args[0] if error.args else None
    if isinstance(message, str):  # torch has a kind of str for KeyErrors
        error.args = type(message)(f"{message}\n{text}"), *error.args[1:]


def difference(
    one: Any, other: Any, sides: tuple[str, str], path: str = "", depth: int = 12
) -> str:
    """Return where and how two samples differ, or an empty string."""
    found = f"{path or 'it'} is {brief(one)} {sides[0]}, {brief(other)} {sides[1]}"
    if type(one) is not type(other) or outline(one) != outline(other):
        return found
    if hasattr(one, "__array__") or hasattr(one, "__array_interface__"):
        values, others = as_array(one), as_array(other)
        if values.dtype.kind != "O":
            return "" if is_near(values, others) else found
        one, other = values.ravel().tolist(), others.ravel().tolist()
    if isinstance(one, (float, complex)):
        return "" if is_near(np.array([one]), np.array([other])) else found
    if isinstance(one, (str, bytes, int, type)) or not (parts := [*pairs_of(one, other)]):
        with contextlib.suppress(Exception):  # such as pandas': a comparison for each element
            is_comparable = type(one).__eq__ is not object.__eq__
            return found if is_comparable and not bool(one == other) else ""
        return ""
    inner = (difference(a, b, sides, path + at, depth - 1) for at, a, b in parts if depth)
    return next(filter(None, inner), "")


def pairs_of(one: Any, other: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the parts of two samples of the same type and length, in pairs, with their names."""
    if isinstance(one, Mapping):
        yield "'s keys", [*map(str, one)], [*map(str, other)]
        yield from ((f"[{key!r}]", one[key], other[key]) for key in one if key in other)
    elif isinstance(one, (list, tuple)):
        yield from ((f"[{at}]", *pair) for at, pair in enumerate(zip(one, other, strict=True)))
    elif hasattr(one, "__dict__"):
        yield from ((f".{k}", v, vars(other).get(k)) for k, v in vars(one).items())


def outline(value: Any) -> tuple:
    """Return what two values must have in common before their elements can be compared."""
    shape = tuple(getattr(value, "shape", ()))
    is_sized = isinstance(value, (Mapping, list, tuple, set, frozenset))
    return str(getattr(value, "dtype", "")), shape, len(value) if is_sized else 0


def as_array(value: Any) -> np.ndarray:
    """Return the elements of a tensor, an array, an image or a table."""
    if isinstance(value, torch.Tensor):
        value = value.detach().as_subclass(torch.Tensor).cpu().to_dense()
        value = value.double() if value.dtype.is_floating_point else value.resolve_conj()
        return value.numpy()
    return np.asarray(value)


def is_near(one: np.ndarray, other: np.ndarray) -> bool:
    """Return whether the elements are the same, but for rounding.

    Integers of 8 and 16 bits, as in images and sound, may have been rounded. Others are exact.
    """
    is_rounded = one.dtype.kind in "fc" or (one.dtype.kind in "iu" and one.dtype.itemsize <= 2)
    if not is_rounded or not one.size:
        return np.array_equal(one, other)
    one, other = (
        each.astype(complex if each.dtype.kind == "c" else float) for each in (one, other)
    )
    known = np.isfinite(one) & np.isfinite(other)
    if not np.array_equal(one[~known], other[~known], equal_nan=True):
        return False
    errors, largest = np.abs(one - other)[known], np.abs(one[known]).max(initial=0)
    return (
        errors.mean() <= 1e-9 + SAME_ON_AVERAGE * largest
        and errors.max() <= max(SAME_AT_MOST[0] * largest, SAME_AT_MOST[1])
        if errors.size
        else True
    )


def brief(value: Any) -> str:
    """Return a value in a few words."""
    kind = f"{type(value).__name__} " if hasattr(value, "dtype") else ""
    dtype = f"of {str(value.dtype).removeprefix('torch.')} " if kind else ""
    shape = f"{tuple(value.shape)} " if kind and getattr(value, "shape", ()) else ""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        value = as_array(value).ravel()[:4].tolist()
    text = " ".join(repr(value).split())
    return f"{kind}{dtype}{shape}{text if len(text) < 60 else text[:56] + ' ...'}"
