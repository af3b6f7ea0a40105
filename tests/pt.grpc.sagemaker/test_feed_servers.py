"""The data server: whom it refuses, what it keeps, and how it and the trainings it feeds end."""

import contextlib
import hashlib
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import psutil
import pytest

from feed import wire
from helpers import data_hosts
from helpers.data_hosts import CODE, TOKEN, DataHost, has_ended, loader_of, up, wait_for_threads
from helpers.datasets import BIG, SLOW, STEADY, TROUBLED, Draws, Numbers, Reduced, hang_if_told
from helpers.pages import ROOT
from helpers.waiting import wait_until

SOAK = "SOAK" in os.environ
REFUSED = grpc.StatusCode.UNAUTHENTICATED
thorough = pytest.mark.thorough


def serves(host: DataHost) -> bool:
    batches = loader_of([host], Numbers(), batch_size=20)
    return [sample["index"] for batch in batches for sample in batch] == [*range(61)]


# Where it listens


def test_a_port_in_use_and_a_missing_token_are_refused_at_once(start):
    """Before it imports torch, which takes seconds."""
    [host] = up(start())
    options = {"setup": "import sys; sys.modules['torch'] = None", "is_program": True}
    second, without_token = start(address=host.address, **options), start(token="", **options)
    assert second.process.wait(timeout=60) == 1 and without_token.process.wait(timeout=60) == 2
    assert f"feed: cannot listen on '{host.address}': it is in use, or" in second.said()
    assert "HETERO_TOKEN must be the job's token" in without_token.said()
    assert serves(host)


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
    digest = hashlib.sha256(request).digest()
    _, overheard = wire.sign(TOKEN, digest)  # a stranger may overhear other calls
    key, code = overheard[0]
    with grpc.insecure_channel(host.address) as channel:
        ask = channel.unary_stream(f"/{wire.SERVICE}/Get")
        upload = channel.stream_unary(f"/{wire.SERVICE}/Upload")
        for metadata in [
            [],
            [(key, b"")],
            [(key, code[:-1] + bytes([code[-1] ^ 1]))],
            wire.sign("a guess", digest)[1],
            wire.sign("", digest)[1],
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


def test_nothing_of_a_stranger_at_a_data_host_s_address_is_unpickled(tmp_path):
    address, file = f"127.0.0.1:{data_hosts.free_port()}", tmp_path / "made"

    def ask(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        reply = wire.Reply(wire.RAISED, pickle.dumps(Evil(file)), workers=1)
        yield wire.seal("a guess", os.urandom(16), reply)

    server = grpc.server(ThreadPoolExecutor())
    methods = {"Get": grpc.unary_stream_rpc_method_handler(ask)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(wire.SERVICE, methods)])
    server.add_insecure_port(address)
    server.start()
    try:
        with pytest.raises(PermissionError, match="a reply has no valid MAC: do both"):
            next(iter(loader_of([Namespace(address=address)], Numbers())))
    finally:
        server.stop(None).wait()
    assert not file.exists()


# Memory, and several Datasets


@thorough
@pytest.mark.parametrize("num_workers", [0, 2])
def test_memory_stays_flat(start, num_workers):
    [host] = up(start(workers=2))
    count, early = (10_000, 1000) if SOAK else (1000, 200)
    numbers = [[*range(49), BIG]] * count if SOAK else [[*range(50)]] * count
    sizes = []
    batches = iter(loader_of([host], TROUBLED, numbers, num_workers=num_workers))
    for number, _ in enumerate(batches, start=1):
        if number in (early, count - 20):
            everyone = [psutil.Process(), *psutil.Process().children(recursive=True)]
            sizes.append({process: process.memory_info().rss >> 20 for process in everyone})
    growth = [after - sizes[0][process] for process, after in sizes[1].items()]  # MiB
    assert max(growth) < 20, growth


def test_datasets_that_nobody_asks_for_are_dropped(start):
    """The least recently used one goes first. It is uploaded again when it is needed again."""
    [host] = up(start(setup="import feed.front; feed.front.MOST_DATASETS = 3"))
    loader = loader_of([host], Draws(), batch_size=50)
    always = iter(loader_of([host], Numbers(), batch_size=3))
    next(always)
    counts = []
    for number in [*range(5), 0]:
        loader.dataset.number = number  # another Dataset
        assert len(list(loader)) == 2
        next(always)
        counts.append(len({worker.ppid() for worker in host.worker_processes()}))
    assert max(counts[:-1]) <= 3 and counts[-1] <= 4


@pytest.mark.parametrize(
    "most, count, made, kept",
    [("DATASETS = 3", 5, 5 + 2, "5, up to 40%"), ("MEMORY = 0", 2, 0, "32, up to 0%")],
)
def test_all_datasets_in_use_are_kept(start, most, count, made, kept):
    """Ranks with Datasets of their own take turns. At first, some are dropped; the log says so."""
    [host] = up(start(setup=f"import feed.front; feed.front.MOST_{most}"))
    datasets = [Draws() for _ in range(count)]
    for number, dataset in enumerate(datasets):
        dataset.number = number
    loaders = [iter(loader_of([host], dataset, [[0], [1], [2]])) for dataset in datasets]
    for sample in range(3):
        for loader in loaders:
            [[index, *_]] = next(loader)
            assert index == sample
    assert made in (0, host.said().count(" made in "))
    text = "feed: a Dataset is needed again that was dropped: this host now keeps"
    assert f"{text} {kept} of its memory" in host.said()


def test_many_workers_need_many_open_files(start):
    """The server raises its limit as far as it may. If that is not enough, an error says so."""
    for most, reason in [(2048, None), (30, "failed 3 times in a row: .* Too many open files")]:
        limit = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (30, {most}))"
        [host] = up(start(workers=30, setup=limit))
        batches = iter(loader_of([host], STEADY, batch_size=61))
        with pytest.raises(RuntimeError, match=reason) if reason else contextlib.nullcontext():
            assert len(next(batches)) == 61


