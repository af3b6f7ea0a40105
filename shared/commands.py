"""Code that the commands of this folder, `python -m shared.NAME`, share."""

import contextlib
import json
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any

NUMBERS = '{"measured": '  # how measured.py's line of numbers begins


@contextlib.contextmanager
def reader_may_leave() -> Iterator[None]:
    """Leave the block quietly if the reader of its output, such as head, closes the pipe."""
    try:
        yield
        sys.stdout.flush()  # otherwise buffered output would fail when the process exits
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # discard the rest


def measured_numbers(lines: Iterable[str]) -> dict[str, Any]:
    """Find the line of numbers that measured.py printed to a log, the last if there are several.

    Returns:
        The numbers by name; empty if there is no such line.

    Raises:
        ValueError: the line is incomplete.
    """
    found = [start + rest for _, start, rest in (line.partition(NUMBERS) for line in lines)]
    text = next((text for text in reversed(found) if text), "")
    text = text.replace('"accelerator_ms"', '"without_data_ms"')  # its name in older copies
    try:  # raw_decode ignores what follows on the line, such as a color code
        return json.JSONDecoder().raw_decode(text)[0]["measured"] if text else {}
    except ValueError:
        raise ValueError(f"The line of numbers is incomplete: {text.strip()[:60]}...") from None
