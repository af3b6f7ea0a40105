"""The job's entry point on every host: says what each instance group runs.

    SourceCode(source_dir="code", command="exec python launcher.py")

`exec` makes this process PID 1 of the container, the one that SageMaker sends SIGTERM to. The job's
hyperparameters are those of arguments.py. Hosts of data_group run train_data.py: tf.data.service's
workers, and on the first of them its dispatcher. Hosts of dnn_group run train_dnn.py, once for each
GPU, and one more worker on the cores that these ranks leave. A homogeneous job has ranks only.
"""

import os
import sys
import tempfile

import arguments
import hetero

HOMOGENEOUS = "homogeneousCluster"  # what SageMaker calls the one group of a homogeneous job


def main() -> None:
    """Run this host's part of the job, to the job's end."""
    words = hetero.hyperparameters()
    args, cluster = arguments.parser(fail=hetero.fail).parse_args(words), hetero.read_cluster()
    dnn_group = HOMOGENEOUS if [*cluster.groups] == [HOMOGENEOUS] else args.dnn_group
    dispatcher, ranks = cluster.servers(args.data_group)[:1], args.processes_per_host
    if args.data_mode == "service" and not dispatcher:
        hetero.fail("data-mode 'service' needs a data group: use 'local' in a job without one.")
    hosts, dnn_hosts = sorted(sum(cluster.groups.values(), [])), cluster.groups.get(dnn_group, [])
    if args.distribution == "horovod-mpi" and len(dnn_hosts) > 1:
        hetero.fail("'horovod-mpi' is for a single dnn host: use 'horovod', which needs no ssh.")

    words += ["--channels", str(hetero.BASE_DIR / "input" / "data")]
    words += ["--dispatcher", *dispatcher] if dispatcher else []
    train_data = [sys.executable, "train_data.py", *words]
    # Ports are told apart by host as well, for hosts that share a machine: the ranks' come first.
    port = cluster.base_port + hetero.WORKER_PORT + len(dnn_hosts) * ranks
    port += hosts.index(cluster.host)
    train_data += ["--address", f"{cluster.address(cluster.host)}:{port}"]
    train_dnn = ["train_dnn.py", *words, "--model-dir", str(hetero.BASE_DIR / "model")]
    train_dnn += ["--checkpoint-dir", str(hetero.BASE_DIR / "checkpoints")]
    train_dnn = {
        "tf.distribute": [sys.executable],
        "horovod": [sys.executable, "ranks/horovod_rank.py"],
        "horovod-mpi": ["horovodrun", "--mpi", "-np", str(ranks), sys.executable],
    }[args.distribution] + train_dnn

    spare = len(os.sched_getaffinity(0)) - ranks  # cores that are left when each rank has one
    uses_service = dispatcher and args.data_mode in (None, "service")
    beside = [*train_data, "--spare-cores", str(spare)] if uses_service and spare > 0 else None
    needed = cluster.groups.get(args.data_group, [])[:1]  # the dispatcher's host
    with tempfile.TemporaryDirectory() as journal:
        train_data += ["--work-dir", journal] if cluster.host in needed else []
        hetero.run(
            cluster,
            dnn_group,
            {args.data_group: train_data, dnn_group: train_dnn},
            ranks=1 if args.distribution == "horovod-mpi" else ranks,  # it starts them itself
            beside=beside,
            needed=needed,
        )


if __name__ == "__main__":
    main()
