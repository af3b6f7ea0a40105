"""The loader: samples and errors from data hosts are those of a plain DataLoader."""

import functools
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import ChainDataset, ConcatDataset, DataLoader, Dataset, Subset, dataloader
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data.datapipes.iter import IterableWrapper

from feed import RemoteDataset, as_is
from feed.source import Source
from helpers import datasets
from helpers.data_hosts import DataHost, loader_of, remote, up
from helpers.datasets import THINGS, Draws, Made, Numbers, Table, assert_same

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker")


def two_epochs(dataset: Dataset, **options: Any) -> tuple[list, list]:
    """Return all batches, and the random numbers that the training draws after each."""
    datasets.seed_all()
    options = {"batch_size": 7, "shuffle": True, **options}
    loader, batches, drawn = DataLoader(dataset, **options), [], []
    for _ in range(2):
        for batch in loader:
            batches.append(batch)
            drawn.append(datasets.numbers_drawn())
    assert len(batches) == 2 * len(loader)
    return batches, drawn


# Which samples


def joined_there(*given: Any) -> Dataset:
    """Return a RemoteDataset whose collate_fn draws random numbers, too."""
    own = np.random.default_rng(3)

    def join(samples: list) -> tuple:
        return [index for index, *_ in samples], torch.rand(1) + own.random()

    return remote(*given, collate_fn=join)


# What a script makes of its Dataset
CASES = {
    **dict.fromkeys(["as it is", "persistent workers", "no batches"], remote),
    "Subset": lambda *on: Subset(remote(*on), [*range(3, 40)]),
    "ConcatDataset": lambda *on: ConcatDataset(2 * [remote(*on)]),
    "both": lambda *on: Subset(ConcatDataset([remote(*on)]), range(40)),
    "__getitems__": lambda hosts, _: remote(hosts, datasets.Together()),
    "callable with __getitems__": lambda hosts, _: remote(hosts, lambda: datasets.Together()),
    "callable": lambda hosts, _: remote(hosts, functools.partial(Made, 30)),
    "collate_fn": joined_there,
}
OPTIONS = {
    "persistent workers": {"persistent_workers": True},
    "no batches": {"batch_size": None},
    "collate_fn": {"collate_fn": as_is},
}
SAID = {
    "no batches": "the DataLoader asks for samples one by one: set batch_size",
    "ConcatDataset": "ConcatDataset asks Draws for samples one by one",
    "both": "Subset asks Draws for samples one by one",
    "__getitems__": "Together has __getitems__, so each batch is prepared by",
    "callable with __getitems__": "the Dataset has __getitems__, so each batch is",
}


@pytest.mark.parametrize(
    "case, host_count, num_workers",
    [
        *product(["as it is"], [0, 1, 3], [0, 3]),
        *product(["persistent workers"], [0, 3], [3]),
        *product([*CASES][2:], [3], [2]),
        ("no batches", 3, 0),
    ],
)
def test_samples_and_the_training_s_random_numbers_do_not_depend_on_who_prepares_them(
    hosts, capfd, case, host_count, num_workers
):
    make, options, words = CASES[case], OPTIONS.get(case, {}), SAID.get(case, "")
    dataset = Draws()
    states = dataset.generator.bit_generator.state, dataset.of_python.getstate()
    torch_state = dataset.transforms[0].generator.get_state()
    expected, _ = two_epochs(
        make([], dataset), **options, num_workers=int(case == "persistent workers")
    )
    capfd.readouterr()
    there = make(hosts[:host_count], dataset)
    batches, drawn = two_epochs(there, num_workers=num_workers, **options)
    assert_same(batches, expected)
    said = capfd.readouterr().out
    in_each_epoch = 2 if num_workers else 1
    assert said.count(words) == in_each_epoch if words else "one by one" not in said, said
    plain = {name: option for name, option in options.items() if name != "collate_fn"}
    indices, drawn_by_plain = two_epochs(range(len(there)), num_workers=num_workers, **plain)
    assert drawn == drawn_by_plain
    if make is remote:
        assert_same([batch[0] for batch in batches], indices)
    assert len({batch[1].flatten()[0].item() for batch in batches}) == len(batches)
    assert states == (dataset.generator.bit_generator.state, dataset.of_python.getstate())
    assert torch.equal(torch_state, dataset.transforms[0].generator.get_state())


