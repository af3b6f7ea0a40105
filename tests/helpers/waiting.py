"""Wait for a condition, with a time limit."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(condition: Callable[[], T], seconds: float = 30) -> T:
    """Wait until `condition` returns something true, and return it; AssertionError if too late."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, f"the condition is not true after {seconds} s"
        time.sleep(0.02)
    return result


def wait_until_gone(left: Callable[[], list], seconds: float = 30) -> None:
    """Wait until `left` returns an empty list; AssertionError with what is left if too late."""
    deadline = time.monotonic() + seconds
    while found := left():
        assert time.monotonic() < deadline, f"left behind: {found}"
        time.sleep(0.05)
