"""Notes the batches that a script trains on. libraries.py compares them."""

import hashlib
import json
from collections.abc import Iterable
from typing import Any

from torch.utils._pytree import tree_leaves


def seen(epoch: int, numbers: Iterable, fixed: Iterable = (), random: Iterable = ()) -> None:
    """Note a batch, as a line in the file `batches`.

    Args:
        numbers: Of the samples, in the batch's order.
        fixed: What each sample has that the plain DataLoader gives as well.
        random: What each sample has that depends on random numbers.
    """
    line = {
        "epoch": epoch,
        "numbers": [int(number) for number in numbers],
        "fixed": [*map(digest, fixed)],
        "random": [*map(digest, random)],
    }
    with open("batches", "a") as file:
        print(json.dumps(line), file=file)


def digest(sample: Any) -> str:
    """Return a digest of all bits of a sample's arrays and other values."""
    digest = hashlib.sha256()
    for leaf in tree_leaves(sample):
        if hasattr(leaf, "__array__"):
            leaf = leaf.__array__()
            leaf = leaf.dtype, leaf.shape, leaf.tobytes()
        digest.update(repr(leaf).encode())
    return digest.hexdigest()[:16]
