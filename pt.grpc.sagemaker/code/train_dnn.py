"""Train an image classifier on MNIST-format data, with samples prepared here or on other machines.

`--data-mode` says where the samples come from. `local` prepares them on this host's own cores, and
`service` on the data hosts that HETERO_DATA_HOSTS names. Both give the same batches, so they train
the same model, bit for bit. `synthetic` repeats one batch: it shows how fast training could be.

Run it on its own, or on several GPUs with `torchrun --nproc-per-node=N train_dnn.py ...`.
"""

import argparse
import io
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

# Data workers share the cores with training threads, so these threads must sleep while they wait
# for each other. By default they spin, which makes steps several times slower. torch reads this
# variable when it is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler

import arguments
import parallel
from dataset import MnistDataset, SyntheticLoader, milliseconds_per_sample
from feed import RemoteDataset
from model import build


def parse_arguments() -> argparse.Namespace:
    """Read the command line. Exit with a message if its options do not fit together."""
    parser = arguments.parser(fail=lambda message: sys.exit(f"train_dnn.py: error: {message}"))
    add = parser.add_argument
    env = os.environ.get
    add("--train-dir", default=env("SM_CHANNEL_TRAINING"), help="training files (local, service)")
    add("--test-dir", default=env("SM_CHANNEL_TEST"), help="test files, to evaluate at the end")
    add("--model-dir", type=Path, default=env("SM_MODEL_DIR", "model"), help="model.pt goes here")
    add("--checkpoint-dir", type=Path, help="folder to write checkpoint.pt to, and resume from")
    args = parser.parse_args()

    data_hosts = os.environ.get("HETERO_DATA_HOSTS")
    args.data_mode = args.data_mode or ("service" if data_hosts else "local")
    if args.data_mode != "synthetic" and not args.train_dir:
        parser.error(f"--data-mode {args.data_mode} needs --train-dir, the training files' folder")
    if args.data_mode == "service" and not data_hosts:
        parser.error("--data-mode service needs data hosts, in HETERO_DATA_HOSTS")
    if args.data_mode != "service":
        os.environ.pop("HETERO_DATA_HOSTS", None)
    if args.data_mode == "synthetic" and not args.max_steps:
        parser.error("--data-mode synthetic never ends by itself: set --max-steps")
    if args.data_mode == "synthetic":  # a run is one epoch; a job that is resumed needs several
        args.epochs = args.max_steps
    return args


