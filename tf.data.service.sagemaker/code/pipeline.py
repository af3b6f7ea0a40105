"""The input pipeline, from TFRecord files to augmented batches. It runs here or on other machines.

`build` is the same function for all modes. The line `distribute(dataset)` moves the pipeline to
tf.data.service: the data hosts then run what is above the line, and this host runs what is below.

A record is a tf.train.Example with two features: `image`, an encoded picture (PNG, JPEG, ...), and
`label`, an int64 from 0 to 9.
"""

import math
import random
import time
from pathlib import Path

import tensorflow as tf

from service import distribute

SIDE, CHANNELS = 32, 3  # of the images that the model gets
FILES_AT_ONCE = 4  # files that a data host reads at the same time
AUTOTUNE = tf.data.AUTOTUNE
SHUFFLE_RECORDS = 2048  # records that `shuffle` holds in memory
BLUR_SIDE, BLUR_SIGMA = 11, 1.5  # pixels
MOST_ROTATION, MOST_ZOOM = math.radians(18), 0.1


def find_files(pattern: str) -> list[str]:
    """Return the files that match `pattern`, a folder and a name with wildcards, in order.

    Raises FileNotFoundError if there are none.
    """
    folder, _, name = pattern.rpartition("/")
    files = sorted(str(path) for path in Path(folder).glob(name) if path.is_file())
    if not files:
        raise FileNotFoundError(f"No file matches {pattern} in {Path.cwd()}.")
    return files


def build(
    files: list[str],
    batch_size: int,
    augment: int = 1,
    seed: int = 0,
    passes: int | None = None,
    rank: int = 0,
    ranks: int = 1,
    on_data_hosts: bool = False,
    threads: int = 0,
) -> tf.data.Dataset:
    """Return batches: images, float32 (N, 32, 32, 3) from 0 to 1, and labels, int64 (N,).

    files: TFRecord files, which data hosts have under the same names.
    augment: 0 leaves the images as they are. Otherwise they are augmented on a grid that is this
        many times finer than the image, so CPU time grows with its square.
    passes: how often to read the files; None repeats them forever, in full batches.
    rank, ranks: the number of this training process, and how many there are. Each record of a pass
        goes to one of them.
    on_data_hosts: whether data hosts prepare the batches, instead of this host.
    threads: how many to use on this host; 0: one for each core.
    """
    files = random.Random(seed).sample(files, len(files))
    # Number the files of all passes, so that each record can be augmented differently in each pass.
    # Data hosts divide these numbers among themselves; they could not count records themselves.
    numbers = tf.data.Dataset.range(tf.int64.max if passes is None else passes * len(files))

    def read(number: tf.Tensor) -> tf.data.Dataset:
        records = tf.data.TFRecordDataset(tf.gather(files, number % len(files)))
        return records.map(lambda record: (number // len(files), record))

    dataset = numbers.interleave(read, cycle_length=FILES_AT_ONCE)
    if not on_data_hosts:
        dataset = dataset.shard(ranks, rank)
    dataset = dataset.shuffle(SHUFFLE_RECORDS, seed=seed)
    dataset = dataset.map(
        lambda number, record: prepare(seed + number, record, augment), num_parallel_calls=AUTOTUNE
    )
    dataset = dataset.batch(batch_size, drop_remainder=passes is None)
    if on_data_hosts:
        dataset = distribute(dataset)
    elif threads:  # the ranks of a host share its cores
        options = tf.data.Options()
        options.threading.private_threadpool_size = threads
        options.autotune.cpu_budget = threads
        dataset = dataset.with_options(options)
    return dataset.prefetch(AUTOTUNE)


def prepare(n: tf.Tensor, record: tf.Tensor, augment: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Decode a record, and augment its image with random numbers from `n` and the record."""
    features = {"image": tf.io.FixedLenFeature([], tf.string)}
    features["label"] = tf.io.FixedLenFeature([], tf.int64)
    example = tf.io.parse_single_example(record, features)
    image = tf.io.decode_image(example["image"], CHANNELS, tf.float32, expand_animations=False)
    if augment:
        fine = tf.image.resize(image, (SIDE * augment, SIDE * augment), "bicubic")
        fine = distort(fine, tf.stack([n, tf.strings.to_hash_bucket_fast(record, 2**62)]))
        image = tf.clip_by_value(tf.image.resize(fine, (SIDE, SIDE), "area"), 0, 1)
    else:
        image = tf.image.resize(image, (SIDE, SIDE))
    return image, example["label"]


def distort(image: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """Dilate and blur a square image (side, side, 3); flip, rotate and zoom it at random."""
    side = image.shape[0]
    images = image[tf.newaxis]
    ones, element = [1, 1, 1, 1], tf.zeros((3, 3, CHANNELS))
    images = tf.nn.dilation2d(images, element, ones, "SAME", "NHWC", dilations=ones)
    offsets = tf.range(BLUR_SIDE, dtype=tf.float32) - BLUR_SIDE // 2
    weights = tf.nn.softmax(-0.5 * (offsets / BLUR_SIGMA) ** 2)
    border = [BLUR_SIDE // 2] * 2  # mirrored: zeros would darken the edges of the image
    images = tf.pad(images, [[0, 0], border, border, [0, 0]], "REFLECT")
    for shape in ((BLUR_SIDE, 1, 1, 1), (1, BLUR_SIDE, 1, 1)):  # first down, then across
        kernel = tf.tile(tf.reshape(weights, shape), (1, 1, CHANNELS, 1))
        images = tf.nn.depthwise_conv2d(images, kernel, ones, "VALID")

    # One map flips, rotates and zooms. It takes each pixel from its place in the grid, which is
    # rotated and scaled about its centre and, half of the time, mirrored.
    flip, angle, zoom = tf.unstack(tf.random.stateless_uniform([3], seed, -1, 1))
    zoom, angle, centre = 1 + MOST_ZOOM * zoom, MOST_ROTATION * angle, (side - 1) / 2
    cos, sin = tf.cos(angle) / zoom, tf.sin(angle) / zoom
    xx, xy = tf.sign(flip) * cos, tf.sign(flip) * -sin
    x_shift, y_shift = centre * (1 - xx - xy), centre * (1 - sin - cos)
    images = tf.raw_ops.ImageProjectiveTransformV3(
        images=images,
        transforms=tf.stack([xx, xy, x_shift, sin, cos, y_shift, 0.0, 0.0])[tf.newaxis],
        output_shape=(side, side),
        fill_value=0.0,
        interpolation="BILINEAR",
        fill_mode="REFLECT",
    )
    return images[0]


def milliseconds_per_sample(files: list[str], augment: int, batches: int = 8) -> float:
    """Return the CPU time of a sample, in ms, measured over `batches` batches of 32."""
    records = tf.data.TFRecordDataset(files).repeat().enumerate()
    dataset = records.map(lambda n, record: prepare(n, record, augment)).batch(32)
    iterator = iter(dataset)
    next(iterator)  # warms up
    start = time.process_time()
    for _ in range(batches):
        next(iterator)
    return 1000 * (time.process_time() - start) / (32 * batches)
