"""The line that a training script adds: dataset = distribute(dataset)."""

import os
import re
import sys
from collections.abc import Collection
from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops.dataset_ops import _VariantDataset
from tensorflow.python.eager import context

from service.graph import graph_of
from service.refusals import check, is_endless, refuse
from service.same import check_same
from service.state import has_op_seeds, renew
from service.waiting import logger, wait_for_dispatcher, watched

used_names: set[str] = set()


def distribute(
    dataset: tf.data.Dataset, name: str = "training", allow: Collection[str] = (), **options: Any
) -> tf.data.Dataset:
    """Run a pipeline on the data hosts that HETERO_DATA_HOSTS names. Without any, return it as is.

    dataset: the pipeline, with its last map and batch, but without a `shard`, because each batch
        goes to one rank. The files that it reads must have the same names on the data hosts.
    name: the same on all ranks, and different for each dataset, such as "validation".
    allow: ops to accept that are otherwise refused, such as "Scan".
    options: further options of tf.data.experimental.service.distribute.

    Random numbers become new ones in each worker and epoch (state.py). Raises ValueError if data
    hosts would produce different samples (refusals.py, state.py), if another rank has another
    pipeline (same.py), if the name has been used, if several ranks are not in step, or if several
    ranks would train on a dataset that ends, because they would get unequal numbers of batches.
    Raises ConnectionError if the dispatcher cannot be reached for 120 s. If no worker comes for
    120 s, the process exits.
    """
    ranks = int(os.environ.get("WORLD_SIZE") or 1)
    if ranks > 1 and not are_in_step():
        raise ValueError(
            f"distribute: WORLD_SIZE is {ranks}, but nothing keeps the ranks in step: each would "
            "train alone. First create TensorFlowRanks (ranks/) or MultiWorkerMirroredStrategy, or "
            "call hvd.init(). If something else keeps them in step, remove WORLD_SIZE from "
            "os.environ."
        )
    dispatcher = os.environ.get("HETERO_DATA_HOSTS", "").split(",")[0]
    if not dispatcher:
        return dataset
    if not re.fullmatch(r"[^\s:]+:\d{1,5}", dispatcher):
        raise ValueError(
            f"distribute: HETERO_DATA_HOSTS must begin with HOST:PORT, not {dispatcher!r}"
        )
    if not tf.executing_eagerly():
        raise ValueError("distribute: call it outside of a tf.function")
    if not isinstance(dataset, tf.data.Dataset):
        raise ValueError(
            f"distribute: it takes a tf.data.Dataset, not {type(dataset).__name__}. Call it before "
            "experimental_distribute_dataset or iter. A PyDataset needs PyTorch's loader."
        )
    if dataset._flat_types == [tf.variant]:
        refuse(
            "a ragged or sparse tensor, or a dataset, as its only component",
            "TensorFlow cannot send it",
            "send another component with it: dataset.map(lambda x: (x, 0))",
        )
    graph = graph_of(dataset)
    check(graph, allow)
    had_seeds = has_op_seeds(graph)
    renew(graph, allow)
    if had_seeds:
        text = "distribute: random numbers of %s do not follow seeds, and differ in each epoch."
        logger.warning(text, name)
    if name == "training" and ranks > 1 and not is_endless(graph):
        raise ValueError(
            f"distribute: {ranks} ranks would get unequal numbers of batches, and wait for each "
            "other at the end. Call repeat() on the dataset, and train for a number of steps."
        )
    if name in used_names:
        raise ValueError(
            f"distribute: another dataset has the name {name!r}, and they would get each other's "
            "batches. Pass a different name= for each dataset, the same on all ranks."
        )
    wait_for_dispatcher(dispatcher)
    check_same(graph, dispatcher, name)
    used_names.add(name)
    variant = tf.raw_ops.DatasetFromGraph(graph_def=graph.SerializeToString())
    dataset = _VariantDataset(variant, dataset.element_spec)
    distributed = tf.data.experimental.service.distribute(
        # Data hosts get files as they need them, so that each works at its own speed.
        processing_mode=tf.data.experimental.service.ShardingPolicy.DYNAMIC,
        service=f"grpc://{dispatcher}",
        job_name=name,
        **{"compression": None, **options},  # compression takes longer than the network
    )
    return watched(dataset.apply(distributed), dispatcher, name)


def are_in_step() -> bool:
    """Return whether TensorFlow's collectives or Horovod connect this process with other ranks."""
    horovod = sys.modules.get("horovod.tensorflow")
    joined = context.context()._collective_ops_server_def
    return bool(joined or (horovod and horovod.is_initialized()))
