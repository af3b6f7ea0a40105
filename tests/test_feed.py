"""The loader of the PyTorch example: data hosts as processes of their own, against a DataLoader.

Run as a program, this file is a data host: `python test_feed.py NAME=HOST:PORT ...` serves each of
the DATASETS named.
"""

import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import namedtuple
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

sys.path.insert(0, str(Path(__file__).parents[1] / "pt.grpc.sagemaker" / "code"))

from batches import BatchPlan, LocalLoader  # noqa: E402
from feed_client import DatasetError, FeedLoader  # noqa: E402
from feed_server import FeedServer, serve  # noqa: E402

TOKEN = "a token"
SAMPLES, BATCH_SIZE = 103, 7  # nothing divides 103; 3 ranks have 35 samples each, or drop to 34
Point = namedtuple("Point", "x y")


class Plain(Dataset):
    """Samples that are the same each time."""

    def __init__(self, length: int = SAMPLES):
        self.images = torch.rand(length, 3, 5, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict:
        return {"image": self.images[index], "index": index, "name": f"sample {index}"}


class Random(Plain):
    """Samples that take random numbers from all three generators, and come several at a time."""

    def __getitems__(self, indices: list[int]) -> list:
        return [(torch.rand(2), np.random.rand(), random.random(), index) for index in indices]


class Raising(Plain):
    """Sample 42 is broken."""

    def __getitem__(self, index: int) -> dict:
        if index == 42:
            raise LookupError("sample 42 is broken")
        return super().__getitem__(index)


class Slow(Plain):
    """A batch of these takes longer than a test may last."""

    def __getitem__(self, index: int) -> dict:
        if index >= BATCH_SIZE:
            time.sleep(60)
        return super().__getitem__(index)


DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
DTYPES += [torch.float16, torch.bfloat16, torch.float32, torch.float64]
DTYPES += [torch.complex64, torch.complex128]
STRUCTURES = [
    [torch.arange(6).reshape(2, 3).to(dtype) for dtype in DTYPES],
    (torch.tensor(2.5), torch.tensor(True), torch.empty(0, 3), torch.empty(2, 0, dtype=torch.bool)),
    (torch.arange(12).reshape(3, 4).t(), torch.arange(9)[::2], torch.linspace(0, 1, 700_000)),
    {"a": {"b": [(), [], {}, (1, [2, (3,)])]}, 4: None, (5, "six"): b"\x00\xff", None: "dé€"},
    [True, False, 0, -1, 2**63 - 1, -(2**63), 0.0, -1.5, float("inf"), 1e-320, "", b""],
    [np.arange(5), np.float32([[1, 2]]).T, np.array("text"), np.array(3.5), np.zeros((0, 2), bool)],
    [np.array(["2020-01-01"], "M8[D]"), np.array([1, 2], ">i4"), np.array([b"ab", b"c"])],
    [f"a name, {i}" * 50 for i in range(9000)],  # more than one frame of structure
    (torch.arange(3_000_000), np.arange(5), torch.arange(700_000)),  # 30 frames
]
REFUSED = {
    "batch[0]['point'] is a __mp_main__.Point": [{"point": Point(1, 2)}],
    "batch[1] is an int of more than 64 bits": [0, 2**63],
    "batch['a'] is an array of object": {"a": np.array([None])},
    "key frozenset() of batch is a builtins.frozenset": {frozenset(): 1},
    "batch is a torch.float32 tensor, torch.sparse_coo": torch.eye(2).to_sparse(),
    "batch is a numpy.float64": np.float64(1),
}


class Structures(Dataset):
    """Batch i, of one sample, is STRUCTURES[i], then come the REFUSED ones."""

    def __len__(self) -> int:
        return len(STRUCTURES) + len(REFUSED)

    def __getitem__(self, index: int) -> object:
        return [*STRUCTURES, *REFUSED.values()][index]


def only_sample(samples: list) -> object:
    return samples[0]


DATASETS = {
    "plain": Plain(),
    "random": Random(),
    "raising": Raising(),
    "slow": Slow(),
    "short": Plain(SAMPLES - 1),
    "structures": Structures(),
}


def main() -> None:
    services = [argument.split("=") for argument in sys.argv[2:]]
    for number, (name, address) in enumerate(services, start=1):
        collate_fn = only_sample if name == "structures" else None
        start = serve if number == len(services) else FeedServer
        start(DATASETS[name], address, TOKEN, collate_fn, num_workers=int(sys.argv[1]))


class DataHost:
    """This file run as a program, with `num_workers` and an address for each of `names`."""

    def __init__(self, *names: str, num_workers: int = 1):
        self.addresses = {name: f"127.0.0.1:{free_port()}" for name in names}
        services = [f"{name}={address}" for name, address in self.addresses.items()]
        command = [sys.executable, __file__, str(num_workers), *services]
        self.process = psutil.Popen(command, stdout=subprocess.DEVNULL)

    def processes(self) -> list[psutil.Process]:
        return [self.process, *self.process.children(recursive=True)]


def has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until(condition: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture(scope="module")
def data_hosts() -> list[DataHost]:
    """Three data hosts with different numbers of workers."""
    names = ["plain", "random", "raising", "short", "slow", "structures"]
    hosts = [DataHost(*names, num_workers=workers) for workers in (2, 1, 3)]
    yield hosts
    processes = [process for host in hosts for process in host.processes()]
    for host in hosts:
        host.process.terminate()
    assert [host.process.wait() for host in hosts] == [0, 0, 0]
    wait_until(lambda: all(map(has_ended, processes)))


def feed(name: str, hosts: list[DataHost], **options) -> FeedLoader:
    return FeedLoader([host.addresses[name] for host in hosts], TOKEN, **options)


def assert_same(actual: object, expected: object) -> None:
    """Compare two batches: types, dtypes, shapes and bits."""
    assert type(actual) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
        assert torch.equal(actual, expected)
    elif isinstance(expected, np.ndarray):
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
        assert actual.tobytes() == expected.tobytes()
    elif isinstance(expected, dict):
        assert list(actual) == list(expected)
        assert_same(list(actual.values()), list(expected.values()))
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected)
        for actual_item, expected_item in zip(actual, expected, strict=True):
            assert_same(actual_item, expected_item)
    else:
        assert repr(actual) == repr(expected)


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


@pytest.mark.parametrize("kind", ["local", "local with workers", "service"])
def test_resumes_at_the_next_batch(data_hosts, kind):
    def make(**plan) -> LocalLoader | FeedLoader:
        plan = {"batch_size": BATCH_SIZE, "shuffle": True, "world_size": 2, **plan}
        if kind == "service":
            return feed("random", data_hosts, **plan)
        return LocalLoader(Random(), num_workers=2 if "workers" in kind else 0, **plan)

    expected = epochs_of(make())
    length = len(expected[0])
    for done in (0, 1, 5, length):
        interrupted = make()
        interrupted.set_epoch(1)
        batches = iter(interrupted)
        for _ in range(done):
            next(batches)
        state = json.loads(json.dumps(interrupted.state_dict()))
        for resumed in (interrupted, make()):  # in the same process, or in another
            resumed.load_state_dict(state)
            resumed.set_epoch(1)
            assert_same(list(resumed), expected[1][done:])
            assert resumed.state_dict()["next_batch"] == length
            assert_same(list(resumed), expected[1])
            resumed.set_epoch(0)
            assert_same(list(resumed), expected[0])
            assert_same(list(resumed), expected[0])

    make(rank=1).load_state_dict(state)  # rank 0's checkpoint serves all ranks
    with pytest.raises(ValueError, match="'batch_size': 7.*'batch_size': 4"):
        make(batch_size=4).load_state_dict(state)


def test_dataset_exception_arrives_once_in_its_place(data_hosts):
    batches = iter(feed("raising", data_hosts, batch_size=BATCH_SIZE))
    for _ in range(42 // BATCH_SIZE):
        next(batches)
    with pytest.raises(DatasetError) as caught:
        next(batches)
    text = str(caught.value)
    assert (
        f"data host {data_hosts[0].addresses['raising']}, batch 6: LookupError: sample 42" in text
    )
    assert 'raise LookupError("sample 42 is broken")' in text  # the traceback's source line
    assert next(batches, "no more") == "no more"
    assert len(list(feed("plain", data_hosts, batch_size=BATCH_SIZE))) == 15  # they serve on


def test_structures_arrive_as_they_left(data_hosts):
    batches = iter(feed("structures", data_hosts, batch_size=1))
    for expected in STRUCTURES:
        assert_same(next(batches), expected)


@pytest.mark.parametrize("sentence", REFUSED)
def test_refused_structure_is_named(data_hosts, sentence):
    loader = feed("structures", data_hosts[:1], batch_size=1)
    number = len(STRUCTURES) + list(REFUSED).index(sentence)
    loader.load_state_dict({**loader.state_dict(), "next_batch": number})
    with pytest.raises(DatasetError, match="TypeError") as caught:
        next(iter(loader))
    assert sentence in str(caught.value)


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


def test_host_that_never_comes_up_is_named(data_hosts):
    address = f"127.0.0.1:{free_port()}"
    start = time.monotonic()
    with pytest.raises(ConnectionError, match=f"{address} did not answer in time"):
        FeedLoader([data_hosts[0].addresses["plain"], address], TOKEN, 8, connect_timeout=0.5)
    assert time.monotonic() - start < 3


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


@pytest.mark.parametrize("name", ["plain", "slow"])  # between batches; waiting for one
def test_leaving_an_epoch_frees_threads_and_workers(data_hosts, name):
    hosts = data_hosts[1:2]
    loader = feed(name, hosts, batch_size=BATCH_SIZE)
    if name == "plain":
        assert len(list(loader)) == len(loader)  # its workers now wait for the next epoch
    batches = iter(loader)
    next(batches)
    assert threading.active_count() > 1
    before = len(hosts[0].processes())
    start = time.monotonic()
    del batches
    assert time.monotonic() - start < 2
    wait_until(lambda: threading.active_count() == 1)
    # DataLoader gives a worker 5 s to finish its batch.
    wait_until(lambda: len(hosts[0].processes()) < before, seconds=20)


def test_program_that_leaves_in_the_middle_of_an_epoch_ends(data_hosts):
    code = f"""if True:
        import sys
        sys.path[:0] = {sys.path!r}
        from feed_client import FeedLoader
        batches = iter(FeedLoader([{data_hosts[0].addresses["plain"]!r}], {TOKEN!r}, 1))
        next(batches)
        sys.exit(5)"""
    assert subprocess.run([sys.executable, "-c", code], timeout=30).returncode == 5


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGKILL])
def test_end_of_a_busy_host_is_prompt_and_named(signal_number):
    host = DataHost("slow")
    batches = iter(feed("slow", [host], batch_size=BATCH_SIZE))
    next(batches)
    processes = host.processes()
    host.process.send_signal(signal_number)
    with pytest.raises(ConnectionError, match=f"data host {host.addresses['slow']} failed"):
        next(batches)
    host.process.wait(timeout=3)
    wait_until(lambda: all(map(has_ended, processes)))
    wait_until(lambda: threading.active_count() == 1)


if __name__ == "__main__":
    main()
