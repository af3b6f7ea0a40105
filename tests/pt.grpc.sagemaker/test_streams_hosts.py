"""Streams when data hosts or their processes die, hang or are slow, and what streams hold open.

`make soak` runs this file with SOAK=1: more seeds, more kills.
"""

import os
import random
import re
import time

import pytest
import torch
from torch.utils.data import DataLoader

from feed import streams
from helpers.data_hosts import kill_at_random, remote, two_epochs, up
from helpers.datasets import (
    DEADLY,
    SLOW,
    OddStream,
    RankStream,
    Stream,
    TroubledStream,
    assert_same,
)
from helpers.waiting import wait_until

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
SOAK = "SOAK" in os.environ


@pytest.mark.parametrize("seed", range(10 if SOAK else 1))
def test_streams_go_on_at_another_host(start, seed):
    """Hosts and single processes are killed at random moments; each host comes back."""
    options = {"num_workers": 1 + seed % 4, "persistent_workers": seed % 2 == 1, "batch_size": 3}
    expected = two_epochs(Stream(400, 0.005), **options)
    chance, hosts = random.Random(seed), [start(workers=1) for _ in range(2 + seed % 2)]
    up(*hosts)

    killer = kill_at_random(hosts, chance, times=10 if SOAK else 3)
    while killer.is_alive():
        assert_same(two_epochs(remote(hosts, Stream(400, 0.005)), **options), expected)


@pytest.mark.thorough
def test_streams_leave_a_host_that_hangs(start):
    hosts = up(start(workers=1), start(workers=1))
    batches = iter(DataLoader(remote(hosts, Stream(4000, 0.002)), 10, num_workers=2))
    expected = iter(DataLoader(Stream(4000), 10, num_workers=2))
    next(batches), next(expected)
    hosts[0].freeze()
    for batch, like in zip(batches, expected, strict=True):
        assert batch["number"].tolist() == like["number"].tolist()


@pytest.mark.thorough
def test_a_process_that_hangs_or_dies_again_and_again_is_an_error(start, monkeypatch):
    monkeypatch.setattr(streams, "HANGS_SECONDS", 1.0)
    monkeypatch.setattr(streams, "ATTEMPTS", 2)
    hosts = up(start(setup="import feed.front; feed.front.BEAT_SECONDS = 0.5"), start())
    for number, how in [(DEADLY, "has died"), (SLOW, "hangs")]:
        batches = iter(DataLoader(remote(hosts, TroubledStream(1, 2, number)), None))
        found = []
        with pytest.raises(RuntimeError, match=f"lost 2 times over .* its process {how}"):
            found.extend(batches)


@pytest.mark.thorough
def test_running_forward_is_a_sign_of_life(start, monkeypatch, capfd):
    """It may take longer (here 3 s) than a process may hang (here 1 s)."""
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
    assert re.search(r"continues on data host .*, after 12\d samples", said)
    assert re.search(r"skips samples that were taken before: \d+ of 12\d", said)


@pytest.mark.thorough
def test_no_host_answers(start):
    [host] = up(start())
    batches = iter(DataLoader(remote([host], Stream(10**6), timeout=2.0), 5, num_workers=1))
    next(batches)
    host.kill()
    with pytest.raises(ConnectionError, match="no data host has answered for 2 s"):
        list(batches)


@pytest.mark.thorough
def test_a_dataset_that_has_become_shorter(start, tmp_path):
    """It cannot be run forward to the lost position."""
    (length := tmp_path / "length").write_text("100")
    [host] = up(start())
    batches = iter(DataLoader(remote([host], OddStream("is_as_long_as_a_file_says", length)), 1))
    for _ in range(50):
        next(batches)
    length.write_text("30")
    host.kill()
    host.start()
    with pytest.raises(RuntimeError, match="had only 30 samples, but 5. had been taken"):
        list(batches)


# What streams hold open


@pytest.mark.thorough
def test_what_a_dataset_has_open_is_closed(hosts, tmp_path):
    """Also if the epoch is left in the middle."""
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
    # Workers that remain described the Dataset; they would prepare a map-style one's samples.
    wait_until(lambda: all(len(host.worker_processes()) <= host.workers for host in hosts))


def test_the_number_of_samples_made_in_advance_is_bounded(start, tmp_path):
    """Even if samples of 1 MB take no time to make, and the training takes long for a step."""
    [host] = up(start())
    made = tmp_path / "made"
    batches = iter(DataLoader(remote([host], OddStream("is_large_and_endless", made)), 4))
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
    """gRPC must be idle in a process that forks, so a stream read in it is started again."""
    batches = iter(DataLoader(remote(hosts, Stream(300, 0.001)), 10))
    numbers = [next(batches)["number"]]
    for _ in range(3):
        assert len(list(DataLoader(range(4), num_workers=2))) == 4
        numbers.append(next(batches)["number"])
    assert torch.cat(numbers).tolist() == [*range(40)]
