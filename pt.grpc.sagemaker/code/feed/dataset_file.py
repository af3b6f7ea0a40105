"""The file with which a Dataset goes to a data host, and what is known of it beforehand.

Three things follow one another, so that they need not be in memory as a whole: the script's entries
of sys.path; the Dataset, or a callable that makes it, and its collate_fn; and the variables of the
script's modules, which are known last, but set first. Their size ends the file.
"""

import os
import pickle
import sys
from typing import IO, Any, NamedTuple

from feed.inherit import set_variables, variables
from feed.modules import paths_of_script
from feed.pickling import DatasetPickler, Digest, dump

SIZE = 8  # bytes, in which the size of the variables is written


class Facts(NamedTuple):
    """What is known of the file before it is sent."""

    sha256: bytes
    what: str  # describes the Dataset
    variables: bytes  # see inherit.variables
    is_shared: bool  # whether the Dataset has memory that other processes may change
    has_rngs: bool  # whether it holds random generators


def facts_of(parts: dict[str, Any], reached: set[str], kept: IO[bytes] | None) -> Facts:
    """Pickle the Dataset for its digest, and into the file `kept`, if any; return what is known.

    parts: what `load` returns, with names for messages. reached: modules whose variables are sent,
    besides those of the modules that the parts refer to.
    """
    digest = Digest(kept)
    pickler = write_parts(digest, parts)
    content, is_shared = variables(sorted({*reached, *pickler.modules}))
    write_variables(digest, content)
    what = f"{type(parts['dataset']).__name__}, {digest.size / 1e6:.1f} MB"
    if pickler.globals:
        used = ", ".join(f"{name} in {at}" for name, at in pickler.globals.items())
        what += f", with globals of the script that it uses ({used}),"
    is_shared |= pickler.is_shared
    return Facts(digest.sha256.digest(), what, content, is_shared, bool(pickler.rngs))


def write(file: IO[bytes], parts: dict[str, Any], content: bytes) -> None:
    """Pickle the Dataset into a file. content: the variables."""
    write_parts(file, parts)
    write_variables(file, content)


def write_parts(file: Any, parts: dict[str, Any]) -> DatasetPickler:
    pickle.dump(paths_of_script(), file)
    return dump(file, **parts)


def write_variables(file: Any, content: bytes) -> None:
    file.write(content + len(content).to_bytes(SIZE, "big"))


def load(descriptor: int) -> tuple:
    """Set the variables; return Dataset or callable, whether it is the Dataset, and collate_fn.

    Runs on a data host, where the file is in memory.
    """
    with open(descriptor, "rb") as file:
        file.seek(-SIZE, os.SEEK_END)
        size = int.from_bytes(file.read(), "big")
        file.seek(0)
        sys.path[:0] = map(os.path.abspath, pickle.load(file))  # the others may need them
        dataset_at = file.tell()
        file.seek(-SIZE - size, os.SEEK_END)
        set_variables(file.read(size))
        file.seek(dataset_at)
        return pickle.load(file)
