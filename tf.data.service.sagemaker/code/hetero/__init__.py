"""Run a SageMaker training job on several instance groups. Needs only the standard library.

    SourceCode(source_dir="code", command="exec python -m hetero train.py --epochs 3")

SageMaker starts this command, the launcher, on every host, and bills until the last host has
exited. Hosts of the training group run the training script, one process (rank) for each GPU. The
other hosts, the data hosts, run a data server. A launcher.py that calls `run` does the same.

The launcher on the training group's first host is the leader. All launchers connect to it, and it
decides when and how the job ends. If the job fails, every host writes what failed, and where, to
/opt/ml/output/failure, which SageMaker shows as the FailureReason. What a script itself has written
there is quoted.

Copy this folder next to your script. To understand the code, read it in this order:

command.py    the command line, python -m hetero
job.py        `run`: the job on this host, from start to end
topology.py   what SageMaker tells a host, and what the host tells its ranks and data server
plan.py       which host runs what
member.py     one host of the job: runs its ranks or data server, and reports to the leader
process.py    starts a process, copies its output to the log, and waits for its end
reason.py     finds in a process's output why it failed, unless the process itself has said so
leader.py     decides, from the hosts' reports, when training starts and how the job ends
messages.py   the messages between launchers
spare_cores.py  the cores of a training host that its ranks leave to a data server
"""

from hetero.command import main
from hetero.job import fail, run
from hetero.topology import BASE_DIR, Cluster, hyperparameters, read_cluster

__version__ = "2026-11-28"  # CHANGES.md says what else to change when you update your copy
__all__ = ["BASE_DIR", "Cluster", "fail", "hyperparameters", "main", "read_cluster", "run"]
