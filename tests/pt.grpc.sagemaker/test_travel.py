"""How Datasets travel to data hosts from a script, whose classes and functions are in `__main__`.

Run as a program, this file is that script: it runs the functions marked `@of_a_script`, each of
which is a test, and writes their outcomes to a file.
"""

import copy
import enum
import functools
import io
import json
import mmap
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, get_worker_info

from feed import RemoteDataset
from helpers.data_hosts import DataHost, environment_of, remote, up
from helpers.datasets import assert_same

pytestmark = pytest.mark.timeout(600)  # the script runs in the first test that asks for it
Said = Callable[[], str]
CHECKS: list[str] = []
MODEL = torch.nn.Linear(100, 100)  # the training's, which no Dataset needs
FACTOR = 3


def of_a_script(check: Callable[[Said], None]) -> Callable[[Said], None]:
    CHECKS.append(check.__name__)
    return check


def run(folder: Path, *names: str) -> dict[str, str]:
    """Run functions (default: all) in a script with two data hosts; return "" or tracebacks."""
    hosts = up(DataHost(workers=2), DataHost(workers=1))
    command = [sys.executable, __file__, folder / "outcomes", *names]
    environment = environment_of(hosts) | {"TMPDIR": str(folder)}
    subprocess.run(command, env=environment, check=True)
    for host in hosts:
        host.kill()
    return json.loads((folder / "outcomes").read_text())


def main() -> None:
    outcomes = {}
    for name in sys.argv[2:] or CHECKS:
        with tempfile.TemporaryFile() as output:  # of this process and of DataLoader workers
            os.dup2(output.fileno(), 1)
            try:
                globals()[name](lambda file=output: os.pread(file.fileno(), 1 << 20, 0).decode())
                outcomes[name] = ""
            except BaseException:
                outcomes[name] = traceback.format_exc()
    Path(sys.argv[1]).write_text(json.dumps(outcomes))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run(tmp_path_factory.mktemp("travel"))


class Table(Dataset):
    """A Dataset of the script."""

    classes = ("cat", "dog")

    def __init__(self, values: Any = range(20), transform: Callable = lambda value: value):
        self.values, self.transform, self.scale = values, transform, 1

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> Any:
        return self.transform(self.values[index])


class Sample:
    """A class of the script."""

    def __init__(self, value: int):
        self.value, self.more = value, [Pair(Animal(value % 2), torch.full((999,), value))]


class Animal(enum.Enum):
    CAT, DOG = 0, 1


class Pair(NamedTuple):
    animal: Animal
    image: torch.Tensor


def tripled(value: int) -> int:
    """A function of the script that uses a global variable."""
    return FACTOR * value


def here_and_there(dataset: Dataset, **options: Any) -> list:
    """Return the samples from data hosts, which must equal those prepared here."""
    options = {"batch_size": 4, "collate_fn": list, **options}
    torch.manual_seed(1)
    there = list(DataLoader(RemoteDataset(dataset), **options, num_workers=1))
    torch.manual_seed(1)
    assert_same(there, list(DataLoader(remote([], dataset), **options)))
    return [sample for batch in there for sample in batch]


# Code


@of_a_script
def lambdas_closures_and_functions(said: Said) -> None:
    ten = 10
    assert here_and_there(Table(transform=lambda value: tripled(value) + ten)) == [
        3 * value + 10 for value in range(20)
    ]
    partial = functools.partial(lambda a, b: (b, a), Path("a"))
    assert here_and_there(Table(transform=partial))[1] == (1, Path("a"))
    Inner = type("Inner", (Table,), {})
    Outer = type("Outer", (Table,), {"__annotations__": {"values": Inner}})
    here_and_there(Outer(Inner()))  # pickling an object of a class leaves a mark in the class


@of_a_script
def classes_of_the_script_come_back_as_they_are_here(said: Said) -> None:
    dataset = RemoteDataset(Table(transform=Sample))
    for number, [sample] in enumerate(DataLoader(dataset, collate_fn=list, num_workers=1)):
        assert type(sample) is Sample and sample.value == number
        assert type(sample.more[0]) is Pair and sample.more[0].image.sum() == 999 * number
        assert sample.more[0].animal in (Animal.CAT, Animal.DOG)


@of_a_script
def classes_of_one_name_stay_apart(said: Said) -> None:
    def times(factor: int) -> Dataset:
        class Local(Table):
            def __getitem__(self, index: int) -> int:
                return factor * index

        return Local(range(4))

    both = ConcatDataset([times(1), times(2)])
    assert here_and_there(both) == [0, 1, 2, 3, 0, 2, 4, 6]


