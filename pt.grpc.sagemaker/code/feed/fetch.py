"""How a process of the training script gets samples from the data hosts: who is asked, and when.

A batch is cut into chunks, so many that all workers of all data hosts have something to do. Each
chunk is asked of the host that will be done with it first, by what the hosts' replies say. When a
host fails, or a chunk is overdue, another one is asked for it, too: either answer will do.
"""

import hashlib
import math
import os
import pickle
import queue
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import grpc
import torch.distributed as dist

from feed.samples import Chunk, raised_again
from feed.wire import (
    FRAME,
    KEEPALIVE,
    RAISED,
    READY,
    SERVICE,
    UNKNOWN,
    WAITING,
    BrokenReply,
    decode,
    messages,
    sign,
    unseal,
)

CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", -1),  # a reply's pickle may be long
    ("grpc.http2.lookahead_bytes", FRAME),
    ("grpc.enable_http_proxy", 0),  # hosts of one job talk directly
    ("grpc.use_local_subchannel_pool", 1),  # a connection for each channel
    ("grpc.initial_reconnect_backoff_ms", 100),  # hosts of one job start at about the same time
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.min_reconnect_backoff_ms", 10_000),  # the time that one attempt may take
    *KEEPALIVE,
]
MOST_CALLS = 64  # at a time
CHUNKS_PER_WORKER = 2  # one is prepared while another one travels
OVERDUE, OVERDUE_SECONDS = 4, 0.5  # times what was expected, and at least; then 16 times, ...
PAUSE, LOOK_SECONDS = 0.5, 0.1  # until a host that failed, or is making the Dataset, is asked again

own_random = random.Random()  # the training's are not for us
fetchers: "weakref.WeakSet[Fetcher]" = weakref.WeakSet()
# gRPC can be used after a fork if no thread was in it: where the training process itself asks, as
# without workers, it may fork later.
os.register_at_fork(before=lambda: [fetcher.rest() for fetcher in fetchers])


class Lost(Exception):
    """A host that has not answered, for the moment."""


class Host:
    """A data host, as this process knows it."""

    def __init__(self, address: str):
        self.address, self.channel = address, grpc.insecure_channel(address, CHANNEL_OPTIONS)
        self.workers = 0  # until it has the Dataset
        self.is_greeted, self.greet_at = False, 0.0  # whether it is being asked to get it, and when
        self.calls, self.others = 0, 0  # that are open there: ours; by the last reply, others'
        self.seconds = 0.0  # that a worker takes for a sample, lately
        self.failure = ""

    def share(self) -> float:
        """Return how many of its workers there are for this rank."""
        ranks = int(os.environ.get("WORLD_SIZE", 1))
        if dist.is_available() and dist.is_initialized():
            ranks = dist.get_world_size()
        if self.address.startswith("unix"):  # a server on this host, for its own ranks
            ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        return self.workers / ranks

    def expected(self, samples: int) -> float:
        """Return the seconds in which it would be done with so many samples more."""
        rounds = 1 + (self.calls + self.others) / max(1, self.workers)
        return rounds * samples * (self.seconds or 1e-3)


@dataclass(eq=False)
class Task:
    """A chunk to fetch."""

    chunk: Chunk
    asked: list[Host] = field(default_factory=list)  # hosts that have not failed since
    calls: list[grpc.Call] = field(default_factory=list)
    due: float = 0.0  # when another host shall be asked
    is_over: bool = False
    samples: Any = None


