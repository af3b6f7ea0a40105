"""How a process of the training script gets samples from the data hosts.

It cuts a batch into enough chunks to keep all workers of all data hosts busy, and gives each host
as many as its workers can prepare in the same time. If a chunk is overdue, it gives it to another
host too, if there is one, and takes the first answer. If a host fails, its chunks go to others.
"""

import math
import os
import queue
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import IO, Any

import grpc

from feed.client import DataHost, HostState
from feed.log import logger
from feed.samples import Chunk, Summary
from feed.wire import CallAgain, Lost

MOST_CALLS = 512  # at the same time, each in a thread
CHUNKS_PER_WORKER = 2  # one is prepared while another one travels
CHUNK_TARGET_SECONDS = 0.02  # to prepare a chunk: a call takes about 1 ms of CPU on either side
# A chunk is overdue after 4 times its expected time (then 16 times, ...), and at least 0.5 s.
OVERDUE, OVERDUE_SECONDS = 4, 0.5
MAKING_TIMEOUTS = 60  # hosts that answer may take this many times the timeout to make the Dataset
GRACE_SECONDS = 1.0  # to wait for the other hosts, so that the first one does not do all the work
PAUSE_SECONDS, LOOK_SECONDS = 0.5, 0.1  # before greeting a host that failed, or is not ready

own_random = random.SystemRandom()  # leaves the training's random numbers alone; differs by process


@dataclass(eq=False)
class Task:
    """A chunk to fetch."""

    chunk: Chunk
    hosts: list[DataHost] = field(default_factory=list)  # that have it, and have not answered yet
    calls: list[grpc.Call] = field(default_factory=list)
    due: float = 0.0  # when to give it to another host
    is_fresh: bool = False  # whether a new process of the host is to prepare it
    is_over: bool = False
    samples: Any = None  # with is_fresh, also an exception