def test_random_numbers_are_never_repeated():
    """Another epoch, another batch of the same samples and another seed all give new numbers."""
    loader, numbers = loader_of([], Draws(), [[0, 1]] * 20), []
    for seed in (0, 1):
        torch.manual_seed(seed)
        for batch in [*loader, *loader]:
            for _, pair, numpy_s, python_s, own, crops in batch:
                numbers += [*pair.tolist(), numpy_s, python_s, *own]
                numbers += [x for crop in crops for x in crop.tolist()]
    assert len(set(numbers)) == len(numbers) == 2 * 2 * 20 * 2 * 11


def test_an_epoch_goes_on_where_it_was_left(hosts):
    """With `start_at_batch`, and the same batches and generator seed in each run."""
    batches = [[*range(start, start + 7)] for start in range(0, 56, 7)]

    def rest(some: list[DataHost], first: int, num_workers: int) -> list:
        torch.manual_seed(3)
        loader = loader_of(some, Draws(), batches[first:], num_workers=num_workers)
        loader.dataset.start_at_batch(first)
        return list(loader)

    whole = rest([], 0, 0)
    for first in (1, 5, len(batches)):
        assert_same(rest(hosts, first, 2), whole[first:])
        assert_same(rest([], first, 0), whole[first:])


def test_anything_that_pickles_arrives_unchanged(hosts):
    for some in (hosts[:1], []):
        table = Table(lambda _, index: THINGS[index], len(THINGS))
        assert_same(sum(loader_of(some, table, batch_size=2), []), THINGS)


# What goes wrong


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_exception_arrives_in_its_place_as_torch_raises_it_and_the_loader_goes_on(
    hosts, num_workers
):
    numbers = [[0, 1], [2, datasets.RAISING], [3], [datasets.PANICKING], [4]]
    batches = iter(loader_of(hosts, datasets.TROUBLED, numbers, num_workers=num_workers))
    assert next(batches) == [0, 1]
    with pytest.raises(datasets.SampleIsBroken) as caught:
        next(batches)
    addresses = "|".join(host.address for host in hosts)
    assert caught.match(f"Caught SampleIsBroken on data host ({addresses})")
    assert "SampleIsBroken: a sample is broken: caf\udce9.jpg" in str(caught.value)
    assert 'raise SampleIsBroken("a sample is broken' in str(caught.value)  # the source line
    assert next(batches) == [3]
    with pytest.raises(RuntimeError, match="Panic: index out of bounds"):
        next(batches)
    assert [*batches] == [[4]]


class Both(torch.utils.data.IterableDataset):
    """Both iterable and map-style, like MosaicML's StreamingDataset."""

    __len__ = __getitem__ = __iter__ = None


def test_mistakes_raise_errors(hosts, monkeypatch):
    monkeypatch.delenv("HETERO_TOKEN", raising=False)
    there = remote(hosts, Numbers(), collate_fn=list)
    joined = {"batch_size": 7, "num_workers": 1}
    chain = functools.partial(ChainDataset, [])
    made = remote(hosts, functools.partial(Made, 30))
    splits = type("Splits", (dict,), {})(train=Numbers())  # as a DatasetDict
    for error, words, attempt in [
        (TypeError, "Both is both", lambda: RemoteDataset(Both())),
        (TypeError, "Wrapper.* is a datapipe", lambda: RemoteDataset(IterableWrapper([1]))),
        (TypeError, "collate_fn is for map-style", lambda: RemoteDataset(chain(), list)),
        (TypeError, "int is not a Dataset", lambda: RemoteDataset(3)),
        (TypeError, r"a Splits of .* as dataset\['train'\]", lambda: RemoteDataset(splits)),
        (TypeError, "use it once, after", lambda: RemoteDataset(RemoteDataset(Numbers()))),
        (TypeError, "returned an IterableDataset .ChainDataset", lambda: remote(hosts, chain)),
        (TypeError, "returned an IterableDataset .ChainDataset", lambda: remote([], chain)),
        (TypeError, "needs DataLoader.*collate_fn=as_is", lambda: DataLoader(there, **joined)),
        (TypeError, "needs DataLoader.*collate_fn=as_is", lambda: there),
        (AttributeError, "'length' cannot be reached: a callable makes", lambda: made.length),
        (AttributeError, "'length' cannot be reached", lambda: setattr(made, "length", 3)),
    ]:
        with pytest.raises(error, match=words):
            next(iter(attempt()))
    monkeypatch.setenv("HETERO_DATA_HOSTS", hosts[0].address)
    with pytest.raises(ValueError, match="needs HETERO_TOKEN"):
        RemoteDataset(Numbers())


