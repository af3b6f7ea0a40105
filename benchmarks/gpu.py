"""How the loader and `measured` do beside a real GPU.

    .venv/bin/python benchmarks/gpu.py      at most six minutes

It is meant for an idle machine with one NVIDIA GPU and 8 to 16 cores. Without a GPU, or with
--small, everything is small, and it takes a minute: that only shows that it works. It needs torch,
grpcio, cloudpickle and psutil.

A quarter of the cores stands for the GPU instance: the training and its DataLoader's workers are
pinned to these. The others stand for a data host. Both are one machine, so there is no network
between them, and they share memory and caches. Each part runs in a process of its own:

- batches: Are the batches on the GPU those of a loader that has neither data hosts nor page-locked
  memory? Two epochs, with several ways to start the DataLoader's workers.
- ddp, fsdp: One rank (NCCL; gloo without a GPU) trains on batches from the data host.
- feeding: How long does a step of ResNet50 take, and how long do its process and its GPU wait, if
  no data is needed, if the GPU instance prepares it alone, and with the data host? What does
  `measured` say?

In `feeding`, `reads loss` is a loop that calls loss.item() after each step, so the process waits
for the GPU. The other loop runs ahead of the GPU. All times are means, unless they say median. The
process's wait is the time in next(batches), by the host's clock. CUDA events at the beginning of a
step's work on the GPU (which includes the copy of its batch) and at its end give the other two: the
GPU is busy between them, and idle from one step's end to the next one's beginning.
"""

import argparse
import contextlib
import io
import itertools
import json
import math
import os
import random
import re
import signal
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from statistics import mean, median
from typing import Any

import psutil
import torch
from common import (
    ROOT,
    at_least_two_cores,
    cpu_seconds,
    data_host,
    family,
    free_port,
    table,
    use,
    write_results,
)
from torch import nn
from torch.nn.functional import cross_entropy, interpolate
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from feed import RemoteDataset
from hetero.spare import run_when_idle, starting_on
from parallel import join_ranks, leave_ranks, share_model

sys.path.append(str(ROOT))
from shared.measured import measured  # noqa: E402

# When each part must have ended, in seconds after the first one's start.
ENDS = {"batches": 90, "ddp": 135, "fsdp": 180, "feeding": 350}
GRACE_SECONDS = 15  # for an interrupted part
MOST_CORES = 16  # larger machines leave the others idle
PHOTOS, CLASSES = 32, 1000
WARM_UP, STEPS, SECONDS = 20, 60, 12.0  # of a loop; it ends early after so many seconds
RANK_STEPS = 20
COMPARED = 6  # batches of an epoch
SAME, DIFFERENT = "equal", "DIFFERENT"


@dataclass(frozen=True)
class Setting:
    """The sizes, and the cores of the GPU instance and of the data host."""

    device: torch.device
    is_small: bool
    batch_size: int
    trainer: list[int]
    host: list[int]

    def loader(self, dataset: Dataset, **options: Any) -> DataLoader:
        """Return a DataLoader with one worker for each core of the GPU instance."""
        options = {"batch_size": self.batch_size, "num_workers": len(self.trainer)} | options
        return DataLoader(dataset, pin_memory=self.is_cuda, **options)

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        """Wait until the GPU has done its work."""
        if self.is_cuda:
            torch.cuda.synchronize()


@contextlib.contextmanager
def server(cores: list[int], workers: int, address: str = "") -> Iterator[tuple[str, list]]:
    """Run a data server on these cores; yield its address and its processes."""
    with contextlib.ExitStack() as stack:
        with starting_on(cores):
            address, process = stack.enter_context(data_host(workers, address=address))
        yield address, process


# ------------------------------------------------------- data and model


