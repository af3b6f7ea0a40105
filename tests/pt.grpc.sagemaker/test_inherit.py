"""What a script has set around its Dataset: data hosts have it, too, or the Dataset is refused.

Run as a program, this file is that script: see helpers/scripts.py. The reference is the plain
DataLoader, whose forked workers have everything that the script has set.
"""

import functools
import logging
import multiprocessing
import os
import pickle
import random
import re
import runpy
import sqlite3
import subprocess
import sys
import threading
import time
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile
from torch.utils.data import DataLoader, Dataset, get_worker_info

from feed import RemoteDataset, compare, dataset_file, inherit
from feed.pickling import DatasetPickler
from helpers import absent, settings, settings_user
from helpers.datasets import Table, assert_same
from helpers.pages import ROOT
from helpers.scripts import checks, main, run, said

pytestmark = pytest.mark.timeout(600)  # the script runs in the first test that asks for it
ADDRESSES = os.environ.get("HETERO_DATA_HOSTS", "").split(",")
rng = np.random.default_rng(0)
lock, remembered, log = threading.RLock(), threading.local(), logging.getLogger("script")


def on(host_count: int, dataset: Dataset) -> Dataset:
    """Return the RemoteDataset on the first data hosts; it prepares samples here without any."""
    with mock.patch.dict(os.environ, HETERO_DATA_HOSTS=",".join(ADDRESSES[:host_count])):
        return RemoteDataset(dataset)


def epochs(dataset: Any, count: int = 1, **options: Any) -> list:
    """Return all samples of some epochs."""
    torch.manual_seed(1)
    options = {"num_workers": 2, **options}
    loader = DataLoader(dataset, 16, collate_fn=list, **options)
    return [sample for _ in range(count) for batch in loader for sample in batch]


# What the script sets, in modules and elsewhere


@functools.lru_cache(maxsize=7)
def fibonacci(number: int) -> int:
    return number if number < 2 else fibonacci(number - 1) + fibonacci(number - 2)


@functools.singledispatch
def kind(value: Any) -> str:
    return "something"


@kind.register
def _(value: int) -> str:
    return "a number"


class Lazy:
    @functools.cached_property
    def size(self) -> int:
        return 32


class Pairs(Table):
    Pair = namedtuple("Pair", "one other")


def set_everything() -> None:
    settings.SIZE, settings.TRAIN["IM_SIZE"], settings.Config.size = 32, 64, 32
    settings.load, settings.Config.area = lambda index: 32, lambda self: 32
    # As with yacs: nodes with attributes, one of which is the default of an argument.
    settings.nodes["size"], settings.nodes.frozen = 32, True
    settings.mode, settings.log = settings.Mode.TEST, logging.getLogger("test")
    settings.folder, settings.known = Path("test"), {*"xyz"}
    settings.slots.size, settings.axes["axes"] = 32, ()
    settings.order.move_to_end("a"), settings.order.update(c=3)
    settings.current = settings.large
    settings.pair_of_configs = settings.large, [settings.large]
    # Where a module cannot be imported, only what comes from it is left out.
    settings.others["tracker"] = absent.Tracker()
    os.environ |= {"AUGMENTATIONS": "5", "LOCAL_RANK": "3"}
    os.environ.pop("REMOVED", None)
    torch.set_default_dtype(torch.float64)


def everything(table: Table, index: int) -> dict:
    with lock:
        log.debug("sample %d", index)
        remembered.size = Lazy().size
    settings.nodes["size"] += 1  # the Dataset changes it, too
    nodes = settings_user.size(), settings.of_nodes(), settings.pair[1][0]["size"]
    settings.nodes["size"] -= 1
    large, small = settings.large, settings.small
    return {
        "variable": np.full(2, settings.SIZE),
        "nested": torch.ones(settings.TRAIN["IM_SIZE"]),
        "class attribute": settings.Config.size,
        "replaced functions": (settings.load(index), settings.Config().area()),
        "one object of several modules": (*nodes, settings.nodes.frozen),
        "one of several objects with names": (settings.mode.name, settings.log.name),
        "the others": ([mode.name for mode in settings.Mode], logging.getLogger("train").name),
        "parts": (settings.folder, sorted(settings.known), settings.slots, settings.axes),
        "order": [*settings.order.items()],
        "same": (settings.current is large, settings.pair_of_configs[1][0] is large),
        "sizes": (settings.size_of(), small.size, large.size),
        "as it was": (settings.nothing, settings.table[settings.key], settings.local.x),
        "environment": [os.environ.get(key) for key in ("AUGMENTATIONS", "LOCAL_RANK", "REMOVED")],
        "default dtype": torch.tensor(1.5),
        "what pickle does not know": (fibonacci(20), fibonacci.cache_parameters(), remembered.size),
        "dispatch": (kind(index), kind("index")),
    }


def size_as_imported(table: Table, index: int) -> int:
    from helpers import settings as imported

    return imported.SIZE


