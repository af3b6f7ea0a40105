"""Finds out which batch a DataLoader wants, which torch does not tell the Dataset.

samples.py and iterate.py use other private parts of torch.
"""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from torch.utils.data import get_worker_info
from torch.utils.data._utils.fetch import _BaseDatasetFetcher

from feed.samples import USE_TESTED_TORCH

OF_WORKERS = "base_seed", "init_fn", "num_workers", "worker_id"  # variables of torch's worker loop


class LoaderState(NamedTuple):
    """What is known about the DataLoader that wants samples."""

    seed: int  # torch draws it for each epoch; persistent workers keep their first epoch's
    batch: int  # its number in the epoch; -1 before the first, as in worker_init_fn
    torch_fetcher: Any  # a new one for each epoch, even in persistent workers; None: not yet
    worker_init_fn: Callable | None
    num_workers: int


def calling_loader() -> LoaderState | None:
    """Return what the calling DataLoader knows, or None outside of one, as for `dataset[0]`.

    Raises RuntimeError if there is a DataLoader, but its variables are not found.
    """
    frame, info, fetcher, is_fetching = sys._getframe(1), get_worker_info(), None, False
    while frame:
        here = frame.f_locals
        owner = here.get("self")
        if isinstance(owner, _BaseDatasetFetcher):
            fetcher = owner
            is_fetching |= frame.f_code.co_name != "__init__"  # which calls the Dataset's __iter__
        elif all(name in here for name in OF_WORKERS):
            batch = here.get("idx") if is_fetching else -1
            if batch is None:
                break
            num_workers = here["num_workers"]
            return LoaderState(here["base_seed"], batch, fetcher, here["init_fn"], num_workers)
        # A DataLoader without workers. A forked worker has the frames of its parent, too.
        elif fetcher and not info and hasattr(owner, "_base_seed"):
            if not hasattr(owner, "_num_yielded"):
                break
            return LoaderState(owner._base_seed, owner._num_yielded, fetcher, None, 0)
        frame = frame.f_back
    if fetcher or info:
        raise RuntimeError(
            "feed cannot find the number of a DataLoader's batch, which random numbers depend on: "
            f"get samples only through the DataLoader, and {USE_TESTED_TORCH}"
        )
    return None
