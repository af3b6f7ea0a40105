"""Streams: IterableDatasets on data hosts, against the same ones in a plain DataLoader."""

import contextlib
import io
import itertools
import os
import random
import re
import signal
import threading
import time
from typing import Any

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

from data_hosts import (
    BIG,
    DEADLY,
    RAISING,
    SAMPLES,
    SLOW,
    LargeStream,
    OddStream,
    RankStream,
    SampleIsBroken,
    Shifted,
    SizedStream,
    Stream,
    TroubledStream,
    assert_same,
    crop,
    label_and_shade,
    my_share,
    remote,
    up,
    wait_until,
)
from feed import streams

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
SOAK = "SOAK" in os.environ


def two_epochs(dataset: IterableDataset, **options: Any) -> list:
    """All batches, of a training that begins with the same random numbers each time."""
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    loader = DataLoader(dataset, **{"batch_size": 7, **options})
    return [list(loader) for _ in range(2)]


# Which samples


@pytest.mark.parametrize("host_count", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 1, "drop_last": True},
        {"num_workers": 3},
        {"num_workers": 3, "persistent_workers": True},
        {"num_workers": 2, "batch_size": None},
    ],
    ids=lambda options: " ".join(options),
)
def test_samples_order_and_random_numbers_are_the_plain_loader_s(hosts, host_count, options):
    expected = two_epochs(Stream(), **options)
    assert_same(two_epochs(remote(hosts[:host_count], Stream()), **options), expected)
    numbers = [number for batch in expected[0] for number in np.ravel(batch["number"])]
    assert len({*numbers}) == len(numbers) >= SAMPLES - 6  # but for an odd end


def test_workers_that_are_spawned(hosts):
    options = {"num_workers": 1, "multiprocessing_context": "spawn", "batch_size": 7}
    loaders = DataLoader(Stream(), **options), DataLoader(remote(hosts, Stream()), **options)
    torch.manual_seed(5)
    expected = list(loaders[0])
    torch.manual_seed(5)
    assert_same(list(loaders[1]), expected)


def test_without_workers_too(hosts):
    """But for the random numbers, which are those of the training script's process in torch."""
    batches = two_epochs(remote(hosts, Stream()), num_workers=0)
    for epoch, expected in zip(batches, two_epochs(Stream(), num_workers=0), strict=True):
        for batch, like in zip(epoch, expected, strict=True):
            assert_same([batch["number"], batch["epoch"]], [like["number"], like["epoch"]])
    assert batches[0][0]["drawn"][0].tolist() != batches[1][0]["drawn"][0].tolist()
    assert_same(two_epochs(remote(hosts, Stream()), num_workers=0), batches)


@pytest.mark.parametrize("rank", [0, 1])
def test_streams_share_themselves_out_among_ranks(hosts, rank, monkeypatch):
    monkeypatch.setenv("RANK", str(rank)), monkeypatch.setenv("WORLD_SIZE", "2")
    loader = DataLoader(remote(hosts, RankStream()), 5, num_workers=2)
    with pytest.raises(RuntimeError, match="each rank would train alone"):
        list(DataLoader(loader.dataset))
    dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
    try:
        expected = list(DataLoader(RankStream(), 5, num_workers=2))
        assert_same(list(loader), expected)
    finally:
        dist.destroy_process_group()
    assert {int(one) for batch in expected for one in batch[0]} == {*range(rank, SAMPLES, 2)}


@pytest.mark.parametrize("persistent", [False, True])
def test_worker_init_fn_is_called_on_the_data_host_alone(hosts, persistent):
    options = {"num_workers": 3, "worker_init_fn": my_share, "persistent_workers": persistent}
    expected = two_epochs(Stream(), **options)
    assert_same(two_epochs(remote(hosts, Stream()), **options), expected)


def test_changes_between_epochs_arrive_and_attributes_are_the_dataset_s(hosts):
    """Those that persistent workers see, too: by shared memory, as in Hugging Face's set_epoch."""
    there, plain = remote(hosts, Shifted()), Shifted()
    options = {"num_workers": 2, "persistent_workers": True, "batch_size": 7}
    loaders, drawn = (DataLoader(there, **options), DataLoader(plain, **options)), []
    for epoch in (0, 1, 1, 2):
        there.shift.fill_(epoch), plain.shift.fill_(epoch)
        batches, expected = map(list, loaders)
        assert_same([batch[:2] for batch in batches], [batch[:2] for batch in expected])
        drawn += [number for batch in batches for number in batch[2].tolist()]
    assert len({*drawn}) == 4 * SAMPLES
    assert there.length == SAMPLES
    assert not hasattr(there, "__len__") and len(remote(hosts, SizedStream())) == SAMPLES
    with pytest.raises(AttributeError, match="before RemoteDataset"):
        there.state_dict()


