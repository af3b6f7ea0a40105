"""How requests and samples are sent, and why nothing that a stranger sends is unpickled.

An HMAC with the job's token, which itself is never sent, covers everything that is pickled: the
digest of a request or a Dataset, and a reply together with its request's nonce, so that it answers
no other request. The memory of tensors and arrays is in the same message if it is small, and else
follows in frames of 1 MiB, the fastest size. It has no HMAC, since it is never unpickled.
"""

import functools
import hashlib
import hmac
import importlib
import itertools
import os
import pickle
import sys
from collections.abc import Iterator
from io import BytesIO
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import torch

SERVICE, METADATA_KEY = "dataset_feed.DatasetFeed", "feed-bin"
FRAME = 1 << 20  # bytes in one message
ALIGNMENT = 64  # of each tensor's memory
SMALL = 1024  # bytes; smaller memory stays in the pickle
NONCE, DIGEST, SIZE = 16, 32, 4  # bytes
MAIN = "__main__", "__mp_main__"  # the training script; the latter in a spawned process
KEEPALIVE = [  # on both sides, to notice within 20 s if the other one hangs or is gone
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),  # no limit: also while a chunk takes minutes
]


# The states of a Dataset, a chunk or a stream, in a Reply
DONE = 0  # the reply has what the request is for
UNKNOWN = 1  # this host does not have the Dataset: upload it
WAITING = 2  # not yet: the Dataset, the chunk or the stream is still being made
RAISED = 3  # the Dataset has raised an exception, which is the value
DIED = 4  # the stream's process has ended, hangs or cannot start; the value says which


class Request(NamedTuple):
    """What a client wants of a data host."""

    dataset_digest: bytes  # SHA-256 of its pickle
    wanted: bytes  # pickled samples.Chunk or iterate.Stream; empty: whether it has the Dataset
    init_fn_digest: bytes = b""  # SHA-256 of the pickled worker_init_fn, if any
    is_fresh: bool = False  # whether a new process is to prepare the chunk


class Reply(NamedTuple):
    """What a data host answers. Frames with the memory of tensors and arrays may follow it."""

    state: int
    value: bytes = b""  # pickled, except with DIED; with WAITING: how far a stream is run forward
    sizes: tuple[int, ...] = ()  # bytes of each tensor and array
    seconds: float = 0.0  # that a worker took for the chunk
    workers: int = 0  # processes that prepare samples here
    calls: int = 0  # open calls of all clients
    memory: bytes | memoryview = b""  # of the tensors and arrays, if no frames follow

    @property
    def length(self) -> int:
        """Return how many bytes the memory of the tensors and arrays has."""
        return sum(size + padding(size) for size in self.sizes)


class CallAgain(Exception):
    """A call has not given what it was for, and is to be made again. The host has not failed."""


class Lost(Exception):
    """A host has failed: it has not answered, or not completely. The message says how."""


def mac(token: str, *parts: bytes) -> bytes:
    """Return the HMAC of the joined parts. All but the last must have a fixed length."""
    return hmac.new(token.encode(), b"".join(parts), hashlib.sha256).digest()


def sign(token: str, digest: bytes) -> tuple[bytes, list[tuple[str, bytes]]]:
    """Return a new nonce, and the metadata of a call that sends data with this digest."""
    nonce = os.urandom(NONCE)
    return nonce, [(METADATA_KEY, nonce + digest + mac(token, b"call ", nonce, digest))]


def verify(token: str, metadata: Any) -> tuple[bytes, bytes] | None:
    """Return nonce and digest of a call, or None if it does not come from this job."""
    given = bytes(dict(metadata).get(METADATA_KEY, b""))
    nonce, digest, code = given[:NONCE], given[NONCE : NONCE + DIGEST], given[NONCE + DIGEST :]
    is_ours = hmac.compare_digest(code, mac(token, b"call ", nonce, digest))
    return (nonce, digest) if is_ours else None


def seal(token: str, nonce: bytes, reply: Reply, memory: bytes = b"") -> bytes:
    """Return the bytes of a Reply to the call with this nonce, and its memory."""
    content = pickle.dumps(reply)
    size = len(content).to_bytes(SIZE, "big")
    return b"".join((mac(token, b"reply", nonce, content), size, content, memory))