class Photos(Dataset):
    """Photos that are decompressed as PNG files are, cropped at random, resized and flipped.

    They have ImageNet's average size. A sample takes some 6 ms of CPU time, and stays uint8.
    is_fixed: crop as the index says, instead of at random.
    """

    def __init__(self, is_small: bool, is_fixed: bool = False, count: int = 10_000_000):
        self.is_fixed, self.count, random_numbers = is_fixed, count, torch.Generator()
        self.size, self.shape = (32, (3, 48, 64)) if is_small else (224, (3, 375, 500))
        random_numbers.manual_seed(0)
        self.files = []
        for _ in range(PHOTOS):
            colors = 224 * torch.rand(1, 3, 24, 32, generator=random_numbers)
            noise = torch.randint(16, self.shape, generator=random_numbers)
            photo = interpolate(colors, self.shape[1:], mode="bilinear")[0] + noise
            self.files.append(zlib.compress(photo.byte().numpy().tobytes()))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        numbers = torch.Generator().manual_seed(index) if self.is_fixed else None
        area, ratio, down, right, flip = torch.rand(5, generator=numbers).tolist()
        data = bytearray(zlib.decompress(self.files[index % PHOTOS]))
        photo = torch.frombuffer(data, dtype=torch.uint8).view(1, *self.shape)
        # As torchvision's RandomResizedCrop: 8 to 100 % of the area, 3:4 to 4:3.
        (most_high, most_wide), ratio = self.shape[1:], math.exp((2 * ratio - 1) * math.log(4 / 3))
        area = (0.08 + 0.92 * area) * most_high * most_wide
        high = min(most_high, round(math.sqrt(area / ratio)))
        wide = min(most_wide, round(math.sqrt(area * ratio)))
        top, left = int(down * (most_high - high + 1)), int(right * (most_wide - wide + 1))
        crop = photo[:, :, top : top + high, left : left + wide].float()
        image = interpolate(crop, (self.size, self.size), mode="bilinear", antialias=True)[0]
        image = image.flip(2) if flip < 0.5 else image
        return image.round_().clamp_(0, 255).byte(), index % CLASSES


class PhotoStream(IterableDataset):
    """The same as a stream, shared among the DataLoader's workers."""

    def __init__(self, photos: Photos):
        self.photos = photos

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        worker = get_worker_info()
        for index in range(worker.id, len(self.photos), worker.num_workers):
            yield self.photos[index]


class Bottleneck(nn.Module):
    """ResNet's block of three convolutions."""

    def __init__(self, inputs: int, width: int, stride: int):
        super().__init__()
        outputs, self.shortcut = 4 * width, nn.Sequential()
        self.residual = nn.Sequential(
            *normalized(inputs, width, 1),
            nn.ReLU(inplace=True),
            *normalized(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *normalized(width, outputs, 1),
        )
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(*normalized(inputs, outputs, 1, stride))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.residual(x) + self.shortcut(x))


def normalized(inputs: int, outputs: int, size: int, stride: int = 1) -> tuple[nn.Module, ...]:
    convolution = nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)
    return convolution, nn.BatchNorm2d(outputs)


def resnet50(is_small: bool) -> nn.Sequential:
    """Return a ResNet50, or a small network of the same kind."""
    blocks, width = ((1, 1), 8) if is_small else ((3, 4, 6, 3), 64)
    layers = [*normalized(3, width, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    inputs = width
    for stage, count in enumerate(blocks):
        for block in range(count):
            layers.append(Bottleneck(inputs, width << stage, 2 if stage and not block else 1))
            inputs = 4 * width << stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, CLASSES))


