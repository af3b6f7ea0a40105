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
channels = ["--channels", str(hetero.BASE_DIR / "input" / "data")]
checkpoints = ["--checkpoint-dir", str(hetero.BASE_DIR / "checkpoints")]
horovod = ["ranks/horovod_rank.py"] if args.distribution == "horovod" else []
hetero.run(
    train=[sys.executable, *horovod, "train_dnn.py", *words, *channels, *checkpoints],
    serve=[sys.executable, "train_data.py", *words, *channels],
    ranks=args.processes_per_host,
    needed="first",  # which has the dispatcher
)
