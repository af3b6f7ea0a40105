"""Answers a data host's calls: keeps its Datasets, and gives each chunk to a worker."""

import hashlib
import os
import pickle
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from feed import wire
from feed.samples import as_error
from feed.wire import DIED, DONE, RAISED, UNKNOWN, WAITING, Reply, Request
from feed.worker import CHUNK_TIMEOUT, Worker, how_it_failed, new_process

ATTEMPTS = 3  # for a chunk or a Dataset whose processes die or hang
INIT_FNS = 8  # worker_init_fns for which a thread keeps a worker of a Dataset
END_SECONDS = 5.0  # for a stream's process to end by itself, once nobody reads it
BEAT_SECONDS = 5  # between two WAITING replies
MOST_DATASETS = 32  # to keep, and one more for each one that is dropped, but then needed again
MOST_MEMORY = 0.4  # share of the memory that they may take, by their pickles' size
TELL_SECONDS = 60  # until the first line about a Dataset that is not ready


class Copy:
    """A Dataset that this host has, or is getting."""

    def __init__(self, state: int = WAITING, value: bytes = b""):
        self.state, self.value = state, value  # WAITING, then DONE, or RAISED with the exception
        self.size, self.calls, self.used_at = 0, 0, time.monotonic()
        self.came_at, self.tell_after = self.used_at, TELL_SECONDS
        self.template: socket.socket | None = None  # to the process that has it, and forks workers
        self.is_dropped = False

    def is_alive(self) -> bool:
        """Return whether the process that has it is alive."""
        try:
            return self.template.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
        except OSError as error:  # otherwise it was closed by `Front.drop`
            return isinstance(error, BlockingIOError)


