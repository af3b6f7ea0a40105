"""Which pipelines give the same samples when tf.data.service runs them, and which do not.

Every worker runs the whole pipeline, and the dispatcher gives out the items of each *source*
independently: one file name, number or row at a time (ShardingPolicy.DYNAMIC). So an op that pairs
two sources, or that counts or remembers what passes through, sees only one worker's share, and
TensorFlow does not warn. Such ops are correct inside the function of an `interleave` or `flat_map`,
which handles one file, and in a dataset that such a function uses: every worker reads all of it.
"""

from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.python.framework.function_def_to_graph import function_def_to_graph

from service.graph import GraphDef, NodeDef, Nodes, functions_of, is_set, op_of

# With these ops each sample comes once in each pass, with its label, except as RULES say.
RIGHT = (
    "Range TensorSlice Tensor Random Concatenate Repeat Shuffle ShuffleAndRepeat Map ParallelMap "
    "MapAndBatch Filter FlatMap Interleave ParallelInterleave LegacyParallelInterleave "
    "DirectedInterleave GroupByWindow Batch ParallelBatch PaddedBatch DenseToSparseBatch Rebatch "
    "Unbatch ParseExample IgnoreErrors Prefetch Options"
)
RESTARTS = ("Shuffle", "Repeat", "ShuffleAndRepeat")
BATCHES = "Batch ParallelBatch PaddedBatch MapAndBatch DenseToSparseBatch"
MANY = 5040  # samples in a batch whose size is not known


class Rule(NamedTuple):
    """Ops to refuse: what users call them, what would go wrong, and what to do instead."""

    ops: str
    name: str
    wrong: str
    instead: str
    applies: Callable[[Nodes, NodeDef], bool] = lambda nodes, node: True


def within(nodes: Nodes, node: NodeDef) -> Iterator[NodeDef]:
    """Yield the nodes of the functions that a node calls, and of the datasets that these use."""
    for name in nodes.inputs(node, ".*other_arguments"):
        yield from nodes.upstream(name)
    for function in nodes.called(node):
        inner = Nodes(function.node_def, nodes.functions)
        for each in function.node_def:
            yield each
            yield from within(inner, each)


def after_shuffle(nodes: Nodes, node: NodeDef) -> bool:
    return any(op_of(each) in RESTARTS for each in nodes.upstream(node.name))


def shuffles_within(nodes: Nodes, node: NodeDef) -> bool:
    return any(op_of(each) in RESTARTS for each in within(nodes, node))


def is_chosen(nodes: Nodes, node: NodeDef) -> bool:
    """Return whether anything but random numbers chooses the next dataset."""
    [selector] = nodes.inputs(node, "selector_input_dataset")
    return not {op_of(each) for each in nodes.upstream(selector)} <= {"Random", "Batch", "Map"}


def stops(nodes: Nodes, node: NodeDef) -> bool:
    return is_set(node, "stop_on_empty_dataset") and not nodes.is_endless(node.name)


def takes_batches(nodes: Nodes, node: NodeDef) -> bool:
    """Return whether the elements that a node takes are batches."""
    ops = {
        op_of(n) for name in nodes.datasets(node) for n in nodes.upstream(name, until=["Unbatch"])
    }
    return not ops.isdisjoint([*BATCHES.split(), "GroupByWindow"])


def joins_samples(nodes: Nodes, node: NodeDef) -> bool:
    """Return whether a map makes fewer rows of the samples of a batch, such as by a reshape."""
    if not takes_batches(nodes, node):
        return False
    batches = [each for each in nodes.upstream(node.name) if op_of(each) in BATCHES.split()]
    size = (nodes.argument(batches[0], "batch_size") if batches else None) or MANY
    return any(makes_fewer(nodes, function, size) for function in nodes.called(node))


def makes_fewer(nodes: Nodes, function: Any, size: int) -> bool:
    """Return whether TensorFlow infers that a function makes fewer rows of so many samples.

    It infers nothing from calls, so a function that makes the result is looked at itself.
    """
    tried, rows = type(function)(), 0
    tried.CopyFrom(function)
    for place in range(len(tried.signature.input_arg)):
        for shape in tried.arg_attr[place].attr["_output_shapes"].list.shape:
            if shape.dim and shape.dim[0].size == -1:
                shape.dim[0].size = size
            rows = rows or (shape.dim[0].size if shape.dim else 0)  # of the first part of a batch
    try:
        graph = function_def_to_graph(tried)
    except ValueError:  # so it would fail without data hosts, too
        return False
    # A variant is a sparse or ragged tensor.
    outputs = [e for e in graph.outputs if e.dtype != tf.variant and depends(e, graph.inputs)]
    for output in outputs:
        op = output.op
        while op.type == "Identity":
            op = op.inputs[0].op
        if any(makes_fewer(nodes, each, size) for each in nodes.called(op.node_def)):
            return True
    shapes = [each.shape for each in outputs]
    is_number = rows > 1 and bool(shapes) and all(shape.rank == 0 for shape in shapes)
    return is_number or any(shape.rank and (shape[0] or rows) < rows for shape in shapes)


