"""How a process of the training script gets samples from the data hosts: who is asked, and when.

A batch is cut into chunks, so many that all workers of all data hosts have something to do. Each
host is asked for as many as its workers will prepare in the same time. When it fails, or a chunk is
overdue, another host is asked for it too, if there is one: either answer will do.
"""

import math
import os
import queue
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc

from feed.host import DataHost, Lost
from feed.samples import Chunk

MOST_CALLS = 64  # at a time
CHUNKS_PER_WORKER = 2  # one is prepared while another one travels
OVERDUE, OVERDUE_SECONDS = 4, 0.5  # times what was expected, and at least; then 16 times, ...
GRACE_SECONDS = 1.0  # for the other hosts to get a Dataset, so that the first need not do it all
PAUSE_SECONDS, LOOK_SECONDS = 0.5, 0.1  # until a host is asked again that failed, or is not ready

own_random = random.SystemRandom()  # not the training's, and another one after each fork


@dataclass(eq=False)
class Task:
    """A chunk to fetch; or, without one, the task of getting the Dataset to a host."""

    digest: bytes
    chunk: Chunk | None = None
    asked: list[DataHost] = field(default_factory=list)  # hosts that have not failed since
    calls: list[grpc.Call] = field(default_factory=list)
    due: float = 0.0  # when another host shall be asked
    is_over: bool = False
    samples: Any = None


