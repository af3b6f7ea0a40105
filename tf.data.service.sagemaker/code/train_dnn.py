"""Train an image classifier with Horovod, on samples prepared here or on other machines.

`--data-mode` says where samples come from: `local` prepares them on this host's own cores,
`service` gets them from tf.data.service, `synthetic` repeats one batch, which shows how fast
training could be.

Run it as it is, or on several GPUs with `horovodrun -np N python train_dnn.py ...`.
"""

import argparse
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import repeat
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")

import horovod.tensorflow as hvd
import tensorflow as tf

import arguments
import pipeline
from model import CLASSES, build_model
from pipeline import CHANNELS, SIDE


def absolute(path: str) -> Path:
    """The path, for after a change of the working directory."""
    return Path(path).resolve()


def parse_arguments() -> argparse.Namespace:
    """Read the command line; what doesn't fit together ends the program with a sentence."""
    parser = arguments.parser(fail=lambda message: sys.exit(f"train_dnn.py: error: {message}"))
    add = parser.add_argument
    add("--dispatcher", default="", metavar="HOST:PORT", help="of tf.data.service (service)")
    add("--channels", default=".", help="folder of the job's channels")
    add("--model-dir", type=absolute, default="model", help="where the SavedModel 1/ goes")
    add("--checkpoint-dir", type=absolute, help="where checkpoints are written, and looked for")
    args = parser.parse_args()
    args.data_mode = args.data_mode or ("service" if args.dispatcher else "local")
    if args.data_mode == "service" and not args.dispatcher:
        parser.error("--data-mode service needs --dispatcher, the address of the dispatcher")
    return args


def main() -> str:
    """Train, and save the model; return why the training ended before its time, or nothing."""
    args = parse_arguments()
    hvd.init()
    rank, ranks = hvd.rank(), hvd.size()
    set_up(args.seed)
    try:
        model = build_model(args.model)
        batches = build_batches(args, rank, ranks)
    except (OSError, ValueError) as error:  # a missing file
        sys.exit(f"train_dnn.py: error: {error}")
    # Keras compiles the updates by default on GPUs only: so they are the same everywhere.
    optimizer = tf.keras.optimizers.Adam(jit_compile=False)
    optimizer.build(model.trainable_variables)
    # From here on SIGTERM ends the current step, saves a checkpoint, and only then ends the run.
    stop_requested, stopping = threading.Event(), False
    signal.signal(signal.SIGTERM, lambda *_: stop_requested.set())
    checkpoint = Checkpoint(args.checkpoint_dir, model, optimizer)
    done = first_step = checkpoint.load()
    train_step = build_train_step(model, optimizer)
    log = StepLog(args.log_every)

    global iterator  # stays until the process ends, for the reason at the end of this file
    iterator = iter(batches)
    while done < args.max_steps and not stopping:
        images, labels = log.waited_for(iterator)
        # As large as all ranks' batches together allow, but not at once (Goyal et al., 2017).
        warm = min(1.0, (done + 1) / args.warmup_steps) if args.warmup_steps else 1.0
        optimizer.learning_rate.assign(args.lr * (1 + (ranks - 1) * warm))
        loss, votes = train_step(images, labels, tf.constant(float(stop_requested.is_set())))

        done += 1
        stopping = float(votes) > 0
        is_last = stopping or done == args.max_steps
        log.add(done, len(labels), loss, is_last)
        if is_last or done % args.checkpoint_every == 0:
            checkpoint.save(done)

    hvd.allreduce(tf.zeros(()), name="saved")  # when one rank ends, mpirun kills the others
    if stopping and done < args.max_steps:
        return f"training stopped by SIGTERM after step {done}"
    if rank == 0:
        tf.saved_model.save(model, str(args.model_dir / "1"))
        if done == first_step:
            print(f"training was complete already: step={done}")
        else:
            print(f"training finished after step {done}: loss {float(loss):.4f}")
    return ""


def set_up(seed: int) -> None:
    """Make this process ready, with its own GPU, or else with its share of the cores."""
    sys.stdout.reconfigure(line_buffering=True)  # the job's log shows each line at once
    gpus = tf.config.list_physical_devices("GPU")
    check_gpus(len(gpus))
    if hvd.rank() == 0:
        print(f"tensorflow={tf.__version__} gpus={len(gpus)}")
    if gpus:
        tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")
        tf.config.experimental.set_memory_growth(gpus[hvd.local_rank()], True)
    else:
        tf.config.threading.set_intra_op_parallelism_threads(cores_of_this_rank())
    tf.keras.utils.set_random_seed(seed)  # the same initial weights in every run


def cores_of_this_rank() -> int:
    """How many of the host's cores are for this rank."""
    return max(1, len(os.sched_getaffinity(0)) // hvd.local_size())


def build_train_step(
    model: tf.keras.Model, optimizer: tf.keras.optimizers.Optimizer
) -> Callable[[tf.Tensor, tf.Tensor, tf.Tensor], tuple[tf.Tensor, tf.Tensor]]:
    """Return the function of a step: from images, labels and a vote to stop, to loss and votes."""

    @tf.function
    def train_step(
        images: tf.Tensor, labels: tf.Tensor, stop: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            loss = tf.reduce_mean(losses)
        tape = hvd.DistributedGradientTape(tape)  # its gradients are the mean over the ranks
        gradients = tape.gradient(loss, model.trainable_variables)
        # AutoGraph of TensorFlow 2.12 knows no zip(strict=True).
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))  # noqa: B905
        # With them it is agreed whether to stop, so that all ranks do after the same step.
        with tf.device("CPU"):  # where reading it does not wait for the GPU
            return loss, hvd.allreduce(stop, op=hvd.Sum, name="stop")

    return train_step


