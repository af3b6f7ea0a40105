"""RemoteDataset for an IterableDataset: each DataLoader worker has a stream on a data host.

    dataset = RemoteDataset(wds.WebDataset(urls).decode("pil").map(augment))
    loader = DataLoader(dataset, batch_size=64, num_workers=16)

The samples and their order are those of a plain DataLoader with as many workers, among which the
Dataset divides itself. If a stream is lost, it is opened on another data host, and run forward.
"""

import itertools
import math
import os
import pickle
import queue
import random
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, IterDataPipe, get_worker_info

from feed import wire
from feed.client import DataHost
from feed.dataloader import calling_loader
from feed.fetch import Fetcher
from feed.iterate import Stream
from feed.log import logger
from feed.source import Source
from feed.wire import CallAgain, Lost
from feed.wrapper import Wrapper

START_SECONDS = 5.0  # to wait for hosts that failed, since a stream stays where it is opened
HANGS_SECONDS = 300.0  # if a sample takes longer, the stream's process counts as hanging
ATTEMPTS = 5  # for a sample, if its stream is lost each time
SAY_SECONDS = 60.0  # between two lines about a stream that is run forward

opened = 0  # streams that this process, a DataLoader's worker, has opened


def stream_of(dataset: IterableDataset, collate_fn: Any = None, timeout: float = 60.0) -> Any:
    """Return a RemoteStream for an IterableDataset; raise TypeError if that is not possible."""
    kind, name = type(dataset), type(dataset).__name__
    has_items = getattr(kind, "__getitem__", None) is not Dataset.__getitem__
    if isinstance(dataset, IterDataPipe):
        raise TypeError(
            f"{name} is a datapipe, which torch's DataLoader itself divides among its workers: "
            "write it as an IterableDataset"
        )
    if has_items and hasattr(kind, "__len__"):
        raise TypeError(
            f"{name} is both an IterableDataset and map-style. If its workers must share a host, "
            "as StreamingDataset's must, it cannot run on data hosts. Otherwise wrap it in a plain "
            "IterableDataset, or in a Dataset that only has its __getitem__"
        )
    if collate_fn:
        raise TypeError(
            f"collate_fn is for map-style Datasets: have {name} make batches, and give the "
            "DataLoader batch_size=None"
        )
    return (SizedStream if hasattr(kind, "__len__") else RemoteStream)(dataset, timeout)


class RemoteStream(Wrapper, IterableDataset):
    """An IterableDataset whose iterators run on the data hosts that HETERO_DATA_HOSTS names."""

    def __init__(self, dataset: IterableDataset, timeout: float):
        object.__setattr__(self, "_source", Source(dataset, True, None, timeout))

    def __getattr__(self, name: str) -> Any:
        if name in ("state_dict", "load_state_dict"):
            raise AttributeError(
                f"{name} is not available, because only the data hosts have the iterators. Call it "
                "before RemoteDataset, or skip the batches that you have trained on"
            )
        return super().__getattr__(name)

    def __iter__(self) -> Iterator[Any]:
        source, info = self._source, get_worker_info()
        source.begin_process()
        loader = calling_loader()
        caller = source.caller(loader)
        if not source.hosts:
            return iter(source.given)
        source.is_changed |= not source.pickle_is_kept  # it may have changed unnoticed
        source.renew_fetcher(loader)
        stream = Stream(
            loader.seed if loader else torch.initial_seed(),
            info.id if info else 0,
            info.num_workers if info else 0,
            caller,
            [0],
        )
        if source.stream and source.stream.is_of(source.fetcher, stream):
            source.stream.begin_epoch()
        else:
            if source.stream:
                source.stream.close()
                source.stream.begin_epoch()  # so that its iterators raise an error from now on
            if info:
                stream = own_random_numbers(stream)
            source.stream = OpenStream(source.fetcher, stream)
        return Epoch(source.stream)


def own_random_numbers(stream: Stream) -> Stream:
    """Give a worker's later streams, and its collate_fn, random numbers of their own.

    Otherwise they would repeat those of its first stream, which has the worker's seed.
    """
    global opened
    seed = stream.seed + opened * 2**32
    if not opened:
        random.seed(f"{seed} {stream.worker}")
        np.random.seed(random.getrandbits(32))
        torch.manual_seed(random.getrandbits(63))
    opened += 1
    return stream._replace(seed=seed % 2**63)


class SizedStream(RemoteStream):
    """A RemoteStream that knows how many samples it has."""

    def __len__(self) -> int:
        return self._source.length()


class Epoch:
    """The iterator of one epoch."""

    def __init__(self, stream: "OpenStream"):
        self.stream, self.number = stream, len(stream.taken)

    def __iter__(self) -> "Epoch":
        return self

    def __next__(self) -> Any:
        if self.number != len(self.stream.taken):
            raise RuntimeError(
                "a second iterator has been made of this RemoteDataset: use a RemoteDataset for "
                "each iterator"
            )
        return self.stream.take()


class Died(Exception):
    """The stream's process has died or hangs, but not its host; says which."""


