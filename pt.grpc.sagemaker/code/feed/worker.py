"""The processes of a data host that hold Datasets. None of them uses gRPC.

    main process ─┬─ front (front.py): gRPC; hands each chunk to a free worker
                  ├─ template of a Dataset: has it in memory, and forks ─┬─ worker
                  ├─ template of another Dataset                         ├─ worker
                  └─ ...                                                 └─ ...

The main process and the templates have no threads, so that they can fork. Workers share their
template's memory. Each process is killed when its parent ends.
"""

import contextlib
import ctypes
import gc
import os
import pickle
import select
import signal
import socket
import struct
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from feed import dataset_file
from feed.iterate import Stream, send_samples
from feed.pickling import rngs_of
from feed.samples import (
    Chunk,
    as_error,
    initialize,
    make_dataset,
    prepare,
    seed_rngs,
    stand_in_for_ranks,
    summary,
)
from feed.wire import DONE, FRAME, RAISED, Reply, encode, padding

CHUNK_TIMEOUT = 300  # a worker that is silent over a chunk for longer is replaced
MAKING_SECONDS = 3600  # the same, while a callable makes the Dataset
PR_SET_PDEATHSIG = 1


def fork(work: Callable, *arguments: Any) -> int:
    """Run `work` in a new process, which is killed when this one ends; return its id."""
    parent = os.getpid()
    if pid := os.fork():
        return pid
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the main process
        if os.getppid() == parent:
            work(*arguments)
    except SystemExit as error:
        print(error.code, flush=True)
    except (EOFError, ConnectionError):  # the process that wanted this one has ended
        os._exit(1)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def fork_for_each(requests: socket.socket, work: Callable, forked: list[int]) -> None:
    """Fork a process for each socket that comes through `requests`, until its other end closes.

    forked: the list to which their ids are added.
    """
    while True:
        message, fds, _, _ = socket.recv_fds(requests, 1, 1)
        with contextlib.suppress(ChildProcessError):  # there are no children
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue
        if not message:
            return
        with socket.socket(fileno=fds[0]) as its, contextlib.suppress(OSError):  # out of memory
            forked.append(fork(work, requests, its))


def new_process(requests: socket.socket) -> socket.socket:
    """Ask the process at the other end of `requests` to fork; return a socket to the new one."""
    ours, its = socket.socketpair()
    with its:
        socket.send_fds(requests, [b"+"], [its.fileno()])
    return ours


def run_template(main: socket.socket, requests: socket.socket) -> None:
    """Run a template: hold a Dataset in memory, and fork workers that share it."""
    main.close()
    _, [payload], _, _ = socket.recv_fds(requests, 1, 1)
    set_ranks = stand_in_for_ranks()
    torch.set_num_threads(1)
    state, value, loaded, rngs = DONE, b"", (), {}
    try:
        loaded = given, is_dataset, collate_fn = dataset_file.load(payload)
        if is_dataset:  # find them once for all workers, since that reads the whole Dataset
            rngs = rngs_of(given, collate_fn)
    except BaseException:
        state, value = RAISED, as_error()
    Connection(os.dup(requests.fileno())).send((state, value))
    gc.freeze()  # otherwise the garbage collector would write to the shared memory

    fork_for_each(requests, partial(serve_chunks, loaded, rngs, set_ranks), [])