# How it ends


def terminate_all(host: DataHost) -> None:
    for _ in range(5):  # from the launcher, and perhaps from SageMaker, too
        os.killpg(host.process.pid, signal.SIGTERM)
        time.sleep(0.02)


ENDS = {
    "wait": lambda host: None,  # until it ends by itself
    "kill": lambda host: host.process.kill(),
    "kill front": lambda host: [p.kill() for p in host.processes()[1:] if p.net_connections("tcp")],
    "terminate": lambda host: host.process.terminate(),
    "terminate all": terminate_all,
}
FAILING = "import feed.worker; feed.worker.Worker.receive = lambda self: 1 / 0"


@pytest.mark.parametrize(
    "end, code, words, dataset, begun, setup",
    [
        # A thread fails: otherwise clients would wait for its work forever.
        ("wait", 1, "ZeroDivisionError", Numbers(), "", FAILING),
        pytest.param("kill", -signal.SIGKILL, "", TROUBLED, "asleep", "", marks=thorough),
        ("terminate all", 0, "", TROUBLED, "asleep", ""),
        pytest.param("terminate", 0, "", Reduced(hang_if_told), "making", "", marks=thorough),
        pytest.param("terminate", 0, "feed: no Dataset was sent: ", None, "", "", marks=thorough),
        pytest.param(
            "kill front", 1, "the gRPC process has ended", TROUBLED, "asleep", "", marks=thorough
        ),
    ],
)
def test_all_processes_of_a_host_end_with_it(start, end, code, words, dataset, begun, setup):
    [host] = up(start(workers=2, setup=setup, environment={"HANGS": "1"}, is_program=True))
    waiting = dataset and iter(loader_of([host], dataset, [[SLOW]], num_workers=1))
    wait_until(lambda: begun in host.said())
    processes = host.processes()
    if dataset is TROUBLED:
        # Server, front, the Dataset's process, workers, and perhaps those that compare the sample.
        assert 3 + host.workers <= len(processes) <= 3 + 2 * host.workers
    ENDS[end](host)
    assert host.process.wait(timeout=60) == code
    wait_until(lambda: all(map(has_ended, processes)))
    assert words in host.said()
    assert dataset is None or "no Dataset was sent" not in host.said()
    assert code == 1 or "Traceback" not in host.said()
    del waiting


