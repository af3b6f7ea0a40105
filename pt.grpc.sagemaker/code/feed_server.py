"""The data host's side of the loader: prepare the batches that training processes ask for.

    if __name__ == "__main__":
        serve(dataset, "algo-1:7710", token)

Each stream of batches comes from an ordinary `DataLoader` with worker processes. These are started
by a fork server, never forked from this process: a fork of a running gRPC server can deadlock, and
would hold its port and connections open after its death. Hence, as with the start method "spawn",
the Dataset and collate_fn must be picklable and the program's main code guarded as above. Tensors
in the Dataset are shared with the workers; anything else is copied to each of them.
"""

import dataclasses
import hmac
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import signal
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import grpc
import torch
from torch.utils.data import DataLoader, Dataset

from batches import BatchKey, BatchPlan, SeededBatches, end_with_parent, key_loader
from wire import encode, messages, services, to_frames

MAX_STREAMS = 256  # at a time; one more is refused at once rather than left waiting
CHECK_SECONDS = 0.5  # how often a stream that waits for its workers looks whether to go on
REFUSAL_SECONDS = 10  # at most one line in so long for calls without the token
SERVER_OPTIONS = [
    ("grpc.so_reuseport", 0),  # else a second server on this port would take some of the calls
    ("grpc.max_receive_message_length", 64 << 10),  # requests are small
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),  # let clients check on us
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

    The `num_workers` worker processes (default: one per core that this process may use) are shared
    out equally among the ranks. Raises as FeedServer does.
    """
    stop_asked = threading.Event()
    previous = signal.signal(signal.SIGTERM, lambda *_: stop_asked.set())
    try:
        server = FeedServer(dataset, address, token, collate_fn, num_workers)
        print(f"serving {len(dataset)} samples at {address}", flush=True)
        try:
            stop_asked.wait()
        finally:
            server.stop()
    finally:
        signal.signal(signal.SIGTERM, previous)


class Answer(NamedTuple):
    """What a worker makes of a BatchKey: the batch, as `wire.encode` returns it, or an error."""

    structure: bytes = b""
    buffers: tuple[torch.Tensor, ...] = ()
    error: str = ""


class Answers(SeededBatches):
    """Encoded batches: the workers do this part too, and the server's process only passes it on."""

    def __getitem__(self, key: BatchKey) -> Answer:
        try:
            structure, buffers = encode(super().__getitem__(key))
        except Exception as error:
            text = f"{type(error).__name__}: {error}\n\n{traceback.format_exc()}"
            return Answer(error=text[:100_000])
        return Answer(structure.SerializeToString(), tuple(buffers))


