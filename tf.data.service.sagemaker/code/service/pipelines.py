"""Which pipelines keep their meaning when tf.data.service shares them out, and which do not.

Every worker runs the whole pipeline, and the dispatcher shares out each of its *sources* by itself:
one file name, number or row at a time (ShardingPolicy.DYNAMIC). So what pairs two sources, counts,
or remembers what has passed by does so for one worker's share, and TensorFlow says nothing. Inside
the function of an `interleave` or `flat_map`, which is about one file, it is right.
"""

import re
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import tensorflow as tf

GraphDef, NodeDef = tf.compat.v1.GraphDef, tf.compat.v1.NodeDef
IGNORE = 1  # what ops remember, such as a generator's state: it begins anew on data hosts
# With these each sample comes once in each pass, with its label, but for what RULES say.
RIGHT = (
    "Range TensorSlice Tensor Random Concatenate Repeat Shuffle ShuffleAndRepeat Map ParallelMap "
    "MapAndBatch Filter FlatMap Interleave ParallelInterleave LegacyParallelInterleave "
    "DirectedInterleave GroupByWindow Batch ParallelBatch PaddedBatch Rebatch Unbatch "
    "IgnoreErrors Prefetch Options"
)


class Pipeline:
    """The graph of a dataset, as it goes to the data hosts."""

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
        """Yield a node, and all that comes before it."""
        yield node
        for each in self.inputs(node):
            yield from self.above(each)

    def argument(self, node: NodeDef, place: int) -> Any:
        """Return the value of one of a node's inputs."""
        return value(self.inputs(node)[place])

    def is_endless(self, node: NodeDef) -> bool:
        """Whether it has a `repeat()`, or a range without end, before it or in itself."""
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
    """What is refused, by what people call it; what would go wrong; what to do instead."""

    ops: str
    name: str
    wrong: str
    instead: str
    applies: Callable[[Pipeline, NodeDef], bool] = lambda pipeline, node: True


def after_shuffle(pipeline: Pipeline, node: NodeDef) -> bool:
    ops = {op_of(each) for each in pipeline.above(node)}
    return not ops.isdisjoint({"Shuffle", "Repeat", "ShuffleAndRepeat"})


def is_no_choice(pipeline: Pipeline, node: NodeDef) -> bool:
    """Whether random numbers are for anything but sample_from_datasets."""
    choosing = [each for each in pipeline.graph.node if op_of(each) == "DirectedInterleave"]
    chosen_by = [each.name for one in choosing for each in pipeline.above(pipeline.inputs(one)[0])]
    return node.name not in chosen_by


def is_not_random(pipeline: Pipeline, node: NodeDef) -> bool:
    return "Random" not in map(op_of, pipeline.above(pipeline.inputs(node)[0]))


def stops(pipeline: Pipeline, node: NodeDef) -> bool:
    return node.attr["stop_on_empty_dataset"].b and not pipeline.is_endless(node)


def joins_neighbours(pipeline: Pipeline, node: NodeDef) -> bool:
    """Whether it makes batches of batches."""
    before = pipeline.inputs(node)[0]
    while op_of(before) in ("Map", "ParallelMap", "Shuffle", "Repeat", "Prefetch", "Filter"):
        before = pipeline.inputs(before)[0]
    return op_of(before) in BATCHES.split()


def drops(pipeline: Pipeline, node: NodeDef) -> bool:
    return bool(pipeline.argument(node, -1)) and not pipeline.is_endless(node)