def depends(tensor: tf.Tensor, inputs: Collection[tf.Tensor]) -> bool:
    """Return whether a tensor of a graph is computed from any of its inputs."""
    todo, seen, wanted = [tensor.op], set(), {each.op.name for each in inputs}
    while todo:
        op = todo.pop()
        if op.name in wanted:
            return True
        if op.name not in seen:
            seen.add(op.name)
            todo += [each.op for each in op.inputs]
    return False


def splits_at_random(nodes: Nodes, node: NodeDef) -> bool:
    """Return whether a filter may follow random numbers that have a seed."""
    functions = [each for one in nodes.upstream(node.name) for each in within(nodes, one)]
    return any(each.attr[seed].i for each in functions for seed in {"seed", "seed2"} & {*each.attr})


def drops(nodes: Nodes, node: NodeDef) -> bool:
    [before] = nodes.datasets(node)
    return bool(nodes.argument(node, "drop_remainder")) and not nodes.is_endless(before)


def drops_within(nodes: Nodes, node: NodeDef) -> bool:
    """Return whether the function for a group does more than map, shuffle and batch all of it."""
    function = nodes.functions[node.attr["reduce_func"].func.name]
    body = Nodes(function.node_def, nodes.functions)
    return any(
        body.argument(each, "drop_remainder") is not False
        if op_of(each) in BATCHES.split()
        else op_of(each) not in ("", "Map", "ParallelMap", "Shuffle", "Prefetch")
        for each in body.nodes.values()
    )