class TokenCheck(grpc.ServerInterceptor):
    """Refuses calls without the job's token, before it waits for their message or does anything."""

    def __init__(self, token: str):
        self._expected = f"Bearer {token}".encode()
        self._printed_at = -REFUSAL_SECONDS  # monotonic time of the last line about a refusal
        self._refusal = grpc.stream_stream_rpc_method_handler(self._refuse)

    def intercept_service(self, continuation: Callable, call: grpc.HandlerCallDetails) -> Any:
        given = str(dict(call.invocation_metadata).get("authorization", "")).encode()
        return continuation(call) if hmac.compare_digest(given, self._expected) else self._refusal

    def _refuse(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        reason = "wrong or missing token"
        if time.monotonic() > self._printed_at + REFUSAL_SECONDS:
            self._printed_at = time.monotonic()
            print(f"feed: refused a call from {context.peer()}: {reason}", flush=True)
        context.abort(grpc.StatusCode.UNAUTHENTICATED, reason)


class FeedServer(services.DatasetFeedServicer):
    """A running server, for a program that has other things to do as well; `stop` ends it.

    Raises TypeError for a Dataset that is not map-style, ValueError for an unfit token or number of
    workers, OSError when `address` cannot be listened at.
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
        if num_workers < 1:
            raise ValueError(f"num_workers must be at least 1, but is {num_workers}")
        self._answers = Answers(dataset, collate_fn)
        self._num_workers = num_workers
        # Loaders between two streams, by number of workers: starting a worker takes about 0.2 s of
        # CPU time even so (1.5 s if it had to import torch), which need not be paid every epoch.
        self._idle_loaders: dict[int, list[DataLoader]] = defaultdict(list)
        self._forkserver = multiprocessing.get_context("forkserver")
        self._forkserver.set_forkserver_preload(["torch.utils.data", __name__])

        self._threads = ThreadPoolExecutor(MAX_STREAMS)
        self._server = grpc.server(
            self._threads,
            interceptors=[TokenCheck(token)],
            options=SERVER_OPTIONS,
            maximum_concurrent_rpcs=MAX_STREAMS,
        )
        services.add_DatasetFeedServicer_to_server(self, self._server)
        try:
            if not self._server.add_insecure_port(address):
                raise RuntimeError  # as newer grpcio does by itself
        except RuntimeError as error:
            raise OSError(
                f"cannot listen at {address!r}: the port is in use, or this is not a host:port "
                "address of this machine"
            ) from error
        multiprocessing.forkserver.ensure_running()
        self._server.start()

    def stop(self) -> None:
        """End all streams and worker processes, within about CHECK_SECONDS."""
        self._server.stop(grace=None).wait()
        for child in multiprocessing.active_children():
            if isinstance(child, self._forkserver.Process):
                child.kill()  # not asked to end: it may be busy with a long batch
        self._threads.shutdown()
        self._idle_loaders.clear()

    def Describe(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Answer with the length of the dataset."""
        return messages.DatasetDescription(length=len(self._answers.dataset))

    def Batches(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        """Stream the batches asked for; memory is bounded by what the DataLoader prefetches."""
        plan, numbers = self._read_request(request, context)
        if not numbers:
            return
        try:
            loader, answers = self._start_loader(plan, request.epoch, numbers)
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            yield messages.Frame(error=f"cannot send the Dataset to worker processes: {error}")
            return
        # When this function ends early, nothing holds `loader` any more, which ends its workers.
        for number in numbers:
            answer = _wait_for(answers, context)
            if answer is None:
                return
            if answer.error:
                yield messages.Frame(number=number, error=answer.error)
                return
            if number == numbers[-1]:
                self._idle_loaders[loader.num_workers].append(loader)
            structure_size = len(answer.structure)
            for data in to_frames(answer.structure, answer.buffers):
                yield messages.Frame(number=number, structure_size=structure_size, data=data)
                structure_size = 0

    def _read_request(self, request: Any, context: grpc.ServicerContext) -> tuple[BatchPlan, range]:
        try:
            names = [field.name for field in dataclasses.fields(BatchPlan)]
            plan = BatchPlan(**{name: getattr(request.plan, name) for name in names})
            numbers = range(request.start, request.stop, request.step)
            if plan.dataset_length != len(self._answers.dataset) or numbers.stop > len(plan):
                raise ValueError(
                    f"batches up to {numbers.stop} of {plan} were asked for, but here are "
                    f"{len(self._answers.dataset)} samples"
                )
        except ValueError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        return plan, numbers

    def _start_loader(
        self, plan: BatchPlan, epoch: int, numbers: range
    ) -> tuple[DataLoader, Iterator[Answer]]:
        """Set one rank's share of the workers to work, those of an earlier stream if there are."""
        num_workers = max(1, self._num_workers // plan.world_size)
        try:
            loader = self._idle_loaders[num_workers].pop()
            loader.sampler.choose(plan, epoch, numbers)
            return loader, iter(loader)
        except (IndexError, RuntimeError):  # there are none, or one has died
            loader = key_loader(
                self._answers,
                num_workers,
                timeout=CHECK_SECONDS,
                multiprocessing_context=self._forkserver,
                worker_init_fn=end_with_parent,
            )
            loader.sampler.choose(plan, epoch, numbers)
            return loader, iter(loader)


def _wait_for(answers: Iterator[Answer], context: grpc.ServicerContext) -> Answer | None:
    """Return the workers' next answer, or None once the client has gone."""
    while context.is_active():
        try:
            return next(answers)
        except RuntimeError as error:
            # DataLoader says "timed out after 0.5 seconds" and can then be asked again; anything
            # else is the end of a worker, as the Dataset's own exceptions come as answers.
            if "timed out" not in str(error):
                context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
    return None
