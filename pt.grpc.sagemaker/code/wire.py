"""How a batch travels: a description of its structure, then the bytes of its tensors and arrays.

`encode` and `send` are the data host's side, `receive` the training process's; the messages are in
dataset_feed.proto. Nothing is pickled, so no message can run code at its receiver.

gRPC carries what is asked for and notices what fails, but not the batches: gRPC for Python would
copy them several times. They have a TCP connection of their own, on which Linux copies them out of
tensors and into new ones.

The messages' Python classes are made by grpcio-tools, in memory, when this module is imported: so
they fit the protobuf that is installed, which differs between containers, and nothing is fetched.
A job without internet access needs grpcio and grpcio-tools in its container image, or their wheels
in this folder and `--no-index --find-links .` as the first line of requirements.txt.
"""

import contextlib
import functools
import math
import select
import socket
import struct
import sys
import time
from collections import namedtuple
from collections.abc import Iterable
from typing import Any

import grpc
import numpy as np
import torch

messages = grpc.protos("dataset_feed.proto")

SERVICE = "dataset_feed.DatasetFeed"
LENGTH = struct.Struct("!Q")
PIECE_BYTES = 2 << 20  # that are received at a time
STALL_SECONDS = 20  # that nothing may come within a batch
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


def send(connection: socket.socket, header: Any, buffers: Iterable[torch.Tensor] = ()) -> None:
    """Send a batch: its `messages.BatchHeader`, and then its bytes."""
    described = header.SerializeToString()
    connection.sendall(LENGTH.pack(len(described)))  # by itself: only for this one may wait
    connection.sendall(described)
    for buffer in buffers:
        connection.sendall(buffer.numpy())


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


def receive_header(connection: socket.socket) -> Any:
    """Wait for the next batch, and return its `messages.BatchHeader`.

    Raises OSError if the connection ends, or fails within the header, and ValueError or DecodeError
    if something else than a header comes.
    """
    length = bytearray(LENGTH.size)
    _fill(length, connection, may_wait=True)
    [size] = LENGTH.unpack(length)
    if size >= 2**31:  # protobuf has no larger messages
        raise ValueError("it sent something else than batches")
    described = bytearray(size)
    _fill(described, connection)
    return messages.BatchHeader.FromString(bytes(described))


def receive(connection: socket.socket, header: Any, pin_memory: bool = False) -> Any:
    """Return the batch after its header. Raises OSError if the connection ends or fails."""
    batch, memory = decode(messages.Value.FromString(header.structure), pin_memory)
    for target in memory:
        _fill(target, connection)
    return batch


def _fill(
    target: bytearray | np.ndarray, connection: socket.socket, may_wait: bool = False
) -> None:
    """Receive into `target`, woken by Linux for each piece of it and not for every packet.

    Raises ConnectionError if the connection ends, or, unless it `may_wait`, comes to a standstill.
    """
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    left, received_at = memoryview(target), time.monotonic()
    while left:
        piece = left[:PIECE_BYTES]
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, len(piece))
        poll.poll(1000)  # ms; then what is there is taken, so that no batch depends on being woken
        try:
            received = connection.recv_into(piece, 0, socket.MSG_DONTWAIT)
        except BlockingIOError:  # nothing is
            # The host may answer gRPC all the same: there are paths that lose large packets only.
            if not may_wait and time.monotonic() > received_at + STALL_SECONDS:
                raise ConnectionError(f"no more of a batch for {STALL_SECONDS} s") from None
            continue
        if not received:
            raise ConnectionError("its connection has ended")
        left, received_at = left[received:], time.monotonic()


def hang_up(connection: socket.socket) -> None:
    """End a connection, or the wait for one, also for the thread that is busy with it."""
    with contextlib.suppress(OSError):  # it has ended already
        connection.shutdown(socket.SHUT_RDWR)
