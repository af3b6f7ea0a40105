"""measured.py finds in one run what otherwise takes two jobs; here, time is simulated."""

import itertools
import random
import sys
from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch

from helpers.simulated import SimulatedLoader, numbers, train
from shared import measured as module
from shared.measured import measured

pytestmark = pytest.mark.usefixtures("alone")


@pytest.mark.parametrize("workers, prefetch", [(0, 2), (1, 2), (4, 2), (4, 8), (7, 2)])
@pytest.mark.parametrize("share", [0.3, 0.8, 1.0, 1.2, 4.0])
def test_finds_both_step_times(clock, capsys, workers, prefetch, share):
    """`share` is the loader's time for a batch divided by the 100 ms of a step without data.

    To time batches that the loader prepared before, the obvious way, would be wrong.
    """
    seconds = 0.1 * share * max(1, workers)
    loader = SimulatedLoader(clock, workers, seconds, prefetch_factor=prefetch)
    for _ in range(2):
        train(clock, measured(loader), 0.1)
    module._loops[id(loader)].report()
    found = numbers(capsys.readouterr().out)
    expected = 100 * (1 + share) if not workers else 100 * max(1, share)
    assert found["step_ms"] == pytest.approx(expected, rel=0.02)
    assert found["without_data_ms"] == pytest.approx(100)


@pytest.mark.parametrize("seconds", [0.06, 0.002])
@pytest.mark.parametrize("every", [5, 7, 10, 12, 16, 20, 24, 25, 36, 48, 50, 72, 100])
def test_a_script_may_pause_at_a_rhythm(clock, capsys, every, seconds):
    """Two workers prepare a batch in `seconds`, and after `every` steps of 10 ms it evaluates."""

    def train_with_pauses(batches) -> float:
        """Return the seconds of a step, without the pauses."""
        start, paused, step = clock.now, 0.0, 0
        for step, _ in enumerate(batches, 1):  # noqa: B007
            clock.now += 0.01
            if step % every == 0:
                clock.now, paused = clock.now + 0.5, paused + 0.5
        return (clock.now - start - paused) / step

    expected = 1 - 0.01 / train_with_pauses(SimulatedLoader(clock, 2, seconds, length=4000))
    loop = measured(SimulatedLoader(clock, 2, seconds), 200)
    train_with_pauses(loop)
    found = numbers(capsys.readouterr().out)
    assert found["without_data_ms"] == pytest.approx(10)
    assert 1 - 10 / found["step_ms"] == pytest.approx(expected, abs=0.1)


@pytest.mark.parametrize("workers, share", [(1, 0.2), (5, 0.2), (2, 3.0), (10, 3.0)])
@pytest.mark.parametrize("waits_every, pauses_every", [(0, 0), (2, 0), (10, 0), (10, 24), (0, 16)])
def test_a_script_may_run_ahead_of_a_gpu(
    clock, capsys, monkeypatch, workers, share, waits_every, pauses_every
):
    """A step that waits for the GPU, to log a loss, is no pause: it pays for the steps before."""
    gpu = SimpleNamespace(free_at=0.0)

    def finish(_=None) -> tuple[float, int, int]:
        clock.now = max(clock.now, gpu.free_at)
        return clock.now, 0, 0

    monkeypatch.setattr(module, "_sample", finish)
    loader = SimulatedLoader(clock, workers, 0.1 * share * workers, length=1000)
    for step, _ in enumerate(measured(loader, 400), 1):
        clock.now += 0.001
        gpu.free_at = max(gpu.free_at, clock.now) + 0.1
        if waits_every and step % waits_every == 0:
            finish()
        if pauses_every and step % pauses_every == 0:
            finish()
            clock.now += 0.5
    found = numbers(capsys.readouterr().out)
    assert found["without_data_ms"] == pytest.approx(100, rel=0.05)
    assert found["step_ms"] == pytest.approx(100 * max(1, share), rel=0.15)