def unseal(token: str, nonce: bytes, data: bytes) -> Reply:
    """Return the Reply; raise PermissionError if it does not answer this call."""
    if not data:
        raise Lost("the call has ended")
    start = DIGEST + SIZE
    end = start + int.from_bytes(data[DIGEST:start], "big")
    code, content = data[:DIGEST], data[start:end]
    if not hmac.compare_digest(code, mac(token, b"reply", nonce, content)):
        raise PermissionError("a reply has no valid MAC: do both sides have the same HETERO_TOKEN?")
    return pickle.loads(content)._replace(memory=memoryview(data)[end:])


class SamplePickler(pickle.Pickler):
    """Pickles samples without the memory of their tensors and arrays, which goes into `parts`."""

    def __init__(self, file: BytesIO):
        super().__init__(file, protocol=5, buffer_callback=self.keep_apart)
        self.parts: list[memoryview] = []

    def keep_apart(self, buffer: pickle.PickleBuffer) -> bool:
        part = buffer.raw()
        if part.nbytes >= SMALL:
            self.parts.append(part)
        return part.nbytes < SMALL

    def reducer_override(self, value: Any) -> Any:
        if type(value) is torch.Tensor and is_plain(value):
            return reduced(value)
        if isinstance(value, type) and (path := path_of(value)):
            return class_at, (value.__module__, path)
        return NotImplemented


def path_of(kind: type) -> str:
    """Return where a class is in its module, if pickle itself would not find it there.

    Such are the script's classes, which the training process has, and namedtuples that are
    attributes of a class: they do not know of which one.
    """
    module, path = sys.modules.get(kind.__module__), kind.__qualname__
    if "." not in path and getattr(module, path, None) is not kind:
        by_value = cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.values()
        for owner in (*vars(module).copy().values(), *by_value) if module else ():
            if isinstance(owner, type) and vars(owner).get(path) is kind:
                return f"{owner.__qualname__}.{path}"
    return path if kind.__module__ in MAIN else ""


def is_plain(value: torch.Tensor) -> bool:
    """Return whether the tensor is just a block of memory on the CPU."""
    is_dense = value.layout is torch.strided and not value.is_quantized
    is_ordinary = value.device.type == "cpu" and not (value.requires_grad or value.is_nested)
    return is_dense and is_ordinary


def reduced(value: torch.Tensor) -> tuple:
    """Return how to pickle a plain tensor: as its memory, without a copy if it is contiguous."""
    flat = value.resolve_conj().resolve_neg().contiguous().reshape(-1)
    buffer = pickle.PickleBuffer(flat.view(torch.uint8).numpy())
    return tensor, (buffer, str(value.dtype)[6:], tuple(value.shape))


def tensor(memory: Any, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor that shares `memory`, or has a copy of it if it is read-only."""
    array = np.frombuffer(memory, np.uint8)
    if not array.flags.writeable:
        array = array.copy()
    return torch.from_numpy(array).view(getattr(torch, dtype)).view(shape)


def class_at(module: str, path: str) -> Any:
    """Return a class of a module, or of the training script."""
    found = importlib.import_module("__main__" if module in MAIN else module)
    return functools.reduce(getattr, path.split("."), found)


def encode(value: Any) -> tuple[bytes, list[memoryview]]:
    """Return the pickle of samples, and the memory that belongs with it."""
    file = BytesIO()
    pickler = SamplePickler(file)
    pickler.dump(value)
    return file.getvalue(), pickler.parts


def decode(reply: Reply, frames: Iterator[bytes]) -> Any:
    """Return the samples of a Reply, in new memory that is filled with the frames."""
    return pickle.loads(reply.value, buffers=memory_of(reply, frames))


def memory_of(reply: Reply, frames: Iterator[bytes]) -> list[np.ndarray]:
    """Return the memory that belongs with a Reply, filled with its own and the frames.

    Raises Lost if the frames do not have as many bytes as the Reply says.
    """
    # NumPy asks Linux for huge pages, which are faster to clear.
    memory = np.empty(reply.length + ALIGNMENT, np.uint8)
    memory = memory[padding(memory.ctypes.data) :][: reply.length]
    at = 0
    for frame in itertools.chain([reply.memory], frames):
        if at + len(frame) > len(memory):
            raise Lost("more bytes than announced")
        memory[at : at + len(frame)] = np.frombuffer(frame, np.uint8)  # without the GIL
        at += len(frame)
    if at < len(memory):
        raise Lost("fewer bytes than announced")
    parts = []
    for size in reply.sizes:
        parts.append(memory[:size])
        memory = memory[size + padding(size) :]
    return parts


def padding(offset: int) -> int:
    """Return how many bytes of padding come between this offset and the next tensor."""
    return -offset % ALIGNMENT
