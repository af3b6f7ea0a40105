"""Print a pipeline's fingerprint, for test_service.py."""

import numpy as np
import tensorflow as tf

from service.graph import graph_of
from service.same import fingerprint
from service.state import renew

layers, Dataset = tf.keras.layers, tf.data.Dataset
flip, words = layers.RandomFlip(), layers.StringLookup(vocabulary=["a", "b", "c"])
generator = tf.random.Generator.from_non_deterministic_state()


def sample(n):
    picture = flip(tf.ones((4, 4, 3)) * tf.random.uniform([]))
    picture = tf.cond(n > 3, lambda: picture, lambda: picture + generator.uniform([]))
    return {"a": picture, "b": words(tf.as_string(n)), **{f"{i}": n + i for i in range(9)}}


dataset = Dataset.from_tensor_slices(np.arange(20)).shuffle(9)
dataset = dataset.interleave(lambda n: Dataset.from_tensors(n).shuffle(2), num_parallel_calls=2)
graph = graph_of(dataset.map(sample).batch(4))
renew(graph)
print(fingerprint(graph))
