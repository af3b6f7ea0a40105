"""A process's connection to one data host: makes the gRPC calls, and keeps the host's state."""

import hashlib
import math
import os
import pickle
import queue
import time
from collections.abc import Callable, Iterator
from enum import Enum, auto
from typing import IO, Any

import grpc
import torch.distributed as dist

from feed import wire
from feed.iterate import Stream
from feed.log import logger
from feed.pickling import frames_of
from feed.samples import Chunk, raised_again
from feed.wire import CallAgain, Lost, Reply, Request

CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", -1),  # a reply's pickle may be large
    ("grpc.http2.lookahead_bytes", wire.FRAME),
    ("grpc.enable_http_proxy", 0),  # hosts of one job talk directly
    ("grpc.use_local_subchannel_pool", 1),  # a connection for each channel
    ("grpc.initial_reconnect_backoff_ms", 100),  # hosts of one job start at about the same time
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.min_reconnect_backoff_ms", 10_000),  # the time limit of one attempt
    *wire.KEEPALIVE,
]


class HostState(Enum):
    """What this process knows of a data host. It greets it to learn whether it has the Dataset.

    UNREADY, FAILED -> GREETING -> READY. GREETING -> UNREADY: not yet. READY -> UNREADY: it has
    dropped the Dataset, or was restarted between two calls. READY, GREETING -> FAILED: the call has
    failed.
    """

    UNREADY = auto()  # it does not have the Dataset yet, as far as is known
    GREETING = auto()  # its answer is awaited, and it may get the Dataset meanwhile
    READY = auto()  # it has the Dataset, and prepares chunks
    FAILED = auto()  # it does not answer


