"""How a batch travels: a description of its structure, then the bytes of its tensors and arrays.

`encode` and `to_frames` are the data host's side, `receive` the training process's; the messages
are in dataset_feed.proto. Nothing is pickled, so no message can run code at its receiver.

The messages' Python classes are made by grpcio-tools, in memory, when this module is imported: so
they fit the protobuf that is installed, which differs between containers, and nothing is fetched.
A job without internet access needs grpcio and grpcio-tools in its container image, or their wheels
in this folder and `--no-index --find-links .` as the first line of requirements.txt.
"""

import functools
import math
import sys
from collections import namedtuple
from collections.abc import Iterable, Iterator
from typing import Any

import grpc
import numpy as np
import torch

messages = grpc.protos("dataset_feed.proto")

SERVICE = "dataset_feed.DatasetFeed"
FRAME_BYTES = 1 << 20
DATA_FIELD = b"\x22"  # how protobuf begins the field `data` of a Frame; its length comes next
SCALARS = {bool: "boolean", int: "integer", float: "real", str: "text", bytes: "octets"}


def encode(value: Any, path: str = "batch") -> tuple[Any, list[torch.Tensor]]:
    """Return the `messages.Value` that describes `value`, and the bytes of its tensors and arrays.

    The bytes are 1-dimensional uint8 tensors, which share memory with `value` where they can.
    Raises TypeError, naming the `path` of the first part whose type is not supported. Types are
    taken exactly: a subclass, other than a namedtuple, would arrive as something else. Tensors and
    arrays arrive contiguous.
    """
    kind = type(value)
    if value is None:
        return messages.Value(none=True), []
    if kind in SCALARS:
        if kind is int and not -(2**63) <= value < 2**63:
            raise TypeError(f"{path} is an int of more than 64 bits, which cannot be sent")
        return messages.Value(**{SCALARS[kind]: value}), []
    if kind is torch.Tensor:
        if value.layout is not torch.strided or value.is_quantized or value.device.type != "cpu":
            raise TypeError(
                f"{path} is a {value.dtype} tensor, {value.layout}, on {value.device}: "
                "only dense tensors on the CPU can be sent"
            )
        described = messages.Array(dtype=str(value.dtype).split(".")[1], shape=value.shape)
        flat = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        return messages.Value(tensor=described), [flat.view(torch.uint8)]
    if kind is np.ndarray:
        if value.dtype.hasobject or np.dtype(value.dtype.str) != value.dtype:
            raise TypeError(f"{path} is an array of {value.dtype}: only plain dtypes can be sent")
        described = messages.Array(dtype=value.dtype.str, shape=value.shape)
        flat = np.require(value, requirements=["C", "W"]).reshape(-1)  # torch warns unless writable
        return messages.Value(array=described), [torch.from_numpy(flat.view(np.uint8))]
    if kind in (list, tuple):
        items, buffers = _encode_all(value, (f"{path}[{i}]" for i in range(len(value))))
        return messages.Value(**{kind.__name__: messages.Sequence(items=items)}), buffers
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        items, buffers = _encode_all(value, (f"{path}.{field}" for field in kind._fields))
        names = {"module": kind.__module__, "name": kind.__qualname__, "fields": kind._fields}
        return messages.Value(namedtuple=messages.NamedTuple(items=items, **names)), buffers
    if kind is dict:
        keys, key_buffers = _encode_all(value, (f"key {key!r} of {path}" for key in value))
        values, buffers = _encode_all(value.values(), (f"{path}[{key!r}]" for key in value))
        mapping = messages.Mapping(keys=keys, values=values)
        return messages.Value(dict=mapping), key_buffers + buffers
    raise TypeError(
        f"{path} is a {kind.__module__}.{kind.__qualname__}, which cannot be sent: a batch may "
        "hold torch tensors, NumPy arrays, int, float, bool, str, bytes and None, in any nesting "
        "of dict, list, tuple and namedtuple"
    )


def _encode_all(values: Iterable, paths: Iterable[str]) -> tuple[list, list[torch.Tensor]]:
    parts = [encode(value, path) for value, path in zip(values, paths, strict=True)]
    return [part for part, _ in parts], [buffer for _, buffers in parts for buffer in buffers]


def to_frames(number: int, structure: bytes, buffers: Iterable[torch.Tensor]) -> Iterator[bytes]:
    """Cut a batch's serialised structure and bytes, end to end, into serialised `messages.Frame`s.

    Written by hand: protobuf itself would copy the data twice more.
    """
    start = messages.Frame(number=number, structure_size=len(structure)).SerializeToString()
    pieces: list[memoryview] = []
    size = 0
    for part in [structure, *(buffer.numpy() for buffer in buffers)]:
        buffer = memoryview(part)
        for offset in range(0, len(buffer), FRAME_BYTES):
            piece = buffer[offset : offset + FRAME_BYTES]
            if size + len(piece) > FRAME_BYTES:
                yield b"".join([start, DATA_FIELD, _varint(size), *pieces])
                start, pieces, size = b"", [], 0
            pieces.append(piece)
            size += len(piece)
    yield b"".join([start, DATA_FIELD, _varint(size), *pieces])


