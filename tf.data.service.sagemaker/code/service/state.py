"""What a pipeline carries: random numbers, variables and tables.

Every worker would start each epoch with the state that the pipeline had when it was sent: it would
draw the same random numbers as the other workers, in every epoch. `renew` makes all of them draw
numbers of their own, and refuses other state that can change.
"""

import re
from collections.abc import Collection
from typing import Any

import tensorflow as tf
from tensorflow.core.framework.types_pb2 import DT_INT32, DT_INT64, DT_RESOURCE
from tensorflow.python.framework import op_def_registry

from service.graph import GraphDef, NodeDef, Nodes, functions_of, is_integer, is_set, name_of, op_of
from service.refusals import refuse

SEEDS = {"seed", "seed2"}  # attributes of an op
WRITE = r"Assign\w*VariableOp"
SEEDED = r"Stateless(?!If|While|Case)\w+"  # they draw numbers from a seed that they are given
CONSTANT = ("LookupTableFind", "LookupTableSize")  # in a table that is not mutable


def has_op_seeds(graph: GraphDef) -> bool:
    """Return whether ops of a graph, other than shuffles, have seeds."""
    nodes = [node for function in graph.library.function for node in function.node_def]
    return any(node.attr[name].i for node in nodes for name in SEEDS & {*node.attr})


def renew(graph: GraphDef, allow: Collection[str] = ()) -> None:
    """Let a graph draw new random numbers in each worker and epoch.

    Seeds become 0, by which TensorFlow means none. What a function reads of the state of a
    generator, such as a Keras layer's, is increased by a random number in each call. Raises
    ValueError for other state that can change, unless its op is in `allow`.
    """
    nodes = Nodes(graph.node, functions_of(graph))
    for node in graph.node:
        if "Shuffle" in op_of(node) and is_set(node, "reshuffle_each_iteration"):
            for seed in nodes.inputs(node, "seed2?"):
                tensor = nodes.nodes[seed].attr["value"].tensor
                tensor.CopyFrom(tf.make_tensor_proto(0, tf.int64))
        captured = [nodes.nodes[name] for name in nodes.inputs(node, ".*other_arguments")]
        variables = [nodes.nodes[nodes.nodes[n].input[1]] for n in writers(nodes, captured)]
        values = [each.attr["value"].SerializeToString() for each in variables if is_integer(each)]
        refuse_shared_seeds(values)
        if any(each.op == "Const" and each.attr["dtype"].type == DT_RESOURCE for each in captured):
            refuse(
                "an iterator, queue or DenseHashTable from outside",
                "data hosts do not have it",
                "make a dataset of what it has, or use a StaticHashTable",
            )
        if node.op.startswith("Mutable"):
            check_use(node.op, allow)
    for function in graph.library.function:
        seeds = [
            (node.attr["seed"].i, node.attr["seed2"].i)
            for node in function.node_def
            if "seed2" in node.attr
        ]
        refuse_shared_seeds([each for each in seeds if any(each)])
        for node in function.node_def:
            for seed in SEEDS & {*node.attr}:
                node.attr[seed].i = 0
        renew_state(function, allow)


def renew_state(function: Any, allow: Collection[str]) -> None:
    """Renew the state of the generators that a function gets, and check its other state."""
    generators = {
        argument.name: is_generator(function, argument.name)
        for argument in function.signature.input_arg
        if argument.type == DT_RESOURCE
    }
    for node in [*function.node_def]:
        op = op_def_registry.get(node.op)
        for argument, source in zip(op.input_arg if op else (), node.input, strict=False):
            if argument.type != DT_RESOURCE or source not in generators:
                continue
            reads = node.op == "ReadVariableOp" and generators[source]
            if reads or node.op == "RngReadAndSkip":
                increase(function, node)
            elif not generators[source]:
                check_use(node.op, allow)


