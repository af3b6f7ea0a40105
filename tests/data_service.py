"""tf.data.service in the test's own process, and numbers on S3, for tests that count them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import boto3
from sagemaker.core.training.configs import InputData


@contextmanager
def dispatcher_of(workers: int) -> Iterator[str]:
    """Start a dispatcher with so many workers; give its HOST:PORT."""
    import tensorflow as tf  # takes seconds in each process that only collects the tests

    service = tf.data.experimental.service
    dispatcher = service.DispatchServer()
    address = dispatcher.target.removeprefix("grpc://")
    servers = [service.WorkerServer(service.WorkerConfig(address)) for _ in range(workers)]
    yield address
    del servers, dispatcher  # their destructors stop them


def put_numbers(folder: Path, records: int, files: int = 12) -> InputData:
    """A channel of numbers in TFRecord files."""
    import tensorflow as tf

    s3 = boto3.client("s3")
    s3.create_bucket(Bucket=f"numbers-{records}")
    for file in range(files):
        with tf.io.TFRecordWriter(f"{folder}/part") as writer:
            for number in range(file * records // files, (file + 1) * records // files):
                writer.write(b"%d" % number)
        s3.upload_file(f"{folder}/part", f"numbers-{records}", f"{file}.tfrecord")
    return InputData(channel_name="training", data_source=f"s3://numbers-{records}/")
