"""RemoteDataset in place of a Dataset: outside of DataLoaders, inside other Datasets, copied."""

import copy
import io
import logging
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from helpers.data_hosts import loader_of, remote, up
from helpers.datasets import SAMPLES, Draws, Reduced, Table, assert_same, numbers_drawn, seed_all

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker")


def columns() -> Table:
    """Return a Dataset that gives columns and rows, like Hugging Face's."""

    def get(table: Table, key: Any) -> Any:
        return table.columns[key] if isinstance(key, str) else table.columns["image"][key]

    return Table(get, 10, columns={"image": [*range(10)], "label": [*"abcdefghij"]})


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
        dataset = remote(some, columns())
        assert [*loader_of(some, {0: 1, 1: 2})] == [[1], [2]]
        assert dataset["label"] == [*"abcdefghij"] and dataset[:3] == [0, 1, 2] and dataset[2] == 2


def test_a_copy_is_of_another_dataset(hosts):
    for copied in (copy.copy, copy.deepcopy):
        dataset = remote(hosts, columns())
        dataset.start_at_batch(3)
        other = copied(dataset)
        assert other._source.first_batch == 3
        other.columns = {"image": [*range(5)]}
        assert (dataset[1:], other[1:]) == ([*range(1, 10)], [*range(1, 5)])
    assert copy.copy(dataset).columns is dataset.columns is not copy.deepcopy(dataset).columns


def test_code_that_looks_at_its_variables_sees_those_of_the_dataset(hosts):
    """Such as MONAI's set_rnd, which goes through all of them."""
    dataset = remote(hosts, columns())
    assert [*vars(dataset)] == ["what", "length", "columns"]
    vars(dataset)["columns"]["image"] = [*range(20, 30)]
    [[first, *_]] = loader_of(hosts, dataset._source.given, [[0, 1]])
    assert first == next(iter(loader_of([], columns(), [[0]])))[0] + 20 == dataset[0]


def test_what_data_hosts_lack_is_explained(hosts):
    def missing() -> Dataset:
        return Path("/nowhere/labels.csv").read_bytes()

    def connect(process: int) -> Dataset:
        if os.getpid() != process:
            raise ValueError("no such connection")
        return [0]

    no_file = r"(?s)No such file or directory: '/nowhere/.*"
    no_file += r"Data hosts need the file at the same path \('What data hosts have' in"
    alone = r"no such connection\n\nThe pickle of Reduced could not be .* such as a connection"
    for dataset, error, words in [
        (Table(lambda *_: Path("/nowhere/1.jpg").read_bytes()), FileNotFoundError, no_file),
        (missing, FileNotFoundError, no_file),
        (Reduced(connect, os.getpid()), ValueError, alone),
    ]:
        with pytest.raises(error, match=words):
            [*loader_of(hosts, dataset, [[0]], num_workers=1)]


@pytest.mark.parametrize("is_direct", [False, True])
def test_each_worker_may_tell_it_something_else(hosts, is_direct):
    def tell(table: Table, index: int) -> tuple[int, int]:
        table.told.who = get_worker_info().id
        return get_worker_info().id, table.inner[index]

    dataset = Table(lambda table, index: table.who, 8, who=-1)
    inner = remote(hosts, dataset)
    outer = Table(tell, 8, inner=inner, told=dataset if is_direct else inner)
    samples = sum(DataLoader(outer, 2, num_workers=2, collate_fn=list), [])
    assert {who for who, _ in samples} == {0, 1} and all(who == told for who, told in samples)


def test_a_worker_init_fn_may_ask_for_samples(hosts):
    def warm_up(worker: int) -> None:
        assert get_worker_info().dataset[1] == 1

    loader = loader_of(hosts, columns(), num_workers=1, worker_init_fn=warm_up)
    assert sum(loader, []) == [*range(10)]


def test_samples_that_cannot_be_compared_arrive(hosts, capfd):
    """Nested tensors have no shape."""
    parts = [torch.rand(5), torch.rand(3)]
    [[sample]] = loader_of(hosts, [torch.nested.as_nested_tensor(parts)], [[0]])
    assert_same([*sample.unbind()], parts)
    assert "samples of list were not compared: they cannot be compared" in capfd.readouterr().out


def test_without_data_hosts_also_what_cannot_be_sent_gets_random_numbers():
    opened = {"file": io.FileIO(os.devnull), "rng": np.random.default_rng(0)}
    dataset = Table(lambda table, index: table.rng.random(), 12, **opened)

    def epoch() -> list:
        seed_all()
        return sum(loader_of([], dataset, batch_size=2, num_workers=2), [])

    assert epoch() == epoch() and len({*epoch()}) == 12


def test_the_workers_of_a_rank_pickle_the_dataset_once_in_each_epoch(start, tmp_path: Path):
    class Pickled(Table):
        def __getstate__(self) -> dict:
            with self.file.open("a") as file:
                file.write(".")
            return vars(self)

    dataset = Pickled(lambda table, index: index, 40, file=tmp_path / "pickled")
    hosts = up(start(workers=2), start(workers=2))
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
