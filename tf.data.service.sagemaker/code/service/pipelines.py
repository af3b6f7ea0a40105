"""Which pipelines give the same samples when tf.data.service runs them, and which do not.

Every worker runs the whole pipeline, and the dispatcher gives out the items of each *source*
independently: one file name, number or row at a time (ShardingPolicy.DYNAMIC). So an op that pairs
two sources, or that counts or remembers what passes through, sees only one worker's share, and
TensorFlow does not warn. Such ops are correct inside the function of an `interleave` or `flat_map`,
which handles one file.
"""

import re
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import tensorflow as tf

GraphDef, NodeDef = tf.compat.v1.GraphDef, tf.compat.v1.NodeDef
IGNORE = 1  # state of ops, such as a random generator's, which starts anew on data hosts
# With these ops each sample comes once in each pass, with its label, except as RULES say.
RIGHT = (
    "Range TensorSlice Tensor Random Concatenate Repeat Shuffle ShuffleAndRepeat Map ParallelMap "
    "MapAndBatch Filter FlatMap Interleave ParallelInterleave LegacyParallelInterleave "
    "DirectedInterleave GroupByWindow Batch ParallelBatch PaddedBatch Rebatch Unbatch "
    "IgnoreErrors Prefetch Options"
)


class Pipeline:
    """The graph of a dataset, as it is sent to the data hosts."""

    def __init__(self, dataset: tf.data.Dataset):
        graph = tf.raw_ops.DatasetToGraphV2(
            input_dataset=dataset._variant_tensor, external_state_policy=IGNORE
        )
        self.graph = GraphDef.FromString(graph.numpy())
        self.nodes = {node.name: node for node in self.graph.node}
        self.functions = {f.signature.name: f.node_def for f in self.graph.library.function}

    def inputs(self, node: NodeDef) -> list[NodeDef]:
        return [self.nodes[re.sub(r"^\^|:\d+$", "", name)] for name in node.input]

    def above(self, node: NodeDef) -> Iterator[NodeDef]:
        """Yield a node and everything that comes before it."""
        yield node
        for each in self.inputs(node):
            yield from self.above(each)

    def argument(self, node: NodeDef, place: int) -> Any:
        """Return the value of one of a node's constant inputs."""
        return value(self.inputs(node)[place])

    def is_endless(self, node: NodeDef) -> bool:
        """Return whether a node is an endless `repeat()` or range, or has one before it."""
        op, counts = op_of(node), {"Repeat": 1, "ShuffleAndRepeat": 4}
        if op == "Range" and self.argument(node, 1) == tf.int64.max:
            return True
        if op in counts and self.argument(node, counts[op]) < 0:
            return True
        if op == "DirectedInterleave":
            ends = [self.is_endless(each) for each in self.inputs(node)[1:]]
            return all(ends) if node.attr["stop_on_empty_dataset"].b else any(ends)
        return any(self.is_endless(each) for each in self.inputs(node))


class Rule(NamedTuple):
    """Ops to refuse: what users call them, what would go wrong, and what to do instead."""

    ops: str
    name: str
    wrong: str
    instead: str
    applies: Callable[[Pipeline, NodeDef], bool] = lambda pipeline, node: True


def after_shuffle(pipeline: Pipeline, node: NodeDef) -> bool:
    ops = {op_of(each) for each in pipeline.above(node)}
    return not ops.isdisjoint({"Shuffle", "Repeat", "ShuffleAndRepeat"})


def is_no_choice(pipeline: Pipeline, node: NodeDef) -> bool:
    """Return whether random numbers are used for anything but sample_from_datasets."""
    choosing = [each for each in pipeline.graph.node if op_of(each) == "DirectedInterleave"]
    chosen_by = [each.name for one in choosing for each in pipeline.above(pipeline.inputs(one)[0])]
    return node.name not in chosen_by


def is_not_random(pipeline: Pipeline, node: NodeDef) -> bool:
    return "Random" not in map(op_of, pipeline.above(pipeline.inputs(node)[0]))


def stops(pipeline: Pipeline, node: NodeDef) -> bool:
    return node.attr["stop_on_empty_dataset"].b and not pipeline.is_endless(node)


def joins_neighbours(pipeline: Pipeline, node: NodeDef) -> bool:
    """Return whether a node makes batches of batches."""
    before = pipeline.inputs(node)[0]
    while op_of(before) in ("Map", "ParallelMap", "Shuffle", "Repeat", "Prefetch", "Filter"):
        before = pipeline.inputs(before)[0]
    return op_of(before) in BATCHES.split()


def drops(pipeline: Pipeline, node: NodeDef) -> bool:
    return bool(pipeline.argument(node, -1)) and not pipeline.is_endless(node)


def drops_within(pipeline: Pipeline, node: NodeDef) -> bool:
    """Return whether the function for a group does anything but map it and batch all of it."""
    nodes = {each.name: each for each in pipeline.functions[node.attr["reduce_func"].func.name]}
    for each in nodes.values():
        if op_of(each) in BATCHES.split():
            last = nodes.get(each.input[-1].split(":")[0])
            if last is None or last.op != "Const" or value(last):
                return True
        elif op_of(each) not in ("", "Map", "ParallelMap"):
            return True
    return False


