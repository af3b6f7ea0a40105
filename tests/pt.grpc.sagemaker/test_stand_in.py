"""RemoteDataset in place of a Dataset: outside of DataLoaders, inside other Datasets, copied."""

import copy
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset, get_worker_info

from feed import RemoteDataset
from helpers.data_hosts import DataHost, loader_of, remote, starting, up
from helpers.datasets import SAMPLES, Draws, assert_same, numbers_drawn, seed_all
from helpers.looked_at import (
    Columns,
    Connected,
    Missing,
    Named,
    Opened,
    Outer,
    Pickled,
    Splits,
    Told,
    missing,
)


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[DataHost]]:
    with starting() as start:
        yield up(*[start(workers=2) for _ in range(2)])


def test_it_can_be_indexed_without_a_dataloader(hosts):
    for some in ([], hosts):
        dataset = remote(some, Draws())
        seed_all()
        expected = numbers_drawn()
        seed_all()
        assert [sample[0] for sample in dataset.__getitems__([3, 4])] == [3, 4]
        assert dataset[5][0] == 5 and len(dataset) == SAMPLES
        assert numbers_drawn() == expected
        assert [*remote(some, [1, 2, 3])] == [1, 2, 3]  # an IndexError ends the loop


def test_columns_and_rows_are_looked_up_here(hosts):
    for some in ([], hosts):
        dataset = remote(some, Columns())
        assert dataset["label"] == [*"abcdefghij"] and dataset[:3] == [0, 1, 2] and dataset[2] == 2


def test_a_copy_is_of_another_dataset(hosts):
    for copied in (copy.copy, copy.deepcopy):
        dataset = remote(hosts, Columns())
        dataset.start_at_batch(3)
        other = copied(dataset)
        assert other._source.first_batch == 3
        other.columns = {"image": [*range(5)]}
        assert (dataset[1:], other[1:]) == ([*range(1, 10)], [*range(1, 5)])
    assert copy.copy(dataset).columns is dataset.columns is not copy.deepcopy(dataset).columns


def test_code_that_looks_at_its_variables_sees_those_of_the_dataset(hosts):
    """Such as MONAI's set_rnd, which goes through all of them."""
    dataset = remote(hosts, Columns())
    assert [*vars(dataset)] == ["columns"]
    vars(dataset)["columns"]["image"] = [*range(20, 30)]
    [[first, *_]] = loader_of(hosts, dataset._source.given, [[0, 1]])
    assert first == next(iter(loader_of([], Columns(), [[0]])))[0] + 20 == dataset[0]


def test_several_datasets_are_refused():
    splits = Splits(train=Columns(), test=Columns())
    with pytest.raises(
        TypeError, match="got a Splits of Datasets: .* such as dataset\\['train'\\]"
    ):
        RemoteDataset(splits)
    assert [*DataLoader(RemoteDataset({0: 1, 1: 2}), collate_fn=list)] == [[1], [2]]
    with pytest.raises(TypeError, match="use it once, after everything that makes another"):
        RemoteDataset(RemoteDataset([1, 2]))


@pytest.mark.parametrize(
    "around, words",
    [
        (lambda dataset: ConcatDataset([dataset]), "ConcatDataset asks Columns for samples one by"),
        (lambda dataset: dataset, "the DataLoader asks for samples one by one: set batch_size"),
        (lambda dataset: Subset(dataset, [0, 1]), ""),
    ],
    ids=["a ConcatDataset", "no batch_size", "a Subset"],
)
def test_the_log_says_what_makes_it_slow(hosts, capfd, around, words):
    options = {} if "DataLoader" in words else {"batch_size": 2}
    options = {"batch_size": None, "collate_fn": None, **options}
    next(iter(DataLoader(around(remote(hosts, Columns())), num_workers=1, **options)))
    said = [line for line in capfd.readouterr().out.splitlines() if "one by one" in line]
    assert len(said) == bool(words) and words in "".join(said)


@pytest.mark.parametrize("dataset", [Missing(), missing], ids=["sample", "Dataset"])
def test_data_hosts_need_the_files_at_the_same_path(hosts, dataset):
    for num_workers in (0, 1):
        with pytest.raises(FileNotFoundError) as caught:
            [*loader_of(hosts, dataset, [[0]], num_workers=num_workers)]
        said = str(caught.value)
        assert "No such file or directory: '/nowhere/" in said
        assert "Data hosts need the file at the same path ('What data hosts have' in" in said


def test_what_only_works_on_one_host_is_explained(hosts):
    words = r"no such connection\n\nThe pickle of Connected could not be .* such as a connection"
    with pytest.raises(ValueError, match=words):
        [*loader_of(hosts, Connected(), [[0]], num_workers=1)]


@pytest.mark.parametrize("is_direct", [False, True])
def test_each_worker_may_tell_it_something_else(hosts, is_direct):
    dataset = Told()
    inner = remote(hosts, dataset)
    outer = Outer(inner, dataset if is_direct else inner)
    loader = DataLoader(outer, 2, num_workers=2, collate_fn=list)
    samples = sum(loader, [])
    assert {who for who, _ in samples} == {0, 1} and all(who == told for who, told in samples)


def test_a_worker_init_fn_may_ask_for_samples(hosts):
    def warm_up(worker: int) -> None:
        assert get_worker_info().dataset[1] == 1

    loader = loader_of(hosts, Columns(), num_workers=1, worker_init_fn=warm_up)
    assert sum(loader, []) == [*range(10)]


def test_a_namedtuple_may_be_defined_in_a_class(hosts):
    [samples] = loader_of(hosts, Named(), batch_size=2)
    assert samples == [Named.Pair(0, "0"), Named.Pair(1, "1")]
    assert all(type(sample) is Named.Pair for sample in samples)


def test_samples_that_cannot_be_compared_arrive(hosts, capfd):
    """Nested tensors have no shape."""
    parts = [torch.rand(5), torch.rand(3)]
    [[sample]] = loader_of(hosts, [torch.nested.as_nested_tensor(parts)], [[0]])
    assert_same([*sample.unbind()], parts)
    assert "samples of list were not compared: they cannot be compared" in capfd.readouterr().out


def test_without_data_hosts_also_what_cannot_be_sent_gets_random_numbers():
    def epoch() -> list:
        seed_all()
        return sum(loader_of([], Opened(), batch_size=2, num_workers=2), [])

    assert epoch() == epoch() and len({*epoch()}) == 12


@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker")
def test_the_workers_of_a_rank_pickle_the_dataset_once_in_each_epoch(hosts, tmp_path: Path):
    dataset = Pickled(tmp_path / "pickled")
    loader = loader_of(hosts, dataset, batch_size=5, num_workers=4)
    assert sum(map(len, loader)) == 40
    for _ in range(2):
        before = len(dataset.file.read_text())
        assert sum(map(len, loader)) == 40
        assert len(dataset.file.read_text()) - before == 1


def test_a_script_that_configures_logging_gets_messages_in_its_own_way(hosts, capfd):
    def said(numbers: range) -> str:
        assert [*loader_of(hosts, [*numbers], [[0, 1]], num_workers=1)] == [[*numbers][:2]]
        return capfd.readouterr().out

    assert "feed: list, 0.0 MB was sent to data host" in said(range(7))
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(name)s says: %(message)s"))
    logging.root.addHandler(handler)
    try:
        text = said(range(8))
        assert "feed says: list, 0.0 MB was sent" in text and "feed: " not in text
        logging.getLogger("feed").setLevel(logging.WARNING)
        assert said(range(9)) == ""
    finally:
        logging.root.removeHandler(handler)
        logging.getLogger("feed").setLevel(logging.INFO)
