"""The loader of the PyTorch example: batches from data hosts, against those of a DataLoader."""

import json
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from data_hosts import (
    BATCH_SIZE,
    REFUSED,
    SAMPLES,
    STRUCTURES,
    TOKEN,
    DataHost,
    Plain,
    Random,
    Slow,
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
from batches import BatchPlan, LocalLoader  # noqa: E402
from feed_client import DatasetError, FeedLoader  # noqa: E402
from feed_server import FeedServer  # noqa: E402


@pytest.fixture(scope="module")
def data_hosts() -> list[DataHost]:
    """Three data hosts with different numbers of worker processes."""
    names = ["plain", "random", "raising", "panicking", "short", "slow", "structures"]
    hosts = [DataHost(*names, num_workers=workers) for workers in (2, 0, 3)]
    for host in hosts:
        host.wait_until_serving()
    yield hosts
    processes = [process for host in hosts for process in host.processes()]
    for host in hosts:
        host.process.terminate()
    assert [host.process.wait() for host in hosts] == [0, 0, 0]
    wait_until(lambda: all(map(has_ended, processes)))


def epochs_of(loader: object, epochs: int = 2) -> list:
    """Return all batches of the first epochs, one list per epoch."""
    batches = []
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        batches.append(list(loader))
        assert len(batches[-1]) == len(loader)
    return batches


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("host_count", [1, 3])
def test_batches_are_those_of_a_plain_dataloader(data_hosts, host_count, world_size):
    dataset = Plain()
    for shuffle, drop_last, rank in product([False, True], [False, True], range(world_size)):
        sampler = DistributedSampler(
            dataset, world_size, rank, shuffle=shuffle, seed=5, drop_last=drop_last
        )
        reference = DataLoader(dataset, BATCH_SIZE, sampler=sampler, drop_last=drop_last)
        reference.set_epoch = sampler.set_epoch
        expected = epochs_of(reference)
        plan = {"batch_size": BATCH_SIZE, "shuffle": shuffle, "drop_last": drop_last}
        plan |= {"seed": 5, "rank": rank, "world_size": world_size}
        assert_same(epochs_of(feed("plain", data_hosts[:host_count], **plan)), expected)
        assert_same(epochs_of(LocalLoader(dataset, **plan)), expected)


def test_ranks_may_iterate_at_the_same_time(data_hosts):
    plan = {"batch_size": BATCH_SIZE, "shuffle": True, "world_size": 3}
    loaders = [feed("plain", data_hosts, rank=rank, **plan) for rank in range(3)]
    for rank, batches in enumerate(zip(*zip(*loaders, strict=True), strict=True)):
        assert_same(list(batches), list(LocalLoader(Plain(), rank=rank, **plan)))


def test_random_transforms_do_not_depend_on_who_runs_them(data_hosts):
    plan = {"batch_size": BATCH_SIZE, "shuffle": True, "seed": 5}
    expected = epochs_of(LocalLoader(Random(), **plan))
    for loader in (
        LocalLoader(Random(), num_workers=2, **plan),
        feed("random", data_hosts[:1], **plan),
        feed("random", data_hosts, **plan),
    ):
        assert_same(epochs_of(loader), expected)

    values = torch.cat([batch[0].flatten() for epoch in expected for batch in epoch])
    assert len(values.unique()) > 0.99 * len(values)  # no batch repeats another's random numbers
    other_seed = next(iter(LocalLoader(Random(), batch_size=BATCH_SIZE, shuffle=True, seed=6)))
    assert not torch.equal(other_seed[0], expected[0][0][0])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_local_loader_leaves_the_random_numbers_of_the_training_alone(num_workers):
    def draw() -> list:
        return [torch.rand(3).tolist(), np.random.rand(), random.random()]

    def draw_among_batches(loader: object) -> list:
        torch.manual_seed(0), np.random.seed(0), random.seed(0)
        threads = torch.get_num_threads()
        draws = [draw() for _ in loader]
        assert torch.get_num_threads() == threads
        return draws

    loader = LocalLoader(Random(), batch_size=BATCH_SIZE, num_workers=num_workers)
    assert draw_among_batches(loader) == draw_among_batches(range(len(loader)))


@pytest.fixture(params=["local", "local with workers", "service"])
def make(request, data_hosts):
    """A function that makes a loader of Random, of one kind after another."""

    def make(**plan) -> LocalLoader | FeedLoader:
        plan = {"batch_size": BATCH_SIZE, "shuffle": True, "world_size": 2, **plan}
        if request.param == "service":
            return feed("random", data_hosts, **plan)
        return LocalLoader(Random(), num_workers=2 if "workers" in request.param else 0, **plan)

    return make


def state_after(loader: LocalLoader | FeedLoader, batches: int, epoch: int = 1) -> dict:
    """Return the loader's state, by way of JSON, once so many batches have been handed out."""
    loader.set_epoch(epoch)
    for _, _ in zip(range(batches), loader, strict=False):
        continue
    return json.loads(json.dumps(loader.state_dict()))


@pytest.mark.parametrize("drop_last", [False, True])
def test_resumes_at_the_next_batch(make, drop_last):
    options = {"drop_last": drop_last, "rank": 1}  # the rank whose last sample is padding
    expected = epochs_of(make(**options))
    for done in (0, 1, 5, len(expected[1])):
        interrupted = make(**options)
        state = state_after(interrupted, done)
        assert state == state_after(make(drop_last=drop_last, rank=0), done)  # that of all ranks
        for resumed in (interrupted, make(**options)):  # in the same process, or in another
            resumed.load_state_dict(state)
            assert resumed.state_dict() == state
            resumed.set_epoch(1)
            assert_same(list(resumed), expected[1][done:])
            assert resumed.state_dict()["samples_done"] == SAMPLES
            assert_same(list(resumed), expected[1])
            resumed.set_epoch(0)
            assert_same(list(resumed), expected[0])
            assert_same(list(resumed), expected[0])


def test_state_is_of_one_order_of_samples(make):
    state = state_after(make(), 3)
    make(batch_size=4, world_size=3, drop_last=True).load_state_dict(state)
    for name, other in {"seed": 6, "shuffle": False}.items():
        with pytest.raises(ValueError, match=f"'{name}': {state[name]}.*'{name}': {other}"):
            make(**{name: other}).load_state_dict(state)
    with pytest.raises(ValueError, match="'dataset_length': 103.*'dataset_length': 102"):
        LocalLoader(Plain(SAMPLES - 1), BATCH_SIZE, shuffle=True).load_state_dict(state)
    with pytest.raises(ValueError, match="first_sample must be from 0 to dataset_length"):
        make().load_state_dict({**state, "samples_done": SAMPLES + 1})


@pytest.mark.parametrize("shuffle", [False, True])
def test_ranks_and_batch_size_may_change_within_an_epoch(make, shuffle):
    seen, values = [], []
    state = state_after(make(shuffle=shuffle), 0)
    for world_size, batch_size, batches in [(2, 7, 3), (4, 5, 1), (3, 2, 2), (1, 4, 99)]:
        states = []
        for rank in range(world_size):
            loader = make(shuffle=shuffle, world_size=world_size, rank=rank, batch_size=batch_size)
            loader.load_state_dict(state)
            for _, (random_values, _, _, indices) in zip(range(batches), loader, strict=False):
                seen += indices.tolist()
                values += random_values.flatten().tolist()
            states.append(loader.state_dict())
        assert states == states[:1] * world_size
        assert states[0]["samples_done"] == len(seen)
        state = states[0]
    assert sorted(seen) == list(range(SAMPLES))
    assert len(set(values)) > 0.99 * len(values)  # nor are random numbers repeated


def test_dataset_exception_arrives_once_in_its_place(data_hosts):
    batches = iter(feed("raising", data_hosts, batch_size=BATCH_SIZE))
    for _ in range(42 // BATCH_SIZE):
        next(batches)
    with pytest.raises(DatasetError) as caught:
        next(batches)
    text = str(caught.value)
    assert "broken: caf\\udce9.jpg" in text
    addresses = [host.addresses["raising"] for host in data_hosts]
    sentences = [f"data host {one}, batch 6: LookupError: sample 42" for one in addresses]
    assert sum(sentence in text for sentence in sentences) == 1
    assert 'raise LookupError("sample 42 is broken' in text  # the traceback's source line
    assert next(batches, "no more") == "no more"
    assert len(list(feed("plain", data_hosts, batch_size=BATCH_SIZE))) == 15  # they serve on


def test_what_is_raised_need_be_no_exception(data_hosts):
    for host in data_hosts:
        batches = iter(feed("panicking", [host], batch_size=BATCH_SIZE))
        for _ in range(42 // BATCH_SIZE):
            next(batches)
        with pytest.raises(DatasetError, match="batch 6: Panic: index out of bounds"):
            next(batches)


def test_structures_arrive_as_they_left(data_hosts):
    batches = iter(feed("structures", data_hosts, batch_size=1))
    for expected in STRUCTURES:
        assert_same(next(batches), expected)


def test_namedtuple_of_a_module_that_is_not_here_arrives_as_its_like(data_hosts):
    """It is of the data host's main program: nothing is imported for it."""
    loader = feed("structures", data_hosts, batch_size=1)
    loader.load_state_dict({**loader.state_dict(), "samples_done": len(loader) - 1})
    [point] = loader
    assert type(point).__name__ == "Point" and point._fields == ("x", "y")
    assert point.x.tolist() == [0, 1, 2] and point.y is None


@pytest.mark.parametrize("sentence", REFUSED)
def test_refused_structure_is_named(data_hosts, sentence):
    loader = feed("structures", data_hosts[:1], batch_size=1)
    number = len(STRUCTURES) + list(REFUSED).index(sentence)
    loader.load_state_dict({**loader.state_dict(), "samples_done": number})
    with pytest.raises(DatasetError, match="TypeError") as caught:
        next(iter(loader))
    assert sentence in str(caught.value)


FOUR_BYTES = wire.messages.BatchHeader(
    structure=wire.messages.Value(
        tensor=wire.messages.Array(dtype="uint8", shape=[4])
    ).SerializeToString()
).SerializeToString()
NUMBER_99 = wire.messages.BatchHeader(number=99).SerializeToString()
BROKEN = {  # what becomes of what a data host sends
    "it sent batch 99, which it was not": wire.LENGTH.pack(len(NUMBER_99)) + NUMBER_99,
    "no more of a batch for 1 s": wire.LENGTH.pack(len(FOUR_BYTES)) + FOUR_BYTES + b"123",
    "Error parsing message": wire.LENGTH.pack(40) + b"\xff" * 40,
    "it sent something else than batches": b"SSH-2.0-OpenSSH_9.2",
}


@pytest.mark.parametrize("sentence", BROKEN)
def test_a_data_host_that_sends_nonsense_is_named(sentence, monkeypatch):
    monkeypatch.setattr(wire, "STALL_SECONDS", 1)
    over = threading.Event()

    def send(requests: Iterator, context: grpc.ServicerContext) -> Iterator:
        with feed_server.listen("127.0.0.1") as listener:
            yield wire.messages.Welcome(port=listener.getsockname()[1], secret=b"abc", workers=1)
            with listener.accept()[0] as connection:
                assert connection.recv(100) == b"abc"
                next(requests)
                connection.sendall(BROKEN[sentence])
                over.wait(30)

    describe = grpc.unary_unary_rpc_method_handler(
        lambda request, context: wire.messages.DatasetDescription(length=5),
        wire.messages.DescribeRequest.FromString,
        wire.messages.DatasetDescription.SerializeToString,
    )
    batches = grpc.stream_stream_rpc_method_handler(
        send, wire.messages.BatchRequest.FromString, wire.messages.Welcome.SerializeToString
    )
    server = grpc.server(ThreadPoolExecutor(4))
    methods = {"Describe": describe, "Batches": batches}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(wire.SERVICE, methods)])
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    with pytest.raises(ConnectionError, match=rf"data host {address} failed \({sentence}"):
        list(FeedLoader([address], TOKEN, 1, retry_timeout=0.5))
    over.set()
    server.stop(None).wait()


def test_no_more_is_read_ahead_than_allowed(data_hosts, monkeypatch):
    received = []
    monkeypatch.setattr(feed_client, "receive", lambda *a: received.append(a) or wire.receive(*a))
    batches = iter(feed("plain", data_hosts[:1], batch_size=1, read_ahead=2))
    next(batches)
    time.sleep(2)
    assert len(received) == 1 + 2


def test_data_hosts_must_agree(data_hosts):
    addresses = [data_hosts[0].addresses["plain"], data_hosts[1].addresses["short"]]
    sentence = f"{addresses[0]} has 103 samples and {addresses[1]} has 102"
    with pytest.raises(ValueError, match=sentence):
        FeedLoader(addresses, TOKEN, BATCH_SIZE)


@pytest.mark.parametrize("token", ["another token", "", TOKEN + "x"])
def test_wrong_token_is_refused(data_hosts, token):
    address = data_hosts[0].addresses["plain"]
    with pytest.raises(PermissionError, match=f"{address} refused this job's token"):
        FeedLoader([address], token, BATCH_SIZE)


def test_port_in_use_is_refused(data_hosts):
    address = data_hosts[0].addresses["plain"]
    with pytest.raises(OSError, match=f"cannot listen at '{address}': the port is in use"):
        FeedServer(Plain(), address, TOKEN, num_workers=1)


@pytest.mark.parametrize(
    "serve_at, ask_at",
    [("localhost", "127.0.0.1"), ("0.0.0.0", "[::1]"), ("[::1]", "[::1]"), ("[::]", "127.0.0.1")],
)
def test_addresses_of_all_kinds(serve_at, ask_at):
    if "[::" in serve_at + ask_at and not any(
        address.address == "::1" for address in psutil.net_if_addrs().get("lo", [])
    ):
        pytest.skip("this machine has no IPv6")
    port = free_port()
    server = FeedServer(Plain(), f"{serve_at}:{port}", TOKEN, num_workers=0)
    try:
        loader = FeedLoader([f"{ask_at}:{port}"], TOKEN, BATCH_SIZE, retry_timeout=0.5)
        assert_same(list(loader), list(LocalLoader(Plain(), BATCH_SIZE)))
    finally:
        server.stop()


def test_workers_end_with_a_program_that_is_killed():
    code = f"""if True:
        import sys, time
        sys.path[:0] = {sys.path!r}
        from batches import LocalLoader
        from data_hosts import Bulky
        batches = iter(LocalLoader(Bulky(), 1, num_workers=2))
        next(batches)
        print("started", flush=True)
        time.sleep(60)"""
    program = psutil.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert program.stdout.readline() == b"started\n"
    time.sleep(0.5)  # now the workers have more batches, which nobody takes from them
    workers = program.children()
    assert len(workers) == 2
    program.kill()
    program.communicate(timeout=30)
    wait_until(lambda: all(map(has_ended, workers)))


def test_iterable_dataset_is_refused():
    class Endless(IterableDataset):
        def __iter__(self):
            return iter(())

    with pytest.raises(TypeError, match="Endless is an IterableDataset, which only its own"):
        LocalLoader(Endless(), batch_size=1)
    with pytest.raises(TypeError, match="Endless is an IterableDataset, which only its own"):
        FeedServer(Endless(), "127.0.0.1:0", TOKEN)


@pytest.mark.parametrize(
    "values",
    [
        {"dataset_length": 0},
        {"batch_size": 0},
        {"seed": -1},
        {"rank": 2, "world_size": 2},
        {"rank": -1},
    ],
)
def test_senseless_plan_is_refused(values):
    with pytest.raises(ValueError, match=f"{list(values)[0].split('_')[0]}.* must .*but this is"):
        BatchPlan(**{"dataset_length": 8, "batch_size": 2, **values})


@pytest.mark.parametrize("dataset, epochs", [(Plain(), 6), (Slow(), 1)])
def test_leaving_an_epoch_frees_its_threads_and_streams(monkeypatch, dataset, epochs):
    monkeypatch.setattr(feed_server, "MAX_STREAMS", 2)
    before = set(threading.enumerate())
    address = f"127.0.0.1:{free_port()}"
    server = FeedServer(dataset, address, TOKEN, num_workers=1)
    for _ in range(epochs):
        batches = iter(FeedLoader([address], TOKEN, BATCH_SIZE))
        next(batches)  # of Slow, a worker now prepares the next one for a minute
        start = time.monotonic()
        del batches
        assert time.monotonic() - start < 10
    start = time.monotonic()
    server.stop()
    assert time.monotonic() - start < 10
    wait_for_threads(before)
    wait_until(lambda: not multiprocessing.active_children())


@pytest.mark.parametrize("name", ["plain", "slow"])  # it waits for room, or for a batch
def test_program_that_leaves_in_the_middle_of_an_epoch_ends(data_hosts, name):
    """Also when Python stops gRPC's threads, as all daemons, while they hold a lock."""
    code = f"""if True:
        import atexit, gc, sys, threading, time
        sys.path[:0] = {sys.path!r}
        from grpc._channel import _RPCState
        from feed_client import FeedLoader

        def hold_locks():
            for state in gc.get_objects():
                if isinstance(state, _RPCState):
                    state.condition.acquire()

        @atexit.register  # the last one to run
        def stop_threads():
            thread = threading.Thread(target=hold_locks)
            thread.start()
            thread.join()

        loader = FeedLoader([{data_hosts[0].addresses[name]!r}], {TOKEN!r}, {BATCH_SIZE})
        batches = iter(loader)
        next(batches)
        time.sleep(1)
        sys.exit(5)"""
    assert subprocess.run([sys.executable, "-c", code], timeout=30).returncode == 5


def test_killed_workers_of_a_local_loader_leave_no_folder():
    code = f"""if True:
        import contextlib, sys
        sys.path[:0] = {sys.path!r}
        from batches import LocalLoader
        from data_hosts import Plain
        loader = LocalLoader(Plain(), 1, num_workers=2)
        batches = iter(loader)
        next(batches), next(batches)
        for worker in loader._loader._iterator._workers:
            with contextlib.suppress(RuntimeError):  # which torch raises when one dies, anywhere:
                worker.kill(), worker.join()  # also in what Python does at exit, if that is now
        print("done")"""
    folder = tempfile.mkdtemp()  # with a short name, as the sockets in it need
    environment = {**os.environ, "TMPDIR": folder}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)
    assert done.stdout == "done\n", done.stderr
    os.rmdir(folder)  # it is empty
