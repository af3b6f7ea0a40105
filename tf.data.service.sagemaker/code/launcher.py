"""The job's entry point on every host: says what each instance group runs.

    SourceCode(source_dir="code", command="exec python launcher.py")

`exec` makes this process PID 1 of the container, the one that SageMaker sends SIGTERM to. Hosts of
dnn_group train, one rank for each GPU. Hosts of data_group are workers of tf.data.service, and the
first one is its dispatcher, too. The cores that the ranks leave are one more worker.
"""

import sys

import arguments
import hetero

# SDK v2 gives them as arguments, too, but splits values at spaces.
words = hetero.hyperparameters() or sys.argv[1:]
args = arguments.parser(fail=hetero.fail).parse_args(words)
dnn_hosts = hetero.read_cluster().groups.get("dnn_group", [])
if args.distribution == "horovod-mpi" and len(dnn_hosts) > 1:
    hetero.fail("'horovod-mpi' is for a single dnn host: use 'horovod', which needs no ssh.")
channels = ["--channels", str(hetero.BASE_DIR / "input" / "data")]
checkpoints = ["--checkpoint-dir", str(hetero.BASE_DIR / "checkpoints")]
way = {
    "tf.distribute": [sys.executable],
    "horovod": [sys.executable, "ranks/horovod_rank.py"],
    "horovod-mpi": ["horovodrun", "--mpi", "-np", str(args.processes_per_host), sys.executable],
}[args.distribution]
hetero.run(
    train=[*way, "train_dnn.py", *words, *channels, *checkpoints],
    serve=[sys.executable, "train_data.py", *words, *channels],
    ranks=1 if args.distribution == "horovod-mpi" else args.processes_per_host,
    needed="first",  # which has the dispatcher
)
