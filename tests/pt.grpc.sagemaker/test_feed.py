"""The loader of the PyTorch example: batches from data hosts, against those of a DataLoader."""

import inspect
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)

from data_hosts import (
    FIRST_REFUSED,
    FIRST_STRUCTURE,
    PANICKING,
    POINT,
    RAISING,
    RANDOM,
    REFUSED,
    SAMPLES,
    SLOW,
    STRUCTURES,
    TOKEN,
    DataHost,
    Zoo,
    assert_same,
    collate,
    free_port,
    has_ended,
    local,
    service,
    wait_for_threads,
    wait_until,
)
from feed.batches import BatchKeys, SeededBatches, as_is
from feed.client import RemoteBatches, RemoteDataset
from feed.server import serve
from feed.wire import DatasetError
from train_dnn import Progress, begin_epoch

BATCH_SIZE = 7


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[DataHost]]:
    """Three data hosts with different numbers of worker processes."""
    hosts = [DataHost("zoo", num_workers=workers) for workers in (1, 2, 3)]
    for host in hosts:
        host.wait_until_serving()
    yield hosts
    processes = [process for host in hosts for process in host.processes()]
    for host in hosts:
        host.process.terminate()
    assert [host.process.wait() for host in hosts] == [0, 0, 0]
    wait_until(lambda: all(map(has_ended, processes)))


@pytest.fixture(params=["local", "local with workers", "one host", "three hosts"])
def make(request, hosts):
    """A function that makes a loader of the Zoo for given keys, of one kind after another."""
    return {
        "local": lambda keys: local(Zoo(), keys),
        "local with workers": lambda keys: local(Zoo(), keys, num_workers=2),
        "one host": lambda keys: service(hosts[:1], keys),
        "three hosts": lambda keys: service(hosts, keys),
    }[request.param]


def keys_of(samples: range, rank: int = 0, ranks: int = 1, seed: int = 0) -> BatchKeys:
    """Of some of the Zoo's samples, in random order."""
    order = Positions(DistributedSampler(samples, ranks, rank, seed=seed), samples)
    return BatchKeys(BatchSampler(order, BATCH_SIZE, drop_last=False), seed)


class Positions(Sampler):
    """A reader's own sampler around another: what is at the positions that it yields."""

    def __init__(self, sampler: DistributedSampler, values: range):
        self.sampler, self.values = sampler, values

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[int]:
        return (self.values[position] for position in self.sampler)


def epochs_of(loader: DataLoader, keys: BatchKeys | DistributedSampler) -> list:
    """All batches of the first two epochs, one list per epoch."""
    batches = []
    for epoch in range(2):
        keys.set_epoch(epoch)
        batches.append(list(loader))
        assert len(batches[-1]) == len(loader)
    return batches


# Which batches


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("host_count", [1, 3])
def test_batches_are_those_of_a_plain_dataloader(hosts, host_count, world_size):
    for shuffle, drop_last, rank in product([False, True], [False, True], range(world_size)):
        sampler = DistributedSampler(
            range(SAMPLES), world_size, rank, shuffle, seed=5, drop_last=drop_last
        )
        plain = DataLoader(Zoo(), BATCH_SIZE, sampler=sampler, drop_last=drop_last)
        expected = epochs_of(plain, sampler)
        keys = BatchKeys(BatchSampler(sampler, BATCH_SIZE, drop_last))
        assert_same(epochs_of(service(hosts[:host_count], keys), keys), expected)
        assert_same(epochs_of(local(Zoo(), keys), keys), expected)


def test_loaders_and_ranks_may_iterate_at_the_same_time(hosts):
    dataset = RemoteDataset([host.address for host in hosts], TOKEN)
    keys = [keys_of(range(SAMPLES), rank, ranks=3) for rank in range(3)]
    loaders = [DataLoader(RemoteBatches(dataset, one), None, collate_fn=as_is) for one in keys]
    for one, batches in zip(keys, zip(*zip(*loaders, strict=True), strict=True), strict=True):
        assert_same(list(batches), list(local(Zoo(), one)))


