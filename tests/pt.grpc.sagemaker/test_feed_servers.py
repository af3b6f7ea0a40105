"""The data server of the PyTorch example: where it listens, whom it refuses, and how it ends."""

import contextlib
import hashlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import grpc
import psutil
import pytest
from torch.utils.data import DataLoader

from feed import wire
from helpers.data_hosts import (
    CODE,
    TOKEN,
    DataHost,
    environment_of,
    free_port,
    has_ended,
    loader_of,
    up,
)
from helpers.datasets import BIG, SLOW, Draws, Numbers, Steady, TakesItsTime, Troubled
from helpers.waiting import wait_until

SOAK = "SOAK" in os.environ
REFUSED = grpc.StatusCode.UNAUTHENTICATED


def serves(host: DataHost) -> bool:
    batches = loader_of([host], Numbers(), batch_size=20)
    return [sample["index"] for batch in batches for sample in batch] == [*range(61)]


def keep_busy(host: DataHost) -> DataLoader:
    """Request a sample that takes forever; return the iterator that waits for it."""
    batches = iter(loader_of([host], Troubled(), [[SLOW]], num_workers=1))
    wait_until(lambda: "asleep" in host.said())
    return batches


# Where it listens


def test_port_in_use_is_refused(start):
    [host] = up(start())
    second = start(address=host.address)
    assert second.process.wait(timeout=60) != 0
    assert f"feed: cannot listen on '{host.address}': it is in use, or" in second.said()
    assert serves(host)


def test_a_server_without_a_token_is_refused(start):
    # It says so at once: before it imports torch, which takes seconds.
    host = start(token="", setup="import sys; sys.modules['torch'] = None")
    assert host.process.wait(timeout=60) == 2
    assert "HETERO_TOKEN must be the job's token" in host.said()


# Strangers


class Evil:
    """An attack: unpickling it creates a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Callable, tuple]:
        return Path.touch, (self.path,)


def test_nothing_of_a_stranger_is_unpickled_and_the_log_has_a_line(start, tmp_path):
    """One line for all calls that are refused within ten seconds."""
    [host] = up(start())
    file = tmp_path / "made"
    evil = pickle.dumps(Evil(file))
    request = pickle.dumps(wire.Request(bytes(32), evil))
    signed = {name: hashlib.sha256(data).digest() for name, data in [("r", request), ("e", evil)]}
    _, overheard = wire.sign(TOKEN, signed["r"])  # a stranger may overhear other calls
    key, code = overheard[0]
    with grpc.insecure_channel(host.address) as channel:
        ask = channel.unary_stream(f"/{wire.SERVICE}/Get")
        upload = channel.stream_unary(f"/{wire.SERVICE}/Upload")
        for metadata in [
            [],
            [(key, b"")],
            [(key, code[:-1] + bytes([code[-1] ^ 1]))],
            wire.sign("a guess", signed["r"])[1],
            wire.sign("", signed["r"])[1],
        ]:
            for call in (
                lambda metadata=metadata: list(ask(request, metadata=metadata)),
                lambda metadata=metadata: upload(iter([evil] * 99), metadata=metadata),
            ):
                with pytest.raises(grpc.RpcError) as refused:
                    call()
                assert refused.value.code() is REFUSED
        with pytest.raises(grpc.RpcError):  # the signature is another request's
            list(ask(request + b"\0\0", metadata=overheard))
        upload(iter([evil]), metadata=overheard)  # here, too: the upload is dropped
        with pytest.raises(grpc.RpcError) as refused:
            list(ask(bytes(100 << 20), metadata=overheard))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert serves(host)
    assert not file.exists()
    assert 1 <= host.said().count("feed: refused a call from ipv4:127.0.0.1:") <= 3


def test_garbage_and_silent_calls_do_no_harm(start):
    [host] = up(start())
    before = sum(process.memory_info().rss for process in host.processes())
    with grpc.insecure_channel(host.address) as channel:
        silent = channel.stream_unary(f"/{wire.SERVICE}/Upload")
        silence = threading.Event()
        calls = [silent.future(iter(silence.wait, None)) for _ in range(3000)]
        codes = {call.exception(timeout=60).code() for call in calls}
        silence.set()
    assert REFUSED in codes  # others are refused as too many at once
    with socket.create_connection(("127.0.0.1", int(host.address.split(":")[1]))) as stranger:
        stranger.sendall(os.urandom(100_000))
        assert serves(host)
    after = sum(process.memory_info().rss for process in host.processes()[:2])
    assert after < before + (200 << 20)


EVIL_SERVER = """
import concurrent.futures, grpc, os, pathlib, pickle, sys, time
from feed import wire