def check_what_the_script_sets_is_there() -> None:
    set_everything()
    for gives in (size_as_imported, everything):
        expected = epochs(Table(gives))
        for host_count in (0, 2):
            assert_same(epochs(on(host_count, Table(gives))), expected)
        with mock.patch.object(dataset_file, "variables", lambda _: (pickle.dumps([]), False)):
            refused_in_words(gives, "it is 8 there, 32 " if gives is size_as_imported else "")
    torch.set_default_dtype(torch.float32)


def refused_in_words(gives: Callable, words: str) -> None:
    text = f"sample of Table than a worker of this script would: {words}"
    with pytest.raises(RuntimeError, match=f"(?s){re.escape(text)}.*What data hosts have"):
        epochs(on(2, Table(gives)))


def check_a_setting_of_a_library_is_refused() -> None:
    ImageFile.LOAD_TRUNCATED_IMAGES = True
    words = "it is False there, True here"
    refused_in_words(lambda table, index: ImageFile.LOAD_TRUNCATED_IMAGES, words)


def check_a_namedtuple_may_be_an_attribute_of_a_class() -> None:
    """Without workers, since torch's own could not send it."""
    samples = epochs(on(2, Pairs(lambda self, index: self.Pair(index, "2"))), num_workers=0)
    assert samples == [(index, "2") for index in range(61)]
    assert {*map(type, samples)} == {Pairs.Pair}


def stage(table: Table, index: int) -> tuple:
    return table.stage.tolist(), settings.SIZE, os.environ.get("STAGE")


def check_shared_memory_changes_between_epochs_of_persistent_workers() -> None:
    """A spawned one has imported the modules anew, so that also a plain one lacks the settings."""
    settings.SIZE, os.environ["STAGE"] = 64, "2"
    for method, size in (("fork", 64), ("spawn", 8)):
        table = Table(stage, stage=torch.zeros(2).share_memory_())
        options = {"persistent_workers": True, "multiprocessing_context": method, "num_workers": 1}
        for dataset in (table, *(on(host_count, table) for host_count in (0, 2))):
            loader = DataLoader(dataset, 16, collate_fn=list, **options)
            for epoch in range(3):
                table.stage.fill_(epoch)
                assert sum(loader, []) == 61 * [([epoch, epoch], size, "2")]


# Generators, which worker_init_fn seeds


def drawn(table: Table, index: int) -> float:
    if table.rng is None:
        table.rng = np.random.default_rng(get_worker_info().id)
    return table.rng.random()


def seed_of_dataset(worker: int) -> None:
    get_worker_info().dataset.rng = np.random.default_rng(torch.initial_seed())


def seed_of_module(worker: int) -> None:
    settings.rng = np.random.default_rng(torch.initial_seed())


def seed_of_script(worker: int) -> None:
    global rng
    rng = np.random.default_rng(torch.initial_seed())


GENERATORS = {
    "of the Dataset": (drawn, seed_of_dataset),
    "of a module": (lambda table, index: settings.rng.random(), seed_of_module),
    "of the script": (lambda table, index: rng.random(), seed_of_script),
    "made when it is first used": (drawn, None),
}


def never_the_same_numbers(name: str) -> None:
    draw, seed = GENERATORS[name]
    for host_count in (0, 2):
        first, second = (
            epochs(on(host_count, Table(draw, rng=None)), 2 - (not seed), worker_init_fn=seed)
            for _ in range(2)
        )
        assert len(first) == len({*first})
        assert first == second or not seed


def check_one_of_two_loaders_over_a_dataset_may_have_a_worker_init_fn() -> None:
    def mark(worker: int) -> None:
        get_worker_info().dataset.marked = True

    table = Table(lambda table, index: (table.marked, random.random()), marked=False)
    for host_count in (0, 2):
        dataset = on(host_count, table)
        with_it, without = epochs(dataset, worker_init_fn=mark), epochs(dataset)
        assert {marked for marked, _ in with_it} == {True}
        assert {marked for marked, _ in without} == {False}
        assert len({*with_it}) == 61


# Datasets that must not be refused: those with a history, or with something of their process


def query(table: Table, index: int) -> tuple:
    table.handle = table.handle or sqlite3.connect(":memory:")
    return table.handle.execute(f"select {index}").fetchone()


def with_history(table: Table, index: int) -> tuple:
    table.buffer = [*table.buffer, index][-9:]
    history = len(table.buffer), random.choice(table.buffer)
    cached = table.cache.setdefault(index, (index, random.random()))
    noise = np.random.randint(0, 256, (8, 8, 3), np.uint8)
    image = Image.fromarray(noise), {"nan": float("nan"), "noise": {1, 2}, "none": None}
    return index, history, cached, query(table, index), image


def file_of_data_hosts(table: Table, index: int) -> tuple:
    return index, {"there": True}[os.environ.get("PLACE")]


