"""How the batches of an epoch are fetched: which host is asked for which, and when.

For each call that may be open there is a thread, which asks its host for the most urgent batch,
again and again. It is one until the host has said how many workers it has. When a host fails, its
batches are asked of others. When the training waits for a batch that is overdue (a worker hangs, a
host is busy), another host is asked for it, too: either answer will do. A slower host is asked for
what is needed later, so that it comes in time.
"""

import math
import os
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
import torch.distributed as dist

from feed.batches import BatchKey
from feed.wire import CHANNEL_OPTIONS, SERVICE, DatasetError, build, fill, messages

if TYPE_CHECKING:
    from feed.client import RemoteDataset

CALLS_BESIDE = 2  # calls that a rank has open at a host, beyond its share of the workers there
MAX_THREADS = 64  # of a rank, for all hosts together
OVERDUE = 4  # times what the fastest host takes for a batch; the second time 16, and so on
OVERDUE_SECONDS = 0.1  # at least
MARGIN = 1.5  # by which a slower host is asked sooner than it would have to be
RETRY_PAUSE = 0.5  # seconds


@dataclass
class Host:
    """A data host, and what is known of it."""

    address: str
    workers: int = 0  # not known before it has answered
    most: int = MAX_THREADS  # calls that this rank may have open here: see `share_calls`
    is_up: bool = False  # it has answered, and not failed since
    failure: str = ""  # what went wrong first since its last batch
    failing_since: float = field(default_factory=time.monotonic)  # when; inf: it is well
    latency: float = 0.0  # seconds from asking for a batch until it was ready, lately

    def enough(self) -> int:
        """How many calls keep this rank's share of the workers busy; not known yet: the most."""
        if not self.workers:
            return MAX_THREADS
        ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if self.address.startswith("unix"):  # a server on this host, for its own ranks
            ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        return math.ceil(self.workers / ranks) + CALLS_BESIDE

    def calls(self) -> int:
        """How many batches this rank asks for at a time, once the host has answered."""
        return min(self.enough(), self.most)

    def connect(self) -> grpc.Channel:
        return grpc.insecure_channel(self.address, CHANNEL_OPTIONS)


