"""Runtime of a SageMaker training job over several instance groups. Standard library only.

SageMaker starts launcher.py on every host, and bills until the last has exited. `read_cluster()`
(topology.py) tells it which host this is, and where the others are. `run()` (job.py) starts the
host's training processes (ranks), in an environment by which they find each other, or its data
server. All hosts are connected with the leader (leader.py), on the training group's first host,
which decides when the job ends and how: what failed where is written to /opt/ml/output/failure on
each, as SageMaker's FailureReason.

The PyTorch example's README lists every way that a job can end.
"""

from hetero.job import fail, run
from hetero.topology import BASE_DIR, WORKER_PORT, Cluster, hyperparameters, read_cluster

__all__ = ["BASE_DIR", "WORKER_PORT", "Cluster", "fail", "hyperparameters", "read_cluster", "run"]