class Evil:
    def __reduce__(self):
        return pathlib.Path.touch, (pathlib.Path(sys.argv[2]),)

def ask(request, context):
    reply = wire.Reply(wire.RAISED, pickle.dumps(Evil()), workers=1)
    yield wire.seal("a guess", os.urandom(16), reply)

server = grpc.server(concurrent.futures.ThreadPoolExecutor())
methods = {"Get": grpc.unary_stream_rpc_method_handler(ask)}
server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(wire.SERVICE, methods)])
server.add_insecure_port(sys.argv[1])
server.start()
print("serving", flush=True)
server.wait_for_termination()
"""


def test_nothing_of_a_stranger_at_a_data_host_s_address_is_unpickled(tmp_path):
    address, file = f"127.0.0.1:{free_port()}", tmp_path / "made"
    command = [sys.executable, "-c", EVIL_SERVER, address, file]
    with subprocess.Popen(command, cwd=CODE, stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout.readline() == b"serving\n"
            with pytest.raises(PermissionError, match="a reply has no valid MAC: do both"):
                next(iter(loader_of([Namespace(address=address)], Numbers())))
        finally:
            server.kill()
    assert not file.exists()


# Clients that die or are slow, and memory


CLIENT = f"""if True:
    from helpers.data_hosts import *
    from helpers.datasets import Troubled
    for batch in DataLoader(RemoteDataset(Troubled()), batch_sampler=[[{BIG}]] * 1000):
        print("batch", flush=True)"""


@pytest.mark.parametrize("end", [pytest.param("kill", marks=pytest.mark.thorough), "suspend"])
def test_a_client_that_dies_or_hangs_in_mid_transfer_does_not_hold_up_others(start, end):
    [host] = up(start())
    client = psutil.Popen(
        [sys.executable, "-c", CLIENT], stdout=subprocess.PIPE, env=environment_of([host])
    )
    try:
        assert b"batch\n" in iter(client.stdout.readline, b"")
        getattr(client, end)()
        assert serves(host)
    finally:
        client.kill()
        client.communicate()


@pytest.mark.thorough
@pytest.mark.parametrize("num_workers", [0, 2])
def test_memory_stays_flat(start, num_workers):
    [host] = up(start(workers=2))
    count, early = (10_000, 1000) if SOAK else (1000, 200)
    numbers = [[*range(49), BIG]] * count if SOAK else [[*range(50)]] * count
    sizes = []
    batches = iter(loader_of([host], Troubled(), numbers, num_workers=num_workers))
    for number, _ in enumerate(batches, start=1):
        if number in (early, count - 20):
            everyone = [psutil.Process(), *psutil.Process().children(recursive=True)]
            sizes.append({process: process.memory_info().rss >> 20 for process in everyone})
    growth = [after - sizes[0][process] for process, after in sizes[1].items()]  # MiB
    assert max(growth) < 20, growth


# Several Datasets


def test_datasets_that_nobody_asks_for_are_dropped(start):
    """The least recently used one goes first. It is uploaded again when it is needed again."""
    [host] = up(start(setup="import feed.front; feed.front.MOST_DATASETS = 3"))
    loader = loader_of([host], Draws(), batch_size=50)
    always = iter(loader_of([host], Numbers(), batch_size=3))
    next(always)
    counts = []
    for number in [*range(8), 0]:
        loader.dataset.number = number  # another Dataset
        assert len(list(loader)) == 2
        next(always)
        counts.append(len({worker.ppid() for worker in host.worker_processes()}))
    assert max(counts[:-1]) <= 3 and counts[-1] <= 4


def take_turns(host: DataHost, count: int, samples: int = 3) -> list:
    """Ask in turn for samples of different Datasets, as ranks with Datasets of their own do."""
    datasets = [Draws() for _ in range(count)]
    for number, dataset in enumerate(datasets):
        dataset.number = number
    loaders = [
        iter(loader_of([host], dataset, [[n] for n in range(samples)])) for dataset in datasets
    ]
    return [next(loader) for _ in range(samples) for loader in loaders]


def test_all_datasets_in_use_are_kept(start):
    """Two of five are dropped at first. The log says so, also if the memory is too small."""
    [host] = up(start(setup="import feed.front; feed.front.MOST_DATASETS = 3"))
    take_turns(host, count=5)
    assert host.said().count(" made in ") == 5 + 2
    text = "feed: a Dataset is needed again that was dropped: this host now keeps"
    assert f"{text} 5, up to 40% of its memory" in host.said()
    [host] = up(start(setup="import feed.front; feed.front.MOST_MEMORY = 0"))
    take_turns(host, count=2)
    assert f"{text} 32, up to 0% of its memory" in host.said()


def test_many_workers_need_many_open_files(start):
    """The server raises its limit as far as it may. If that is not enough, an error says so."""
    for most, reason in [(2048, None), (30, "failed 3 times in a row: .* Too many open files")]:
        limit = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (30, {most}))"
        [host] = up(start(workers=30, setup=limit))
        batches = iter(loader_of([host], Steady(), batch_size=61))
        with pytest.raises(RuntimeError, match=reason) if reason else contextlib.nullcontext():
            assert len(next(batches)) == 61


# How it ends


def test_a_thread_that_fails_ends_the_host(start):
    """Otherwise clients would wait for its work forever. A launcher starts the server again."""
    [host] = up(start(setup="import feed.worker; feed.worker.Worker.receive = lambda self: 1 / 0"))
    waiting = iter(loader_of([host], Numbers(), num_workers=1))
    assert host.process.wait(timeout=60) == 1
    assert "ZeroDivisionError" in host.said()
    del waiting


@pytest.mark.thorough
def test_sigterm_to_all_of_a_busy_host_s_processes_ends_them_soon(start):
    [host] = up(start(workers=2))
    waiting = keep_busy(host)
    processes = host.processes()
    for _ in range(5):  # from the launcher, and perhaps from SageMaker, too
        os.killpg(host.process.pid, signal.SIGTERM)
        time.sleep(0.02)
    assert host.process.wait(timeout=30) == 0
    wait_until(lambda: all(map(has_ended, processes)))
    assert "Traceback" not in host.said()
    del waiting


@pytest.mark.thorough
def test_sigterm_while_a_dataset_is_loaded_ends_it_too(start):
    [host] = up(start())
    waiting = iter(loader_of([host], TakesItsTime(), num_workers=1))
    wait_until(lambda: "loading" in host.said())
    processes = host.processes()
    host.process.terminate()
    assert host.process.wait(timeout=30) == 0
    wait_until(lambda: all(map(has_ended, processes)))
    del waiting


@pytest.mark.thorough
def test_a_host_that_has_had_no_dataset_says_so_when_it_ends(start):
    used, unused = up(start(), start())
    list(loader_of([used], Numbers(), [[0]]))
    for host, times in (used, 0), (unused, 1):
        host.process.terminate()
        host.process.wait(timeout=30)
        assert host.said().count("feed: no Dataset was sent: ") == times


def test_no_process_outlives_the_first_one(start):
    [host] = up(start())
    waiting = keep_busy(host)
    processes = host.processes()
    # Server, front, the Dataset's process, a worker, and perhaps one that compares the sample.
    assert 4 <= len(processes) <= 5
    host.process.kill()
    wait_until(lambda: all(map(has_ended, processes)))
    del waiting


@pytest.mark.thorough
def test_a_front_that_dies_ends_the_host(start):
    [host] = up(start())
    waiting = keep_busy(host)
    processes = host.processes()
    front = next(p for p in processes[1:] if p.net_connections("tcp"))
    front.kill()
    assert host.process.wait(timeout=30) == 1
    wait_until(lambda: all(map(has_ended, processes)))
    assert "feed: the gRPC process has ended" in host.said()
    del waiting
