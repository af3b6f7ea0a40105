"""The loader: samples and errors from data hosts are those of a plain DataLoader."""

import functools
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Subset,
    dataloader,
)
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data.datapipes.iter import IterableWrapper

from feed import RemoteDataset, as_is
from feed.source import Source
from helpers.data_hosts import DataHost, loader_of, remote, up
from helpers.datasets import (
    PANICKING,
    RAISING,
    SAMPLES,
    THINGS,
    ByRank,
    Draws,
    Made,
    Numbers,
    SampleIsBroken,
    Things,
    Together,
    Troubled,
    assert_same,
    numbers_drawn,
    seed_all,
)

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker")
BATCH_SIZE = 7


def two_epochs(dataset: Dataset, **options: Any) -> tuple[list, list]:
    """Return all batches, and the random numbers that the training draws after each."""
    seed_all()
    loader, batches, drawn = DataLoader(dataset, BATCH_SIZE, shuffle=True, **options), [], []
    for _ in range(2):
        for batch in loader:
            batches.append(batch)
            drawn.append(numbers_drawn())
    assert len(batches) == 2 * len(loader)
    return batches, drawn


# Which samples


@pytest.fixture(scope="module")
def made_here() -> list:
    return two_epochs(remote([], Draws()))[0]


@pytest.mark.parametrize("num_workers", [0, 1, 3])
@pytest.mark.parametrize("host_count", [0, 1, 3])
def test_samples_and_the_training_s_random_numbers_do_not_depend_on_who_prepares_them(
    hosts, made_here, host_count, num_workers
):
    dataset = Draws()
    states = dataset.generator.bit_generator.state, dataset.of_python.getstate()
    torch_state = dataset.transforms[0].generator.get_state()
    there = remote(hosts[:host_count], dataset)
    batches, drawn = two_epochs(there, num_workers=num_workers)
    assert_same(batches, made_here)
    assert drawn == two_epochs(range(SAMPLES))[1]  # as with a plain DataLoader
    assert states == (dataset.generator.bit_generator.state, dataset.of_python.getstate())
    assert torch.equal(torch_state, dataset.transforms[0].generator.get_state())


def test_persistent_workers_draw_new_numbers_in_each_epoch_and_the_same_ones_everywhere(hosts):
    runs = [
        two_epochs(remote(some, Draws()), num_workers=workers, persistent_workers=True)[0]
        for some, workers in [([], 1), (hosts[:1], 2), (hosts, 3)]
    ]
    assert_same(runs[1], runs[0])
    assert_same(runs[2], runs[0])
    firsts = {batch[1][0, 0].item() for batch in runs[0]}
    assert len(firsts) == len(runs[0])


@pytest.mark.parametrize("world_size", [1, 3])
def test_samples_without_random_numbers_are_those_of_a_plain_dataloader(hosts, world_size):
    for shuffle, drop_last, rank in product([False, True], [False, True], range(world_size)):
        sampler = DistributedSampler(
            range(SAMPLES), world_size, rank, shuffle, seed=5, drop_last=drop_last
        )
        options = {"sampler": sampler, "drop_last": drop_last, "batch_size": BATCH_SIZE}
        for epoch in range(2):
            sampler.set_epoch(epoch)
            expected = list(DataLoader(Numbers(), **options))
            assert_same(list(DataLoader(remote(hosts, Numbers()), **options)), expected)
            assert_same(list(DataLoader(remote([], Numbers()), **options)), expected)


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
    sampler = RandomSampler(range(SAMPLES), generator=torch.Generator().manual_seed(1))
    batches = list(BatchSampler(sampler, BATCH_SIZE, drop_last=False))

    def rest(some: list[DataHost], first: int, num_workers: int) -> list:
        loader = loader_of(
            some,
            Draws(),
            batches[first:],
            num_workers=num_workers,
            generator=torch.Generator().manual_seed(3),
        )
        loader.dataset.start_at_batch(first)
        return list(loader)

    whole = rest([], 0, 0)
    for first in (1, 5, len(batches)):
        assert_same(rest(hosts, first, 2), whole[first:])
        assert_same(rest([], first, 0), whole[first:])