class Fetcher:
    """Fetches samples of a Dataset, as it is when the Fetcher is made, for one process.

    what: describes the Dataset. digest: SHA-256 of its pickle. open_pickle: returns a file with it.
    """

    def __init__(
        self,
        hosts: list[str],
        token: str,
        timeout: float,
        what: str,
        digest: bytes,
        open_pickle: Callable[[], IO[bytes]],
    ):
        self.hosts = [
            DataHost(name, token, digest, number, len(hosts)) for number, name in enumerate(hosts)
        ]
        self.timeout, self.what = timeout, what
        self.digest, self.open_pickle = digest, open_pickle
        # If a callable makes the Dataset: the first host that has, and its summary.
        self.first_made: tuple[str, Summary] | None = None
        self.pool, self.process = ThreadPoolExecutor(MOST_CALLS), os.getpid()
        self.running: set[Future] = set()
        # Not a SimpleQueue, whose `get` with a timeout may hang in Python 3.11 and 3.12 if a signal
        # comes, such as that of a process that has ended.
        self.came: queue.Queue[tuple[DataHost, Task | None, Any]] = queue.Queue()
        self.failed_chunk: Chunk | None = None  # over which the Dataset last raised an exception
        self.since = 0.0  # when waiting began: silence before that does not count
        self.began_at = self.ready_at = time.monotonic()  # ready_at: when a host last was ready
        fetchers.add(self)

    def fetch(
        self, whole: Chunk, is_divisible: bool, num_workers: int, also: Iterable[Task] = ()
    ) -> Any:
        """Return the samples of a batch; raise what the Dataset raises, or ConnectionError.

        Call `wait_for_host` first. num_workers: processes like this one, each of which fetches
        another batch. also: tasks to go on with meanwhile.
        """
        count, pieces = len(whole.indices), 1
        if is_divisible:
            ready = self.ready()
            shares = sum(host.workers_for_rank() for host in ready)
            pieces = math.ceil(CHUNKS_PER_WORKER * shares / max(1, num_workers))
            if slowest := max((host.seconds for host in ready), default=0.0):  # 0: not known yet
                pieces = min(pieces, math.ceil(count * slowest / CHUNK_TARGET_SECONDS))
            pieces = max(1, min(count, pieces))
        cuts = [round(count * piece / pieces) for piece in range(pieces + 1)]
        tasks = [
            Task(whole._replace(start=whole.start + start, indices=whole.indices[start:end]))
            for start, end in zip(cuts[:-1], cuts[1:], strict=True)
        ]
        for host in self.hosts:
            host.luck = own_random.random()
        try:
            self.finish(tasks, also)
        finally:
            self.cancel(tasks)
        if not is_divisible:
            return tasks[0].samples
        return [sample for task in tasks for sample in task.samples]

    def finish(self, tasks: list[Task], also: Iterable[Task] = ()) -> None:
        """Wait until the tasks are over, and go on with the others meanwhile."""
        while not all(task.is_over for task in tasks):
            for task in (*tasks, *also):
                if not task.is_over and time.monotonic() >= task.due:
                    self.assign(task)
            self.take()

    def cancel(self, tasks: list[Task]) -> None:
        """End the tasks' calls, which may still run if another host was faster."""
        for task in tasks:
            task.is_over = True
            for call in task.calls:
                call.cancel()

    def wait_for_host(
        self, failed_seconds: float = 0.0, other_seconds: float = GRACE_SECONDS
    ) -> None:
        """Wait until a host has the Dataset and, at first, some seconds for the other hosts.

        Both times, of hosts that failed and of the rest, count from when the Fetcher was made.
        """
        self.since = time.monotonic()
        while not (ready := self.ready()) or any(
            time.monotonic() < self.began_at + (failed_seconds if host.failure else other_seconds)
            for host in self.hosts
            if host not in ready
        ):
            self.take()

    def ready(self) -> list[DataHost]:
        """Return the hosts that have the Dataset, and start giving it to the others."""
        for host in self.hosts:
            is_due = time.monotonic() > host.greet_at
            if host.state in (HostState.UNREADY, HostState.FAILED) and is_due:
                host.state = HostState.GREETING
                self.start(host, None)
        return [host for host in self.hosts if host.state is HostState.READY]

    def assign(self, task: Task) -> None:
        """Give a chunk to the least busy host, if one is ready that is not preparing it already."""
        samples = len(task.chunk.indices)
        if hosts := [host for host in self.ready() if host not in task.hosts]:
            slowest = max(host.seconds for host in hosts) or 1.0  # for a host without answers yet
            host = min(hosts, key=lambda host: host.busyness() * (host.seconds or slowest))
            usual = host.expected(samples) if host.seconds else self.timeout / OVERDUE
            patience = max(OVERDUE_SECONDS, usual * OVERDUE ** (len(task.hosts) + 1))
            task.due = time.monotonic() + patience
            task.hosts.append(host)
            host.assigned += 1
            self.start(host, task)

    def start(self, host: DataHost, task: Task | None) -> None:
        """Give a host a task, or the Dataset, in a thread."""
        future = self.pool.submit(self.carry_out, host, task)
        self.running.add(future)
        future.add_done_callback(self.running.discard)

    def carry_out(self, host: DataHost, task: Task | None) -> None:
        """Give a host a task, or the Dataset, and wait for the result. Runs in a thread."""
        result: Any = None
        try:
            if not task:
                result = host.greet(self.open_pickle, self.what)
            elif not task.is_over:
                result = host.get_chunk(task.chunk, task.calls, task.is_fresh)
        except BaseException as error:
            result = error
        self.came.put((host, task, result))

    def take(self) -> None:
        """Process the next result, or wait a moment for it."""
        now, limit = time.monotonic(), MAKING_TIMEOUTS * self.timeout
        if any(host.state is HostState.READY for host in self.hosts):
            self.ready_at = now
        elif now > max(self.since, self.ready_at) + limit:
            text = f"no data host has made the Dataset within {limit:g} s"
            raise TimeoutError(f"{text}: does something in it hang there?")
        try:
            host, task, result = self.came.get(timeout=0.05)
        except queue.Empty:
            heard_at = max(self.since, *(host.heard_at for host in self.hosts))
            if time.monotonic() > heard_at + self.timeout:
                failures = "; ".join(f"{h.address}: {h.failure or 'silent'}" for h in self.hosts)
                text = f"no data host has answered for {self.timeout:g} s ({failures})"
                raise ConnectionError(text) from None
            return
        if task:
            self.end_task(host, task, result)
        else:
            self.end_greeting(host, result)

    def end_task(self, host: DataHost, task: Task, result: Any) -> None:
        """Keep the samples, give the task to another host, or raise what the Dataset has raised."""
        host.assigned -= 1
        task.hosts.remove(host)
        if isinstance(result, (Lost, CallAgain)):
            task.due = 0.0
            if isinstance(result, Lost):
                self.lose(host, str(result))
        elif not task.is_over:
            if isinstance(result, BaseException) and not task.is_fresh:
                self.failed_chunk = task.chunk
                raise result
            task.samples, task.is_over = result, True

    def end_greeting(self, host: DataHost, result: Any) -> None:
        """Note whether a host has the Dataset now, or raise what the Dataset has raised there."""
        host.state, host.greet_at = HostState.UNREADY, time.monotonic() + LOOK_SECONDS
        if isinstance(result, Lost):
            self.lose(host, str(result))
        elif isinstance(result, BaseException) and not isinstance(result, CallAgain):
            raise result
        elif isinstance(result, tuple):
            workers, summary = result
            if summary:
                self.check_is_same(host, summary)
            host.state, host.workers, host.failure = HostState.READY, workers, ""

    def check_is_same(self, host: DataHost, summary: Summary) -> None:
        """Raise ValueError if a callable has made another Dataset there than on the first host."""
        first, its = self.first_made = self.first_made or (host.address, summary)
        if not summary.is_like(its):
            raise ValueError(
                f"data hosts have different Datasets: that of {first} has {its.length} samples, "
                f"that of {host.address} has {summary.length}, or some of their samples differ. "
                "The callable must return the same samples on all hosts, in the same order"
            )

    def lose(self, host: DataHost, why: str) -> None:
        """Mark a host as failed, to be greeted again after a pause."""
        if host.state is not HostState.GREETING:  # otherwise its answer will say more
            host.state, host.greet_at = HostState.FAILED, time.monotonic() + PAUSE_SECONDS
        if not host.failure:
            host.failure = why
            text = "data host %s failed (%s): trying it again, and other hosts"
            logger.warning(text, host.address, why)

    def end_calls(self) -> None:
        """End all calls of this process, and wait until none of its threads is in gRPC."""
        if self.process == os.getpid():
            while self.running or any(host.open_calls for host in self.hosts):
                for host in self.hosts:  # a thread may be about to open one more
                    for call in [*host.open_calls]:
                        call.cancel()
                time.sleep(0.01)


fetchers: "weakref.WeakSet[Fetcher]" = weakref.WeakSet()


def end_calls() -> None:
    for fetcher in [*fetchers]:
        fetcher.end_calls()


# gRPC survives a fork only if no thread is using it. Without DataLoader workers, the training
# process itself uses gRPC, and may fork later.
os.register_at_fork(before=end_calls)
# Runs before Python waits for the pools' threads, which a hanging host would block.
threading._register_atexit(end_calls)
