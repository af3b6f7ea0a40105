"""Stands in for a Dataset: to code that looks at it, a RemoteDataset has what the Dataset has."""

import copy
from typing import Any

from torch.utils.data import Dataset

from feed.source import Source


class Wrapper(Dataset):
    """Stands in for a Dataset: all attributes except its own are those of the Dataset."""

    _source: Source

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_source":
            raise AttributeError(name)
        return getattr(self._source.dataset_for(name), name)

    @property
    def __dict__(self) -> dict:
        """The Dataset's, for code that looks there, such as MONAI's set_rnd."""
        return self._source.dataset_for("__dict__").__dict__

    def __getstate__(self) -> Source:
        return self._source

    def __setstate__(self, source: Source) -> None:
        object.__setattr__(self, "_source", source)

    def __copy__(self) -> "Wrapper":
        return like(self, copy.copy(self._source.given))

    def __deepcopy__(self, memo: dict) -> "Wrapper":
        return like(self, copy.deepcopy(self._source.given, memo))

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._source.dataset_for(name), name, value)
        self._source.note_change()

    def __delattr__(self, name: str) -> None:
        delattr(self._source.dataset_for(name), name)
        self._source.note_change()


def like(wrapper: Wrapper, dataset: Any) -> Wrapper:
    """Return a wrapper of the same kind for another Dataset."""
    source, new = wrapper._source, object.__new__(type(wrapper))
    copied = Source(dataset, source.is_dataset, source.collate_fn, source.timeout)
    copied.first_batch, copied.ranks = source.first_batch, source.ranks
    new.__setstate__(copied)
    return new