def _varint(number: int) -> bytes:
    """Return a number as protobuf writes it: seven bits a byte, the lowest first."""
    written = b""
    while number > 127:
        written += bytes([number & 127 | 128])
        number >>= 7
    return written + bytes([number])


def decode(value: Any, pin_memory: bool = False) -> tuple[Any, list[np.ndarray]]:
    """Return what `value` (a `messages.Value`) describes, and the memory still to be filled.

    The memory is that of the new tensors and arrays, as 1-dimensional uint8 arrays, in the order of
    `encode`'s; with `pin_memory`, that of the tensors is page-locked.
    """
    kind = value.WhichOneof("kind")
    if kind == "none":
        return None, []
    if kind in SCALARS.values():
        return getattr(value, kind), []
    if kind == "tensor":
        shape, dtype = tuple(value.tensor.shape), getattr(torch, value.tensor.dtype)
        if pin_memory:
            tensor = torch.empty(shape, dtype=dtype, pin_memory=True)
        else:
            tensor = _memory(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
        return tensor, [tensor.view(-1).view(torch.uint8).numpy()]
    if kind == "array":
        array = np.empty(tuple(value.array.shape), dtype=np.dtype(value.array.dtype))
        return array, [array.reshape(-1).view(np.uint8)]
    if kind == "namedtuple":
        items, memory = _decode_all(value.namedtuple.items, pin_memory)
        it = value.namedtuple
        return _namedtuple_class(it.module, it.name, tuple(it.fields))._make(items), memory
    if kind == "dict":
        keys, key_memory = _decode_all(value.dict.keys, pin_memory)
        values, memory = _decode_all(value.dict.values, pin_memory)
        return dict(zip(keys, values, strict=True)), key_memory + memory
    items, memory = _decode_all(getattr(value, kind).items, pin_memory)
    return (tuple(items) if kind == "tuple" else items), memory


def _memory(size: int) -> torch.Tensor:
    """Return so many bytes, aligned as torch does it, of memory that NumPy has allocated.

    NumPy asks Linux for huge pages where torch does not. New memory comes from Linux page by page,
    each cleared, which takes longer than the copy into it if the pages are small.
    """
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return torch.from_numpy(memory[start : start + size])


def _decode_all(values: Iterable, pin_memory: bool) -> tuple[list, list[np.ndarray]]:
    parts = [decode(value, pin_memory) for value in values]
    return [part for part, _ in parts], [target for _, memory in parts for target in memory]


@functools.cache
def _namedtuple_class(module: str, name: str, fields: tuple[str, ...]) -> type:
    """Return the class itself where its module has been imported, or else one that is like it."""
    found = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    is_it = isinstance(found, type) and issubclass(found, tuple)
    if is_it and getattr(found, "_fields", None) == fields:
        return found
    return namedtuple(name.split(".")[-1], fields, rename=True)


def receive(first: Any, frames: Iterator[bytes], pin_memory: bool = False) -> Any:
    """Return the batch that begins with `first`, a `messages.Frame`, and goes on with `frames`.

    Takes no more frames than the batch has. Raises ValueError when they do not make up a batch.
    NumPy copies without holding Python's global lock, so that several threads can copy at the same
    time.
    """
    rest = np.frombuffer(first.data, np.uint8)

    def fill(target: np.ndarray) -> None:
        nonlocal rest
        filled = 0
        while filled < len(target):
            if not len(rest):
                rest = _data(next(frames, b""))
            size = min(len(rest), len(target) - filled)
            target[filled : filled + size] = rest[:size]
            rest = rest[size:]
            filled += size

    structure = np.empty(first.structure_size, np.uint8)
    fill(structure)
    batch, memory = decode(messages.Value.FromString(structure.tobytes()), pin_memory)
    for target in memory:
        fill(target)
    if len(rest):
        raise ValueError("it sent more than the batch holds")
    return batch


def _data(frame: bytes) -> np.ndarray:
    """Return the data of a serialised frame that has only data, without copying it."""
    if not frame:
        raise ValueError("its stream ended inside a batch")
    if frame[:1] != DATA_FIELD:
        raise ValueError("it sent something else inside a batch")
    start = 1
    while frame[start] > 127:  # the length, in as many bytes as it takes; the rest is the data
        start += 1
    return np.frombuffer(frame, np.uint8, offset=start + 1)