def serve_chunks(
    loaded: tuple, rngs: dict, set_ranks: Callable, of_template: socket.socket, pipe: socket.socket
) -> None:
    """Run a worker: prepare one chunk after the other, or a stream."""
    of_template.close()
    given, is_dataset, collate_fn = loaded
    connection, file = Connection(os.dup(pipe.fileno())), pipe.makefile("wb", FRAME)
    connection.send(os.getpid())
    number, workers = connection.recv()
    problem, is_initialized = b"", False
    try:
        dataset = given if is_dataset else make_dataset(given)
        seed_rngs(dataset, {}, Chunk(), 0, None)  # for get_worker_info()
        if not is_dataset:
            rngs = rngs_of(dataset, collate_fn)
    except BaseException:
        problem = as_error()

    def send(state: int, value: bytes, parts: list, seconds: float = 0.0) -> None:
        connection.send(Reply(state, value, tuple(part.nbytes for part in parts), seconds))
        for part in parts:
            file.write(part)
            file.write(bytes(padding(part.nbytes)))
        file.flush()

    connection.send_bytes(b"ready")
    while True:
        request = connection.recv_bytes()
        started, state, parts = time.perf_counter(), RAISED, []
        try:
            if problem:
                value = problem
            elif request:
                chunk = pickle.loads(request)
                set_ranks(chunk.caller)
                if isinstance(chunk, Stream):
                    send_samples(given, chunk, connection, send)  # until the other end closes
                if workers:  # among those of all data hosts
                    host, hosts = chunk.caller.data_host
                    worker = number * hosts + host, workers * hosts
                    chunk = chunk._replace(caller=chunk.caller._replace(data_worker=worker))
                if chunk.caller.pickled_init_fn and not is_initialized:
                    initialize(dataset, chunk)
                    rngs, is_initialized = rngs_of(dataset, collate_fn), True
                value, parts = encode(prepare(dataset, rngs, chunk, collate_fn))
            else:
                value, parts = encode(None if is_dataset else summary(dataset, rngs))
            state = RAISED if problem else DONE
        except BaseException:  # a panic in a Rust library is not an Exception
            value = as_error()
        send(state, value, parts, time.perf_counter() - started)
        del parts


class Worker:
    """A worker process, as the process that uses gRPC sees it.

    Methods raise EOFError or OSError if it fails: see `how_it_failed`.

    number: its number, and how many there are; (0, 0): the chunks say it.
    """

    def __init__(
        self,
        template: socket.socket,
        seconds: int = MAKING_SECONDS,
        number: tuple[int, int] = (0, 0),
    ):
        self.pipe, self.pid, self.is_over = new_process(template), 0, False
        self.connection = Connection(self.pipe.fileno())  # only `end` closes them
        try:
            self.allow(seconds)
            self.pid = self.connection.recv()
            self.connection.send(number)
            self.connection.recv_bytes()
            self.allow(CHUNK_TIMEOUT)
        except (OSError, EOFError):
            self.end()
            raise

    def allow(self, seconds: int) -> None:
        """Set how long it may be silent."""
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self.pipe.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", seconds, 0))

    def receive(self) -> tuple[Reply, deque[bytes]]:
        """Return the next Reply and all of its frames, so that no slow client keeps it busy."""
        reply, frames = self.connection.recv(), deque()
        left = reply.length
        while left:
            frames.append(self.pipe.recv(min(left, FRAME), socket.MSG_WAITALL))
            if not frames[-1]:
                raise EOFError
            left -= len(frames[-1])
        return reply, frames

    def pass_on(self, epochs: Iterator[bytes]) -> None:
        """Have it start an epoch for each message, until the call ends. Runs in a thread."""
        with contextlib.suppress(Exception):  # such as gRPC's, at the end of the call
            for _ in epochs:
                self.connection.send_bytes(b"")
        self.is_over = True
        with contextlib.suppress(OSError):  # it has been ended already
            self.pipe.shutdown(socket.SHUT_RDWR)

    def end(self, seconds: float = 0.0) -> None:
        """Kill it.

        seconds: it first gets this time to end by itself, so that its Dataset can close its files.
        """
        self.pipe.detach()
        self.connection.close()
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                process, ended = os.pidfd_open(self.pid), select.poll()
                ended.register(process, select.POLLIN)
                ended.poll(1000 * seconds)
                signal.pidfd_send_signal(process, signal.SIGKILL)
                os.close(process)
            self.pid = 0


def how_it_failed(error: Exception) -> str:
    """Return what has happened to a process, from the error that using it has raised."""
    if isinstance(error, BlockingIOError):
        return "hangs"
    if isinstance(error, (EOFError, ConnectionError)):
        return "has died: is there enough memory for it?"
    return f"failed: {error}"
