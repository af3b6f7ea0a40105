"""RemoteDataset: a Dataset whose samples are prepared on data hosts.

    dataset = RemoteDataset(MyDataset(...))
    loader = DataLoader(dataset, batch_size=64, sampler=sampler, num_workers=4, pin_memory=True)

The DataLoader is torch's own. Each of its worker processes asks the data hosts for the samples of
its batch, and waits for them. Without data hosts, the worker prepares the same samples itself.
"""

from collections.abc import Callable
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from feed.dataloader import calling_loader
from feed.samples import check_is_map_style
from feed.source import Source, as_is
from feed.streams import stream_of
from feed.wrapper import Wrapper

__all__ = ["RemoteDataset", "as_is"]


class RemoteDataset(Wrapper):
    """A Dataset whose samples are prepared by the data hosts that HETERO_DATA_HOSTS names.

    An IterableDataset becomes a RemoteStream: see streams.py. The rest is about map-style Datasets.

    Args:
        dataset: The Dataset, which is sent to the data hosts as it is when a DataLoader worker
            starts (without workers: when an epoch starts). Or a callable that returns it, which is
            called only where samples are prepared, in each worker process.
        collate_fn: Joins batches on the data hosts. The DataLoader's must then be `as_is`.
        timeout: Seconds. If no data host answers for so long, ConnectionError is raised; if they
            answer, but none has made the Dataset in 60 times as long, TimeoutError.

    All other attributes are those of the Dataset, for reading and setting. Its exceptions are
    raised here, as with torch's own workers.

    Raises:
        TypeError: `dataset` is not a Dataset. At the first sample, if it cannot be pickled.
        ValueError: HETERO_DATA_HOSTS is set, but HETERO_TOKEN is not.
        PermissionError: At the first sample, if a data host has another HETERO_TOKEN.
    """

    def __new__(cls, dataset: Any = None, *args: Any, **options: Any) -> Any:
        if isinstance(dataset, Wrapper):
            # Such as by torchvision's wrap_dataset_for_transforms_v2.
            raise TypeError(
                "RemoteDataset got a RemoteDataset: use it once, after everything that makes "
                "another Dataset of the first one"
            )
        if isinstance(dataset, IterableDataset):  # torch checks the class, too
            return stream_of(dataset, *args, **options)
        return super().__new__(cls)

    def __init__(
        self,
        dataset: Dataset | Callable[[], Dataset],
        collate_fn: Callable[[list], Any] | None = None,
        timeout: float = 60.0,
    ):
        parts = dataset.values() if isinstance(dataset, dict) else ()
        if any(isinstance(part, Dataset) or hasattr(part, "__getitems__") for part in parts):
            raise TypeError(
                f"RemoteDataset got a {type(dataset).__name__} of Datasets: give it one of them, "
                f"such as dataset[{next(iter(dataset))!r}]"
            )
        is_class = isinstance(dataset, type)
        is_dataset = not is_class and (hasattr(dataset, "__getitem__") or not callable(dataset))
        if is_dataset:
            check_is_map_style(dataset)
        object.__setattr__(self, "_source", Source(dataset, is_dataset, collate_fn, timeout))

    def start_at_batch(self, number: int) -> None:
        """Number the batches of the next epochs from `number`, to resume in mid-epoch.

        A batch's random numbers depend on its number. Set it back to 0 before the epoch after that.
        """
        self._source.first_batch = number

    def __len__(self) -> int:
        return self._source.length()

    def __getitem__(self, index: Any) -> Any:
        loader = calling_loader()
        if not (loader or hasattr(index, "__index__")) and self._source.is_dataset:
            # Such as a column, or a slice, of a Hugging Face Dataset.
            return self._source.dataset_for("__getitem__")[index]
        return self._source.get([index], loader, is_batch=False)[0]

    def __getitems__(self, indices: list) -> Any:
        return self._source.get(list(indices), calling_loader(), is_batch=True)