class Own:
    """A reader's batch sampler."""

    generator = None

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.randperm(SAMPLES, generator=self.generator).chunk(10))


@pytest.mark.parametrize(
    "batch_sampler, changes",
    [
        (BatchSampler(WeightedRandomSampler([1.0, 5.0, 2.0] * 30, 70), 7, False), True),
        (BatchSampler(RandomSampler(range(SAMPLES)), 7, False), True),
        (Own(), True),
        ([[5, 3], [3], list(range(40))], False),
    ],
    ids=["weighted", "random", "own", "lists"],
)
def test_any_batch_sampler_will_do_and_gives_the_same_lists_again(hosts, batch_sampler, changes):
    keys = BatchKeys(batch_sampler, seed=3)
    epochs = epochs_of(service(hosts, keys), keys)
    first, second = ([batch["index"].tolist() for batch in epoch] for epoch in epochs)
    assert (first != second) == changes
    torch.manual_seed(0)  # another process, in which an interrupted epoch goes on
    keys.set_epoch(1, 2)
    assert [key.indices for key in keys] == second[2:]


# Random numbers


def test_random_transforms_do_not_depend_on_who_runs_them(make):
    keys = keys_of(RANDOM, seed=5)
    assert_same(epochs_of(make(keys), keys), epochs_of(local(Zoo(), keys), keys))


def test_random_numbers_are_never_repeated():
    """Neither in another epoch, nor in another batch of the same samples; a seed changes all."""

    def numbers(seed: int) -> list:
        keys = BatchKeys([[RANDOM[0], RANDOM[1]]] * 50, seed)
        epochs = epochs_of(local(Zoo(), keys), keys)
        return [
            x.item() for epoch in epochs for a, b, c, _ in epoch for x in (*a.flatten(), *b, *c)
        ]

    drawn = numbers(5) + numbers(6)
    assert len(set(drawn)) > 0.99 * len(drawn)


def test_the_training_s_own_random_numbers_and_threads_are_left_alone(make):
    def draw_among(batches: DataLoader) -> list:
        torch.manual_seed(0), np.random.seed(0), random.seed(0)
        threads = torch.get_num_threads()
        draws = [(torch.rand(3).tolist(), np.random.rand(), random.random()) for _ in batches]
        assert torch.get_num_threads() == threads
        return draws

    # A DataLoader always draws one number when it starts.
    plain = DataLoader(range(len(RANDOM)), BATCH_SIZE)
    assert draw_among(make(keys_of(RANDOM))) == draw_among(plain)


# Resuming


def test_resumes_at_any_batch_without_a_warning(make):
    keys = keys_of(RANDOM, rank=1, ranks=2)  # the rank whose last sample is padding
    loader = make(keys)
    whole = epochs_of(loader, keys)[1]
    for first in (0, 1, 5, len(whole)):
        keys.set_epoch(1, first)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # torch has one for batches that len() doesn't tell of
            assert_same(list(loader), whole[first:])
        assert len(loader) == len(whole)


def test_remote_batches_pass_the_epoch_on_to_their_keys(hosts):
    loader, keys = service(hosts, own := keys_of(RANDOM)), keys_of(RANDOM)
    loader.dataset.set_epoch(1, 3)
    keys.set_epoch(1, 3)
    assert loader.dataset.keys is own
    assert_same(list(loader), list(local(Zoo(), keys)))


def test_ranks_and_batch_size_may_change_within_an_epoch():
    """What train_dnn.py does with the rest: each sample once, but for DistributedSampler's pads."""
    dataset, seen = range(SAMPLES), []
    for world_size, batch_size, batches in [(2, 7, 3), (4, 5, 1), (3, 2, 2), (2, 4, 99)]:
        done, shares, keys = len(seen), [], BatchKeys([])
        for rank in range(world_size):
            sampler = DistributedSampler(dataset, world_size, rank, seed=5)
            begin_epoch(keys, sampler, Progress(epoch=1, samples_done=done), batch_size)
            rest = list(keys)[:batches]
            shares.append([index for key in rest for index in key.indices])
        assert len({len(share) for share in shares}) == 1
        seen += [index for indices in zip(*shares, strict=True) for index in indices]
    order = DistributedSampler(dataset, 1, 0, seed=5)
    order.set_epoch(1)
    assert seen[:SAMPLES] == list(order)
    assert seen[SAMPLES:] == seen[done : done + len(seen) - SAMPLES]