class DataHost:
    """A data host, from which a process gets samples of the Dataset with this digest.

    Methods that call it raise Lost if it fails, CallAgain if the call is to be made again,
    PermissionError if its token differs, and whatever the Dataset raises there.
    """

    def __init__(self, address: str, token: str, digest: bytes, number: int = 0, count: int = 1):
        self.address, self.token, self.digest = address, token, digest
        self.number, self.count = number, count  # of this host, and of all hosts
        self.channel = grpc.insecure_channel(address, CHANNEL_OPTIONS)
        self.open_calls: set[Any] = set()  # calls that have not ended
        self.heard_at = time.monotonic()  # its last sign of life
        self.state, self.failure = HostState.UNREADY, ""  # failure: why it failed, until it answers
        self.greet_at = 0.0  # when to greet it next, unless it is GREETING or READY
        self.workers = 0  # processes that prepare samples there
        self.assigned, self.others = 0, 0  # chunks that it prepares: for us; for others, lately
        self.luck = 0.0  # see busyness
        self.seconds = 0.0  # that a worker takes for a sample: a moving average

    def workers_for_rank(self) -> float:
        """Return how many of its workers there are for this process's rank."""
        ranks = int(os.environ.get("WORLD_SIZE", 1))
        if dist.is_available() and dist.is_initialized():
            ranks = dist.get_world_size()
        if self.address.startswith("unix"):  # a server on this host, only for the ranks here
            ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        return self.workers / ranks

    def busyness(self) -> float:
        """Return how many chunks it prepares for us, divided by our share of its workers.

        This adds a random part of a chunk, drawn for each batch: processes do not know what others
        ask a host for, and must not all give a chunk to a host with few workers.
        """
        return (self.assigned + self.luck) / (self.workers_for_rank() or 1e-9)

    def expected(self, samples: int) -> float:
        """Return how many seconds it would take for another chunk with so many samples."""
        rounds = 1 + (self.assigned + self.others) / max(1, self.workers)
        return rounds * samples * (self.seconds or 1e-3)

    def greet(
        self, open_pickle: Callable[[], IO[bytes]], what: str
    ) -> tuple[int, tuple | None] | None:
        """Give it the Dataset; return its number of workers, or None while it is not ready.

        Also returns its summary of the Dataset, if a callable makes it. open_pickle: returns a
        file with the Dataset's pickle. what: describes the Dataset.
        """
        reply, call = self.reply_to(None, [])
        if reply.state == wire.UNKNOWN:
            uploaded = self.put(open_pickle)
            if uploaded.state == wire.UNKNOWN:
                raise TypeError(
                    f"{what}: its pickle differs each time, or the Dataset has changed since it "
                    "was first sent. Give RemoteDataset a callable that makes the Dataset"
                )
            if uploaded.state == wire.DONE:  # otherwise another process uploads it
                logger.info("%s was sent to data host %s", what, self.address)
        if reply.state != wire.DONE:
            call.cancel()
            return None
        return reply.workers, self.result(wire.decode, reply, call)

    def put(self, open_pickle: Callable[[], IO[bytes]]) -> Reply:
        """Upload the Dataset; raise what pickling it raises."""
        errors: list[Exception] = []

        def frames() -> Iterator[bytes]:
            try:
                yield from frames_of(open_pickle())
            except Exception as error:  # gRPC, whose thread runs this, would only log it
                errors.append(error)
                raise

        nonce, metadata = wire.sign(self.token, self.digest)
        self.heard_at = math.inf  # it is silent during an upload; gRPC notices if it is gone
        try:
            call = self.channel.stream_unary(f"/{wire.SERVICE}/Upload").future
            sent = self.track(call(frames(), metadata=metadata))
            return self.result(lambda: wire.unseal(self.token, nonce, sent.result()))
        except (Lost, CallAgain) as error:
            raise errors[0] if errors else error from None
        finally:
            self.heard_at = time.monotonic()

    def get_chunk(self, chunk: Chunk, calls: list, is_fresh: bool) -> Any:
        """Have it prepare a chunk, and return the samples. Adds the call to `calls`.

        is_fresh: whether a new process is to prepare them.
        """
        if not is_fresh:
            host = self.number, self.count
            chunk = chunk._replace(caller=chunk.caller._replace(data_host=host))
        reply, call = self.reply_to(chunk, calls, is_fresh)
        if reply.state != wire.DONE:
            self.raise_dropped()
        self.workers, self.failure = reply.workers, ""
        self.others = max(0, reply.calls - self.assigned)
        seconds = reply.seconds / max(1, len(chunk.indices))
        if not is_fresh:  # a new process may have to open files first
            self.seconds = (3 * self.seconds + seconds) / 4 if self.seconds else seconds
        return self.result(wire.decode, reply, call)

    def raise_dropped(self) -> None:
        """Raise CallAgain: it has dropped the Dataset, or was restarted, and must get it again."""
        if self.state is HostState.READY:
            self.state = HostState.UNREADY
        raise CallAgain

    def reply_to(
        self, chunk: Chunk | None, calls: list, is_fresh: bool = False
    ) -> tuple[Reply, grpc.Call]:
        """Make a Get call; return the Reply, and the call, whose frames may follow."""
        request, nonce, metadata = self.signed(chunk, is_fresh)
        get = self.channel.unary_stream(f"/{wire.SERVICE}/Get")
        call = self.track(get(request, metadata=metadata))
        calls.append(call)
        for reply in self.replies(call, nonce):
            if reply.state == wire.RAISED:
                raise self.raised(reply.value)
            if reply.state != wire.WAITING or not chunk:
                return reply, call

    def open_stream(
        self, stream: Stream, epochs: queue.SimpleQueue
    ) -> tuple[grpc.Call, Iterator[Reply]]:
        """Have it run a stream; return the call and its Replies.

        epochs: each b"" that is put into it starts another epoch; None ends them.
        """
        request, nonce, metadata = self.signed(stream)
        epochs.put(request)
        open_call = self.channel.stream_stream(f"/{wire.SERVICE}/Stream")
        call = self.track(open_call(iter(epochs.get, None), metadata=metadata))
        return call, self.replies(call, nonce)

    def signed(
        self, wanted: Chunk | Stream | None, is_fresh: bool = False
    ) -> tuple[bytes, bytes, list]:
        """Return a pickled Request, and the nonce and the metadata of its call."""
        pickled = pickle.dumps(wanted) if wanted else b""
        init_fn = wanted.caller.pickled_init_fn if wanted else b""
        digest = hashlib.sha256(init_fn).digest() if init_fn else b""
        request = pickle.dumps(Request(self.digest, pickled, digest, is_fresh))
        return request, *wire.sign(self.token, hashlib.sha256(request).digest())

    def replies(self, call: grpc.Call, nonce: bytes) -> Iterator[Reply]:
        """Yield the Replies of a call. Between them, frames may be read from the call."""
        while True:
            reply = self.result(lambda: wire.unseal(self.token, nonce, next(call, b"")))
            self.heard_at = time.monotonic()
            yield reply

    def raised(self, value: bytes) -> Exception:
        """Return the exception that the Dataset raised there."""
        return raised_again(f"on data host {self.address}", *pickle.loads(value))

    def track(self, call: Any) -> Any:
        """Remember a call until it ends, and return it."""
        self.open_calls.add(call)
        if not call.add_callback(lambda: self.open_calls.discard(call)):
            self.open_calls.discard(call)
        return call

    def result(self, function: Callable, *arguments: Any) -> Any:
        """Return a gRPC function's result; raise what the class says if it fails."""
        try:
            return function(*arguments)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                text = f"data host {self.address}: {error.details()}"
                raise PermissionError(text) from None
            if error.code() is grpc.StatusCode.CANCELLED:  # by this process
                raise CallAgain from None
            raise Lost(f"{error.code().name}: {error.details()}") from None
        except grpc.FutureCancelledError:
            raise CallAgain from None
