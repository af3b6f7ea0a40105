"""The line of a training script: a Dataset whose samples are prepared on data hosts.

    dataset = RemoteDataset(MyDataset(...))
    loader = DataLoader(dataset, batch_size=64, sampler=sampler, num_workers=4, pin_memory=True)

The DataLoader stays torch's: each of its worker processes asks the data hosts for the samples of
its batch, and waits for them. Without data hosts the same samples are prepared here.
"""

from collections.abc import Callable
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from feed.epochs import asked_for
from feed.samples import check_is_map_style
from feed.source import Source, Wrapper, as_is
from feed.streams import stream_of

__all__ = ["RemoteDataset", "as_is"]


class RemoteDataset(Wrapper):
    """A Dataset, prepared by the data hosts that HETERO_DATA_HOSTS names.

    An IterableDataset becomes a RemoteStream: see streams.py. The rest is of map-style ones.

    dataset: travels there as it is when a DataLoader worker starts (without workers: when an epoch
    does). Or a callable that returns it, which is called there only, in each worker process.
    collate_fn: joins batches there; the DataLoader's is then `as_is`. timeout: seconds without a
    word from any data host after which getting samples raises ConnectionError.

    Any other attribute that is read or set is the Dataset's. What it raises there is raised here,
    as by torch's own workers. Raises TypeError for what is no Dataset, and later for one that
    cannot be pickled; PermissionError when a data host has another HETERO_TOKEN.
    """

    def __new__(cls, dataset: Any = None, *args: Any, **options: Any) -> Any:
        if isinstance(dataset, Wrapper):
            raise TypeError("a RemoteDataset is given to RemoteDataset: give it the Dataset itself")
        if isinstance(dataset, IterableDataset):  # which torch, too, tells by its class
            return stream_of(dataset, *args, **options)
        return super().__new__(cls)

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

    def __len__(self) -> int:
        return self._source.length()

    def __getitem__(self, index: Any) -> Any:
        return self._source.get([index], asked_for(), is_batch=False)[0]

    def __getitems__(self, indices: list) -> Any:
        return self._source.get(list(indices), asked_for(), is_batch=True)
