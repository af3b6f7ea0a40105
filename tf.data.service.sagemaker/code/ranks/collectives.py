"""Keep the ranks of a training in step, with TensorFlow's own collectives or Horovod's.

A rank is a process with one GPU, if the host has any, and a share of the host's cores. Both classes
here tell a process its `rank` and the number of ranks, `size`. `mean` averages gradients over the
ranks, and `from_rank_0` gives all ranks the same initial variables. A job uses one class only.
"""

import os
import shutil
import subprocess
import sys

import tensorflow as tf


class TensorFlowRanks:
    """The collectives of tf.distribute: over NCCL between GPUs, over gRPC otherwise.

    The ranks find each other through TF_CONFIG, which hetero/ sets. Without it there is one rank.
    """

    def __init__(self):
        self.rank = int(os.environ.get("RANK", "0"))
        self.gpus = take_share(
            int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        )
        kinds = tf.distribute.experimental.CommunicationImplementation
        self.options = tf.distribute.experimental.CommunicationOptions(
            # By default it would use gRPC between GPUs too, as long as nothing has been traced.
            implementation=kinds.NCCL if self.gpus else kinds.RING,
            bytes_per_pack=16 << 20,  # faster than one call per tensor, and than one for all
        )
        # Used for its collectives only: strategy.scope() and model.fit() would not simplify this.
        self.strategy = tf.distribute.MultiWorkerMirroredStrategy(
            communication_options=self.options
        )
        self.size = self.strategy.num_replicas_in_sync

    def mean(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Return each tensor's mean over the ranks. All must have one dtype, and static shapes."""
        return [total / self.size for total in self._sum(tensors)]

    def from_rank_0(self, variables: list[tf.Variable]) -> None:
        """Set the variables to their values on rank 0, by a sum to which other ranks add 0."""
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
            # all_reduce does not use the options of the strategy, so pass them again.
            return context.all_reduce("SUM", tensors, self.options)

        return self.strategy.run(of_all_ranks, tensors)


class HorovodRanks:
    """Horovod, as in the results that AWS published. The container must have it.

    The ranks find each other through the environment that horovod_rank.py sets.
    """

    def __init__(self):
        import horovod.tensorflow as hvd

        hvd.init()
        self.hvd, self.rank, self.size = hvd, hvd.rank(), hvd.size()
        self.gpus = take_share(hvd.local_rank(), hvd.local_size())

    def mean(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Return each tensor's mean over the ranks."""
        return self.hvd.grouped_allreduce(tensors, op=self.hvd.Average)

    def from_rank_0(self, variables: list[tf.Variable]) -> None:
        """Set the variables to their values on rank 0."""
        self.hvd.broadcast_variables(variables, root_rank=0)


def connect(distribution: str) -> TensorFlowRanks | HorovodRanks:
    """Join the other ranks. Call this before you use TensorFlow for anything else."""
    return TensorFlowRanks() if distribution == "tf.distribute" else HorovodRanks()


def take_share(local_rank: int, local_size: int) -> int:
    """Take this rank's GPU and its share of the cores. Return the number of GPUs on the host.

    Ends the program if TensorFlow sees fewer GPUs than SM_NUM_GPUS, which SageMaker sets: the job
    would train on CPUs at the price of GPUs.
    """
    gpus, there = tf.config.list_physical_devices("GPU"), int(os.environ.get("SM_NUM_GPUS", "0"))
    if len(gpus) < there:
        ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
        found = shutil.which("nvidia-smi") and subprocess.run(ask, capture_output=True, text=True)
        driver = found.stdout.strip() if found else "unknown (no nvidia-smi)"
        cuda = tf.sysconfig.get_build_info().get("cuda_version")
        sys.exit(
            f"collectives.py: error: the host has {there} GPUs (SM_NUM_GPUS), but TensorFlow sees "
            f"{len(gpus)}: driver {driver} does not fit the image's CUDA {cuda}. Use an image "
            "with an older CUDA, or with CUDA's compatibility libraries for older drivers."
        )
    if gpus:
        tf.config.set_visible_devices(gpus[local_rank], "GPU")
        tf.config.experimental.set_memory_growth(gpus[local_rank], True)
    threads = max(1, len(os.sched_getaffinity(0)) // local_size)
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    return len(gpus)
