"""measured.py: one run says what takes two jobs, on scripts that were not written for it."""

import http.server
import itertools
import json
import os
import sys
import threading
import time
from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch

from jobs import ROOT
from shared import measured as module
from shared.measured import MIN_CYCLES, measured
from test_advisor import refusal, run

P4D = {"instance_type": "ml.p4d.24xlarge"}


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No instance of EC2 answers, and no test measures what another has begun."""
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(module, "_loops", {})
    monkeypatch.setattr(module.atexit, "register", lambda report: None)


def numbers(printed: str) -> dict:
    """What the line of JSON says, which is the last one."""
    return json.loads(printed.splitlines()[-1])["measured"]


# --- In a world of its own, where only what is asked for takes time: to the millisecond. ---


@pytest.fixture
def clock(monkeypatch):
    """The time that measured.py sees: `now` in seconds."""
    world = SimpleNamespace(now=0.0)
    world.perf_counter = lambda: world.now
    world.sleep = lambda seconds: setattr(world, "now", world.now + seconds)
    monkeypatch.setattr(module, "time", world)
    return world


class SimulatedLoader:
    """Takes its time as a DataLoader does: each worker makes every num_workers-th batch in turn."""

    def __init__(self, clock, num_workers, seconds, length=400, prefetch_factor=2):
        self.clock, self.num_workers, self.seconds = clock, num_workers, seconds
        self.length, self.prefetch_factor = length, prefetch_factor

    def __len__(self):
        return self.length

    def __iter__(self):
        self.ready = []  # when each batch that has been asked for is
        for number in range(self.length):
            if self.num_workers:
                self.ask(number)
                self.clock.now = max(self.clock.now, self.ready[number])
                self.ask(number + 1)
            else:
                self.clock.now += self.seconds
            yield {"number": number}

    def ask(self, number):
        """Have the workers prepare as many batches from `number` on as they may."""
        for n in range(len(self.ready), number + self.prefetch_factor * self.num_workers):
            free = self.ready[n - self.num_workers] if n >= self.num_workers else 0.0
            self.ready.append(max(free, self.clock.now) + self.seconds)


def train(clock, loader, seconds: float) -> list:
    """One epoch: the batches that there were."""
    seen = []
    for batch in loader:
        seen.append(batch.pop("number"))  # as scripts do
        clock.now += seconds
    return seen


@pytest.mark.parametrize("workers", [0, 1, 4, 7])
@pytest.mark.parametrize("share", [0.3, 0.8, 1.0, 1.2, 4.0])
def test_finds_both_step_times(clock, capsys, workers, share):
    """share: time in which the loader has a batch ready / time of a step without data."""
    loader = SimulatedLoader(clock, workers, seconds=0.1 * share * max(1, workers))
    found = simulate(clock, capsys, loader)
    expected = 100 * (1 + share) if not workers else 100 * max(1, share)
    assert found["step_ms"] == pytest.approx(expected, rel=0.02)
    assert found["accelerator_ms"] == pytest.approx(100)


def simulate(clock, capsys, loader) -> dict:
    """What a run with that loader finds, where a step without data takes 100 ms."""
    for _ in range(2):
        train(clock, measured(loader), 0.1)
    module._loops[id(loader)].report()
    return numbers(capsys.readouterr().out)


def test_batches_that_got_ready_meanwhile_would_hide_the_wait(clock, capsys, monkeypatch):
    """The obvious procedure is wrong: it sees a loader that waited for the training."""
    loaders = [SimulatedLoader(clock, 4, seconds=1.6, prefetch_factor=8) for _ in range(2)]
    found = simulate(clock, capsys, loaders[0])
    assert found["step_ms"] == pytest.approx(400)
    monkeypatch.setattr(module, "deque", lambda batches, maxlen: None)  # it drops nothing
    wrong = simulate(clock, capsys, loaders[1])
    assert wrong["step_ms"] < 0.5 * found["step_ms"]


def kinds(clock, loader, seconds: float, epochs: int = 1, **settings) -> list[bool]:
    """Of each step of a run: is its batch the one before, repeated?"""
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
    """Epochs with room for one stretch: each kind gets its turn."""
    loader = SimulatedLoader(clock, 4, seconds=1.6, length=49)
    repeats = kinds(clock, loader, 0.1, epochs=3)
    assert repeats[:24] == [False] * 24 and sum(repeats) > 24
    assert len(module._loops[id(loader)].real) == 3 and len(module._loops) == 1


def test_its_buffer_is_full_when_repeated_steps_are_timed(clock, monkeypatch):
    """Else the loader would take the training's CPU time."""
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
