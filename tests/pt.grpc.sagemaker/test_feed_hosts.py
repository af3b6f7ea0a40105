"""The loader of the PyTorch example when data hosts or their processes die, hang or are slow.

`make soak` runs this file with SOAK=1: more seeds, more kills.
"""

import contextlib
import os
import random
import socket
import threading
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import Dataset

from feed import client as feed_client
from feed import fetch
from helpers.data_hosts import DataHost, free_port, kill_at_random, loader_of, up
from helpers.datasets import (
    BIG,
    DEADLY,
    SLOW,
    Hangs,
    Numbers,
    Paced,
    Steady,
    TakesItsTime,
    Troubled,
    assert_same,
)
from helpers.waiting import wait_until

SOAK = "SOAK" in os.environ
SEEDS = range(50 if SOAK else 1)


def epoch(hosts: list[DataHost], dataset: Dataset | None = None, **options) -> Iterator:
    """Return an iterator over an epoch in random order, which is the same each time."""
    torch.manual_seed(5)
    options = {"batch_size": 7, "shuffle": True, **options}
    return iter(loader_of(hosts, dataset or Steady(), **options))


@pytest.fixture(scope="module")
def expected() -> list:
    return list(epoch([]))


def lines(capfd: pytest.CaptureFixture) -> list[str]:
    """Return what the loader has printed about hosts."""
    said = capfd.readouterr().out.splitlines()
    return [line.removeprefix("feed: ") for line in said if " was sent to " not in line]


# Hosts


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.thorough
def test_hosts_are_killed_at_random_moments_and_come_back(start, expected, seed):
    chance = random.Random(seed)
    hosts = [start(workers=1 + seed % 2) for _ in range(2 + seed % 2)]
    num_workers = seed % 3
    assert_same(list(epoch(hosts, num_workers=num_workers)), expected)

    killer = kill_at_random(hosts, chance, times=10 if SOAK else 3)
    while killer.is_alive():
        assert_same(list(epoch(hosts, num_workers=num_workers)), expected)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.thorough
