"""The loader of the PyTorch example when data hosts are killed, hang, are slow, or are others.

`make soak` runs this file with SOAK=1: more seeds, more batches, larger ones.
"""

import contextlib
import math
import os
import random
import socket
import subprocess
import sys
import threading
import time
from argparse import Namespace

import pytest
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from data_hosts import (
    BIG,
    SAMPLES,
    SLOW,
    TOKEN,
    Steady,
    assert_same,
    free_port,
    local,
    service,
    up,
    wait_until,
)
from feed import epoch
from feed.batches import BatchKeys
from feed.client import RemoteDataset

SOAK = "SOAK" in os.environ
SEEDS = range(50 if SOAK else 1)


def steady_keys() -> BatchKeys:
    """Of 15 batches in random order."""
    sampler = DistributedSampler(range(SAMPLES), 1, 0, seed=5)
    return BatchKeys(BatchSampler(sampler, 7, drop_last=False), seed=5)


@pytest.fixture(scope="module")
def expected() -> list:
    return list(local(Steady(), steady_keys()))


def lines(capsys: pytest.CaptureFixture) -> list[str]:
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("seed", SEEDS)
def test_hosts_are_killed_at_random_moments_and_come_back(start, expected, seed):
    chance = random.Random(seed)
    hosts = [start("steady") for _ in range(2 + seed % 2)]
    loader = service(hosts, steady_keys(), read_ahead=chance.choice([1, 4]))
    assert_same(list(loader), expected)

    def kill_some() -> None:
        for _ in range(10 if SOAK else 2):
            time.sleep(chance.uniform(0, 0.5))
            host = chance.choice(hosts)
            host.kill()
            time.sleep(chance.uniform(0, 0.5))
            host.start()

    killer = threading.Thread(target=kill_some)
    killer.start()
    while killer.is_alive():
        assert_same(list(loader), expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_connections_are_cut_within_batches(start, expected, seed):
    """By a relay, which cuts each connection but the first after a random length."""
    chance, cuts, ends = random.Random(seed), [], []
    [host] = up(start("steady", num_workers=1 + seed % 2))
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
                # Further each time, so that the epoch comes to an end.
                limit = chance.randrange(3_000_000) * (10 + len(cuts)) // 10 if ends else 10**12
                ends.extend([client, server])
                for way in [(client, server, 10**12), (server, client, limit)]:
                    threading.Thread(target=pass_on, args=way).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        acceptor = threading.Thread(target=accept)
        acceptor.start()
        try:
            relay = Namespace(address=f"127.0.0.1:{listener.getsockname()[1]}")
            assert_same(list(service([relay], steady_keys())), expected)
            assert cuts.count(0) > 2, cuts
        finally:
            hang_up(listener)
            acceptor.join()
            for end in ends:
                end.close()


def test_another_host_takes_over_for_one_that_is_killed_and_back_again(start, expected, capsys):
    hosts = up(start("steady"), start("steady"))
    loader = service(hosts, steady_keys())
    batches = iter(loader)
    received = [next(batches) for _ in range(3)]
    hosts[1].kill()
    assert_same(received + list(batches), expected)
    [line] = lines(capsys)
    assert line.startswith(f"data host {hosts[1].address} failed (UNAVAILABLE: ")
    assert line.endswith("): its batches are asked of whoever answers")

    assert_same(list(loader), expected)  # starts without it
    hosts[1].start()
    up(hosts[1])
    hosts[0].kill()
    assert_same(list(loader), expected)  # the host that was away serves alone
    [line] = lines(capsys)
    assert line.startswith(f"data host {hosts[0].address} failed (UNAVAILABLE: ")


@pytest.mark.thorough
def test_hosts_may_all_be_gone_for_a_while(start, expected, capsys):
    hosts = up(start("steady"), start("steady"))
    batches = iter(service(hosts, steady_keys(), read_ahead=1))
    received = [next(batches) for _ in range(4)]
    for host in hosts:
        host.kill()
    time.sleep(2)
    for host in hosts:
        host.start()
    assert_same(received + list(batches), expected)
    assert len(lines(capsys)) == 2  # one for each, not one for each attempt


@pytest.mark.parametrize("count", [1, 2])
def test_nobody_comes_back(start, capsys, count):
    hosts = up(*[start("steady") for _ in range(count)])
    batches = iter(service(hosts, steady_keys(), read_ahead=1, timeout=2))
    next(batches)
    for host in hosts:
        host.kill()
    with pytest.raises(ConnectionError, match="no batch for 2 s") as caught:
        list(batches)
    assert all(f"{host.address} failed (UNAVAILABLE" in str(caught.value) for host in hosts)
    assert len(lines(capsys)) == count


def test_pauses_of_the_training_do_not_count(start, capsys):
    """Neither before its first epoch nor between two of them is anybody asked."""
    [host] = up(start("zoo"))
    loader = service([host], [[0]] * 20, timeout=2)
    time.sleep(3)
    batches = iter(loader)
    next(batches)
    host.kill()
    wait_until(lambda: lines(capsys))
    del batches
    host.start()
    up(host)
    time.sleep(3)
    assert len(list(loader)) == 20


def test_nobody_has_ever_been_there():
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(ConnectionError, match=f"data host {address} failed .DEADLINE_EXCEEDED"):
        RemoteDataset([address], TOKEN, timeout=1)


@pytest.mark.thorough
def test_a_host_that_is_back_may_take_its_time_while_another_is_gone(start):
    """Longer than all may be silent for: it answers."""
    slow, gone = up(*[start("paced", environment={"PACE": "1000"}) for _ in range(2)])
    loader = service([slow, gone], [[0], [1], [2, 3, 4]], read_ahead=1, timeout=2)
    gone.kill()
    batches = iter(loader)
    next(batches)
    slow.kill()
    wait_until(lambda: not loader.dataset.dataset.hosts[0].is_up)
    slow.start()
    wait_until(lambda: loader.dataset.dataset.hosts[0].is_up, seconds=60)
    assert [indices.tolist() for indices, _ in batches] == [[1], [2, 3, 4]]


def test_a_host_that_comes_up_late_is_used(start, capsys):
    early, late = (start("paced", environment={"PACE": pace}) for pace in ("100", "101"))
    late.kill()
    batches = iter(service([early, late], [[0]] * 1000))
    assert next(batches)[1] == 100
    late.start()
    wait_until(lambda: next(batches)[1] == 101, seconds=60)
    assert not lines(capsys)


def test_each_host_is_asked_for_what_its_own_workers_allow_in_the_first_epoch(start, monkeypatch):
    """Also a larger one than the one that answered first, and one that comes late.

    Training takes one batch and no other, so each call ends up with a batch that waits.
    """
    monkeypatch.setattr(epoch, "OVERDUE_SECONDS", math.inf)  # no batch is prepared twice
    small, large, late = (
        start("paced", num_workers=workers, environment={"PACE": "1"}) for workers in (1, 3, 2)
    )
    large.kill(), late.kill()
    batches = iter(service([*up(small), large, late], [[0]] * 1000, read_ahead=4))
    large.start()
    up(large)
    next(batches)

    def prepared() -> list[int]:
        counts = [host.said().count("prepared") for host in (small, large, late)]
        return [counts[0] + counts[1], counts[2]]

    early = 1 + 4 + 3 + 5  # the one taken, read_ahead, and the calls: two more than workers
    wait_until(lambda: prepared() == [early, 0], seconds=60)
    late.start()
    wait_until(lambda: prepared() == [early, 4], seconds=60)
    time.sleep(1)
    assert prepared() == [early, 4]


def test_a_wrong_token_ends_the_training_at_once(start):
    [host] = up(start("steady", token="another"))
    away = f"127.0.0.1:{free_port()}"  # which is not waited for
    with pytest.raises(PermissionError, match=f"{host.address} failed .*do both have the same"):
        RemoteDataset([away, host.address], TOKEN)


@pytest.mark.parametrize(
    "other, error, words",
    [
        ({"token": "another"}, PermissionError, "wrong or missing token"),
        ({"version": "2"}, ValueError, "serves .*Steady 2 of 103 samples, not .*Steady of 103"),
    ],
)
def test_a_host_that_comes_late_or_again_must_be_like_the_others(start, other, error, words):
    """Here it is one that has been restarted with something else."""
    host = start("steady")
    up(host)
    batches = iter(service([host], steady_keys(), read_ahead=1))
    next(batches)
    host.kill()
    host.options |= other
    host.start()
    with pytest.raises(error, match=f"data host {host.address} failed .*{words}"):
        list(batches)


@pytest.mark.parametrize("stopped_after", [0, 3])  # batches; 0: it never answers
def test_another_host_takes_over_for_one_that_hangs(start, expected, stopped_after, capsys):
    hosts = up(start("steady"), start("steady"))
    if stopped_after == 0:
        hosts[1].process.suspend()
    loader = service(hosts, steady_keys())
    batches = iter(loader)
    received = [next(batches) for _ in range(stopped_after)]
    hosts[1].process.suspend()
    started = time.monotonic()
    assert_same(received + list(batches), expected)
    assert_same(list(loader), expected)  # another epoch, which does not wait for it either
    assert time.monotonic() - started < 20  # which gRPC needs to notice


def test_a_host_that_hangs_is_noticed_also_when_nothing_is_asked(start, capsys, monkeypatch):
    options = dict(epoch.CHANNEL_OPTIONS)
    options |= {"grpc.keepalive_time_ms": 2_000}  # to save time
    options |= {"grpc.keepalive_timeout_ms": 2_000, "grpc.http2.ping_timeout_ms": 2_000}
    monkeypatch.setattr(epoch, "CHANNEL_OPTIONS", list(options.items()))
    [host] = up(start("zoo"))
    batches = iter(service([host], [[0]] * 4 + [[SLOW]] * 4))
    next(batches)
    time.sleep(8)  # gRPC by itself would send two pings in this time, and then rarely any
    host.process.suspend()
    wait_until(lambda: lines(capsys), seconds=12)


def test_training_may_take_no_batch_for_long(start, expected, capsys, monkeypatch):
    """Its signs of life are not too many for a host that may send nothing meanwhile."""
    options = {**dict(epoch.CHANNEL_OPTIONS), "grpc.keepalive_time_ms": 2_000}  # to save time
    monkeypatch.setattr(epoch, "CHANNEL_OPTIONS", list(options.items()))
    batches = iter(service(up(start("steady")), steady_keys(), read_ahead=1))
    received = [next(batches) for _ in range(3)]
    time.sleep(10)
    assert_same(received + list(batches), expected)
    assert not lines(capsys)


@pytest.mark.parametrize("times_slower", [1, 5, 20] if SOAK else [5])
def test_a_slow_host_does_not_hold_up_a_fast_one(start, times_slower):
    """How slow it is is learnt in the first epoch. They sleep; other work here costs both time."""
    paces = ("100", str(100 * times_slower))
    hosts = [start("paced", num_workers=2, environment={"PACE": pace}) for pace in paces]
    loaders = [service(up(*hosts)[:count], [[i] for i in range(100)]) for count in (1, 2)]

    def seconds(loader: DataLoader) -> float:
        started = time.monotonic()
        assert [indices.item() for indices, _ in loader] == list(range(100))
        return time.monotonic() - started

    seconds(loaders[1])
    ratios = (seconds(loaders[0]) / seconds(loaders[1]) for _ in range(3))
    least = {1: 1.5, 5: 0.95, 20: 0.9}[times_slower]
    assert any(ratio > least for ratio in ratios)


@pytest.mark.thorough
def test_what_is_held_does_not_depend_on_the_number_of_hosts(start):
    """A training that takes its time holds `read_ahead` batches; the others wait at the hosts."""
    hosts = up(*[start("zoo", num_workers=workers) for workers in (1, 2, 6)])

    def mebibytes(count: int) -> int:
        addresses = [host.address for host in hosts[:count]]
        code = f"""if True:
            import sys
            sys.path[:0] = {sys.path!r}
            from data_hosts import *
            hosts = [type("Host", (), {{"address": a}}) for a in {addresses}]
            batches = iter(service(hosts, [[{BIG}]] * 60, read_ahead=2))
            for _ in range(20):
                next(batches)
            time.sleep(2)
            print(psutil.Process().memory_info().rss >> 20)"""
        return int(subprocess.run([sys.executable, "-c", code], capture_output=True).stdout)

    assert mebibytes(3) < mebibytes(1) + 120  # what two hosts more have ready is 480
