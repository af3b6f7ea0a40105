"""A stream: the iterator of an IterableDataset, in a process of its own on a data host.

The process is to the Dataset what worker w of W of a torch DataLoader is: it has its number, its
random numbers and its `worker_init_fn`, and stays for the next epoch if the worker does.
"""

import contextlib
import itertools
import pickle
import random
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from types import GeneratorType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data._utils import worker as torch_worker

from feed.samples import Asker, as_error
from feed.wire import READY, WAITING, encode

GROUP_SECONDS, GROUP_BYTES = 0.05, 4 << 20  # of samples that are sent together, about
END = object()
TELL_SECONDS = 5  # between two signs of life while a stream is run forward


class Stream(NamedTuple):
    """What the samples of a stream depend on, and how far it is to be run forward."""

    seed: int  # the DataLoader's base seed
    worker: int  # w
    num_workers: int  # W; 0: the DataLoader has no workers, or there is none
    asker: Asker
    taken: list[int | None]  # samples of each epoch so far, the last one is now; None: all


def run(dataset: Any, stream: Stream, asking: Connection, send: Callable) -> None:
    """Iterate over the Dataset, and send its samples; an epoch more for each message that comes.

    send: is called with a Reply's state, value and parts. The value of a group of samples is the
    epoch's number, for each sample its pickle and how many parts it has, and what comes after them:
    None: more, "end", or an exception. Raises RuntimeError if what has been taken does not come
    again, or would be lost.
    """
    become_worker(dataset, stream)
    for epoch in itertools.count():
        iterator = iter(dataset)
        try:
            if epoch < len(stream.taken):
                run_forward(iterator, stream.taken[epoch], send)
            if epoch < len(stream.taken) - 1:
                continue
            after = None
            while after != "end" and not asking.poll():  # else the next epoch is asked for already
                samples, parts, after = gather(iterator)
                send(READY, pickle.dumps((epoch, samples, after)), parts)
                del parts
            asking.recv_bytes()
            if after != "end" and iterator is dataset:
                raise RuntimeError(
                    f"{type(dataset).__name__} is its own iterator, so samples that were prepared "
                    "ahead of an epoch's end would be lost: let __iter__ begin anew, or do not "
                    "leave epochs early"
                )
        finally:
            if isinstance(iterator, GeneratorType):
                iterator.close()  # for what it has open


def become_worker(dataset: Any, stream: Stream) -> None:
    """Make of this process what torch's `_worker_loop` makes of a worker."""
    seed = stream.seed + stream.worker
    random.seed(seed)
    np.random.seed(torch_worker._generate_state(stream.seed, stream.worker))
    torch.default_generator.manual_seed(seed)
    torch_worker._worker_info = None
    if stream.num_workers:
        torch_worker._worker_info = torch_worker.WorkerInfo(
            id=stream.worker, num_workers=stream.num_workers, seed=seed, dataset=dataset
        )
    if stream.asker.init_fn:
        [init_fn] = pickle.loads(stream.asker.init_fn)
        init_fn(stream.worker)


def run_forward(iterator: Iterator, steps: int | None, send: Callable) -> None:
    """Drop so many samples, or all: another process has prepared them already."""
    told = time.monotonic()
    for step in itertools.count():
        if step == steps:
            return
        with contextlib.suppress(BaseException):  # was raised in the training, which went on
            if next(iterator, END) is END:
                break
        if time.monotonic() > told + TELL_SECONDS:
            told = time.monotonic()
            send(WAITING, pickle.dumps(step), [])
    if steps is not None:
        raise RuntimeError(
            f"run again after a data host was lost, the Dataset had {step} samples, of which "
            f"{steps} had been taken before: have it give the same each time, by a seed in each of "
            "its shuffles and files that stay as they are"
        )


def gather(iterator: Iterator) -> tuple[list[tuple[bytes, int]], list[memoryview], Any]:
    """Return the next samples, their parts, and what comes after them: see `run`."""
    samples, all_parts, size, until = [], [], 0, time.monotonic() + GROUP_SECONDS
    try:
        while not samples or (size < GROUP_BYTES and time.monotonic() < until):
            value, parts = encode(next(iterator))
            size += len(value) + sum(part.nbytes for part in parts)
            if size < GROUP_BYTES:  # the Dataset may use this memory for its next sample
                parts = [memoryview(bytes(part)) for part in parts]
            samples.append((value, len(parts)))
            all_parts += parts
    except StopIteration:
        return samples, all_parts, "end"
    except BaseException:  # libraries in Rust raise it, for one, and no Exception
        return samples, all_parts, as_error()
    return samples, all_parts, None