def test_loaders_may_be_used_at_the_same_time(hosts):
    """Training and validation, for example: here validation runs several times in an epoch."""
    training = loader_of(hosts, Draws(), batch_size=5, num_workers=1)
    validation = loader_of(hosts, Numbers(), batch_size=9)
    torch.manual_seed(0)
    expected = list(loader_of([], Draws(), batch_size=5))
    torch.manual_seed(0)
    for number, batch in enumerate(training):
        assert_same(batch, expected[number])
        if number % 6 == 0:
            assert [sample["index"] for batch in validation for sample in batch] == [*range(61)]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda dataset: Subset(dataset, [*range(3, 40)]),
        lambda dataset: ConcatDataset([dataset, dataset]),
        lambda dataset: Subset(ConcatDataset([dataset]), [*range(0, 40, 2)]),
    ],
    ids=["Subset", "ConcatDataset", "both"],
)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_torch_s_datasets_may_wrap_it(hosts, wrap, num_workers):
    expected, _ = two_epochs(wrap(remote([], Draws())))
    assert_same(two_epochs(wrap(remote(hosts, Draws())), num_workers=num_workers)[0], expected)


def test_samples_that_are_not_spread_are_the_same_and_the_log_says_so(hosts, capfd):
    def samples(some: list[DataHost], dataset: Dataset, **options: Any) -> list:
        torch.manual_seed(5)
        return list(loader_of(some, dataset, **options))

    for dataset, options, words in [
        (Draws(), {"batch_size": None, "collate_fn": None}, "one by one: set batch_size"),
        (Together(), {"batch_size": 7}, "Together has __getitems__, so each batch is prepared by"),
        (lambda: Together(), {"batch_size": 7}, "the Dataset has __getitems__, so each batch is"),
    ]:
        expected = samples([], dataset, **options)
        capfd.readouterr()
        assert_same(samples(hosts, dataset, **options, num_workers=2), expected)
        assert capfd.readouterr().out.count(words) == 1
    assert {count for batch in expected[:-1] for _, count, _ in batch} == {7}


# What a sample may be


def test_anything_that_pickles_arrives_unchanged(hosts):
    for some in (hosts[:1], []):
        batches = list(loader_of(some, Things(), batch_size=2))
        assert_same([sample for batch in batches for sample in batch], THINGS)


def test_collate_fn_may_run_on_data_hosts(hosts):
    """Even a collate_fn that draws random numbers."""

    own = np.random.default_rng(3)

    def join(samples: list) -> tuple:
        return torch.stack([pair for _, pair, *_ in samples]), torch.rand(1) + own.random()

    expected, _ = two_epochs(remote([], Draws(), collate_fn=join), collate_fn=as_is)
    assert len({float(number) for _, number in expected}) == len(expected)
    for num_workers in (0, 2):
        dataset = remote(hosts, Draws(), collate_fn=join)
        actual, _ = two_epochs(dataset, collate_fn=as_is, num_workers=num_workers)
        assert_same(actual, expected)


# What goes wrong


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_exception_arrives_in_its_place_as_torch_raises_it_and_the_loader_goes_on(
    hosts, num_workers
):
    numbers = [[0, 1], [2, RAISING], [3], [PANICKING], [4]]
    batches = iter(loader_of(hosts, Troubled(), numbers, num_workers=num_workers))
    assert next(batches) == [0, 1]
    with pytest.raises(SampleIsBroken) as caught:
        next(batches)
    addresses = "|".join(host.address for host in hosts)
    assert caught.match(f"Caught SampleIsBroken on data host ({addresses})")
    assert "SampleIsBroken: a sample is broken: caf\udce9.jpg" in str(caught.value)
    assert 'raise SampleIsBroken("a sample is broken' in str(caught.value)  # the source line
    assert next(batches) == [3]
    with pytest.raises(RuntimeError, match="Panic: index out of bounds"):
        next(batches)
    assert [*batches] == [[4]]


class Endless(IterableDataset):
    def __iter__(self) -> Iterator:
        return iter(())


