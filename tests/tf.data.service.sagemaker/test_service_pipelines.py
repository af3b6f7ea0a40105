"""Pipelines give the same samples on data hosts as without them, or are refused with advice."""

import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.data_service import counted, data_hosts, numbered
from helpers.pages import TENSORFLOW

SAMPLES, FILES = 400, 10


@pytest.fixture(scope="module", autouse=True)
def imports() -> None:
    """Import TensorFlow, which takes seconds, only in the process that runs these tests."""
    global Dataset, distribute, distributed, graph, refusals, same, state, tf
    import tensorflow as tf

    from service import distribute, distributed, graph, refusals, same, state

    Dataset = tf.data.Dataset


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with files of numbers in three formats."""
    folder = tmp_path_factory.mktemp("files")
    for first in range(0, SAMPLES, SAMPLES // FILES):
        numbers = [b"%04d" % number for number in range(first, first + SAMPLES // FILES)]
        with tf.io.TFRecordWriter(f"{folder}/{first:04}.tfrecord") as writer:
            for number in numbers:
                writer.write(number)
        (folder / f"{first:04}.txt").write_bytes(b"\n".join(numbers))
        (folder / f"{first:04}.fixed").write_bytes(b"".join(numbers))
    return folder


def sources(folder: Path) -> dict[str, Callable[[], Any]]:
    """Return functions that make Datasets of the numbers below SAMPLES, by name."""

    def listed(**options: Any) -> Any:
        return Dataset.list_files(f"{folder}/*.tfrecord", **options)

    def number(text: Any) -> Any:
        return tf.strings.to_number(text, tf.int64)

    def examples() -> Any:
        train, old = tf.train, tf.data.experimental
        values = [train.Feature(int64_list=train.Int64List(value=[n])) for n in range(SAMPLES)]
        examples = [train.Example(features=train.Features(feature={"n": v})) for v in values]
        texts = Dataset.from_tensor_slices([each.SerializeToString() for each in examples])
        parse = old.parse_example_dataset({"n": tf.io.FixedLenFeature([], tf.int64)})
        return texts.batch(7).apply(parse).unbatch().map(lambda found: found["n"])

    tfrecord, txt, fixed = (
        sorted(map(str, folder.glob(f"*.{suffix}"))) for suffix in ("tfrecord", "txt", "fixed")
    )
    records = tf.data.TFRecordDataset
    return {
        "parse_example_dataset": examples,
        "range": lambda: Dataset.range(SAMPLES),
        "from_tensor_slices": lambda: Dataset.from_tensor_slices(np.arange(SAMPLES)),
        "from_tensors": lambda: Dataset.from_tensors(np.arange(SAMPLES)).unbatch(),
        "TFRecordDataset": lambda: records(tfrecord).map(number),
        "TextLineDataset": lambda: tf.data.TextLineDataset(txt).map(number),
        "FixedLengthRecordDataset": lambda: tf.data.FixedLengthRecordDataset(fixed, 4).map(number),
        "list_files, in order": lambda: listed(shuffle=False).interleave(records).map(number),
        "list_files, in parallel": lambda: (
            listed().interleave(records, num_parallel_calls=tf.data.AUTOTUNE).map(number)
        ),
        "a zip and a take for each file": lambda: (
            listed()
            .flat_map(lambda name: Dataset.zip((records(name), records(name))).take(40).cache())
            .map(lambda one, other: number(one))
        ),
    }


def one(number: Any, label: Any) -> Any:
    """Return a dataset of one sample."""
    return Dataset.from_tensors((number, label))


def steps() -> dict[str, Callable[[Any], Any]]:
    """Return steps of pipelines of numbers and labels; helpers/carried.py has more, with state."""
    auto, old = tf.data.AUTOTUNE, tf.data.experimental
    flip = tf.keras.layers.RandomFlip()

    def augmented(number: Any, label: Any) -> Any:
        return number, label + 0 * tf.cast(tf.reduce_sum(flip(tf.ones((4, 4, 3)))), tf.int64)

    return {
        "map": lambda d: d.map(lambda n, label: (n, label)),
        "map, in parallel": lambda d: d.map(
            lambda n, label: (n, label), num_parallel_calls=auto, deterministic=False
        ),
        "filter": lambda d: d.filter(lambda n, label: n % 3 != 0),
        "a Keras layer with random numbers": lambda d: d.map(augmented),
        "shuffle": lambda d: d.shuffle(50),
        "shuffle, with a seed": lambda d: d.shuffle(50, seed=1, reshuffle_each_iteration=False),
        "repeat(2)": lambda d: d.repeat(2),
        "batch, in parallel": lambda d: d.batch(7, num_parallel_calls=2).unbatch(),
        "padded_batch": lambda d: (
            d.map(lambda n, label: (n[None], label[None]))
            .padded_batch(4)
            .map(lambda n, label: (n[:, 0], label[:, 0]))
            .unbatch()
        ),
        "ragged_batch": lambda d: (
            d.map(lambda n, label: (tf.fill([n % 3 + 1], n), label))
            .ragged_batch(4)
            .map(lambda n, label: (tf.reduce_max(n, axis=1), label))
            .unbatch()
        ),
        "dense_to_sparse_batch": lambda d: (
            d.map(lambda n, label: tf.stack([n, label]))
            .apply(old.dense_to_sparse_batch(4, [2]))
            .map(tf.sparse.to_dense)
            .unbatch()
            .map(lambda both: (both[0], both[1]))
        ),
        "a map of batches": lambda d: (
            d.batch(6)
            .map(lambda n, label: (tf.reshape(n, (-1, 1)), label))
            .unbatch()
            .map(lambda n, label: (n[0], label))
        ),
        "rebatch": lambda d: d.batch(7).rebatch(4).map(lambda n, label: (n, label)).unbatch(),
        "prefetch": lambda d: d.prefetch(auto),
        "options": lambda d: d.with_options(tf.data.Options()),
        "ignore_errors": lambda d: d.ignore_errors(),
        "concatenate": lambda d: d.concatenate(numbered(Dataset.range(1000, 1100))),
        "sample_from_datasets": lambda d: Dataset.sample_from_datasets(
            [d, numbered(Dataset.range(2000, 2100))], [0.7, 0.3]
        ),
        "flat_map": lambda d: d.flat_map(one),
        "interleave": lambda d: d.interleave(one, cycle_length=3),
        "interleave, in parallel": lambda d: d.interleave(one, 3, num_parallel_calls=2),
        "bucket_by_sequence_length": lambda d: d.bucket_by_sequence_length(
            lambda n, label: tf.cast(n % 9, tf.int32), [3, 6], [4, 4, 4]
        ).unbatch(),
        "group_by_window": lambda d: d.group_by_window(
            lambda n, label: n % 3, lambda key, window: window.batch(4), window_size=4
        ).unbatch(),
        "take(-1) and skip(0)": lambda d: d.take(-1).skip(0).shard(1, 0),
        "what TensorFlow calls deprecated": lambda d: (
            d.apply(old.shuffle_and_repeat(20, 2))
            .apply(old.map_and_batch(lambda n, label: (n, label), 6))
            .unbatch()
            .apply(old.parallel_interleave(one, cycle_length=2))
        ),
    }


@pytest.mark.parametrize(
    "workers", [2, *(pytest.param(n, marks=pytest.mark.thorough) for n in (1, 3))]
)
def test_what_is_not_refused_gives_the_same_samples_with_their_labels(files: Path, workers: int):
    pipelines_ = {name: numbered(source()) for name, source in sources(files).items()}
    pipelines_ |= {name: step(numbered(Dataset.range(SAMPLES))) for name, step in steps().items()}
    ops = set()
    for name, dataset in pipelines_.items():
        dataset = dataset.batch(16)
        ops |= {graph.op_of(node) for node in graph.graph_of(dataset).node}
        with data_hosts(workers):
            assert counted(distribute(dataset)) == counted(dataset), name
    assert ops == {*refusals.RIGHT.split(), "", "Take", "Skip", "Shard"}


def wrong_steps() -> dict[str, Callable[[Any], Any]]:
    """Return steps that are wrong wherever they stand, by words of the error."""
    variable = tf.Variable(0, dtype=tf.int64)
    return {
        "fewer rows": lambda d: d.batch(4).map(lambda n, label: (n[None], label[None])),
        "batch of batches": lambda d: d.batch(4).with_options(tf.data.Options()).batch(3),
        "without end": lambda d: d.flat_map(lambda n, label: one(n, label).repeat()),
        "ReadVariableOp": lambda d: d.map(lambda n, label: (n, label + variable)),
        "have a seed": lambda d: d.filter(lambda n, label: tf.random.uniform([], seed=1) < 0.5),
    }


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(300 if "SOAK" in os.environ else 30))
def test_random_series_of_steps_give_the_same_samples_or_are_refused(files: Path, seed: int):
    draw = random.Random(seed)
    source = draw.choice([*sources(files).values()])
    names = draw.choices([*steps()], k=draw.randrange(2, 7))

    def series(wrong: Callable | None = None) -> Any:
        dataset = numbered(source())
        for name in names:
            dataset = steps()[name](dataset)
        return wrong(dataset) if wrong else dataset.batch(16)

    def checked(dataset: Any) -> Any:
        found = graph.graph_of(dataset)
        refusals.check(found)
        state.renew(found)
        return same.fingerprint(found)

    words, wrong = draw.choice([*wrong_steps().items()])
    with pytest.raises(ValueError, match=f"{words}|after shuffle"):
        checked(series(wrong))
    dataset = series()
    try:
        assert checked(dataset) == checked(series())
    except ValueError as error:
        assert "after shuffle" in str(error)
        return
    with data_hosts(draw.choice([2, 3])):
        assert counted(distribute(dataset)) == counted(dataset), names


# ---- refusals


def refused(folder: Path) -> dict[str, Callable[[Any], Any]]:
    """Return steps that are refused, by words of the error; the folder has folders of images."""
    batch, old = {"batch_size": 7, "drop_remainder": True}, tf.data.experimental
    return {
        # Keras zips paths with labels.
        r"image_dataset_from_directory: .*\(\(paths, labels\)\)": lambda d: (
            tf.keras.utils.image_dataset_from_directory(folder)
        ),
        "a zip, an enumerate, or a Keras utility like image_dataset_from_directory: s": lambda d: (
            Dataset.zip((d.map(lambda n: n), d.map(lambda n: 7 * n)))
        ),
        "enumerate": lambda d: d.enumerate(),
        "a scan": lambda d: d.scan(tf.constant(0, tf.int64), lambda at, n: (at + 1, n + at)),
        "Dataset.counter": lambda d: Dataset.counter(),
        "a Dataset.random": lambda d: Dataset.random(seed=1),
        "a take: each": lambda d: d.take(100),
        "a skip": lambda d: d.skip(100),
        "a take_while": lambda d: d.take_while(lambda n: n < 100),
        "a shard": lambda d: d.shard(2, 0),
        "a cache": lambda d: d.cache(),
        "a window": lambda d: d.window(4).flat_map(lambda w: w.batch(4)),
        "a unique": lambda d: d.unique(),
        "an assert_cardinality": lambda d: d.apply(old.assert_cardinality(400)),
        "an interleave after shuffle": lambda d: d.shuffle(9).interleave(Dataset.from_tensors),
        "a bucket_by_sequence_length": lambda d: d.shuffle(9).group_by_window(
            lambda n: n % 2, lambda _, window: window.batch(4), window_size=4
        ),
        "a group_by_window that may drop": lambda d: d.group_by_window(
            lambda n: n % 2, lambda _, window: window.batch(4, drop_remainder=True), window_size=4
        ),
        "that may drop part": lambda d: d.group_by_window(
            lambda n: n % 2, lambda _, window: window.take(2).batch(4), window_size=4
        ),
        "a sample_from_datasets": lambda d: Dataset.sample_from_datasets(
            [d.repeat(), d], stop_on_empty_dataset=True
        ),
        "a Dataset.random: workers": lambda d: Dataset.sample_from_datasets(
            [Dataset.random(seed=1), Dataset.random(seed=2)]
        ),
        "a batch of batches": lambda d: d.repeat().batch(**batch).map(lambda n: n[1:]).batch(3),
        "weights that are a dataset": lambda d: Dataset.sample_from_datasets(
            [d, d], weights=Dataset.from_tensors([0.5, 0.5]).repeat()
        ),
        "a choose_from_datasets": lambda d: Dataset.choose_from_datasets(
            [d, d], Dataset.range(2).repeat(9)
        ),
        "a batch with drop_remainder": lambda d: d.batch(**batch).repeat(),
        "drop_remainder=True: each": lambda d: d.map(lambda n: n[None]).padded_batch(**batch),
        "a snapshot": lambda d: d.snapshot("/nowhere"),
        "utility like": lambda d: tf.keras.utils.timeseries_dataset_from_array([1, 2, 3], None, 2),
        "a CsvDataset": lambda d: old.CsvDataset("no", [tf.int64]),
        "a Python function": lambda d: d.map(
            lambda n: tf.numpy_function(lambda value: value, [n], tf.int64)
        ),
        r"\(py_function": lambda d: d.map(lambda n: tf.py_function(lambda v: v, [n], tf.int64)),
        "from_generator": lambda d: Dataset.from_generator(
            lambda: iter([1]), output_signature=tf.TensorSpec((), tf.int64)
        ),
    }


def test_what_would_be_wrong_is_refused_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("HETERO_DATA_HOSTS", "nobody:1")
    monkeypatch.setattr(distributed, "used_names", set())
    for name in ("cats", "dogs"):
        (tmp_path / name).mkdir()
        tf.io.write_file(f"{tmp_path}/{name}/1.png", tf.io.encode_png(np.zeros((4, 4, 3), "uint8")))
    for words, step in refused(tmp_path).items():
        with pytest.raises(ValueError, match=f"distribute: .*({words})") as refusal:
            distribute(step(Dataset.range(SAMPLES)))
        assert re.search(" Instead, .+", str(refusal.value))
    to_device = Dataset.range(9).apply(tf.data.experimental.prefetch_to_device("/cpu:0"))
    with pytest.raises(ValueError, match="prefetch_to_device, do that after distribute"):
        distribute(to_device)
    assert not distributed.used_names


def test_hundreds_of_datasets_may_be_concatenated():
    dataset = Dataset.range(1)
    for _ in range(600):
        dataset = dataset.concatenate(Dataset.range(1))
    assert not refusals.is_endless(graph.graph_of(dataset))


def test_readme_has_the_rules():
    text = (TENSORFLOW / "README.md").read_text()
    for rule in refusals.RULES:
        assert f"| {rule.name} | {rule.wrong} | {rule.instead} |" in text
