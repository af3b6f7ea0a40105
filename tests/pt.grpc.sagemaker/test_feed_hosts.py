"""The loader when data hosts or their processes die, hang or are slow.

`make soak` runs this file with SOAK=1: more seeds, more kills.
"""

import asyncio
import contextlib
import os
import random
import threading
import time
from argparse import Namespace
from asyncio import StreamReader, StreamWriter
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.utils.data import Dataset

from feed import client as feed_client
from feed import fetch
from feed.samples import Chunk
from helpers import data_hosts, datasets
from helpers.data_hosts import DataHost, kill_at_random, loader_of, remote, two_epochs, up
from helpers.datasets import PACED, SLOW, STEADY, TROUBLED, Numbers, Reduced, Stream, assert_same
from helpers.waiting import wait_until

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
thorough = pytest.mark.thorough
SEEDS = 50 if "SOAK" in os.environ else 1
KILLS = 10 if "SOAK" in os.environ else 3


def epoch(hosts: list[DataHost], dataset: Dataset = STEADY, **options) -> Iterator:
    """Return an iterator over an epoch, which is the same each time."""
    torch.manual_seed(5)
    options = {"batch_size": 7, "shuffle": not isinstance(dataset, Stream), **options}
    return iter(loader_of(hosts, dataset, **options))


# Hosts