class Both(Endless):
    """Both iterable and map-style, like MosaicML's StreamingDataset."""

    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        return 3


def test_mistakes_raise_errors(hosts, monkeypatch):
    monkeypatch.delenv("HETERO_TOKEN", raising=False)
    monkeypatch.setenv("HETERO_DATA_HOSTS", hosts[0].address)
    there = remote(hosts, Numbers(), collate_fn=list)
    joined = {"batch_size": 7, "num_workers": 1}
    chain = functools.partial(ChainDataset, [])
    pipe = IterableWrapper([1])
    for error, words, attempt in [
        (TypeError, "Both is both", lambda: RemoteDataset(Both())),
        (TypeError, "IterableWrapper.* is a datapipe", lambda: RemoteDataset(pipe)),
        (TypeError, "collate_fn is for map-style", lambda: RemoteDataset(Endless(), list)),
        (TypeError, "int is not a Dataset", lambda: RemoteDataset(3)),
        (TypeError, "returned an IterableDataset .ChainDataset", lambda: remote(hosts, chain)),
        (TypeError, "returned an IterableDataset .ChainDataset", lambda: remote([], chain)),
        (ValueError, "needs HETERO_TOKEN", lambda: RemoteDataset(Numbers())),
        (TypeError, "needs DataLoader.*collate_fn=as_is", lambda: DataLoader(there, **joined)),
        (TypeError, "needs DataLoader.*collate_fn=as_is", lambda: there),
        (TypeError, "needs DataLoader.*collate_fn=as_is", lambda: DataLoader(there, None)),
    ]:
        with pytest.raises(error, match=words):
            next(iter(attempt()))


@pytest.mark.parametrize(("num_workers", "context"), [(0, None), (1, "fork"), (1, "spawn")])
def test_a_rank_that_would_train_alone_is_refused(hosts, monkeypatch, num_workers, context):
    """WORLD_SIZE says that there are other ranks; torch says whether they train together."""
    options = {"num_workers": num_workers, "multiprocessing_context": context}
    loader = loader_of(hosts, ByRank(), [[0], [1]], **options)
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


def rename(monkeypatch, functions: list, name: str) -> None:
    """Give a variable or attribute that these functions of torch use another name."""
    for function in functions:
        code = function.__code__
        names = {
            kind: tuple(other if other != name else f"new{name}" for other in getattr(code, kind))
            for kind in ("co_varnames", "co_names")
        }
        monkeypatch.setattr(function, "__code__", code.replace(**names))


@pytest.mark.parametrize("name", ["idx", "base_seed", "init_fn", "num_workers", "worker_id"])
def test_a_torch_whose_workers_have_other_variables_is_refused(hosts, monkeypatch, name):
    rename(monkeypatch, [torch_worker._worker_loop], name)
    for some in ([], hosts[:1]):
        with pytest.raises(RuntimeError, match="cannot find the number of .* use a torch that"):
            next(iter(loader_of(some, Numbers(), [[0]], num_workers=1)))


@pytest.mark.parametrize("name", ["_base_seed", "_num_yielded"])
def test_a_torch_whose_dataloaders_have_other_attributes_is_refused(monkeypatch, name):
    of_loaders = dataloader._BaseDataLoaderIter
    rename(monkeypatch, [of_loaders.__init__, of_loaders._reset, of_loaders.__next__], name)
    with pytest.raises(RuntimeError, match="cannot find the number of .* use a torch that"):
        next(iter(loader_of([], Numbers(), [[0]])))


def test_a_torch_that_keeps_what_a_worker_is_elsewhere_is_refused(monkeypatch):
    monkeypatch.setattr(torch_worker, "new_worker_info", None, raising=False)
    rename(monkeypatch, [torch_worker.get_worker_info], "_worker_info")
    with pytest.raises(RuntimeError, match="cannot set what get_worker_info.* use a torch that"):
        remote([], Numbers())[0]


# A callable instead of a Dataset


def test_a_callable_makes_the_dataset_in_each_worker_of_the_data_hosts(start):
    """It is called after the fork: otherwise the workers would share open files."""
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


@pytest.mark.thorough
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
