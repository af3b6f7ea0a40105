"""Runtime of a SageMaker training job over several instance groups. Standard library only.

SageMaker starts launcher.py on every host, and bills until the last has exited. `read_cluster()`
tells it which host this is, and where the others are. `run()` starts the host's training processes
(ranks), in an environment by which they find each other, or its data server. All hosts are
connected with the leader, on the training group's first host, which decides when the job ends and
how: what failed where is written to /opt/ml/output/failure on each, as SageMaker's FailureReason.

Copy this folder to launcher.py, and read it in this order:

topology.py   what a host is told: who is where, and the environment of the ranks
job.py        the job on this host, from beginning to end: `run`
host.py       a host's part: its ranks or data server, and what it reports
process.py    a process: its start, its output, its end
reason.py     why a process has failed, by its output
leader.py     what the leader decides by these reports
messages.py   how launchers talk to each other
"""

from hetero.job import fail, run
from hetero.topology import BASE_DIR, WORKER_PORT, Cluster, hyperparameters, read_cluster

__all__ = ["BASE_DIR", "WORKER_PORT", "Cluster", "fail", "hyperparameters", "read_cluster", "run"]