# What a batch may be


@pytest.mark.parametrize("number", range(len(STRUCTURES)))
def test_structures_arrive_as_they_left(hosts, number):
    for loader in (service, local):
        source = hosts if loader is service else Zoo()
        [batch] = loader(source, [[FIRST_STRUCTURE + number]])
        assert_same(batch, STRUCTURES[number])


def test_namedtuple_of_a_module_that_is_not_here_arrives_as_its_like(hosts):
    """It is of the data host's main program: nothing is imported for it."""
    [point] = service(hosts, [[POINT]])
    assert type(point).__name__ == "Point" and point._fields == ("x", "y")
    assert point.x.tolist() == [0, 1, 2] and point.y is None


@pytest.mark.parametrize("number, sentence", list(enumerate(REFUSED)))
def test_refused_structure_is_named(hosts, number, sentence):
    with pytest.raises(DatasetError, match="TypeError") as caught:
        list(service(hosts[:1], [[FIRST_REFUSED + number]]))
    assert sentence in str(caught.value)


# What goes wrong


def test_dataset_exception_arrives_once_in_its_place_and_the_hosts_serve_on(hosts):
    loader = service(hosts, [[0]] * 6 + [[1, RAISING]] + [[2]] * 6)
    batches = iter(loader)
    for _ in range(6):
        next(batches)
    with pytest.raises(DatasetError) as caught:
        next(batches)
    text = str(caught.value)
    sentences = [f"data host {host.address}, batch 6: LookupError: a sample" for host in hosts]
    assert sum(sentence in text for sentence in sentences) == 1
    assert "is broken: caf\\udce9.jpg" in text
    assert 'raise LookupError("a sample is broken' in text  # the traceback's source line
    assert next(batches, "no more") == "no more"
    loader.dataset.set_epoch(0, first_batch=7)
    assert len(list(loader)) == 6


def test_what_is_raised_need_be_no_exception(hosts):
    for host in hosts:
        with pytest.raises(DatasetError, match="batch 0: Panic: index out of bounds"):
            list(service([host], [[PANICKING]]))


@pytest.mark.parametrize("options", [{}, {"batch_size": 4}, {"collate_fn": as_is}])
def test_forgetting_that_these_are_batches_already_is_answered(hosts, options):
    dataset, keys = RemoteDataset([hosts[0].address], TOKEN), keys_of(range(SAMPLES))
    for loader in (
        DataLoader(RemoteBatches(dataset, keys), **options),
        DataLoader(SeededBatches(Zoo(), collate), sampler=keys, **options),
    ):
        with pytest.raises(TypeError, match="These are batches already.* give it batch_size=None"):
            next(iter(loader))


