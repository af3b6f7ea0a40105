"""How Datasets travel to data hosts, from a script, whose classes and functions are of `__main__`.

Run as a program, this file is that script: it runs the functions with `@of_a_script`, of which each
is a test, and writes into a file how they ended.
"""

import copy
import enum
import functools
import io
import json
import mmap
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, get_worker_info

sys.path.insert(0, str(Path(__file__).parents[1]))

from data_hosts import TOKEN, DataHost, Made, assert_same, loader_of, remote, up  # noqa: E402
from feed import RemoteDataset  # noqa: E402

Said = Callable[[], str]
CHECKS: dict[str, Callable[[Said], None]] = {}
MODEL = torch.nn.Linear(100, 100)  # of the training: what a Dataset has no need of
FACTOR = 3


def of_a_script(check: Callable[[Said], None]) -> Callable[[Said], None]:
    CHECKS[check.__name__] = check
    return check


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """How the functions ended in a script with two data hosts: nothing, or a traceback."""
    hosts = up(DataHost(workers=2), DataHost(workers=1))
    path = tmp_path_factory.mktemp("travel") / "outcomes"
    subprocess.run(
        [sys.executable, __file__, path],
        env={
            **os.environ,
            "HETERO_DATA_HOSTS": ",".join(host.address for host in hosts),
            "HETERO_TOKEN": TOKEN,
            "TMPDIR": str(path.parent),
        },
        check=True,
        timeout=100,
    )
    yield json.loads(path.read_text())
    for host in hosts:
        host.kill()


def main() -> None:
    outcomes = {}
    for name, check in CHECKS.items():
        with tempfile.TemporaryFile() as output:  # of this process and the DataLoader's
            os.dup2(output.fileno(), 1)
            try:
                check(lambda output=output: os.pread(output.fileno(), 1 << 20, 0).decode())
                outcomes[name] = ""
            except BaseException:
                outcomes[name] = traceback.format_exc()
    Path(sys.argv[1]).write_text(json.dumps(outcomes))


@pytest.mark.parametrize("name", CHECKS)
def test_from_a_script(outcomes, name):
    assert not outcomes[name], outcomes[name]


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
    """A function of the script, which uses a global one."""
    return FACTOR * value


def here_and_there(dataset: Dataset, **options: Any) -> list:
    """Return the samples from data hosts, which must be those of no host."""
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

    try:
        next(iter(DataLoader(RemoteDataset(Table(transform=transform)), num_workers=1)))
    except Unusable as error:
        assert "Unusable: value 0" in str(error)
    else:
        raise AssertionError


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
def a_dataset_goes_to_each_host_once(said: Said) -> None:
    """Whichever process of the script asks for it, in whichever epoch."""
    dataset = RemoteDataset(Table([*range(7)]))
    loader = DataLoader(dataset, batch_size=1, num_workers=2)
    assert sorted([*loader, *loader, dataset[3]]) == sorted([*range(7), *range(7), 3])
    assert said().count("feed: Table, 0.0 MB has gone to data host ") == 2


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


@of_a_script
def memory_mapped_files_that_may_be_written_to_are_refused(said: Said) -> None:
    for mode in ("r+", "c"):
        path = Path(tempfile.gettempdir(), "written")
        path.write_bytes(bytes(80))
        refused(Table(np.memmap(path, "i8", mode)), r"dataset\.values cannot travel .*mode='r'")


def refused(dataset: Dataset, words: str, **options: Any) -> None:
    with pytest.raises(TypeError, match=words):
        next(iter(DataLoader(RemoteDataset(dataset), **options)))


@of_a_script
def what_cannot_travel_is_named(said: Said) -> None:
    lock, file = threading.Lock(), io.FileIO(os.devnull)
    refused(
        Table(transform=lambda value: file.name),
        r"dataset\.transform -> file cannot travel .*FileIO.*: open it when it is first used, or",
    )
    parts = [{"a": (0, lock)}]
    refused(Table(transform=parts), r"dataset\.transform\[0\]\['a'\]\[1\] cannot travel")
    init = {"worker_init_fn": lambda number: lock.locked()}
    refused(Table(), r"worker_init_fn -> lock cannot travel", num_workers=1, **init)


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
        given.scale = 1  # or not
        assert [*loader] == [0, 1, 2, 3]


@of_a_script
def a_dataset_that_is_never_twice_the_same_is_refused(said: Said) -> None:
    class Restless(Table):
        def __getstate__(self) -> dict:
            return {**self.__dict__, "now": time.monotonic_ns()}

    with pytest.raises(TypeError, match="Restless, 0.0 MB: it changes while it travels, or"):
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


# Callables


