"""How Datasets travel to data hosts from a script, whose classes and functions are in `__main__`.

Run as a program, this file is that script: see helpers/scripts.py.
"""

import copy
import enum
import functools
import importlib
import io
import mmap
import multiprocessing
import os
import random
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, get_worker_info

from feed import RemoteDataset, modules
from helpers import datasets
from helpers.data_hosts import remote
from helpers.datasets import assert_same
from helpers.scripts import checks, main, run, said

pytestmark = pytest.mark.timeout(600)  # the script runs in the first test that asks for it
MODEL = torch.nn.Linear(100, 100)  # the training's, which no Dataset needs
FACTOR = 3


class Table(datasets.Table):
    """A class of the script. Calls its attribute `pickled`, if it has one, when it is pickled."""

    classes = ("cat", "dog")
    scale = 1

    def __getstate__(self) -> dict:
        more = self.pickled() if "pickled" in vars(self) else None
        return {**self.__dict__, **(more or {})}


class Animal(enum.Enum):
    CAT, DOG = 0, 1


class Pair(NamedTuple):
    animal: Animal
    image: torch.Tensor


class Unusable(Exception):
    pass


class Sample:
    def __init__(self, table: Table, index: int):
        if index == 60:
            raise Unusable(f"value {index}")
        self.value, self.more = index, [Pair(Animal(index % 2), torch.full((999,), index))]


def tripled(value: int) -> int:
    """A function of the script that uses a global variable."""
    return FACTOR * value


def here_and_there(dataset: Dataset) -> list:
    """Return the samples from data hosts, which must equal those prepared here."""
    options = {"batch_size": 4, "collate_fn": list}
    torch.manual_seed(1)
    there = list(DataLoader(RemoteDataset(dataset), **options, num_workers=1))
    torch.manual_seed(1)
    assert_same(there, list(DataLoader(remote([], dataset), **options)))
    return [sample for batch in there for sample in batch]


# Code


def check_lambdas_closures_and_functions() -> None:
    ten = 10
    table = Table(lambda table, index: tripled(index) + ten)
    assert here_and_there(table) == [3 * value + 10 for value in range(61)]
    partial = functools.partial(lambda path, table, index: (index, path), Path("a"))
    assert here_and_there(Table(partial))[1] == (1, Path("a"))
    Inner = type("Inner", (Table,), {})
    Outer = type("Outer", (Table,), {"__annotations__": {"values": Inner}})
    inner = Inner(lambda table, index: index)
    # Pickling an object of a class leaves a mark in the class.
    here_and_there(Outer(lambda table, index: table.inner[index], inner=inner))


def check_classes_and_exceptions_of_the_script_come_back_as_they_are_here() -> None:
    batches = iter(DataLoader(RemoteDataset(Table(Sample)), collate_fn=list, num_workers=1))
    for number in range(60):
        [sample] = next(batches)
        assert type(sample) is Sample and sample.value == number
        assert type(sample.more[0]) is Pair and sample.more[0].image.sum() == 999 * number
        assert sample.more[0].animal in (Animal.CAT, Animal.DOG)
    with pytest.raises(Unusable, match="Unusable: value 60"):
        next(batches)


def check_classes_of_one_name_stay_apart() -> None:
    def times(factor: int) -> Dataset:
        class Local(Table):
            def __getitem__(self, index: int) -> int:
                return factor * index

        return Local(None, 4)

    assert here_and_there(ConcatDataset([times(1), times(2)])) == [0, 1, 2, 3, 0, 2, 4, 6]


def check_globals_that_travel_along_are_named() -> None:
    def features(table: Table, index: int) -> int:
        return index + MODEL.in_features

    assert here_and_there(Table(features))[0] == 100
    assert "globals of the script that it uses (MODEL (Linear) in " in said()
    assert f"features, line {features.__code__.co_firstlineno})" in said()


# Data


def check_tensors_travel_without_what_they_are_views_of() -> None:
    whole = torch.rand(1000, 250)
    rows = [*whole, whole.t(), whole.view(torch.int32), whole.to(torch.cfloat).conj()]
    rows += [whole[:0], whole[0, 0].expand(9), torch.tensor(3), whole.bfloat16()]
    assert_same(here_and_there(Table(lambda table, index: rows[index], len(rows))), rows)
    assert "feed: Table, 5.5 MB" in said()


