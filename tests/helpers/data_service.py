"""tf.data.service in the test's own process, and datasets of numbers that tests can count."""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np

# Modules in place of some that TensorFlow imports if it can, and that take 40 % of that time.
LEAN = Path(__file__).parent / "lean"

if TYPE_CHECKING:  # AWS's image of TensorFlow, whose replica runs carried.py, does not have it
    from sagemaker.core.training.configs import InputData


@contextmanager
def dispatcher_of(workers: int) -> Iterator[str]:
    """Start a dispatcher and its workers; yield the dispatcher's HOST:PORT."""
    import tensorflow as tf  # here, because it would slow down test collection by seconds

    service = tf.data.experimental.service
    dispatcher = service.DispatchServer()
    address = dispatcher.target.removeprefix("grpc://")
    servers = [service.WorkerServer(service.WorkerConfig(address)) for _ in range(workers)]
    yield address
    del servers, dispatcher  # their destructors stop them


def put_numbers(folder: Path, records: int, files: int = 12) -> "InputData":
    """Put numbers into TFRecord files on S3; return a channel with them."""
    import boto3
    import tensorflow as tf
    from sagemaker.core.training.configs import InputData

    s3 = boto3.client("s3")
    s3.create_bucket(Bucket=f"numbers-{records}")
    for file in range(files):
        with tf.io.TFRecordWriter(f"{folder}/part") as writer:
            for number in range(file * records // files, (file + 1) * records // files):
                writer.write(b"%d" % number)
        s3.upload_file(f"{folder}/part", f"numbers-{records}", f"{file}.tfrecord")
    return InputData(channel_name="training", data_source=f"s3://numbers-{records}/")


class Forgetful(set):
    """Forgets the names in use, as if several processes called `distribute`."""

    def __contains__(self, name: object) -> bool:
        return False


@contextmanager
def data_hosts(workers: int, ranks: int = 1, processes: int = 1) -> Iterator[None]:
    """Set up the environment and module state that `distribute` needs, with a data service."""
    from tensorflow.python.data.experimental.ops import data_service_ops

    from service import distributed

    read, names = data_service_ops._from_dataset_id, Forgetful() if processes > 1 else set()

    def read_at_once(*args: Any, **options: Any) -> Any:
        """Ask for tasks every 20 ms: otherwise each epoch ends up to a second late."""
        return read(*args, **options | {"task_refresh_interval_hint_ms": 20})

    with (
        mock.patch.object(data_service_ops, "_from_dataset_id", read_at_once),
        dispatcher_of(workers) as address,
        mock.patch.dict(os.environ, HETERO_DATA_HOSTS=address, WORLD_SIZE=str(ranks)),
        mock.patch.multiple(distributed, used_names=names, are_in_step=lambda: True),
    ):
        yield


def numbered(numbers: Any) -> Any:
    """Add a label to each number."""
    return numbers.map(lambda n: (n, 7 * n))


def counted(dataset: Any) -> Counter:
    """Count how often each pair of a number and its label occurs."""
    return Counter(
        pair
        for numbers, labels in dataset.as_numpy_iterator()
        for pair in zip(np.ravel(numbers).tolist(), np.ravel(labels).tolist(), strict=True)
    )
