"""A data host that notes how many samples it has prepared, for libraries.py.

python host.py HOST:PORT --workers N writes numbers, one a line, into the file prepared-HOST:PORT.
"""

import os
import sys
from collections.abc import Callable
from typing import Any

import feed.server  # isort: skip  (first, since it sets environment variables)
import feed.iterate
import feed.worker


def noting(function: Callable, count: Callable) -> Callable:
    """Return the function, which now also notes what `count` makes of arguments and result."""

    def noted(*arguments: Any) -> Any:
        result = function(*arguments)
        os.write(notes, b"%d\n" % count(arguments, result))
        return result

    return noted


# The processes that prepare samples are forked from this one. They append to the same file.
notes = os.open(f"prepared-{sys.argv[1]}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
feed.worker.prepare = noting(feed.worker.prepare, lambda given, _: len(given[2].indices))
feed.iterate.gather = noting(feed.iterate.gather, lambda _, gathered: len(gathered[0]))
feed.server.main()