def test_a_pause_does_not_count_for_the_cpus_either(clock, capsys, monkeypatch):
    """They are idle in it, but not in the steps."""
    busy = SimpleNamespace(ticks=0.0)
    monkeypatch.setattr(module, "_sample", lambda _: (clock.now, busy.ticks, clock.now))
    for step, _ in enumerate(measured(SimulatedLoader(clock, 0, seconds=0.3), 300), 1):
        clock.now += 0.1
        busy.ticks = clock.now - 5 * (step // 24)
        clock.now += 5 * (step % 24 == 0)
    assert "CPUs busy     100 %, without data 100 %" in capsys.readouterr().out


def test_its_random_numbers_are_its_own(clock):
    random.seed(1)
    expected = random.random()
    random.seed(1)
    train(clock, measured(SimulatedLoader(clock, 2, 0.1)), 0.1)
    assert random.random() == expected


class SimulatedDataset:
    """Prefetches as tf.data does with AUTOTUNE: doubles its buffer once it was full, then empty."""

    cardinality = None  # a tf.data.Dataset has it

    def __init__(self, clock, seconds, length=None, holds=1):
        self.clock, self.seconds, self.length, self.holds = clock, seconds, length, holds

    def __len__(self):
        if self.length is None:
            raise TypeError
        return self.length

    def repeat(self):
        return SimulatedDataset(self.clock, self.seconds)

    def __iter__(self):
        ready, was_full = [self.clock.now + self.seconds], False  # when each batch is
        for number in range(self.length or sys.maxsize):
            if ready[0] > self.clock.now:
                self.holds *= 1 + was_full
                was_full = False
            elif len(ready) == self.holds and ready[-1] <= self.clock.now:
                was_full = True
            self.clock.now = max(self.clock.now, ready[0])
            last = max(ready[-1], self.clock.now)
            del ready[0]
            while len(ready) < self.holds:
                last += self.seconds
                ready.append(last)
            yield {"number": number}


@pytest.mark.parametrize("holds", [1, 30])
@pytest.mark.parametrize("share", [0.3, 0.8, 1.0, 1.2, 4.0])
def test_finds_both_step_times_whatever_a_dataset_holds(clock, capsys, share, holds):
    dataset = SimulatedDataset(clock, 0.1 * share, holds=holds)
    loop = measured(dataset)
    for _ in loop:  # it reports by itself, before the buffer holds more than the pauses fill
        clock.now += 0.1
        if loop.reported:
            break
    found = numbers(capsys.readouterr().out)
    assert len(loop.real) == len(loop.repeated) == module.MOST_CYCLES
    assert found["step_ms"] == pytest.approx(100 * max(1, share), rel=0.02)
    assert found["without_data_ms"] == pytest.approx(100)


def test_no_number_says_what_a_dataset_holds(clock, capsys):
    """If told a number, it times batches that got ready before."""
    dataset = SimulatedDataset(clock, 0.13, holds=60)
    for _ in itertools.islice(measured(dataset, 200, buffer=2), 300):
        clock.now += 0.1
    assert numbers(capsys.readouterr().out)["step_ms"] < 115


def test_an_epoch_of_a_dataset_keeps_its_length(clock):
    """Otherwise ranks, which drop different numbers of batches, would end it at different steps."""
    dataset = SimulatedDataset(clock, 0.01, length=60)
    assert [len(train(clock, measured(dataset), 0.1)) for _ in range(3)] == [60] * 3
    assert len(module._loops[id(dataset)].real) > 1


def kinds(clock, loader, seconds: float, epochs: int = 1, **settings) -> list[bool]:
    """Return for each step of a run whether its batch is the previous one, repeated."""
    seen = [train(clock, measured(loader, **settings), seconds) for _ in range(epochs)]
    assert all(len(epoch) <= len(loader) for epoch in seen)
    return [a == b for epoch in seen for a, b in itertools.pairwise([-1, *epoch])]


def test_all_ranks_change_at_the_same_steps(clock):
    slow = kinds(clock, SimulatedLoader(clock, 4, seconds=1.6), 0.1)
    fast = kinds(clock, SimulatedLoader(clock, 4, seconds=0.1), 0.7)
    assert slow == fast and {*slow} == {True, False}


@pytest.mark.parametrize("accumulation", [1, 3, 16])
def test_stretches_are_whole_updates_and_five_rounds_of_the_workers(clock, accumulation):
    for workers in (0, 1, 4, 7):
        loop = measured(SimulatedLoader(clock, workers, 0.1), accumulation=accumulation)
        assert loop.stretch >= 5 * workers and loop.stretch % accumulation == 0


def test_goes_on_from_epoch_to_epoch_with_no_more_steps_than_batches(clock, capsys):
    """Even if an epoch has room for only one stretch, both kinds get their turn."""
    loader = SimulatedLoader(clock, 4, seconds=1.6, length=49)
    repeats = kinds(clock, loader, 0.1, epochs=5)
    assert repeats[:24] == [False] * 24 and sum(repeats) > 24
    assert len(module._loops[id(loader)].real) == 3 and len(module._loops) == 1


def test_its_buffer_is_full_when_repeated_steps_are_timed(clock, monkeypatch):
    """Otherwise the loader would take CPU time from the training."""
    loader, left = SimulatedLoader(clock, 4, seconds=1.6), []
    sample = module._sample

    def look(timed):
        loop = module._loops[id(loader)]
        if len(loop.real) > len(loop.repeated):
            left.append(loader.ready[-1] - clock.now)
        return sample(timed)

    monkeypatch.setattr(module, "_sample", look)
    train(clock, measured(loader), 0.1)
    assert len(left) > 6 and max(left) <= 0


class Pair(namedtuple("Pair", "images labels")):
    def __new__(cls, both):
        return super().__new__(cls, *both)


def test_each_repeated_batch_is_a_fresh_container():
    """Scripts may change it."""

    def batch():
        return {"x": [1, {"y": 2}], "pair": Pair([{"z": 3}, 4]), "plain": ({5: 6}, 7)}

    seen = 0
    for got in measured([batch() for _ in range(100)], buffer=0):
        assert got == batch() and type(got["pair"]) is Pair
        got["x"][1].clear(), got["pair"].images.clear(), got["plain"][0].clear(), got.pop("x")
        seen += 1
    assert seen == 100


def test_accelerators_are_waited_for_at_the_ends_of_stretches_only(monkeypatch):
    done, waits = [], []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(len(done)))
    for _ in measured(range(200), buffer=0):
        done.append(1)
    begins, ends = waits[::2], waits[1::2]  # the program ends within the last stretch
    assert {end - begin for begin, end in zip(begins, ends, strict=False)} == {10}
    between = [begin - end for end, begin in zip([0, *ends], begins, strict=False)]
    assert min(between) >= 2 and max(between) < 12 and len({*between}) > 4  # without a rhythm


