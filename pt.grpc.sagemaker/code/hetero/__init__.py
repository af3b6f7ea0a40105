"""Runtime of a SageMaker training job over several instance groups. Standard library only.

    SourceCode(source_dir="code", command="exec python -m hetero train.py --epochs 3")

SageMaker starts this command on every host, and bills until the last has exited. On the hosts of
the training group it runs the training script, once for each GPU (these processes are the ranks);
on the other hosts it runs a data server. A launcher.py that calls `run` does the same.

The launchers of all hosts are connected with the leader, on the training group's first host. It
decides when the job ends and how: what failed where is written to /opt/ml/output/failure on each
host, as SageMaker's FailureReason.

Copy this folder beside your script, and read it in this order:

command.py    python -m hetero: what its options mean
job.py        `run`: the job on this host, from beginning to end
topology.py   what a host is told, and what its ranks and servers are told
plan.py       which host runs what
member.py     a host's part: its ranks or data server, and what it reports of them
process.py    a process: its start, its output, its end
reason.py     why a process has failed, by its output
leader.py     what the leader decides by these reports
messages.py   how launchers talk to each other
spare.py      the cores of a training host that its ranks leave to a data server
"""

from hetero.command import main
from hetero.job import fail, run
from hetero.topology import BASE_DIR, Cluster, hyperparameters, read_cluster

__version__ = "2026-11-25"  # CHANGES.md says what to change beside a new copy
__all__ = ["BASE_DIR", "Cluster", "fail", "hyperparameters", "main", "read_cluster", "run"]