def check_memory_mapped_files_stay_files() -> None:
    np.save("numbers.npy", np.arange(80_000).reshape(80, 100, 10))
    whole = np.load("numbers.npy", mmap_mode="r")
    arrays = [whole, whole[7], whole[10:50:2, ::-1, 3:5], whole.T, whole[::-1, :, ::-3], whole[3:3]]
    arrays += [np.memmap("numbers.npy", "i4", "r", 1024, (5, 3))[2:], whole[1, 1, 1:2]]

    def tell(table: Table, index: int) -> tuple:
        base = arrays[index]
        while isinstance(base, np.ndarray):
            base = base.base
        array = arrays[index]
        return isinstance(base, mmap.mmap) or not array.size, str(array.dtype), array.tolist()

    table = Table(tell, len(arrays))
    assert_same(here_and_there(table), [tell(table, index) for index in range(len(arrays))])
    assert "feed: Table, 0.0 MB" in said()


def check_what_cannot_travel_is_named() -> None:
    file = io.FileIO(os.devnull)
    Path("written").write_bytes(bytes(80))
    opened = "cannot be sent .*FileIO.*: open it when it is first used, or"
    init = {"worker_init_fn": lambda number: file.read(), "num_workers": 1}
    for dataset, words, options in [
        (Table(lambda table, index: file.name), rf"dataset\.what -> file {opened}", {}),
        (Table([{"a": (0, file)}]), r"dataset\.what\[0\]\['a'\]\[1\] cannot be sent", {}),
        # Mapped files that can be written to.
        (Table(np.memmap("written", "i8", "r+")), r"\.what cannot be sent .*mode='r'", {}),
        (Table(np.memmap("written", "i8", "c")), r"\.what cannot be sent .*mode='r'", {}),
        (Table(tripled), r"worker_init_fn -> file cannot be .* when it is first used$", init),
    ]:
        with pytest.raises(TypeError, match=words):
            next(iter(DataLoader(RemoteDataset(dataset), **options)))


# Changes


def check_attributes_are_the_dataset_s() -> None:
    table = Table(lambda table, index: index, 20, names="ab")
    dataset = RemoteDataset(table)
    assert dataset.classes == ("cat", "dog") and dataset.names == "ab" and dataset.what(0, 3) == 3
    dataset.scale = 5
    assert table.scale == 5 and not hasattr(dataset, "mosaic")
    assert isinstance(dataset, Dataset) and len(dataset) == 20
    assert copy.deepcopy(dataset)[3] == 3


def check_what_is_changed_between_epochs_arrives_but_not_with_persistent_workers() -> None:
    for num_workers, is_persistent, arrives in [(0, False, 7), (2, False, 7), (1, True, 1)]:
        given = Table(lambda table, index: table.scale * index, 4)
        dataset = RemoteDataset(given)
        options = {"num_workers": num_workers, "persistent_workers": is_persistent}
        loader = DataLoader(dataset, None, **options)
        assert [*loader] == [0, 1, 2, 3]
        dataset.scale = 7  # through the wrapper
        assert [*loader] == [arrives * number for number in range(4)]
        given.scale = 1  # or directly
        assert [*loader] == [0, 1, 2, 3]


def check_a_dataset_that_is_never_twice_the_same_is_refused() -> None:
    restless = Table(None, pickled=lambda: {"now": time.monotonic_ns()})
    with pytest.raises(TypeError, match="Table, 0.0 MB: its pickle differs each time, or"):
        next(iter(DataLoader(RemoteDataset(restless), num_workers=1)))


def check_a_host_that_is_sent_a_dataset_is_not_silent() -> None:
    def pickled() -> None:
        if multiprocessing.parent_process():  # in the DataLoader's worker
            time.sleep(1.5)

    heavy = Table(lambda table, index: index, 3, pickled=pickled)
    loader = DataLoader(RemoteDataset(heavy, timeout=1), num_workers=1, collate_fn=list)
    assert [*loader] == [[0], [1], [2]]


def check_what_fails_while_it_travels_is_an_error() -> None:
    def pickled() -> None:
        if Path("first").exists():
            raise OSError("no space left")
        Path("first").touch()

    with pytest.raises(OSError, match="no space left"):
        RemoteDataset(Table(None, pickled=pickled))[0]


# As torch does it