@pytest.mark.parametrize(
    "loader, settings, sentence",
    [
        ([1, 2, 3], {}, "Cannot tell how many batches this list can hold"),
        # This is no DataLoader: it has no prefetch_factor.
        (SimpleNamespace(num_workers=8), {}, "how many batches this SimpleNamespace can hold"),
        ([1, 2, 3], {"buffer": -1}, "buffer must be 0 or more"),
    ],
)
def test_says_what_is_missing(loader, settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        measured(loader, **settings)


def test_too_few_steps_and_too_short_epochs_are_said_to_be_so(clock, capsys):
    loop = measured(range(30), buffer=4)
    assert len(list(loop)) == 30
    capsys.readouterr()
    loop.report()
    loop.report()  # the program ends
    said = "measured: 30 steps are too few: it needs 3 x 44, in epochs of at least 24 batches\n"
    assert capsys.readouterr().out == said
    loop = measured(SimulatedDataset(clock, 0.1))
    next(iter(loop))
    loop.report()
    assert "measured: 1 steps are too few: it needs 3 x 176, in" in capsys.readouterr().out
    loop = measured(SimulatedLoader(clock, 8, seconds=0.1, length=13))
    assert [len(list(loop)) for _ in range(3)] == [13] * 3
    assert capsys.readouterr().out.count("epochs of 13 batches are too short: 66 are needed") == 1