@of_a_script
def exceptions_of_the_script_come_back_as_they_are_here(said: Said) -> None:
    def transform(value: int) -> int:
        raise Unusable(f"value {value}")

    with pytest.raises(Unusable, match="Unusable: value 0"):
        next(iter(DataLoader(RemoteDataset(Table(transform=transform)), num_workers=1)))


class Unusable(Exception):
    pass


@of_a_script
def globals_that_travel_along_are_named(said: Said) -> None:
    def features(value: int) -> int:
        return value + MODEL.in_features

    assert here_and_there(Table(transform=features))[0] == 100
    assert "globals of the script that it uses (MODEL (Linear) in " in said()
    assert f"features, line {features.__code__.co_firstlineno})" in said()


# Data


@of_a_script
def tensors_travel_without_what_they_are_views_of(said: Said) -> None:
    whole = torch.rand(1000, 250)
    rows = [*whole, whole.t(), whole.view(torch.int32), whole.to(torch.cfloat).conj()]
    rows += [whole[:0], whole[0, 0].expand(9), torch.tensor(3), whole.bfloat16()]
    assert_same(here_and_there(Table(rows)), rows)
    assert "feed: Table, 5.5 MB" in said()


@of_a_script
def memory_mapped_files_stay_files(said: Said) -> None:
    path = Path(tempfile.gettempdir(), "numbers.npy")
    np.save(path, np.arange(80_000).reshape(80, 100, 10))
    whole = np.load(path, mmap_mode="r")
    arrays = [whole, whole[7], whole[10:50:2, ::-1, 3:5], whole.T, whole[::-1, :, ::-3], whole[3:3]]
    arrays += [np.memmap(path, "i4", "r", offset=1024, shape=(5, 3))[2:], whole[1, 1, 1:2]]

    def tell(array: np.ndarray) -> tuple:
        base = array
        while isinstance(base, np.ndarray):
            base = base.base
        return isinstance(base, mmap.mmap) or not array.size, str(array.dtype), array.tolist()

    assert_same(here_and_there(Table(arrays, tell)), [tell(array) for array in arrays])
    assert "feed: Table, 0.0 MB" in said()


def refused(dataset: Dataset, words: str, **options: Any) -> None:
    with pytest.raises(TypeError, match=words):
        next(iter(DataLoader(RemoteDataset(dataset), **options)))


@of_a_script
def what_cannot_travel_is_named(said: Said) -> None:
    file = io.FileIO(os.devnull)
    refused(
        Table(transform=lambda value: file.name),
        r"dataset\.transform -> file cannot be sent .*FileIO.*: open it when it is first used, or",
    )
    parts = [{"a": (0, file)}]
    refused(Table(transform=parts), r"dataset\.transform\[0\]\['a'\]\[1\] cannot be sent")
    path = Path(tempfile.gettempdir(), "written")
    path.write_bytes(bytes(80))
    for mode in ("r+", "c"):  # mapped files that can be written to
        refused(Table(np.memmap(path, "i8", mode)), r"dataset\.values cannot be sent .*mode='r'")
    init = {"worker_init_fn": lambda number: file.read(), "num_workers": 1}
    refused(Table(), r"worker_init_fn -> file cannot be .*: open it when it is first used$", **init)


# Changes


@of_a_script
def attributes_are_the_dataset_s(said: Said) -> None:
    table = Table()
    dataset = RemoteDataset(table)
    assert dataset.classes == ("cat", "dog") and dataset.transform(3) == 3
    dataset.scale = 5
    assert table.scale == 5 and not hasattr(dataset, "mosaic")
    assert isinstance(dataset, Dataset) and len(dataset) == 20
    assert copy.deepcopy(dataset)[3] == 3


class Scaled(Table):
    def __getitem__(self, index: int) -> int:
        return self.scale * index


@of_a_script
def what_is_changed_between_epochs_arrives_but_not_with_persistent_workers(said: Said) -> None:
    for num_workers, is_persistent, arrives in [(0, False, 7), (2, False, 7), (1, True, 1)]:
        given = Scaled(range(4))
        dataset = RemoteDataset(given)
        loader = DataLoader(
            dataset, None, num_workers=num_workers, persistent_workers=is_persistent
        )
        assert [*loader] == [0, 1, 2, 3]
        dataset.scale = 7  # through the wrapper
        assert [*loader] == [arrives * number for number in range(4)]
        given.scale = 1  # or directly
        assert [*loader] == [0, 1, 2, 3]


