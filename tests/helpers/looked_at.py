"""Datasets that are looked at, are pickled, or look for files: see test_stand_in.py."""

import io
import os
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset, get_worker_info


class Columns(Dataset):
    """Like Hugging Face's, it gives columns and rows, too."""

    def __init__(self) -> None:
        self.columns = {"image": [*range(10)], "label": [*"abcdefghij"]}

    def __len__(self) -> int:
        return 10

    def __getitem__(self, key: Any) -> Any:
        return self.columns[key] if isinstance(key, str) else self.columns["image"][key]


class Splits(dict):
    """Like Hugging Face's DatasetDict."""


class Missing(Dataset):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        return Path("/nowhere/image.jpg").read_bytes()


def missing() -> Dataset:
    Path("/nowhere/labels.csv").read_bytes()
    return Missing()


class Pickled(Dataset):
    """Notes each time that it is pickled."""

    def __init__(self, file: Path):
        self.file = file

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        return index

    def __getstate__(self) -> dict:
        with self.file.open("a") as file:
            file.write(".")
        return vars(self)


def connect(process: int) -> "Connected":
    if os.getpid() != process:
        raise ValueError("no such connection")
    return Connected()


class Connected(Dataset):
    """Can only be unpickled in the process that it is from."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        return 0

    def __reduce__(self) -> tuple:
        return connect, (os.getpid(),)


class Opened(Dataset):
    """Cannot be pickled, and has a generator."""

    def __init__(self) -> None:
        self.file, self.rng = io.FileIO(os.devnull), np.random.default_rng(0)

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> float:
        return self.rng.random()


class Named(Dataset):
    """A class of its samples does not know that it is an attribute of this one."""

    Pair = namedtuple("Pair", "index label")

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> tuple:
        return self.Pair(index, str(index))


class Told(Dataset):
    """Gives what it was told."""

    who = -1

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return self.who


class Outer(Dataset):
    """Tells its inner Dataset which worker asks."""

    def __init__(self, inner: Dataset, told: Dataset):
        self.inner, self.told = inner, told

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[int, int]:
        self.told.who = get_worker_info().id
        return get_worker_info().id, self.inner[index]
