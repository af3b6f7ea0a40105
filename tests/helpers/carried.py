"""Pipelines that carry random numbers, variables and tables, and what data hosts make of them.

test_service.py has the tests. In AWS's image of TensorFlow 2.12, whose replica has no pytest,
this file runs as a script (containers/in_containers.py).
"""

import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent / "tf.data.service.sagemaker" / "code")]

from helpers.data_service import data_hosts, numbered  # noqa: E402
from service import distribute  # noqa: E402

Dataset, layers = tf.data.Dataset, tf.keras.layers
SAMPLES, EPOCHS = 48, 3


def picture(number: Any) -> Any:
    """Return an image of its own for each number, without symmetries."""
    return tf.reshape(tf.range(300, dtype=tf.float32), (10, 10, 3)) % 255.0 + tf.cast(
        number % 7, tf.float32
    )


# Layers that draw real numbers, so that no two samples are alike, and those that choose.
MEASURES = {
    "RandomRotation": {"factor": 0.4},
    "RandomZoom": {"height_factor": 0.4, "width_factor": 0.4},
    "RandomTranslation": {"height_factor": 0.4, "width_factor": 0.4},
    "RandomBrightness": {"factor": 0.4},
    "RandomContrast": {"factor": 0.9},
    "GaussianNoise": {"stddev": 1.0},
    "Dropout": {"rate": 0.5},
}
CHOOSES = {
    "RandomFlip": {},
    "RandomCrop": {"height": 4, "width": 4},
    "RandAugment": {},  # this one and those below: only in Keras 3
    "AugMix": {},
    "RandomElasticTransform": {},
    "RandomErasing": {},
}


def draws() -> dict[str, Callable]:
    """Return functions that draw random numbers for a sample, in the ways that people use."""
    made = {}
    for name, options in (MEASURES | CHOOSES).items():
        if hasattr(layers, name):
            layer = getattr(layers, name)(**options)
            made[name] = lambda n, layer=layer: layer(picture(n), training=True)
    fixed, free = (
        tf.random.Generator.from_seed(1),
        tf.random.Generator.from_non_deterministic_state(),
    )
    count = tf.Variable(0, dtype=tf.int64)

    def counted_seed(n: Any) -> Any:
        """Two ops get the same seed, such as for an image and its mask."""
        count.assign_add(1)
        one, other = (tf.random.stateless_uniform([2], tf.stack([count, n])) for _ in range(2))
        tf.debugging.assert_equal(one, other)
        return one

    compiled = tf.function(layers.RandomRotation(0.4))
    return made | {
        "a Generator": lambda n: fixed.uniform([2]),
        "a Generator without a seed": lambda n: free.normal([2]),
        # https://www.tensorflow.org/tutorials/images/data_augmentation
        "seeds from a Generator": lambda n: tf.image.stateless_random_brightness(
            picture(n), 0.4, fixed.make_seeds(2)[0]
        ),
        "seeds from a counter": counted_seed,
        "uniform": lambda n: tf.random.uniform([2]),
        "uniform, with a seed": lambda n: tf.random.uniform([2], seed=1005),
        "random_hue": lambda n: tf.image.random_hue(picture(n) / 300, 0.4, seed=1001),
        "in a tf.function": lambda n: compiled(picture(n)),
        "in a condition": lambda n: tf.cond(
            n >= 0, lambda: fixed.uniform([2]), lambda: tf.zeros([2])
        ),
    }


def random_pipelines() -> list[Any]:
    """Return pipelines of samples, without a shuffle, with what was drawn for each of them."""
    numbers, generator = Dataset.range(SAMPLES), tf.random.Generator.from_seed(1)
    functions = draws()
    pipelines = [
        numbers.map(lambda n: (n, {name: draw(n) for name, draw in functions.items()})),
        numbers.interleave(
            lambda n: Dataset.from_tensors(n).map(lambda m: (m, {"in": generator.uniform([2])}))
        ),
    ]
    if hasattr(layers, "MixUp"):
        mix, marks = layers.MixUp(), tf.eye(SAMPLES)

        def mixed(n: Any) -> Any:
            images = {"images": tf.zeros((tf.shape(n)[0], 4, 4, 3)), "labels": tf.gather(marks, n)}
            return n, {"MixUp": mix(images)["labels"]}

        pipelines.append(numbers.batch(8).map(mixed).unbatch())
    return pipelines


