"""The training process's side of the loader: batches that data hosts prepare.

    loader = FeedLoader(["algo-1:7710", "algo-2:7710"], token, batch_size=64, shuffle=True)
    for epoch in range(3):
        loader.set_epoch(epoch)
        for batch in loader:
            ...

The batches, and their order, are those of `batches.LocalLoader`, whatever the number of hosts, and
whichever of them fail on the way. Each host is asked for the next batch as soon as it has sent
one: a slow host prepares fewer than the others, and one that fails leaves its own to them.
"""

import atexit
import contextlib
import heapq
import math
import queue
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from batches import BatchKey, BatchPlan, EpochLoader
from wire import SERVICE, hang_up, messages, receive, receive_header

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
CONNECT_SECONDS = 5  # that connecting for a call's batches may take; the server waits longer
RETRY_PAUSE = 0.5  # seconds, after a host has failed; also for a call to say why it has


class DatasetError(RuntimeError):
    """The Dataset or collate_fn raised on a data host, or killed its process; the message says how.

    It holds what was raised, with its traceback.
    """


class FeedLoader(EpochLoader):
    """This rank's batches, prepared by `hosts` ("host:port").

    Up to `read_ahead` batches per host are held here before their turn, in page-locked memory with
    `pin_memory`. Only while the next one is late, because its host is slower, there may be twice as
    many more as the hosts have been asked for: each for two more than it has worker processes.

    Creating waits up to `connect_timeout` seconds for all hosts, and makes do with those that
    answer. Creating or iterating raises PermissionError when a host refuses the token, ValueError
    when hosts serve different datasets, and ConnectionError, which names a host, when none can be
    reached or all keep failing for `retry_timeout` seconds; iterating raises DatasetError.
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
        self._hosts, self._token = list(dict.fromkeys(hosts)), token
        self._read_ahead, self._pin_memory = read_ahead, pin_memory
        self._retry_timeout = retry_timeout
        self._failing: set[str] = set()  # hosts whose failure has been printed
        length = self._ask_length(connect_timeout)
        super().__init__(BatchPlan(length, batch_size, shuffle, drop_last, seed, rank, world_size))

    def _ask_length(self, connect_timeout: float) -> int:
        """Return the length of the dataset, which all hosts that answer must agree on."""
        channels = [grpc.insecure_channel(host, CHANNEL_OPTIONS) for host in self._hosts]
        answers: queue.SimpleQueue[tuple[str, grpc.Future]] = queue.SimpleQueue()
        lengths, failures = {}, {}
        try:
            for host, channel in zip(self._hosts, channels, strict=True):
                channel.unary_unary(
                    f"/{SERVICE}/Describe",
                    messages.DescribeRequest.SerializeToString,
                    messages.DatasetDescription.FromString,
                ).future(
                    messages.DescribeRequest(),
                    timeout=connect_timeout,
                    metadata=_metadata(self._token),
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
            self._failing.add(host)
            print(f"{failure} Its batches will be asked of others.", flush=True)
        return lengths[first]

    def _batches(self, plan: BatchPlan, epoch: int) -> Iterator[Any]:
        arrivals = Arrivals(
            plan, epoch, len(self._hosts), self._read_ahead, self._retry_timeout, self._failing
        )
        threads = []

        def close() -> None:
            if arrivals.ended.is_set():
                return
            arrivals.end()
            for thread in threads:
                thread.join()
            arrivals.calls.clear()

        # A program may end in the middle of an epoch: it must not wait for these threads (so:
        # daemons), nor end them only when Python runs no threads any more (so: at exit). By then
        # nothing may be left to do, neither here nor for gRPC's destructors: its threads may have
        # stopped for good while they held a lock.
        atexit.register(close)
        try:
            for host in self._hosts:
                arguments = arrivals, host, self._token, self._pin_memory
                thread = threading.Thread(target=fetch, args=arguments, daemon=True)
                thread.start()
                threads.append(thread)
            for _ in range(len(plan)):
                yield arrivals.take()
        finally:
            close()
            atexit.unregister(close)


@dataclass(eq=False)
class Call:
    """A host's stream of batches."""

    asked: dict[int, BatchKey] = field(default_factory=dict)  # and not answered yet, by number
    at_most: int = 0  # that may be asked at a time; 0 until the host has answered the call
    answers: Any = None  # gRPC's iterator, which can be cancelled
    ended: bool = False

    def end(self) -> None:
        """Have its threads end."""
        self.ended = True
        self.answers.cancel()


