"""The loader of the PyTorch example when data hosts are killed, hang, come back, or never do.

`make soak` runs this file with SOAK=1: more seeds, more batches, larger ones.
"""

import contextlib
import ctypes
import os
import queue
import random
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import torch
from torch.utils.data import default_collate

from data_hosts import (
    BATCH_SIZE,
    TOKEN,
    DataHost,
    Plain,
    Signed,
    Steady,
    assert_same,
    feed,
    free_port,
    has_ended,
    wait_for_threads,
    wait_until,
)

sys.path.insert(0, str(Path(__file__).parents[1] / "pt.grpc.sagemaker" / "code"))

import feed_client  # noqa: E402
import feed_server  # noqa: E402
import wire  # noqa: E402
from batches import LocalLoader  # noqa: E402
from feed_client import DatasetError, FeedLoader  # noqa: E402
from feed_server import FeedServer  # noqa: E402

PLAN = {"batch_size": BATCH_SIZE, "shuffle": True, "seed": 5}
SOAK = "SOAK" in os.environ


@pytest.fixture(scope="module")
def expected() -> list:
    """The batches of an epoch."""
    return list(LocalLoader(Steady(), **PLAN))


@pytest.fixture
def start() -> Iterator[Callable[[str], DataHost]]:
    """Start data hosts that this test may harm; nothing is left of them, nor of their clients."""
    hosts, before = [], set(threading.enumerate())

    def start(name: str = "steady", num_workers: int = 0, **options) -> DataHost:
        hosts.append(DataHost(name, num_workers=num_workers, **options))
        return hosts[-1]

    yield start
    processes = [process for host in hosts for process in processes_of(host)]
    for process in processes:
        process.kill()
    wait_until(lambda: all(map(has_ended, processes)))
    wait_for_threads(before)


def processes_of(host: DataHost) -> list[psutil.Process]:
    return [] if has_ended(host.process) else host.processes()


def kill(*hosts: DataHost) -> None:
    for host in hosts:
        host.process.kill()
        host.process.wait()


def lines(capsys: pytest.CaptureFixture) -> list[str]:
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("seed", range(50 if SOAK else 5))
def test_hosts_are_killed_at_random_moments_and_come_back(start, expected, seed):
    chance = random.Random(seed)
    hosts = [start(num_workers=1 - seed % 2) for _ in range(2 + seed % 2)]
    batches = iter(feed("steady", hosts, read_ahead=chance.choice([1, 4]), **PLAN))
    received = [next(batches)]

    def kill_some() -> None:
        for _ in range(10 if SOAK else 2):
            time.sleep(chance.uniform(0, 0.5))
            host = chance.choice(hosts)
            kill(host)
            time.sleep(chance.uniform(0, 0.5))
            host.start()

    killer = threading.Thread(target=kill_some)
    killer.start()
    try:
        assert_same(received + list(batches), expected)
    finally:
        killer.join()


@pytest.mark.parametrize("seed", range(50 if SOAK else 5))
def test_connections_are_cut_within_batches(start, expected, seed, monkeypatch):
    """Through relays that cut each connection, of calls or of batches, after a random length."""
    chance = random.Random(seed)
    host = start(num_workers=seed % 2)
    cuts = {"call": [], "batches": []}  # how many more bytes each would have passed on
    listeners, acceptors = [], []

    def pass_on(source: socket.socket, target: socket.socket, left: int, kind: str) -> None:
        with contextlib.suppress(OSError):
            while left > 0 and (data := source.recv(min(65536, left))):
                target.sendall(data)
                left -= len(data)
            cuts[kind].append(left)
        for end in (source, target):
            wire.hang_up(end)

    def relay(port: int, kind: str, most: int) -> int:
        """Return the port of a relay to another."""

        def accept() -> None:
            with contextlib.suppress(OSError):  # closed
                while True:
                    client, _ = listener.accept()
                    server = socket.create_connection(("127.0.0.1", port))
                    # Further each time, so that the epoch comes to an end.
                    limit = chance.randrange(most) * (10 + len(cuts[kind])) // 10
                    for ends in [(client, server, 10**12), (server, client, limit)]:
                        threading.Thread(target=pass_on, args=(*ends, kind)).start()

        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)
        acceptors.append(threading.Thread(target=accept))
        acceptors[-1].start()
        return listener.getsockname()[1]

    def connect(host: str, port: int, secret: bytes) -> socket.socket:
        return really_connect(host, relay(port, "batches", 6_000_000), secret)

    really_connect = feed_client.connect
    monkeypatch.setattr(feed_client, "connect", connect)
    address = host.addresses["steady"]
    wait_until(lambda: answers(address), seconds=30)
    try:
        relayed = f"127.0.0.1:{relay(int(address.split(':')[1]), 'call', 400)}"
        loader = FeedLoader([relayed, address], TOKEN, **PLAN)
        loader._hosts = [relayed]  # the other one has only told the length
        assert_same(list(loader), expected)
        assert cuts["batches"].count(0) > 2 and cuts["call"].count(0) > 0, cuts
    finally:
        for listener, acceptor in zip(listeners, acceptors, strict=True):
            wire.hang_up(listener)
            acceptor.join()
            listener.close()


