"""A dataset as a graph: the form in which tf.data.service sends it to data hosts."""

import re
from collections.abc import Collection, Iterable, Iterator
from functools import cache
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import op_def_registry

GraphDef, NodeDef = tf.compat.v1.GraphDef, tf.compat.v1.NodeDef
IGNORE = 1  # state of ops, such as a random generator's, which starts anew on data hosts


def graph_of(dataset: tf.data.Dataset) -> GraphDef:
    """Return a dataset's graph. Raises ValueError if a part of it cannot be sent."""
    try:
        graph = tf.raw_ops.DatasetToGraphV2(
            input_dataset=dataset._variant_tensor, external_state_policy=IGNORE
        )
    except tf.errors.FailedPreconditionError as error:
        raise ValueError(
            "distribute: TensorFlow cannot send this dataset to data hosts. If it is moved to a "
            "device, as by prefetch_to_device, do that after distribute."
        ) from error
    return GraphDef.FromString(graph.numpy())


def functions_of(graph: GraphDef) -> dict[str, Any]:
    """Return the functions of a graph, by name."""
    return {function.signature.name: function for function in graph.library.function}


class Nodes:
    """The nodes of a graph, or of one of its functions."""

    def __init__(self, nodes: Iterable[NodeDef], functions: dict[str, Any], endless: bool = False):
        """functions: those of the graph, by name.

        endless: whether a dataset may be endless that a function takes from outside of it.
        """
        self.nodes = {node.name: node for node in nodes}
        self.functions, self.endless_outside = functions, endless
        self.is_endless = cache(self.is_endless)
        for name in self.nodes:  # inputs come first, so that no recursion is deep
            self.is_endless(name)

    def inputs(self, node: NodeDef, pattern: str) -> list[str]:
        """Return the names of the nodes that feed those inputs of a node whose names match."""
        place, found, op = 0, [], op_def_registry.get(node.op)
        for argument in op.input_arg if op else ():
            count = node.attr[argument.number_attr].i if argument.number_attr else 1
            if argument.type_list_attr:
                count = len(node.attr[argument.type_list_attr].list.type)
            if re.fullmatch(pattern, argument.name):
                found += map(name_of, node.input[place : place + count])
            place += count
        return found

    def datasets(self, node: NodeDef) -> list[str]:
        """Return the datasets that a dataset takes its elements from."""
        return self.inputs(node, "(data_input|input|another)_datasets?|input")

    def upstream(self, name: str, until: Collection[str] = ()) -> Iterator[NodeDef]:
        """Yield a dataset and all that it takes elements from, but not what is above some ops."""
        todo, seen = [name], {name}
        while todo:
            node = self.nodes.get(todo.pop())
            if node is not None:
                yield node
                before = {*self.datasets(node)} - seen if op_of(node) not in until else set()
                todo += before
                seen |= before

    def argument(self, node: NodeDef, name: str) -> Any:
        """Return the value of a constant input of a node, or None if it is not constant."""
        [source] = [self.nodes.get(each) for each in self.inputs(node, name)] or [None]
        if source is None or source.op != "Const":
            return None
        return tf.make_ndarray(source.attr["value"].tensor).item()

    def called(self, node: NodeDef) -> list[Any]:
        """Return the functions that a node calls."""
        called = [each for value in node.attr.values() for each in (value.func, *value.list.func)]
        return [self.functions[each.name] for each in called if each.name]

    def is_endless(self, name: str) -> bool:
        """Return whether the elements of a dataset never end, as far as a graph tells."""
        node = self.nodes.get(name)
        if node is None:
            return self.endless_outside
        op = op_of(node)
        before = [self.is_endless(each) for each in self.datasets(node)]
        if op == "Range":
            return self.argument(node, "stop") == tf.int64.max
        if op in ("Repeat", "ShuffleAndRepeat"):
            count = self.argument(node, "count")
            return any(before) or (count is not None and count < 0)  # None: it is computed
        if op in ("Take", "TakeWhile"):
            return any(before) and op == "Take" and self.argument(node, "count") == -1
        if op == "Zip" or is_set(node, "stop_on_empty_dataset"):
            return all(before)
        return op == "Random" or any(before) or self.makes_endless(node)

    def makes_endless(self, node: NodeDef) -> bool:
        """Return whether a function of a flat_map or interleave makes datasets without end."""
        if not re.search("Interleave|FlatMap", op_of(node)):
            return False
        outside = any(map(self.is_endless, self.inputs(node, "other_arguments")))
        for function in self.called(node):
            nodes = Nodes(function.node_def, self.functions, outside or self.endless_outside)
            if any(nodes.is_endless(name_of(end)) for end in function.ret.values()):
                return True
        return False


def name_of(tensor: str) -> str:
    """Return the node that a tensor comes from: "range:handle:0" comes from "range"."""
    return re.sub(r"^\^|:.*", "", tensor)


def is_set(node: NodeDef, name: str) -> bool:
    """Return whether a node has an attribute and it is true. (Reading others would add them.)"""
    return name in node.attr and node.attr[name].b


def is_integer(node: NodeDef) -> bool:
    """Return whether a node makes or reads an integer, as the state of a generator is."""
    return tf.as_dtype(node.attr["dtype"].type).is_integer


def op_of(node: NodeDef) -> str:
    """Return the name of a dataset's op, such as Map for MapDatasetV2, or "" for other nodes."""
    match = re.fullmatch(r"(\w+?)Dataset(V\d+)?", node.op)
    return match[1] if match else ""
