"""The job's entry point on every host: says what each instance group runs.

    SourceCode(source_dir="code", command="exec python launcher.py")

`exec` makes this process PID 1 of the container, the one that SageMaker sends SIGTERM to. The job's
hyperparameters are the arguments below. Hosts of data_group run train_data.py: tf.data.service's
workers, and on the first of them its dispatcher. Hosts of dnn_group run train_dnn.py as Horovod
ranks, and one more worker on the cores that these leave. A homogeneous job has only ranks, which
preprocess themselves.
"""

import argparse
import os
import sys
import tempfile

import hetero

HOMOGENEOUS = "homogeneousCluster"  # what SageMaker calls the one group of a homogeneous job
RENDEZVOUS_PORT, DISPATCHER_PORT = 1, 2  # above the job's base port


def parse_arguments() -> argparse.Namespace:
    """The job's hyperparameters."""
    parser, gpus = argparse.ArgumentParser(), int(os.environ.get("SM_NUM_GPUS", "0"))
    parser.error = hetero.fail  # a wrong hyperparameter is the job's FailureReason
    add = parser.add_argument
    add("--data-mode", choices=["local", "service", "synthetic"])
    add("--data-group", default="data_group", help="instance group that preprocesses")
    add("--dnn-group", default="dnn_group", help="instance group that trains")
    add("--processes-per-host", type=int, default=gpus or 1, help="ranks on each dnn host")
    add("--horovod", choices=["gloo", "mpi"], default="gloo", help="mpi: on a single dnn host")
    add("--model", default="resnet50", help="resnet50; small: for CPUs")
    add("--augment", type=int, default=1, help="how finely it is computed; 0: none")
    add("--batch-size", type=int, default=128, help="samples per rank and step")
    add("--max-steps", type=int, default=100)
    add("--lr", type=float, default=0.001)
    add("--warmup-steps", type=int, default=20)
    add("--seed", type=int, default=0)
    add("--log-every", type=int, default=10, help="steps between two log lines")
    add("--checkpoint-every", type=int, default=100, help="steps between two checkpoints")
    args = parser.parse_args(hetero.arguments())
    if args.processes_per_host < 1:
        parser.error("processes-per-host must be 1 or more.")
    return args


def main() -> None:
    """Run this host's part of the job, to the job's end."""
    args, cluster = parse_arguments(), hetero.read_cluster()
    homogeneous = list(cluster.groups) == [HOMOGENEOUS]
    dnn_group = HOMOGENEOUS if homogeneous else args.dnn_group
    data_hosts = cluster.groups.get(args.data_group, [])
    dnn_hosts = cluster.groups.get(dnn_group, [cluster.host])  # hetero.run says if there are none
    data_mode = args.data_mode or ("service" if data_hosts else "local")
    if data_mode == "service" and not data_hosts:
        hetero.fail("data-mode 'service' needs a data group: use 'local' in a job without one.")
    if args.horovod == "mpi" and len(dnn_hosts) > 1:
        hetero.fail("horovod 'mpi' is for a single dnn host: use 'gloo', which needs no ssh.")

    channels = str(hetero.BASE_DIR / "input" / "data")
    train_dnn = ["train_dnn.py", "--data-mode", data_mode, "--channels", channels]
    train_data = [sys.executable, "train_data.py", "--channels", channels]
    train_data += ["--address", cluster.address(cluster.host), "--augment", str(args.augment)]
    if data_hosts:
        port = cluster.base_port + DISPATCHER_PORT
        dispatcher = ["--dispatcher", f"{cluster.address(data_hosts[0])}:{port}"]
        train_data += dispatcher
        train_dnn += dispatcher
    for name in ("model", "augment", "batch_size", "max_steps", "lr", "warmup_steps", "seed",
                 "log_every", "checkpoint_every"):  # fmt: skip
        train_dnn += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    train_dnn += ["--model-dir", str(hetero.BASE_DIR / "model")]
    train_dnn += ["--checkpoint-dir", str(hetero.BASE_DIR / "checkpoints")]

    if args.horovod == "mpi":
        ranks = ["horovodrun", "--mpi", "-np", str(args.processes_per_host), sys.executable]
    else:
        ranks = [sys.executable, "ranks.py", "--interface", cluster.network_interface]
        ranks += ["--hosts", ",".join(map(cluster.address, dnn_hosts))]
        ranks += ["--host-rank", str(cluster.rank)]
        ranks += ["--processes-per-host", str(args.processes_per_host)]
        ranks += ["--port", str(cluster.base_port + RENDEZVOUS_PORT)]
    os.environ["NCCL_SOCKET_IFNAME"] = cluster.network_interface  # it would guess otherwise

    # Cores of a dnn host that are left when each rank has one.
    spare = len(os.sched_getaffinity(0)) - args.processes_per_host
    beside = [*train_data, "--spare-cores", str(spare)]
    with tempfile.TemporaryDirectory() as work_dir:
        if cluster.host in data_hosts[:1]:
            train_data += ["--work-dir", work_dir]
        hetero.run(
            cluster,
            training_group=dnn_group,
            commands={args.data_group: train_data, dnn_group: ranks + train_dnn},
            beside=beside if data_mode == "service" and spare > 0 else None,
            needed=data_hosts[:1],  # the dispatcher's
        )


if __name__ == "__main__":
    main()
