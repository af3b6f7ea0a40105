"""Streams: IterableDatasets on data hosts, compared with a plain DataLoader."""

import itertools
import os
import signal
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader

from helpers.data_hosts import remote, two_epochs
from helpers.datasets import (
    BIG,
    RAISING,
    SAMPLES,
    OddStream,
    RankStream,
    SampleIsBroken,
    Shifted,
    SizedStream,
    Stream,
    TroubledStream,
    assert_same,
    my_share,
)

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
SOAK = "SOAK" in os.environ


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
    assert len({*numbers}) == len(numbers) >= SAMPLES - 6  # except for an incomplete last batch


def test_workers_that_are_spawned(hosts):
    options = {"num_workers": 1, "multiprocessing_context": "spawn", "batch_size": 7}
    loaders = DataLoader(Stream(), **options), DataLoader(remote(hosts, Stream()), **options)
    torch.manual_seed(5)
    expected = list(loaders[0])
    torch.manual_seed(5)
    assert_same(list(loaders[1]), expected)


def test_without_dataloader_workers(hosts):
    """Only the random numbers differ: torch takes those of the training script's process."""
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
    """Persistent workers, too, see changes in shared memory, as of Hugging Face's set_epoch."""
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


def test_epochs_may_be_left_as_in_torch(hosts):
    """A Dataset that counts its epochs in persistent workers counts those that are left, too."""
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


def test_a_stream_may_reuse_its_memory(hosts):
    for num_workers in (0, 1):
        there = remote(hosts, OddStream("reuses_its_memory"))
        batches = DataLoader(there, num_workers=num_workers)
        assert [int(batch[0, -1]) for batch in batches] == [*range(20)]


def test_a_sample_that_cannot_be_unpickled_here(hosts):
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
