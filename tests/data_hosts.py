"""Data hosts as processes of their own, for the tests of the loader.

Run as a program, this file is one: `python data_hosts.py DATASET HOST:PORT OPTIONS` serves one of
the DATASETS; the options are serve's, as JSON.
"""

import json
import os
import random
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

sys.path.insert(0, str(Path(__file__).parents[1] / "pt.grpc.sagemaker" / "code"))

from feed.batches import BatchKey, BatchKeys, SeededBatches, as_is  # noqa: E402
from feed.client import RemoteBatches, RemoteDataset  # noqa: E402
from feed.server import serve  # noqa: E402

TOKEN = "a token"
# Below those that Linux gives; of several test processes (pytest-xdist) each has its own.
PROCESS = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
PORTS = iter(random.sample(range(30_000 + PROCESS % 8, 32_768, 8), 346))
Point = namedtuple("Point", "x y")


class Panic(BaseException):
    """As libraries in Rust raise, and asyncio: no Exception."""


class Whole:
    """A sample that is the batch: alone in it, and nothing is made of it."""

    def __init__(self, batch: Any):
        self.batch = batch


def collate(samples: list) -> Any:
    return samples[0].batch if isinstance(samples[0], Whole) else default_collate(samples)


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
    [f"a name, {i}" * 50 for i in range(9000)],  # 6 MB of header
    [BatchKey(1, 2, 3, [4]), {"a": BatchKey(torch.arange(3), (), None, [])}],
    (torch.arange(3_000_000), np.arange(5), torch.arange(700_000)),  # 30 MB
    [torch.tensor([i]) for i in range(1500)],  # more than a process may open files
    [torch.arange((2 << 20) + i).to(torch.uint8) for i in (-1, 0, 1)],  # of some whole frames
]
REFUSED = {
    "batch[0]['point'] is a collections.OrderedDict": [{"point": OrderedDict(x=1)}],
    "batch[1] is a builtins.int": [0, 2**63],
    "batch['a'] is a numpy.ndarray (object": {"a": np.array([None])},
    "key frozenset() of batch is a builtins.frozenset": {frozenset(): 1},
    "batch is a torch.Tensor (torch.float32 torch.sparse_coo cpu)": torch.eye(2).to_sparse(),
    "batch is a numpy.float64": np.float64(1),
}
SAMPLES = 103  # nothing divides it; 3 ranks have 35 samples each, or drop to 34
RANDOM = range(SAMPLES, 2 * SAMPLES)
RAISING, PANICKING, DEADLY, SLOW, BIG, POINT = range(206, 212)
FIRST_STRUCTURE = 212
FIRST_REFUSED = FIRST_STRUCTURE + len(STRUCTURES)


class Zoo(Dataset):
    """The first SAMPLES are plain; those in RANDOM take random numbers; others are special."""

    def __len__(self) -> int:
        return FIRST_REFUSED + len(REFUSED)

    def __getitem__(self, index: int) -> object:
        if index < SAMPLES:
            image = torch.rand(3, 5, generator=torch.Generator().manual_seed(index))
            return {"image": image, "index": index, "name": f"sample {index}"}
        if index in RANDOM:
            return torch.rand(2), np.random.rand(), random.random(), index
        if index == RAISING:
            raise LookupError("a sample is broken: caf\udce9.jpg")  # not Unicode
        if index == PANICKING:
            raise Panic("index out of bounds")
        if index == DEADLY:  # as one that takes too much memory
            os.kill(os.getpid(), signal.SIGKILL)
        if index == SLOW:  # longer than a test may last
            print("asleep", flush=True)
            time.sleep(600)
        if index == BIG:
            return Whole(torch.ones(40 << 20, dtype=torch.uint8))
        return Whole([Point(torch.arange(3), None), *STRUCTURES, *REFUSED.values()][index - POINT])


class Steady(Dataset):
    """Batches of 2 MB, random ones, of which each takes 0.1 s."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitems__(self, indices: list[int]) -> list:
        time.sleep(0.1)
        return [(torch.rand(75_000), index) for index in indices]

    def __getitem__(self, index: int) -> tuple:
        raise AssertionError("a batch's samples were to be asked for together, by __getitems__")


class Paced(Dataset):
    """A sample takes as many milliseconds as the data host's environment says: PACE."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> tuple[int, int]:
        pace = int(os.environ["PACE"])
        time.sleep(pace / 1000)
        print("prepared", flush=True)
        return index, pace


