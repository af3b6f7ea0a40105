"""Waiting for something that comes about by itself, but not for ever."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(condition: Callable[[], T], seconds: float = 30) -> T:
    """Return what `condition` returns, once that is true; AssertionError if it never is."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, f"this was not so after {seconds} s"
        time.sleep(0.02)
    return result


def wait_until_gone(left: Callable[[], list], seconds: float = 5) -> None:
    """Ask again and again until `left` returns nothing; AssertionError with what is left."""
    deadline = time.monotonic() + seconds
    while found := left():
        assert time.monotonic() < deadline, f"left behind: {found}"
        time.sleep(0.05)
