"""The training process's side of the loader: batches that data hosts prepare.

    loader = FeedLoader(["algo-1:7710", "algo-2:7710"], token, batch_size=64, shuffle=True)
    for epoch in range(3):
        loader.set_epoch(epoch)
        for batch in loader:
            ...

The batches, and their order, are those of `batches.LocalLoader`, whatever the number of hosts, and
whichever of them fail on the way.
"""

import atexit
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import grpc
import numpy as np

from batches import BatchPlan, EpochLoader
from wire import decode, fill, messages, services

CHANNEL_OPTIONS = [
    ("grpc.enable_http_proxy", 0),  # hosts of one job talk directly
    ("grpc.use_local_subchannel_pool", 1),  # one connection per stream
    ("grpc.initial_reconnect_backoff_ms", 100),  # hosts of one job start at about the same time
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.min_reconnect_backoff_ms", 10_000),  # the time that one attempt may take
    ("grpc.keepalive_time_ms", 10_000),  # notice a host that hangs or vanished, within 20 s
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),  # no limit: also while a batch takes minutes
]

RETRY_PAUSE = 0.5  # seconds, after all hosts have failed in turn
AVOID_SECONDS = 60  # for so long after its failure a host is asked only when all others fail


class DatasetError(RuntimeError):
    """The Dataset or collate_fn raised on a data host; the message holds its text and traceback."""


