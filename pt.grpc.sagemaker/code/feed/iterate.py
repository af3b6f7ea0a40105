"""A stream: the iterator of an IterableDataset, in a process of its own on a data host.

To the Dataset, the process looks like worker w of W of a torch DataLoader: it has that worker's
number, random numbers and `worker_init_fn`, and lives on for the next epoch if the worker does.
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

from feed.samples import Caller, as_error, set_worker_info
from feed.wire import DONE, WAITING, encode

GROUP_SECONDS, GROUP_BYTES = 0.05, 4 << 20  # limits of a group of samples, which is sent as a whole
END = object()
TELL_SECONDS = 5  # between two signs of life while a stream is run forward


class Stream(NamedTuple):
    """What the samples of a stream depend on, and how many of them to skip."""

    seed: int  # made from the DataLoader's base seed, or torch's without a DataLoader
    worker: int  # w
    num_workers: int  # W; 0: no DataLoader, or one without workers
    caller: Caller
    taken: list[int | None]  # samples taken in each epoch, the current one last; None: all


def send_samples(dataset: Any, stream: Stream, epochs: Connection, send: Callable) -> None:
    """Iterate over the Dataset and send its samples. A message from `epochs` starts a new epoch.

    send: called with a Reply's state, value and parts. The value of a group of samples has the
    epoch's number, a list of each sample's pickle and number of parts, and what comes next: None
    (more samples), "end", or an exception. Raises RuntimeError if the Dataset does not yield again
    what was taken before, or if samples would be lost.
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
            while after != "end" and not epochs.poll():  # until the next epoch begins
                samples, parts, after = gather(iterator)
                send(DONE, pickle.dumps((epoch, samples, after)), parts)
                del parts
            epochs.recv_bytes()
            if after != "end" and iterator is dataset:
                raise RuntimeError(
                    f"{type(dataset).__name__} is its own iterator, so an epoch that is left early "
                    "would lose the samples that were prepared ahead: have __iter__ return a new "
                    "iterator, or do not leave epochs early"
                )
        finally:
            if isinstance(iterator, GeneratorType):
                iterator.close()  # so that it closes its files


def become_worker(dataset: Any, stream: Stream) -> None:
    """Set up this process as torch's `_worker_loop` sets up a worker."""
    seed = stream.seed + stream.worker
    random.seed(seed)
    np.random.seed(torch_worker._generate_state(stream.seed, stream.worker))
    torch.default_generator.manual_seed(seed)
    info = None
    if stream.num_workers:
        info = torch_worker.WorkerInfo(
            id=stream.worker, num_workers=stream.num_workers, seed=seed, dataset=dataset
        )
    set_worker_info(info)
    if stream.caller.pickled_init_fn:
        [init_fn] = pickle.loads(stream.caller.pickled_init_fn)
        init_fn(stream.worker)


def run_forward(iterator: Iterator, steps: int | None, send: Callable) -> None:
    """Drop the first `steps` samples, or all if it is None: they were taken before."""
    told = time.monotonic()
    for step in itertools.count():
        if step == steps:
            return
        with contextlib.suppress(BaseException):  # the training got this error, and went on
            if next(iterator, END) is END:
                break
        if time.monotonic() > told + TELL_SECONDS:
            told = time.monotonic()
            send(WAITING, pickle.dumps(step), [])
    if steps is not None:
        raise RuntimeError(
            f"run again after a data host was lost, the Dataset had only {step} samples, but "
            f"{steps} had been taken before: make it yield the same samples each time, with seeded "
            "shuffles and unchanged files"
        )


def gather(iterator: Iterator) -> tuple[list[tuple[bytes, int]], list[memoryview], Any]:
    """Return the next samples, their parts, and what comes after them: see `send_samples`."""
    samples, all_parts, size, until = [], [], 0, time.monotonic() + GROUP_SECONDS
    try:
        while not samples or (size < GROUP_BYTES and time.monotonic() < until):
            value, parts = encode(next(iterator))
            size += len(value) + sum(part.nbytes for part in parts)
            if size < GROUP_BYTES:  # the Dataset may reuse this memory for its next sample
                parts = [memoryview(bytes(part)) for part in parts]
            samples.append((value, len(parts)))
            all_parts += parts
    except StopIteration:
        return samples, all_parts, "end"
    except BaseException:  # a panic in a Rust library is not an Exception
        return samples, all_parts, as_error()
    return samples, all_parts, None