class Front:
    """Answers each call in one of gRPC's threads."""

    def __init__(self, main: socket.socket, token: str, workers: int):
        self.main, self.token, self.workers, self.calls = main, token, workers, 0
        self.copies: dict[bytes, Copy] = {}  # by digest
        self.most, self.dropped = MOST_DATASETS, set[bytes]()  # by make_room
        self.deaths: dict[bytes, list[str]] = {}  # of the Datasets' processes, by digest
        self.lock = threading.RLock()
        self.tasks: queue.SimpleQueue[tuple] = queue.SimpleQueue()
        for number in range(workers):
            threading.Thread(target=self.mind_workers, args=(number,), daemon=True).start()

    def get(
        self, data: bytes, context: Any, epochs: Iterator[bytes] | None = None
    ) -> Iterator[bytes]:
        """Answer a Get call."""
        nonce, digest = wire.verify(self.token, context.invocation_metadata())
        if hashlib.sha256(data).digest() != digest:
            raise ValueError("the request does not match the digest in its metadata")
        request = pickle.loads(data)
        for reply, frames in self.answer(request, context.is_active, epochs):
            reply = reply._replace(workers=self.workers, calls=self.calls)
            is_small = len(frames) == 1 and len(frames[0]) < wire.FRAME
            yield wire.seal(self.token, nonce, reply, frames.popleft() if is_small else b"")
            while frames:
                yield frames.popleft()

    def stream(self, messages: Iterator[bytes], context: Any) -> Iterator[bytes]:
        """Answer a Stream call: the first message is its request, and each other one an epoch."""
        yield from self.get(next(messages), context, messages)

    def answer(
        self, request: Request, is_wanted: Callable[[], bool], epochs: Iterator[bytes] | None
    ) -> Iterator[tuple[Reply, deque]]:
        """Yield Replies with their frames: WAITING every few seconds, until the last one."""
        copy = self.copies.get(request.dataset_digest) or Copy(UNKNOWN)
        deaths = self.deaths.get(request.dataset_digest, [])
        if copy.state == UNKNOWN and len(deaths) >= ATTEMPTS:
            copy = Copy(RAISED, as_error(f"the Dataset's process {deaths[-1]}"))
        seconds = time.monotonic() - copy.came_at
        if not request.wanted and copy.state != RAISED and seconds > copy.tell_after:
            copy.tell_after *= 2
            text = f"a Dataset, {copy.size / 1e6:.1f} MB, is not ready after {seconds:.0f} s"
            print(f"feed: {text}: it is being made, or waits for a worker", flush=True)
        if copy.state != DONE:
            # A client wants samples only after the Dataset was ready here. If it is WAITING now,
            # it was dropped, and another client is uploading it again.
            state = UNKNOWN if request.wanted and copy.state == WAITING else copy.state
            yield Reply(state, copy.value), deque()
            return
        answer: queue.Queue[tuple] = queue.Queue()
        with self.lock:
            copy.calls, copy.used_at, self.calls = copy.calls + 1, time.monotonic(), self.calls + 1
        try:
            if epochs:
                yield from self.run_stream(request, copy, epochs, is_wanted)
                return
            if request.is_fresh:
                yield from self.use_new_process(request.wanted, copy, is_wanted)
                return
            self.tasks.put((request, copy, is_wanted, answer))
            while is_wanted():
                try:
                    yield answer.get(timeout=BEAT_SECONDS)
                    return
                except queue.Empty:
                    yield Reply(WAITING), deque()
        finally:
            with self.lock:
                copy.calls, self.calls = copy.calls - 1, self.calls - 1

    def run_stream(
        self, request: Request, copy: Copy, epochs: Iterator[bytes], is_wanted: Callable[[], bool]
    ) -> Iterator[tuple[Reply, deque]]:
        """Yield what a process of its own sends. The process ends with the call."""
        worker = None
        try:
            worker = Worker(copy.template, CHUNK_TIMEOUT)
            worker.connection.send_bytes(request.wanted)
            threading.Thread(target=worker.pass_on, args=(epochs,), daemon=True).start()
            while is_wanted():
                if worker.connection.poll(BEAT_SECONDS):
                    yield worker.receive()
                else:
                    yield Reply(WAITING), deque()
        except (OSError, EOFError) as error:
            if worker and worker.is_over:
                return
            how = how_it_failed(error)
            print(f"feed: a stream's process {how}", flush=True)
            if not copy.is_alive():
                self.drop(request.dataset_digest, copy, how)
            yield Reply(DIED, how.encode()), deque()
        finally:
            if worker:
                worker.end(END_SECONDS)

    def use_new_process(
        self, chunk: bytes, copy: Copy, is_wanted: Callable[[], bool]
    ) -> Iterator[tuple[Reply, deque]]:
        """Yield what a new process prepares, which ends then."""
        worker = None
        try:
            worker = Worker(copy.template, CHUNK_TIMEOUT)
            worker.connection.send_bytes(chunk)
            while is_wanted():
                if worker.connection.poll(BEAT_SECONDS):
                    yield worker.receive()
                    return
                yield Reply(WAITING), deque()
        except (OSError, EOFError) as error:
            yield Reply(RAISED, as_error(f"a new process {how_it_failed(error)}")), deque()
        finally:
            if worker:
                worker.end()

    def mind_workers(self, number: int) -> None:
        """Have chunks prepared one by one. Runs in a thread.

        Keeps a worker for each Dataset and worker_init_fn, because one that has been called may
        have changed anything in its process.
        """
        workers: dict[tuple[Copy, bytes], Worker] = {}  # the least recently used first
        while True:
            request, copy, is_wanted, answer = self.tasks.get()
            digest, key = request.dataset_digest, (copy, request.init_fn_digest)
            others = [other for other in workers if other[0] is copy and other != key]
            for other in [*workers]:
                if other[0].is_dropped or other in others[: 1 - INIT_FNS]:
                    workers.pop(other).end()
            failures = 0
            while is_wanted() and not copy.is_dropped:
                worker = workers.pop(key, None)
                try:
                    worker = worker or Worker(copy.template, number=(number, self.workers))
                    workers[key] = worker
                    worker.connection.send_bytes(request.wanted)
                    answer.put(worker.receive())
                    self.deaths.pop(digest, None)
                    copy.tell_after = float("inf")
                    break
                except (OSError, EOFError) as error:
                    failures, how = failures + 1, how_it_failed(error)
                    print(f"feed: a worker process {how}", flush=True)
                    if worker:
                        workers.pop(key).end()
                if not copy.is_alive():
                    self.drop(digest, copy, how)
                elif failures == ATTEMPTS:
                    text = f"worker processes failed {ATTEMPTS} times in a row: the last one {how}"
                    answer.put((Reply(RAISED, as_error(text)), deque()))
                    break
            if copy.is_dropped:
                answer.put((Reply(UNKNOWN), deque()))

    def upload(self, frames: Iterator[bytes], context: Any) -> bytes:
        """Answer an Upload call: receive the Dataset, unless it is here or on its way."""
        nonce, digest = wire.verify(self.token, context.invocation_metadata())
        with self.lock:
            if digest in self.copies:
                return wire.seal(self.token, nonce, Reply(WAITING))
            if digest in self.dropped:
                self.dropped.remove(digest)
                self.most = max(self.most, len(self.copies) + 1)
                text = f"this host now keeps {self.most}, up to {MOST_MEMORY:.0%} of its memory"
                print(f"feed: a Dataset is needed again that was dropped: {text}", flush=True)
            received, payload = hashlib.sha256(), os.memfd_create("dataset")
            copy = self.copies[digest] = Copy()
        try:
            for frame in frames:
                os.write(payload, frame)
                received.update(frame)
                copy.size += len(frame)
        except OSError:  # out of memory
            copy.state, copy.value = RAISED, as_error()
        finally:
            is_complete = copy.state == WAITING and received.digest() == digest
            if not is_complete:
                os.close(payload)
                if copy.state == WAITING:
                    self.drop(digest, copy)
        if is_complete:
            threading.Thread(target=self.start_template, args=(digest, copy, payload)).start()
        state = DONE if is_complete else UNKNOWN if copy.is_dropped else WAITING
        return wire.seal(self.token, nonce, Reply(state))

    def start_template(self, digest: bytes, copy: Copy, payload: int) -> None:
        """Start a process that holds an uploaded Dataset. Runs in a thread."""
        began = time.monotonic()
        try:
            self.make_room(copy)
            copy.template = new_process(self.main)
            socket.send_fds(copy.template, [b"+"], [payload])
            state, copy.value = Connection(os.dup(copy.template.fileno())).recv()
        except (OSError, EOFError) as error:
            return self.drop(digest, copy, how_it_failed(error))
        finally:
            os.close(payload)
        copy.state, seconds = state, time.monotonic() - began
        print(f"feed: a Dataset, {copy.size / 1e6:.1f} MB, made in {seconds:.1f} s", flush=True)

    def make_room(self, new: Copy) -> None:
        """If there are too many Datasets, drop unused ones, the least recently used first.

        Each rank, and each change of a Dataset in the training script, may add another one.
        """
        with self.lock:
            pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            for digest, copy in sorted(self.copies.items(), key=lambda item: item[1].used_at):
                sizes = [each.size for each in self.copies.values()]
                if len(sizes) <= self.most and sum(sizes) <= MOST_MEMORY * pages:
                    return
                if copy is not new and not copy.calls and copy.state != WAITING:
                    self.drop(digest, copy)
                    self.dropped.add(digest)

    def drop(self, digest: bytes, copy: Copy, how: str = "") -> None:
        """Forget a Dataset, but not how it failed. A client that needs it uploads it again."""
        with self.lock:
            copy.is_dropped = True
            if self.copies.get(digest) is copy:
                del self.copies[digest]
                if how:
                    self.deaths.setdefault(digest, []).append(how)
            if copy.template:
                copy.template.close()
