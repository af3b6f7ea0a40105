"""The line of a training script: dataset = distribute(dataset)."""

import os
import re
import sys
from collections.abc import Collection
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context

from service.pipelines import check
from service.waiting import wait_for_dispatcher, watched

used_names: set[str] = set()


def distribute(
    dataset: tf.data.Dataset, name: str = "training", allow: Collection[str] = (), **options: Any
) -> tf.data.Dataset:
    """Have the data hosts that HETERO_DATA_HOSTS names run a pipeline; without any, return it.

    dataset: with its last map and batch. Each batch goes to one of the ranks, so there is no
        `shard` in it. Data hosts have the files that it reads under the same names.
    name: the same on all ranks, and another one for each further dataset, such as "validation".
    allow: ops to let through that would be refused, such as "Scan".
    options: others of tf.data.experimental.service.distribute.

    Raises ValueError for a pipeline whose samples would be others there (pipelines.py), for a name
    that has been used, if several ranks are not in step, and if they are to train on a dataset that
    ends, as they would get unequal numbers of batches. ConnectionError if the dispatcher cannot be
    reached for 120 s; the process ends if no worker comes for so long.
    """
    ranks = int(os.environ.get("WORLD_SIZE") or 1)
    if ranks > 1 and not are_in_step():
        raise ValueError(
            f"distribute: WORLD_SIZE is {ranks}, but nothing keeps the ranks in step: each would "
            "train alone. Instead, make TensorFlowRanks (ranks/) or MultiWorkerMirroredStrategy "
            "before, or call hvd.init(). If something else does, remove WORLD_SIZE from os.environ."
        )
    dispatcher = os.environ.get("HETERO_DATA_HOSTS", "").split(",")[0]
    if not dispatcher:
        return dataset
    if not re.fullmatch(r"[^\s:]+:\d{1,5}", dispatcher):
        raise ValueError(f"distribute: HETERO_DATA_HOSTS begins with no HOST:PORT: {dispatcher!r}")
    if not tf.executing_eagerly():
        raise ValueError("distribute: call it outside of a tf.function")
    is_endless = check(dataset, allow)
    if name == "training" and ranks > 1 and not is_endless:
        raise ValueError(
            f"distribute: {ranks} ranks would get unequal numbers of batches, and wait for each "
            "other at the end. Instead, repeat() the dataset, and train a number of steps."
        )
    if name in used_names:
        raise ValueError(
            f"distribute: another dataset has the name {name!r}, and they would get each other's "
            "batches. Instead, give each a name=, the same on all ranks."
        )
    wait_for_dispatcher(dispatcher)
    used_names.add(name)
    distributed = tf.data.experimental.service.distribute(
        # Data hosts get files as they need them, so that each works at its own speed.
        processing_mode=tf.data.experimental.service.ShardingPolicy.DYNAMIC,
        service=f"grpc://{dispatcher}",
        job_name=name,
        **{"compression": None, **options},  # compressing takes more time than the network
    )
    return watched(dataset.apply(distributed), dispatcher, name)


def are_in_step() -> bool:
    """Whether this process has joined other ranks, by TensorFlow's collectives or Horovod."""
    horovod = sys.modules.get("horovod.tensorflow")
    joined = context.context()._collective_ops_server_def
    return bool(joined or (horovod and horovod.is_initialized()))
