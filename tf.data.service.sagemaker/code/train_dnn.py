"""Train an image classifier on one or more GPUs, on samples prepared here or on other machines.

`--data-mode` says where the samples come from. `local` prepares them on this host's own cores, and
`service` gets them from tf.data.service. `synthetic` repeats one batch: it shows how fast training
could be.

Run it on its own, or let launcher.py start it, once for each GPU of the training hosts.
"""

import argparse
import contextlib
import errno
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from itertools import repeat
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")

import tensorflow as tf

import arguments
import pipeline
from model import CLASSES, build_model
from pipeline import CHANNELS, SIDE
from ranks import HorovodRanks, TensorFlowRanks, connect

Ranks = TensorFlowRanks | HorovodRanks  # this file does not depend on which one


def parse_arguments() -> argparse.Namespace:
    """Read the command line. End the program with a message if the options are not consistent."""
    parser = arguments.parser(fail=lambda message: sys.exit(f"train_dnn.py: error: {message}"))
    add = parser.add_argument
    add("--channels", default=".", help="folder of the job's channels")
    model_dir = os.environ.get("SM_MODEL_DIR", "model")
    add("--model-dir", type=Path, default=model_dir, help="where the SavedModel 1/ goes")
    add("--checkpoint-dir", type=Path, help="where checkpoints are written, and looked for")
    args = parser.parse_args()
    data_hosts = os.environ.get("HETERO_DATA_HOSTS")
    args.data_mode = args.data_mode or ("service" if data_hosts else "local")
    if args.data_mode == "service" and not data_hosts:
        parser.error("--data-mode service needs data hosts, but HETERO_DATA_HOSTS is empty")
    return args


def main() -> str:
    """Train, and save the model. Return why the training ended early, or an empty string."""
    args = parse_arguments()
    ranks = connect(args.distribution)
    sys.stdout.reconfigure(line_buffering=True)  # the job's log shows each line at once
    if ranks.rank == 0:
        print(f"tensorflow={tf.__version__} gpus={ranks.gpus} distribution={args.distribution}")
    tf.keras.utils.set_random_seed(args.seed)  # the same initial weights in every run
    try:
        model = build_model(args.model)
        batches = build_batches(args, ranks)
    except (OSError, ValueError) as error:  # such as a missing file
        sys.exit(f"train_dnn.py: error: {error}")
    optimizer = tf.keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)
    # From here on, SIGTERM lets the current step end and saves a checkpoint before the run ends.
    stop_requested, stopping, votes = threading.Event(), False, 0.0
    signal.signal(signal.SIGTERM, lambda *_: stop_requested.set())
    checkpoint = Checkpoint(args.checkpoint_dir, model, optimizer, ranks)
    done = first_step = checkpoint.load()
    train_step = build_train_step(model, optimizer, ranks)
    log = StepLog(args.log_every, ranks)

    global iterator  # so that it lives until the process ends: the end of this file says why
    iterator = iter(batches)
    while done < args.max_steps and not stopping:
        images, labels = log.waited_for(iterator)
        # Warm up to the rate that all ranks' batches together allow (Goyal et al., 2017).
        warm = min(1.0, (done + 1) / args.warmup_steps) if args.warmup_steps else 1.0
        optimizer.learning_rate.assign(args.lr * (1 + (ranks.size - 1) * warm))
        # The votes of the previous step: reading this step's would mean waiting for the GPU.
        stopping = float(votes) > 0
        vote = tf.constant(float(stop_requested.is_set()))
        loss, votes = train_step(images, labels, vote)

        done += 1
        is_last = stopping or done == args.max_steps
        log.add(done, len(labels), loss, is_last)
        if is_last or done % args.checkpoint_every == 0:
            checkpoint.save(done)

    stopped = stopping and done < args.max_steps
    if ranks.rank == 0 and not stopped:
        save_model(model, args.model_dir / "1")
        if done == first_step:
            print(f"training was complete already: step={done}")
        else:
            print(f"training finished after step {done}: loss {float(loss):.4f}")
    ranks.mean([tf.zeros(())])  # waits until all have saved: if one ends earlier, others fail
    return f"training stopped by SIGTERM after step {done}" if stopped else ""


def save_model(model: tf.keras.Model, folder: Path) -> None:
    """Write a SavedModel. Its signature serving_default maps images to logits."""

    @tf.function(input_signature=[tf.TensorSpec((None, SIDE, SIDE, CHANNELS), tf.float32)])
    def serve(images: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"logits": model(images, training=False)}

    with named_if_full(folder, model.variables):
        tf.saved_model.save(model, str(folder), signatures=serve)


@contextlib.contextmanager
def named_if_full(folder: str | Path, variables: list) -> Iterator[None]:
    """Raise OSError, with the size of the variables, if the disk is too full for them."""
    try:
        yield
    except tf.errors.ResourceExhaustedError as error:
        why = os.strerror(errno.ENOSPC)
        if why not in str(error):  # memory is exhausted, not the disk
            raise
        size = sum(variable.numpy().nbytes for variable in variables)
        raise OSError(errno.ENOSPC, f"{why} for {size:,} bytes", str(folder)) from None


