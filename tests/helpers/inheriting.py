"""A script that sets something around its Dataset, in many ways: see test_inherit.py.

Run as a program, with the name of a file and how to wrap a Dataset, it writes what each case gives.
"""

import functools
import json
import logging
import os
import pickle
import random
import sys
import tempfile
import threading
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import ImageFile
from torch.utils.data import DataLoader, Dataset, get_worker_info

from feed import RemoteDataset, source
from helpers import settings, settings_user
from helpers.ordinary import ORDINARY, Table, epochs

rng = np.random.default_rng(0)
lock, remembered, log = threading.RLock(), threading.local(), logging.getLogger("script")


@functools.lru_cache(maxsize=7)
def fibonacci(number: int) -> int:
    return number if number < 2 else fibonacci(number - 1) + fibonacci(number - 2)


@functools.singledispatch
def kind(value: Any) -> str:
    return "something"


@kind.register
def _(value: int) -> str:
    return "a number"


def load(name: str) -> str:
    return load.registry[name]


load.registry = {"kind": "not of functools.singledispatch"}


class Lazy:
    @functools.cached_property
    def size(self) -> int:
        return 32


class Stage(Dataset):
    """Gives what the script has set in shared memory, in a module and in the environment."""

    def __init__(self) -> None:
        self.stage = torch.zeros(2).share_memory_()

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple:
        return self.stage.tolist(), settings.SIZE, os.environ.get("STAGE")


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


def one_object_of_several_modules(wrap: Callable) -> list:
    """The Dataset changes it, as for images of several sizes."""
    settings.nodes["size"] = 32

    def sample(self: Table, index: int) -> tuple:
        settings.nodes["size"] += 1
        sizes = settings_user.size(), settings.of_nodes(), settings.pair[1][0]["size"]
        settings.nodes["size"] -= 1
        return sizes

    return epochs(wrap(Table(sample)))


def one_of_several_objects_with_names(wrap: Callable) -> list:
    settings.mode, settings.log = settings.Mode.TEST, logging.getLogger("test")
    settings.folder, settings.known = Path("test"), {*"xyz"}

    def sample(self: Table, index: int) -> tuple:
        names = [mode.name for mode in settings.Mode] + [logging.getLogger("train").name]
        now = settings.mode.name, settings.log.name, settings.folder, sorted(settings.known)
        return names, now

    return epochs(wrap(Table(sample)))


def what_pickle_does_not_know(wrap: Callable) -> list:
    def sample(self: Table, index: int) -> tuple:
        with lock:
            log.debug("sample %d", index)
            remembered.size = Lazy().size
        return (
            fibonacci(20),
            fibonacci.cache_parameters(),
            kind(index),
            kind("index"),
            remembered.size,
        )

    return epochs(wrap(Table(sample)))


def shared_memory(wrap: Callable, context: str = "fork") -> list:
    """The script changes it between epochs of persistent workers."""
    settings.SIZE, os.environ["STAGE"] = 64, "2"
    table, options = Stage(), {"persistent_workers": True, "multiprocessing_context": context}
    loader = DataLoader(wrap(table), 16, num_workers=1, collate_fn=list, **options)
    found = []
    for epoch in range(3):
        table.stage.fill_(epoch)
        found += [sample for batch in loader for sample in batch]
    return found


def a_spawned_worker(wrap: Callable) -> list:
    """It has imported the modules anew, so that also a plain one lacks what the script has set."""
    return shared_memory(wrap, "spawn")


class Pairs(Table):
    Pair = namedtuple("Pair", "one other")


def a_namedtuple_in_a_class(wrap: Callable) -> list:
    """Without workers, since torch's own could not send it."""
    dataset = wrap(Pairs(lambda self, index: self.Pair(1, "2")))
    samples = [sample for batch in DataLoader(dataset, 16, collate_fn=list) for sample in batch]
    assert {*map(type, samples)} == {Pairs.Pair}
    return samples


INHERITED = [
    a_namedtuple_in_a_class,
    one_object_of_several_modules,
    one_of_several_objects_with_names,
    what_pickle_does_not_know,
    shared_memory,
    a_spawned_worker,
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
    "one_object_of_several_modules": "[0] is 9 there, 33 here",
    "one_of_several_objects_with_names": "[1][0] is 'TRAIN' there, 'TEST' here",
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


def a_host_that_fails(wrap: Callable) -> list:
    def read(self: Table, index: int) -> int:
        if index == 40 and os.environ.get("PLACE") == "there":
            raise OSError("image file is truncated")
        return index

    return epochs(wrap(Table(read)))


FAIL = [a_setting_of_a_library, a_host_that_fails]
CASES = {case.__name__: case for case in [*INHERITED, *RANDOM, *ORDINARY, *FAIL]}


def main() -> None:
    """Write what each case has given, random ones twice, and what it has printed."""
    wrap = RemoteDataset if sys.argv[2] != "plain" else lambda dataset: dataset
    found, cases = {}, [*CASES]
    if sys.argv[2] == "without variables":
        source.variables, cases = lambda reached: (pickle.dumps([]), False), NOT_CARRIED
    for name in cases:
        with tempfile.TemporaryFile() as output:
            os.dup2(output.fileno(), 1)
            try:
                times = 2 if CASES[name] in RANDOM else 1
                gave = [[*map(repr, CASES[name](wrap))] for _ in range(times)]
            except Exception as error:
                gave = [str(error)]
            found[name] = gave, os.pread(output.fileno(), 1 << 20, 0).decode()
    Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
