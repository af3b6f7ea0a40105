"""The line of a training script: a Dataset whose samples are prepared on data hosts.

    dataset = RemoteDataset(MyDataset(...))
    loader = DataLoader(dataset, batch_size=64, sampler=sampler, num_workers=4, pin_memory=True)

The DataLoader stays torch's: each of its worker processes asks the data hosts for the samples of
its batch, and waits for them. Without data hosts the same samples are prepared here.
"""

from collections.abc import Callable
from typing import Any

from torch.utils.data import Dataset, get_worker_info

from feed.epochs import asked_for
from feed.samples import check_is_map_style
from feed.source import Source, as_is

__all__ = ["RemoteDataset", "as_is"]


class RemoteDataset(Dataset):
    """A map-style Dataset, prepared by the data hosts that HETERO_DATA_HOSTS names.

    dataset: travels there as it is when a DataLoader worker starts (without workers: when an epoch
    does). Or a callable that returns it, which is called there only, in each worker process.
    collate_fn: joins batches there; the DataLoader's is then `as_is`. timeout: seconds without a
    word from any data host after which getting samples raises ConnectionError.

    Any other attribute that is read or set is the Dataset's. What it raises there is raised here,
    as by torch's own workers. Raises TypeError for a Dataset that is not map-style, and later for
    one that cannot be pickled; PermissionError when a data host has another HETERO_TOKEN.
    """

    def __init__(
        self,
        dataset: Dataset | Callable[[], Dataset],
        collate_fn: Callable[[list], Any] | None = None,
        timeout: float = 60.0,
    ):
        is_class = isinstance(dataset, type)
        is_made = not is_class and (hasattr(dataset, "__getitem__") or not callable(dataset))
        if is_made:
            check_is_map_style(dataset)
        object.__setattr__(self, "_source", Source(dataset, is_made, collate_fn, timeout))

    def start_at_batch(self, number: int) -> None:
        """Number the batches of the next epochs from `number` on, to resume in mid-epoch.

        The random numbers of a batch depend on its number. Set it back to 0 for the next epoch.
        """
        self._source.first_batch = number

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_source":
            raise AttributeError(name)
        return getattr(self._source.to_reach(name), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._source.to_reach(name), name, value)
        self._source.is_changed = not get_worker_info()

    def __len__(self) -> int:
        return self._source.length()

    def __getitem__(self, index: Any) -> Any:
        return self._source.get([index], asked_for(), is_batch=False)[0]

    def __getitems__(self, indices: list) -> Any:
        return self._source.get(list(indices), asked_for(), is_batch=True)

    def __getstate__(self) -> dict:
        return {"_source": self._source}

    def __setstate__(self, state: dict) -> None:
        object.__setattr__(self, "_source", state["_source"])
