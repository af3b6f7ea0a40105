"""Which batch is asked for: what torch's DataLoader knows, and does not tell a Dataset.

What reads torch's own variables is here; their names are those of torch 2.6 to 2.13. samples.py
uses its WorkerInfo and ExceptionWrapper.
"""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils.data import get_worker_info
from torch.utils.data._utils.fetch import _BaseDatasetFetcher


class Asked(NamedTuple):
    """What the DataLoader that is asking knows."""

    seed: int  # torch draws it for each epoch; persistent workers keep their first epoch's
    batch: int  # its number in the epoch; of a stream's first ones it says nothing
    fetcher: Any  # a new object for each epoch, also in persistent workers; None: not there yet
    worker_init_fn: Callable | None
    num_workers: int


def asked_for() -> Asked | None:
    """Return what the DataLoader that is asking knows, or None for `dataset[0]` outside of one.

    Raises RuntimeError in a DataLoader's worker whose code is not as expected.
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
            f"torch {torch.__version__} keeps the number of a DataLoader's batch elsewhere: adapt "
            "feed/epochs.py to it, since random numbers depend on that number"
        )
    return None
