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
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")

import horovod.tensorflow as hvd
import tensorflow as tf

import pipeline
import pulse
from model import CLASSES, build_model
from pipeline import CHANNELS, SIDE


def absolute(path: str) -> Path:
    """The path, for after a change of the working directory."""
    return Path(path).resolve()


def parse_arguments() -> argparse.Namespace:
    """Read the command line; what doesn't fit together ends the program with a sentence."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.error = lambda message: sys.exit(f"train_dnn.py: error: {message}")
    add = parser.add_argument
    add("--data-mode", choices=["local", "service", "synthetic"], default="local")
    add("--dispatcher", default="", metavar="HOST:PORT", help="of tf.data.service (service)")
    add("--channels", default=".", help="folder of the job's channels")
    add("--files", default="training/*", help="the TFRecord files, relative to that folder")
    add("--model", default="resnet50", help="resnet50 or small")
    add("--augment", type=int, default=1, help="how finely it is computed; 0: none")
    add("--batch-size", type=int, default=128, help="samples per step of each rank")
    add("--max-steps", type=int, default=100, help="stop after this many steps")
    add("--lr", type=float, default=1e-3, help="learning rate of Adam, for each rank's batch")
    add("--warmup-steps", type=int, default=20, help="until the learning rate has its full size")
    add("--seed", type=int, default=0)
    add("--log-every", type=int, default=10, metavar="STEPS")
    add("--model-dir", type=absolute, default="model", help="where the SavedModel 1/ goes")
    add("--checkpoint-dir", type=absolute, help="where checkpoints are written, and looked for")
    add("--checkpoint-every", type=int, default=100, metavar="STEPS")
    args = parser.parse_args()
    for name in ("batch_size", "max_steps", "log_every", "checkpoint_every"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be 1 or more")
    for name in ("augment", "warmup_steps"):
        if getattr(args, name) < 0:
            parser.error(f"--{name.replace('_', '-')} must be 0 or more")
    if args.data_mode == "service" and not args.dispatcher:
        parser.error("--data-mode service needs --dispatcher, the address of the dispatcher")
    return args


def main() -> str:
    """Train, and save the model; return why the training ended before its time, or nothing."""
    args = parse_arguments()
    sys.stdout.reconfigure(line_buffering=True)  # the job's log shows each line at once
    hvd.init()
    rank, ranks = hvd.rank(), hvd.size()
    gpus = tf.config.list_physical_devices("GPU")
    check_gpus(len(gpus))
    if rank == 0:
        print(f"tensorflow={tf.__version__} gpus={len(gpus)}")
    cores = max(1, len(os.sched_getaffinity(0)) // hvd.local_size())
    if gpus:
        tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")
        tf.config.experimental.set_memory_growth(gpus[hvd.local_rank()], True)
    else:
        tf.config.threading.set_intra_op_parallelism_threads(cores)

    tf.keras.utils.set_random_seed(args.seed)  # the same initial weights in every run
    try:
        model = build_model(args.model)
        batches = build_batches(args, rank, ranks, cores)
    except (OSError, ValueError) as error:  # a missing file
        sys.exit(f"train_dnn.py: error: {error}")
    # Keras compiles the updates by default on GPUs only: so they are the same everywhere.
    optimizer = tf.keras.optimizers.Adam(jit_compile=False)
    optimizer.build(model.trainable_variables)

    # From here on SIGTERM ends the current step, saves a checkpoint, and only then ends the run.
    stop_requested = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop_requested.set())

    # Rank 0 has the checkpoint, if there is one; all ranks begin with its weights.
    step = tf.Variable(0, dtype=tf.int64)
    checkpoint = tf.train.Checkpoint(step=step, model=model, optimizer=optimizer)
    checkpoints = None
    if rank == 0 and args.checkpoint_dir:
        checkpoints = tf.train.CheckpointManager(checkpoint, args.checkpoint_dir, max_to_keep=2)
        if checkpoints.restore_or_initialize():
            print(f"resumed from {args.checkpoint_dir} at step {int(step)}")
    hvd.broadcast_variables([step, *model.variables, *optimizer.variables], root_rank=0)

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

    def log() -> None:
        loss = float(hvd.allreduce(interval.loss / interval.steps, name="loss"))
        if not math.isfinite(loss):  # the same on all ranks
            sys.exit(f"train_dnn.py: error: loss={loss} at step {done}: see labels, learning rate")
        if rank == 0:
            print(f"step={done} {interval.summary(loss, ranks)}")

    # The clock starts after the first step, which pays for start-up: tracing, connections, the
    # first batch's way through an empty pipeline.
    done = first_step = int(step)
    interval, stopping = Interval(), False
    global iterator  # stays until the process ends, for the reason at the end of this file
    iterator = iter(batches)
    while done < args.max_steps and not stopping:
        wait_start = time.perf_counter()
        images, labels = next(iterator)
        interval.data_wait += time.perf_counter() - wait_start

        # As large as all ranks' batches together allow, but not at once (Goyal et al., 2017).
        warm = min(1.0, (done + 1) / args.warmup_steps) if args.warmup_steps else 1.0
        optimizer.learning_rate.assign(args.lr * (1 + (ranks - 1) * warm))
        stop = tf.constant(float(stop_requested.is_set()))
        loss, stop_votes = train_step(images, labels, stop)
        stopping = float(stop_votes) > 0

        done += 1
        interval.add(len(labels), loss)
        if done == first_step + 1:
            pulse.first_step_done()
            interval = Interval()
        elif done % args.log_every == 0 or done == args.max_steps or stopping:
            log()
            interval = Interval()
        step.assign(done)
        if checkpoints and (
            done % args.checkpoint_every == 0 or done == args.max_steps or stopping
        ):
            checkpoints.save(done)

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


def build_batches(args: argparse.Namespace, rank: int, ranks: int, cores: int) -> Iterable:
    """Return this rank's batches without end: images (N, 32, 32, 3) and labels (N,).

    cores: of this host, for each rank.
    """
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
        threads=cores,
    )


@dataclass
class Interval:
    """What has been measured since the last log line."""

    start: float = field(default_factory=time.perf_counter)
    data_wait: float = 0.0  # seconds
    steps: int = 0
    samples: int = 0
    loss: tf.Tensor | float = 0.0  # sum over the steps

    def add(self, samples: int, loss: tf.Tensor) -> None:
        self.steps += 1
        self.samples += samples
        self.loss += loss

    def summary(self, loss: float, ranks: int) -> str:
        """Return the means as text, for a log that people and regular expressions read."""
        seconds = time.perf_counter() - self.start
        return (
            f"loss={loss:.4f} step_time_ms={1000 * seconds / self.steps:.2f} "
            f"data_wait_ms={1000 * self.data_wait / self.steps:.2f} "
            f"samples_per_s={ranks * self.samples / seconds:.1f}"
        )


if __name__ == "__main__":
    number = os.environ.get("HOROVOD_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
    with pulse.watched(f"rank {number}"):  # the launcher sees it die or hang
        reason = main()
        hvd.shutdown()
    print(reason, file=sys.stderr, end="\n" if reason else "", flush=True)
    # Not sys.exit, which destroys everything: the iterator would wait for tf.data's tuning thread,
    # and that sleeps for up to a minute.
    sys.stdout.flush()
    os._exit(1 if reason else 0)
