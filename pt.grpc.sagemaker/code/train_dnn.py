"""Train an image classifier on MNIST-format data, with samples prepared here or on other machines.

`--data-mode` says where samples come from: `local` prepares them on this host's own cores,
`service` asks the data hosts for them, `synthetic` repeats one batch, which shows how fast training
could be. The first two give the same batches, so they train the same model, bit for bit.

Run it as it is, or on several GPUs with `torchrun --nproc-per-node=N train_dnn.py ...`.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

# Data workers share the cores with training threads, so these must sleep while they wait for each
# other: by default they spin, which makes steps several times slower. Read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader

import parallel
import pulse
from batches import LocalLoader
from dataset import MnistDataset, SyntheticLoader, milliseconds_per_sample
from feed_client import FeedLoader
from model import build


def parse_arguments() -> argparse.Namespace:
    """Read the command line; what doesn't fit together ends the program with a sentence."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.error = lambda message: sys.exit(f"train_dnn.py: error: {message}")
    add = parser.add_argument
    add("--data-mode", choices=["local", "service", "synthetic"], default="local")
    add("--data-hosts", default="", metavar="HOST:PORT,...", help="data hosts (service)")
    add("--train-dir", help="folder of the training files (local)")
    add("--test-dir", help="folder of the test files; evaluates at the end if given")
    add("--model", default="mnist", help="mnist or small")
    add("--parallelism", choices=parallel.PARALLELISMS, default="ddp", help="of several ranks")
    add("--augment", type=int, default=0, help="how finely it is computed (local)")
    add("--batch-size", type=int, default=128, help="samples per step of each rank")
    add("--epochs", type=int, default=1)
    add("--max-steps", type=int, default=0, help="stop after this many steps; 0: no limit")
    add("--lr", type=float, default=1e-3, help="learning rate of Adam")
    add("--seed", type=int, default=0)
    add("--workers", type=int, default=0, help="data processes (local); 0: by cores")
    add("--log-every", type=int, default=10, metavar="STEPS")
    add("--model-dir", type=Path, default=Path("model"), help="where model.pt is written")
    add("--checkpoint-dir", type=Path, help="where checkpoint.pt is written, and looked for")
    add("--checkpoint-every", type=int, default=100, metavar="STEPS")
    args = parser.parse_args()

    args.data_hosts = [host for host in args.data_hosts.split(",") if host]
    args.token = os.environ.get("HETERO_TOKEN", "")
    for name in ("batch_size", "epochs", "log_every", "checkpoint_every"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be 1 or more")
    if args.max_steps < 0:
        parser.error("--max-steps must be 0, which is no limit, or more")
    if not 0 <= args.seed < 2**32:
        parser.error("--seed must be from 0 to 2**32 - 1")
    if args.data_mode == "local" and not args.train_dir:
        parser.error("--data-mode local needs --train-dir, the folder of the training files")
    if args.data_mode == "service" and not args.data_hosts:
        parser.error("--data-mode service needs --data-hosts, the addresses of the data hosts")
    if args.data_mode == "service" and not args.token:
        parser.error("the environment variable HETERO_TOKEN must hold the job's token")
    if args.data_mode == "synthetic" and not args.max_steps:
        parser.error("--data-mode synthetic has no end of its own: say how many --max-steps")
    return args


def main() -> None:
    """Train, and save the model."""
    args = parse_arguments()
    # The job's log shows each line at once, and whole: ranks, which torchrun runs with `python -u`,
    # would write its end by itself.
    sys.stdout.reconfigure(line_buffering=True, write_through=False)

    # torchrun tells each process its place among the others; without it there is just this one.
    rank = int(os.environ.get("RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    cores = max(1, len(os.sched_getaffinity(0)) // local_world_size)
    torch.set_num_threads(cores)
    check_gpus()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    if rank == 0:
        print(f"torch={torch.__version__} cuda={torch.version.cuda} device={device.type}")

    torch.manual_seed(args.seed)  # the same initial weights in every run
    try:
        model = build(args.model)
        # Without a GPU, a data worker on a single core would only take turns with the training.
        workers = args.workers or (0 if cores == 1 and device.type == "cpu" else cores)
        loader = build_loader(args, rank, world_size, workers, device)
        test_set = MnistDataset(args.test_dir, train=False) if args.test_dir else None
    except (OSError, ValueError) as error:  # a missing file, a data host that can't be reached
        sys.exit(f"train_dnn.py: error: {error}")

    control = parallel.join_ranks(device, args.parallelism) if world_size > 1 else None
    model = parallel.share_model(model, args.parallelism, device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    # From here on SIGTERM ends the current step, saves a checkpoint, and only then ends the run.
    stop_requested = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop_requested.set())

    # Rank 0 has the checkpoint, if there is one; all ranks continue from it, and there may be more
    # or fewer of them than those that wrote it.
    first_step = first_epoch = 0
    checkpoint = load_checkpoint(args.checkpoint_dir) if rank == 0 else None
    state = checkpoint.pop("state") if checkpoint else {}
    checkpoint = parallel.from_rank_0(checkpoint, control)
    if checkpoint:
        first_step, first_epoch = checkpoint["step"], checkpoint["epoch"]
        parallel.load_state(model, optimizer, state)
        loader.load_state_dict(checkpoint["loader"])
        if rank == 0:
            print(f"resumed from {args.checkpoint_dir} at step {first_step}")
    del checkpoint, state

    def save_checkpoint() -> None:
        if args.checkpoint_dir:
            state = parallel.whole_state(model, optimizer)  # from all ranks
            if rank == 0:
                progress = {"step": step, "epoch": epoch, "loader": loader.state_dict()}
                save({**progress, "state": state}, args.checkpoint_dir / "checkpoint.pt")

    def log() -> None:
        if rank == 0:
            print(f"step={step} epoch={epoch + 1} {interval.summary(world_size)}")

    # The clock starts after the first step, which pays for start-up: connections, worker processes,
    # CUDA kernels, the first batch's way through an empty pipeline.
    step, interval = first_step, Interval()
    last_step = args.max_steps or float("inf")
    stopping = False
    model.train()
    for epoch in range(first_epoch, args.epochs):
        if stopping or step >= last_step:
            break
        loader.set_epoch(epoch)
        wait_start = time.perf_counter()
        for images, labels in loader:
            interval.data_wait += time.perf_counter() - wait_start

            # Dropout depends on seed, step and rank only, so that a resumed run repeats it.
            torch.manual_seed((args.seed * 1_000_003 + step) * world_size + rank)
            images = images.to(device, non_blocking=True)
            labels = labels.to(device, non_blocking=True)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()

            step += 1
            interval.add(len(labels), loss)
            if step == first_step + 1:
                loss.item()  # waits until the GPU has done it
                pulse.first_step_done()
                if rank == 0 and world_size > 1:
                    print(parallel.describe(model, optimizer, args.parallelism))
                interval = Interval()
            elif step % args.log_every == 0:
                log()
                interval = Interval()

            stopping = parallel.any_rank(stop_requested.is_set(), control)
            if stopping or step >= last_step:
                break
            if step % args.checkpoint_every == 0:
                save_checkpoint()
            wait_start = time.perf_counter()
        if interval.steps:  # since the last log line
            log()
            interval = Interval()
        save_checkpoint()

    weights = parallel.whole_weights(model)
    if world_size > 1:
        dist.barrier(control)  # when one rank ends, torchrun has little patience with the others
        dist.destroy_process_group()
    if stopping and step < last_step:
        sys.exit(f"training stopped by SIGTERM after step {step}")
    if rank == 0:
        save(weights, args.model_dir / "model.pt")
        if test_set:
            model = build(args.model).to(device)  # the plain one, which needs no other rank
            model.load_state_dict(weights)
            print(f"test_accuracy={evaluate(model, test_set, device):.4f}")
        if step == first_step:
            print(f"training was complete already: step={step}")
        else:
            print(f"training finished after step {step}: loss {loss.item():.4f}")


def check_gpus() -> None:
    """End the program if torch misses GPUs of the host: a CPU would train at their price.

    SageMaker counts the host's GPUs in SM_NUM_GPUS.
    """
    there = int(os.environ.get("SM_NUM_GPUS", "0"))
    # Without is_available the count may be the driver's, of GPUs that CUDA cannot use.
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if seen < there:
        ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
        found = shutil.which("nvidia-smi") and subprocess.run(ask, capture_output=True, text=True)
        driver = found.stdout.strip() if found else "unknown (no nvidia-smi)"
        sys.exit(
            f"train_dnn.py: error: the host has {there} GPUs (SM_NUM_GPUS), but torch sees "
            f"{seen}: driver {driver} does not fit the image's CUDA {torch.version.cuda}. Take an "
            "image with an older CUDA, or its libraries for older drivers (README, On AWS)."
        )


def build_loader(
    args: argparse.Namespace, rank: int, world_size: int, workers: int, device: torch.device
) -> LocalLoader | FeedLoader | SyntheticLoader:
    """Return this rank's source of batches, each a pair: images (N, 1, 28, 28), labels (N,)."""
    pin_memory = device.type == "cuda"  # lets the copy to the GPU overlap with computing
    if args.data_mode == "synthetic":
        return SyntheticLoader(args.batch_size, length=args.max_steps, pin_memory=pin_memory)
    share = {
        "batch_size": args.batch_size,
        "shuffle": True,
        "seed": args.seed,
        "rank": rank,
        "world_size": world_size,
        "pin_memory": pin_memory,
    }
    if args.data_mode == "service":
        return FeedLoader(args.data_hosts, args.token, **share)
    dataset = MnistDataset(args.train_dir, augment=args.augment)
    check_shared_memory(dataset[0][0].nbytes * args.batch_size, workers)
    if rank == 0:
        print(f"data_ms_per_sample={milliseconds_per_sample(dataset):.3f} workers={workers}")
    return LocalLoader(dataset, num_workers=workers, **share)


def check_shared_memory(batch_bytes: int, workers: int) -> None:
    """Raise OSError if /dev/shm cannot hold what a DataLoader's workers have ready in it.

    That is `prefetch_factor`, 2, batches for each worker, and the one that is trained on. The ranks
    of a host share it.
    """
    free = shutil.disk_usage("/dev/shm").free // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    needed = batch_bytes * (2 * workers + 1)
    if workers and needed > free:
        raise OSError(
            f"{workers} workers hold up to {needed / 2**20:.0f} MiB of batches in /dev/shm, where "
            f"this rank has {free / 2**20:.0f} MiB: set the hyperparameter workers to "
            f"{max(1, (free // batch_bytes - 1) // 2)}, or take smaller batches."
        )


@dataclass
class Interval:
    """What has been measured since the last log line."""

    start: float = field(default_factory=time.perf_counter)
    data_wait: float = 0.0  # seconds
    steps: int = 0
    samples: int = 0
    loss: torch.Tensor | float = 0.0  # sum over the steps; stays on the GPU

    def add(self, samples: int, loss: torch.Tensor) -> None:
        self.steps += 1
        self.samples += samples
        self.loss += loss.detach()

    def summary(self, world_size: int) -> str:
        """Return the means as text, for a log that people and regular expressions read."""
        loss = float(self.loss) / self.steps  # waits for the GPU: only now is the time below true
        seconds = time.perf_counter() - self.start
        return (
            f"loss={loss:.4f} step_time_ms={1000 * seconds / self.steps:.2f} "
            f"data_wait_ms={1000 * self.data_wait / self.steps:.2f} "
            f"samples_per_s={world_size * self.samples / seconds:.1f}"
        )


def load_checkpoint(folder: Path | None) -> dict | None:
    """Return the checkpoint in `folder`, or else None."""
    if folder and (folder / "checkpoint.pt").exists():
        return torch.load(folder / "checkpoint.pt", map_location="cpu", weights_only=True)
    return None


def save(state: dict, path: Path) -> None:
    """Write `state` to `path` in one go: a reader finds the old file or the new one, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(path)


@torch.no_grad()
def evaluate(model: torch.nn.Module, dataset: MnistDataset, device: torch.device) -> float:
    """Return the share of the images that `model` gets right."""
    model.eval()
    correct = 0
    for images, labels in DataLoader(dataset, batch_size=1000):
        predictions = model(images.to(device)).argmax(dim=1).cpu()
        correct += (predictions == labels).sum().item()
    return correct / len(dataset)


if __name__ == "__main__":
    with pulse.watched(f"rank {os.environ.get('RANK', 0)}"):  # the launcher sees it die or hang
        main()