def test_an_epoch_that_is_left_goes_on_as_in_torch(hosts):
    """A Dataset that counts its epochs does so in workers that stay, also without their ends."""
    for options in ({"num_workers": 2, "persistent_workers": True}, {"num_workers": 0}):
        loader = DataLoader(remote(hosts, Stream(10**9)), 4, **options)
        for epoch in range(3):
            batches = [*itertools.islice(loader, 5)]
            assert {int(one) for batch in batches for one in batch["epoch"]} == {epoch}
            assert sorted(int(n) for batch in batches for n in batch["number"])[:2] == [0, 1]
        first, second = iter(DataLoader(loader.dataset, 4)), iter(DataLoader(loader.dataset, 4))
        with pytest.raises(RuntimeError, match="a second iterator has been made"):
            next(second), next(first)


def test_what_a_dataset_raises_is_raised_and_the_loop_may_go_on(hosts):
    dataset = TroubledStream(1, RAISING, 2, RAISING, RAISING, 3)
    for there in (dataset, remote(hosts, dataset)):
        batches, found = iter(DataLoader(there, None, num_workers=1)), []
        while True:
            try:
                found.append(next(batches))
            except SampleIsBroken as error:
                assert "Original Traceback" in str(error)
                found.append("broken")
            except StopIteration:
                break
        assert found == [1, "broken", 2, "broken", "broken", 3]
    with pytest.raises(Exception, match="(?s)on data host .*pickle"):
        list(DataLoader(remote(hosts, TroubledStream(1, BIG)), None, num_workers=1))


def test_memory_that_is_used_again(hosts):
    for num_workers in (0, 1):
        there = remote(hosts, OddStream("reuses_its_memory"))
        batches = DataLoader(there, num_workers=num_workers)
        assert [int(batch[0, -1]) for batch in batches] == [*range(20)]


def test_a_sample_that_cannot_be_read_here(hosts):
    batches = iter(DataLoader(remote(hosts, OddStream("cannot_be_unpickled")), None))
    assert [next(batches), next(batches)] == [0, 1]
    with pytest.raises(OSError, match="this is for data hosts"):
        next(batches)
    assert [*batches] == [3, 4]


def with_numbers_of_its_own(samples: list[dict]) -> tuple[list, list]:
    return [sample["drawn"][2].tolist() for sample in samples], torch.rand(2).tolist()


def test_random_numbers_of_collate_fn_are_not_those_of_the_samples(hosts):
    options = {"num_workers": 1, "collate_fn": with_numbers_of_its_own}
    batches = list(DataLoader(remote(hosts, Stream(8)), 2, **options))
    of_samples = [drawn for samples, _ in batches for drawn in samples]
    assert not [own for _, own in batches if own in of_samples]


def test_ctrl_c_does_not_shorten_the_epochs_after_it(hosts):
    loader = DataLoader(remote(hosts, Stream(200, 0.01)), 10)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for seconds in (0.2, 0.5, 0.8):
            signal.setitimer(signal.ITIMER_REAL, seconds)
            with pytest.raises(KeyboardInterrupt):
                list(loader)
    finally:
        signal.signal(signal.SIGALRM, before)
    for _ in range(2):
        assert torch.cat([batch["number"] for batch in loader]).tolist() == [*range(200)]


def test_what_would_be_lost_or_mixed_up_is_refused(hosts):
    loader = DataLoader(remote(hosts, OddStream("is_its_own_iterator")), 4)
    next(iter(loader))
    with pytest.raises(RuntimeError, match="OddStream is its own iterator"):
        next(iter(loader))
    dataset = remote(hosts, Stream())
    older = iter(DataLoader(dataset))
    dataset.length = 5
    assert len(list(DataLoader(dataset))) == 5
    with pytest.raises(RuntimeError, match="a second iterator has been made"):
        next(older)
    uses_it = {"worker_init_fn": lambda worker: setattr(dataset, "start", worker)}
    with pytest.raises(TypeError, match="take the Dataset from get_worker_info"):
        next(iter(DataLoader(dataset, num_workers=1, **uses_it)))