def test_a_host_that_comes_up_late_is_waited_for(start, expected, capsys):
    hosts = [start(), start()]
    kill(hosts[1])
    timer = threading.Timer(30 if SOAK else 3, hosts[1].start)
    timer.start()
    assert_same(list(feed("steady", hosts, **PLAN)), expected)
    assert not timer.is_alive() and not lines(capsys)


@pytest.mark.parametrize("workers", [1, 4])
def test_a_slow_host_prepares_as_much_less_as_it_is_slower(start, workers):
    hosts = [start("signed", number=number, num_workers=workers) for number in range(2)]
    loader = feed("signed", hosts, batch_size=1)
    shares = [0, 0]
    for batch in loader:
        shares[batch.item()] += 1
    assert sum(shares) == len(loader) == 103
    # At their speeds, 1 to 5, they would have 17 and 86; in turns they would have 51 and 52.
    assert 8 <= shares[0] <= 34, shares


@pytest.mark.parametrize("workers", [0, 2])
def test_sigterm_to_all_of_a_busy_host_s_processes_ends_them_soon(start, monkeypatch, workers):
    folder = tempfile.mkdtemp()  # with a short name, as the sockets in it need
    monkeypatch.setenv("TMPDIR", folder)
    host = start("slow", num_workers=workers)
    batches = iter(feed("slow", [host], batch_size=BATCH_SIZE))
    next(batches)
    processes = host.processes()
    os.killpg(host.process.pid, signal.SIGTERM)  # as the launcher does
    assert host.process.wait(timeout=10) == 0
    wait_until(lambda: all(map(has_ended, processes)))
    assert "has died" not in host.said()
    os.rmdir(folder)  # it is empty


def test_sigterm_that_another_thread_of_the_server_takes_ends_it(start):
    host = start(num_workers=0)
    host.wait_until_serving()
    another = next(thread.id for thread in host.process.threads() if thread.id != host.process.pid)
    assert ctypes.CDLL(None).tgkill(host.process.pid, another, signal.SIGTERM) == 0
    assert host.process.wait(timeout=10) == 0


def test_a_killed_worker_process_is_replaced(start, expected):
    host = start(num_workers=2)
    batches = iter(feed("steady", [host], **PLAN))
    received = []
    for _ in range(3):
        received += [next(batches), next(batches)]
        wait_until(lambda: len(host.workers()) == 2)
        host.workers()[0].kill()
        wait_until(lambda: len(host.workers()) == 1)
    assert_same(received + list(batches), expected)


