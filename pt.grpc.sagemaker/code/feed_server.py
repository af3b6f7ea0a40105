"""The data host's side of the loader: prepare the batches that training processes ask for.

    if __name__ == "__main__":
        serve(dataset, "algo-1:7710", token)

Worker processes prepare them, as those of a `DataLoader` do, which all training processes share.
(A DataLoader itself wants to know early what it will be asked for; here each host is asked for as
much as it gets done.) The workers are started by a fork server, never forked from this process: a
fork of a running gRPC server can deadlock, and would hold its port and connections open after its
death. Hence, as with a DataLoader's start method "spawn", the Dataset and collate_fn must be
picklable and the program's main code guarded as above. The Dataset is copied to each worker,
tensors too, since what they would be shared through, /dev/shm, may be small in a container; so it
can hold nothing that only processes can share, such as a multiprocessing.Value.
"""

import contextlib
import functools
import hmac
import ipaddress
import multiprocessing
import multiprocessing.util
import os
import pickle
import queue
import secrets
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import grpc
import torch
from torch.utils.data import Dataset

from batches import BatchKey, SeededBatches, end_with_parent
from wire import SERVICE, encode, hang_up, messages, send

MAX_STREAMS = 256  # at a time; one more is refused at once rather than left waiting
CONNECT_SECONDS = 20  # that a client may take to connect; it gives up sooner, and says why
REFUSAL_SECONDS = 10  # at most one line in so long for each reason
SERVER_OPTIONS = [
    ("grpc.so_reuseport", 0),  # else a second server on this port would take some of the calls
    ("grpc.max_receive_message_length", 1 << 20),  # a request has the indices of a batch
    ("grpc.http2.max_ping_strikes", 0),  # let clients check on us, also while they take no data
    ("grpc.keepalive_time_ms", 60_000),  # notice a client that vanished, within 80 s
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.ping_timeout_ms", 20_000),
]


def serve(
    dataset: Dataset,
    address: str,
    token: str,
    collate_fn: Callable[[list], Any] | None = None,
    num_workers: int | None = None,
) -> None:
    """Serve `dataset` at `address` ("host:port") until SIGTERM; to be called in the main thread.

    num_workers: processes; default: one per core that this process may use; 0: batches are
    prepared in this process, one at a time, which is fastest for samples that only have to be
    looked up; then nothing else here may draw random numbers, and a batch that the Dataset or
    collate_fn has returned must not be changed: it is sent from there. Raises as FeedServer does.
    """
    sigterms: list[int] = []
    previous = signal.signal(signal.SIGTERM, lambda number, _: sigterms.append(number))
    try:
        server = FeedServer(dataset, address, token, collate_fn, num_workers)
        print(f"serving {len(dataset)} samples at {address}", flush=True)
        try:
            # Linux may give the signal to another thread, which does not wake this one.
            while not sigterms:
                time.sleep(0.2)
        finally:
            server.stop()
    finally:
        signal.signal(signal.SIGTERM, previous)


class Answer(NamedTuple):
    """What has become of a batch: the batch, as `wire.encode` returns it, or an error."""

    structure: bytes = b""
    buffers: tuple[torch.Tensor, ...] = ()
    error: str = ""


class Task(NamedTuple):
    """A batch to prepare."""

    number: int
    key: BatchKey
    is_wanted: Callable[[], bool]
    ready: queue.SimpleQueue  # for the batch's number, with its Answer


def answer_for(batches: SeededBatches, key: BatchKey) -> Answer:
    """Prepare a batch and encode it."""
    try:
        structure, buffers = encode(batches[key])
        return Answer(structure.SerializeToString(), tuple(buffers))
    except BaseException as error:  # what libraries in Rust raise, for one, is no Exception
        text = f"{type(error).__name__}: {error}\n\n{traceback.format_exc()}"
        # A file name in it may be no Unicode.
        return Answer(error=text[:100_000].encode(errors="backslashreplace").decode())


def work(pickled: bytes, connection: Connection) -> None:
    """Prepare batches in a worker process: the server's own only passes them on."""
    end_with_parent()
    batches: SeededBatches = pickle.loads(pickled)
    while True:
        try:
            key = connection.recv()
        except EOFError:  # the server has ended
            return
        answer = answer_for(batches, key)
        # As bytes, for tensors would go through /dev/shm.
        connection.send((sum(map(len, answer.buffers)), answer._replace(buffers=())))
        with socket.socket(fileno=os.dup(connection.fileno())) as pipe:
            for buffer in answer.buffers:
                pipe.sendall(buffer.numpy())


def pickled(batches: SeededBatches) -> bytes:
    """Pickle a Dataset and collate_fn, once for all workers. Raises TypeError if that can't be."""
    try:
        return pickle.dumps(batches)
    except (TypeError, AttributeError, RuntimeError, pickle.PicklingError) as error:
        raise TypeError(f"cannot send the Dataset to worker processes: {error}") from error


