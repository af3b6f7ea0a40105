"""Small TFRecord files for tests of the TensorFlow example."""

import io
from pathlib import Path

import numpy as np
from PIL import Image


def image(number: int) -> np.ndarray:
    """Return a different picture for each number, uint8 (32, 32, 3)."""
    return np.random.default_rng(number).integers(0, 256, (32, 32, 3), dtype=np.uint8)


def write_records(folder: Path, files: int, records: int, classes: int = 0) -> None:
    """Write files of numbered pictures; their labels are the numbers, modulo `classes`."""
    import tensorflow as tf  # here, because it would slow down test collection by seconds

    for file in range(files):
        with tf.io.TFRecordWriter(f"{folder}/{file:03}.tfrecord") as writer:
            for number in range(file * records, (file + 1) * records):
                stream = io.BytesIO()
                Image.fromarray(image(number)).save(stream, "PNG")
                label = number % classes if classes else number
                writer.write(encode(stream.getvalue(), label))


def encode(picture: bytes, label: int) -> bytes:
    """Return a serialized record of an encoded picture and its label."""
    import tensorflow as tf

    feature = {
        "image": tf.train.Feature(bytes_list=tf.train.BytesList(value=[picture])),
        "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
    }
    return tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString()
