"""The data host's side: serve the batches that training processes ask for.

    if __name__ == "__main__":
        serve(MyDataset(), "algo-1:7712", token)

Worker processes prepare them, as a DataLoader's do; as with its start method "spawn", Dataset and
collate_fn must be picklable, and the program's main code guarded as above. Memory is needed for the
Dataset times the workers.
"""

import hmac
import multiprocessing
import multiprocessing.util
import os
import pickle
import queue
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from torch.utils.data import Dataset

from feed.batches import SeededBatches
from feed.wire import KEEPALIVE, SERVICE, messages
from feed.worker import Worker, error_header

MAX_CALLS = 2048  # at a time; each holds at most one batch
ATTEMPTS = 2  # at a batch over which worker processes die or hang
REFUSAL_SECONDS = 10  # between two lines about refused calls
SERVER_OPTIONS = [
    ("grpc.so_reuseport", 0),  # else a second server on this port would take some of the calls
    ("grpc.http2.max_ping_strikes", 0),  # let clients check on us as often as they like
    *KEEPALIVE,
]


class Feed:
    """What answers the calls, each in a thread of gRPC's."""

    def __init__(self, batches: SeededBatches, num_workers: int, timeout: float, version: str):
        kind, length = type(batches.dataset), len(batches.dataset)
        name = " ".join(filter(None, [f"{kind.__module__}.{kind.__qualname__}", version]))
        self.description = messages.DatasetDescription(
            length=length, workers=num_workers, fingerprint=f"{name} of {length} samples"
        )
        self.pickled, self.timeout = pickle.dumps(batches), timeout  # once for all workers
        self.tasks: queue.SimpleQueue[tuple] = queue.SimpleQueue()
        self.starts: queue.SimpleQueue[str] = queue.SimpleQueue()  # how each went; "": well
        self.starting, self.is_ending = threading.Lock(), False
        for _ in range(num_workers):
            threading.Thread(target=self.mind_worker, daemon=True).start()

    def mind_worker(self) -> None:
        """In a thread: keep one worker running, and give it one batch after the other to do."""
        worker = self.start_worker()
        while True:
            request, is_wanted, answer = self.tasks.get()
            it, failures = messages.BatchRequest.FromString(request), []
            while len(failures) < ATTEMPTS and is_wanted():
                try:
                    answer.put(worker.prepare(request))
                    break
                except (EOFError, OSError) as error:
                    failures.append(f"{worker.end(error)} over batch {it.number}")
                    if is_wanted():  # else the server may be ending
                        print(f"feed: {failures[-1]} of epoch {it.epoch}", flush=True)
                        worker = self.start_worker()
            else:
                text = f"{', and then '.join(failures)}: is there memory for it?"
                answer.put(deque([error_header(text)]))

    def start_worker(self) -> Worker:
        """Return a worker that has the Dataset."""
        while True:
            worker = None
            try:
                with self.starting:
                    if self.is_ending:
                        sys.exit()  # this thread
                    worker = Worker(self.timeout)
                worker.load(self.pickled)
                self.starts.put("")
                return worker
            except (EOFError, OSError) as error:
                what = worker.end(error) if worker else f"no worker process can start: {error}"
                self.starts.put(f"{what}; is there memory for the Dataset?")
                time.sleep(1)  # no hurry, where something is so wrong; or the server ends
                print(f"feed: {what} at its start", flush=True)

    def end(self) -> None:
        """End all workers: killed, as they may be busy with a long batch, and not replaced."""
        with self.starting:
            self.is_ending = True
        for process in multiprocessing.active_children():
            process.kill()

    def describe(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Say what is served, and refuse a client that expects something else."""
        if request.fingerprint:
            self.check(request.fingerprint, context)
        return self.description

    def check(self, fingerprint: str, context: grpc.ServicerContext) -> None:
        """Refuse a client that expects another Dataset, such as the one before a restart."""
        if fingerprint != self.description.fingerprint:
            reason = f"this host serves {self.description.fingerprint}, not {fingerprint}"
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, reason)

    def batch(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        """Have a batch prepared, and send it: its header, then its frames."""
        self.check(messages.BatchRequest.FromString(request).fingerprint, context)
        answer: queue.SimpleQueue[deque[bytes]] = queue.SimpleQueue()
        if context.add_callback(lambda: answer.put(deque())):  # the call may end before its batch
            self.tasks.put((request, context.is_active, answer))
            parts = answer.get()
            while parts:
                yield parts.popleft()


class TokenCheck(grpc.ServerInterceptor):
    """Refuses calls without the job's token, before it waits for their message or does anything."""

    def __init__(self, token: str):
        self.expected, self.printed_at = f"Bearer {token}".encode(), -REFUSAL_SECONDS
        self.refusal = grpc.stream_stream_rpc_method_handler(self.refuse)

    def intercept_service(self, continuation: Callable, call: grpc.HandlerCallDetails) -> Any:
        given = str(dict(call.invocation_metadata).get("authorization", "")).encode()
        return continuation(call) if hmac.compare_digest(given, self.expected) else self.refusal

    def refuse(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> None:
        if time.monotonic() > self.printed_at + REFUSAL_SECONDS:
            self.printed_at = time.monotonic()
            print(f"feed: refused a call from {context.peer()}: wrong or missing token", flush=True)
        context.abort(
            grpc.StatusCode.UNAUTHENTICATED, "wrong or missing token: do both have the same?"
        )


def end_once(*_: Any) -> None:
    """Raise SystemExit on SIGTERM, once: no second one shall interrupt the end."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit()


def serve(
    dataset: Dataset,
    address: str,
    token: str,
    collate_fn: Callable[[list], Any] | None = None,
    num_workers: int | None = None,
    timeout: float = 300.0,
    version: str = "",
) -> None:
    """Serve `dataset` at `address` ("host:port") until SIGTERM; to be called in the main thread.

    num_workers: processes that prepare batches; default: one per core that this process may use.
    timeout: seconds that one may be silent over a batch before it is replaced. version: what tells
    this Dataset from another one of its class and length. Raises TypeError for a Dataset that is
    not map-style, ValueError for an unfit token or number of workers, OSError when `address` cannot
    be listened at, RuntimeError when a worker cannot start.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RuntimeError('put serve under `if __name__ == "__main__":`, as workers import it too')
    num_workers = len(os.sched_getaffinity(0)) if num_workers is None else num_workers
    if not (token and token.isascii()) or num_workers < 1:
        raise ValueError("the token must be an ASCII string, not empty, and num_workers 1 or more")
    signal.signal(signal.SIGTERM, end_once)
    multiprocessing.util.get_temp_dir()  # else each worker makes its own, which nobody removes
    feed = Feed(SeededBatches(dataset, collate_fn), num_workers, timeout, version)
    server = grpc.server(
        ThreadPoolExecutor(MAX_CALLS),
        interceptors=[TokenCheck(token)],
        options=SERVER_OPTIONS,
        maximum_concurrent_rpcs=MAX_CALLS,
    )
    kind = messages.DatasetDescription
    methods = {
        "Describe": grpc.unary_unary_rpc_method_handler(
            feed.describe, kind.FromString, kind.SerializeToString
        ),
        "Batch": grpc.unary_stream_rpc_method_handler(feed.batch),
    }
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, methods)])
    try:
        while feed.starts.empty():  # who asked before a worker is ready would only wait
            time.sleep(0.05)
        if problem := feed.starts.get():
            raise RuntimeError(problem)
        try:
            server.add_insecure_port(address)
        except RuntimeError:
            raise OSError(f"cannot listen at {address!r}: in use, or not this host's") from None
        server.start()
        print(f"serving {len(dataset)} samples at {address}", flush=True)
        while True:  # Linux may give SIGTERM to another thread, which does not wake this one
            time.sleep(0.2)
    finally:
        server.stop(grace=None).wait()
        feed.end()