class Checkpoint:
    """What a later run goes on from: rank 0 has the files, all ranks begin with its weights."""

    def __init__(
        self, folder: Path | None, model: tf.keras.Model, optimizer: tf.keras.optimizers.Optimizer
    ):
        self.step = tf.Variable(0, dtype=tf.int64)
        self.variables = [self.step, *model.variables, *optimizer.variables]
        saved = tf.train.Checkpoint(step=self.step, model=model, optimizer=optimizer)
        self.files = None
        if hvd.rank() == 0 and folder:
            self.files = tf.train.CheckpointManager(saved, folder, max_to_keep=2)

    def load(self) -> int:
        """Restore the newest on all ranks, if there is one; return the steps done."""
        if self.files and self.files.restore_or_initialize():
            print(f"resumed from {self.files.directory} at step {int(self.step)}")
        hvd.broadcast_variables(self.variables, root_rank=0)
        return int(self.step)

    def save(self, step: int) -> None:
        """Write one, if this is rank 0."""
        self.step.assign(step)
        if self.files:
            self.files.save(step)


def check_gpus(seen: int) -> None:
    """End the program if TensorFlow misses GPUs of the host: a CPU would train at their price.

    SageMaker counts the host's GPUs in SM_NUM_GPUS.
    """
    there = int(os.environ.get("SM_NUM_GPUS", "0"))
    if seen < there:
        ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
        found = shutil.which("nvidia-smi") and subprocess.run(ask, capture_output=True, text=True)
        driver = found.stdout.strip() if found else "unknown (no nvidia-smi)"
        cuda = tf.sysconfig.get_build_info().get("cuda_version")
        sys.exit(
            f"train_dnn.py: error: the host has {there} GPUs (SM_NUM_GPUS), but TensorFlow sees "
            f"{seen}: driver {driver} does not fit the image's CUDA {cuda}. Take an image with an "
            "older CUDA, or its libraries for older drivers (README, On AWS)."
        )


def build_batches(args: argparse.Namespace, rank: int, ranks: int) -> Iterable:
    """Return this rank's batches without end: images (N, 32, 32, 3) and labels (N,)."""
    if args.data_mode == "synthetic":
        images = tf.random.uniform((args.batch_size, SIDE, SIDE, CHANNELS))
        return repeat((images, tf.range(args.batch_size) % CLASSES))
    os.chdir(args.channels)  # the files' names, relative to it, are good on the data hosts too
    files = pipeline.find_files(args.files)
    if args.data_mode == "local" and rank == 0:
        cost = pipeline.milliseconds_per_sample(files, args.augment)
        print(f"data_ms_per_sample={cost:.3f} workers={len(os.sched_getaffinity(0))}")
    return pipeline.build(
        files,
        args.batch_size,
        args.augment,
        args.seed,
        rank=rank,
        ranks=ranks,
        dispatcher=args.dispatcher if args.data_mode == "service" else "",
        threads=cores_of_this_rank(),
    )


class StepLog:
    """Measures the steps, and prints their means on rank 0, every so many steps."""

    def __init__(self, every: int):
        self.every, self.measures = every, False
        self.restart()

    def restart(self) -> None:
        """Forget what has been measured."""
        self.start, self.data_wait = time.perf_counter(), 0.0
        self.steps = self.samples = 0
        self.loss: tf.Tensor | float = 0.0  # sum over the steps

    def waited_for(self, batches: Iterator) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the next batch, and measure how long it is waited for."""
        start = time.perf_counter()
        batch = next(batches)
        self.data_wait += time.perf_counter() - start
        return batch

    def add(self, step: int, samples: int, loss: tf.Tensor, is_last: bool) -> None:
        """Count a step, and print if it is time to."""
        if not self.measures:  # the first one pays for start-up: tracing, connections, the first
            self.measures = True  # batch's way through an empty pipeline
            return self.restart()
        self.steps += 1
        self.samples += samples
        self.loss += loss
        if is_last or step % self.every == 0:
            self.write(step)
            self.restart()

    def write(self, step: int) -> None:
        """Print the means since the last line, for people and regular expressions."""
        loss = float(hvd.allreduce(self.loss / self.steps, name="loss"))
        if not math.isfinite(loss):  # the same on all ranks
            sys.exit(f"train_dnn.py: error: loss={loss} at step {step}: see labels, learning rate")
        seconds = time.perf_counter() - self.start
        if hvd.rank() == 0:
            print(
                f"step={step} loss={loss:.4f} step_time_ms={1000 * seconds / self.steps:.2f} "
                f"data_wait_ms={1000 * self.data_wait / self.steps:.2f} "
                f"samples_per_s={hvd.size() * self.samples / seconds:.1f}"
            )


if __name__ == "__main__":
    reason = main()
    hvd.shutdown()
    print(reason, file=sys.stderr, end="\n" if reason else "", flush=True)
    # Not sys.exit, which destroys everything: the iterator would wait for tf.data's tuning thread,
    # and that sleeps for up to a minute.
    sys.stdout.flush()
    os._exit(1 if reason else 0)
