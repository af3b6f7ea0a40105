"""The job's entry point on every host. It says what each instance group runs.

    SourceCode(source_dir="code", command="exec python launcher.py")

`exec` makes this process PID 1 of the container, which gets SageMaker's SIGTERM. The hosts of
dnn_group train, with one rank for each GPU. The hosts of data_group run workers of tf.data.service;
the first one also runs its dispatcher. One more worker runs on the cores that the ranks do not
need.
"""

import sys

import arguments
import hetero

# SDK v2 also passes the hyperparameters as arguments, but splits their values at spaces.
words = hetero.hyperparameters() or sys.argv[1:]
args = arguments.parser(fail=hetero.fail).parse_args(words)
channels = ["--channels", str(hetero.BASE_DIR / "input" / "data")]
checkpoints = ["--checkpoint-dir", str(hetero.BASE_DIR / "checkpoints")]
horovod = ["ranks/horovod_rank.py"] if args.distribution == "horovod" else []
hetero.run(
    train=[sys.executable, *horovod, "train_dnn.py", *words, *channels, *checkpoints],
    serve=[sys.executable, "train_data.py", *words, *channels],
    ranks=args.processes_per_host,
    needed="first",  # the first data host runs the dispatcher
)