def test_other_mistakes_are_answered(hosts):
    class Endless(IterableDataset):
        def __iter__(self):
            return iter(())

    address, dataset = hosts[0].address, RemoteDataset([hosts[0].address], TOKEN)
    keys = keys_of(range(SAMPLES))
    batches = RemoteBatches(dataset, keys)
    for error, words, attempt in [
        (RuntimeError, "set num_workers=0", lambda: DataLoader(batches, None, num_workers=1)),
        (TypeError, "samples stay at the data hosts", lambda: DataLoader(dataset)),
        (TypeError, "sampler=BatchKeys", lambda: DataLoader(SeededBatches(Zoo()), None)),
        (TypeError, "BatchKeys needs a batch sampler", lambda: BatchKeys(range(3))),
        (TypeError, "BatchKeys.batch_sampler", lambda: RemoteBatches(dataset, [[0]])),
        (TypeError, "Endless is no map-style Dataset", lambda: SeededBatches(Endless())),
        (TypeError, "Endless is no map-style Dataset", lambda: serve(Endless(), address, TOKEN)),
        (ValueError, "hosts must be a list such as", lambda: RemoteDataset(address, TOKEN)),
        (ValueError, "hosts must be a list such as", lambda: RemoteDataset([], TOKEN)),
        (ValueError, "read_ahead must be at least 1", lambda: RemoteBatches(dataset, keys, 0)),
        (ValueError, "seed must be from 0 to", lambda: BatchKeys([[0]], seed=-1)),
        (ValueError, "must not be negative", lambda: keys.set_epoch(0, -1)),
        (ValueError, "the token must be an ASCII string", lambda: serve(Zoo(), address, "")),
        (ValueError, "num_workers 1 or more", lambda: serve(Zoo(), address, TOKEN, num_workers=0)),
    ]:
        with pytest.raises(error, match=words):
            next(iter(attempt()))


# Ends


def test_leaving_an_epoch_frees_its_threads_soon(hosts):
    """Whether it waits for room, for a batch, or for a host that isn't there."""
    before, nobody = set(threading.enumerate()), f"127.0.0.1:{free_port()}"
    for samples in ([[0]] * 100, [[0]] * 5 + [[SLOW]] * 100):
        dataset = RemoteDataset([hosts[2].address, nobody], TOKEN)
        batches = RemoteBatches(dataset, BatchKeys(samples))
        batches = iter(DataLoader(batches, batch_size=None, collate_fn=as_is))
        next(batches)
        started = time.monotonic()
        del batches
        assert time.monotonic() - started < 10
    wait_for_threads(before)


@pytest.mark.thorough
def test_it_can_be_imported_from_any_path_and_beside_tensorflow(tmp_path: Path):
    folder = tmp_path / "a b" / "ü"
    shutil.copytree(Path(inspect.getfile(serve)).parent, folder / "feed")
    program = f"import sys, tensorflow; sys.path.insert(0, {str(folder)!r}); import feed.client"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


ENDS = {
    "sys.exit(5)": (5, []),
    "1 / 0": (1, ["ZeroDivisionError: division by zero"]),
    "wait()": (-signal.SIGINT, ["KeyboardInterrupt"]),
}


@pytest.mark.parametrize("end", ENDS)
def test_program_that_leaves_in_the_middle_of_an_epoch_ends(hosts, end):
    """With Ctrl-C, too. Also when Python stops gRPC's threads, as all daemons, within a lock."""
    code = f"""if True:
        import atexit, gc, sys, threading, time
        sys.path[:0] = {sys.path!r}
        from grpc._channel import _RPCState
        from data_hosts import *

        is_end = threading.Event()

        def hold_locks():
            is_end.wait()
            for state in gc.get_objects():
                if isinstance(state, _RPCState) and state.code is None:  # it goes on
                    state.condition.acquire()

        thread = threading.Thread(target=hold_locks, daemon=True)
        thread.start()  # now: Python 3.12 starts none at its end

        @atexit.register  # the last one to run
        def stop_threads():
            is_end.set()
            thread.join()

        def wait():
            print("waiting", flush=True)
            for _ in range(600):  # a signal just before a sleep, or to another thread, ends none
                time.sleep(0.1)

        dataset = RemoteDataset({[host.address for host in hosts]!r}, TOKEN)
        loader = DataLoader(RemoteBatches(dataset, BatchKeys([[0]] * 1000)), batch_size=None)
        batches = iter(loader)
        next(batches)
        {end}"""
    command = [sys.executable, "-W", "ignore", "-c", code]
    program = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Where the tests run in the background, Ctrl-C would be ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    if end == "wait()":
        assert program.stdout.readline() == "waiting\n"
        program.send_signal(signal.SIGINT)
    _, errors = program.communicate(timeout=60)
    code, said = ENDS[end]
    assert program.returncode == code
    assert errors.splitlines()[-1:] == said  # and nothing about threads after it
