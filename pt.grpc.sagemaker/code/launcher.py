"""The job's entry point on every host. It says what each instance group runs.

    SourceCode(
        source_dir="code", requirements="requirements.txt", command="exec python launcher.py"
    )

`exec` makes this process PID 1 of the container, the one that SageMaker sends SIGTERM to. The hosts
of dnn_group train, with one rank for each GPU. The hosts of data_group serve data, and so do the
cores that the ranks do not need. A homogeneous job has only ranks, which prepare their own data.
"""

import sys

import arguments
import hetero

# SDK v2 also passes the hyperparameters as arguments, but it splits values at spaces.
words = hetero.hyperparameters() or sys.argv[1:]
args = arguments.parser(fail=hetero.fail).parse_args(words)
checkpoints = ["--checkpoint-dir", str(hetero.BASE_DIR / "checkpoints")]
hetero.run(
    train=[sys.executable, "train_dnn.py", *words, *checkpoints],
    serve=[sys.executable, "-m", "feed.server"],
    ranks=args.processes_per_host,
    spare_cores=args.spare_cores,
)
