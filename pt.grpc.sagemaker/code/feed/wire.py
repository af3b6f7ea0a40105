"""How requests and samples travel, and why nothing that a stranger sends is unpickled.

All that is pickled is covered by an HMAC with the job's token, which itself does not travel: a
request by its digest, a Dataset by its digest, which is its name, and a reply by the nonce of its
request, which it answers alone. The memory of tensors and arrays follows a reply as it is, without
a MAC, since it is never interpreted. grpcio-tools compiles dataset_feed.proto when this module is
imported, so that the messages' classes are those of the protobuf that is installed.
"""

import hashlib
import hmac
import math
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from google.protobuf import message_factory
from google.protobuf.descriptor_pb2 import FileDescriptorSet


def _compile(name: str) -> SimpleNamespace:
    """Make the classes of the messages in a .proto file beside this one.

    In a process of its own, as grpcio-tools would crash in one that has imported TensorFlow.
    """
    protoc = [sys.executable, "-m", "grpc_tools.protoc", f"-I{Path(__file__).parent}"]
    command = [*protoc, "--descriptor_set_out=/dev/stdout", name]
    compiled = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    classes = message_factory.GetMessages(FileDescriptorSet.FromString(compiled).file)
    return SimpleNamespace(**{full.split(".")[-1]: each for full, each in classes.items()})


messages = _compile("dataset_feed.proto")
READY, UNKNOWN, WAITING, RAISED, DIED = range(5)  # the proto's State

SERVICE, METADATA_KEY = "dataset_feed.DatasetFeed", "feed-bin"
FRAME = 1 << 20  # bytes in one message
ALIGNMENT = 64  # of each tensor's memory
SMALL = 1024  # bytes; less stays in the pickle
NONCE, DIGEST = 16, 32  # bytes
MAIN = "__main__", "__mp_main__"  # the training script; the latter in a process that was spawned
KEEPALIVE = [  # of both sides, to notice within 20 s a peer that hangs or has gone
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),  # no limit: also while a chunk takes minutes
]


class BrokenReply(Exception):
    """A reply that has not come whole; says what is missing."""


def mac(token: str, *parts: bytes) -> bytes:
    """Return the HMAC of some bytes; all parts but the last have a fixed length."""
    return hmac.new(token.encode(), b"".join(parts), hashlib.sha256).digest()


def sign(token: str, digest: bytes) -> tuple[bytes, list[tuple[str, bytes]]]:
    """Return a new nonce, and the metadata of a call that sends what has this digest."""
    nonce = os.urandom(NONCE)
    return nonce, [(METADATA_KEY, nonce + digest + mac(token, b"call ", nonce, digest))]


def verify(token: str, metadata: Any) -> tuple[bytes, bytes] | None:
    """Return nonce and digest of a call, or None if it does not come from this job."""
    given = bytes(dict(metadata).get(METADATA_KEY, b""))
    nonce, digest, code = given[:NONCE], given[NONCE : NONCE + DIGEST], given[NONCE + DIGEST :]
    is_ours = hmac.compare_digest(code, mac(token, b"call ", nonce, digest))
    return (nonce, digest) if is_ours else None


def seal(token: str, nonce: bytes, reply: Any) -> bytes:
    """Return a Reply to the call with this nonce, as it travels."""
    content = reply.SerializeToString()
    return mac(token, b"reply", nonce, content) + content


def unseal(token: str, nonce: bytes, data: bytes) -> Any:
    """Return the Reply, or raise PermissionError if it is no answer to this call."""
    if not data:
        raise BrokenReply("it has ended")
    code, content = data[:DIGEST], data[DIGEST:]
    if not hmac.compare_digest(code, mac(token, b"reply", nonce, content)):
        raise PermissionError("a reply without a valid MAC: have both sides the same HETERO_TOKEN?")
    return messages.Reply.FromString(content)


class SamplePickler(pickle.Pickler):
    """Pickles samples, but keeps the memory of their tensors and arrays apart, in `parts`."""

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
        if isinstance(value, type) and value.__module__ in MAIN:
            return of_main, (value.__qualname__,)  # the training script's: here it came by value
        return NotImplemented


def is_plain(value: torch.Tensor) -> bool:
    """Whether the tensor is nothing but a block of memory."""
    is_dense = value.layout is torch.strided and not value.is_quantized
    return is_dense and value.device.type == "cpu" and not value.requires_grad


def reduced(value: torch.Tensor) -> tuple:
    """Return how a plain tensor is pickled: as its memory, of which this makes no copy."""
    flat = value.resolve_conj().resolve_neg().contiguous().reshape(-1)
    buffer = pickle.PickleBuffer(flat.view(torch.uint8).numpy())
    return tensor, (buffer, str(value.dtype)[6:], tuple(value.shape))


def tensor(memory: Any, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor in `memory`, which it shares."""
    array = np.frombuffer(memory, np.uint8)
    if not array.flags.writeable:
        array = array.copy()
    return torch.from_numpy(array).view(getattr(torch, dtype)).view(shape)


def of_main(path: str) -> Any:
    """Return a class of the training script."""
    found = sys.modules["__main__"]
    for name in path.split("."):
        found = getattr(found, name)
    return found


def encode(value: Any) -> tuple[bytes, list[memoryview]]:
    """Return the pickle of samples, and the memory that belongs to it."""
    file = BytesIO()
    pickler = SamplePickler(file)
    pickler.dump(value)
    return file.getvalue(), pickler.parts


def decode(reply: Any, frames: Iterator[bytes]) -> Any:
    """Return the samples of a Reply, in memory of their own, filled with the frames."""
    return pickle.loads(reply.value, buffers=parts_of(reply, frames))


def parts_of(reply: Any, frames: Iterator[bytes]) -> list[np.ndarray]:
    """Return the memory that belongs to a Reply, filled with the frames.

    Raises BrokenReply when the frames are not as many bytes as the Reply says.
    """
    starts = [0]
    for size in reply.sizes:
        starts.append(starts[-1] + size + -size % ALIGNMENT)
    memory = aligned(starts[-1])
    at = 0
    for frame in frames:
        if at + len(frame) > len(memory):
            raise BrokenReply("more bytes than announced")
        memory[at : at + len(frame)] = np.frombuffer(frame, np.uint8)  # without the GIL
        at += len(frame)
    if at < len(memory):
        raise BrokenReply("fewer bytes than announced")
    return [memory[start : start + size] for start, size in zip(starts, reply.sizes, strict=False)]


def frames_after(reply: Any) -> int:
    """Return how many frames follow a Reply, where more may come after them."""
    return math.ceil(sum(size + -size % ALIGNMENT for size in reply.sizes) / FRAME)


def aligned(size: int) -> np.ndarray:
    """Return memory (size,), uint8. NumPy's, which asks Linux for huge pages: faster to clear."""
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size]
