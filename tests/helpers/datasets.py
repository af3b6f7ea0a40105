"""Datasets and streams for tests of the loader. Data hosts import them from this file.

test_travel.py has Datasets that are defined in a training script, in `__main__`.
"""

import os
import random
import signal
import time
from collections import OrderedDict, namedtuple
from collections.abc import Iterator
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
        return [(index, len(indices), torch.rand(1)) for index in indices]


class Steady(Dataset):
    """Large samples with random numbers, each of which takes 20 ms."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple:
        time.sleep(0.02)
        return torch.rand(75_000), index


class Paced(Dataset):
    """Samples that each take PACE milliseconds; PACE is in the data host's environment."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> tuple[int, int]:
        pace = int(os.environ["PACE"])
        time.sleep(pace / 1000)
        return index, pace


class TakesItsTime(Numbers):
    """A Dataset that takes 3 s to load, and 3 s to prepare its first sample."""

    def __getstate__(self) -> dict:
        return {"any": "thing"}

    def __setstate__(self, state: dict) -> None:
        print("loading", flush=True)
        time.sleep(3)

    def __getitem__(self, index: int) -> int:
        time.sleep(3 * (index == 0))
        return index


class Hangs(Numbers):
    """A Dataset, or a callable, that is never made where HANGS is in the environment."""

    def __init__(self):
        time.sleep(600 * ("HANGS" in os.environ))

    def __reduce__(self) -> tuple:
        return Hangs, ()


class Made(Dataset):
    """A Dataset that LENGTH and SHIFT in the environment of a data host can change."""

    def __init__(self, length: int):
        self.length, self.process = int(os.environ.get("LENGTH", length)), os.getpid()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple:
        is_own = self.process == os.getpid()
        return index + int(os.environ.get("SHIFT", 0)), is_own, torch.rand(1)


class ByRank(Numbers):
    """Each sample is the rank that it is prepared for, and the world size."""

    def __getitem__(self, index: int) -> tuple[int, int]:
        return dist.get_rank(), dist.get_world_size()


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


class SizedStream(Stream):
    """A stream that knows its length."""

    def __len__(self) -> int:
        return self.length


class RankStream(Stream):
    """Shards its numbers among the ranks as well."""

    def __iter__(self) -> Iterator[tuple]:
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        rank = dist.get_rank() if dist.is_initialized() else 0
        assert os.environ.get("RANK", "0") == str(rank)
        for sample in super().__iter__():
            if sample["number"] % ranks == rank:
                yield sample["number"], rank, os.environ.get("PLACE", "")


class Shifted(Stream):
    """Has a number in memory shared by its workers, as Hugging Face's Datasets do for the epoch."""

    def __init__(self):
        super().__init__()
        self.shift = torch.zeros(1).share_memory_()

    def __iter__(self) -> Iterator[tuple]:
        for sample in super().__iter__():
            yield sample["number"], self.shift.clone(), random.random()


def my_share(worker: int) -> None:
    """Shard the stream in worker_init_fn, as PyTorch's documentation of IterableDataset shows."""
    info = get_worker_info()
    info.dataset.start, info.dataset.length = 20 * worker, 20 * worker + 20
    info.dataset.start -= worker  # because Stream.__iter__ adds it


def crop(image: torch.Tensor) -> torch.Tensor:
    """A transform with random numbers."""
    x, y = torch.randint(10, (2,)).tolist()
    return image[:, y : y + 24, x : x + 24].clone()


def label_and_shade(sample: dict) -> tuple[int, float]:
    """Return label and mean brightness, as a transform for wids does."""
    return sample[".cls"], np.asarray(sample[".jpg"]).mean()


class TroubledStream(IterableDataset):
    """A stream of numbers. Special numbers raise, kill the process, hang, or cannot be pickled."""

    def __init__(self, *numbers: int):
        self.numbers, self.generator = numbers, None

    def __iter__(self) -> Iterator:
        self.left = iter(self.numbers)
        return self

    def __next__(self) -> object:
        number = next(self.left)
        if number == BIG:
            return lambda: 0
        return Troubled()[number]


def not_here() -> None:
    raise OSError("this is for data hosts")


class Unreadable:
    def __reduce__(self) -> tuple:
        return not_here, ()


class OddStream(IterableDataset):
    """Unusual streams. The method that `kind` names says what is unusual."""

    def __init__(self, kind: str, file: Path | None = None):
        self.kind, self.file = kind, file

    def __iter__(self) -> Iterator:
        return getattr(self, self.kind)()

    def reuses_its_memory(self) -> Iterator[np.ndarray]:
        buffer = np.zeros(2000, np.uint8)
        for number in range(20):
            buffer[:] = number
            yield buffer

    def is_as_long_as_a_file_says(self) -> Iterator[int]:
        for number in range(int(self.file.read_text())):
            time.sleep(0.01)
            yield number

    def has_something_open(self) -> Iterator[int]:
        self.file.touch()
        try:
            for number in range(10**6):
                time.sleep(0.01)
                yield number
        finally:
            self.file.unlink()

    def cannot_be_unpickled(self) -> Iterator[object]:
        yield from (0, 1, Unreadable(), 3, 4)

    def is_large_and_endless(self) -> Iterator[np.ndarray]:
        for number in range(10**9):
            self.file.write_text(str(number))  # how many it has yielded
            yield np.full(1_000_000, number % 256, np.uint8)

    def is_its_own_iterator(self) -> Iterator[int]:
        self.numbers = iter(range(10**6))
        return self

    def __next__(self) -> int:
        return next(self.numbers)


class SampleIsBroken(Exception):
    """An error that a Dataset raises."""


class Panic(BaseException):
    """An error that is not an Exception, as libraries in Rust raise."""


RAISING, PANICKING, DEADLY, SLOW, BIG = range(-5, 0)


class Troubled(Dataset):
    """A Dataset with samples that raise, kill the process, hang, or are large."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> object:
        if index == RAISING:
            raise SampleIsBroken("a sample is broken: caf\udce9.jpg")  # not Unicode
        if index == PANICKING:
            raise Panic("index out of bounds")
        if index == DEADLY:  # as when the process runs out of memory
            os.kill(os.getpid(), signal.SIGKILL)
        if index == SLOW:  # sleeps longer than any test may take
            print("asleep", flush=True)
            time.sleep(600)
        if index == BIG:
            return torch.ones(40 << 20, dtype=torch.uint8)
        return index


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


class Things(Dataset):
    """Samples of many types."""

    def __len__(self) -> int:
        return len(THINGS)

    def __getitem__(self, index: int) -> object:
        return THINGS[index]


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