def check_random_numbers(workers: int, seed: int | None = None) -> None:
    """Each sample comes once in each epoch, with random numbers of its own."""
    if seed is not None:
        tf.keras.utils.set_random_seed(seed)
    for dataset in random_pipelines():
        with data_hosts(workers):
            batches = distribute(dataset.batch(8))
            seen = [
                {int(n): drawn for n, drawn in batches.unbatch().as_numpy_iterator()}
                for _ in range(EPOCHS)
            ]
        assert all(sorted(epoch) == [*range(SAMPLES)] for epoch in seen)
        for name in seen[0][0]:
            values = [[epoch[n][name].tobytes() for epoch in seen] for n in range(SAMPLES)]
            different = len({value for epochs in values for value in epochs})
            alike = sum(len({*epochs}) == 1 for epochs in values)
            if name in CHOOSES or name == "MixUp":
                assert alike < SAMPLES / 2, f"{name}: {alike} alike in all epochs"
            else:
                assert different == EPOCHS * SAMPLES, f"{name}: only {different} different"


def check_orders(workers: int) -> None:
    """A seed does not make a shuffle repeat its order in each epoch."""
    for seed in (None, 42):
        dataset = numbered(Dataset.range(SAMPLES)).shuffle(SAMPLES, seed=seed)
        with data_hosts(workers):
            batches = distribute(dataset.batch(8))
            orders = [np.concatenate([n for n, _ in batches]).tolist() for _ in range(EPOCHS)]
        assert len(set(map(tuple, orders))) == EPOCHS
        assert all(sorted(order) == [*range(SAMPLES)] for order in orders)


def constants() -> dict[str, Any]:
    """Return pipelines with state that does not change."""
    normalization, text = layers.Normalization(axis=None), layers.TextVectorization()
    normalization.adapt(np.arange(9.0))
    text.adapt(["1 2 3 4 5"])
    words = layers.StringLookup(vocabulary=[str(n) for n in range(40)])
    integers = layers.IntegerLookup()
    integers.adapt(np.arange(30))
    keys = tf.range(SAMPLES, dtype=tf.int64)
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, 7 * keys), -1)
    vocabulary = tf.lookup.StaticVocabularyTable(
        tf.lookup.KeyValueTensorInitializer(tf.as_string(keys), keys), 3
    )
    other, numbers = Dataset.range(3), Dataset.range(SAMPLES)

    def looked_up(n: Any) -> Any:
        return {
            "Normalization": normalization(tf.cast([n], tf.float32)),
            "TextVectorization": text([tf.as_string(n)])[0],
            "StringLookup": words(tf.as_string(n)),
            "IntegerLookup": integers(n),
            "StaticHashTable": table.lookup(n),
            "StaticVocabularyTable": vocabulary.lookup(tf.as_string(n)),
        }

    shape = tf.function(lambda batch: tf.shape(batch, tf.int64)[:1])
    ragged = tf.ragged.constant([[1], [2, 3], []])
    return {
        "sparse and ragged batches": numbers.batch(6)
        .map(lambda n: (tf.sparse.from_dense(n[:, None]), tf.gather(ragged, n % 3)))
        .unbatch()
        .map(lambda sparse, words: (tf.sparse.to_dense(sparse), tf.reduce_sum(words))),
        "constants beside a batch": numbers.batch(6)
        .map(lambda n: {"n": n + 0 * shape(n)[0], "anchors": tf.zeros([6, 2])[:3]})
        .map(lambda both: both["n"])
        .unbatch(),
        "layers and tables": numbers.map(looked_up),
        "a dataset in flat_map": numbers.flat_map(lambda n: other.map(lambda m: (n, m))),
        "a zip in flat_map": numbers.flat_map(
            lambda n: Dataset.zip((Dataset.from_tensors(n).repeat(3), other.repeat()))
        ),
        "oversampling": numbers.flat_map(lambda n: Dataset.from_tensors(n).repeat(1 + n % 2)),
        "a repeat in flat_map": numbers.flat_map(
            lambda n: numbered(Dataset.range(3)).repeat(2).shuffle(9)
        ),
        "a repeat in interleave": numbers.interleave(
            lambda n: numbered(Dataset.range(3)).repeat(2).shuffle(9), num_parallel_calls=2
        ),
    }


def check_constants(workers: int) -> None:
    """Samples come as they would without data hosts, in each epoch."""
    for name, dataset in constants().items():
        expected = Counter(map(str, dataset.as_numpy_iterator()))
        with data_hosts(workers):
            samples = distribute(dataset.batch(8)).unbatch()
            for _ in range(2):
                assert Counter(map(str, samples.as_numpy_iterator())) == expected, name