def test_a_sample_that_kills_its_process_is_an_error_and_no_endless_loop(start):
    batches = iter(feed("deadly", [start("deadly", num_workers=1)], batch_size=BATCH_SIZE))
    for _ in range(42 // BATCH_SIZE):
        next(batches)
    with pytest.raises(DatasetError, match="batch 6: two worker processes have died over it"):
        next(batches)


def test_samples_that_change_their_shape(start):
    host = start("growing")
    loader = feed("growing", [host], batch_size=7)
    assert [batch.shape[1] for batch in loader] == [3] * 7 + [4] * 8  # no batch has both
    batches = iter(feed("growing", [host], batch_size=10))
    assert [next(batches).shape for _ in range(4)] == [(10, 3)] * 4
    with pytest.raises(
        DatasetError, match="batch 4: RuntimeError: stack expects each tensor to be"
    ):
        next(batches)


def call_for_batches(channel: grpc.Channel, requests: Iterable) -> Any:
    method = channel.stream_stream(
        f"/{wire.SERVICE}/Batches",
        wire.messages.BatchRequest.SerializeToString,
        wire.messages.Welcome.FromString,
    )
    return method(iter(requests), metadata=[("authorization", f"Bearer {TOKEN}")])


def test_an_oversized_request_is_refused_and_does_no_harm(start, expected):
    host = start()
    loader = feed("steady", [host], **PLAN)
    with grpc.insecure_channel(host.addresses["steady"]) as channel:
        request = wire.messages.BatchRequest(dataset_length=103, indices=range(2_000_000))
        call = call_for_batches(channel, [request])
        welcome = next(call)
        place = host.addresses["steady"], welcome.port, welcome.secret
        with feed_client.connect(*place) as connection:
            with pytest.raises(grpc.RpcError) as refused:
                next(call)
            assert not connection.recv(1)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert_same(list(loader), expected)


def test_memory_stays_flat(start):
    host = start("many", num_workers=2)
    count, early = (10_000, 1000) if SOAK else (1000, 200)
    loader = feed("many", [host], batch_size=10, shuffle=True)
    assert len(loader) == 10_000
    sizes = []
    for number, _ in enumerate(loader, start=1):
        if number in (early, count):
            everyone = [psutil.Process(), *host.processes()]
            sizes.append([process.memory_info().rss / 2**20 for process in everyone])
        if number == count:
            break
    growth = [after - before for before, after in zip(*sizes, strict=True)]  # MiB, by process
    assert max(growth) < 20, growth


@pytest.mark.skipif(not SOAK, reason="takes 10 GB of memory: make soak")
def test_batches_of_more_than_a_gibibyte(start):
    for number, batch in enumerate(feed("huge", [start("huge", num_workers=1)], batch_size=1)):
        assert batch.nbytes > 2**30
        assert torch.equal(batch[0], torch.arange(number, number + batch.shape[1]))


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
    assert line.endswith("): its batches are asked of whoever answers")

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
    options |= {"grpc.keepalive_time_ms": 2_000}  # to save time
    options |= {"grpc.keepalive_timeout_ms": 2_000, "grpc.http2.ping_timeout_ms": 2_000}
    monkeypatch.setattr(feed_client, "CHANNEL_OPTIONS", list(options.items()))
    host = start("slow")
    batches = iter(feed("slow", [host], batch_size=BATCH_SIZE))
    next(batches)
    time.sleep(8)  # gRPC by itself would send two pings in this time, and then rarely any
    host.process.suspend()
    wait_until(lambda: lines(capsys), seconds=12)


def test_training_may_take_no_batch_for_long(start, expected, capsys, monkeypatch):
    """Its signs of life are not too many for a host that may send nothing meanwhile."""
    options = {**dict(feed_client.CHANNEL_OPTIONS), "grpc.keepalive_time_ms": 2_000}  # to save time
    monkeypatch.setattr(feed_client, "CHANNEL_OPTIONS", list(options.items()))
    batches = iter(feed("steady", [start()], read_ahead=1, **PLAN))
    received = [next(batches) for _ in range(3)]
    time.sleep(10)
    assert_same(received + list(batches), expected)
    assert not lines(capsys)


@pytest.mark.parametrize("count", [1, 2])
def test_nobody_comes_back(start, capsys, count):
    hosts = [start() for _ in range(count)]
    batches = iter(feed("steady", hosts, read_ahead=1, retry_timeout=2, **PLAN))
    next(batches)
    started = time.monotonic()
    kill(*hosts)
    with pytest.raises(ConnectionError, match="no data host has sent batch") as caught:
        list(batches)
    assert 2 <= time.monotonic() - started < 10
    assert any(f"{host.addresses['steady']} failed (UNAV" in str(caught.value) for host in hosts)
    assert len(lines(capsys)) == count


def test_a_host_that_is_back_may_take_its_time_while_another_is_gone(monkeypatch):
    monkeypatch.setenv("NUMBER", "0")  # the slow one
    here, gone = (f"127.0.0.1:{free_port()}" for _ in range(2))
    server = FeedServer(Signed(), here, TOKEN, num_workers=0)
    try:
        patience = {"connect_timeout": 1, "retry_timeout": 2}
        batches = iter(FeedLoader([here, gone], TOKEN, batch_size=6, **patience))
        next(batches)
        server.stop()
        server = FeedServer(Signed(), here, TOKEN, num_workers=0)
        next(batches)  # takes 3 s
        batches.close()
    finally:
        server.stop()


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGKILL])
def test_end_of_a_busy_host_is_prompt_and_named(start, signal_number):
    host = start("slow", num_workers=1)
    loader = feed("slow", [host], batch_size=BATCH_SIZE, retry_timeout=0.5)
    batches = iter(loader)
    next(batches)
    processes = host.processes()
    host.process.send_signal(signal_number)
    with pytest.raises(ConnectionError, match=f"data host {host.addresses['slow']} failed"):
        next(batches)
    host.process.wait(timeout=10)
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
def test_closing_is_prompt_while_hosts_are_away(start, hanging, monkeypatch):
    monkeypatch.setattr(feed_client, "RETRY_PAUSE", 60)
    before = set(threading.enumerate())
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
    assert time.monotonic() - started < 5
    wait_for_threads(before, seconds=5)  # gRPC's own takes a moment


