"""The line of numbers that measured.py prints to a log, after its answer."""

import json
from collections.abc import Iterable
from typing import Any

BEGINNING = '{"measured": '


def measured_numbers(lines: Iterable[str]) -> dict[str, Any]:
    """Find the line of numbers that measured.py printed to a log, the last if there are several.

    Returns:
        The numbers by name; empty if there is no such line.

    Raises:
        ValueError: the line is incomplete.
    """
    found = [start + rest for _, start, rest in (line.partition(BEGINNING) for line in lines)]
    text = next((text for text in reversed(found) if text), "")
    text = text.replace('"accelerator_ms"', '"without_data_ms"')  # its name in older copies
    try:  # raw_decode ignores what follows on the line, such as a color code
        return json.JSONDecoder().raw_decode(text)[0]["measured"] if text else {}
    except ValueError:
        raise ValueError(f"The line of numbers is incomplete: {text.strip()[:60]}...") from None