class Fetcher:
    """Fetches the samples of a Dataset, for one process.

    check: is called with what a host that has the Dataset says of it, and raises if it differs from
    what others say.
    """

    def __init__(
        self, hosts: list[str], token: str, timeout: float, check: Callable[[str, Any], None]
    ):
        self.hosts, self.token, self.timeout = [Host(name) for name in hosts], token, timeout
        self.check = check
        self.pool, self.process = ThreadPoolExecutor(MOST_CALLS), os.getpid()
        self.running: set[Future] = set()
        self.open: set[grpc.Call] = set()
        self.came: queue.SimpleQueue[tuple[Host, Task | None, Any]] = queue.SimpleQueue()
        self.heard_at = 0.0  # the last sign of life
        fetchers.add(self)
        # Before Python waits for the threads of the pool: a host that hangs would hold them up.
        threading._register_atexit(self.rest)

    def use(self, what: str, digest: bytes, upload: Callable[[], Iterator[bytes]]) -> None:
        """Have the hosts get the Dataset with this digest, whose pickle `upload` yields."""
        self.what, self.digest, self.upload = what, digest, upload
        for host in self.hosts:
            host.workers, host.greet_at = 0, 0.0

    def fetch(self, whole: Chunk, is_divisible: bool, num_workers: int) -> Any:
        """Return the samples of a batch; raise what the Dataset raises, or ConnectionError.

        num_workers: processes like this one, each of which asks for another batch.
        """
        self.wait_for_host()
        shares = sum(host.share() for host in self.ready())
        count, pieces = len(whole.indices), 1
        if is_divisible:
            pieces = math.ceil(CHUNKS_PER_WORKER * shares / max(1, num_workers))
            pieces = max(1, min(count, pieces))
        cuts = [round(count * piece / pieces) for piece in range(pieces + 1)]
        tasks = [
            Task(whole._replace(start=whole.start + start, indices=whole.indices[start:end]))
            for start, end in zip(cuts[:-1], cuts[1:], strict=True)
        ]
        try:
            while waiting := [task for task in tasks if not task.is_over]:
                for task in waiting:
                    if time.monotonic() >= task.due:
                        self.ask(task)
                self.take()
        finally:
            for task in tasks:
                task.is_over = True
                for call in task.calls:  # that another host has answered sooner
                    call.cancel()
        if not is_divisible:
            return tasks[0].samples
        return [sample for task in tasks for sample in task.samples]

    def wait_for_host(self) -> None:
        """Wait until a host has the Dataset."""
        self.heard_at = time.monotonic()  # silence counts from here: before, nobody was asked
        while not self.ready():
            self.take()

    def ready(self) -> list[Host]:
        """Return the hosts that have the Dataset, and have the others get it."""
        for host in self.hosts:
            if not (host.workers or host.is_greeted) and time.monotonic() > host.greet_at:
                host.is_greeted = True
                self.start(host, None)
        return [host for host in self.hosts if host.workers]

    def ask(self, task: Task) -> None:
        """Ask the host for a chunk that will be done with it first, if there is one."""
        hosts, samples = self.ready(), len(task.chunk.indices)
        hosts = [host for host in hosts if host not in task.asked] or hosts
        if not hosts:
            return
        host = min(hosts, key=lambda host: host.expected(samples) * own_random.uniform(1, 1.1))
        known = host.expected(samples) if host.seconds else math.inf
        patience = max(OVERDUE_SECONDS, known * OVERDUE ** (len(task.asked) + 1))
        task.due = time.monotonic() + patience
        task.asked.append(host)
        host.calls += 1
        self.start(host, task)

    def start(self, host: Host, task: Task | None) -> None:
        """Ask a host in a thread."""
        future = self.pool.submit(self.run, host, task)
        self.running.add(future)
        future.add_done_callback(self.running.discard)

    def rest(self) -> None:
        """End all calls of this process, and wait until none of its threads is in gRPC."""
        if self.process == os.getpid():
            for call in [*self.open]:
                call.cancel()
            wait([*self.running])

    def take(self) -> None:
        """Take what comes next, or wait a moment for it."""
        try:
            host, task, result = self.came.get(timeout=0.05)
        except queue.Empty:
            if time.monotonic() > self.heard_at + self.timeout:
                failures = "; ".join(f"{h.address}: {h.failure or 'silent'}" for h in self.hosts)
                text = f"no data host has answered for {self.timeout:g} s ({failures})"
                raise ConnectionError(text) from None
            return
        if task is None:
            host.is_greeted = False
        else:
            host.calls -= 1
            task.asked.remove(host)
        if task and task.is_over:
            return
        if isinstance(result, Lost):
            if task:
                task.due = 0.0
        elif isinstance(result, BaseException):
            raise result
        elif task:
            task.samples, task.is_over = result, True

    def run(self, host: Host, task: Task | None) -> None:
        """In a thread: have a host prepare a chunk or, without one, get the Dataset."""
        try:
            result = self.get_chunk(host, task) if task else self.greet(host)
        except grpc.RpcError as error:
            result = Lost()
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                result = PermissionError(f"data host {host.address}: {error.details()}")
            elif error.code() is not grpc.StatusCode.CANCELLED:
                self.lose(host, f"{error.code().name}: {error.details()}")
        except BrokenReply as error:
            result = Lost()
            self.lose(host, str(error))
        except BaseException as error:
            result = error
        self.came.put((host, task, result))

    def opened(self, call: Any) -> Any:
        """Remember a call until it has ended."""
        self.open.add(call)
        if not call.add_callback(lambda: self.open.discard(call)):
            self.open.discard(call)
        return call

    def lose(self, host: Host, why: str) -> None:
        """Ask a host for nothing, until it answers again."""
        if not host.failure:
            text = f"data host {host.address} failed ({why}): others are asked"
            print(f"feed: {text}", flush=True)
        host.workers, host.greet_at = 0, time.monotonic() + PAUSE
        host.failure = host.failure or why

    def greet(self, host: Host) -> None:
        """Ask a host whether it has the Dataset, and upload it if it should."""
        reply, call = self.call(host, b"", [])
        if reply.state == UNKNOWN:
            nonce, metadata = sign(self.token, self.digest)
            put = host.channel.stream_unary(f"/{SERVICE}/Upload").future
            taken = self.opened(put(self.upload(), metadata=metadata)).result()
            if unseal(self.token, nonce, taken).state == READY:  # else another process uploads it
                print(f"feed: {self.what} has gone to data host {host.address}", flush=True)
            self.heard_at = time.monotonic()
        elif reply.state == READY:
            if about := decode(reply, call):  # of one that a callable has made
                self.check(host.address, about)
            host.workers, host.failure = reply.workers, ""
        host.greet_at = time.monotonic() + LOOK_SECONDS

    def get_chunk(self, host: Host, task: Task) -> Any:
        """Have a host prepare a chunk."""
        if task.is_over:
            return None
        reply, call = self.call(host, pickle.dumps(task.chunk), task.calls)
        if reply.state != READY:  # it has dropped the Dataset, or has been restarted
            host.workers = 0
            raise Lost()
        host.workers, host.failure = reply.workers, ""
        host.others = max(0, reply.calls - host.calls)
        seconds = reply.seconds / len(task.chunk.indices)
        host.seconds = (3 * host.seconds + seconds) / 4 if host.seconds else seconds
        return decode(reply, call)

    def call(self, host: Host, chunk: bytes, calls: list) -> tuple[Any, grpc.Call]:
        """Ask a host; return its Reply, and the call, whose frames may follow."""
        request = messages.Request(dataset=self.digest, chunk=chunk).SerializeToString()
        nonce, metadata = sign(self.token, hashlib.sha256(request).digest())
        ask = host.channel.unary_stream(f"/{SERVICE}/Ask")
        call = self.opened(ask(request, metadata=metadata))
        calls.append(call)
        while True:
            reply = unseal(self.token, nonce, next(call, b""))
            self.heard_at = time.monotonic()
            if reply.state == RAISED:
                raise raised_again(f"on data host {host.address}", *decode(reply, call))
            if reply.state != WAITING or not chunk:
                return reply, call
