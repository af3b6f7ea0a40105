"""Finds out which batch a DataLoader asks for, which torch does not tell the Dataset.

The variables of torch that are read here have these names in torch 2.6 to 2.13. samples.py and
iterate.py use other private parts of torch.
"""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils.data import get_worker_info
from torch.utils.data._utils.fetch import _BaseDatasetFetcher


class Asked(NamedTuple):
    """What is known about the DataLoader that asks for samples."""

    seed: int  # torch draws it for each epoch; persistent workers keep their first epoch's
    batch: int  # its number in the epoch; has no meaning when a stream starts
    fetcher: Any  # torch's, a new one for each epoch, even in persistent workers; None: not yet
    worker_init_fn: Callable | None
    num_workers: int


def asked_for() -> Asked | None:
    """Return what the calling DataLoader knows, or None outside of one, as for `dataset[0]`.

    Raises RuntimeError if there is a DataLoader, but its variables are not found.
    """
    frame, info, fetcher = sys._getframe(1), get_worker_info(), None
    while frame:
        here = frame.f_locals
        caller = here.get("self")
        if isinstance(caller, _BaseDatasetFetcher):
            fetcher = caller
        elif {"base_seed", "init_fn", "num_workers", "worker_id"} <= here.keys():  # in a worker
            batch = here.get("idx", -1)
            return Asked(here["base_seed"], batch, fetcher, here["init_fn"], here["num_workers"])
        elif fetcher and hasattr(caller, "_base_seed"):  # a DataLoader without workers
            return Asked(caller._base_seed, caller._num_yielded, fetcher, None, 0)
        frame = frame.f_back
    if fetcher or info:
        raise RuntimeError(
            f"feed cannot find the number of a DataLoader's batch in torch {torch.__version__}, "
            "which random numbers depend on: use torch 2.6 to 2.13, and get samples only through "
            "the DataLoader"
        )
    return None
