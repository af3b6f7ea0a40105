"""Datasets and streams for tests of the loader. Data hosts import them from this file.

test_travel.py has Datasets that are defined in a training script, in `__main__`.
"""

import os
import random
import signal
import time
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch.utils.data import Dataset, IterableDataset, get_worker_info

SAMPLES = 61  # a prime, so ranks and batches never divide it evenly


def seed_all() -> None:
    """Seed all generators, as a training script does."""
    torch.manual_seed(5), np.random.seed(5), random.seed(5)


def numbers_drawn() -> tuple:
    return torch.rand(1).item(), np.random.rand(), random.random()


class Numbers(Dataset):
    """Samples without random numbers."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict:
        image = torch.rand(3, 5, generator=torch.Generator().manual_seed(index))
        return {"image": image, "index": index, "name": f"sample {index}"}


class Crop:
    """A transform with its own random number generator."""

    def __init__(self):
        self.generator = torch.Generator()

    def __call__(self) -> torch.Tensor:
        return torch.rand(2, generator=self.generator)


class Draws(Dataset):
    """Samples with random numbers from every kind of generator."""

    def __init__(self):
        self.generator, self.state = np.random.default_rng(0), np.random.RandomState(0)
        self.of_python, self.transforms = random.Random(0), [Crop(), Crop()]

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple:
        own = self.generator.random(), self.state.rand(), self.of_python.random()
        crops = [crop() for crop in self.transforms]
        return index, torch.rand(2), np.random.rand(), random.random(), own, crops


class Together(Numbers):
    """A Dataset that prepares whole batches in `__getitems__`, as Hugging Face's Datasets do."""

    def __getitems__(self, indices: list[int]) -> list:
        assert len(indices) > 1
        return [(index, torch.rand(1)) for index in indices]


class Table(Dataset):
    """Has `what` as the function that prepares its samples, and these attributes."""

    def __init__(self, what: Callable, length: int = SAMPLES, **attributes: Any):
        self.what, self.length = what, length
        self.__dict__.update(attributes)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.what(self, index)


def steady(table: Table, index: int) -> tuple:
    """A large sample with random numbers, which takes 20 ms."""
    time.sleep(0.02)
    return torch.rand(75_000), index


def paced(table: Table, index: int) -> tuple[int, int]:
    """A sample that takes PACE milliseconds; PACE is in the data host's environment."""
    pace = int(os.environ["PACE"])
    time.sleep(pace / 1000)
    return index, pace


class Reduced(Numbers):
    """A Dataset that a data host makes by a call."""

    def __init__(self, call: Callable, *arguments: Any):
        self.call = call, arguments

    def __reduce__(self) -> tuple:
        return self.call


def hang_if_told() -> Dataset:
    """Never return where HANGS is in the environment."""
    print("making", flush=True)
    time.sleep(600 * ("HANGS" in os.environ))
    return Numbers()


class Made(Dataset):
    """A Dataset that LENGTH and SHIFT in the environment of a data host can change."""

    def __init__(self, length: int):
        self.length, self.process = int(os.environ.get("LENGTH", length)), os.getpid()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple:
        is_own = self.process == os.getpid()
        return index + int(os.environ.get("SHIFT", 0)), torch.rand(1), is_own


class Stream(IterableDataset):
    """Shards its numbers among the workers, and draws random numbers from several generators."""

    def __init__(self, length: int = SAMPLES, seconds: float = 0.0):
        self.length, self.seconds, self.epoch = length, seconds, -1
        self.generator, self.start = np.random.default_rng(0), 0

    def __iter__(self) -> Iterator[dict]:
        info = get_worker_info()
        self.epoch += 1  # increases if the same object is iterated over again
        worker, num_workers, seed = (info.id, info.num_workers, info.seed) if info else (0, 1, 0)
        for number in range(self.start + worker, self.length, num_workers):
            time.sleep(self.seconds)
            drawn = random.random(), np.random.rand(), torch.rand(2), self.generator.random()
            yield {"number": number, "drawn": drawn, "epoch": self.epoch, "seed": seed}


def shard(worker: int) -> None:
    """Shard the stream in worker_init_fn, as PyTorch's documentation of IterableDataset shows."""
    info = get_worker_info()
    info.dataset.start, info.dataset.length = 20 * worker, 20 * worker + 20
    info.dataset.start -= worker  # because Stream.__iter__ adds it


