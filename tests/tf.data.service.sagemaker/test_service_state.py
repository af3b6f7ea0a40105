"""Random numbers, variables, tables and ranks: right on data hosts, or refused.

helpers/carried.py has the pipelines. `make containers` runs it with TensorFlow 2.12, too.
"""

import subprocess
import sys
from typing import Any
from unittest import mock

import pytest

from helpers.data_service import data_hosts
from helpers.pages import TENSORFLOW


@pytest.fixture(scope="module", autouse=True)
def imports() -> None:
    """Import TensorFlow, which takes seconds, only in the process that runs these tests."""
    global Dataset, carried, distribute, distributed, tf
    import tensorflow as tf

    from helpers import carried
    from service import distribute, distributed

    Dataset = tf.data.Dataset


@pytest.mark.parametrize(
    "workers, seed",
    [(2, 1), *(pytest.param(n, s, marks=pytest.mark.thorough) for n in (1, 3) for s in (None, 1))],
)
def test_random_numbers_differ_in_each_epoch_and_worker(workers: int, seed: int | None):
    carried.check_random_numbers(workers, seed)
    carried.check_orders(workers)


@pytest.mark.parametrize(
    "workers", [2, *(pytest.param(n, marks=pytest.mark.thorough) for n in (1, 3))]
)
def test_what_does_not_change_is_used_as_it_is(workers: int):
    carried.check_constants(workers)


def test_what_can_change_or_is_seen_in_shares_is_refused():
    carried.check_refusals()


def test_a_variable_that_never_changes_can_be_allowed():
    variable = tf.Variable(3, dtype=tf.int64)
    dataset = Dataset.range(9).map(lambda n: n + variable)
    with data_hosts(1):
        numbers = distribute(dataset.batch(4), allow=["ReadVariableOp"]).unbatch()
        assert sorted(numbers.as_numpy_iterator()) == [*range(3, 12)]


def test_the_script_s_own_dataset_stays_as_it_is():
    """`distribute` changes a copy: with a seed, the dataset itself repeats its numbers."""
    dataset = Dataset.range(9).map(lambda n: tf.random.uniform([], seed=5))
    with data_hosts(1):
        distribute(dataset)
    first, second = ([*dataset.as_numpy_iterator()] for _ in range(2))
    assert first == second


# ---- ranks


class Forgetful(set):
    """Forgets the names in use, as if several processes called `distribute`."""

    def __contains__(self, name: object) -> bool:
        return False


def test_ranks_with_different_pipelines_are_refused():
    names = [f"{number}.tfrecord" for number in range(8)]

    def pipeline(files: list, size: int = 4) -> Any:
        return tf.data.TFRecordDataset(files).repeat().batch(size)

    with data_hosts(1, ranks=2), mock.patch.object(distributed, "used_names", Forgetful()):
        distribute(pipeline(names[0::2]))
        distribute(pipeline(names[0::2]))
        for other in (pipeline(names[1::2]), pipeline(names[0::2], 5), pipeline(names[6::-2])):
            with pytest.raises(ValueError, match="different dataset with the name 'training'.*All"):
                distribute(other)
        distribute(pipeline(names[1::2]), name="other")


FINGERPRINT = """
import sys
import numpy as np
import tensorflow as tf
from service.graph import graph_of
from service.same import fingerprint
from service.state import renew

layers, Dataset = tf.keras.layers, tf.data.Dataset
for _ in range(int(sys.argv[1])):  # other work, which only one rank does
    other = layers.RandomFlip()
    Dataset.range(3).map(lambda n: other(tf.ones((4, 4, 3)))).shuffle(3)
flip, words = layers.RandomFlip(), layers.StringLookup(vocabulary=["a", "b", "c"])
generator = tf.random.Generator.from_non_deterministic_state()

def sample(n):
    picture = flip(tf.ones((4, 4, 3)) * tf.random.uniform([]))
    picture = tf.cond(n > 3, lambda: picture, lambda: picture + generator.uniform([]))
    return {"a": picture, "b": words(tf.as_string(n)), **{f"{i}": n + i for i in range(9)}}

dataset = Dataset.from_tensor_slices(np.arange(int(sys.argv[2]))).shuffle(9)
dataset = dataset.interleave(lambda n: Dataset.from_tensors(n).shuffle(2), num_parallel_calls=2)
graph = graph_of(dataset.map(sample).batch(4))
renew(graph)
print(fingerprint(graph))
"""


def test_a_pipeline_has_one_fingerprint_in_all_processes():
    prints = []
    for before, samples in (("0", "20"), ("11", "20"), ("0", "20"), ("0", "21")):
        command = [sys.executable, "-c", FINGERPRINT, before, samples]
        done = subprocess.run(command, cwd=TENSORFLOW / "code", capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        prints.append(done.stdout.strip())
    assert prints[0] == prints[1] == prints[2] != prints[3]
