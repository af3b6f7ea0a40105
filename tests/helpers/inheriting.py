"""A script that sets something around its Dataset, in many ways: see test_inherit.py.

Run as a program, with the name of a file and how to wrap a Dataset, it writes what each case gives.
"""

import json
import os
import random
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageFile
from torch.utils.data import DataLoader, Dataset, get_worker_info

from feed import RemoteDataset, source
from helpers import settings

rng = np.random.default_rng(0)


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


# What the script has set. Each case returns its samples, of which all are alike.


def a_variable(wrap: Callable) -> list:
    settings.SIZE = 32
    return epochs(wrap(Table(lambda self, index: np.full(2, settings.SIZE))))


def a_nested_setting(wrap: Callable) -> list:
    settings.TRAIN["IM_SIZE"] = 64
    return epochs(wrap(Table(lambda self, index: {"image": torch.ones(settings.TRAIN["IM_SIZE"])})))


def a_class_attribute(wrap: Callable) -> list:
    settings.Config.size = 32
    return epochs(wrap(Table(lambda self, index: (index * 0, settings.Config.size))))


def a_replaced_function(wrap: Callable) -> list:
    settings.load = lambda index: 32
    return epochs(wrap(Table(lambda self, index: settings.load(index))))


def a_configuration_that_others_hold(wrap: Callable) -> list:
    """As with yacs: nodes with attributes, one of which is the default of an argument."""
    settings.nodes.update(size=32)
    settings.nodes.frozen = True
    return epochs(wrap(Table(lambda self, index: (settings.of_nodes(), settings.nodes.frozen))))


def a_replaced_method(wrap: Callable) -> list:
    settings.Config.area = lambda self: 32
    return epochs(wrap(Table(lambda self, index: settings.Config().area())))


def a_module_that_a_function_imports(wrap: Callable) -> list:
    settings.SIZE = 32

    def sample(self: Table, index: int) -> int:
        from helpers import settings as imported

        return imported.SIZE

    return epochs(wrap(Table(sample)))


def a_setting_of_a_library(wrap: Callable) -> list:
    ImageFile.LOAD_TRUNCATED_IMAGES = True
    return epochs(wrap(Table(lambda self, index: ImageFile.LOAD_TRUNCATED_IMAGES)))


def the_environment(wrap: Callable) -> list:
    os.environ["AUGMENTATIONS"] = "5"
    os.environ["LOCAL_RANK"] = "3"
    os.environ.pop("REMOVED", None)
    names = "AUGMENTATIONS", "LOCAL_RANK", "REMOVED"
    return epochs(wrap(Table(lambda self, index: [os.environ.get(name) for name in names])))


def the_default_dtype(wrap: Callable) -> list:
    torch.set_default_dtype(torch.float64)
    samples = epochs(wrap(Table(lambda self, index: torch.tensor(1.5))))
    torch.set_default_dtype(torch.float32)
    return samples


INHERITED = [
    a_variable,
    a_nested_setting,
    a_class_attribute,
    a_replaced_function,
    a_configuration_that_others_hold,
    a_replaced_method,
    a_module_that_a_function_imports,
    the_environment,
    the_default_dtype,
]
REFUSED = {"a_setting_of_a_library": "it is False there, True here"}
# Without inherit.variables:
NOT_CARRIED = REFUSED | {
    "a_variable": "it is ndarray of int64 (2,) [8, 8] there, ndarray of int64 (2,) [32, 32] here",
    "a_nested_setting": "['image'] is Tensor of float32 (224,) [1.0, 1.0, 1.0, 1.0] there, Tensor",
    "a_class_attribute": "[1] is 8 there, 32 here",
    "a_replaced_function": "it is 8 there, 32 here",
    "a_configuration_that_others_hold": "[0] is 8 there, 32 here",
    "a_replaced_method": "it is 8 there, 32 here",
    "a_module_that_a_function_imports": "it is 8 there, 32 here",
}


# Generators, which worker_init_fn seeds. Each case returns random numbers, of which none are alike.


def drawn(self: Table, index: int) -> float:
    return self.rng.random()


def of_the_dataset(wrap: Callable) -> list:
    def seed(worker: int) -> None:
        get_worker_info().dataset.rng = np.random.default_rng(torch.initial_seed())

    return epochs(wrap(Table(drawn)), 2, worker_init_fn=seed)


def of_the_dataset_from_the_worker_s_seed(wrap: Callable) -> list:
    def seed(worker: int) -> None:
        info = get_worker_info()
        info.dataset.rng = random.Random(info.seed)

    return epochs(wrap(Table(drawn)), worker_init_fn=seed)


def of_a_module(wrap: Callable) -> list:
    def seed(worker: int) -> None:
        settings.rng = np.random.default_rng(torch.initial_seed())

    return epochs(wrap(Table(lambda self, index: settings.rng.random())), worker_init_fn=seed)


def of_the_script(wrap: Callable) -> list:
    def seed(worker: int) -> None:
        global rng
        rng = np.random.default_rng(torch.initial_seed())

    return epochs(wrap(Table(lambda self, index: rng.random())), worker_init_fn=seed)


def made_when_it_is_first_used(wrap: Callable) -> list:
    def draw(self: Table, index: int) -> float:
        if self.rng is None:
            self.rng = np.random.default_rng(get_worker_info().id)
        return self.rng.random()

    return epochs(wrap(Table(draw, rng=None)))


def of_one_of_two_loaders(wrap: Callable) -> list:
    """Loaders over one Dataset, of which one has a worker_init_fn."""

    def seed(worker: int) -> None:
        get_worker_info().dataset.marked = True

    dataset = wrap(Table(lambda self, index: (self.marked, random.random()), marked=False))
    with_it, without = epochs(dataset, worker_init_fn=seed), epochs(dataset)
    assert {marked for marked, _ in with_it} == {True} and {m for m, _ in without} == {False}
    return [number for _, number in with_it]


RANDOM = [
    of_the_dataset,
    of_the_dataset_from_the_worker_s_seed,
    of_a_module,
    of_the_script,
    made_when_it_is_first_used,
    of_one_of_two_loaders,
]
NOT_REPEATABLE = [made_when_it_is_first_used]


# Datasets with a history, or with something of their process. Each returns its samples' indices.


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


def a_host_that_fails(wrap: Callable) -> list:
    def read(self: Table, index: int) -> int:
        if index == 40 and os.environ.get("PLACE") == "there":
            raise OSError("image file is truncated")
        return index

    return epochs(wrap(Table(read)))


CASES = [each.__name__ for each in [*INHERITED, *RANDOM, *ORDINARY, a_host_that_fails]]


def main() -> None:
    """Write what each case has given, random ones twice, and what it has printed."""
    wrap = RemoteDataset if sys.argv[2] != "plain" else lambda dataset: dataset
    found, cases = {}, [*REFUSED, *CASES]
    if sys.argv[2] == "without variables":
        source.variables, cases = lambda reached: [], NOT_CARRIED
    for name in cases:
        with tempfile.TemporaryFile() as output:
            os.dup2(output.fileno(), 1)
            try:
                times = 2 if globals()[name] in RANDOM else 1
                gave = [[repr(s) for s in globals()[name](wrap)] for _ in range(times)]
            except Exception as error:
                gave = [str(error)]
            found[name] = gave, os.pread(output.fileno(), 1 << 20, 0).decode()
    Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