def refused() -> list[tuple[str, Any]]:
    """Return pipelines that `distribute` refuses, each with words of the error."""
    numbers, batches = Dataset.range(SAMPLES), Dataset.range(SAMPLES).batch(12)
    threshold, count = tf.Variable(3, dtype=tf.int64), tf.Variable(0, dtype=tf.int64)
    many = tf.Variable(tf.zeros(9, tf.int64))
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, 0)
    dense = tf.lookup.experimental.DenseHashTable(tf.int64, tf.int64, 0, -1, -2)
    queue = tf.queue.FIFOQueue(9, tf.int64)
    model = tf.keras.Sequential([tf.keras.Input((1,)), layers.Dense(1)])
    generator = tf.random.Generator.from_seed(1)
    flips = [layers.RandomFlip(seed=3) for _ in range(2)]
    generators = [tf.random.Generator.from_seed(3) for _ in range(2)]
    same_seed = "layers or generators with the same seed"
    forever = numbers.repeat()
    parallel_interleave = tf.data.experimental.parallel_interleave
    reshape = tf.function(lambda batch: tf.reshape(batch, (-1, 4)))

    def counted(result: Callable) -> Any:
        """Return a map that counts its calls in a variable, and then calls `result`."""

        def counts(n: Any) -> Any:
            count.assign(count + 1)
            return result(n)

        return numbers.map(counts)

    def seeded(n: Any) -> Any:
        return tf.random.stateless_uniform([], tf.stack([count, n]))

    def most_is_counted(n: Any) -> Any:
        count.assign_add(1)
        return tf.random.stateless_uniform([], tf.stack([n, n]), 0, count, tf.int64)

    def of_class(c: Any) -> Any:
        return Dataset.range(9).map(lambda n: (c, n)).shuffle(9).repeat()

    def some(m: Any) -> Any:
        return tf.random.uniform([], seed=5) < 0.8

    sequences = forever.batch(12)
    of_batches = [sequences.concatenate(sequences), sequences.flat_map(Dataset.from_tensors)]
    fewer = [
        batches.map(lambda b: tf.reshape(b, (-1, 4))),
        batches.map(lambda b: b[None]),
        batches.map(reshape),
        forever.batch(12, drop_remainder=True).map(lambda b: tf.reshape(b, (3, 4))),
        batches.map(lambda b: tf.reshape(b, (tf.shape(b)[0] // 4, 4))),
        batches.map(tf.reduce_mean),
    ]
    can_change = "variable or table that can change"
    unordered, has_no_end = (
        "whose function shuffles or repeats",
        "whose function makes .* without end",
    )
    return [
        *(("a batch of batches", dataset.batch(4)) for dataset in of_batches),
        *(("a map that turns a batch into fewer rows", dataset) for dataset in fewer),
        (r"\(ReadVariableOp\)", numbers.filter(lambda n: n >= threshold)),
        (r"\(Mutable", numbers.map(table.lookup)),
        ("iterator, queue or DenseHashTable", numbers.map(dense.lookup)),
        ("an iterator, queue", numbers.map(lambda n: queue.dequeue())),
        ("a variable", numbers.map(lambda n: model(tf.cast([[n]], tf.float32)))),
        (can_change, counted(lambda n: (n, tf.random.uniform([])))),
        (can_change, counted(lambda n: (count + 0, seeded(n)))),
        # Two ops get one seed, which the script may change.
        (can_change, numbers.map(lambda n: [seeded(n) for _ in range(2)])),
        (can_change, numbers.map(lambda n: many.scatter_nd_add([[0]], [n]))),
        (can_change, numbers.map(lambda n: generator.state[0] + n)),
        (r"that can change \(AssignAdd", numbers.map(most_is_counted)),
        (same_seed, numbers.map(lambda n: [tf.random.uniform([], seed=5) for _ in range(2)])),
        (same_seed, numbers.map(lambda n: [flip(picture(n)) for flip in flips])),
        (same_seed, numbers.map(lambda n: [one.uniform([]) for one in generators])),
        ("as its only component", numbers.batch(3).map(tf.sparse.from_dense)),
        ("a filter with random", numbers.filter(some)),
        (
            "random numbers that have a seed",
            numbers.map(lambda n: (n, tf.random.uniform([], seed=5))).filter(lambda n, r: r < 0.8),
        ),
        ("a filter with random", numbers.flat_map(lambda n: Dataset.range(9).filter(some))),
        (has_no_end, Dataset.range(4).interleave(of_class)),
        (has_no_end, numbers.interleave(of_class, num_parallel_calls=2)),
        (has_no_end, numbers.flat_map(lambda n: forever)),
        ("drop_remainder", numbers.flat_map(lambda n: forever.take(3)).batch(9, True)),
        (unordered, numbers.interleave(lambda n: Dataset.range(n).shuffle(9))),
        (unordered, numbers.interleave(lambda n: Dataset.range(n).repeat(2))),
        (unordered, numbers.apply(parallel_interleave(lambda n: Dataset.range(n).shuffle(9), 3))),
    ]


def check_refusals() -> None:
    """Each of these pipelines is refused, with these words."""
    with data_hosts(1):
        for words, dataset in refused():
            try:
                distribute(dataset)
            except ValueError as error:
                assert re.search(words, str(error)), (words, error)
                continue
            raise AssertionError(f"not refused: {words}")


if __name__ == "__main__":
    check_refusals()
    for workers in (1, 2, 3):
        check_random_numbers(workers, seed=workers)
        check_orders(workers)
        check_constants(workers)
    print(f"all right with TensorFlow {tf.__version__}")