def drops_within(pipeline: Pipeline, node: NodeDef) -> bool:
    """Whether the function that makes something of a group does anything but batch all of it."""
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
IN_PYTHON = "share out the files or rows in Python, before they become a dataset"
READS_ALL = "every worker would read everything"
# fmt: off
RULES = [
    Rule("Zip", "a zip, enumerate, image_dataset_from_directory or the like of Keras",
         "samples would get labels and numbers of others",
         "make one source of what belongs together, from_tensor_slices((paths, labels))"),
    Rule("Scan", "a scan, or Dataset.counter", "each worker would begin its own count or state",
         "count in the source, as with Dataset.range(tf.int64.max)"),
    Rule("Random", "a Dataset.random", "workers would draw the same numbers",
         "draw in map, by tf.random.stateless_uniform, a seed from the sample", is_no_choice),
    Rule("Take", "a take", "each worker would take so many", IN_PYTHON,
         lambda pipeline, node: pipeline.argument(node, 1) >= 0),
    Rule("Skip", "a skip", "each worker would skip so many", IN_PYTHON,
         lambda pipeline, node: pipeline.argument(node, 1) != 0),
    Rule("TakeWhile", "a take_while", "each worker would end by itself", "filter"),
    Rule("Shard", "a shard", "the other shards would never come",
         "call it only where HETERO_DATA_HOSTS is empty",
         lambda pipeline, node: pipeline.argument(node, 1) != 1),
    Rule("Cache", "a cache", "each worker would repeat its own share for ever, or lose it",
         "leave it out"),
    Rule("Window", "a window", "it would join samples that are no neighbours",
         "call it inside the function of flat_map, for one file"),
    Rule("Unique", "a unique", "a sample would come once from each worker", "do it beforehand"),
    Rule("AssertCardinality", "an assert_cardinality", "no worker has all samples",
         "call it afterwards, or give tfds ReadConfig(assert_cardinality=False)"),
    Rule("DataService", "a distribute", "it would be shared out twice", "call it once"),
    Rule("Interleave", "an interleave after shuffle, list_files or repeat", READS_ALL,
         "give interleave num_parallel_calls=tf.data.AUTOTUNE, or list_files shuffle=False",
         after_shuffle),
    Rule("GroupByWindow", "a bucket_by_sequence_length or group_by_window after shuffle or repeat",
         READS_ALL, "shuffle and repeat after it", after_shuffle),
    Rule("GroupByWindow", "a group_by_window that drops or takes some of a group",
         "each worker would for its own groups", "let it batch all of a group", drops_within),
    Rule("DirectedInterleave", "a choose_from_datasets", "each worker would make some choices only",
         "sample_from_datasets", is_not_random),
    Rule("DirectedInterleave", "a sample_from_datasets with stop_on_empty_dataset=True",
         "each worker would stop by itself", "repeat() each of the datasets", stops),
    Rule(BATCHES, "a batch of batches", "it would join samples that are no neighbours",
         "make sequences in the function of flat_map, for one file", joins_neighbours),
    Rule(f"{BATCHES} Rebatch", "a batch with drop_remainder=True",
         "each worker would drop samples in each pass", "repeat() before it, or keep all", drops),
]
# fmt: on
KNOWN = {*RIGHT.split(), *(op for rule in RULES for op in rule.ops.split())}


def check(dataset: tf.data.Dataset, allow: Collection[str] = ()) -> bool:
    """Return whether a dataset is endless; raise ValueError if it cannot be shared out.

    allow: ops that would be refused, by TensorFlow's names without Dataset, such as "Scan".
    """
    pipeline = Pipeline(dataset)
    for node in pipeline.graph.node:
        op = op_of(node)
        for rule in RULES:
            if op in rule.ops.split() and op not in allow and rule.applies(pipeline, node):
                refuse(rule.name, rule.wrong, rule.instead)
        if op and op not in KNOWN and op not in allow:
            refuse(
                f"a {op}Dataset, which nobody has tried here",
                "its samples might be others",
                f"leave it out, or count the samples, and then allow=[{op!r}]",
            )
    for nodes in pipeline.functions.values():
        if any(":" not in node.attr["token"].s.decode() for node in nodes if "PyFunc" in node.op):
            refuse(
                "a Python function (py_function, numpy_function, from_generator)",
                "data hosts do not have it",
                "call service.numpy_function, or take PyTorch's loader, which Keras knows, too",
            )
        ops = " ".join(node.op for node in nodes)
        # A Keras layer with random numbers assigns its generator's state.
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
    """Return a dataset's op, such as Map for MapDatasetV2; "" for another node."""
    match = re.fullmatch(r"(\w+?)Dataset(V\d+)?", node.op)
    return match[1] if match else ""