IN_PYTHON = "split the files or rows in Python, the same in all ranks, before you make a dataset"
READS_ALL = "each worker would read all of the data"
# fmt: off
RULES = [
    Rule("Snapshot", "a snapshot", "each worker would keep its own share", "remove it"),
    Rule("CSV Load", "a CsvDataset or Dataset.load", "TensorFlow cannot divide it among workers",
         "read each file in the function of a flat_map over the names of the files"),
    Rule("DirectedInterleave",
         "a choose_from_datasets, a rejection_resample, or weights that are a dataset",
         "each worker would make only some of the choices",
         "use sample_from_datasets with a list of weights", is_chosen),
    Rule("Zip", "a zip, an enumerate, or a Keras utility like image_dataset_from_directory",
         "samples would get the labels or numbers of other samples",
         "put what belongs together into one source: from_tensor_slices((paths, labels))"),
    Rule("Scan", "a scan, or Dataset.counter", "each worker would keep its own count or state",
         "count in the source, for example with Dataset.range(tf.int64.max)"),
    Rule("Random", "a Dataset.random", "workers could draw the same numbers",
         "call tf.random.uniform in map"),
    Rule("Take", "a take", "each worker would take that many", IN_PYTHON,
         lambda nodes, node: nodes.argument(node, "count") != -1),
    Rule("Skip", "a skip", "each worker would skip that many", IN_PYTHON,
         lambda nodes, node: nodes.argument(node, "count") != 0),
    Rule("TakeWhile", "a take_while", "each worker would stop on its own", "use filter"),
    Rule("Shard", "a shard", "the other shards would never be read",
         "call shard only if HETERO_DATA_HOSTS is empty",
         lambda nodes, node: nodes.argument(node, "num_shards") != 1),
    Rule("Cache", "a cache", "each worker would repeat its own share forever, or lose it",
         "remove it; tfds adds one, unless you pass it ReadConfig(try_autocache=False)"),
    Rule("Window", "a window", "it would join samples that are not adjacent",
         "call window inside the function of flat_map, for one file"),
    Rule("Unique", "a unique", "a sample could come once from each worker",
         "remove duplicates before you make the dataset"),
    Rule("AssertCardinality", "an assert_cardinality", "no worker has all samples",
         "call it after distribute, or pass ReadConfig(assert_cardinality=False) to tfds"),
    Rule("DataService", "a distribute", "it would be distributed twice", "call distribute once"),
    Rule("FlatMap Interleave ParallelInterleave LegacyParallelInterleave",
         "an interleave or flat_map whose function makes a dataset without end",
         "a worker would never read the rest of its share", "call repeat() after it",
         Nodes.makes_endless),
    Rule("Interleave", "an interleave after shuffle, list_files or repeat", READS_ALL,
         "pass num_parallel_calls=tf.data.AUTOTUNE to interleave, or shuffle=False to list_files",
         after_shuffle),
    Rule("Interleave LegacyParallelInterleave",
         "an interleave whose function shuffles or repeats", READS_ALL,
         "pass num_parallel_calls=tf.data.AUTOTUNE to interleave", shuffles_within),
    Rule("GroupByWindow", "a bucket_by_sequence_length or group_by_window after shuffle or repeat",
         READS_ALL, "call shuffle and repeat after it", after_shuffle),
    Rule("GroupByWindow", "a group_by_window that may drop part of a group",
         "each worker would drop part of its own groups", "let it batch the whole group",
         drops_within),
    Rule("Filter", "a filter with random numbers that have a seed",
         "workers draw other numbers, so that a validation set would contain training samples",
         "split by a hash of the sample, such as tf.strings.to_hash_bucket_fast(name, 10) < 8; or, "
         "if it is no split, remove the seed or filter before other ops draw random numbers",
         splits_at_random),
    Rule("DirectedInterleave", "a sample_from_datasets with stop_on_empty_dataset=True",
         "each worker would stop on its own", "call repeat() on each of the datasets", stops),
    Rule(f"{BATCHES} GroupByWindow", "a batch of batches",
         "it would join samples that are not adjacent",
         "make sequences inside the function of flat_map, for one file, or undo the first batch "
         "with unbatch()", takes_batches),
    Rule("Map ParallelMap", "a map that turns a batch into fewer rows, such as by a reshape",
         "it would join samples that are not adjacent",
         "make sequences inside the function of flat_map, for one file, or, if it is no sequence, "
         "map after distribute", joins_samples),
    Rule(f"{BATCHES} Rebatch", "a batch with drop_remainder=True",
         "each worker would drop samples in each pass",
         "call repeat() before it, or keep the remainder", drops),
]
# fmt: on
KNOWN = {*RIGHT.split(), *(op for rule in RULES for op in rule.ops.split())}


def end_of(graph: GraphDef) -> str:
    """Return the node of the dataset that the graph makes."""
    [end] = [node.name for node in graph.node if node.op == "_Retval"]
    return end


def is_endless(graph: GraphDef) -> bool:
    """Return whether a dataset is endless, as far as its graph tells."""
    return Nodes(graph.node, functions_of(graph)).is_endless(end_of(graph))


def check(graph: GraphDef, allow: Collection[str] = ()) -> None:
    """Raise ValueError if data hosts would get a dataset wrong.

    allow: ops to accept anyway, by TensorFlow's names without "Dataset", such as "Scan".
    """
    functions = functions_of(graph)
    nodes = Nodes(graph.node, functions)
    upstream = nodes.upstream(end_of(graph))
    shared = [(nodes, node) for node in upstream if op_of(node) not in ("", *allow)]
    bodies = [Nodes(each.node_def, functions) for each in functions.values()]
    in_functions = [(body, node) for body in bodies for node in body.nodes.values()]
    for rule in RULES:
        for where, node in [*shared, *(in_functions if rule.ops == "Filter" else ())]:
            if op_of(node) in rule.ops.split() and rule.applies(where, node):
                refuse(rule.name, rule.wrong, rule.instead)
    for op in (op_of(node) for _, node in shared):
        if op not in KNOWN:
            refuse(
                f"a {op}Dataset, which has not been tested here",
                "samples might be lost, repeated or mixed up",
                f"remove it, or count the samples yourself and then pass allow=[{op!r}]",
            )
    for function in functions.values():
        for node in function.node_def:
            if "PyFunc" in node.op and ":" not in node.attr["token"].s.decode():
                refuse(
                    "a Python function (py_function, numpy_function, from_generator)",
                    "data hosts do not have it",
                    "use service.numpy_function, or PyTorch's loader, which Keras accepts too",
                )


def refuse(name: str, wrong: str, instead: str) -> None:
    raise ValueError(f"distribute: the pipeline has {name}: {wrong}. Instead, {instead}.")
