"""The line for an IterableDataset: each of a DataLoader's workers has a stream on a data host.

    dataset = RemoteDataset(wds.WebDataset(urls).decode("pil").map(augment))
    loader = DataLoader(dataset, batch_size=64, num_workers=16)

The samples are those of a DataLoader with as many workers, in the same order, as the Dataset shares
itself out among them. A stream that is lost is opened at another data host, and run forward.
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
from feed.epochs import asked_for
from feed.fetch import Fetcher
from feed.host import DataHost
from feed.iterate import Stream
from feed.source import Source, Wrapper
from feed.wire import Lost

START_SECONDS = 5.0  # for a host's server to be there, as a stream stays where it is opened
HANGS_SECONDS = 300.0  # that a stream's process may be silent over a sample
ATTEMPTS = 5  # at a sample over which streams are lost
SAY_SECONDS = 60.0  # between two lines about a stream that is run forward

opened = 0  # streams in this process, if it is a DataLoader's worker


def stream_of(dataset: IterableDataset, collate_fn: Any = None, timeout: float = 60.0) -> Any:
    """Return the RemoteStream of an IterableDataset; raise TypeError where that is not possible."""
    kind, name = type(dataset), type(dataset).__name__
    has_items = getattr(kind, "__getitem__", None) is not Dataset.__getitem__
    if isinstance(dataset, IterDataPipe):
        raise TypeError(
            f"{name} is a datapipe, which torch's DataLoader itself shares out among its workers: "
            "write it as an IterableDataset"
        )
    if has_items and hasattr(kind, "__len__"):
        raise TypeError(
            f"{name} is both an IterableDataset and map-style. If its workers must be on one host, "
            "as StreamingDataset's, it cannot be on data hosts. Else give RemoteDataset an "
            "IterableDataset around it, or a Dataset, with its __getitem__ alone"
        )
    if collate_fn:
        raise TypeError(
            f"collate_fn is for map-style Datasets: let {name} itself make batches, and give the "
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
                f"{name}: the iterators are on the data hosts, and how far they are, too. Call it "
                "before RemoteDataset, or skip the batches that have been trained on"
            )
        return super().__getattr__(name)

    def __iter__(self) -> Iterator[Any]:
        source, info = self._source, get_worker_info()
        source.begin_process()
        asked = asked_for()
        asker = source.asker(asked)
        if not source.hosts:
            return iter(source.given)
        source.is_changed |= not source.is_kept  # it may have changed in ways that nobody sees
        source.connect()
        stream = Stream(
            asked.seed if asked else torch.initial_seed(),
            info.id if info else 0,
            info.num_workers if info else 0,
            asker,
            [0],
        )
        if source.stream and source.stream.is_of(source.fetcher, stream):
            source.stream.begin_epoch()
        else:
            if source.stream:
                source.stream.close()
                source.stream.begin_epoch()  # so that its iterators notice
            if info:
                stream = own_random_numbers(stream)
            source.stream = OpenStream(source.fetcher, stream)
        return Epoch(source.stream)


def own_random_numbers(stream: Stream) -> Stream:
    """Let a worker's streams after its first one, and its collate_fn, draw numbers of their own.

    They would be those of the first stream: it is that which has the worker's.
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
    """One that knows how many samples it has."""

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
                "a second iterator has been made of this RemoteDataset: give each a RemoteDataset "
                "of its own"
            )
        return self.stream.take()


class Died(Lost):
    """The stream's process has ended, and not its host; says how."""


