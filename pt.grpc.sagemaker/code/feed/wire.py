"""How a batch travels: a header that names its parts, then the bytes of its tensors and arrays.

Nothing is pickled, so no message can run code at its receiver. grpcio-tools compiles
dataset_feed.proto when this module is imported, so that the messages' classes are those of the
protobuf that is installed: containers have different ones.
"""

import functools
import math
import subprocess
import sys
from collections import namedtuple
from collections.abc import Iterator
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

SERVICE = "dataset_feed.DatasetFeed"
FRAME = 1 << 20  # bytes of a batch in one message
KEEPALIVE = [  # of both sides, to notice within 20 s a peer that hangs or has gone
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),  # no limit: also while a batch takes minutes
]
CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", -1),  # the header of a batch may be long
    ("grpc.http2.bdp_probe", 0),  # its wider window would let in a batch that is to wait
    ("grpc.http2.lookahead_bytes", FRAME),
    ("grpc.enable_http_proxy", 0),  # hosts of one job talk directly
    ("grpc.use_local_subchannel_pool", 1),  # a connection for each channel
    ("grpc.initial_reconnect_backoff_ms", 100),  # hosts of one job start at about the same time
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.min_reconnect_backoff_ms", 10_000),  # the time that one attempt may take
    *KEEPALIVE,
]
SCALARS = {bool: "boolean", int: "integer", float: "real", str: "text", bytes: "octets"}


class DatasetError(RuntimeError):
    """The Dataset or collate_fn raised on a data host, or killed its process; the text says how."""


def describe(value: Any, memory: list[np.ndarray], path: str = "batch") -> Any:
    """Return the `messages.Value` of a batch; append its tensors' and arrays' bytes to `memory`.

    The bytes are 1-dimensional uint8 arrays, which share memory with `value` where they can. Raises
    TypeError with the `path` of the first part whose exact type the proto does not list: a subclass
    (except a namedtuple) would arrive as its base class.
    """
    kind = type(value)
    if value is None:
        return messages.Value(none=True)
    if kind in SCALARS and (kind is not int or -(2**63) <= value < 2**63):
        return messages.Value(**{SCALARS[kind]: value})
    is_dense = kind is torch.Tensor and value.layout is torch.strided and not value.is_quantized
    if is_dense and value.device.type == "cpu":
        flat = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        memory.append(flat.view(torch.uint8).numpy())
        name = str(value.dtype).removeprefix("torch.")
        return messages.Value(tensor=messages.Array(dtype=name, shape=value.shape))
    is_plain = kind is np.ndarray and not value.dtype.hasobject
    if is_plain and np.dtype(value.dtype.str) == value.dtype:
        memory.append(np.ascontiguousarray(value).reshape(-1).view(np.uint8))
        return messages.Value(array=messages.Array(dtype=value.dtype.str, shape=value.shape))
    if kind in (list, tuple):
        items = [describe(item, memory, f"{path}[{i}]") for i, item in enumerate(value)]
        return messages.Value(**{kind.__name__: messages.Sequence(items=items)})
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        items = [describe(getattr(value, f), memory, f"{path}.{f}") for f in kind._fields]
        names = {"module": kind.__module__, "name": kind.__qualname__, "fields": kind._fields}
        return messages.Value(namedtuple=messages.NamedTuple(items=items, **names))
    if kind is dict:
        keys = [describe(key, memory, f"key {key!r} of {path}") for key in value]
        values = [describe(item, memory, f"{path}[{key!r}]") for key, item in value.items()]
        return messages.Value(dict=messages.Mapping(keys=keys, values=values))
    names = ("dtype", "layout", "device")
    details = " ".join(str(getattr(value, name)) for name in names if hasattr(value, name))
    raise TypeError(
        f"{path} is a {kind.__module__}.{kind.__qualname__}{details and f' ({details})'}, which "
        "cannot be sent: a batch may hold dense CPU tensors, NumPy arrays of plain dtypes, int of "
        "up to 64 bits, float, bool, str, bytes and None, in any nesting of dict, list, tuple and "
        "namedtuple"
    )


def build(value: Any, memory: list[np.ndarray], pin_memory: bool = False) -> Any:
    """Return what a `messages.Value` describes; append the bytes still to be filled to `memory`.

    They are 1-dimensional uint8 arrays, in the order of `describe`'s. With `pin_memory` those of
    tensors are page-locked.
    """
    kind = value.WhichOneof("kind")
    content = getattr(value, kind)
    if kind == "tensor":
        shape, dtype = tuple(content.shape), getattr(torch, content.dtype)
        size = math.prod(shape) * dtype.itemsize
        flat = (
            torch.empty(size, dtype=torch.uint8, pin_memory=True) if pin_memory else aligned(size)
        )
        memory.append(flat.numpy())
        return flat.view(dtype).view(shape)
    if kind == "array":
        array = np.empty(tuple(content.shape), np.dtype(content.dtype))
        memory.append(array.reshape(-1).view(np.uint8))
        return array
    if kind == "dict":
        keys = [build(key, memory, pin_memory) for key in content.keys]
        values = [build(item, memory, pin_memory) for item in content.values]
        return dict(zip(keys, values, strict=True))
    if kind in ("list", "tuple", "namedtuple"):
        items = [build(item, memory, pin_memory) for item in content.items]
        if kind == "namedtuple":
            return like(content.module, content.name, tuple(content.fields))._make(items)
        return items if kind == "list" else tuple(items)
    return None if kind == "none" else content


def aligned(size: int) -> torch.Tensor:
    """Return an uninitialised uint8 tensor (size,), aligned to 64 bytes.

    The memory is NumPy's, which asks Linux for huge pages: these are cleared faster.
    """
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return torch.from_numpy(memory[start : start + size])


@functools.cache
def like(module: str, name: str, fields: tuple[str, ...]) -> type:
    """Return a namedtuple's class itself where its module has been imported, or else its like."""
    found = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    is_it = isinstance(found, type) and getattr(found, "_fields", None) == fields
    return found if is_it else namedtuple(name.split(".")[-1], fields, rename=True)


def fill(memory: list[np.ndarray], frames: Iterator[bytes]) -> None:
    """Copy the bytes of `frames`, which may end anywhere, into `memory`."""
    frame = np.empty(0, np.uint8)
    for part in memory:
        while len(part):
            if not len(frame):
                frame = np.frombuffer(next(frames), np.uint8)
            size = min(len(part), len(frame))
            part[:size] = frame[:size]  # without the GIL
            part, frame = part[size:], frame[size:]
