"""What the commands of this folder, `python -m shared.NAME`, have in common."""

import contextlib
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def reader_may_leave() -> Iterator[None]:
    """End the block quietly when the reader of what it prints, such as head, has seen enough."""
    try:
        yield
        sys.stdout.flush()  # else what is buffered fails at the end of the process
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is left of it
