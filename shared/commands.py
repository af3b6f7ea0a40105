"""Code that the commands of this folder, `python -m shared.NAME`, share."""

import contextlib
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def reader_may_leave() -> Iterator[None]:
    """Leave the block quietly if the reader of its output, such as head, closes the pipe."""
    try:
        yield
        sys.stdout.flush()  # otherwise buffered output would fail when the process exits
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # discard the rest