def test_connections_are_cut_within_replies(start, expected, seed):
    """A relay cuts each connection after a random number of bytes."""
    chance, cuts, ends = random.Random(seed), [], []
    [host] = up(start(workers=1 + seed % 2))
    port = int(host.address.split(":")[1])

    def hang_up(connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    def pass_on(source: socket.socket, target: socket.socket, left: int) -> None:
        with contextlib.suppress(OSError):
            while left > 0 and (data := source.recv(min(65536, left))):
                target.sendall(data)
                left -= len(data)
        cuts.append(left)
        for end in (source, target):
            hang_up(end)

    def accept() -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = listener.accept()
                server = socket.create_connection(("127.0.0.1", port))
                # Later after each cut, so that the epoch ends.
                limit = chance.randrange(3_000_000) * (10 + len(cuts)) // 10
                ends.extend([client, server])
                for way in [(client, server, 10**12), (server, client, limit)]:
                    threading.Thread(target=pass_on, args=way).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        acceptor = threading.Thread(target=accept)
        acceptor.start()
        try:
            relay = Namespace(address=f"127.0.0.1:{listener.getsockname()[1]}")
            assert_same(list(epoch([relay])), expected)
            assert cuts.count(0) > 2, cuts
        finally:
            hang_up(listener)
            acceptor.join()
            for end in ends:
                end.close()


def test_another_host_takes_over_for_one_that_is_killed_and_back_again(start, expected, capfd):
    hosts = up(start(), start())
    batches = epoch(hosts)
    received = [next(batches) for _ in range(3)]
    hosts[1].kill()
    assert_same(received + list(batches), expected)
    [line] = lines(capfd)
    assert line.startswith(f"data host {hosts[1].address} failed (UNAVAILABLE: ")
    assert line.endswith("): trying it again, and other hosts")

    assert_same(list(epoch(hosts)), expected)  # starts without that host
    hosts[1].start()
    up(hosts[1])
    hosts[0].kill()
    assert_same(list(epoch(hosts)), expected)  # the host that was away serves alone


@pytest.mark.thorough
def test_hosts_may_all_be_gone_for_a_while(start, expected, capfd):
    hosts = up(start(), start())
    batches = epoch(hosts, num_workers=2)
    received = [next(batches)]
    for host in hosts:
        host.kill()
    time.sleep(2)
    for host in hosts:
        host.start()
    assert_same(received + list(batches), expected)
    assert len(lines(capfd)) <= 2 * 2  # one per host and worker, not one per attempt


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_no_host_comes_back(start, num_workers):
    [host] = up(start())
    batches = epoch([host], num_workers=num_workers, timeout=2)
    next(batches)
    host.kill()
    words = f"no data host has answered for 2 s .{host.address}: UNAVAILABLE: "
    with pytest.raises(ConnectionError, match=words):
        list(batches)
    with pytest.raises(ConnectionError, match=words):  # nor is a host there at the start
        list(epoch([host], timeout=2))


@pytest.mark.thorough
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


@pytest.mark.thorough
def test_a_host_that_is_busy_is_not_silent(start):
    """Loading a Dataset or preparing a sample may take longer than the timeout."""
    [host] = up(start(setup="import feed.front; feed.front.BEAT_SECONDS = 0.3"))
    assert [*loader_of([host], TakesItsTime(), [[0, 1], [2]], timeout=1.5)] == [[0, 1], [2]]


@pytest.mark.parametrize("dataset", [Hangs(), pytest.param(Hangs, marks=pytest.mark.thorough)])
def test_a_dataset_that_is_never_made_is_an_error_unless_another_host_has_it(
    start, dataset, monkeypatch
):
    monkeypatch.setattr(fetch, "MAKING", 2)
    beat = "import feed.front; feed.front.BEAT_SECONDS, feed.front.TELL_SECONDS = 0.3, 1"
    bad, good = up(start(setup=beat, environment={"HANGS": "1"}), start())
    with pytest.raises(TimeoutError, match="has made the Dataset within 3 s: does"):
        next(iter(loader_of([bad], dataset, timeout=1.5)))
    for seconds in (1, 2):
        assert bad.said().count(f"feed: a Dataset, 0.0 MB, is not ready after {seconds} s") == 1
    monkeypatch.undo()
    assert len(list(loader_of([bad, good], dataset, timeout=1.5, batch_size=20))) == 4


def test_a_host_that_comes_up_late_is_used(start, capfd):
    early, late = (start(environment={"PACE": pace}) for pace in ("20", "21"))
    late.kill()
    batches = iter(loader_of([early, late], Paced(), num_workers=1, batch_size=4))
    assert {pace for _, pace in next(batches)} == {20}
    late.start()
    wait_until(lambda: any(pace == 21 for _, pace in next(batches)), seconds=60)


def test_a_wrong_token_ends_the_training_at_once(start):
    [host] = up(start(token="another"))
    away = Namespace(address=f"127.0.0.1:{free_port()}")  # down, and not waited for
    for num_workers in (0, 1):
        with pytest.raises(PermissionError, match=f"{host.address}: wrong or missing token: do"):
            list(epoch([away, host], num_workers=num_workers))


# Batches; 0: the host never answers.
@pytest.mark.parametrize("stopped_after", [0, pytest.param(3, marks=pytest.mark.thorough)])
def test_another_host_takes_over_for_one_that_hangs(start, expected, stopped_after, monkeypatch):
    """Its overdue chunks show that it hangs: gRPC's keepalive, which needs 20 s, is off here."""
    options = dict(feed_client.CHANNEL_OPTIONS) | {"grpc.keepalive_time_ms": 2**31 - 1}
    monkeypatch.setattr(feed_client, "CHANNEL_OPTIONS", [*options.items()])
    hosts = up(start(), start())
    if stopped_after == 0:
        hosts[1].freeze()
    batches = epoch(hosts)
    received = [next(batches) for _ in range(stopped_after)]
    hosts[1].freeze()
    assert_same(received + list(batches), expected)
    assert_same(list(epoch(hosts)), expected)  # the next epoch does not wait for it either


@pytest.mark.thorough
def test_a_host_that_hangs_for_a_while_goes_on(start, expected):
    [host] = up(start(workers=2))
    batches = epoch([host], num_workers=1)
    received = [next(batches)]
    host.freeze()
    time.sleep(3)
    host.thaw()
    assert_same(received + list(batches), expected)


@pytest.mark.thorough
def test_a_host_that_hangs_forever_is_reported_as_silent(start):
    [host] = up(start())
    batches = epoch([host], timeout=2)
    next(batches)
    host.freeze()
    with pytest.raises(ConnectionError, match=f"answered for 2 s .{host.address}: silent"):
        list(batches)


def test_a_slow_host_does_not_hold_up_a_fast_one(start):
    """A host that is four times slower than the other gets about a fifth of the samples."""
    hosts = up(*[start(workers=2, environment={"PACE": pace}) for pace in ("10", "40")])
    loader = loader_of(hosts, Paced(), [[*range(i, i + 16)] for i in range(0, 960, 16)])
    batches = list(loader)
    assert [index for batch in batches for index, _ in batch] == [*range(960)]
    served = Counter(pace for batch in batches[10:] for _, pace in batch)
    assert 0 < served[40] < served[10] / 2, served


# The hosts' processes


HOLD = """import os, resource
resource.setrlimit(resource.RLIMIT_NOFILE, (2048, 2048))
held = [os.dup(0) for _ in range(1024)]
"""


@pytest.mark.parametrize("setup", ["", HOLD], ids=["", "beyond the files that select can handle"])
def test_a_worker_that_is_killed_is_replaced_and_the_log_says_so(start, expected, setup):
    [host] = up(start(workers=2, setup=setup))
    batches = epoch([host])
    received = []
    for _ in range(3):
        received += [next(batches), next(batches)]
        host.worker_processes()[0].kill()
    assert_same(received + list(batches), expected)
    assert "feed: a worker process has died" in host.said()


@pytest.mark.thorough
def test_the_process_that_holds_a_dataset_is_replaced_too(start, expected):
    [host] = up(start())
    batches = epoch([host])
    received = [next(batches), next(batches)]
    [worker] = host.worker_processes()
    worker.parent().kill()
    assert_same(received + list(batches), expected)


@pytest.mark.thorough
def test_a_sample_that_kills_its_process_is_an_error_and_no_endless_loop(start):
    [host] = up(start())
    batches = iter(loader_of([host], Troubled(), [[0], [1, DEADLY], [2]], num_workers=1))
    assert next(batches) == [0]
    with pytest.raises(RuntimeError, match="failed 3 times in a row: the last one has died: is"):
        next(batches)
    assert [*batches] == [[2]]


class Unloadable(Numbers):
    """Kills the process that loads it, like a Dataset that takes too much memory."""

    def __reduce__(self) -> tuple:
        return os.abort, ()


class ElsewhereOnly(Numbers):
    """Needs a module that data hosts don't have."""

    def __reduce__(self) -> tuple:
        return __import__, ("not_there_at_all",)


@pytest.mark.thorough
def test_a_dataset_that_cannot_be_loaded_there_is_an_error(start):
    [host] = up(start())
    for dataset, error, words in [
        (Unloadable(), RuntimeError, "the Dataset's process has died: is there enough"),
        (ElsewhereOnly(), ModuleNotFoundError, "No module named 'not_there_at_all'"),
    ]:
        with pytest.raises(error, match=words):
            next(iter(loader_of([host], dataset, num_workers=1)))
    assert len(list(epoch([host], Numbers()))) == 9  # the host still serves others


@pytest.mark.thorough
def test_a_sample_that_takes_longer_than_it_may_is_an_error(start):
    [host] = up(start(setup="import feed.worker; feed.worker.CHUNK_SECONDS = 2"))
    batches = iter(loader_of([host], Troubled(), [[0], [SLOW], [1]]))
    assert next(batches) == [0]
    with pytest.raises(RuntimeError, match="worker processes failed 3 times .* one hangs"):
        next(batches)
    assert [*batches] == [[1]]


@pytest.mark.thorough
def test_a_worker_that_is_frozen_is_replaced(start):
    """Also while the server waits for the rest of a large sample."""
    [host] = up(start(setup="import feed.worker; feed.worker.CHUNK_SECONDS = 2"))
    for times, sample in enumerate([0, BIG], start=1):
        batches = iter(loader_of([host], Troubled(), [[sample]] * 3000, num_workers=1))
        for _ in range(3):
            next(batches)
        [worker] = host.worker_processes()
        worker.suspend()
        while host.said().count("a worker process hangs") < times:
            next(batches)
        next(batches)
        del batches


@pytest.mark.thorough
@pytest.mark.parametrize("frozen, other", [(1, "20"), (2, "20"), (2, "400")])
def test_a_frozen_worker_holds_nobody_up_if_there_is_another_host(start, frozen, other):
    """Overdue chunks are requested again, long before the server gives up on the worker.

    frozen: how many of the first host's two workers. other: ms per sample on the other host.
    """
    hosts = [start(workers=2, environment={"PACE": pace}) for pace in ("20", other)]
    up(*hosts)
    batches = iter(loader_of(hosts, Paced(), [[i] for i in range(100)], num_workers=2))
    received = [next(batches) for _ in range(30)]
    for worker in hosts[0].worker_processes()[:frozen]:
        worker.suspend()
    received += list(batches)
    assert [index for [(index, _)] in received] == list(range(100))
    assert "worker process" not in hosts[0].said()  # CHUNK_SECONDS have not passed


def test_a_lone_host_prepares_a_slow_sample_once(start):
    """Overdue chunks go to other hosts only: here they would take workers from other samples."""
    [host] = up(start(workers=4))
    batches = iter(loader_of([host], Troubled(), [[0], [1], [SLOW]], num_workers=1))
    next(batches), next(batches)
    wait_until(lambda: "asleep" in host.said())
    time.sleep(3)  # long after it is overdue
    assert host.said().count("asleep") == 1