def is_generator(function: Any, variable: str) -> bool:
    """Return whether a function advances a variable, and uses it for seeds and nothing else."""
    uses = [node for node in function.node_def if node.input and node.input[0] == variable]
    reads = [node for node in uses if node.op == "ReadVariableOp"]
    if not all(map(is_integer, reads)):
        return False
    depends, before, seeds = {node.name for node in reads}, 0, False
    while len(depends) > before:
        before = len(depends)
        for node in function.node_def:
            if depends.isdisjoint(name_of(each) for each in node.input if each[0] != "^"):
                continue
            calls = any(value.func.name or value.list.func for value in node.attr.values())
            writes = re.fullmatch(WRITE, node.op)
            op = op_def_registry.get(node.op)
            names = [argument.name for argument in op.input_arg] if op else []
            given = {
                name
                for name, source in zip(names, node.input, strict=False)
                if name_of(source) in depends
            }
            if re.fullmatch(SEEDED, node.op) and given == {"seed"}:
                seeds = True
            elif calls or (writes and node.input[0] != variable):
                return False
            else:
                depends.add(node.name)
    advances = any(re.fullmatch(WRITE, node.op) for node in uses)
    return seeds and advances and depends.isdisjoint(map(name_of, function.ret.values()))


def increase(function: Any, node: NodeDef) -> None:
    """Add a random number to what a node of a function reads, the same one in the whole call."""
    kind = DT_INT64 if node.op == "RngReadAndSkip" else node.attr["dtype"].type
    variable, name = node.input[0], node.name
    number = f"{variable}/random"
    if all(each.name != number for each in function.node_def):
        add(function, f"{number}/shape", "Const", dtype=DT_INT32, value=tf.zeros([0], tf.int32))
        add(function, f"{number}/least", "Const", dtype=DT_INT64, value=0)
        most = 2**62 if kind == DT_INT64 else 2**31 - 1
        add(function, f"{number}/most", "Const", dtype=DT_INT64, value=most)
        inputs = [f"{number}/{each}:output:0" for each in ("shape", "least", "most")]
        add(function, f"{number}/wide", "RandomUniformInt", inputs, T=DT_INT32, Tout=DT_INT64)
        add(function, number, "Cast", [f"{number}/wide:output:0"], SrcT=DT_INT64, DstT=kind)
    read = function.node_def.add()
    read.CopyFrom(node)
    read.name = f"{name}/read"
    node.CopyFrom(NodeDef(name=name, op="AddV2", input=[f"{read.name}:value:0", f"{number}:y:0"]))
    node.attr["T"].type = kind
    for each in function.node_def:
        for place, tensor in enumerate(each.input):
            if tensor == f"{name}:value:0":
                each.input[place] = f"{name}:z:0"


def add(function: Any, name: str, op: str, inputs: Collection[str] = (), **attributes: Any) -> None:
    """Add a node to a function, whose attributes are types, but for a constant's value."""
    node = function.node_def.add(name=name, op=op, input=inputs)
    value = attributes.pop("value", None)
    if value is not None:
        kind = tf.as_dtype(attributes["dtype"])
        node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value, kind))
    for attribute, kind in attributes.items():
        node.attr[attribute].type = kind


def writers(nodes: Nodes, captured: Collection[NodeDef]) -> list[str]:
    """Return the nodes that write the first values of those variables that a dataset captures."""
    names = [name_of(each) for node in captured if node.op == "Identity" for each in node.input]
    return [name for name in names if nodes.nodes[name].op == "AssignVariableOp"]


def refuse_shared_seeds(seeds: list[Any]) -> None:
    """Raise ValueError if two have the same seed, since they would draw different numbers there."""
    if len({*seeds}) < len(seeds):
        refuse(
            "two random ops, layers or generators with the same seed",
            "they would draw different numbers, for example for an image and its mask",
            "draw once, for tf.concat([image, mask], -1), or pass one seed to stateless ops; if "
            "they need not be alike, remove the seeds",
        )


def check_use(op: str, allow: Collection[str]) -> None:
    """Raise ValueError if an op uses something that can change."""
    op = re.sub(r"V\d+$", "", op)
    if op not in CONSTANT and op not in allow:
        refuse(
            f"a variable or table that can change ({op})",
            "data hosts would keep the value that it has now, or count on their own",
            "pass its value, tf.constant(variable), or use a StaticHashTable; if it never changes, "
            f"distribute(dataset, allow=[{op!r}])",
        )
