"""Prepares the samples of a torch Dataset on data hosts. Copy this folder next to your script.

    dataset = RemoteDataset(MyDataset(...))

remote.py     RemoteDataset; wrapper.py: its attributes; source.py: where its samples come from
dataloader.py finds out which batch a DataLoader wants
streams.py    RemoteDataset for an IterableDataset; iterate.py: its iterator, on a data host
fetch.py      divides a batch among the data hosts; client.py: the calls to one of them
samples.py    prepares samples, and seeds their random numbers
pickling.py   pickles the Dataset for the data hosts; inherit.py: what else they need
dataset_file.py  the file with both; modules.py: which modules are the script's own
compare.py    compares a sample with one that is prepared here
log.py        the logger of its messages
wire.py       the messages: how they are signed, and how samples are encoded
server.py     the server of a data host: python -m feed.server HOST:PORT; front.py: answers calls
worker.py     the server's processes that hold Datasets
"""

from typing import Any

__version__ = "2026-11-28"  # CHANGES.md says what else to change when you update your copy
__all__ = ["RemoteDataset", "as_is"]


def __getattr__(name: str) -> Any:
    """Import remote.py, and with it torch, only when one of its names is used.

    server.py must set environment variables before torch is imported.
    """
    if name not in __all__:
        raise AttributeError(f"module 'feed' has no attribute {name!r}")
    from feed import remote

    return getattr(remote, name)