class OpenStream:
    """A stream as the training host has it: a call to a data host, or to the next one."""

    def __init__(self, fetcher: Fetcher, stream: Stream):
        self.fetcher, self.stream = fetcher, stream
        self.taken = stream.taken  # samples of each epoch
        self.samples: deque[tuple[bytes, list]] = deque()  # that have come: pickle and parts
        self.after: Any = None  # see iterate.run
        self.process, self.call = os.getpid(), None
        self.host: DataHost | None = None
        self.losses = 0  # since the last sample
        self.said_at = 0.0  # when the last line was said

    def take(self) -> Any:
        """Return the next sample; raise what the Dataset raises, also StopIteration."""
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
        """Whether it is a stream of the same Dataset, for the same worker."""
        like = self.stream._replace(seed=stream.seed, taken=stream.taken)
        return fetcher is self.fetcher and like == stream

    def begin_epoch(self) -> None:
        """Begin the next epoch in the same process, if there still is one."""
        if self.after == "end" and not self.samples:
            self.taken[-1] = None
        self.taken.append(0)
        self.samples.clear()
        self.after = None
        if self.call:
            self.epochs.put(b"")

    def receive(self) -> None:
        """Wait for samples of this epoch; if the stream is lost, have another host run it."""
        try:
            if not self.call:
                self.open()
            reply = next(self.replies)
            if reply.state == wire.DIED:
                raise Died(f"its process {reply.value.decode()}")
            if reply.state == wire.UNKNOWN:  # it has dropped the Dataset, or has been restarted
                self.host.workers = 0
                raise Lost("")
            if reply.state == wire.RAISED:
                self.after = "end"
                raise self.host.raised(reply.value)
            frames = itertools.islice(self.call, math.ceil(reply.length / wire.FRAME))
            parts = self.host.result(wire.parts_of, reply, frames)
            if reply.value:
                self.moved_at = time.monotonic()
            elif time.monotonic() > self.moved_at + HANGS_SECONDS:
                raise Died("its process hangs")
            if reply.state == wire.READY:
                self.keep(*pickle.loads(reply.value), iter(parts))
            elif reply.value and time.monotonic() > self.said_at + SAY_SECONDS:
                done = pickle.loads(reply.value)
                self.say(f"is run forward, {done} of {self.taken[-1]} samples")
        except Lost as lost:
            self.close()
            self.losses += bool(str(lost))
            if self.losses >= ATTEMPTS:
                raise RuntimeError(
                    f"a stream has been lost {ATTEMPTS} times over one sample, now by data host "
                    f"{self.host.address}: {lost}. Is there memory for it?"
                ) from None
            if str(lost) and not isinstance(lost, Died):
                self.fetcher.lose(self.host, str(lost))
            time.sleep(0.1)  # it may be this process that forks, for which gRPC must rest
        except BaseException:  # also Ctrl-C: what has not been read must not be read later
            self.close()
            raise

    def keep(self, epoch: int, samples: list, after: Any, parts: Iterator) -> None:
        """Keep samples that have come, unless they are of an epoch that has been left."""
        self.losses = 0
        if epoch == len(self.taken) - 1:
            for value, count in samples:
                own = [*itertools.islice(parts, count)]
                if len(samples) > 1:  # the others' memory shall not stay as long as this sample
                    own = [part.copy() for part in own]
                self.samples.append((value, own))
            self.after = after

    def open(self) -> None:
        """Open it at the data host whose turn it is, by the hosts' numbers of cores."""
        self.fetcher.wait_for_host(START_SECONDS, self.fetcher.timeout)
        ready = self.fetcher.ready()
        hosts = [host for host in ready if host is not self.host] or ready
        rank, ranks = self.stream.asker.ranks or (0, 1)
        count = max(1, self.stream.num_workers) * ranks
        ends = [*itertools.accumulate(host.share() for host in hosts)]
        place = (self.stream.worker * ranks + rank + 0.5) / count * ends[-1]
        host = next(host for host, end in zip(hosts, ends, strict=True) if end > place)
        if self.host:
            self.say(f"goes on at data host {host.address}, after {self.taken[-1]} samples")
        self.host = host
        self.epochs: queue.SimpleQueue = queue.SimpleQueue()
        self.call, self.replies = host.open_stream(self.stream, self.epochs)
        self.moved_at = time.monotonic()

    def say(self, text: str) -> None:
        self.said_at = time.monotonic()
        rank = os.environ.get("RANK", 0)
        print(f"feed: stream {self.stream.worker} of rank {rank} {text}", flush=True)

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """End the call, and with it the process on the data host."""
        if self.call and self.process == os.getpid():
            self.call.cancel()
            self.epochs.put(None)
            self.call = None