class Trainer:
    """A model with random weights, and its optimizer."""

    def __init__(self, setting: Setting, parallelism: str = "ddp"):
        torch.manual_seed(0)
        self.device = setting.device
        self.model = share_model(resnet50(setting.is_small), parallelism, self.device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01, momentum=0.9)

    def step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        """Train on a batch, and return its loss. The GPU may not have finished yet."""
        images, labels = (part.to(self.device, non_blocking=True) for part in batch)
        images = images.to(memory_format=torch.channels_last).float().div_(255)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=images.is_cuda):
            loss = cross_entropy(self.model(images), labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


# ------------------------------------------------------- batches: are they the same?


def two_epochs(setting: Setting, dataset: Dataset, device: str, **options: Any) -> list:
    """Return all batches of two epochs, which lie on the device."""
    torch.manual_seed(0)
    loader, batches = DataLoader(dataset, 16, num_workers=2, **options), []
    for _ in range(2):
        for batch in loader:
            assert not options.get("pin_memory") or all(part.is_pinned() for part in batch)
            batches.append([part.to(device, non_blocking=True) for part in batch])
    assert len(batches) == 2 * COMPARED
    return batches


def batches(setting: Setting, results: dict) -> list[str]:
    """Print whether batches are the same; return which are not."""
    # What to send, and what it is compared with. A stream's random numbers are those of a plain
    # DataLoader. Those of a map-style Dataset are not, but do not depend on the data hosts.
    fixed, cropped = (
        Photos(setting.is_small, is_fixed, 16 * COMPARED) for is_fixed in (True, False)
    )
    stream = PhotoStream(cropped)
    os.environ.pop("HETERO_DATA_HOSTS", None)
    kinds = {
        "fixed crops, and a plain DataLoader": (fixed, fixed),
        "random crops, and RemoteDataset without data hosts": (cropped, RemoteDataset(cropped)),
        "random crops in a stream, and a plain DataLoader": (stream, stream),
    }
    ways = {
        "fork": {},
        "fork, persistent_workers": {"persistent_workers": True},
        "spawn": {"multiprocessing_context": "spawn"},
    }

    def same(dataset: Dataset, reference: Dataset, **options: Any) -> bool:
        sent = RemoteDataset(dataset)
        ours = two_epochs(setting, sent, setting.device, pin_memory=setting.is_cuda, **options)
        keeps = {"persistent_workers": options.get("persistent_workers", False)}
        expected = two_epochs(setting, reference, "cpu", **keeps)
        setting.synchronize()
        return all(
            map(torch.equal, sum(ours, []), (x.to(setting.device) for x in sum(expected, [])))
        )

    def rows() -> Iterator[list[str]]:
        first = [*kinds.values()][1]
        assert not torch.cuda.is_initialized()
        yield ["fork, before CUDA is initialized", "", SAME if same(*first) else DIFFERENT, ""]
        assert torch.cuda.is_initialized() == setting.is_cuda
        for way, options in ways.items():
            yield [way, *(SAME if same(*kind, **options) else DIFFERENT for kind in kinds.values())]

    with server(setting.host, len(setting.host)) as (address, _):
        use(address)
        shown: list = results.setdefault("rows", [])
        table(
            f"workers start by | {' | '.join(kinds)}", (shown.append(row) or row for row in rows())
        )
    return [f"batches, {row[0]}" for row in shown if DIFFERENT in row]


# ------------------------------------------------------- ddp, fsdp: one rank


def one_rank(parallelism: str, setting: Setting, results: dict) -> list[str]:
    """Train some steps; print their time; return what is wrong."""
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1")
    os.environ.update(MASTER_PORT=str(free_port()))
    for library in ("GLOO", "NCCL"):  # the machine's own name need not resolve
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
    control = join_ranks(setting.device, parallelism)
    trainer, losses, ends = Trainer(setting, parallelism), [], []
    with server(setting.host, len(setting.host)) as (address, _):
        use(address)
        loader = setting.loader(RemoteDataset(Photos(setting.is_small)))
        for batch in itertools.islice(loader, RANK_STEPS):
            losses.append(trainer.step(batch).item())
            ends.append(time.perf_counter())
    leave_ranks(control)
    steps_ms = [1e3 * (end - start) for start, end in itertools.pairwise(ends)]
    results.update(losses=losses, steps_ms=steps_ms)
    backend = "NCCL" if setting.is_cuda else "gloo"
    row = parallelism, backend, f"{losses[0]:.2f}", f"{losses[-1]:.2f}", f"{median(steps_ms):.1f}"
    table("one rank | backend | first loss | last loss | step ms, median", [row])
    return [] if all(map(math.isfinite, losses)) else [f"{parallelism}: a loss is not finite"]


# ------------------------------------------------------- feeding: who waits for what?


@dataclass
class Loop:
    """What was measured in a loop, in ms for each step; the cores used in seconds per second."""

    step_ms: float  # the mean, by the host's clock; the last step's end is the GPU's
    steps_ms: list[float]  # by the GPU's clock, if there is one
    wait_ms: list[float]
    idle_ms: list[float]
    busy_ms: list[float]
    cores_used: list[float]  # on the GPU instance, on the data host


def timed(
    setting: Setting, trainer: Trainer, batches: Iterator, reads_loss: bool, host: list
) -> Loop:
    """Train, and measure. host: the data host's processes."""
    marks, waits, turns = [], [], []

    def mark() -> Any:
        if not setting.is_cuda:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def cpu() -> list[float]:
        its = {process for one in host for process in family(one)}
        mine = {*family(psutil.Process())} - its
        return [cpu_seconds([p for p in side if p.is_running()]) for side in (mine, its)]

    def train(steps: int) -> None:
        until = time.perf_counter() + SECONDS
        while len(waits) < steps and (turned := time.perf_counter()) < until:
            turns.append(turned)
            batch = next(batches)
            waits.append(1e3 * (time.perf_counter() - turned))
            begin, loss = mark(), trainer.step(batch)
            marks.append((begin, mark()))
            if reads_loss:
                loss.item()
        setting.synchronize()

    train(WARM_UP)
    marks.clear(), waits.clear(), turns.clear()
    before, start = cpu(), time.perf_counter()
    train(STEPS)
    seconds, after = time.perf_counter() - start, cpu()
    steps = [1e3 * (b - a) for a, b in itertools.pairwise(turns)]
    idle, busy = [], []
    if setting.is_cuda:
        pairs = [*itertools.pairwise(marks)]
        steps = [begin.elapsed_time(later) for (begin, _), (later, _) in pairs]
        idle = [end.elapsed_time(begin) for (_, end), (begin, _) in pairs]
        busy = [begin.elapsed_time(end) for begin, end in marks]
    used = [(new - old) / seconds for new, old in zip(after, before, strict=True)]
    return Loop(1e3 * seconds / len(waits), steps, waits, idle, busy, used)


def answer(setting: Setting, trainer: Trainer, dataset: Dataset, reads_loss: bool) -> dict:
    """Return the numbers and the verdict that `measured` prints."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        loop = measured(setting.loader(dataset), 1)  # as few steps as possible
        for batch in loop:
            if loop.reported:
                break
            loss = trainer.step(batch)
            if reads_loss:
                loss.item()
    text = said.getvalue()
    line = next(line for line in text.splitlines() if line.startswith('{"measured": '))
    verdict = re.search(r"^verdict +(.*?)(:|$)", text, re.M)[1]
    return {**json.loads(line)["measured"], "verdict": verdict, "text": text}


def feeding(setting: Setting, results: dict) -> list[str]:
    """Print how long steps and waits take in each way."""
    trainer, photos = Trainer(setting), Photos(setting.is_small)
    k, n = len(setting.trainer), len(setting.host)
    before = time.process_time()
    samples = [photos[index] for index in range(PHOTOS)]
    results["sample_ms"] = 1e3 * (time.process_time() - before) / PHOTOS
    print(f"\nA sample takes {results['sample_ms']:.1f} ms of CPU time (of several threads, here).")
    images, labels = zip(
        *itertools.islice(itertools.cycle(samples), setting.batch_size), strict=True
    )
    lying = [part.to(setting.device) for part in (torch.stack(images), torch.tensor(labels))]
    floors: dict[bool, float] = {}

    def row(name: str, reads_loss: bool, loop: Loop, said: dict | None) -> list[str]:
        key = f"{name}, {'reads loss' if reads_loss else 'runs ahead'}"
        results[key] = {"loop": asdict(loop), "measured": said}
        floor = floors.setdefault(reads_loss, loop.step_ms)  # the first way is the one without data
        cells = [loop.step_ms, median(loop.steps_ms), 1e3 * setting.batch_size / loop.step_ms]
        cells += [
            mean(loop.wait_ms),
            *(mean(x) if x else None for x in (loop.idle_ms, loop.busy_ms)),
        ]
        cells += [*loop.cores_used, loop.step_ms - floor]
        shown = ["" if cell is None else f"{cell:.1f}" for cell in cells]
        if said:
            costs = said["step_ms"] - said["accelerator_ms"]
            percent = f"{max(0.0, 100 * costs / said['step_ms']):.0f} %"
            shown += [f"{costs:.1f}", percent, f"{said.get('cpu_percent', math.nan):.0f} %"]
            shown.append(said["verdict"])
        return [*key.rsplit(", ", 1), *shown, *[""] * (4 * (not said))]

    def rows() -> Iterator[list[str]]:
        for reads_loss in (True, False):
            loop = timed(setting, trainer, itertools.repeat(lying), reads_loss, [])
            yield row("a batch that lies on the device", reads_loss, loop, None)
        with contextlib.ExitStack() as stack:
            address, host = stack.enter_context(server(setting.host, n))
            yield from fed(f"{k} workers", [], [])
            yield from fed(f"{k} workers, data host with {n} cores", [address], [host])
            if k > 1:  # as `hetero` does it
                at = f"unix-abstract:benchmark {os.getpid()}"
                _, own = stack.enter_context(server(setting.trainer, k - 1, at))
                for process in family(own):
                    run_when_idle(process.pid)
                yield from fed(f"the same, and {k - 1} spare cores", [at, address], [host])

    def fed(name: str, addresses: list[str], hosts: list) -> Iterator[list[str]]:
        use(*addresses)
        dataset = RemoteDataset(photos) if addresses else photos
        for reads_loss in (True, False):
            loop = timed(setting, trainer, iter(setting.loader(dataset)), reads_loss, hosts)
            yield row(name, reads_loss, loop, answer(setting, trainer, dataset, reads_loss))

    heads = "data from | loop | step ms | step ms, median | images/s | process waits ms "
    heads += "| GPU idle ms | GPU busy ms | cores used, GPU instance | cores used, data host "
    heads += "| step ms more than without data | measured: data costs ms | of a step | CPUs busy "
    table(f"{heads}| verdict", rows())
    return []


# ------------------------------------------------------- the parts, each in its own process

PARTS: dict[str, Callable[[Setting, dict], list[str]]] = {
    "batches": batches,
    "ddp": partial(one_rank, "ddp"),
    "fsdp": partial(one_rank, "fsdp"),
    "feeding": feeding,
}


def run(part: str, setting: Setting) -> None:
    """Run a part in this process, and add its results to the file, even if it fails."""
    os.sched_setaffinity(0, setting.trainer)
    torch.set_num_threads(len(setting.trainer))
    torch.backends.cudnn.benchmark = True
    path, results = ROOT / "build" / "bench" / "gpu.json", {}
    try:
        wrong = PARTS[part](setting, results)
    finally:
        write_results("gpu", json.loads(path.read_text()) | {part: results})
    if wrong:
        sys.exit(f"Wrong: {'; '.join(wrong)}")


def start(part: str, arguments: Iterable[str], seconds: float) -> bool:
    """Run a part in a new process; return whether it has ended well."""
    print(f"\n{part}:", flush=True)
    process = psutil.Popen([sys.executable, __file__, "--part", part, *arguments])
    begun = time.monotonic()
    try:
        code = process.wait(max(1, seconds))
        print(f"\n{part} took {time.monotonic() - begun:.0f} s", flush=True)
        return code == 0
    except psutil.TimeoutExpired:
        print(f"\n{part} has not ended after {seconds:.0f} s", file=sys.stderr)
        process.send_signal(signal.SIGINT)  # Ctrl-C sends it, too
        return False
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
            _, left = psutil.wait_procs(family(process), GRACE_SECONDS)
            for one in left:
                one.kill()


def main() -> None:
    """Run all parts; fail if one of them does."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="small sizes, as without a GPU")
    parser.add_argument("--batch-size", type=int, help="images in a batch (128, or 8 if small)")
    parser.add_argument("--part", choices=PARTS, help="run this part only, in this process")
    given = parser.parse_args()
    cores = at_least_two_cores()[:MOST_CORES]
    k = max(1, len(cores) // 4)
    has_gpu = torch.cuda.is_available()
    is_small = given.small or not has_gpu
    batch_size = given.batch_size or (8 if is_small else 128)
    device = torch.device("cuda" if has_gpu else "cpu")
    setting = Setting(device, is_small, batch_size, cores[:k], cores[k:])
    if given.part:
        return run(given.part, setting)
    facts = {
        "date": str(date.today()),
        "card": torch.cuda.get_device_name() if has_gpu else "none",
        "torch": torch.__version__,
        "cores, GPU instance": k,
        "cores, data host": len(cores) - k,
        "images": f"{32 if is_small else 224} x {32 if is_small else 224}",
        "batch size": batch_size,
    }
    table("what | value", facts.items())
    write_results("gpu", {"facts": facts})
    begun, failed = time.monotonic(), []
    for part, end in ENDS.items():
        if not start(part, sys.argv[1:], end - (time.monotonic() - begun)):
            failed.append(part)
    if failed:
        sys.exit(f"Failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