def build_train_step(
    model: tf.keras.Model, optimizer: tf.keras.optimizers.Optimizer, ranks: Ranks
) -> Callable[[tf.Tensor, tf.Tensor, tf.Tensor], tuple[tf.Tensor, tf.Tensor]]:
    """Return the function that trains one step.

    It takes images, labels and a vote to stop, and returns the mean loss and vote of the ranks.
    """

    @tf.function
    def train_step(
        images: tf.Tensor, labels: tf.Tensor, stop: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            loss = tf.reduce_mean(losses)
        gradients = tape.gradient(loss, model.trainable_variables)
        # The vote goes with the gradients, so that all ranks stop after the same step.
        *gradients, loss, stop = ranks.mean([*gradients, loss, stop])
        # AutoGraph in TensorFlow 2.12 does not support zip(strict=True).
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))  # noqa: B905
        return loss, stop

    return train_step


class Checkpoint:
    """What a later run continues from. Rank 0 has the files; all ranks start with its weights."""

    def __init__(
        self,
        folder: Path | None,
        model: tf.keras.Model,
        optimizer: tf.keras.optimizers.Optimizer,
        ranks: Ranks,
    ):
        self.ranks = ranks
        self.step = tf.Variable(0, dtype=tf.int64)
        self.variables = [self.step, *model.variables, *optimizer.variables]
        saved = tf.train.Checkpoint(step=self.step, model=model, optimizer=optimizer)
        self.files = None
        if ranks.rank == 0 and folder:
            self.files = tf.train.CheckpointManager(saved, folder, max_to_keep=2)

    def load(self) -> int:
        """Restore the newest checkpoint, if any, on all ranks. Return how many steps were done."""
        if self.files and self.files.restore_or_initialize():
            print(f"resumed from {self.files.directory} at step {int(self.step)}")
        self.ranks.from_rank_0(self.variables)
        return int(self.step)

    def save(self, step: int) -> None:
        """Write a checkpoint, if this is rank 0."""
        self.step.assign(step)
        if self.files:
            with named_if_full(self.files.directory, self.variables):
                self.files.save(step)


def build_batches(args: argparse.Namespace, ranks: Ranks) -> Iterable:
    """Return this rank's endless batches: images (N, 32, 32, 3) and labels (N,)."""
    if args.data_mode == "synthetic":
        images = tf.random.uniform((args.batch_size, SIDE, SIDE, CHANNELS))
        return repeat((images, tf.range(args.batch_size) % CLASSES))
    files = pipeline.find_files(f"{args.channels}/{args.files}")
    if args.data_mode == "local" and ranks.rank == 0:
        cost = pipeline.milliseconds_per_sample(files, args.augment)
        print(f"data_ms_per_sample={cost:.3f}")
    return pipeline.build(
        files,
        args.batch_size,
        args.augment,
        args.seed,
        rank=ranks.rank,
        ranks=ranks.size,
        on_data_hosts=args.data_mode == "service",
        threads=tf.config.threading.get_intra_op_parallelism_threads(),
    )


class StepLog:
    """Measures the steps. Rank 0 prints their means at regular intervals."""

    def __init__(self, every: int, ranks: Ranks):
        self.every, self.ranks, self.measures = every, ranks, False
        self.restart()

    def restart(self) -> None:
        """Forget what has been measured."""
        self.start, self.data_wait = time.perf_counter(), 0.0
        self.steps = self.samples = 0
        self.loss: tf.Tensor | float = 0.0  # sum over the steps

    def waited_for(self, batches: Iterator) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the next batch, and measure how long the training waits for it."""
        start = time.perf_counter()
        batch = next(batches)
        self.data_wait += time.perf_counter() - start
        return batch

    def add(self, step: int, samples: int, loss: tf.Tensor, is_last: bool) -> None:
        """Count a step, and print a line if it is due."""
        if not self.measures:  # the first step includes the start-up: tracing, connections, and
            self.measures = True  # the first batch through an empty pipeline
            return self.restart()
        self.steps += 1
        self.samples += samples
        self.loss += loss
        if is_last or step % self.every == 0:
            self.write(step)
            self.restart()

    def write(self, step: int) -> None:
        """Print the means since the last line, for people and for regular expressions."""
        loss = float(self.loss) / self.steps
        if not math.isfinite(loss):  # it is the same on all ranks
            raise ValueError(f"loss={loss} at step {step}: check the labels and the learning rate")
        seconds = time.perf_counter() - self.start
        if self.ranks.rank == 0:
            print(
                f"step={step} loss={loss:.4f} step_time_ms={1000 * seconds / self.steps:.2f} "
                f"data_wait_ms={1000 * self.data_wait / self.steps:.2f} "
                f"samples_per_s={self.ranks.size * self.samples / seconds:.1f}"
            )


if __name__ == "__main__":
    try:
        reason = main()
    except Exception:
        reason = traceback.format_exc().rstrip()
    print(reason, file=sys.stderr, end="\n" if reason else "", flush=True)
    # Not sys.exit: it destroys all objects, and the iterator would then wait for tf.data's tuning
    # thread, which sleeps for up to a minute.
    sys.stdout.flush()
    os._exit(1 if reason else 0)