def main() -> None:
    """Train, and save the model."""
    args = parse_arguments()
    # launcher.py or torchrun sets RANK and WORLD_SIZE. Without them there is one rank.
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = set_up(args.seed)
    model, dataset, test_set = load(args, device)
    control = parallel.join_ranks(device, args.parallelism) if world_size > 1 else None
    model = parallel.share_model(model, args.parallelism, device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    # From here on, SIGTERM ends the run after the current step, with a checkpoint.
    stop_requested, stopping = threading.Event(), False
    signal.signal(signal.SIGTERM, lambda *_: stop_requested.set())
    checkpoint = Checkpoint(args.checkpoint_dir, model, optimizer, control)
    at = checkpoint.load()
    first_step, last_step = at.step, args.max_steps or float("inf")
    log = StepLog(args.log_every)

    model.train()
    while at.epoch < args.epochs and at.step < last_step and not stopping:
        loader = build_loader(args, dataset, at, device)
        for images, labels in log.waited_for(loader):
            # Dropout depends only on seed, step and rank, so a resumed run repeats it.
            torch.manual_seed((args.seed * 1_000_003 + at.step) * world_size + rank)
            images = images.to(device, non_blocking=True)
            labels = labels.to(device, non_blocking=True)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()

            at.step += 1
            at.samples_done += world_size * args.batch_size
            log.add(at, len(labels), loss)
            if at.step == first_step + 1 and rank == 0:
                print(parallel.describe(model, optimizer, args.parallelism))
            stopping = parallel.any_rank(stop_requested.is_set(), control)
            if stopping or at.step >= last_step:
                break
            if at.step % args.checkpoint_every == 0:
                checkpoint.save(at)
        log.write(at)
        if at.samples_done >= len(dataset):
            at.epoch, at.samples_done = at.epoch + 1, 0
        checkpoint.save(at)

    weights = parallel.whole_weights(model)
    parallel.leave_ranks(control)
    if stopping and at.step < last_step:
        sys.exit(f"training stopped by SIGTERM after step {at.step}")
    if rank == 0:
        save(weights, args.model_dir / "model.pt")
        if test_set:
            print(f"test_accuracy={evaluate(weights, test_set, args.model, device):.4f}")
        log.finish(at)


@dataclass
class Progress:
    """How far training has progressed."""

    step: int = 0
    epoch: int = 0
    samples_done: int = 0  # in this epoch, by all ranks


class Checkpoint:
    """The file that any number of ranks can resume from; without a folder, nothing is saved."""

    def __init__(
        self,
        folder: Path | None,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        control: dist.ProcessGroup | None,
    ):
        self.path = folder / "checkpoint.pt" if folder else None
        self.model, self.optimizer, self.control = model, optimizer, control
        self.is_mine = control is None or dist.get_rank() == 0

    def load(self) -> Progress:
        """Restore all ranks from the file, which only rank 0 needs to have."""
        saved = None
        if self.is_mine and self.path and self.path.exists():
            saved = torch.load(self.path, map_location="cpu", weights_only=True)
        state = saved.pop("state") if saved else {}
        saved = parallel.from_rank_0(saved, self.control)
        if not saved:
            return Progress()
        parallel.load_state(self.model, self.optimizer, state)
        if self.is_mine:
            print(f"resumed from {self.path.parent} at step {saved['step']}")
        return Progress(**saved)

    def save(self, at: Progress) -> None:
        """Write the file. All ranks must call this."""
        if self.path:
            state = parallel.whole_state(self.model, self.optimizer)
            if self.is_mine:
                save({**asdict(at), "state": state}, self.path)


def batches_left(
    dataset: Dataset, at: Progress, batch_size: int, seed: int
) -> tuple[list[list[int]], int]:
    """Return this rank's remaining batches of the epoch, and the number of the first one."""
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    first, rest = divmod(at.samples_done, ranks * batch_size)
    if rest:  # the epoch began with another batch size or number of ranks: divide the rest again
        everyones = DistributedSampler(dataset, 1, 0, seed=seed)
        everyones.set_epoch(at.epoch)
        left = list(everyones)[at.samples_done :]
        mine = [left[i] for i in DistributedSampler(left, ranks, rank, shuffle=False)]
        return list(BatchSampler(mine, batch_size, drop_last=False)), 0
    sampler = DistributedSampler(dataset, ranks, rank, seed=seed)
    sampler.set_epoch(at.epoch)
    return list(BatchSampler(sampler, batch_size, drop_last=False))[first:], first


def cores_of_this_rank() -> int:
    """Return how many of the host's cores this rank may use."""
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def set_up(seed: int) -> torch.device:
    """Prepare this process, with a thread for each of its cores; return its GPU, or the CPU."""
    # Write each line at once and in one piece. torchrun starts ranks with `python -u`, which writes
    # line ends separately, so the lines of several ranks would mix in the job's log.
    sys.stdout.reconfigure(line_buffering=True, write_through=False)
    check_gpus()
    torch.set_num_threads(cores_of_this_rank())
    torch.manual_seed(seed)  # the same initial weights in every run
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if os.environ.get("RANK", "0") == "0":
        print(f"torch={torch.__version__} cuda={torch.version.cuda} device={device.type}")
    return device


def check_gpus() -> None:
    """Exit if torch does not see all GPUs of the host.

    Otherwise the CPU would train, at the price of the GPUs. SM_NUM_GPUS is SageMaker's GPU count.
    """
    there = int(os.environ.get("SM_NUM_GPUS", "0"))
    # Without is_available, device_count may include GPUs that CUDA cannot use.
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if seen < there:
        ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
        found = shutil.which("nvidia-smi") and subprocess.run(ask, capture_output=True, text=True)
        driver = found.stdout.strip() if found else "unknown (no nvidia-smi)"
        sys.exit(
            f"train_dnn.py: error: the host has {there} GPUs (SM_NUM_GPUS), but torch sees "
            f"{seen}: driver {driver} does not fit the image's CUDA {torch.version.cuda}. Use an "
            "image with an older CUDA, or with CUDA's compatibility libraries for older drivers."
        )


def count_workers(args: argparse.Namespace, device: torch.device) -> int:
    """Return how many DataLoader workers this rank has."""
    cores = cores_of_this_rank()
    if args.data_mode == "service":  # they only receive: one does so while the other hands over
        return args.workers or 2
    # Without a GPU, a worker on a single core would only take turns with the training.
    return args.workers or (0 if cores == 1 and device.type == "cpu" else cores)


def load(
    args: argparse.Namespace, device: torch.device
) -> tuple[torch.nn.Module, Dataset, Dataset | None]:
    """Return the model, the Dataset to train on, and the Dataset to test with, if there is one."""
    try:
        model, dataset = build(args.model), build_dataset(args, device)
        return model, dataset, MnistDataset(args.test_dir, train=False) if args.test_dir else None
    except (OSError, ValueError) as error:  # a missing file, no HETERO_TOKEN
        sys.exit(f"train_dnn.py: error: {error}")


def build_dataset(args: argparse.Namespace, device: torch.device) -> Dataset:
    """Return the Dataset. Its samples are pairs: an image (1, 28, 28) and its label."""
    if args.data_mode == "synthetic":
        return range(args.batch_size)
    dataset = MnistDataset(args.train_dir, augment=args.augment)
    check_shared_memory(dataset[0][0].nbytes * args.batch_size, count_workers(args, device))
    if os.environ.get("RANK", "0") == "0":
        print(f"data_ms_per_sample={milliseconds_per_sample(dataset):.3f}")
    return RemoteDataset(dataset)


def build_loader(
    args: argparse.Namespace, dataset: Dataset, at: Progress, device: torch.device
) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    """Return a loader for this rank's remaining batches of the epoch."""
    pin_memory = device.type == "cuda"  # so that copies to the GPU overlap with computation
    if args.data_mode == "synthetic":
        return SyntheticLoader(args.batch_size, args.max_steps, pin_memory)
    batches, first = batches_left(dataset, at, args.batch_size, args.seed)
    dataset.start_at_batch(first)
    return DataLoader(
        dataset,
        batch_sampler=batches,
        num_workers=count_workers(args, device),
        worker_init_fn=outlive_sigterm,
        pin_memory=pin_memory,
        # Augmentation depends only on seed and epoch, so a resumed run repeats it.
        generator=torch.Generator().manual_seed(args.seed * 1_000_003 + at.epoch),
    )


def outlive_sigterm(worker_id: int) -> None:
    """Make a DataLoader worker ignore SIGTERM, so that it serves until its rank ends.

    SIGTERM is meant for the rank, but torchrun sends it to the rank's whole process group. The rank
    may need more batches until all ranks have stopped after the same step.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def check_shared_memory(batch_bytes: int, workers: int) -> None:
    """Raise OSError if /dev/shm is too small for the batches that DataLoader workers keep ready.

    These are 2 batches for each worker (`prefetch_factor`), and the batch that is trained on. The
    ranks of a host share /dev/shm.
    """
    free = shutil.disk_usage("/dev/shm").free // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    needed = batch_bytes * (2 * workers + 1)
    if workers and needed > free:
        raise OSError(
            f"{workers} workers hold up to {needed / 2**20:.0f} MiB of batches in /dev/shm, but "
            f"this rank has only {free / 2**20:.0f} MiB: set the hyperparameter workers to "
            f"{max(1, (free // batch_bytes - 1) // 2)}, or use smaller batches."
        )


class StepLog:
    """Measures steps. Rank 0 prints their means every `every` steps."""

    def __init__(self, every: int):
        self.every, self.prints = every, os.environ.get("RANK", "0") == "0"
        self.world_size = int(os.environ.get("WORLD_SIZE", 1))
        self.last_loss: torch.Tensor | None = None
        self.restart()

    def restart(self) -> None:
        """Start a new interval of measurement."""
        self.start, self.data_wait = time.perf_counter(), 0.0
        self.steps = self.samples = 0
        self.loss: torch.Tensor | float = 0.0  # sum over the steps; stays on the GPU

    def waited_for(self, batches: Iterable) -> Iterator:
        """Yield the batches, and measure how long the training waits for each."""
        iterator = iter(batches)
        while True:
            start = time.perf_counter()
            batch = next(iterator, None)
            if batch is None:
                return
            self.data_wait += time.perf_counter() - start
            yield batch

    def add(self, at: Progress, samples: int, loss: torch.Tensor) -> None:
        """Count a step."""
        is_first, self.last_loss = self.last_loss is None, loss.detach()
        if is_first:
            # Not measured: it includes start-up (connections, worker processes, CUDA kernels).
            loss.item()  # wait for the GPU
            return self.restart()
        self.steps += 1
        self.samples += samples
        self.loss += self.last_loss
        if at.step % self.every == 0:
            self.write(at)

    def write(self, at: Progress) -> None:
        """Print the means since the last line, as `key=value` pairs that are easy to parse."""
        if self.steps and self.prints:
            loss = float(self.loss) / self.steps  # waits for the GPU, so the time below is right
            seconds = time.perf_counter() - self.start
            print(
                f"step={at.step} epoch={at.epoch + 1} loss={loss:.4f} "
                f"step_time_ms={1000 * seconds / self.steps:.2f} "
                f"data_wait_ms={1000 * self.data_wait / self.steps:.2f} "
                f"samples_per_s={self.world_size * self.samples / seconds:.1f}"
            )
        self.restart()

    def finish(self, at: Progress) -> None:
        """Print the last step and its loss."""
        if self.last_loss is None:
            print(f"training was complete already: step={at.step}")
        else:
            print(f"training finished after step {at.step}: loss {self.last_loss.item():.4f}")


def save(state: dict, path: Path) -> None:
    """Write `state` to `path` atomically: a reader finds either the old file or the new one.

    Raises:
        OSError: The file cannot be written, for example because the disk is full.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    try:
        with open(partial, "wb") as file:
            torch.save(state, file)
    except RuntimeError as error:  # torch raises this if it cannot write, and hides the reason
        if not isinstance(error.__context__, OSError):
            raise
        partial.unlink()  # or SageMaker would copy it to S3
        why, whole = error.__context__, io.BytesIO()
        torch.save(state, whole)
        text = f"{why.strerror} for {whole.tell():,} bytes"
        raise OSError(why.errno, text, str(path)) from None
    partial.replace(path)


@torch.no_grad()
def evaluate(weights: dict, dataset: MnistDataset, name: str, device: torch.device) -> float:
    """Return the fraction of images that the model classifies correctly. Uses this rank alone."""
    model = build(name).to(device).eval()
    model.load_state_dict(weights)
    correct = 0
    for images, labels in DataLoader(dataset, batch_size=1000):
        predictions = model(images.to(device)).argmax(dim=1).cpu()
        correct += (predictions == labels).sum().item()
    return correct / len(dataset)


if __name__ == "__main__":
    main()