class Huge(Dataset):
    """Samples of 1.1 GiB."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.arange(index, index + int(1.1 * 2**27))


class Unloadable(Zoo):
    """Its files are not where the worker processes look for them."""

    def __setstate__(self, state: dict) -> None:
        raise LookupError("no such file")

    def __getstate__(self) -> dict:
        return {"any": "thing"}


class Heavy(Zoo):
    """Takes its time to be loaded by a worker process."""

    def __getstate__(self) -> dict:
        return {"any": "thing"}

    def __setstate__(self, state: dict) -> None:
        print("loading", flush=True)
        time.sleep(3)


DATASETS = {
    "heavy": Heavy(),
    "zoo": Zoo(),
    "steady": Steady(),
    "paced": Paced(),
    "huge": Huge(),
    "unloadable": Unloadable(),
}


def main() -> None:
    name, address, options = sys.argv[1:]
    options = {"token": TOKEN, **json.loads(options)}
    serve(DATASETS[name], address, collate_fn=collate, **options)


class DataHost:
    """This file run as a program. When it has ended, `start` starts it again at its address."""

    def __init__(self, name: str, address: str = "", environment: dict | None = None, **options):
        self.name, self.options, self.environment = name, options, environment or {}
        self.address = address or f"127.0.0.1:{free_port()}"
        self.start()

    def start(self) -> None:
        self.output = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed with this object)
        command = [sys.executable, __file__, self.name, self.address, json.dumps(self.options)]
        environment = {**os.environ, **self.environment}
        streams = {"stdout": self.output, "stderr": self.output}
        self.process = psutil.Popen(command, env=environment, start_new_session=True, **streams)

    def wait_until_serving(self) -> "DataHost":
        while "serving" not in (said := self.said()):
            assert not has_ended(self.process), said
            time.sleep(0.05)
        return self

    def said(self) -> str:
        return os.pread(self.output.fileno(), 1 << 20, 0).decode()  # it writes to the same file

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def processes(self) -> list[psutil.Process]:
        """It and all of its children."""
        with suppress(psutil.NoSuchProcess):
            return [self.process, *self.process.children(recursive=True)]
        return []

    def workers(self) -> list[psutil.Process]:
        """Its worker processes: the children of the fork server."""
        return [worker for child in self.process.children() for worker in child.children()]


@contextmanager
def starting() -> Iterator[Callable[..., DataHost]]:
    """Start data hosts, one worker each, that a test may harm.

    After it nothing is left of them, nor of their clients in this process.
    """
    hosts, before = [], set(threading.enumerate())

    def start(name: str, num_workers: int = 1, **options) -> DataHost:
        hosts.append(DataHost(name, num_workers=num_workers, **options))
        return hosts[-1]

    try:
        yield start
    finally:
        processes = [process for host in hosts for process in host.processes()]
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        wait_until(lambda: all(map(has_ended, processes)))
    wait_for_threads(before)


def up(*hosts: DataHost) -> list[DataHost]:
    """The hosts, once they serve."""
    return [host.wait_until_serving() for host in hosts]


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


def service(
    hosts: list[DataHost], keys: BatchKeys | list, timeout: float = 60.0, **options
) -> DataLoader:
    """The loader of a user of data hosts. A list of batches will do for `keys`."""
    dataset = RemoteDataset([host.address for host in hosts], TOKEN, timeout)
    keys = keys if isinstance(keys, BatchKeys) else BatchKeys(keys)
    return DataLoader(RemoteBatches(dataset, keys, **options), batch_size=None, collate_fn=as_is)


def local(dataset: Dataset, keys: BatchKeys | list, num_workers: int = 0) -> DataLoader:
    """The loader of a user without data hosts."""
    keys = keys if isinstance(keys, BatchKeys) else BatchKeys(keys)
    batches = SeededBatches(dataset, collate)
    return DataLoader(
        batches, sampler=keys, batch_size=None, collate_fn=as_is, num_workers=num_workers
    )


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
