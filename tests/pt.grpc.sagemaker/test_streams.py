"""Streams: IterableDatasets on data hosts, compared with a plain DataLoader."""

import itertools
import re
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader, IterableDataset

from feed import streams
from helpers import datasets
from helpers.data_hosts import remote, two_epochs, up
from helpers.datasets import SAMPLES, TROUBLED, RankStream, Stream, Yielding, assert_same
from helpers.waiting import wait_until

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


PERSISTENT, SHARDED = {"persistent_workers": True}, {"worker_init_fn": datasets.shard}


@pytest.mark.parametrize(
    "num_workers, host_count, options",
    [
        *[(3, host_count, {}) for host_count in range(4)],
        (1, 2, {"drop_last": True}),
        *[(3, host_count, PERSISTENT) for host_count in (0, 3)],
        (2, 3, {"batch_size": None}),
        (3, 3, PERSISTENT | SHARDED),
        (1, 3, {"multiprocessing_context": "spawn"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else str(value),
)
def test_samples_order_and_random_numbers_are_the_plain_loader_s(
    hosts, num_workers, host_count, options
):
    options = {**options, "num_workers": num_workers}
    expected = two_epochs(Stream(), **options)
    assert_same(two_epochs(remote(hosts[:host_count], Stream()), **options), expected)
    numbers = [number for batch in expected[0] for number in np.ravel(batch["number"])]
    least = 20 if "worker_init_fn" in options else SAMPLES - 6  # without an incomplete last batch
    assert len({*numbers}) == len(numbers) >= least


def test_without_dataloader_workers(hosts):
    """Only the random numbers differ: torch takes those of the training script's process."""
    batches = two_epochs(remote(hosts, Stream()), num_workers=0)
    for epoch, expected in zip(batches, two_epochs(Stream(), num_workers=0), strict=True):
        for batch, like in zip(epoch, expected, strict=True):
            assert_same([batch["number"], batch["epoch"]], [like["number"], like["epoch"]])
    assert batches[0][0]["drawn"][0].tolist() != batches[1][0]["drawn"][0].tolist()
    assert_same(two_epochs(remote(hosts, Stream()), num_workers=0), batches)


def test_streams_share_themselves_out_among_ranks(hosts, monkeypatch):
    monkeypatch.setenv("RANK", "1"), monkeypatch.setenv("WORLD_SIZE", "2")
    loader = DataLoader(remote(hosts, RankStream()), 5, num_workers=2)
    with pytest.raises(RuntimeError, match="each rank would train alone"):
        list(DataLoader(loader.dataset))
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    try:
        expected = list(DataLoader(RankStream(), 5, num_workers=2))
        assert_same(list(loader), expected)
    finally:
        dist.destroy_process_group()
    assert {int(one) for batch in expected for one in batch[0]} == {*range(1, SAMPLES, 2)}


def test_changes_between_epochs_arrive_and_attributes_are_the_dataset_s(hosts):
    """Persistent workers, too, see changes in shared memory, as of Hugging Face's set_epoch."""

    class Shifted(Stream):
        def __iter__(self) -> Iterator[tuple]:
            for sample in super().__iter__():
                yield sample["number"], self.shift.clone(), sample["drawn"][0]

    class Sized(Stream):
        def __len__(self) -> int:
            return self.length

    there, plain = remote(hosts, Shifted()), Shifted()
    there.shift, plain.shift = (torch.zeros(1).share_memory_() for _ in range(2))
    options = PERSISTENT | {"num_workers": 2, "batch_size": 7}
    loaders, drawn = (DataLoader(there, **options), DataLoader(plain, **options)), []
    for epoch in (0, 1, 1, 2):
        there.shift.fill_(epoch), plain.shift.fill_(epoch)
        batches, expected = map(list, loaders)
        assert_same([batch[:2] for batch in batches], [batch[:2] for batch in expected])
        drawn += [number for batch in batches for number in batch[2].tolist()]
    assert len({*drawn}) == 4 * SAMPLES
    assert there.length == SAMPLES
    assert not hasattr(there, "__len__") and len(remote(hosts, Sized())) == SAMPLES
    with pytest.raises(AttributeError, match="before RemoteDataset"):
        there.state_dict()


def test_epochs_may_be_left_as_in_torch(hosts):
    """A Dataset that counts its epochs in persistent workers counts those that are left, too."""
    for options in (PERSISTENT | {"num_workers": 2}, {"num_workers": 0}):
        loader = DataLoader(remote(hosts, Stream(10**9)), 4, **options)
        for epoch in range(3):
            batches = [*itertools.islice(loader, 5)]
            assert {int(one) for batch in batches for one in batch["epoch"]} == {epoch}
            assert sorted(int(n) for batch in batches for n in batch["number"])[:2] == [0, 1]


def test_what_a_dataset_raises_is_raised_and_the_loop_may_go_on(hosts):
    numbers = 1, datasets.RAISING, 2, datasets.RAISING, datasets.RAISING, 3
    dataset = Yielding(lambda: map(TROUBLED.__getitem__, numbers))
    for there in (dataset, remote(hosts, dataset)):
        batches, found = iter(DataLoader(there, None, num_workers=1)), []
        while True:
            try:
                found.append(next(batches))
            except datasets.SampleIsBroken as error:
                assert "Original Traceback" in str(error)
                found.append("broken")
            except StopIteration:
                break
        assert found == [1, "broken", 2, "broken", "broken", 3]
    unsendable = remote(hosts, Yielding(lambda: iter([1, lambda: 0])))
    with pytest.raises(Exception, match="(?s)on data host .*pickle"):
        list(DataLoader(unsendable, None, num_workers=1))
    unreadable = Yielding(lambda: iter([0, 1, datasets.Unreadable(), 3, 4]))
    batches = iter(DataLoader(remote(hosts, unreadable), None))
    assert [next(batches), next(batches)] == [0, 1]
    with pytest.raises(OSError, match="this is for data hosts"):
        next(batches)
    assert [*batches] == [3, 4]


def test_a_stream_may_reuse_its_memory(hosts):
    def numbers() -> Iterator[np.ndarray]:
        buffer = np.zeros(2000, np.uint8)
        for number in range(20):
            buffer[:] = number
            yield buffer

    for num_workers in (0, 1):
        batches = DataLoader(remote(hosts, Yielding(numbers)), num_workers=num_workers)
        assert [int(batch[0, -1]) for batch in batches] == [*range(20)]


def test_random_numbers_of_collate_fn_are_not_those_of_the_samples(hosts):
    def draw(samples: list[dict]) -> tuple[list, list]:
        return [sample["drawn"][2].tolist() for sample in samples], torch.rand(2).tolist()

    batches = list(DataLoader(remote(hosts, Stream(8)), 2, num_workers=1, collate_fn=draw))
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
    class Own(IterableDataset):
        def __iter__(self) -> Iterator:
            self.numbers = iter(range(10**6))
            return self

        def __next__(self) -> int:
            return next(self.numbers)

    loader = DataLoader(remote(hosts, Own()), 4)
    next(iter(loader))
    with pytest.raises(RuntimeError, match="Own is its own iterator"):
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


# What only streams do if hosts die, and what they hold open: see also test_feed_hosts.py


@pytest.mark.thorough
@pytest.mark.parametrize("number, how", [(datasets.DEADLY, "has died"), (datasets.SLOW, "hangs")])
def test_a_process_that_hangs_or_dies_again_and_again_is_an_error(start, monkeypatch, number, how):
    monkeypatch.setattr(streams, "HANGS_SECONDS", 1.0)
    monkeypatch.setattr(streams, "ATTEMPTS", 2)
    hosts = up(start(setup="import feed.front; feed.front.BEAT_SECONDS = 0.5"), start())
    stream = Yielding(lambda: map(TROUBLED.__getitem__, (1, 2, number)))
    with pytest.raises(RuntimeError, match=f"lost 2 times over .* its process {how}"):
        list(DataLoader(remote(hosts, stream), None))


@pytest.mark.thorough
def test_running_forward_is_a_sign_of_life_and_finds_that_a_dataset_has_become_shorter(
    start, monkeypatch, capfd, tmp_path
):
    """It may take longer (here 3 s) than a process may hang (here 1 s)."""
    monkeypatch.setattr(streams, "HANGS_SECONDS", 1.0)
    monkeypatch.setattr(streams, "SAY_SECONDS", 2.0)
    (length := tmp_path / "length").write_text("1000000")

    def numbers() -> Iterator[int]:
        for number in range(int(length.read_text())):
            time.sleep(0.025)
            yield number

    tell = "feed.iterate.TELL_SECONDS, feed.front.BEAT_SECONDS = 0.2, 0.5"
    [host] = up(start(setup=f"import feed.iterate, feed.front; {tell}"))
    batches = iter(DataLoader(remote([host], Yielding(numbers)), 1))
    for first in (0, 120):
        assert [int(next(batches)) for _ in range(120)] == [*range(first, first + 120)]
        host.kill()
        host.start()
    said = capfd.readouterr().out
    assert re.search(r"continues on data host .*, after 12\d samples", said)
    assert re.search(r"skips samples that were taken before: \d+ of 12\d", said)
    length.write_text("30")
    with pytest.raises(RuntimeError, match="had only 30 samples, but 24. had been taken"):
        list(batches)


@pytest.mark.thorough
def test_what_a_dataset_has_open_is_closed_if_the_epoch_is_left(hosts, tmp_path):
    file = tmp_path / "open"

    def numbers() -> Iterator[int]:
        file.touch()
        try:
            for number in range(10**6):
                time.sleep(0.01)
                yield number
        finally:
            file.unlink()

    loader = DataLoader(remote(hosts, Yielding(numbers)), num_workers=1)
    for _ in range(2):
        batches = iter(loader)
        next(batches)
        assert file.exists()
        del batches
        wait_until(lambda: not file.exists())


def test_streams_are_spread_by_cores_and_end_with_their_readers(start):
    hosts = [start(workers=cores, environment={"PLACE": str(cores)}) for cores in (1, 3)]
    up(*hosts)
    batches = iter(DataLoader(remote(hosts, RankStream(10**9)), 1, num_workers=8))
    assert sorted(next(batches)[2][0] for _ in range(8)) == 2 * ["1"] + 6 * ["3"]
    assert sum(len(host.worker_processes()) for host in hosts) >= 8
    del batches
    # Workers that remain described the Dataset; they would prepare a map-style one's samples.
    wait_until(lambda: all(len(host.worker_processes()) <= host.workers for host in hosts))


def test_the_number_of_samples_made_in_advance_is_bounded(start, tmp_path):
    """Even if samples of 1 MB take no time to make, and the training takes long for a step."""
    made = tmp_path / "made"

    def images() -> Iterator[np.ndarray]:
        for number in range(10**9):
            made.write_text(str(number))
            yield np.full(1_000_000, number % 256, np.uint8)

    [host] = up(start())
    batches = iter(DataLoader(remote([host], Yielding(images)), 4))
    next(batches)
    wait_until(made.exists)
    time.sleep(2)
    first = int(made.read_text())
    time.sleep(1)
    assert int(made.read_text()) == first < 300
    assert sum(process.memory_info().rss for process in host.processes()) < 2e9
    batch = next(batches)
    assert batch.shape == (4, 1_000_000) and batch.dtype is torch.uint8
    assert torch.equal(batch, torch.tensor([[4], [5], [6], [7]]).expand_as(batch))


def test_another_loader_may_fork_meanwhile(hosts):
    """gRPC must be idle in a process that forks, so a stream read in it is started again."""
    batches = iter(DataLoader(remote(hosts, Stream(300, 0.001)), 10))
    numbers = [next(batches)["number"]]
    for _ in range(3):
        assert len(list(DataLoader(range(4), num_workers=2))) == 4
        numbers.append(next(batches)["number"])
    assert torch.cat(numbers).tolist() == [*range(40)]