def test_hosts_that_do_not_come_up_are_named(start, expected, capsys):
    host, away = start(), f"127.0.0.1:{free_port()}"
    addresses = [away, host.addresses["steady"]]
    wait_until(lambda: answers(addresses[1]), seconds=30)
    loader = FeedLoader(addresses, TOKEN, connect_timeout=2, **PLAN)
    assert lines(capsys) == [
        f"data host {away} did not answer in time (Deadline Exceeded): is it running there? "
        "Its batches will be asked of others."
    ]
    assert_same(list(loader), expected)

    started = time.monotonic()
    with pytest.raises(ConnectionError, match=f"{away} did not answer in time"):
        FeedLoader([away], TOKEN, connect_timeout=0.5, **PLAN)
    assert time.monotonic() - started < 10

    with pytest.raises(PermissionError, match=f"{addresses[1]} refused this job's token"):
        FeedLoader(addresses, "another token", **PLAN)  # at once, not when `away` has had its time
    assert time.monotonic() - started < 20


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


@pytest.fixture
def address() -> Iterator[str]:
    """The address of a data server in this process."""
    address = f"127.0.0.1:{free_port()}"
    server = FeedServer(Plain(), address, TOKEN, num_workers=0)
    yield address
    server.stop()


def test_strangers_who_connect_for_a_call_s_batches_are_refused(address, capsys):
    with grpc.insecure_channel(address) as channel:
        requests = queue.SimpleQueue()
        call = call_for_batches(channel, iter(requests.get, None))
        welcome = next(call)
        assert len(welcome.secret) == 16
        with contextlib.ExitStack() as strangers:
            almost = welcome.secret[:-1] + bytes([welcome.secret[-1] ^ 1])
            for said in [b"", b"x", b"a guess" * 9, TOKEN.encode(), almost]:
                stranger = socket.create_connection(("127.0.0.1", welcome.port))
                strangers.enter_context(stranger).sendall(said)
            slow = strangers.enter_context(socket.create_connection(("127.0.0.1", welcome.port)))
            started = time.monotonic()
            with feed_client.connect(address, welcome.port, welcome.secret) as connection:
                requests.put(wire.messages.BatchRequest(dataset_length=103, indices=[5]))
                with contextlib.suppress(OSError):  # it has been hung up
                    for byte in welcome.secret:  # slowly
                        slow.sendall(bytes([byte]))
                        time.sleep(0.5)
                batch = wire.receive(connection, wire.receive_header(connection))
        assert time.monotonic() - started < 8  # at most a second each
        assert_same(batch, default_collate([Plain()[5]]))
        requests.put(None)
    [line] = lines(capsys)
    assert line.startswith("feed: refused a connection from 127.0.0.1:")
    assert line.endswith(": wrong or missing secret of a call")


def test_a_client_that_does_not_connect_for_its_batches_is_given_up(address, monkeypatch):
    monkeypatch.setattr(feed_server, "CONNECT_SECONDS", 1)  # to save time
    with grpc.insecure_channel(address) as channel:
        call = call_for_batches(channel, [])
        port = next(call).port
        with pytest.raises(grpc.RpcError) as given_up:
            next(call)
    assert given_up.value.code() is grpc.StatusCode.UNAVAILABLE
    assert f"no client has connected to port {port}" in given_up.value.details()
    assert len(list(FeedLoader([address], TOKEN, BATCH_SIZE))) == 15


@pytest.mark.parametrize("silent", [False, True])  # as a firewall is; else nobody listens there
def test_a_host_whose_other_ports_cannot_be_reached_is_named(address, silent, monkeypatch):
    monkeypatch.setattr(feed_client, "CONNECT_SECONDS", 1)  # to save time
    connect = feed_client.connect
    with contextlib.ExitStack() as stack:
        if silent:  # Linux drops what comes when as many are waiting as may
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
            port = listener.getsockname()[1]
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        else:
            port = free_port()
        monkeypatch.setattr(feed_client, "connect", lambda host, _, it: connect(host, port, it))
        sentence = f"it answers, but not at port {port}, .* let these hosts reach each other"
        with pytest.raises(ConnectionError, match=sentence):
            list(FeedLoader([address], TOKEN, BATCH_SIZE, retry_timeout=0.5))
