"""The loader of the PyTorch example when data hosts are killed, hang, come back, or never do."""

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from data_hosts import (
    BATCH_SIZE,
    TOKEN,
    DataHost,
    Plain,
    Steady,
    assert_same,
    feed,
    free_port,
    has_ended,
    wait_until,
)

sys.path.insert(0, str(Path(__file__).parents[1] / "pt.grpc.sagemaker" / "code"))

import feed_client  # noqa: E402
from batches import LocalLoader  # noqa: E402
from feed_client import FeedLoader  # noqa: E402
from feed_server import FeedServer  # noqa: E402

PLAN = {"batch_size": BATCH_SIZE, "shuffle": True, "seed": 5}


@pytest.fixture(scope="module")
def expected() -> list:
    """The batches of an epoch."""
    return list(LocalLoader(Steady(), **PLAN))


@pytest.fixture
def start() -> Iterator[Callable[[str], DataHost]]:
    """Start data hosts that this test may harm; nothing is left of them, nor of their clients."""
    hosts = []

    def start(name: str = "steady") -> DataHost:
        hosts.append(DataHost(name))
        return hosts[-1]

    yield start
    processes = [process for host in hosts for process in processes_of(host)]
    for process in processes:
        process.kill()
    wait_until(lambda: all(map(has_ended, processes)))
    wait_until(lambda: threading.active_count() == 1)


def processes_of(host: DataHost) -> list[psutil.Process]:
    return [] if has_ended(host.process) else host.processes()


def kill(*hosts: DataHost) -> None:
    for host in hosts:
        host.process.kill()
        host.process.wait()


def lines(capsys: pytest.CaptureFixture) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_another_host_takes_over_for_one_that_is_killed(start, expected, capsys):
    hosts = [start(), start()]
    first, second = [host.addresses["steady"] for host in hosts]
    loader = feed("steady", hosts, read_ahead=1, **PLAN)
    batches = iter(loader)
    received = [next(batches) for _ in range(3)]
    kill(hosts[1])
    assert_same(received + list(batches), expected)
    [line] = lines(capsys)
    assert line.startswith(f"data host {second} failed (UNAVAILABLE: ")
    assert line.endswith(f"): asking {first} for its batches")

    assert_same(list(loader), expected)  # starts without it
    hosts[1].start()
    wait_until(lambda: lines(capsys) or answers(second), seconds=30)
    kill(hosts[0])
    assert_same(list(loader), expected)  # the host that was away now serves alone
    [line] = lines(capsys)
    assert line.startswith(f"data host {first} failed (UNAVAILABLE: ")


def answers(address: str) -> bool:
    try:
        return bool(FeedLoader([address], TOKEN, 1, connect_timeout=0.5))
    except ConnectionError:
        return False


def test_hosts_may_all_be_gone_for_a_while(start, expected, capsys):
    hosts = [start(), start()]
    batches = iter(feed("steady", hosts, read_ahead=1, **PLAN))
    received = [next(batches) for _ in range(4)]
    kill(*hosts)
    time.sleep(2)
    for host in hosts:
        host.start()
    assert_same(received + list(batches), expected)
    assert len(lines(capsys)) == 2  # one for each, not one for each attempt


def test_host_that_ends_normally_is_replaced_too(start, expected):
    hosts = [start(), start()]
    batches = iter(feed("steady", hosts, read_ahead=1, **PLAN))
    received = [next(batches) for _ in range(3)]
    hosts[0].process.terminate()
    assert_same(received + list(batches), expected)
    assert hosts[0].process.wait(timeout=10) == 0


@pytest.mark.parametrize("stopped_after", [0, 3])  # batches; 0: it never answers
def test_another_host_takes_over_for_one_that_hangs(start, expected, stopped_after, capsys):
    hosts = [start(), start()]
    second = hosts[1].addresses["steady"]
    if stopped_after == 0:
        wait_until(lambda: answers(second), seconds=30)
        hosts[1].process.suspend()
    started = time.monotonic()
    loader = feed("steady", hosts, read_ahead=1, connect_timeout=30 if stopped_after else 3, **PLAN)
    batches = iter(loader)
    received = [next(batches) for _ in range(stopped_after)]
    if stopped_after:
        started = time.monotonic()
        hosts[1].process.suspend()
    assert_same(received + list(batches), expected)
    assert time.monotonic() - started < 30
    assert [second in line for line in lines(capsys)] == [True]
    started = time.monotonic()
    assert len(list(loader)) == len(expected)  # another epoch, which does not wait for it again
    assert time.monotonic() - started < 8


