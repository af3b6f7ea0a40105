"""The job's entry point on every host: says what each instance group runs.

    SourceCode(
        source_dir="code", requirements="requirements.txt", command="exec python launcher.py"
    )

`exec` makes this process PID 1 of the container, the one that SageMaker sends SIGTERM to. The job's
hyperparameters are those of arguments.py. Hosts of data_group run feed/server.py. Hosts of
dnn_group run train_dnn.py, once for each GPU, and also feed/server.py for their own ranks, on the
cores that these leave. A homogeneous job has only ranks, which preprocess themselves. For a third
group, add its command at the end of this file.
"""

import os
import sys

import arguments
import hetero
from feed import spare

HOMOGENEOUS = "homogeneousCluster"  # what SageMaker calls the one group of a homogeneous job


def main() -> None:
    """Run this host's part of the job, to the job's end."""
    words = hetero.hyperparameters()
    args, cluster = arguments.parser(fail=hetero.fail).parse_args(words), hetero.read_cluster()
    dnn_group = HOMOGENEOUS if [*cluster.groups] == [HOMOGENEOUS] else args.dnn_group
    data_hosts = cluster.servers(args.data_group)
    if args.data_mode == "service" and not data_hosts:
        hetero.fail("data-mode 'service' needs a data group: use 'local' in a job without one.")

    channels, ranks = hetero.BASE_DIR / "input" / "data", args.processes_per_host
    server = ["-m", "feed.server"]

    beside, takes_data = None, data_hosts and args.data_mode in (None, "service")
    if takes_data and cluster.group == dnn_group:
        if cores := spare.cores(ranks, args.spare_cores):
            own = f"unix-abstract:{cluster.host}:{cluster.base_port}"  # for this host's ranks alone
            beside = [sys.executable, "feed/spare.py", ",".join(map(str, cores)), *server, own]
            data_hosts.append(own)
        print(f"spare_cores={len(cores)}", flush=True)
    os.environ["HETERO_DATA_HOSTS"] = ",".join(data_hosts)

    train_dnn = [sys.executable, "train_dnn.py", *words]
    train_dnn += ["--train-dir", str(channels / "training")]
    if (channels / "test").exists():
        train_dnn += ["--test-dir", str(channels / "test")]
    train_dnn += ["--model-dir", str(hetero.BASE_DIR / "model")]
    train_dnn += ["--checkpoint-dir", str(hetero.BASE_DIR / "checkpoints")]

    serve = [sys.executable, *server, cluster.server]
    commands = {args.data_group: serve, dnn_group: train_dnn}
    hetero.run(cluster, dnn_group, commands, ranks=ranks, beside=beside)


if __name__ == "__main__":
    main()