BATCHES = "Batch ParallelBatch PaddedBatch MapAndBatch"
IN_PYTHON = "split the files or rows in Python, before you make a dataset of them"
READS_ALL = "each worker would read all of the data"
# fmt: off
RULES = [
    Rule("Zip", "a zip, an enumerate, or a Keras utility like image_dataset_from_directory",
         "samples would get the labels or numbers of other samples",
         "put what belongs together into one source: from_tensor_slices((paths, labels))"),
    Rule("Scan", "a scan, or Dataset.counter", "each worker would keep its own count or state",
         "count in the source, for example with Dataset.range(tf.int64.max)"),
    Rule("Random", "a Dataset.random", "workers could draw the same numbers",
         "call tf.random.stateless_uniform in map, with a seed from the sample", is_no_choice),
    Rule("Take", "a take", "each worker would take that many", IN_PYTHON,
         lambda pipeline, node: pipeline.argument(node, 1) >= 0),
    Rule("Skip", "a skip", "each worker would skip that many", IN_PYTHON,
         lambda pipeline, node: pipeline.argument(node, 1) != 0),
    Rule("TakeWhile", "a take_while", "each worker would stop on its own", "use filter"),
    Rule("Shard", "a shard", "the other shards would never be read",
         "call shard only if HETERO_DATA_HOSTS is empty",
         lambda pipeline, node: pipeline.argument(node, 1) != 1),
    Rule("Cache", "a cache", "each worker would repeat its own share forever, or lose it",
         "remove it"),
    Rule("Window", "a window", "it would join samples that are not adjacent",
         "call window inside the function of flat_map, for one file"),
    Rule("Unique", "a unique", "a sample could come once from each worker",
         "remove duplicates before you make the dataset"),
    Rule("AssertCardinality", "an assert_cardinality", "no worker has all samples",
         "call it after distribute, or pass ReadConfig(assert_cardinality=False) to tfds"),
    Rule("DataService", "a distribute", "it would be distributed twice", "call distribute once"),
    Rule("Interleave", "an interleave after shuffle, list_files or repeat", READS_ALL,
         "pass num_parallel_calls=tf.data.AUTOTUNE to interleave, or shuffle=False to list_files",
         after_shuffle),
    Rule("GroupByWindow", "a bucket_by_sequence_length or group_by_window after shuffle or repeat",
         READS_ALL, "call shuffle and repeat after it", after_shuffle),
    Rule("GroupByWindow", "a group_by_window that may drop part of a group",
         "each worker would drop part of its own groups", "let it batch the whole group",
         drops_within),
    Rule("DirectedInterleave", "a choose_from_datasets",
         "each worker would make only some of the choices", "use sample_from_datasets",
         is_not_random),
    Rule("DirectedInterleave", "a sample_from_datasets with stop_on_empty_dataset=True",
         "each worker would stop on its own", "call repeat() on each of the datasets", stops),
    Rule(BATCHES, "a batch of batches", "it would join samples that are not adjacent",
         "make sequences inside the function of flat_map, for one file", joins_neighbours),
    Rule(f"{BATCHES} Rebatch", "a batch with drop_remainder=True",
         "each worker would drop samples in each pass",
         "call repeat() before it, or keep the remainder", drops),
]
# fmt: on
KNOWN = {*RIGHT.split(), *(op for rule in RULES for op in rule.ops.split())}


def check(dataset: tf.data.Dataset, allow: Collection[str] = ()) -> bool:
    """Return whether a dataset is endless. Raise ValueError if data hosts would get it wrong.

    allow: ops to accept anyway, by TensorFlow's names without "Dataset", such as "Scan".
    """
    pipeline = Pipeline(dataset)
    for node in pipeline.graph.node:
        op = op_of(node)
        for rule in RULES:
            if op in rule.ops.split() and op not in allow and rule.applies(pipeline, node):
                refuse(rule.name, rule.wrong, rule.instead)
        if op and op not in KNOWN and op not in allow:
            refuse(
                f"a {op}Dataset, which has not been tested here",
                "samples might be lost, repeated or mixed up",
                f"remove it, or count the samples yourself and then pass allow=[{op!r}]",
            )
    for nodes in pipeline.functions.values():
        if any(":" not in node.attr["token"].s.decode() for node in nodes if "PyFunc" in node.op):
            refuse(
                "a Python function (py_function, numpy_function, from_generator)",
                "data hosts do not have it",
                "use service.numpy_function, or PyTorch's loader, which Keras accepts too",
            )
        ops = " ".join(node.op for node in nodes)
        # A Keras layer that draws random numbers assigns its generator's state: that is harmless.
        is_assigned = "AssignVariableOp" in ops and "Random" not in ops
        if is_assigned or re.search("Assign(Add|Sub)VariableOp|LookupTableInsert", ops):
            refuse(
                "a variable or table that changes", "each worker has its own", "count in the source"
            )
    [end] = [node for node in pipeline.graph.node if node.op == "_Retval"]
    return pipeline.is_endless(end)


def refuse(name: str, wrong: str, instead: str) -> None:
    raise ValueError(f"distribute: the pipeline has {name}: {wrong}. Instead, {instead}.")


def value(node: NodeDef) -> Any:
    """Return the value of a constant."""
    return tf.make_ndarray(node.attr["value"].tensor).item()


def op_of(node: NodeDef) -> str:
    """Return the name of a dataset's op, such as Map for MapDatasetV2, or "" for other nodes."""
    match = re.fullmatch(r"(\w+?)Dataset(V\d+)?", node.op)
    return match[1] if match else ""