class OpenStream:
    """The training host's end of a stream: a call to a data host, or, once lost, to another one."""

    def __init__(self, fetcher: Fetcher, stream: Stream):
        self.fetcher, self.stream = fetcher, stream
        self.taken = stream.taken  # the number of samples taken in each epoch
        self.samples: deque[tuple[bytes, list]] = deque()  # that have come, as pickle and parts
        self.after: Any = None  # see iterate.send_samples
        self.process, self.call = os.getpid(), None
        self.host: DataHost | None = None
        self.losses = 0  # since the last sample
        self.said_at = 0.0  # when the last line was printed

    def take(self) -> Any:
        """Return the next sample; raise what the Dataset raises, or StopIteration."""
        self.moved_at = time.monotonic()
        while not self.samples:
            if self.after == "end":
                raise StopIteration
            if self.after:
                error, self.after = self.after, None
                self.taken[-1] += 1
                raise self.host.raised(error)
            self.receive()
        self.taken[-1] += 1
        value, parts = self.samples.popleft()
        return pickle.loads(value, buffers=parts)

    def is_of(self, fetcher: Fetcher, stream: Stream) -> bool:
        """Return whether it is a stream of the same Dataset, for the same worker."""
        like = self.stream._replace(seed=stream.seed, taken=stream.taken)
        return fetcher is self.fetcher and like == stream

    def begin_epoch(self) -> None:
        """Begin the next epoch, in the same process if there still is one."""
        if self.after == "end" and not self.samples:
            self.taken[-1] = None
        self.taken.append(0)
        self.samples.clear()
        self.after = None
        if self.call:
            self.epochs.put(b"")

    def receive(self) -> None:
        """Wait for samples of this epoch. If the stream is lost, the next call opens it again."""
        try:
            if not self.call:
                self.open()
            reply = next(self.replies)
            if reply.state == wire.DIED:
                raise Died(f"its process {reply.value.decode()}")
            if reply.state == wire.UNKNOWN:
                self.host.raise_dropped()
            if reply.state == wire.RAISED:
                self.after = "end"
                raise self.host.raised(reply.value)
            follow = math.ceil((reply.length - len(reply.memory)) / wire.FRAME)
            frames = itertools.islice(self.call, follow)
            parts = self.host.result(wire.memory_of, reply, frames)
            if reply.value:
                self.moved_at = time.monotonic()
            elif time.monotonic() > self.moved_at + HANGS_SECONDS:
                raise Died("its process hangs")
            if reply.state == wire.DONE:
                self.keep(*pickle.loads(reply.value), iter(parts))
            elif reply.value and time.monotonic() > self.said_at + SAY_SECONDS:
                done = pickle.loads(reply.value)
                self.say(f"skips samples that were taken before: {done} of {self.taken[-1]}")
        except (Lost, Died, CallAgain) as error:
            self.close()
            self.losses += not isinstance(error, CallAgain)
            if self.losses >= ATTEMPTS:
                raise RuntimeError(
                    f"a stream was lost {ATTEMPTS} times over one sample, the last time on data "
                    f"host {self.host.address}: {error}"
                ) from None
            if isinstance(error, Lost):
                self.fetcher.lose(self.host, str(error))
            time.sleep(0.1)  # if a fork of this process ended the call, let it fork
        except BaseException:  # also Ctrl-C: do not continue later in the middle of a reply
            self.close()
            raise

    def keep(self, epoch: int, samples: list, after: Any, parts: Iterator) -> None:
        """Keep samples that have come, unless they belong to an epoch that is over."""
        self.losses = 0
        if epoch == len(self.taken) - 1:
            for value, count in samples:
                own = [*itertools.islice(parts, count)]
                if len(samples) > 1:  # otherwise this sample would keep the others' memory
                    own = [part.copy() for part in own]
                self.samples.append((value, own))
            self.after = after

    def open(self) -> None:
        """Open the stream on a host. The hosts share all streams by their numbers of workers."""
        self.fetcher.wait_for_host(START_SECONDS, self.fetcher.timeout)
        ready = self.fetcher.ready()
        hosts = [host for host in ready if host is not self.host] or ready
        rank, ranks = self.stream.caller.ranks or (0, 1)
        count = max(1, self.stream.num_workers) * ranks
        ends = [*itertools.accumulate(host.workers_for_rank() for host in hosts)]
        position = (self.stream.worker * ranks + rank + 0.5) / count * ends[-1]
        host = next(host for host, end in zip(hosts, ends, strict=True) if end > position)
        if self.host:
            self.say(f"continues on data host {host.address}, after {self.taken[-1]} samples")
        self.host = host
        self.epochs: queue.SimpleQueue = queue.SimpleQueue()
        self.call, self.replies = host.open_stream(self.stream, self.epochs)
        self.moved_at = time.monotonic()

    def say(self, text: str) -> None:
        self.said_at = time.monotonic()
        rank = os.environ.get("RANK", 0)
        logger.warning("stream %s of rank %s %s", self.stream.worker, rank, text)

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """End the call, and with it the stream's process on the data host."""
        if self.call and self.process == os.getpid():
            self.call.cancel()
            self.epochs.put(None)
            self.call = None
