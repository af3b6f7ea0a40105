"""Datasets that must not be refused: those with a history, or with something of their process.

Each case wraps a Dataset, and returns its samples' indices. The script is inheriting.py.
"""

import os
import random
import sqlite3
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from feed import RemoteDataset


class Table(Dataset):
    """Has `what` as the function that prepares its samples."""

    def __init__(self, what: Callable, **attributes: Any):
        self.what = what
        self.__dict__.update(attributes)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        return self.what(self, index)


def epochs(dataset: Any, count: int = 1, **options: Any) -> list:
    """Return all samples of some epochs."""
    torch.manual_seed(1)
    loader = DataLoader(dataset, 16, num_workers=2, collate_fn=list, **options)
    return [sample for _ in range(count) for batch in loader for sample in batch]


def a_buffer(wrap: Callable) -> list:
    def mosaic(self: Table, index: int) -> tuple:
        self.buffer = [*self.buffer, index][-9:]
        return index, len(self.buffer), random.choice(self.buffer)

    return [index for index, *_ in epochs(wrap(Table(mosaic, buffer=[])), 2)]


def a_cache(wrap: Callable) -> list:
    dataset = Table(lambda s, index: s.cache.setdefault(index, (index, random.random())), cache={})
    return [index for index, _ in epochs(wrap(dataset), 2)]


def a_process_number(wrap: Callable) -> list:
    return [index for index, _ in epochs(wrap(Table(lambda s, index: (index, os.getpid()))))]


def a_folder(wrap: Callable) -> list:
    def path(self: Table, index: int) -> tuple:
        self.folder = self.folder or tempfile.TemporaryDirectory()
        return index, self.folder.name

    return [index for index, _ in epochs(wrap(Table(path, folder=None)))]


def a_handle(wrap: Callable) -> list:
    """The training's own Dataset stays as it is, also without workers."""

    def query(self: Table, index: int) -> int:
        self.handle = self.handle or sqlite3.connect(":memory:")
        return self.handle.execute(f"select {index}").fetchone()[0]

    table = Table(query, handle=None)
    samples = [sample for batch in DataLoader(wrap(table), 16, collate_fn=list) for sample in batch]
    assert not table.handle or wrap is not RemoteDataset
    table.handle = None
    return samples + epochs(wrap(table))


def a_file_of_data_hosts(wrap: Callable) -> list:
    def read(self: Table, index: int) -> int:
        assert wrap is not RemoteDataset or os.environ.get("PLACE") == "there" or not self.is_far
        return index

    is_far = "HETERO_DATA_HOSTS" in os.environ
    return epochs(wrap(Table(read, is_far=is_far)))


def a_clock(wrap: Callable) -> list:
    return [index for index, _ in epochs(wrap(Table(lambda s, index: (index, time.time() % 1))))]


def nothing_but_an_image(wrap: Callable) -> list:
    def image(self: Table, index: int) -> tuple:
        noise = np.random.randint(0, 256, (8, 8, 3), np.uint8)
        return index, Image.fromarray(noise), {"nan": float("nan"), "noise": {1, 2}, "none": None}

    return [index for index, *_ in epochs(wrap(Table(image)))]


ORDINARY = [
    a_buffer,
    a_cache,
    a_process_number,
    a_folder,
    a_handle,
    a_file_of_data_hosts,
    a_clock,
    nothing_but_an_image,
]
SILENT = [a_buffer, a_cache, a_handle, nothing_but_an_image]  # there is nothing to say about these