class Worker:
    """A worker process, for batches that `pickled` holds."""

    def __init__(self, pickled: bytes):
        multiprocessing.util.get_temp_dir()  # else it makes its own, which nobody removes
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.utils.data", __name__])  # imported once for all
        self.connection, its = context.Pipe()
        self.process = context.Process(target=work, args=(pickled, its), daemon=True)
        self.process.start()
        its.close()

    def answer(self, key: BatchKey) -> Answer:
        """Have it prepare a batch; raise ChildProcessError if it dies, or cannot hand it over."""
        try:
            self.connection.send(key)
            size, answer = self.connection.recv()
            if not size:
                return answer
            memory = torch.empty(size, dtype=torch.uint8)
            left = memoryview(memory.numpy())
            with socket.socket(fileno=os.dup(self.connection.fileno())) as pipe:
                while left:
                    received = pipe.recv_into(left)
                    if not received:
                        raise EOFError("in the middle of a batch")
                    left = left[received:]
            return answer._replace(buffers=(memory,))
        except Exception as error:
            self.process.kill()
            self.process.join()
            code = f"exit code {self.process.exitcode}"
            raise ChildProcessError(f"{code}, {type(error).__name__}: {error}") from None

    def kill(self) -> None:
        """End it, busy or not."""
        self.process.kill()


class NoWorker:
    """What stands in for the only worker when there shall be none: prepares batches here."""

    lock = threading.Lock()  # all of a process have the same random generators

    def __init__(self, batches: SeededBatches):
        self.batches = batches

    def answer(self, key: BatchKey) -> Answer:
        with self.lock:
            return answer_for(self.batches, key)

    def kill(self) -> None:
        """Do nothing: there is no process."""


