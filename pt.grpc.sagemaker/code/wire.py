"""How a batch travels: a description of its structure, then the bytes of its tensors and arrays.

`encode` and `to_frames` are the data host's side, `decode` and `fill` the training process's; the
messages are in dataset_feed.proto. Nothing is pickled, so no message can run code at its receiver.

The messages' Python classes are made by grpcio-tools, in memory, when this module is imported: so
they fit the protobuf that is installed, which differs between containers, and nothing is fetched.
A job without internet access needs grpcio and grpcio-tools in its container image, or their wheels
in this folder and `--no-index --find-links .` as the first line of requirements.txt.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import grpc
import numpy as np
import torch

messages, services = grpc.protos_and_services("dataset_feed.proto")

FRAME_BYTES = 1 << 20
SCALARS = {bool: "boolean", int: "integer", float: "real", str: "text", bytes: "octets"}


def encode(value: Any, path: str = "batch") -> tuple[Any, list[torch.Tensor]]:
    """Return the `messages.Value` that describes `value`, and the bytes of its tensors and arrays.

    The bytes are 1-dimensional uint8 tensors, which share memory with `value` where they can.
    Raises TypeError, naming the `path` of the first part whose type is not supported. Types are
    taken exactly: a subclass, such as a namedtuple, would arrive as something else.
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
        if value.dtype.hasobject or value.dtype.names:
            raise TypeError(f"{path} is an array of {value.dtype}: only plain dtypes can be sent")
        described = messages.Array(dtype=value.dtype.str, shape=value.shape)
        flat = np.require(value, requirements=["C", "W"]).reshape(-1)  # torch warns unless writable
        return messages.Value(array=described), [torch.from_numpy(flat.view(np.uint8))]
    if kind in (list, tuple):
        items, buffers = _encode_all(value, (f"{path}[{i}]" for i in range(len(value))))
        return messages.Value(**{kind.__name__: messages.Sequence(items=items)}), buffers
    if kind is dict:
        keys, key_buffers = _encode_all(value, (f"key {key!r} of {path}" for key in value))
        values, buffers = _encode_all(value.values(), (f"{path}[{key!r}]" for key in value))
        mapping = messages.Mapping(keys=keys, values=values)
        return messages.Value(dict=mapping), key_buffers + buffers
    raise TypeError(
        f"{path} is a {kind.__module__}.{kind.__qualname__}, which cannot be sent: a batch may "
        "hold torch tensors, NumPy arrays, int, float, bool, str, bytes and None, in any nesting "
        "of dict, list and tuple"
    )


def _encode_all(values: Iterable, paths: Iterable[str]) -> tuple[list, list[torch.Tensor]]:
    parts = [encode(value, path) for value, path in zip(values, paths, strict=True)]
    return [part for part, _ in parts], [buffer for _, buffers in parts for buffer in buffers]


def to_frames(structure: bytes, buffers: Iterable[torch.Tensor]) -> Iterator[bytes]:
    """Cut a batch's serialised structure and bytes, end to end, into frames of at most 1 MiB."""
    pieces: list[memoryview] = []
    size = 0
    for part in [structure, *(buffer.numpy() for buffer in buffers)]:
        buffer = memoryview(part)
        for offset in range(0, len(buffer), FRAME_BYTES):
            piece = buffer[offset : offset + FRAME_BYTES]
            if size + len(piece) > FRAME_BYTES:
                yield b"".join(pieces)
                pieces, size = [], 0
            pieces.append(piece)
            size += len(piece)
    if pieces:
        yield b"".join(pieces)


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
        dtype = getattr(torch, value.tensor.dtype)
        tensor = torch.empty(tuple(value.tensor.shape), dtype=dtype, pin_memory=pin_memory)
        return tensor, [tensor.view(-1).view(torch.uint8).numpy()]
    if kind == "array":
        array = np.empty(tuple(value.array.shape), dtype=np.dtype(value.array.dtype))
        return array, [array.reshape(-1).view(np.uint8)]
    if kind == "dict":
        keys, key_memory = _decode_all(value.dict.keys, pin_memory)
        values, memory = _decode_all(value.dict.values, pin_memory)
        return dict(zip(keys, values, strict=True)), key_memory + memory
    items, memory = _decode_all(getattr(value, kind).items, pin_memory)
    return (tuple(items) if kind == "tuple" else items), memory


def _decode_all(values: Iterable, pin_memory: bool) -> tuple[list, list[np.ndarray]]:
    parts = [decode(value, pin_memory) for value in values]
    return [part for part, _ in parts], [target for _, memory in parts for target in memory]


def fill(memory: Iterable[np.ndarray], frame: np.ndarray, frames: Iterator[bytes]) -> np.ndarray:
    """Copy the bytes of `frame`, then those of `frames`, into `memory`, part after part.

    Takes no more frames than it needs, and returns what is left of the last one; raises
    StopIteration when there are too few. NumPy copies without holding Python's global lock, so
    that several streams can copy at the same time.
    """
    for target in memory:
        filled = 0
        while filled < len(target):
            if not len(frame):
                frame = np.frombuffer(next(frames), np.uint8)
            size = min(len(frame), len(target) - filled)
            target[filled : filled + size] = frame[:size]
            frame = frame[size:]
            filled += size
    return frame