class RankStream(Stream):
    """Shards its numbers among the ranks as well."""

    def __iter__(self) -> Iterator[tuple]:
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        rank = dist.get_rank() if dist.is_initialized() else 0
        assert os.environ.get("RANK", "0") == str(rank)
        for sample in super().__iter__():
            if sample["number"] % ranks == rank:
                yield sample["number"], rank, os.environ.get("PLACE", "")


class Yielding(IterableDataset):
    """Has `what` as the function that yields its samples."""

    def __init__(self, what: Callable[[], Iterator]):
        self.what = what

    def __iter__(self) -> Iterator:
        return self.what()


def not_here() -> None:
    raise OSError("this is for data hosts")


class Unreadable:
    """A sample that cannot be unpickled."""

    def __reduce__(self) -> tuple:
        return not_here, ()


class SampleIsBroken(Exception):
    """An error that a Dataset raises."""


class Panic(BaseException):
    """An error that is not an Exception, as libraries in Rust raise."""


RAISING, PANICKING, DEADLY, SLOW, BIG = range(-5, 0)


def troubled(table: Table, index: int) -> Any:
    """A sample that raises an error, kills the process, hangs, or is large."""
    if index == RAISING:
        raise SampleIsBroken("a sample is broken: caf\udce9.jpg")  # not Unicode
    if index == PANICKING:
        raise Panic("index out of bounds")
    if index == DEADLY:  # as when the process runs out of memory
        os.kill(os.getpid(), signal.SIGKILL)
    if index == SLOW:  # sleeps longer than any test may take
        print("asleep", flush=True)
        time.sleep(600)
    return torch.ones(40 << 20, dtype=torch.uint8) if index == BIG else index


STEADY, PACED, TROUBLED = Table(steady), Table(paced, 100_000), Table(troubled)
Point = namedtuple("Point", "x y")
DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
DTYPES += [torch.float16, torch.bfloat16, torch.float32, torch.float64]
DTYPES += [torch.complex64, torch.complex128]
THINGS = [
    [torch.arange(6).reshape(2, 3).to(dtype) for dtype in DTYPES],
    [torch.arange(5000).to(dtype) for dtype in DTYPES],  # large enough to be sent out of band
    (torch.tensor(2.5), torch.tensor(True), torch.empty(0, 3), torch.empty(2, 0, dtype=torch.bool)),
    (torch.arange(12).reshape(3, 4).t(), torch.arange(9999)[::2], torch.arange(10_000) * 1j),
    (torch.arange(10_000).to(torch.cfloat).conj(), torch.ones(10_000, requires_grad=True)),
    {"a": {"b": [(), [], {}, (1, [2, (3,)])]}, 4: None, (5, "six"): b"\x00\xff", None: "dé€"},
    [True, False, 0, -1, 2**80, 0.0, -1.5, float("inf"), 1e-320, "", b"", {1}, Decimal("1.1")],
    [np.arange(5), np.float32([[1, 2]]).T, np.array("text"), np.array(3.5), np.zeros((0, 2), bool)],
    [np.arange(9000)[::-2], np.arange(9000).reshape(90, 100).T, np.float64(1), np.array([None])],
    [np.array(["2020-01-01"], "M8[D]"), np.array([1, 2], ">i4"), np.array([b"ab", b"c"])],
    [Image.linear_gradient("L"), Image.new("RGB", (99, 3), "red"), Point(torch.arange(3), None)],
    [OrderedDict(x=1), torch.eye(2).to_sparse(), frozenset({1}), range(3), Path("/a/b")],
    [f"a name, {i}" * 50 for i in range(9000)],  # 6 MB in the pickle
    (torch.arange(3_000_000), np.arange(5), torch.arange(700_000)),  # 30 MB
    # At the size of a whole number of frames, and one byte below and above it.
    [torch.arange((2 << 20) + i).to(torch.uint8) for i in (-1, 0, 1)],
]


def assert_same(actual: Any, expected: Any) -> None:
    """Compare two batches: types, dtypes, shapes and bits."""
    assert type(actual) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
        assert torch.equal(actual.to_dense(), expected.to_dense())
    elif isinstance(expected, np.ndarray):
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
        assert actual.tolist() == expected.tolist()
    elif isinstance(expected, dict):
        assert list(actual) == list(expected)
        assert_same(list(actual.values()), list(expected.values()))
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected)
        for actual_item, expected_item in zip(actual, expected, strict=True):
            assert_same(actual_item, expected_item)
    elif isinstance(expected, Image.Image):
        assert (actual.mode, actual.size) == (expected.mode, expected.size)
        assert actual.tobytes() == expected.tobytes()
    else:
        assert repr(actual) == repr(expected)