@pytest.mark.parametrize("num_workers, context", [(0, None), (1, "spawn")])
def test_a_rank_that_would_train_alone_is_refused(hosts, monkeypatch, num_workers, context):
    """WORLD_SIZE says that there are other ranks; torch says whether they train together."""
    options = {"num_workers": num_workers, "multiprocessing_context": context}
    by_rank = Table(lambda table, index: (dist.get_rank(), dist.get_world_size()))
    loader = loader_of(hosts, by_rank, [[0], [1]], **options)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(Source, "were_together", False)
    with pytest.raises(RuntimeError, match="WORLD_SIZE is 2, but .* a process group of 1 here"):
        next(iter(loader))
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    try:
        assert list(loader) == [[(1, 2)], [(1, 2)]]
        validation = loader_of(hosts, Numbers(), [[0]], **options)
    finally:
        dist.destroy_process_group()
    assert next(iter(validation))[0]["index"] == 0  # rank 0 may do so after all ranks have trained


LOADER, LOOP = dataloader._BaseDataLoaderIter, torch_worker._worker_loop
NO_NUMBER = "cannot find the number of .* use a torch that"


@pytest.mark.parametrize(
    "functions, name, num_workers, words",
    [
        ([LOOP], "idx", 1, NO_NUMBER),
        ([LOOP], "base_seed", 1, NO_NUMBER),
        ([LOOP], "init_fn", 1, NO_NUMBER),
        ([LOOP], "num_workers", 1, NO_NUMBER),
        ([LOOP], "worker_id", 1, NO_NUMBER),
        ([LOADER.__init__, LOADER._reset, LOADER.__next__], "_base_seed", 0, NO_NUMBER),
        ([LOADER.__init__, LOADER._reset, LOADER.__next__], "_num_yielded", 0, NO_NUMBER),
        (
            [torch_worker.get_worker_info],
            "_worker_info",
            0,
            "cannot set what get_worker_info.* use",
        ),
    ],
)
def test_a_torch_with_other_variables_or_attributes_is_refused(
    monkeypatch, functions, name, num_workers, words
):
    monkeypatch.setattr(torch_worker, "new_worker_info", None, raising=False)
    for function in functions:
        code = function.__code__
        names = {
            kind: tuple(other if other != name else f"new{name}" for other in getattr(code, kind))
            for kind in ("co_varnames", "co_names")
        }
        monkeypatch.setattr(function, "__code__", code.replace(**names))
    with pytest.raises(RuntimeError, match=words):
        next(iter(loader_of([], Numbers(), [[0]], num_workers=num_workers)))


@pytest.mark.thorough
@pytest.mark.parametrize("num_workers, changed", [(0, {"LENGTH": "31"}), (1, {"SHIFT": "1"})])
def test_hosts_whose_callables_make_different_datasets_are_refused(start, num_workers, changed):
    hosts = up(start(), start(environment=changed))
    made = functools.partial(Made, 30)
    words = "data hosts have different Datasets: that of .* has .* samples, that of"
    with pytest.raises(ValueError, match=words):
        list(loader_of(hosts, made, [[0]] * 999, num_workers=num_workers))