def check_get_worker_info_is_set_there() -> None:
    def tell(table: Table, index: int) -> tuple:
        info = get_worker_info()
        torch_s = torch.initial_seed() == info.seed
        return info.id, info.num_workers, info.seed, torch_s, info.dataset.scale, table.scale

    there, here = (
        [*DataLoader(dataset, None, num_workers=2, generator=torch.Generator().manual_seed(1))]
        for dataset in (RemoteDataset(Table(tell)), remote([], Table(tell)))
    )
    assert {(*sample[:2],) for sample in there} <= {(0, 4), (2, 4), (1, 2)}  # host + 2 * process
    assert {(*sample[:2],) for sample in here} == {(0, 2), (1, 2)}
    assert [sample[2:] for sample in there] == [sample[2:] for sample in here]
    assert {(*sample[3:],) for sample in there} == {(True, 1, 1)}
    assert len({sample[2] for sample in there}) == len(there)


def check_each_worker_there_has_one_thread() -> None:
    names = "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OPENCV_FOR_THREADS_NUM"
    threads = Table(lambda table, index: (torch.get_num_threads(), *map(os.environ.get, names)))
    assert RemoteDataset(threads)[0] == (1, "1", "1", "1")


# Spawned processes


def train(rank: int) -> None:
    noisy = Table(lambda table, index: index, 20, pickled=lambda: print("pickled", flush=True))
    dataset = RemoteDataset(noisy)
    assert dataset[3] == 3
    options = {"num_workers": 2, "multiprocessing_context": "fork"}
    for _ in range(2):
        assert sum(map(sum, DataLoader(dataset, **options))) == sum(range(20))


def check_a_dataset_goes_to_each_host_once() -> None:
    """Whichever process of the script asks for it, here two ranks, in whichever epoch."""
    torch.multiprocessing.spawn(train, nprocs=2)
    assert said().count("feed: Table, 0.0 MB was sent to data host ") == 2
    # In each epoch, each worker pickles it to see whether it has changed, and perhaps to upload it.
    assert said().count("pickled") <= 2 * 2 * 2 * 2


def check_spawned_workers_support_all_of_this_too() -> None:
    ten = 10
    dataset = Table(lambda table, n: (Pair(Animal(n % 2), torch.rand(2)), random.random(), ten), 20)

    def samples(dataset: Dataset, **options: Any) -> list:
        torch.manual_seed(1)
        loader = DataLoader(dataset, 3, shuffle=True, collate_fn=list, **options)
        return [*loader, *loader]

    expected = samples(remote([], dataset))
    for method in ("spawn", "forkserver"):
        options = {"num_workers": 2, "multiprocessing_context": method}
        assert_same(samples(RemoteDataset(dataset), **options), expected)
        assert_same(samples(remote([], dataset), **options), expected)


SPAWNED = [check_spawned_workers_support_all_of_this_too.__name__]
CHECKS = [name for name in checks(globals()) if name not in SPAWNED]


@pytest.fixture(scope="module")
def tracebacks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run(__file__, tmp_path_factory.mktemp("travel"), CHECKS)


@pytest.mark.parametrize("name", CHECKS)
def test_from_a_script(tracebacks, name):
    assert not tracebacks[name], tracebacks[name]


@pytest.mark.thorough
def test_spawned_workers_from_a_script(tmp_path: Path):
    [traceback] = run(__file__, tmp_path, SPAWNED).values()
    assert not traceback, traceback


def test_modules_that_pip_has_installed_are_not_the_script_s(tmp_path: Path, monkeypatch):
    """Also in a folder of another name, as with `pip install --target`."""
    for name in ("installed", "written"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}_module.py").touch()
        monkeypatch.syspath_prepend(tmp_path / name)
        importlib.import_module(f"{name}_module")
    (tmp_path / "installed" / "installed-1.0.dist-info").mkdir()
    own = modules.own_modules()
    assert "written_module" in own and "installed_module" not in own


def test_modules_may_be_imported_while_all_are_looked_at(monkeypatch):
    """As by the garbage collector, which may run a destructor at any time."""

    class Importing:
        @property
        def __class__(self) -> type:  # which isinstance asks for
            monkeypatch.setitem(sys.modules, "imported", sys)
            return object

    monkeypatch.setitem(sys.modules, "importing", Importing())
    assert "helpers.datasets" in modules.own_modules()


if __name__ == "__main__":
    main(checks(globals()))