class Arrivals:
    """An epoch's batches: who has been asked for which, and which have arrived.

    The training's thread takes them; for each host there are a thread that asks and one that
    receives.
    """

    def __init__(
        self,
        plan: BatchPlan,
        epoch: int,
        hosts: int,
        read_ahead: int,
        retry_timeout: float,
        failing: set[str],
    ):
        self.plan, self.hosts, self.retry_timeout = plan, hosts, retry_timeout
        self.room = read_ahead * hosts
        self.failing = failing  # hosts that have not sent a batch since their failure
        self.all_failing_since: float | None = None
        self.changed = threading.Condition()
        self.calls: list[Call] = []
        self.keys = plan.keys(epoch)
        self.first_new = 0  # number of the next of `keys`
        self.given_back: list[tuple[int, BatchKey]] = []  # a heap: of calls that failed
        self.arrived: dict[int, Any] = {}
        self.next = 0  # number of the batch to be handed out next
        self.starving = False  # whether the training waits for it
        self.error: Exception | None = None
        self.ended = threading.Event()

    def take(self) -> Any:
        """Return the next batch, waiting for it; raise what it has come to instead."""
        with self.changed:
            self.starving = True
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.next in self.arrived or self.error)
            self.starving = False
            if self.next not in self.arrived:
                raise self.error
            batch = self.arrived.pop(self.next)
            self.next += 1
            self.changed.notify_all()
        if isinstance(batch, DatasetError):
            raise batch
        return batch

    def end(self) -> None:
        """Cancel all calls, which ends the threads."""
        with self.changed:
            self.ended.set()
            for call in self.calls:
                call.end()
            self.changed.notify_all()

    def begin(self, call: Call) -> None:
        """Add a call that has just been made."""
        with self.changed:
            self.calls.append(call)
            if self.ended.is_set():
                call.end()
            self.changed.notify_all()

    def let_ask(self, call: Call, at_most: int) -> None:
        """Let a call, whose host has answered, ask for so many batches at a time."""
        with self.changed:
            call.at_most = at_most
            self.changed.notify_all()

    def ask(self, call: Call) -> Iterator[Any]:
        """Yield requests for the first batches that are left, whenever the call may ask for one."""
        while True:
            with self.changed:
                self.changed.wait_for(lambda: call.ended or self._may_ask(call))
                if call.ended:
                    return
                if self.given_back:
                    number, key = heapq.heappop(self.given_back)
                else:
                    number, key = self.first_new, next(self.keys)
                    self.first_new += 1
                call.asked[number] = key
            length = self.plan.dataset_length
            yield messages.BatchRequest(number=number, dataset_length=length, **key._asdict())

    def _may_ask(self, call: Call) -> bool:
        if len(call.asked) >= call.at_most:
            return False
        # What is asked for may have to be held here until a slower host has sent what comes first.
        ahead = self.room + 2 * sum(call.at_most for call in self.calls)
        return bool(self.given_back) or (self.first_new < min(len(self.plan), self.next + ahead))

    def wait_for_room(self, call: Call) -> bool:
        """Wait until a batch may be received; return whether the call still goes on."""
        with self.changed:
            self.changed.wait_for(
                lambda: (
                    call.ended
                    or len(self.arrived) < self.room
                    or (self.starving and self.next not in self.arrived)
                )
            )
            return not call.ended

    def receive(self, call: Call, connection: socket.socket, host: str, pin_memory: bool) -> None:
        """Receive one batch, or a DatasetError in its place."""
        header = receive_header(connection)
        if header.number not in call.asked:
            raise ValueError(f"it sent batch {header.number}, which it was not asked for")
        if header.error:
            batch = DatasetError(f"data host {host}, batch {header.number}: {header.error}")
        else:
            batch = receive(connection, header, pin_memory)
        with self.changed:
            del call.asked[header.number]
            self.arrived[header.number] = batch
            self.failing.discard(host)
            self.all_failing_since = None
            self.changed.notify_all()

    def fail(self, call: Call, host: str, failure: Exception) -> None:
        """Leave a call's batches to others, or give up."""
        with self.changed:
            call.ended = True
            if call in self.calls:
                self.calls.remove(call)
            for item in call.asked.items():
                heapq.heappush(self.given_back, item)
            if not isinstance(failure, ConnectionError):
                self.error = failure
            elif not self.ended.is_set():
                if host not in self.failing:
                    print(f"{failure}: its batches are asked of whoever answers", flush=True)
                self.failing.add(host)
                now = time.monotonic()
                if len(self.failing) == self.hosts and self.all_failing_since is None:
                    self.all_failing_since = now
                # A host that has answered a call is up: its first batch may take minutes.
                answered = any(call.at_most for call in self.calls)
                overdue = now - (self.all_failing_since or now) > self.retry_timeout
                if overdue and not answered:
                    sentence = f"no data host has sent batch {self.next}"
                    self.error = ConnectionError(
                        f"{sentence} for {self.retry_timeout:g} s: {failure}"
                    )
            self.changed.notify_all()