# Whether the log says that samples were not compared, and what gives them.
ORDINARY = {
    "history": (False, Table(with_history, buffer=[], cache={}, handle=None)),
    "process": (True, Table(lambda table, index: (index, os.getpid()))),
    "file of data hosts": (True, Table(file_of_data_hosts)),
    "clock": (True, Table(lambda table, index: (index, time.time() % 1))),
}


def not_refused(name: str) -> None:
    is_reported, table = ORDINARY[name]
    assert [index for index, *_ in epochs(on(2, table), 2)] == 2 * [*range(61)]
    assert ("were not compared" in said()) == is_reported


def check_the_training_s_own_dataset_stays_as_it_is_without_workers() -> None:
    table = Table(query, handle=None)
    assert [index for [index] in epochs(on(2, table), num_workers=0)] == [*range(61)]
    assert not table.handle


def check_an_error_says_that_it_works_here() -> None:
    def read(table: Table, index: int) -> int:
        if index == 40 and os.environ.get("PLACE") == "there":
            raise OSError("image file is truncated")
        return index

    with pytest.raises(OSError, match="(?s)is truncated.*This host can prepare these"):
        epochs(on(2, Table(read)))
    assert epochs(on(0, Table(read))) == [*range(61)]


CHECKS = checks(globals())
for check, names in (never_the_same_numbers, GENERATORS), (not_refused, ORDINARY):
    CHECKS |= {f"{check.__name__}: {name}": functools.partial(check, name) for name in names}


@pytest.fixture(scope="module")
def tracebacks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run(__file__, tmp_path_factory.mktemp("inherit"), CHECKS)


@pytest.mark.parametrize("name", CHECKS)
def test_from_a_script(tracebacks, name):
    assert not tracebacks[name], tracebacks[name]


# In this process


def test_nothing_is_set_where_nothing_differs_and_the_log_names_what_is_set(capsys, monkeypatch):
    """The variables come back as other objects, as on a data host."""
    before = settings.nodes, settings.pair, settings.mode
    content, _ = inherit.variables(["helpers.settings", "helpers.settings_user"])
    inherit.set_variables(content)
    assert not capsys.readouterr().out
    after = settings.nodes, settings.pair, settings.mode
    assert all(one is other for one, other in zip(before, after, strict=True))
    monkeypatch.setattr(settings, "SIZE", 9)
    monkeypatch.setitem(settings.TRAIN, "IM_SIZE", 9)
    inherit.set_variables(content)
    words = "feed: set as in the training script: helpers.settings.SIZE, helpers.settings.TRAIN\n"
    assert (settings.SIZE, settings.TRAIN["IM_SIZE"], capsys.readouterr().out) == (8, 224, words)


def test_processes_pickle_the_same_variables_alike():
    """Also a class that cannot be found by its name, as a namedtuple in a class body."""
    found = []
    for _ in range(2):
        with multiprocessing.get_context("fork").Pool(1) as pool:
            found.append(pool.apply(inherit.variables, (["helpers.settings"],)))
    assert found[0] == found[1] and b"Pair" in found[0][0]


def test_a_cycle_of_functions_is_noticed_soon(monkeypatch: pytest.MonkeyPatch):
    """Without that, this class took three seconds with Python 3.13, in each worker."""
    pickled, of_pickler = [], DatasetPickler.reducer_override

    def reducer_override(self: DatasetPickler, value: Any) -> Any:
        pickled.append(value)
        return of_pickler(self, value)

    monkeypatch.setattr(DatasetPickler, "reducer_override", reducer_override)
    assert all(inherit.fingerprint(settings.Config.Pair)) and len(pickled) < 1000


def test_differences_are_named():
    for there, here, words in [
        (np.full(2, 8), np.full(2, 9), "it is ndarray of int64 (2,) [8, 8] there, ndarray of int"),
        ({"a": torch.ones(9)}, {"a": torch.ones(6)}, "['a'] is Tensor of float32 (9,) [1.0, 1.0,"),
        ((0, 8), (0, 32), "[1] is 8 there, 32 here"),
        ((0, ("TRAIN",)), (0, ("TEST",)), "[1][0] is 'TRAIN' there, 'TEST' here"),
    ]:
        assert compare.difference(there, here, ("there", "here")).startswith(words)


def test_other_cpus_may_round_differently(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The same resized image, as this CPU and an older one compute it."""
    program, files = ROOT / "tests/programs/resize.py", (tmp_path / "old.npz", tmp_path / "new.npz")
    environment = os.environ | {"ATEN_CPU_CAPABILITY": "default"}
    subprocess.run([sys.executable, program, files[0]], env=environment, check=True)
    monkeypatch.setattr(sys, "argv", [program, files[1]])
    runpy.run_path(program)
    found = [dict(np.load(file)) for file in files]
    assert not compare.difference(*found, ("there", "here"))
    found[1]["small"] = found[1]["small"] + np.uint8(1)  # no rounding changes all pixels
    assert "['small'] is " in compare.difference(*found, ("there", "here"))


if __name__ == "__main__":
    main(CHECKS)
