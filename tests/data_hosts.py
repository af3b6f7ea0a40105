"""Data hosts as processes of their own, for the tests of the loader.

Run as a program, this file is a data host: `python data_hosts.py WORKERS NAME=HOST:PORT ...` serves
each of the DATASETS named.
"""

import os
import random
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import torch
from torch.utils.data import Dataset

sys.path.insert(0, str(Path(__file__).parents[1] / "pt.grpc.sagemaker" / "code"))

from batches import BatchKey  # noqa: E402
from feed_client import FeedLoader  # noqa: E402
from feed_server import FeedServer, serve  # noqa: E402

TOKEN = "a token"
SAMPLES, BATCH_SIZE = 103, 7  # nothing divides 103; 3 ranks have 35 samples each, or drop to 34
# Below those that Linux gives; of several test processes (pytest-xdist) each has its own.
PROCESS = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
PORTS = iter(random.sample(range(30_000 + PROCESS % 8, 32_768, 8), 346))
Point = namedtuple("Point", "x y")


class Plain(Dataset):
    """Samples that are the same each time."""

    def __init__(self, length: int = SAMPLES):
        self.images = torch.rand(length, 3, 5, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict:
        return {"image": self.images[index], "index": index, "name": f"sample {index}"}


class Random(Plain):
    """Samples that take random numbers from all three generators, and come several at a time."""

    def __getitems__(self, indices: list[int]) -> list:
        return [(torch.rand(2), np.random.rand(), random.random(), index) for index in indices]


class Steady(Random):
    """Batches of 2 MB, random ones, of which each takes 0.1 s."""

    def __getitems__(self, indices: list[int]) -> list:
        time.sleep(0.1)
        return [(torch.rand(75_000), index) for index in indices]


class Signed(Plain):
    """The number of the data host that has prepared the sample; host 0 is five times slower."""

    def __getitem__(self, index: int) -> int:
        host = int(os.environ["NUMBER"])
        time.sleep(0.1 if host else 0.5)
        return host


class Growing(Plain):
    """Samples that have another shape from index 49 on."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3 + (index >= 49),), index)


class Deadly(Plain):
    """Sample 42 kills the process that prepares it, as one that takes too much memory does."""

    def __getitem__(self, index: int) -> dict:
        if index == 42:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class Huge(Plain):
    """Samples of 1.1 GiB."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.arange(index, index + int(1.1 * 2**27))


class Raising(Plain):
    """Sample 42 is broken."""

    def __getitem__(self, index: int) -> dict:
        if index == 42:
            raise LookupError("sample 42 is broken: caf\udce9.jpg")  # not Unicode
        return super().__getitem__(index)


class Panic(BaseException):
    """As libraries in Rust raise, and asyncio: no Exception."""


class Panicking(Plain):
    """Sample 42 is worse."""

    def __getitem__(self, index: int) -> dict:
        if index == 42:
            raise Panic("index out of bounds")
        return super().__getitem__(index)


class Bulky(Plain):
    """Samples that go through a DataLoader's pipe as they are: more than it holds."""

    def __getitem__(self, index: int) -> bytes:
        return bytes(1_000_000)


class Slow(Plain):
    """A batch of these takes longer than a test may last."""

    def __getitem__(self, index: int) -> dict:
        if index >= BATCH_SIZE:
            time.sleep(60)
        return super().__getitem__(index)


DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
DTYPES += [torch.float16, torch.bfloat16, torch.float32, torch.float64]
DTYPES += [torch.complex64, torch.complex128]
STRUCTURES = [
    [torch.arange(6).reshape(2, 3).to(dtype) for dtype in DTYPES],
    (torch.tensor(2.5), torch.tensor(True), torch.empty(0, 3), torch.empty(2, 0, dtype=torch.bool)),
    (torch.arange(12).reshape(3, 4).t(), torch.arange(9)[::2], torch.linspace(0, 1, 700_000)),
    {"a": {"b": [(), [], {}, (1, [2, (3,)])]}, 4: None, (5, "six"): b"\x00\xff", None: "dé€"},
    [True, False, 0, -1, 2**63 - 1, -(2**63), 0.0, -1.5, float("inf"), 1e-320, "", b""],
    [np.arange(5), np.float32([[1, 2]]).T, np.array("text"), np.array(3.5), np.zeros((0, 2), bool)],
    [np.array(["2020-01-01"], "M8[D]"), np.array([1, 2], ">i4"), np.array([b"ab", b"c"])],
    [f"a name, {i}" * 50 for i in range(9000)],  # 6 MB of structure
    [BatchKey(1, 2, 3, 4, [5]), {"a": BatchKey(torch.arange(3), (), None, 0, [])}],
    (torch.arange(3_000_000), np.arange(5), torch.arange(700_000)),  # 30 MB
    [torch.tensor([i]) for i in range(1500)],  # more than a process may open files
    [torch.arange((2 << 20) + i).to(torch.uint8) for i in (-1, 0, 1)],  # received in pieces
]
REFUSED = {
    "batch[0]['point'] is a collections.OrderedDict": [{"point": OrderedDict(x=1)}],
    "batch[1] is an int of more than 64 bits": [0, 2**63],
    "batch['a'] is an array of object": {"a": np.array([None])},
    "key frozenset() of batch is a builtins.frozenset": {frozenset(): 1},
    "batch is a torch.float32 tensor, torch.sparse_coo": torch.eye(2).to_sparse(),
    "batch is a numpy.float64": np.float64(1),
}


class Structures(Dataset):
    """Batch i, of one sample, is STRUCTURES[i], then come the REFUSED ones, and last a Point."""

    def __len__(self) -> int:
        return len(STRUCTURES) + len(REFUSED) + 1

    def __getitem__(self, index: int) -> object:
        return [*STRUCTURES, *REFUSED.values(), Point(torch.arange(3), None)][index]


def only_sample(samples: list) -> object:
    return samples[0]


DATASETS = {
    "plain": Plain(),
    "random": Random(),
    "steady": Steady(),
    "raising": Raising(),
    "panicking": Panicking(),
    "slow": Slow(),
    "signed": Signed(),
    "growing": Growing(),
    "deadly": Deadly(),
    "huge": Huge(2),
    "many": Plain(100_000),
    "short": Plain(SAMPLES - 1),
    "structures": Structures(),
}


def main() -> None:
    services = [argument.split("=") for argument in sys.argv[2:]]
    for number, (name, address) in enumerate(services, start=1):
        collate_fn = only_sample if name == "structures" else None
        start = serve if number == len(services) else FeedServer
        start(DATASETS[name], address, TOKEN, collate_fn, num_workers=int(sys.argv[1]))


class DataHost:
    """This file run as a program, with `num_workers` and an address for each of `names`.

    When it has ended, `start` starts it again on the same addresses.
    """

    def __init__(self, *names: str, num_workers: int = 1, number: int = 0):
        self.number = number
        self.addresses = {name: f"127.0.0.1:{free_port()}" for name in names}
        services = [f"{name}={address}" for name, address in self.addresses.items()]
        self.command = [sys.executable, __file__, str(num_workers), *services]
        self.start()

    def start(self) -> None:
        self.output = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed with this object)
        environment = {**os.environ, "NUMBER": str(self.number)}
        self.process = psutil.Popen(
            self.command, stdout=self.output, env=environment, start_new_session=True
        )

    def wait_until_serving(self) -> None:
        while "serving" not in (said := self.said()):
            assert not has_ended(self.process), said
            time.sleep(0.05)

    def said(self) -> str:
        return os.pread(self.output.fileno(), 1 << 20, 0).decode()  # it writes to the same file

    def processes(self) -> list[psutil.Process]:
        return [self.process, *self.process.children(recursive=True)]

    def workers(self) -> list[psutil.Process]:
        """Its worker processes: the children of the fork server."""
        return [worker for child in self.process.children() for worker in child.children()]


def has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until(condition: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def wait_for_threads(before: set[threading.Thread], seconds: float = 10) -> None:
    """Wait until there are no other threads than before."""
    deadline = time.monotonic() + seconds
    while left := set(threading.enumerate()) - before:
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


def free_port() -> int:
    """Return a port that has not been returned before, and that no connection is given by Linux."""
    for port in PORTS:
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no port is free")


def feed(name: str, hosts: list[DataHost], **options) -> FeedLoader:
    return FeedLoader([host.addresses[name] for host in hosts], TOKEN, **options)


def assert_same(actual: object, expected: object) -> None:
    """Compare two batches: types, dtypes, shapes and bits."""
    assert type(actual) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
        assert torch.equal(actual, expected)
    elif isinstance(expected, np.ndarray):
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
        assert actual.tobytes() == expected.tobytes()
    elif isinstance(expected, dict):
        assert list(actual) == list(expected)
        assert_same(list(actual.values()), list(expected.values()))
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected)
        for actual_item, expected_item in zip(actual, expected, strict=True):
            assert_same(actual_item, expected_item)
    else:
        assert repr(actual) == repr(expected)


if __name__ == "__main__":
    main()