def test_host_that_hangs_is_noticed_after_a_long_wait_too(start, capsys, monkeypatch):
    options = dict(feed_client.CHANNEL_OPTIONS)
    options |= {"grpc.keepalive_time_ms": 6_000, "grpc.keepalive_timeout_ms": 2_000}  # to save time
    monkeypatch.setattr(feed_client, "CHANNEL_OPTIONS", list(options.items()))
    host = start("slow")
    batches = iter(feed("slow", [host], batch_size=BATCH_SIZE))
    next(batches)
    time.sleep(20)  # gRPC by itself would send two pings in this time, and then rarely any
    host.process.suspend()
    wait_until(lambda: lines(capsys), seconds=12)


@pytest.mark.parametrize("count", [1, 2])
def test_nobody_comes_back(start, capsys, count):
    hosts = [start() for _ in range(count)]
    batches = iter(feed("steady", hosts, read_ahead=1, retry_timeout=2, **PLAN))
    next(batches)
    kill(*hosts)
    started = time.monotonic()
    with pytest.raises(ConnectionError, match="no data host has sent batch") as caught:
        list(batches)
    assert 2 <= time.monotonic() - started < 5
    assert any(f"{host.addresses['steady']} failed (UNAV" in str(caught.value) for host in hosts)
    assert len(lines(capsys)) == count


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGKILL])
def test_end_of_a_busy_host_is_prompt_and_named(start, signal_number):
    host = start("slow")
    loader = feed("slow", [host], batch_size=BATCH_SIZE, retry_timeout=0.5)
    batches = iter(loader)
    next(batches)
    processes = host.processes()
    host.process.send_signal(signal_number)
    with pytest.raises(ConnectionError, match=f"data host {host.addresses['slow']} failed"):
        next(batches)
    host.process.wait(timeout=3)
    wait_until(lambda: all(map(has_ended, processes)))


def test_host_that_comes_back_with_other_samples_is_refused(start):
    host = start()
    batches = iter(feed("steady", [host], read_ahead=1, **PLAN))
    next(batches)
    kill(host)
    host.command[-1] = host.command[-1].replace("steady=", "short=")
    host.start()
    with pytest.raises(ValueError, match=f"{host.addresses['steady']} .*here are 102 samples"):
        list(batches)


@pytest.mark.parametrize("hanging", [False, True])  # in a pause; in an attempt to connect
def test_closing_is_prompt_while_hosts_are_away(start, hanging):
    hosts = [start(), start()]
    loader = feed("steady", hosts, **PLAN)
    if hanging:
        hosts[1].process.suspend()
    batches = iter(loader)
    next(batches)
    if not hanging:
        kill(*hosts)
    time.sleep(1)
    started = time.monotonic()
    del batches
    assert time.monotonic() - started < 0.5
    assert threading.active_count() == 1


def test_hosts_that_do_not_come_up_are_named(start, expected, capsys):
    host, away = start(), f"127.0.0.1:{free_port()}"
    addresses = [away, host.addresses["steady"]]
    loader = FeedLoader(addresses, TOKEN, connect_timeout=8, **PLAN)
    assert lines(capsys) == [
        f"data host {away} did not answer in time (Deadline Exceeded): is it running there? "
        "Its batches will be asked of others."
    ]
    assert_same(list(loader), expected)

    started = time.monotonic()
    with pytest.raises(ConnectionError, match=f"{away} did not answer in time"):
        FeedLoader([away], TOKEN, connect_timeout=0.5, **PLAN)
    assert time.monotonic() - started < 3

    with pytest.raises(PermissionError, match=f"{addresses[1]} refused this job's token"):
        FeedLoader(addresses, "another token", **PLAN)  # at once, not when `away` has had its time
    assert time.monotonic() - started < 5


def test_refused_calls_are_printed_now_and_then(capsys):
    address = f"127.0.0.1:{free_port()}"
    server = FeedServer(Plain(), address, TOKEN, num_workers=1)
    try:
        for _ in range(3):
            with pytest.raises(PermissionError):
                FeedLoader([address], "a guess", 1)
    finally:
        server.stop()
    [line] = lines(capsys)
    assert line.startswith("feed: refused a call from ipv4:127.0.0.1:")
    assert line.endswith(": wrong or missing token")
