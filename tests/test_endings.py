"""Every way that a job of the PyTorch example can end: see endings.py for the table."""

import time

import pytest

import endings
from endings import ENDINGS
from jobs import Jobs

SLOW = [name for name, ending in ENDINGS.items() if ending.slow]
QUICK = [name for name, ending in ENDINGS.items() if not ending.slow]


@pytest.fixture(scope="module")
def waiting(jobs: Jobs) -> dict[str, endings.Begun]:
    """The slow endings, begun before all other tests, which run while these wait."""
    endings.upload_images()
    return {name: endings.begin(jobs, name) for name in SLOW}


def assert_nothing_left(begun: endings.Begun) -> None:
    deadline = time.monotonic() + 5
    while left := endings.left_behind(begun):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


@pytest.mark.parametrize("name", QUICK)
def test_ending(jobs: Jobs, waiting: dict, name: str):
    begun = endings.begin(jobs, name)
    assert endings.finish(begun) < ENDINGS[name].seconds
    assert_nothing_left(begun)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SLOW)
def test_slow_ending(waiting: dict, name: str):
    assert endings.finish(waiting[name]) < ENDINGS[name].seconds
    assert_nothing_left(waiting[name])