# Libraries


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


def web_dataset(tars: str, *, batches: int = 0, epoch: int = 0) -> IterableDataset:
    dataset = wds.WebDataset(tars, nodesplitter=wds.split_by_node, shardshuffle=False)
    dataset = dataset.compose(wds.detshuffle(20, 10, seed=1)).decode("torchrgb")
    dataset = dataset.to_tuple("jpg", "cls").map_tuple(crop, int)
    dataset = dataset.batched(batches) if batches else dataset
    return dataset.with_epoch(epoch) if epoch else dataset


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("host_count", [1, 2, 3])
def test_webdataset(hosts, tars, host_count, rank, monkeypatch):
    monkeypatch.setenv("RANK", str(rank)), monkeypatch.setenv("WORLD_SIZE", "2")
    dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
    try:
        for arguments, options in [
            ({}, {"num_workers": 3, "persistent_workers": True}),
            ({"batches": 4, "epoch": 5}, {"num_workers": 2, "batch_size": None}),
        ]:
            expected = two_epochs(web_dataset(tars, **arguments), **options)
            there = remote(hosts[:host_count], web_dataset(tars, **arguments))
            assert_same(two_epochs(there, **options), expected)
            labels = {int(label) for batch in expected[0] for label in batch[1]}
            assert labels == {n for n in range(48) if n // 8 % 2 == rank}
    finally:
        dist.destroy_process_group()


def test_tar_files_by_index(hosts, tars):
    """As README's table has it: files in random order, and their samples in random order."""
    shards = [{"url": url, "nsamples": 8} for url in braceexpand.braceexpand(tars)]
    dataset = wids.ShardListDataset(shards, transformations=["PIL", label_and_shade])
    there, batches = remote(hosts, dataset), []
    for given in (there, dataset):  # in this order, as it opens its files when it is first used
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


@pytest.mark.parametrize("host_count", [1, 3])
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


# Hosts and processes that are lost


@pytest.mark.parametrize("seed", range(30 if SOAK else 2))
def test_streams_go_on_at_another_host(start, seed):
    """Hosts and single processes are killed at random moments; each host comes back."""
    options = {"num_workers": 1 + seed % 4, "persistent_workers": seed % 2 == 1, "batch_size": 3}
    expected = two_epochs(Stream(400, 0.005), **options)
    chance, hosts = random.Random(seed), [start(workers=1) for _ in range(2 + seed % 2)]
    up(*hosts)

    def kill_some() -> None:
        for kill in range(10 if SOAK else 3):
            time.sleep(chance.uniform(0.1, 0.6))
            host = chance.choice(hosts)
            if kill % 2 and (processes := host.worker_processes()):
                with contextlib.suppress(Exception):  # it has ended by itself
                    chance.choice(processes).kill()
            else:
                host.kill()
                time.sleep(chance.uniform(0, 0.5))
                host.start()

    killer = threading.Thread(target=kill_some)
    killer.start()
    while killer.is_alive():
        assert_same(two_epochs(remote(hosts, Stream(400, 0.005)), **options), expected)


@pytest.mark.thorough
def test_a_host_that_hangs_is_left(start):
    hosts = up(start(workers=1), start(workers=1))
    batches = iter(DataLoader(remote(hosts, Stream(4000, 0.002)), 10, num_workers=2))
    expected = iter(DataLoader(Stream(4000), 10, num_workers=2))
    next(batches), next(expected)
    hosts[0].freeze()
    for batch, like in zip(batches, expected, strict=True):
        assert batch["number"].tolist() == like["number"].tolist()


def test_a_process_that_hangs_or_dies_again_and_again_is_an_error(start, monkeypatch):
    monkeypatch.setattr(streams, "HANGS_SECONDS", 1.0)
    monkeypatch.setattr(streams, "ATTEMPTS", 2)
    hosts = up(start(setup="import feed.front; feed.front.BEAT_SECONDS = 0.5"), start())
    for number, how in [(DEADLY, "has died"), (SLOW, "hangs")]:
        batches = iter(DataLoader(remote(hosts, TroubledStream(1, 2, number)), None))
        found = []
        with pytest.raises(RuntimeError, match=f"lost 2 times over .* its process {how}"):
            found.extend(batches)


def test_running_forward_is_a_sign_of_life(start, monkeypatch, capfd):
    """It may take longer than a process may hang: here 3 s."""
    monkeypatch.setattr(streams, "HANGS_SECONDS", 1.0)
    monkeypatch.setattr(streams, "SAY_SECONDS", 2.0)
    tell = "feed.iterate.TELL_SECONDS, feed.front.BEAT_SECONDS = 0.2, 0.5"
    [host] = up(start(setup=f"import feed.iterate, feed.front; {tell}"))
    batches = iter(DataLoader(remote([host], Stream(150, 0.025)), 1))
    for _ in range(120):
        next(batches)
    host.kill()
    host.start()
    assert [int(batch["number"]) for batch in batches] == [*range(120, 150)]
    said = capfd.readouterr().out
    assert re.search(r"goes on at data host .*, after 12\d samples", said)
    assert re.search(r"is run forward, \d+ of 12\d samples", said)


def test_no_host_answers(start):
    [host] = up(start())
    batches = iter(DataLoader(remote([host], Stream(10**6), timeout=2.0), 5, num_workers=1))
    next(batches)
    host.kill()
    with pytest.raises(ConnectionError, match="no data host has answered for 2 s"):
        list(batches)


def test_a_dataset_that_has_become_shorter(start, tmp_path):
    """It cannot be run forward to where it was."""
    (length := tmp_path / "length").write_text("100")
    [host] = up(start())
    batches = iter(DataLoader(remote([host], OddStream("is_as_long_as_a_file_says", length)), 1))
    for _ in range(50):
        next(batches)
    length.write_text("30")
    host.kill()
    host.start()
    with pytest.raises(RuntimeError, match="had 30 samples, of which 5. had been taken"):
        list(batches)


# What is there meanwhile


def test_what_a_dataset_has_open_is_closed(hosts, tmp_path):
    """Also where an epoch is left in the middle, or its reader killed."""
    there = remote(hosts, OddStream("has_something_open", tmp_path / "open"))
    loader = DataLoader(there, num_workers=1)
    for _ in range(2):
        batches = iter(loader)
        next(batches)
        assert (tmp_path / "open").exists()
        del batches
        wait_until(lambda: not (tmp_path / "open").exists())


def test_streams_are_spread_by_cores_and_end_with_their_readers(start):
    hosts = [start(workers=cores, environment={"PLACE": str(cores)}) for cores in (1, 3)]
    up(*hosts)
    batches = iter(DataLoader(remote(hosts, RankStream(10**9)), 1, num_workers=8))
    assert sorted(next(batches)[2][0] for _ in range(8)) == 2 * ["1"] + 6 * ["3"]
    assert sum(len(host.worker_processes()) for host in hosts) >= 8
    del batches
    # What is left has described the Dataset, and would prepare samples of map-style ones.
    wait_until(lambda: all(len(host.worker_processes()) <= host.workers for host in hosts))


def test_what_is_ready_is_bounded(start, tmp_path):
    """Of a stream that makes 1 MB in no time, when the training takes a long while for a step."""
    [host] = up(start())
    made = tmp_path / "made"
    batches = iter(DataLoader(remote([host], LargeStream(made)), 4))
    next(batches)
    wait_until(made.exists)
    time.sleep(2)
    first = int(made.read_text())
    time.sleep(1)
    assert int(made.read_text()) == first < 300
    assert sum(process.memory_info().rss for process in host.processes()) < 2e9
    assert_same(
        next(batches),
        torch.full((4, 1_000_000), 0, dtype=torch.uint8)
        + torch.tensor([[4], [5], [6], [7]], dtype=torch.uint8),
    )


def test_another_loader_may_fork_meanwhile(hosts):
    """gRPC must rest in a process that forks: a stream of the training's process is run again."""
    batches = iter(DataLoader(remote(hosts, Stream(300, 0.001)), 10))
    numbers = [next(batches)["number"]]
    for _ in range(3):
        assert len(list(DataLoader(range(4), num_workers=2))) == 4
        numbers.append(next(batches)["number"])
    assert torch.cat(numbers).tolist() == [*range(40)]
