"""The training process's side of the loader: batches that data hosts prepare.

    loader = FeedLoader(["algo-1:7710", "algo-2:7710"], token, batch_size=64, shuffle=True)
    for epoch in range(3):
        loader.set_epoch(epoch)
        for batch in loader:
            ...

The batches, and their order, are those of `batches.LocalLoader`, whatever the number of hosts.
"""

import atexit
import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict
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
    ("grpc.keepalive_time_ms", 10_000),  # notice a host that hangs or vanished, within 20 s
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
]


class DatasetError(RuntimeError):
    """The Dataset or collate_fn raised on a data host; the message holds its text and traceback."""


class FeedLoader(EpochLoader):
    """This rank's batches, prepared by `hosts` ("host:port"): batch i by hosts[i % len(hosts)].

    Of each host, up to `read_ahead` batches are held here, in page-locked memory with `pin_memory`.
    Waits up to `connect_timeout` seconds for the hosts to come up.

    Creating or iterating raises PermissionError when a host refuses the token, and ConnectionError,
    which names the host, when it cannot be reached or fails; iterating raises DatasetError.
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
    ):
        if isinstance(hosts, str) or not hosts:
            raise ValueError(f'hosts must be a list such as ["algo-1:7710"], but is {hosts!r}')
        if read_ahead < 1:
            raise ValueError(f"read_ahead must be at least 1, but is {read_ahead}")
        self._hosts = list(hosts)
        self._metadata = [("authorization", f"Bearer {token}")]
        self._read_ahead = read_ahead
        self._pin_memory = pin_memory
        length = self._ask_length(connect_timeout)
        super().__init__(BatchPlan(length, batch_size, shuffle, drop_last, seed, rank, world_size))

    def _ask_length(self, connect_timeout: float) -> int:
        """Return the length of the dataset, which all hosts must agree on."""
        channels = [grpc.insecure_channel(host, CHANNEL_OPTIONS) for host in self._hosts]
        try:
            answers = [
                services.DatasetFeedStub(channel).Describe.future(
                    messages.DescribeRequest(),
                    timeout=connect_timeout,
                    metadata=self._metadata,
                    wait_for_ready=True,
                )
                for channel in channels
            ]
            lengths = []
            for host, answer in zip(self._hosts, answers, strict=True):
                try:
                    lengths.append(answer.result().length)
                except grpc.RpcError as error:
                    raise _explain(error, host) from None
        finally:
            for channel in channels:
                channel.close()
        for host, length in zip(self._hosts, lengths, strict=True):
            if length != lengths[0]:
                raise ValueError(
                    "data hosts must serve the same dataset, but "
                    f"{self._hosts[0]} has {lengths[0]} samples and {host} has {length}"
                )
        return lengths[0]

    def _batches(self, epoch: int, numbers: range) -> Iterator[Any]:
        count = len(self._hosts)
        streams: list[HostStream] = []
        try:
            for place, host in enumerate(self._hosts):
                first = numbers.start + (place - numbers.start) % count
                own_numbers = range(first, numbers.stop, count)
                request = messages.BatchRequest(
                    plan=messages.Plan(**asdict(self.plan)),
                    epoch=epoch,
                    start=own_numbers.start,
                    stop=own_numbers.stop,
                    step=own_numbers.step,
                )
                streams.append(
                    HostStream(host, self._metadata, request, self._read_ahead, self._pin_memory)
                )
            for number in numbers:
                yield streams[number % count].take()
        finally:
            for stream in streams:
                stream.close()


class HostStream:
    """The batches of one request to one host, read ahead of their use by a thread of its own."""

    def __init__(
        self,
        host: str,
        metadata: list[tuple[str, str]],
        request: Any,
        read_ahead: int,
        pin_memory: bool,
    ):
        self._host = host
        self._numbers = range(request.start, request.stop, request.step)
        self._pin_memory = pin_memory
        self._channel = grpc.insecure_channel(host, CHANNEL_OPTIONS)
        self._frames = services.DatasetFeedStub(self._channel).Batches(request, metadata=metadata)
        self._room = threading.Semaphore(read_ahead)  # batches that may still be read ahead
        self._arrived: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()
        self._closed = False
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
        self._closed = True
        self._frames.cancel()
        self._room.release()
        self._thread.join()
        self._channel.close()

    def _read(self) -> None:
        try:
            for number in self._numbers:
                self._room.acquire()
                if self._closed:
                    return
                self._arrived.put((self._receive(number), None))
        except grpc.RpcError as error:
            self._arrived.put((None, _explain(error, self._host)))
        except StopIteration:
            error = ConnectionError(f"data host {self._host} ended its stream inside a batch")
            self._arrived.put((None, error))
        except Exception as error:
            self._arrived.put((None, error))

    def _receive(self, number: int) -> Any:
        """Return batch `number`, which must be the stream's next."""
        first = next(self._frames, messages.Frame())
        if first.error:
            raise DatasetError(f"data host {self._host}, batch {number}: {first.error}")
        if first.number != number or not first.structure_size:
            raise ConnectionError(f"data host {self._host} did not send batch {number}")
        more_data = (frame.data for frame in self._frames)
        structure = np.empty(first.structure_size, np.uint8)
        rest = fill([structure], np.frombuffer(first.data, np.uint8), more_data)
        batch, memory = decode(messages.Value.FromString(structure.tobytes()), self._pin_memory)
        if len(fill(memory, rest, more_data)):
            raise ConnectionError(f"data host {self._host} sent more than batch {number} holds")
        return batch


def _explain(error: grpc.RpcError, host: str) -> Exception:
    """Return a failed call as an exception that names the host and what to do."""
    code, details = error.code(), error.details()
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return PermissionError(
            f"data host {host} refused this job's token ({details}): give both sides the same one"
        )
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return ConnectionError(
            f"data host {host} did not answer in time ({details}): is it running there?"
        )
    return ConnectionError(f"data host {host} failed ({code.name}): {details}")
