"""The job's entry point on every host: says what each instance group runs.

    SourceCode(
        source_dir="code", requirements="requirements.txt", command="exec python launcher.py"
    )

`exec` makes this process PID 1 of the container, the one that SageMaker sends SIGTERM to. The job's
hyperparameters are the arguments below. Hosts of data_group run train_data.py, those of dnn_group
train_dnn.py under torchrun. A homogeneous job has only the latter, which preprocess themselves.
For a third group, add its command at the end of this file.
"""

import argparse
import os
import sys

import hetero

HOMOGENEOUS = "homogeneousCluster"  # what SageMaker calls the one group of a homogeneous job
MASTER_PORT, FEED_PORT = 1, 2  # above the job's base port


def parse_arguments() -> argparse.Namespace:
    """The job's hyperparameters."""
    parser, gpus = argparse.ArgumentParser(), int(os.environ.get("SM_NUM_GPUS", "0"))
    parser.error = hetero.fail  # a wrong hyperparameter is the job's FailureReason
    parser.add_argument("--data-mode", choices=["local", "service", "synthetic"])
    parser.add_argument(
        "--data-group", default="data_group", help="instance group that preprocesses"
    )
    parser.add_argument("--dnn-group", default="dnn_group", help="instance group that trains")
    parser.add_argument(
        "--processes-per-host", type=int, default=gpus or 1, help="ranks on each dnn host"
    )
    parser.add_argument(
        "--model", default="mnist", help="mnist: the official example's; small: for CPUs"
    )
    parser.add_argument(
        "--parallelism", choices=["ddp", "fsdp"], default="ddp", help="how ranks share the model"
    )
    parser.add_argument("--augment", type=int, default=0, help="how finely it is computed; 0: none")
    parser.add_argument("--batch-size", type=int, default=128, help="samples per rank and step")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--max-steps", type=int, default=0, help="0: no limit")
    parser.add_argument("--lr", type=float, default=0.001)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--workers", type=int, default=0, help="data processes per host; 0: one per core"
    )
    parser.add_argument("--log-every", type=int, default=10, help="steps between two log lines")
    parser.add_argument(
        "--checkpoint-every", type=int, default=100, help="steps between two checkpoints"
    )
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
    dnn_hosts = cluster.groups.get(
        dnn_group, [cluster.host]
    )  # hetero.run says so if there are none
    data_mode = args.data_mode or ("service" if data_hosts else "local")
    if data_mode == "service" and not data_hosts:
        hetero.fail("data-mode 'service' needs a data group: use 'local' in a job without one.")

    channels, feed_port = hetero.BASE_DIR / "input" / "data", cluster.base_port + FEED_PORT
    train_data = [sys.executable, "train_data.py"]
    train_data += ["--train-dir", str(channels / "training"), "--augment", str(args.augment)]
    train_data += ["--bind", f"{cluster.bind_address}:{feed_port}"]
    train_data += ["--workers", str(args.workers)]

    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    torchrun += ["--nnodes", str(len(dnn_hosts)), "--node-rank", str(cluster.rank)]
    torchrun += ["--nproc-per-node", str(args.processes_per_host)]
    torchrun += ["--master-addr", cluster.address(dnn_hosts[0])]
    torchrun += ["--master-port", str(cluster.base_port + MASTER_PORT)]

    train_dnn = ["train_dnn.py", "--data-mode", data_mode, "--model", args.model]
    if data_mode == "service":
        feeds = [f"{cluster.address(host)}:{feed_port}" for host in data_hosts]
        train_dnn += ["--data-hosts", ",".join(feeds)]
    if data_mode == "local":
        train_dnn += ["--train-dir", str(channels / "training"), "--workers", str(args.workers)]
    if (channels / "test").exists():
        train_dnn += ["--test-dir", str(channels / "test")]
    for name in (
        "parallelism",
        "augment",
        "batch_size",
        "epochs",
        "max_steps",
        "lr",
        "seed",
        "log_every",
        "checkpoint_every",
    ):
        train_dnn += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    train_dnn += ["--model-dir", str(hetero.BASE_DIR / "model")]
    train_dnn += ["--checkpoint-dir", str(hetero.BASE_DIR / "checkpoints")]

    # The libraries would otherwise guess the network interface.
    for variable in ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ[variable] = cluster.network_interface

    hetero.run(
        cluster,
        training_group=dnn_group,
        commands={args.data_group: train_data, dnn_group: torchrun + train_dnn},
    )


if __name__ == "__main__":
    main()
