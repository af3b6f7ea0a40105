"""How the ranks of a training keep in step: by TensorFlow's own collectives, or by Horovod's.

A rank is a process with a GPU, if there are any, and a share of its host's cores. Either class
here says which one this is, `rank` of `size`, and makes two things the same on all of them: the
mean of their gradients, and the variables with which they begin. Only one class is ever in use.
"""

import os
import shutil
import subprocess
import sys

import tensorflow as tf


class TensorFlowRanks:
    """tf.distribute's collectives: over NCCL between GPUs, and else over gRPC.

    The ranks find each other by TF_CONFIG, which hetero/ sets; without it there is one.
    """

    def __init__(self):
        self.rank = int(os.environ.get("RANK", "0"))
        self.gpus = take_share(
            int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        )
        kinds = tf.distribute.experimental.CommunicationImplementation
        self.options = tf.distribute.experimental.CommunicationOptions(
            # On its own it would choose gRPC between GPUs too, where nothing has been traced yet.
            implementation=kinds.NCCL if self.gpus else kinds.RING,
            bytes_per_pack=16 << 20,  # one call for each tensor takes longer, and one for all
        )
        # For its collectives only: strategy.scope() and model.fit() would make nothing shorter.
        self.strategy = tf.distribute.MultiWorkerMirroredStrategy(
            communication_options=self.options
        )
        self.size = self.strategy.num_replicas_in_sync

    def mean(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Return their means over the ranks. All have one dtype, and shapes known beforehand."""
        return [total / self.size for total in self._sum(tensors)]

    def from_rank_0(self, variables: list[tf.Variable]) -> None:
        """Give the variables the values that they have on rank 0: a sum, to which others add 0."""
        values = [tf.identity(v) if self.rank == 0 else tf.zeros_like(v) for v in variables]
        for dtype in sorted({value.dtype.name for value in values}):
            same = [n for n, value in enumerate(values) if value.dtype.name == dtype]
            for n, total in zip(same, self._sum([values[n] for n in same])):  # noqa: B905
                variables[n].assign(total)

    @tf.function
    def _sum(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        def of_all_ranks(*tensors: tf.Tensor) -> list[tf.Tensor]:
            tensors = [tf.identity(tensor) for tensor in tensors]
            context = tf.distribute.get_replica_context()
            return context.all_reduce("SUM", tensors, self.options)  # ignores the strategy's own

        return self.strategy.run(of_all_ranks, tensors)


class HorovodRanks:
    """Horovod's: the published way, for containers that have it.

    The ranks find each other as horovod_rank.py has told them.
    """

    def __init__(self):
        import horovod.tensorflow as hvd

        hvd.init()
        self.hvd, self.rank, self.size = hvd, hvd.rank(), hvd.size()
        self.gpus = take_share(hvd.local_rank(), hvd.local_size())

    def mean(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Return their means over the ranks."""
        return self.hvd.grouped_allreduce(tensors, op=self.hvd.Average)

    def from_rank_0(self, variables: list[tf.Variable]) -> None:
        """Give the variables the values that they have on rank 0."""
        self.hvd.broadcast_variables(variables, root_rank=0)


def connect(distribution: str) -> TensorFlowRanks | HorovodRanks:
    """Become one of the ranks; to be called before TensorFlow is used for anything else."""
    return TensorFlowRanks() if distribution == "tf.distribute" else HorovodRanks()


def take_share(local_rank: int, local_size: int) -> int:
    """Take this rank's GPU and its share of the cores; return how many GPUs the host has.

    Ends the program if TensorFlow misses GPUs of the host: a CPU would train at their price.
    SageMaker counts the host's GPUs in SM_NUM_GPUS.
    """
    gpus, there = tf.config.list_physical_devices("GPU"), int(os.environ.get("SM_NUM_GPUS", "0"))
    if len(gpus) < there:
        ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
        found = shutil.which("nvidia-smi") and subprocess.run(ask, capture_output=True, text=True)
        driver = found.stdout.strip() if found else "unknown (no nvidia-smi)"
        cuda = tf.sysconfig.get_build_info().get("cuda_version")
        sys.exit(
            f"collectives.py: error: the host has {there} GPUs (SM_NUM_GPUS), but TensorFlow sees "
            f"{len(gpus)}: driver {driver} does not fit the image's CUDA {cuda}. Take an image "
            "with an older CUDA, or its libraries for older drivers."
        )
    if gpus:
        tf.config.set_visible_devices(gpus[local_rank], "GPU")
        tf.config.experimental.set_memory_growth(gpus[local_rank], True)
    threads = max(1, len(os.sched_getaffinity(0)) // local_size)
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    return len(gpus)