def fetch(arrivals: Arrivals, host: str, token: str, pin_memory: bool) -> None:
    """Get batches from a host until the epoch ends, with a new call whenever one has failed."""
    while not arrivals.ended.is_set():
        call = Call()
        with grpc.insecure_channel(host, CHANNEL_OPTIONS) as channel:
            method = channel.stream_stream(
                f"/{SERVICE}/Batches",
                messages.BatchRequest.SerializeToString,
                messages.Welcome.FromString,
            )
            try:
                call.answers = method(arrivals.ask(call), metadata=_metadata(token))
                arrivals.begin(call)
                welcome = next(call.answers)
                with connect(host, welcome.port, welcome.secret) as connection:
                    # However the call ends: also when gRPC notices that the host hangs or has gone.
                    call.answers.add_done_callback(lambda _, it=connection: hang_up(it))
                    # This rank's share of the workers, and two while batches travel.
                    share = math.ceil(welcome.workers / arrivals.plan.world_size)
                    arrivals.let_ask(call, share + 2)
                    while arrivals.wait_for_room(call):
                        arrivals.receive(call, connection, host, pin_memory)
                return
            except Exception as error:
                failure = error
                if isinstance(error, OSError):  # of the connection; the call may know why
                    with contextlib.suppress(grpc.FutureTimeoutError, grpc.FutureCancelledError):
                        failure = call.answers.exception(RETRY_PAUSE) or error
                arrivals.fail(call, host, _explain(failure, host))
                # gRPC raises the call itself, which refers by this to all that refers to the call.
                error.__traceback__ = None
        arrivals.ended.wait(RETRY_PAUSE)


def connect(host: str, port: int, secret: bytes) -> socket.socket:
    """Return the connection for a call's batches. Raises OSError."""
    address = host.rpartition(":")[0].strip("[]"), port
    try:
        connection = socket.create_connection(address, CONNECT_SECONDS)
    except (TimeoutError, ConnectionRefusedError) as error:
        raise ConnectionError(
            f"it answers, but not at port {port}, which its batches would come from ({error}): "
            "let these hosts reach each other at all ports"
        ) from error
    connection.settimeout(None)
    # As gRPC's keepalive does for the call: notices a firewall that has forgotten the connection,
    # and keeps it from doing so.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
    connection.sendall(secret)
    return connection


def _metadata(token: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {token}")]


def _explain(error: Exception, host: str) -> Exception:
    """Return why a call has failed, with the host and what to do.

    Only after a ConnectionError is there any point in asking again.
    """
    if isinstance(error, StopIteration):
        return ConnectionError(f"data host {host} ended its stream")
    if isinstance(error, (OSError, ValueError, DecodeError)):
        return ConnectionError(f"data host {host} failed ({error})")
    if not isinstance(error, grpc.RpcError):
        return RuntimeError(f"data host {host}: {type(error).__name__}: {error}")
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