@pytest.mark.parametrize(
    "dataset, seed",
    [
        *[pytest.param(STEADY, seed, marks=thorough) for seed in range(SEEDS)],
        *[(Stream(400, 0.005), seed) for seed in range((SEEDS + 4) // 5)],
    ],
)
def test_hosts_and_workers_are_killed_at_random_moments_and_come_back(start, dataset, seed):
    options = {"shuffle": True, "num_workers": seed % 3}
    if isinstance(dataset, Stream):
        options = {"num_workers": 1 + seed % 4, "persistent_workers": seed % 2 == 1}
    expected = two_epochs(remote([], dataset), **options)
    hosts = up(*[start(workers=1 + seed % 2) for _ in range(2 + seed % 2)])
    killer = kill_at_random(hosts, random.Random(seed), KILLS)
    while killer.is_alive():
        assert_same(two_epochs(remote(hosts, dataset), **options), expected)


def for_a_while(end: Callable, begin_again: Callable) -> Callable:
    """Return an event, which ends all hosts for three seconds."""

    def event(hosts: list[DataHost]) -> None:
        for host in hosts:
            end(host)
        time.sleep(3)
        for host in hosts:
            begin_again(host)

    return event


EVENTS = {
    "one host hangs": lambda hosts: hosts[-1].freeze(),
    "all are gone for a while": for_a_while(DataHost.kill, DataHost.start),
    "all hang for a while": for_a_while(DataHost.freeze, DataHost.thaw),
    "its process is killed": lambda hosts: hosts[0].worker_processes()[0].parent().kill(),
}


@pytest.mark.parametrize(
    "event, after, host_count, dataset, num_workers",
    [
        # After 0 batches: it never answers.
        pytest.param("one host hangs", 0, 2, STEADY, 0, marks=thorough),
        ("one host hangs", 3, 2, STEADY, 0),
        pytest.param("one host hangs", 3, 2, Stream(400, 0.01), 2, marks=thorough),
        pytest.param("all are gone for a while", 1, 2, STEADY, 2, marks=thorough),
        pytest.param("all hang for a while", 1, 1, STEADY, 1, marks=thorough),
        pytest.param("its process is killed", 2, 1, STEADY, 0, marks=thorough),
    ],
)
def test_an_epoch_goes_on_if(
    start, monkeypatch, capfd, event, after, host_count, dataset, num_workers
):
    """Overdue chunks show that a host hangs: gRPC's keepalive, which needs 20 s, is off here."""
    options = dict(feed_client.CHANNEL_OPTIONS) | {"grpc.keepalive_time_ms": 2**31 - 1}
    monkeypatch.setattr(feed_client, "CHANNEL_OPTIONS", [*options.items()])
    expected = list(epoch([], dataset, num_workers=num_workers))
    hosts = up(*[start(workers=2) for _ in range(host_count)])
    if after == 0:
        EVENTS[event](hosts)
    batches = epoch(hosts, dataset, num_workers=num_workers)
    received, began = [next(batches) for _ in range(after)], time.monotonic()
    if after:
        EVENTS[event](hosts)
    assert_same(received + list(batches), expected)
    assert time.monotonic() < began + 15  # gRPC would take longer to notice
    # One line per host and worker, not one per attempt.
    assert capfd.readouterr().out.count(" failed (") <= host_count * max(1, num_workers)
    assert_same(list(epoch(hosts, dataset, num_workers=num_workers)), expected)


def test_another_host_takes_over_for_one_that_is_killed_and_back_again(start, capfd):
    expected = list(epoch([]))
    hosts = up(start(), start())
    batches = epoch(hosts)
    received = [next(batches) for _ in range(3)]
    hosts[1].kill()
    assert_same(received + list(batches), expected)
    [line] = [line for line in capfd.readouterr().out.splitlines() if " was sent to " not in line]
    assert line.startswith(f"feed: data host {hosts[1].address} failed (UNAVAILABLE: ")
    assert line.endswith("): trying it again, and other hosts")

    assert_same(list(epoch(hosts)), expected)  # starts without that host
    hosts[1].start()
    up(hosts[1])
    hosts[0].kill()
    assert_same(list(epoch(hosts)), expected)  # the host that was away serves alone


@pytest.mark.parametrize(
    "event, dataset, num_workers, reason",
    [
        (DataHost.kill, STEADY, 0, "UNAVAILABLE: "),
        pytest.param(DataHost.kill, STEADY, 1, "UNAVAILABLE: ", marks=thorough),
        pytest.param(DataHost.kill, Stream(10**6), 1, "UNAVAILABLE: ", marks=thorough),
        pytest.param(DataHost.freeze, STEADY, 0, "silent", marks=thorough),
    ],
)
def test_a_host_that_never_comes_back_is_an_error(start, event, dataset, num_workers, reason):
    [host] = up(start())
    batches = epoch([host], dataset, num_workers=num_workers, timeout=2)
    next(batches)
    event(host)
    words = f"no data host has answered for 2 s .{host.address}: {reason}"
    with pytest.raises(ConnectionError, match=words):
        list(batches)
    with pytest.raises(ConnectionError, match="no data host has answered for 2 s"):
        list(epoch([host], dataset, timeout=2))  # nor is it there at the start


@thorough
@pytest.mark.parametrize("seed", range(SEEDS))
def test_connections_may_be_cut_within_replies(start, seed):
    """A relay cuts each connection after a random number of bytes."""
    chance, cuts, is_over = random.Random(seed), [], threading.Event()
    [host] = up(start(workers=1 + seed % 2))
    relay = Namespace(address=f"127.0.0.1:{data_hosts.free_port()}")

    async def pass_on(source: StreamReader, target: StreamWriter, left: int) -> None:
        with contextlib.suppress(OSError):
            while left > 0 and (data := await source.read(min(65536, left))):
                target.write(data)
                await target.drain()
                left -= len(data)
        cuts.append(left)
        target.close()

    async def connect(from_client: StreamReader, to_client: StreamWriter) -> None:
        from_host, to_host = await asyncio.open_connection(*host.address.split(":"))
        # Later after each cut, so that the epoch ends.
        limit = chance.randrange(3_000_000) * (10 + len(cuts)) // 10
        there, back = (from_client, to_host, 10**12), (from_host, to_client, limit)
        await asyncio.gather(pass_on(*there), pass_on(*back))

    async def serve() -> None:
        async with await asyncio.start_server(connect, *relay.address.split(":")):
            await asyncio.to_thread(is_over.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert_same(list(epoch([relay])), list(epoch([])))
        assert cuts.count(0) > 2, cuts
    finally:
        is_over.set()
        thread.join()


@thorough
def test_pauses_of_the_training_do_not_count(start):
    [host] = up(start())
    batches = epoch([host], Numbers(), timeout=2)
    next(batches)
    time.sleep(3)
    next(batches)
    host.kill()
    host.start()
    up(host)
    time.sleep(3)
    assert len(list(batches)) == 7


@thorough
def test_a_host_that_is_busy_is_not_silent(start):
    """Preparing a sample may take longer than the timeout."""
    [host] = up(start(setup="import feed.front; feed.front.BEAT_SECONDS = 0.3"))
    table = datasets.Table(lambda table, index: time.sleep(3 * (index == 0)) or index)
    assert [*loader_of([host], table, [[0, 1], [2]], timeout=1.5)] == [[0, 1], [2]]


@pytest.mark.parametrize("reduce", [Reduced, pytest.param(lambda make: make, marks=thorough)])
def test_a_dataset_that_is_never_made_is_an_error_unless_another_host_has_it(
    start, reduce, monkeypatch
):
    dataset = reduce(datasets.hang_if_told)
    monkeypatch.setattr(fetch, "MAKING_TIMEOUTS", 2)
    beat = "import feed.front; feed.front.BEAT_SECONDS, feed.front.TELL_SECONDS = 0.3, 1"
    bad, good = up(start(setup=beat, environment={"HANGS": "1"}), start())
    with pytest.raises(TimeoutError, match="has made the Dataset within 3 s: does"):
        next(iter(loader_of([bad], dataset, timeout=1.5)))
    for seconds in (1, 2):
        assert bad.said().count(f"feed: a Dataset, 0.0 MB, is not ready after {seconds} s") == 1
    monkeypatch.undo()
    assert len(list(loader_of([bad, good], dataset, timeout=1.5, batch_size=20))) == 4


def test_a_host_that_comes_up_late_is_used(start):
    early, late = (start(environment={"PACE": pace}) for pace in ("20", "21"))
    late.kill()
    batches = iter(loader_of([early, late], PACED, num_workers=1, batch_size=4))
    assert {pace for _, pace in next(batches)} == {20}
    late.start()
    wait_until(lambda: any(pace == 21 for _, pace in next(batches)), seconds=60)


def test_a_wrong_token_ends_the_training_at_once(start):
    [host] = up(start(token="another"))
    away = Namespace(address=f"127.0.0.1:{data_hosts.free_port()}")  # down, and not waited for
    for num_workers in (0, 1):
        with pytest.raises(PermissionError, match=f"{host.address}: wrong or missing token: do"):
            list(epoch([away, host], num_workers=num_workers))


def test_a_slow_host_does_not_hold_up_a_fast_one(start):
    """A host that is four times slower than the other gets about a fifth of the samples."""
    hosts = up(*[start(workers=2, environment={"PACE": pace}) for pace in ("10", "40")])
    batches = list(loader_of(hosts, PACED, [[*range(i, i + 16)] for i in range(0, 960, 16)]))
    assert [index for batch in batches for index, _ in batch] == [*range(960)]
    served = Counter(pace for batch in batches[10:] for _, pace in batch)
    assert 0 < served[40] < served[10] / 2, served


@pytest.mark.parametrize("seconds, size", [(0.001, 16), (0.02, 3)])
def test_chunks_are_larger_if_samples_are_cheap(start, monkeypatch, seconds, size):
    """A call takes about 1 ms of CPU on either side, which is much for a few cheap samples."""
    sizes, get_chunk = [], feed_client.DataHost.get_chunk

    def noted(host: feed_client.DataHost, chunk: Chunk, *arguments) -> list:
        sizes.append(len(chunk.indices))
        return get_chunk(host, chunk, *arguments)

    monkeypatch.setattr(feed_client.DataHost, "get_chunk", noted)
    measured = property(lambda host: seconds, lambda host, value: None)  # for each sample
    monkeypatch.setattr(feed_client.DataHost, "seconds", measured, raising=False)
    hosts = up(start(workers=8))
    list(loader_of(hosts, STEADY, [[*range(48)]] * 3))
    assert sizes[-3:] == [size] * 3, sizes


# The hosts' processes


HOLD = """import os, resource
resource.setrlimit(resource.RLIMIT_NOFILE, (2048, 2048))
held = [os.dup(0) for _ in range(1024)]
"""


def test_a_worker_that_is_killed_is_replaced_and_the_log_says_so(start):
    """Also if its pipe is beyond the files that select can handle."""
    [host] = up(start(workers=2, setup=HOLD))
    batches, received = epoch([host]), []
    for _ in range(3):
        received += [next(batches), next(batches)]
        host.worker_processes()[0].kill()
    assert_same(received + list(batches), list(epoch([])))
    assert "feed: a worker process has died" in host.said()


HASTY = "import feed.worker; feed.worker.CHUNK_TIMEOUT = 2"


@thorough
@pytest.mark.parametrize(
    "dataset, sample, setup, error, words",
    [
        (
            TROUBLED,
            datasets.DEADLY,
            "",
            RuntimeError,
            "failed 3 times in a row: the last one has died: is",
        ),
        (TROUBLED, SLOW, HASTY, RuntimeError, "worker processes failed 3 times .* one hangs"),
        (Reduced(os.abort), 0, "", RuntimeError, "the Dataset's process has died: is there enough"),
        (
            Reduced(__import__, "not_there"),
            0,
            "",
            ModuleNotFoundError,
            "No module named 'not_there'",
        ),
    ],
)
def test_what_ends_a_process_there_is_an_error_and_the_host_still_serves_others(
    start, dataset, sample, setup, error, words
):
    [host] = up(start(setup=setup))
    batches = iter(loader_of([host], dataset, [[1, sample], [2]], num_workers=1))
    with pytest.raises(error, match=words):
        next(batches)
    assert dataset is not TROUBLED or [*batches] == [[2]]  # the loop may go on
    assert [*loader_of([host], TROUBLED, [[2]])] == [[2]]


@thorough
def test_a_worker_that_is_frozen_is_replaced(start):
    """Also while the server waits for the rest of a large sample."""
    [host] = up(start(setup=HASTY))
    for times, sample in enumerate([0, datasets.BIG], start=1):
        batches = iter(loader_of([host], TROUBLED, [[sample]] * 3000, num_workers=1))
        for _ in range(3):
            next(batches)
        [worker] = host.worker_processes()
        worker.suspend()
        while host.said().count("a worker process hangs") < times:
            next(batches)
        next(batches)
        del batches


@thorough
@pytest.mark.parametrize("frozen, other", [(1, "20"), (2, "20"), (2, "400")])
def test_a_frozen_worker_holds_nobody_up_if_there_is_another_host(start, frozen, other):
    """Overdue chunks are requested again, long before the server gives up on the worker.

    frozen: how many of the first host's two workers. other: ms per sample on the other host.
    """
    hosts = up(*[start(workers=2, environment={"PACE": pace}) for pace in ("20", other)])
    batches = iter(loader_of(hosts, PACED, [[i] for i in range(100)], num_workers=2))
    received = [next(batches) for _ in range(30)]
    for worker in hosts[0].worker_processes()[:frozen]:
        worker.suspend()
    received += list(batches)
    assert [index for [(index, _)] in received] == list(range(100))
    assert "worker process" not in hosts[0].said()  # CHUNK_TIMEOUT has not passed


def test_a_lone_host_prepares_a_slow_sample_once(start):
    """Overdue chunks go to other hosts only: here they would take workers from other samples."""
    [host] = up(start(workers=4))
    batches = iter(loader_of([host], TROUBLED, [[0], [1], [SLOW]], num_workers=1))
    next(batches), next(batches)
    wait_until(lambda: "asleep" in host.said())
    time.sleep(3)  # long after it is overdue
    assert host.said().count("asleep") == 1