class Fetcher:
    """Fetches the samples of a Dataset, for one process.

    check: is called with what a host says of the Dataset that a callable has made there, and raises
    if other hosts have said something else.
    """

    def __init__(
        self, hosts: list[str], token: str, timeout: float, check: Callable[[str, Any], None]
    ):
        self.hosts, self.timeout, self.check = (
            [DataHost(name, token) for name in hosts],
            timeout,
            check,
        )
        self.pool, self.process = ThreadPoolExecutor(MOST_CALLS), os.getpid()
        self.running: set[Future] = set()
        self.came: queue.SimpleQueue[tuple[DataHost, Task, Any]] = queue.SimpleQueue()
        self.greeted_at: dict[DataHost, float] = {}  # when each may be asked to get the Dataset
        self.since = 0.0  # silence counts from here: before, nobody was asked
        fetchers.add(self)

    def use(self, what: str, digest: bytes, upload: Callable[[], Iterator[bytes]]) -> None:
        """Fetch from the Dataset with this digest, whose pickle `upload` yields."""
        self.what, self.digest, self.upload = what, digest, upload
        self.greeted_at, self.used_at = {host: 0.0 for host in self.hosts}, time.monotonic()
        for host in self.hosts:
            host.workers = 0

    def fetch(self, whole: Chunk, is_divisible: bool, num_workers: int) -> Any:
        """Return the samples of a batch; raise what the Dataset raises, or ConnectionError.

        To be called after `wait_for_host`. num_workers: processes like this one, each of which
        asks for another batch.
        """
        count, pieces = len(whole.indices), 1
        if is_divisible:
            shares = sum(host.share() for host in self.ready())
            pieces = math.ceil(CHUNKS_PER_WORKER * shares / max(1, num_workers))
            pieces = max(1, min(count, pieces))
        cuts = [round(count * piece / pieces) for piece in range(pieces + 1)]
        tasks = [
            Task(
                self.digest,
                whole._replace(start=whole.start + start, indices=whole.indices[start:end]),
            )
            for start, end in zip(cuts[:-1], cuts[1:], strict=True)
        ]
        for host in self.hosts:
            host.luck = own_random.random()
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

    def wait_for_host(self, failed: float = 0.0, others: float = GRACE_SECONDS) -> None:
        """Wait until a host has the Dataset, and at first some seconds more for the others.

        failed, others: how many for hosts that have failed, and for those that have not.
        """
        self.since = time.monotonic()
        while not (ready := self.ready()) or any(
            time.monotonic() < self.used_at + (failed if host.failure else others)
            for host in self.hosts
            if host not in ready
        ):
            self.take()

    def ready(self) -> list[DataHost]:
        """Return the hosts that have the Dataset, and have the others get it."""
        for host in self.hosts:
            if not host.workers and time.monotonic() > self.greeted_at[host]:
                self.greeted_at[host] = math.inf  # until it has answered
                self.start(host, Task(self.digest))
        return [host for host in self.hosts if host.workers]

    def ask(self, task: Task) -> None:
        """Ask the host for a chunk that has least to do, if there is one."""
        hosts, samples = self.ready(), len(task.chunk.indices)
        hosts = [host for host in hosts if host not in task.asked] or hosts
        if hosts:
            usual = max(host.seconds for host in hosts) or 1.0  # for one that has not answered yet
            host = min(hosts, key=lambda host: host.load() * (host.seconds or usual))
            known = host.expected(samples) if host.seconds else self.timeout / OVERDUE
            patience = max(OVERDUE_SECONDS, known * OVERDUE ** (len(task.asked) + 1))
            task.due = time.monotonic() + patience
            task.asked.append(host)
            host.asked += 1
            self.start(host, task)

    def start(self, host: DataHost, task: Task) -> None:
        """Ask a host in a thread."""
        future = self.pool.submit(self.run, host, task)
        self.running.add(future)
        future.add_done_callback(self.running.discard)

    def run(self, host: DataHost, task: Task) -> None:
        """In a thread: ask a host."""
        try:
            if not task.chunk:
                result = host.get_dataset(task.digest, self.upload, self.what)
            elif not task.is_over:
                result = host.get_chunk(task.digest, task.chunk, task.calls)
            else:
                result = None
        except BaseException as error:
            result = error
        self.came.put((host, task, result))

    def take(self) -> None:
        """Take what comes next, or wait a moment for it."""
        try:
            host, task, result = self.came.get(timeout=0.05)
        except queue.Empty:
            heard_at = max(self.since, *(host.heard_at for host in self.hosts))
            if time.monotonic() > heard_at + self.timeout:
                failures = "; ".join(f"{h.address}: {h.failure or 'silent'}" for h in self.hosts)
                text = f"no data host has answered for {self.timeout:g} s ({failures})"
                raise ConnectionError(text) from None
            return
        if task.chunk:
            host.asked -= 1
            task.asked.remove(host)
        elif task.digest == self.digest:
            self.greeted_at[host] = time.monotonic() + LOOK_SECONDS
        else:  # the Dataset has changed meanwhile
            return
        if isinstance(result, Lost):
            task.due = 0.0
            if why := str(result):
                self.lose(host, why)
        elif isinstance(result, BaseException):
            if not task.is_over:
                raise result
        elif task.chunk and not task.is_over:
            task.samples, task.is_over = result, True
        elif not task.chunk and result:
            workers, about = result
            if about:
                self.check(host.address, about)
            host.workers, host.failure = workers, ""

    def lose(self, host: DataHost, why: str) -> None:
        """Take it that a host has failed, and ask it again after a pause."""
        self.greeted_at[host] = time.monotonic() + PAUSE_SECONDS
        host.workers = 0
        if not host.failure:
            host.failure = why
            text = f"data host {host.address} failed ({why}): it is asked again, and others"
            print(f"feed: {text}", flush=True)

    def rest(self) -> None:
        """End all calls of this process, and wait until none of its threads is in gRPC."""
        if self.process == os.getpid():
            while self.running or any(host.open for host in self.hosts):
                for host in self.hosts:  # a thread may be about to open one more
                    for call in [*host.open]:
                        call.cancel()
                time.sleep(0.01)


fetchers: "weakref.WeakSet[Fetcher]" = weakref.WeakSet()


def rest() -> None:
    for fetcher in [*fetchers]:
        fetcher.rest()


# gRPC can be used after a fork if no thread was in it: where the training process itself asks, as
# without workers, it may fork later.
os.register_at_fork(before=rest)
# Before Python waits for the threads of the pools: a host that hangs would hold them up.
threading._register_atexit(rest)
