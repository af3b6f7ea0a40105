"""A torch Dataset on data hosts, by one line of a training script: copy this folder.

    dataset = RemoteDataset(MyDataset(...))

remote.py   the line: RemoteDataset; source.py: where its samples come from
epochs.py   which batch it is asked for: what torch's DataLoader knows of it
streams.py  the same line for an IterableDataset; iterate.py: its iterator, on a data host
fetch.py    which data host is asked for what; host.py: one of them
samples.py  how samples are prepared, with which random numbers
travel.py   how the Dataset travels to the data hosts
wire.py     how samples travel back, and what is said beside them
server.py   a data host: python -m feed.server HOST:PORT; front.py: what it answers
worker.py   its processes that have Datasets
"""

from typing import Any

__version__ = "2026-11-25"  # CHANGES.md says what to change beside a new copy
__all__ = ["RemoteDataset", "as_is"]


def __getattr__(name: str) -> Any:
    """Import remote.py, and with it torch, for its names alone.

    server.py has something to do before torch is imported.
    """
    if name not in __all__:
        raise AttributeError(f"module 'feed' has no attribute {name!r}")
    from feed import remote

    return getattr(remote, name)