@of_a_script
def a_dataset_that_is_never_twice_the_same_is_refused(said: Said) -> None:
    class Restless(Table):
        def __getstate__(self) -> dict:
            return {**self.__dict__, "now": time.monotonic_ns()}

    with pytest.raises(TypeError, match="Restless, 0.0 MB: its pickle differs each time, or"):
        next(iter(DataLoader(RemoteDataset(Restless()), num_workers=1)))


class Heavy(Table):
    def __getstate__(self) -> dict:
        if multiprocessing.parent_process():  # in the DataLoader's worker
            time.sleep(1.5)
        return self.__dict__


@of_a_script
def a_host_that_is_sent_a_dataset_is_not_silent(said: Said) -> None:
    loader = DataLoader(RemoteDataset(Heavy(range(3)), timeout=1), num_workers=1, collate_fn=list)
    assert [*loader] == [[0], [1], [2]]


TIMES = []


class Once(Table):
    def __getstate__(self) -> dict:
        TIMES.append(time.monotonic())
        if len(TIMES) > 1:
            raise OSError("no space left")
        return self.__dict__


@of_a_script
def what_fails_while_it_travels_is_an_error(said: Said) -> None:
    with pytest.raises(OSError, match="no space left"):
        RemoteDataset(Once())[0]


# As torch does it


class Telling(Table):
    def __getitem__(self, index: int) -> tuple:
        info = get_worker_info()
        torch_s = torch.initial_seed() == info.seed
        return info.id, info.num_workers, info.seed, torch_s, info.dataset.scale, self.scale


@of_a_script
def get_worker_info_is_set_there(said: Said) -> None:
    there, here = (
        [*DataLoader(dataset, None, num_workers=2, generator=torch.Generator().manual_seed(1))]
        for dataset in (RemoteDataset(Telling()), remote([], Telling()))
    )
    assert {(*sample[:2],) for sample in there} <= {(0, 4), (2, 4), (1, 2)}  # host + 2 * process
    assert {(*sample[:2],) for sample in here} == {(0, 2), (1, 2)}
    assert [sample[2:] for sample in there] == [sample[2:] for sample in here]
    assert {(*sample[3:],) for sample in there} == {(True, 1, 1)}
    assert len({sample[2] for sample in there}) == len(there)


class Threads(Table):
    def __getitem__(self, index: int) -> tuple:
        names = "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OPENCV_FOR_THREADS_NUM"
        return torch.get_num_threads(), *map(os.environ.get, names)


@of_a_script
def each_worker_there_has_one_thread(said: Said) -> None:
    assert RemoteDataset(Threads())[0] == (1, "1", "1", "1")


# Spawned processes


class Noisy(Table):
    def __getstate__(self) -> dict:
        print("pickled", flush=True)
        return self.__dict__


def train(rank: int) -> None:
    dataset = RemoteDataset(Noisy(range(20)))
    assert dataset[3] == 3
    options = {"num_workers": 2, "multiprocessing_context": "fork"}
    for _ in range(2):
        assert sum(map(sum, DataLoader(dataset, **options))) == sum(range(20))


@of_a_script
def a_dataset_goes_to_each_host_once(said: Said) -> None:
    """Whichever process of the script asks for it, here two ranks, in whichever epoch."""
    torch.multiprocessing.spawn(train, nprocs=2)
    assert said().count("feed: Noisy, 0.0 MB was sent to data host ") == 2
    # In each epoch, each worker pickles it to see whether it has changed, and perhaps to upload it.
    assert said().count("pickled") <= 2 * 2 * 2 * 2


def workers_that_are_spawned(said: Said) -> None:
    """Spawned workers support all of this, too."""
    ten = 10
    dataset = Table(transform=lambda n: (Pair(Animal(n % 2), torch.rand(2)), random.random(), ten))

    def samples(dataset: Dataset, **options: Any) -> list:
        torch.manual_seed(1)
        loader = DataLoader(dataset, 3, shuffle=True, collate_fn=list, **options)
        return [*loader, *loader]

    expected = samples(remote([], dataset))
    for method in ("spawn", "forkserver"):
        options = {"num_workers": 2, "multiprocessing_context": method}
        assert_same(samples(RemoteDataset(dataset), **options), expected)
        assert_same(samples(remote([], dataset), **options), expected)


@pytest.mark.parametrize("name", CHECKS)
def test_from_a_script(outcomes, name):
    assert not outcomes[name], outcomes[name]


@pytest.mark.thorough
def test_spawned_workers_from_a_script(tmp_path: Path):
    [outcome] = run(tmp_path, workers_that_are_spawned.__name__).values()
    assert not outcome, outcome


if __name__ == "__main__":
    main()
