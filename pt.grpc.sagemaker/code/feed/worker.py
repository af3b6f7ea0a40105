"""The worker processes of a data host, which prepare its batches.

They come from a fork server, because a fork of a running gRPC server can deadlock. Each has a copy
of the Dataset, and a pipe of its own to the server. Nothing is in shared memory, of which a
container may have little.
"""

import multiprocessing
import os
import pickle
import signal
import socket
import struct
import threading
import traceback
from collections import deque
from multiprocessing.connection import Connection

from feed.batches import BatchKey, SeededBatches
from feed.wire import FRAME, describe, messages


class Worker:
    """A worker process, as the server has it.

    Methods raise EOFError if it has died, BlockingIOError if nothing comes for `timeout` seconds.
    """

    def __init__(self, timeout: float):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.utils.data", __name__])  # imported once for all
        self.connection, its_end = context.Pipe()
        self.process = context.Process(target=work, args=(its_end,), daemon=True)
        self.process.start()
        its_end.close()
        self.pipe = socket.socket(fileno=os.dup(self.connection.fileno()))  # the same one
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            seconds = struct.pack("ll", int(timeout), int(timeout % 1 * 1e6))
            self.pipe.setsockopt(socket.SOL_SOCKET, option, seconds)

    def load(self, pickled: bytes) -> None:
        """Give it its SeededBatches, and wait until it has them."""
        self.connection.send_bytes(pickled)
        self.connection.recv_bytes()

    def prepare(self, request: bytes) -> deque[bytes]:
        """Return a batch's header and frames: all, so that no slow client keeps a worker busy."""
        self.connection.send_bytes(request)
        header, size = self.connection.recv()
        parts = deque([header])
        while size:
            parts.append(self.pipe.recv(min(size, FRAME), socket.MSG_WAITALL))
            if not parts[-1]:
                raise EOFError
            size -= len(parts[-1])
        return parts

    def end(self, error: Exception) -> str:
        """Kill it, and return what has happened to it."""
        self.process.kill()
        self.process.join(10)
        self.pipe.close()
        died = f"has died (exit code {self.process.exitcode})"
        return f"a worker process {'hangs' if isinstance(error, BlockingIOError) else died}"


def work(connection: Connection) -> None:
    """Prepare batches, until the server ends: what the process does."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # they are for the server
    threading.Thread(target=end_with_server, daemon=True).start()
    batches: SeededBatches = pickle.loads(connection.recv_bytes())
    connection.send_bytes(b"ready")
    pipe = socket.socket(fileno=os.dup(connection.fileno()))
    while True:
        header, memory = prepare(batches, connection.recv_bytes())
        connection.send((header, sum(map(len, memory))))
        for part in memory:
            pipe.sendall(part)


def end_with_server() -> None:
    """End this process when the server has ended, whatever the Dataset is busy with."""
    multiprocessing.parent_process().join()
    os._exit(1)


def prepare(batches: SeededBatches, request: bytes) -> tuple[bytes, list]:
    """Return a batch's header, and the memory of its tensors and arrays."""
    it, memory = messages.BatchRequest.FromString(request), []
    try:
        batch = batches[BatchKey(it.seed, it.epoch, it.number, list(it.indices))]
        return messages.BatchHeader(batch=describe(batch, memory)).SerializeToString(), memory
    except BaseException as error:  # libraries in Rust raise it, for one, and no Exception
        return error_header(f"{type(error).__name__}: {error}\n\n{traceback.format_exc()}"), []


def error_header(text: str) -> bytes:
    """Return what is sent in a batch's place. A file name in the text may be no Unicode."""
    text = text[:100_000].encode(errors="backslashreplace").decode()
    return messages.BatchHeader(error=text).SerializeToString()