def test_a_callable_makes_the_dataset_in_each_worker_of_the_data_hosts(start):
    """Not before they are forked: an open file would be one for all."""
    hosts = up(start(workers=3), start())
    dataset = remote(hosts, functools.partial(Made, 30))
    assert len(dataset) == 30
    options = {"batch_size": 7, "shuffle": True, "collate_fn": list}
    torch.manual_seed(1)
    expected = list(DataLoader(remote([], lambda: Made(30)), **options))
    for num_workers in (0, 2):
        torch.manual_seed(1)
        assert_same(list(DataLoader(dataset, num_workers=num_workers, **options)), expected)
    for attempt in (lambda: dataset.length, lambda: setattr(dataset, "length", 3)):
        with pytest.raises(AttributeError, match="'length' cannot be reached: a callable makes"):
            attempt()
    with pytest.raises(FileNotFoundError, match="Caught FileNotFoundError on data host"):
        len(remote(hosts, functools.partial(np.load, "/not/there")))


def test_hosts_whose_callables_make_different_datasets_are_refused(start):
    others = [
        start(environment={name: value}) for name, value in [("LENGTH", "31"), ("SHIFT", "1")]
    ]
    first, *others = up(start(), *others)
    for num_workers, other in enumerate(others):
        made = functools.partial(Made, 30)
        loader = loader_of([first, other], made, [[0]] * 999, num_workers=num_workers)
        words = "data hosts have different Datasets: that of .* has .* samples, that of"
        with pytest.raises(ValueError, match=words):
            list(loader)


# As torch does it


class Telling(Table):
    def __getitem__(self, index: int) -> tuple:
        info = get_worker_info()
        torch_s = torch.initial_seed() == info.seed
        return info.id, info.num_workers, info.seed, torch_s, info.dataset.scale, self.scale


@of_a_script
def get_worker_info_tells_the_same_there(said: Said) -> None:
    samples = here_and_there(Telling())
    assert {sample[:2] for sample in samples} == {(0, 1)}
    assert {sample[3:] for sample in samples} == {(True, 1, 1)}
    assert len({sample[2] for sample in samples}) == len(samples)


@of_a_script
def worker_init_fn_runs_on_data_hosts_and_in_the_dataloader_s_workers(said: Said) -> None:
    def init(number: int) -> None:
        print("initialised", number, flush=True)
        get_worker_info().dataset.scale += 1

    options = {"collate_fn": list, "num_workers": 1, "worker_init_fn": init}
    assert {sample[4:] for [sample] in DataLoader(RemoteDataset(Telling()), **options)} == {(2, 2)}
    assert said().count("initialised 0") == 1


class Threads(Table):
    def __getitem__(self, index: int) -> tuple:
        names = "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OPENCV_FOR_THREADS_NUM"
        return torch.get_num_threads(), *map(os.environ.get, names)


@of_a_script
def each_worker_there_has_one_thread(said: Said) -> None:
    assert RemoteDataset(Threads())[0] == (1, "1", "1", "1")


@of_a_script
def a_worker_init_fn_that_raises_there_is_called_again(said: Said) -> None:
    def init(number: int) -> None:
        if not multiprocessing.parent_process():  # not in the DataLoader's worker
            raise LookupError("not yet")

    batches = iter(DataLoader(RemoteDataset(Table()), num_workers=1, worker_init_fn=init))
    for _ in range(9):
        with pytest.raises(LookupError, match="not yet"):
            next(batches)


# Spawned processes


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_spawned_workers_do_it_all_too(tmp_path, method):
    [host] = up(DataHost(workers=2))
    program = tmp_path / "train.py"
    program.write_text(SPAWNING.format(path=sys.path, method=method))
    environment = {"HETERO_DATA_HOSTS": host.address, "HETERO_TOKEN": TOKEN}
    subprocess.run(
        [sys.executable, program], env={**os.environ, **environment}, check=True, timeout=100
    )
    host.kill()


SPAWNING = """
import random, sys
import numpy as np, torch
from torch.utils.data import DataLoader, Dataset
sys.path[:0] = {path!r}
from data_hosts import assert_same, remote
from feed import RemoteDataset

class Sample:
    def __init__(self, value):
        self.value = value

class OfTheScript(Dataset):
    def __init__(self, transform):
        self.transform, self.rng = transform, np.random.default_rng(0)

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return self.transform(index), torch.rand(2), random.random(), self.rng.random()

def samples_of(dataset, **options):
    torch.manual_seed(1)
    loader = DataLoader(dataset, 3, shuffle=True, collate_fn=list, **options)
    samples = [sample for _ in range(2) for batch in loader for sample in batch]
    return [(sample[0].value, *sample[1:]) for sample in samples]

def start():
    offset = 5
    dataset = OfTheScript(lambda index: Sample(index + offset))
    expected = samples_of(remote([], dataset))
    options = {{"num_workers": 2, "multiprocessing_context": {method!r}}}
    assert_same(samples_of(RemoteDataset(dataset), **options), expected)
    assert_same(samples_of(remote([], dataset), **options), expected)

if __name__ == "__main__":
    start()
"""


if __name__ == "__main__":
    main()