class FeedLoader(EpochLoader):
    """This rank's batches, prepared by `hosts` ("host:port"): batch i by hosts[i % len(hosts)].

    When a host fails, the next in the list is asked for its batches for the rest of the epoch. Of
    each host, up to `read_ahead` batches are held here, in page-locked memory with `pin_memory`.

    Creating waits up to `connect_timeout` seconds for all hosts, and makes do with those that
    answer. Creating or iterating raises PermissionError when a host refuses the token, ValueError
    when hosts serve different datasets, and ConnectionError, which names a host, when none can be
    reached or they keep failing for `retry_timeout` seconds; iterating raises DatasetError.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        token: str,
        batch_size: int,
        shuffle: bool = False,
        drop_last: bool = False,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        read_ahead: int = 4,
        pin_memory: bool = False,
        connect_timeout: float = 60.0,
        retry_timeout: float = 60.0,
    ):
        if isinstance(hosts, str) or not hosts:
            raise ValueError(f'hosts must be a list such as ["algo-1:7710"], but is {hosts!r}')
        if read_ahead < 1:
            raise ValueError(f"read_ahead must be at least 1, but is {read_ahead}")
        self._hosts = list(hosts)
        self._metadata = [("authorization", f"Bearer {token}")]
        self._failed_at: dict[str, float] = {}  # monotonic seconds, of hosts that fail
        self._stream = partial(
            BatchStream, self._failed_at, self._metadata, read_ahead, pin_memory, retry_timeout
        )
        length = self._ask_length(connect_timeout)
        super().__init__(BatchPlan(length, batch_size, shuffle, drop_last, seed, rank, world_size))

    def _ask_length(self, connect_timeout: float) -> int:
        """Return the length of the dataset, which all hosts that answer must agree on."""
        channels = [grpc.insecure_channel(host, CHANNEL_OPTIONS) for host in self._hosts]
        answers: queue.SimpleQueue[tuple[str, grpc.Future]] = queue.SimpleQueue()
        lengths, failures = {}, {}
        try:
            for host, channel in zip(self._hosts, channels, strict=True):
                services.DatasetFeedStub(channel).Describe.future(
                    messages.DescribeRequest(),
                    timeout=connect_timeout,
                    metadata=self._metadata,
                    wait_for_ready=True,
                ).add_done_callback(lambda answer, host=host: answers.put((host, answer)))
            for _ in self._hosts:
                host, answer = answers.get()
                try:
                    lengths[host] = answer.result().length
                except grpc.RpcError as error:
                    failures[host] = _explain(error, host)
                    if not isinstance(failures[host], ConnectionError):
                        raise failures[host] from None
        finally:
            for channel in channels:
                channel.close()
        if not lengths:
            raise failures[self._hosts[0]]
        first = next(host for host in self._hosts if host in lengths)
        for host, length in lengths.items():
            if length != lengths[first]:
                raise ValueError(
                    "data hosts must serve the same dataset, but "
                    f"{first} has {lengths[first]} samples and {host} has {length}"
                )
        for host, failure in failures.items():
            self._failed_at[host] = time.monotonic()
            print(f"{failure} Its batches will be asked of others.", flush=True)
        return lengths[first]

    def _batches(self, plan: BatchPlan, epoch: int) -> Iterator[Any]:
        count = len(self._hosts)
        streams: list[BatchStream] = []
        try:
            long_ago = time.monotonic() - AVOID_SECONDS
            for place in range(count):
                hosts = self._hosts[place:] + self._hosts[:place]
                hosts.sort(key=lambda host: self._failed_at.get(host, long_ago) > long_ago)
                streams.append(self._stream(hosts, plan, epoch, range(place, len(plan), count)))
            for number in range(len(plan)):
                yield streams[number % count].take()
        finally:
            for stream in streams:
                stream.close()


@dataclass(eq=False)
class BatchStream:
    """Some batches of one epoch, read ahead of their use by a thread of its own.

    They come from the first of `hosts` until it fails, then from the next, and so on in a circle.
    """

    failed_at: dict[str, float]  # of all streams of a loader
    metadata: list[tuple[str, str]]
    read_ahead: int  # batches
    pin_memory: bool
    retry_timeout: float  # seconds
    hosts: list[str]
    plan: BatchPlan
    epoch: int
    numbers: range

    def __post_init__(self) -> None:
        self._place = 0  # in `hosts`, of the one that is being asked
        self._channel: grpc.Channel | None = None
        self._frames: Any = None  # the call: an iterator of frames, which can be cancelled
        self._room = threading.Semaphore(self.read_ahead)  # batches that may still be read ahead
        self._arrived: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()
        self._closed = threading.Event()
        # A program may end in the middle of an epoch: it must not wait for this thread (so: a
        # daemon), nor close the stream only when Python has no threads any more (so: at exit).
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def take(self) -> Any:
        """Return the next batch, waiting for it; raise what ended the stream before it."""
        batch, error = self._arrived.get()
        if error:
            raise error
        self._room.release()
        return batch

    def close(self) -> None:
        """Cancel the stream and free its thread and connection."""
        atexit.unregister(self.close)
        self._closed.set()
        if self._frames:
            self._frames.cancel()
        self._room.release()
        self._thread.join()

    def _read(self) -> None:
        try:
            for number in self.numbers:
                self._room.acquire()
                batch = self._fetch(number)
                if self._closed.is_set():
                    return
                self._arrived.put((batch, None))
        except Exception as error:
            self._arrived.put((None, error))
        finally:
            self._disconnect()

    def _fetch(self, number: int) -> Any:
        """Return batch `number`, the next, from the first host that delivers it; None once closed.

        Raises ConnectionError when none has for `retry_timeout` seconds, and at once what another
        host could not do better.
        """
        failures = 0
        while True:
            host = self.hosts[self._place]
            try:
                if self._channel:
                    return self._receive(host, number)
                self._connect(host, number)
                batch = self._receive(host, number)
                self.failed_at.pop(host, None)  # it answers: not just what came before it failed
                return batch
            except (grpc.RpcError, ConnectionError) as error:
                failure = _explain(error, host) if isinstance(error, grpc.RpcError) else error
            self._disconnect()
            if self._closed.is_set():
                return None
            if not isinstance(failure, ConnectionError):
                raise failure
            failures += 1
            if failures == 1:
                give_up_at = time.monotonic() + self.retry_timeout
            if failures > len(self.hosts) and time.monotonic() > give_up_at:
                sentence = f"no data host has sent batch {number} for {self.retry_timeout:g} s"
                raise ConnectionError(f"{sentence}: {failure}")
            self._place = (self._place + 1) % len(self.hosts)
            if host not in self.failed_at:  # else that has been printed
                print(f"{failure}: asking {self.hosts[self._place]} for its batches", flush=True)
            self.failed_at[host] = time.monotonic()
            if failures % len(self.hosts) == 0:
                self._closed.wait(RETRY_PAUSE)

    def _connect(self, host: str, number: int) -> None:
        """Ask `host` for the batches from `number` on."""
        request = messages.BatchRequest(
            plan=messages.Plan(**asdict(self.plan)),
            epoch=self.epoch,
            start=number,
            stop=self.numbers.stop,
            step=self.numbers.step,
        )
        self._channel = grpc.insecure_channel(host, CHANNEL_OPTIONS)
        stub = services.DatasetFeedStub(self._channel)
        self._frames = stub.Batches(request, metadata=self.metadata)
        if self._closed.is_set():  # `close` may have come too early to see this call
            self._frames.cancel()

    def _disconnect(self) -> None:
        if self._channel:
            self._channel.close()
            self._channel = None

    def _receive(self, host: str, number: int) -> Any:
        """Return batch `number`, which must be the next that `host` sends."""
        first = next(self._frames, messages.Frame())
        if first.error:
            raise DatasetError(f"data host {host}, batch {number}: {first.error}")
        if first.number != number or not first.structure_size:
            raise ConnectionError(f"data host {host} did not send batch {number}")
        more_data = (frame.data for frame in self._frames)
        structure = np.empty(first.structure_size, np.uint8)
        try:
            rest = fill([structure], np.frombuffer(first.data, np.uint8), more_data)
            batch, memory = decode(messages.Value.FromString(structure.tobytes()), self.pin_memory)
            rest = fill(memory, rest, more_data)
        except StopIteration:
            raise ConnectionError(f"data host {host} ended its stream inside a batch") from None
        if len(rest):
            raise ConnectionError(f"data host {host} sent more than batch {number} holds")
        return batch


def _explain(error: grpc.RpcError, host: str) -> Exception:
    """Return a failed call as an exception that names the host and what to do.

    Only after a ConnectionError is there any point in asking again.
    """
    code, details = error.code(), error.details()
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return PermissionError(
            f"data host {host} refused this job's token ({details}): give both sides the same one"
        )
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return ValueError(f"data host {host} cannot serve this: {details}")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return ConnectionError(
            f"data host {host} did not answer in time ({details}): is it running there?"
        )
    return ConnectionError(f"data host {host} failed ({code.name}: {details})")
