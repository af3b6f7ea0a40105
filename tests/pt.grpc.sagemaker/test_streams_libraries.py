"""Data of webdataset, wids and Hugging Face on data hosts, compared with a plain DataLoader."""

import copy
import io

import braceexpand
import datasets
import numpy as np
import pytest
import torch
import torch.distributed as dist
import webdataset as wds
import wids
from datasets.distributed import split_dataset_by_node
from PIL import Image
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader, IterableDataset

from helpers.data_hosts import remote, two_epochs
from helpers.datasets import assert_same

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.fixture(scope="module")
def tars(tmp_path_factory) -> str:
    """Six tar files of eight JPEGs each."""
    folder, chance = tmp_path_factory.mktemp("tars"), np.random.default_rng(0)
    for shard in range(6):
        with wds.TarWriter(str(folder / f"{shard}.tar")) as writer:
            for number in range(8 * shard, 8 * shard + 8):
                file = io.BytesIO()
                image = Image.fromarray(chance.integers(0, 255, (40, 60, 3), np.uint8))
                image.save(file, "JPEG")
                writer.write({"__key__": str(number), "jpg": file.getvalue(), "cls": number})
    return str(folder / "{0..5}.tar")


@pytest.mark.parametrize("host_count, rank", [(1, 0), (3, 1)])
def test_webdataset(hosts, tars, host_count, rank, monkeypatch):
    def crop(image: torch.Tensor) -> torch.Tensor:
        x, y = torch.randint(10, (2,)).tolist()
        return image[:, y : y + 24, x : x + 24].clone()

    dataset = wds.WebDataset(tars, nodesplitter=wds.split_by_node, shardshuffle=False)
    dataset = dataset.compose(wds.detshuffle(20, 10, seed=1)).decode("torchrgb")
    dataset = dataset.to_tuple("jpg", "cls").map_tuple(crop, int)
    monkeypatch.setenv("RANK", str(rank)), monkeypatch.setenv("WORLD_SIZE", "2")
    dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
    try:
        for given, options in [
            (dataset, {"num_workers": 3, "persistent_workers": True}),
            (dataset.batched(4).with_epoch(5), {"num_workers": 2, "batch_size": None}),
        ]:
            expected = two_epochs(copy.deepcopy(given), **options)
            assert_same(two_epochs(remote(hosts[:host_count], given), **options), expected)
            labels = {int(label) for batch in expected[0] for label in batch[1]}
            assert labels == {n for n in range(48) if n // 8 % 2 == rank}
    finally:
        dist.destroy_process_group()


def test_tar_files_by_index(hosts, tars):
    """As in README's table: files in random order, and their samples in random order."""

    def label_and_shade(sample: dict) -> tuple[int, float]:
        return sample[".cls"], np.asarray(sample[".jpg"]).mean()

    shards = [{"url": url, "nsamples": 8} for url in braceexpand.braceexpand(tars)]
    dataset = wids.ShardListDataset(shards, transformations=["PIL", label_and_shade])
    there, batches = remote(hosts, dataset), []
    for given in (there, dataset):  # in this order: first use opens its files
        sampler = wids.ChunkedSampler(given, chunksize=8, seed=1, shufflefirst=True)
        batches.append(list(DataLoader(given, 7, sampler=sampler, num_workers=2)))
    assert_same(*batches)
    labels = [int(label) for batch in batches[0] for label in batch[0]]
    assert sorted(labels) == [*range(48)] != labels
    assert [len({label // 8 for label in labels[n : n + 8]}) for n in range(0, 48, 8)] == 6 * [1]


@pytest.fixture(scope="module")
def parquet(tmp_path_factory) -> list[str]:
    """Four Parquet files."""
    folder = tmp_path_factory.mktemp("parquet")
    for file in range(4):
        rows = {"x": [[n, n * n] for n in range(20 * file, 20 * file + 20)]}
        datasets.Dataset.from_dict(rows).to_parquet(folder / f"{file}.parquet")
    return sorted(map(str, folder.iterdir()))


@pytest.mark.parametrize("host_count", [1, pytest.param(3, marks=pytest.mark.thorough)])
def test_hugging_face(hosts, parquet, host_count, tmp_path, monkeypatch):
    def hugging_face(rank: int) -> IterableDataset:
        dataset = datasets.load_dataset(
            "parquet", data_files=parquet, split="train", streaming=True, cache_dir=str(tmp_path)
        )
        dataset = split_dataset_by_node(dataset, rank, 2)
        dataset = dataset.shuffle(seed=3, buffer_size=15, max_buffer_input_shards=1)
        return dataset.map(lambda row: {"sum": sum(row["x"])}).with_format("torch")

    orders, seen = set(), [set(), set()]  # of each epoch
    for rank, persistent in [(0, True), (1, False)]:
        options = {"num_workers": 2, "persistent_workers": persistent, "batch_size": 7}
        plain, there = hugging_face(rank), remote(hosts[:host_count], hugging_face(rank))
        loaders = DataLoader(plain, **options), DataLoader(there, **options)
        for epoch in range(2):
            plain.set_epoch(epoch), there.set_epoch(epoch)
            expected, batches = map(list, loaders)
            assert_same(batches, expected)
            order = [int(x) for batch in expected for x in batch["x"][:, 0]]
            orders.add((*order,))
            seen[epoch] |= {*order}
    assert len(orders) == 4 and seen == 2 * [{*range(80)}]