class TokenCheck(grpc.ServerInterceptor):
    """Refuses calls without the job's token, before it waits for their message or does anything."""

    def __init__(self, token: str):
        self._expected = f"Bearer {token}".encode()
        self._printed_at: dict[str, float] = {}  # monotonic time of each reason's last line
        self._refusal = grpc.stream_stream_rpc_method_handler(self._refuse)

    def intercept_service(self, continuation: Callable, call: grpc.HandlerCallDetails) -> Any:
        given = str(dict(call.invocation_metadata).get("authorization", "")).encode()
        return continuation(call) if hmac.compare_digest(given, self._expected) else self._refusal

    def _refuse(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        reason = "wrong or missing token"
        self.print_refusal(f"a call from {context.peer()}", reason)
        context.abort(grpc.StatusCode.UNAUTHENTICATED, reason)

    def print_refusal(self, what: str, reason: str) -> None:
        """Print a line, unless there has been one with this reason just now."""
        now = time.monotonic()
        if now > self._printed_at.get(reason, -REFUSAL_SECONDS) + REFUSAL_SECONDS:
            self._printed_at[reason] = now
            print(f"feed: refused {what}: {reason}", flush=True)


class FeedServer:
    """A running server, for a program that has other things to do as well; `stop` ends it.

    Raises TypeError for a Dataset that is not map-style or cannot be pickled, ValueError for an
    unfit token or number of workers, OSError when `address` cannot be listened at.
    """

    def __init__(
        self,
        dataset: Dataset,
        address: str,
        token: str,
        collate_fn: Callable[[list], Any] | None = None,
        num_workers: int | None = None,
    ):
        if not (token and token.isascii()):
            raise ValueError("the token must be a non-empty ASCII string")
        if num_workers is None:
            num_workers = len(os.sched_getaffinity(0))
        if num_workers < 0:
            raise ValueError(f"num_workers must be 0 or more, but is {num_workers}")
        self._batches = SeededBatches(dataset, collate_fn)
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._worker_kind = Worker if num_workers else NoWorker
        self._for_workers = pickled(self._batches) if num_workers else self._batches
        self._workers: list[Worker | NoWorker | None] = [
            self._worker_kind(self._for_workers) for _ in range(num_workers or 1)
        ]
        self._minders = [
            threading.Thread(target=self._mind, args=(i,), daemon=True)
            for i in range(len(self._workers))
        ]
        for minder in self._minders:
            minder.start()

        self._host = address.rpartition(":")[0].strip("[]")
        self._check = TokenCheck(token)
        self._threads = ThreadPoolExecutor(MAX_STREAMS)
        self._server = grpc.server(
            self._threads,
            interceptors=[self._check],
            options=SERVER_OPTIONS,
            maximum_concurrent_rpcs=MAX_STREAMS,
        )
        describe = grpc.unary_unary_rpc_method_handler(
            self._describe,
            messages.DescribeRequest.FromString,
            messages.DatasetDescription.SerializeToString,
        )
        batches = grpc.stream_stream_rpc_method_handler(
            self._send_batches,
            messages.BatchRequest.FromString,
            messages.Welcome.SerializeToString,
        )
        methods = {"Describe": describe, "Batches": batches}
        self._server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(SERVICE, methods)]
        )
        try:
            if not self._server.add_insecure_port(address):
                raise RuntimeError  # as newer grpcio does by itself
        except RuntimeError as error:
            self._stop_workers()
            raise OSError(
                f"cannot listen at {address!r}: the port is in use, or this is not a host:port "
                "address of this machine"
            ) from error
        self._server.start()

    def stop(self) -> None:
        """End all streams and worker processes."""
        self._stopping.set()  # first: what dies from now on is not replaced
        self._server.stop(grace=None).wait()
        self._threads.shutdown()
        self._stop_workers()

    def _stop_workers(self) -> None:
        for worker in filter(None, self._workers):
            worker.kill()  # not asked to end: it may be busy with a long batch
        for _ in self._minders:
            self._tasks.put(None)
        for minder in self._minders:
            minder.join(timeout=1)  # without workers, it may be busy itself

    def _mind(self, place: int) -> None:
        """Give one worker task after task."""
        while task := self._tasks.get():
            task.ready.put((task.number, self._answer(place, task)))
        if self._workers[place]:
            self._workers[place].kill()

    def _answer(self, place: int, task: Task) -> Answer:
        """Have the task done by a worker, and by the one that replaces it if it dies."""
        failures: list[str] = []
        while len(failures) < 2 and task.is_wanted():
            try:
                if not self._workers[place]:
                    self._workers[place] = self._worker_kind(self._for_workers)
                return self._workers[place].answer(task.key)
            except Exception as error:
                self._workers[place] = None
                failures.append(str(error))
                if self._stopping.wait(0.5):  # no hurry, where something is so wrong
                    break
                print(f"feed: a worker process has died ({error})", flush=True)
        return Answer(  # which is not sent when the batch is no longer wanted
            error=f"two worker processes have died over it, one after the other ({failures}); "
            "does it take more memory than there is?"
        )

    def _describe(self, request: Any, context: grpc.ServicerContext) -> Any:
        return messages.DatasetDescription(length=len(self._batches.dataset))

    def _send_batches(
        self, requests: Iterator[Any], context: grpc.ServicerContext
    ) -> Iterator[Any]:
        """Have the client connect, and send it each of its batches when it is ready."""
        with listen(self._host) as listener:
            context.add_callback(functools.partial(hang_up, listener))
            port, secret = listener.getsockname()[1], secrets.token_bytes(16)
            yield messages.Welcome(port=port, secret=secret, workers=len(self._workers))
            try:
                connection = self._accept(listener, secret)
            except OSError as error:
                reason = f"no client has connected to port {port} for its batches ({error})"
                context.abort(grpc.StatusCode.UNAVAILABLE, reason)
        with connection:
            if context.add_callback(functools.partial(hang_up, connection)):
                self._answer_all(requests, context, connection)

    def _accept(self, listener: socket.socket, secret: bytes) -> socket.socket:
        """Return the first connection that says the secret. Raises OSError if none does in time."""
        deadline = time.monotonic() + CONNECT_SECONDS
        while (left := deadline - time.monotonic()) > 0:
            listener.settimeout(left)
            connection, peer = listener.accept()
            # While a stranger is silent the right one may be waiting: all at once, and soon.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, len(secret))
            connection.settimeout(1)
            with contextlib.suppress(OSError):
                if hmac.compare_digest(connection.recv(len(secret)), secret):
                    connection.settimeout(None)
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    return connection
            connection.close()
            what = f"a connection from {peer[0]}:{peer[1]}"
            self._check.print_refusal(what, "wrong or missing secret of a call")
        raise TimeoutError("timed out")

    def _answer_all(
        self, requests: Iterator[Any], context: grpc.ServicerContext, connection: socket.socket
    ) -> None:
        """Send each batch as soon as it is ready, until the client goes."""
        ready: queue.SimpleQueue[tuple[int, Answer] | None] = queue.SimpleQueue()
        length, mismatch = len(self._batches.dataset), []

        def read_requests() -> None:
            try:
                for request in requests:
                    if request.dataset_length != length:
                        mismatch.append(request.dataset_length)
                        break
                    indices = list(request.indices)
                    place = request.seed, request.epoch, request.rank, request.samples_before
                    key = BatchKey(*place, indices)
                    self._tasks.put(Task(request.number, key, context.is_active, ready))
            except grpc.RpcError:  # the client has gone
                return
            finally:
                ready.put(None)

        threading.Thread(target=read_requests, daemon=True).start()
        while item := ready.get():
            number, answer = item
            header = messages.BatchHeader(
                number=number, error=answer.error, structure=answer.structure
            )
            try:
                send(connection, header, answer.buffers)
            except OSError:  # the client has gone
                return
            del item, answer  # they hold the batch's memory
        if mismatch:
            reason = f"here are {length} samples, but a dataset of {mismatch[0]} was asked for"
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, reason)


def listen(host: str) -> socket.socket:
    """Return a socket that listens at a free port of `host`, an address.

    For a name, which may have several, or a wildcard it listens at all of this machine's.
    """
    with contextlib.suppress(ValueError):  # no address
        address = ipaddress.ip_address(host)
        if not address.is_unspecified:
            family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
            return socket.create_server((host, 0), family=family)
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", 0), family=family, dualstack_ipv6=both)