# How trainings end


@pytest.fixture(scope="module")
def many() -> Iterator[DataHost]:
    """A data host with so many workers that some may stay asleep."""
    [host] = up(DataHost(workers=40))
    yield host
    host.kill()


def test_leaving_an_epoch_leaves_nothing(many):
    """Whether the loader waits for the training or for a sample."""
    threads, others = set(threading.enumerate()), set(psutil.Process().children())
    for num_workers, numbers in [(0, [[0]] * 9), (2, [[0]] * 9), (1, [[0]] + [[SLOW]] * 9)]:
        batches = iter(loader_of([many], TROUBLED, numbers, num_workers=num_workers))
        next(batches)
        workers = set(psutil.Process().children()) - others
        del batches
        wait_for_threads(threads)
        wait_until(lambda workers=workers: all(map(has_ended, workers)))


@contextlib.contextmanager
def training(host: DataHost, sample: int, num_workers: int = 0, end: str = "") -> Iterator:
    """Provide programs/epoch.py, which has begun an epoch."""
    asleep = host.said().count("asleep") + max(1, num_workers)
    program = psutil.Popen(
        [sys.executable, "-W", "ignore", ROOT / "tests/programs/epoch.py"]
        + [str(sample), str(num_workers), end],
        env=data_hosts.environment_of([host]),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # If the tests run in the background, the program would ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert "begun\n" in iter(program.stdout.readline, "")
        wait_until(lambda: sample != SLOW or host.said().count("asleep") >= asleep)
        yield program
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            program.kill()
        program.communicate()


@pytest.mark.parametrize(
    "sample, num_workers, end, code, said",
    [
        (0, 0, "raises", 1, ["ZeroDivisionError: division by zero"]),
        pytest.param(0, 2, "exits", 5, [], marks=thorough),
        pytest.param(SLOW, 0, "", -signal.SIGINT, ["KeyboardInterrupt"], marks=thorough),
        (SLOW, 2, "", -signal.SIGINT, ["KeyboardInterrupt"]),
        (SLOW, 2, "", -signal.SIGKILL, []),
    ],
)
def test_a_training_may_end_in_the_middle_of_an_epoch(many, sample, num_workers, end, code, said):
    with training(many, sample, num_workers, end) as program:
        workers = program.children() if sample == SLOW else []
        if sample == SLOW:
            assert len(workers) == num_workers
            program.send_signal(-code)
        _, errors = program.communicate(timeout=60)
        assert (program.returncode, errors.splitlines()[-1:]) == (code, said)
        wait_until(lambda: all(map(has_ended, workers)))


@pytest.mark.parametrize("end", [pytest.param("kill", marks=thorough), "suspend"])
def test_a_training_that_dies_or_hangs_in_mid_transfer_does_not_hold_up_others(start, end):
    [host] = up(start())
    with training(host, BIG) as program:
        for _ in range(3):  # until it has got a large batch
            assert "a batch\n" in iter(program.stdout.readline, "")
        getattr(program, end)()
        assert serves(host)


@thorough
def test_feed_can_be_imported_from_any_path_and_after_tensorflow(tmp_path: Path):
    folder = tmp_path / "a b" / "ü"
    shutil.copytree(CODE / "feed", folder / "feed")
    program = f"import sys, tensorflow; sys.path.insert(0, {str(folder)!r}); import feed"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
