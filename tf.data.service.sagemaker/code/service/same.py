"""All ranks have to send the same pipeline, because data hosts run only the first that they get."""

import hashlib
import os
from collections.abc import Iterable
from typing import Any

import tensorflow as tf
from tensorflow.core.framework.types_pb2 import DT_RESOURCE

from service.graph import GraphDef, NodeDef, functions_of, is_integer, name_of

# Names that differ between processes, and what only helps people who debug.
NAMES = ("shared_name", "container", "metadata")


def check_same(graph: GraphDef, dispatcher: str, name: str) -> None:
    """Raise ValueError if another process has sent another pipeline under this name.

    The dispatcher compares them: it refuses two datasets with one id and different structures, and
    the structure that it gets here is the fingerprint's.
    """
    dataset = tf.data.Dataset.from_tensors({fingerprint(graph): 0})
    try:
        tf.data.experimental.service.register_dataset(
            f"grpc://{dispatcher}", dataset, compression=None, dataset_id=f"fingerprint of {name}"
        )
    except tf.errors.InvalidArgumentError as error:
        raise ValueError(
            f"distribute: another process has a different dataset with the name {name!r}, and both "
            "would get the batches of the first. All ranks must make the same dataset, with the "
            "same files in the same order and the same seeds: each batch goes to one rank. If "
            "these are different datasets, pass a different name= for each."
        ) from error


def fingerprint(graph: GraphDef) -> str:
    """Return a hash of a graph, without names and the state of random generators."""
    functions = functions_of(graph)
    order: list[str] = []  # of functions, by their first use
    written = {node.input[1] for node in graph.node if node.op == "AssignVariableOp"}
    state = {
        node.name
        for node in graph.node
        if (node.name in written and is_integer(node))
        or (node.op == "Const" and node.attr["dtype"].type == DT_RESOURCE)  # a shuffle's generator
    }
    # In a local run, each host has its own folder in place of /opt/ml.
    base = os.environ.get("SAGEMAKER_BASE_DIR", "/opt/ml").encode()
    said = hashlib.sha256()

    def number(function: str) -> int:
        if function not in order:
            order.append(function)
        return order.index(function)

    def add(nodes: Iterable[NodeDef], arguments: Iterable[Any], ends: Iterable[str] = ()) -> None:
        nodes = [*nodes]
        places = {each.name: str(at) for at, each in enumerate([*arguments, *nodes])}

        def place(tensor: str) -> str:
            return tensor.replace(name_of(tensor), places[name_of(tensor)], 1)

        for node in nodes:
            said.update(repr((node.op, [*map(place, node.input)])).encode())
            for key in sorted(node.attr):
                value = node.attr[key]
                called = [each.name for each in (value.func, *value.list.func) if each.name]
                if called:
                    said.update(repr((key, [*map(number, called)])).encode())
                elif value.tensor.string_val:
                    said.update(b"\0".join(s.replace(base, b"") for s in value.tensor.string_val))
                elif not (key.startswith("_") or key in NAMES or node.name in state):
                    said.update(key.encode() + value.SerializeToString(deterministic=True))
        said.update(repr([*map(place, ends)]).encode())

    add(graph.node, ())
    for name in order:  # grows meanwhile
        function = functions[name]
        ends = [function.ret[each.name] for each in function.signature.output_arg]
        add(function.node_def, function.signature.input_arg, ends)
    return said.hexdigest()