def share_calls(hosts: list[Host]) -> None:
    """Share MAX_THREADS calls out equally; what a host of few workers leaves is for the others."""
    left = MAX_THREADS
    for place, host in enumerate(sorted(hosts, key=Host.enough)):
        host.most = max(1, left // (len(hosts) - place))
        left -= host.calls()


@dataclass
class Task:
    """A batch to fetch."""

    key: BatchKey
    asked: list[Host] = field(default_factory=list)  # hosts that have not failed since
    asked_at: float = 0.0  # the last time
    is_here: bool = False
    batch: Any = None  # or what was raised instead


class Epoch:
    """The batches of an epoch; `next` is the number of the one that the training takes next."""

    def __init__(self, dataset: "RemoteDataset", first: int, read_ahead: int, pin_memory: bool):
        self.dataset, self.read_ahead, self.pin_memory = dataset, read_ahead, pin_memory
        self.first, self.next, self.started = first, first, time.monotonic()
        self.tasks: dict[int, Task] = {}  # by the batch's number, in order
        self.error: Exception | None = None
        self.closing, lock = threading.Event(), threading.RLock()
        self.changed = threading.Condition(lock)  # for the fetching threads
        self.came = threading.Condition(lock)  # for the training
        self.channels = [host.connect() for host in dataset.hosts]
        self.threads: list[threading.Thread] = []
        for host, channel in zip(dataset.hosts, self.channels, strict=True):
            self.start_thread(host, channel, number=0)

    def start_thread(self, host: Host, channel: grpc.Channel, number: int) -> None:
        """Start a thread that fetches from a host, which has `number` of them already."""
        thread = threading.Thread(target=self.fetch_all, args=(host, channel, number), daemon=True)
        with self.changed:
            if not self.closing.is_set():
                thread.start()
                self.threads.append(thread)

    def close(self) -> None:
        """End all calls and threads."""
        self.closing.set()
        with self.changed:
            self.changed.notify_all()
        for channel in self.channels:
            channel.close()
        for thread in self.threads:
            thread.join()

    def want(self, key: BatchKey) -> None:
        """Add a batch."""
        with self.changed:
            self.tasks[key.number] = Task(key)
            self.changed.notify_all()

    def wants_enough(self) -> bool:
        """Return whether all calls have something to do, those of the slowest host too."""
        hosts = self.dataset.hosts
        calls, ahead = sum(host.calls() for host in hosts), max(map(self.ahead, hosts))
        return len(self.tasks) >= self.read_ahead + calls + ahead

    def take(self) -> Any:
        """Wait for the next batch and return it, or raise what has come in its place."""
        with self.changed:
            while not self.tasks[self.next].is_here:
                self.raise_if_hopeless()
                self.came.wait(0.05)
                self.changed.notify_all()  # it may be overdue
            task = self.tasks.pop(self.next)
            batch, task.batch = task.batch, None
            self.next += 1
            taken, seconds = self.next - self.first, time.monotonic() - self.started
            if taken > 20:  # before that it is the start that takes time
                self.dataset.interval = seconds / taken
            self.changed.notify_all()
        if self.error or isinstance(batch, Exception):
            raise self.error or batch
        return batch

    def raise_if_hopeless(self) -> None:
        """Raise what has gone wrong for good, or ConnectionError if no host answers for long."""
        hosts, since = self.dataset.hosts, time.monotonic() - self.dataset.timeout
        if self.error:
            raise self.error
        # Silence counts from the epoch's beginning: before that, nobody was asked.
        if not any(h.is_up or max(h.failing_since, self.started) > since for h in hosts):
            failures = "; ".join(host.failure for host in hosts)
            raise ConnectionError(f"no batch for {self.dataset.timeout:g} s: {failures}")

    def latency(self) -> float:
        """Return the seconds that the fastest host takes for a batch; 0: not known."""
        return min((h.latency for h in self.dataset.hosts if h.latency and h.is_up), default=0.0)

    def ahead(self, host: Host) -> int:
        """Return how many batches the training takes in the time that a slower host needs more."""
        slower_by = host.latency - self.latency() if host.latency else 0.0
        return int(MARGIN * slower_by / (self.dataset.interval or math.inf))

    def pop(self, host: Host, before: float = math.inf) -> Task | None:
        """Return the most urgent batch that a host shall be asked for, if there is one."""
        first, now = self.next + self.ahead(host), time.monotonic()
        is_alone = sum(host.is_up for host in self.dataset.hosts) == 1
        for number, task in self.tasks.items():
            shall = number == self.next or first <= number < before
            if task.asked:
                patience = self.latency() * OVERDUE ** len(task.asked) or math.inf  # not known yet
                due = task.asked_at + max(patience, OVERDUE_SECONDS)
                is_overdue = number == self.next and now > due
                shall = is_overdue and not task.is_here and (is_alone or host not in task.asked)
            if shall:
                task.asked.append(host)
                task.asked_at = now
                return task
        return None

    def fetch_all(self, host: Host, channel: grpc.Channel, number: int) -> None:
        """In a thread: fetch batch after batch; if the host fails, wait until it answers."""
        ask = channel.unary_stream(f"/{SERVICE}/Batch", messages.BatchRequest.SerializeToString)
        is_last = True  # of this host's threads: each starts the next one
        while not self.closing.is_set():
            try:
                if not host.is_up:
                    host.workers = self.dataset.ask(channel).result().workers
                    with self.changed:
                        share_calls(self.dataset.hosts)
                    host.is_up = True
                calls = host.calls()
                if is_last and number + 1 < calls:
                    self.start_thread(host, channel, number + 1)
                    is_last = False
                with self.changed:
                    # A host that was started again may have fewer workers than before.
                    task = self.pop(host) if number < calls else None
                    if not task and not self.closing.is_set():
                        self.changed.wait()
                if task:
                    self.fetch(host, ask, task)
            except Exception as error:
                with self.changed:
                    if not self.closing.is_set():
                        of_host = isinstance(error, grpc.RpcError)
                        final = self.dataset.leave(host, error) if of_host else error
                        self.error = final or self.error
                    self.changed.notify_all()
                self.closing.wait(RETRY_PAUSE)

    def fetch(self, host: Host, ask: grpc.UnaryStreamMultiCallable, task: Task) -> None:
        """Ask a host for a batch, and receive it when there is room."""
        started, fingerprint = time.monotonic(), self.dataset.description.fingerprint
        request = messages.BatchRequest(fingerprint=fingerprint, **task.key._asdict())
        try:
            call = ask(request, metadata=self.dataset.metadata)
            header = messages.BatchHeader.FromString(next(call))
            latency = time.monotonic() - started
            host.latency = (3 * host.latency + latency) / 4 if host.latency else latency
            while urgent := self.wait_for_room(host, task.key.number):
                self.fetch(host, ask, urgent)
            if task.is_here:  # from another host, which was faster
                return call.cancel()
            place, memory = f"data host {host.address}, batch {task.key.number}", []
            if header.error:
                batch = DatasetError(f"{place}: {header.error}")
            else:
                batch = build(header.batch, memory, self.pin_memory)
                fill(memory, call)
        except Exception:
            with self.changed:
                task.asked.remove(host)
            raise
        with self.changed:
            if host.is_up:
                host.failure, host.failing_since = "", math.inf
            if not task.is_here:
                task.batch, task.is_here = batch, True
                self.came.notify()

    def wait_for_room(self, host: Host, number: int) -> Task | None:
        """Wait until a batch may come; return another one if that must be fetched before it."""
        with self.changed:
            while not self.closing.is_set() and number >= self.next + self.read_ahead:
                if urgent := self.pop(host, before=self.next + self.read_ahead):
                    return urgent
                self.changed.wait()
        return None
