"""How the loader and `measured` do beside a real GPU.

    .venv/bin/python benchmarks/gpu.py      at most six minutes

It is for an idle machine with an NVIDIA GPU and some 16 cores. Without a GPU, or with --small,
everything is small and takes a minute, which only shows that it works.

A quarter of the cores stands for the GPU instance: the training and its DataLoader's workers are
pinned to these. The others stand for a data host, without a network. The parts:

- batches: Are the batches on the GPU those of a loader without data hosts and page-locked memory?
- ranks: One rank (NCCL; gloo without a GPU) trains with DDP, and with FSDP.
- feeding: How long is a step of ResNet50, and how long do its process and its GPU wait, without
  data, with data of the GPU instance alone, and with the data host? What does `measured` say?

In `feeding`, a loop either calls loss.item() after each step, so that the process waits for the
GPU, or runs ahead of it. Times are means, unless they say median. The process's wait is the time in
next(batches). CUDA events tell when a step's work on the GPU, with the copy of its batch, begins
and ends: between them the GPU counts as busy, and until the next step's beginning as idle.
"""

import argparse
import contextlib
import io
import itertools
import json
import math
import os
import signal
import sys
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from statistics import mean, median
from typing import Any, NamedTuple

import common
import psutil
import torch
from torch import nn
from torch.nn.functional import cross_entropy, interpolate
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from feed import RemoteDataset
from hetero.spare_cores import run_when_idle
from parallel import join_ranks, leave_ranks, share_model

sys.path.append(str(common.ROOT))
from shared.measured import measured  # noqa: E402

# When each part must have ended, in seconds after the first one's start.
ENDS = {"batches": 110, "ranks": 180, "feeding": 355}
MOST_CORES = 16  # on larger machines, the others stay idle
PHOTOS, CLASSES, RANK_STEPS = 32, 1000, 20
WARM_UP, STEPS, SECONDS = 20, 60, 12.0  # of a loop, which is timed for at most so many seconds
NOTHING = {"step_ms": math.nan, "without_data_ms": math.nan, "verdict": ""}  # of `measured`
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")


class Setting(NamedTuple):
    """The sizes, and the cores of the GPU instance and of the data host."""

    is_small: bool
    batch_size: int
    trainer: list[int]
    host: list[int]

    def loader(self, dataset: Dataset) -> DataLoader:
        """Return a DataLoader with a worker for each core of the GPU instance."""
        return DataLoader(dataset, self.batch_size, num_workers=len(self.trainer), pin_memory=CUDA)

    def data_host(self) -> contextlib.AbstractContextManager:
        """Run a data host on its cores, with a worker for each."""
        cores = ",".join(map(str, self.host))
        return common.data_host(len(self.host), "taskset", "--cpu-list", cores)


class Photos(Dataset):
    """Photos, as large as ImageNet's, decompressed as PNG files are, cropped, resized, flipped."""

    # is_fixed: take the random numbers of a sample from its index.
    def __init__(self, is_small: bool, is_fixed: bool = False, count: int = 10_000_000):
        self.is_fixed, self.count = is_fixed, count
        self.size, self.shape = (32, (48, 64)) if is_small else (224, (375, 500))
        numbers, self.files = torch.Generator().manual_seed(0), []
        for _ in range(PHOTOS):
            photo = interpolate(torch.rand(1, 3, 24, 32, generator=numbers), self.shape)
            photo = 224 * photo + torch.randint(16, photo.shape, generator=numbers)
            self.files.append(zlib.compress(photo.byte().numpy().tobytes()))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        numbers = torch.Generator().manual_seed(index) if self.is_fixed else None
        share, down, right, flip = torch.rand(4, generator=numbers).tolist()
        data = bytearray(zlib.decompress(self.files[index % PHOTOS]))
        photo = torch.frombuffer(data, dtype=torch.uint8).view(1, 3, *self.shape)
        share = math.sqrt(0.08 + 0.92 * share)  # of the area, as torchvision's RandomResizedCrop
        height, width = (int(share * side) for side in self.shape)
        top, left = int(down * (self.shape[0] - height)), int(right * (self.shape[1] - width))
        crop = photo[..., top : top + height, left : left + width].float()
        image = interpolate(crop, [self.size] * 2, mode="bilinear", antialias=True)[0].round()
        return (image.flip(2) if flip < 0.5 else image).byte(), index % CLASSES


class Stream(IterableDataset):
    """The samples of a Dataset as a stream, shared among the DataLoader's workers."""

    def __init__(self, dataset: Dataset):
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        return (self.dataset[n] for n in range(worker.id, len(self.dataset), worker.num_workers))


def normalized(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    """Return a convolution with a normalization."""
    convolution = nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs))


class Bottleneck(nn.Module):
    """ResNet's block of three convolutions."""

    def __init__(self, inputs: int, width: int, stride: int):
        super().__init__()
        ends = normalized(inputs, width, 1), normalized(width, 4 * width, 1)
        middle, relu = normalized(width, width, 3, stride), nn.ReLU(inplace=True)
        self.residual = nn.Sequential(ends[0], relu, middle, relu, ends[1])
        is_same = stride == 1 and inputs == 4 * width
        self.shortcut = nn.Identity() if is_same else normalized(inputs, 4 * width, 1, stride)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.residual(images) + self.shortcut(images))


def resnet50(is_small: bool) -> nn.Sequential:
    """Return a ResNet50, or a small network of the same kind."""
    blocks, width = ((1, 1), 8) if is_small else ((3, 4, 6, 3), 64)
    layers, inputs = [normalized(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)], width
    for stage, count in enumerate(blocks):
        for block in range(count):
            layers.append(Bottleneck(inputs, width << stage, 2 if stage and not block else 1))
            inputs = 4 * width << stage
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, CLASSES)
    return nn.Sequential(*layers, *head)


def trainer(setting: Setting, parallelism: str = "ddp") -> Callable[[list], torch.Tensor]:
    """Return a function that trains on a batch, and returns the loss without waiting for it."""
    model = share_model(resnet50(setting.is_small), parallelism, DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)

    def step(batch: list[torch.Tensor]) -> torch.Tensor:
        images, labels = (part.to(DEVICE, non_blocking=True) for part in batch)
        # FSDP refuses weights in this format, so only the images have it.
        images = images.to(memory_format=torch.channels_last).float().div_(255)
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=CUDA):
            loss = cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def two_epochs(dataset: Dataset, pin: bool, **options: Any) -> list[torch.Tensor]:
    """Return the images and labels of all batches of two epochs, on the GPU."""
    torch.manual_seed(0)
    loader, parts = DataLoader(dataset, 16, num_workers=2, pin_memory=pin, **options), []
    for batch in itertools.chain(loader, loader):
        assert all(part.is_pinned() == pin for part in batch)
        parts += [part.to(DEVICE, non_blocking=True) for part in batch]
    return parts


def batches(setting: Setting, results: dict) -> None:
    """Print whether batches are the same; fail if some are not."""
    os.environ.pop("HETERO_DATA_HOSTS", None)
    make = partial(Photos, setting.is_small, count=6 * 16)  # batches, and their size
    # A stream's random numbers are those of a plain DataLoader. Those of a map-style Dataset are
    # not, but they do not depend on data hosts.
    crops, plain = "random crops, RemoteDataset without data hosts, ", ", a plain DataLoader, fork"
    same, persistent = (make(), RemoteDataset(make())), {"persistent_workers": True}
    spawn = persistent | {"multiprocessing_context": "spawn"}
    ways = {
        f"{crops}fork before CUDA is initialized": (*same, {}),
        f"{crops}fork": (*same, {}),
        f"{crops}fork, persistent_workers": (*same, persistent),
        f"{crops}spawn, persistent_workers": (*same, spawn),
        f"fixed crops{plain}": (make(is_fixed=True), make(is_fixed=True), {}),
        f"random crops in a stream{plain}": (Stream(make()), Stream(make()), {}),
    }

    def rows() -> Iterator[list[str]]:
        for number, (name, (dataset, reference, options)) in enumerate(ways.items()):
            assert torch.cuda.is_initialized() == (CUDA and number > 0)
            ours = two_epochs(RemoteDataset(dataset), CUDA, **options)
            theirs = two_epochs(reference, False, **options | {"multiprocessing_context": "fork"})
            results[name] = len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))
            yield [name, "equal" if results[name] else "DIFFERENT"]

    with setting.data_host() as (address, _):
        common.use(address)
        common.table("samples, compared with, workers start by | batches", rows())
    if not all(results.values()):
        sys.exit("the batches differ")


def ranks(setting: Setting, results: dict) -> None:
    """Train some steps as a single rank; print their time; fail if a loss is not finite."""
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1")
    os.environ.update(GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="lo")  # needs no host name
    warnings.filterwarnings("ignore", "Grad strides do not match")  # those of 1 x 1 convolutions

    def row(parallelism: str) -> list[str]:
        os.environ["MASTER_PORT"] = str(common.free_port())
        control = join_ranks(DEVICE, parallelism)
        step, losses, ends = trainer(setting, parallelism), [], []
        for batch in itertools.islice(setting.loader(RemoteDataset(photos)), RANK_STEPS):
            losses.append(step(batch).item())
            ends.append(time.perf_counter())
        leave_ranks(control)
        steps = [1e3 * (end - start) for start, end in itertools.pairwise(ends)]
        results[parallelism] = {"losses": losses, "steps": steps}
        return [parallelism, *(f"{n:.1f}" for n in (losses[0], losses[-1], median(steps)))]

    with setting.data_host() as (address, _):
        common.use(address)
        photos, backend = Photos(setting.is_small), "NCCL" if CUDA else "gloo"
        heads = f"one rank, {backend} | first loss | last loss | step ms, median"
        common.table(heads, map(row, ("ddp", "fsdp")))
    if not all(math.isfinite(loss) for its in results.values() for loss in its["losses"]):
        sys.exit("a loss is not finite")


def timed(step: Callable, data: Iterator, reads_loss: bool, hosts: tuple) -> dict[str, list]:
    """Train on the data; return ms of each step, and how many cores each side has used."""

    def mark() -> None:
        if CUDA:
            marks.append(torch.cuda.Event(enable_timing=True))
            marks[-1].record()

    def cpu() -> list[float]:
        if CUDA:
            torch.cuda.synchronize()
        return [common.cpu_seconds([one for one in its if one.is_running()]) for its in sides]

    begun, waits, marks = [], [], []
    for number in range(WARM_UP + STEPS):
        if number == WARM_UP - 1:  # all processes have started
            there = {process for host in hosts for process in common.family(host)}
            sides = {*common.family(psutil.Process())} - there, there
        if number == WARM_UP:
            begun, waits, marks, before = [], [], [], cpu()
        begun.append(time.perf_counter())
        batch = next(data)
        waits.append(1e3 * (time.perf_counter() - begun[-1]))
        mark()
        loss = step(batch)
        mark()
        if reads_loss:
            loss.item()
        if number > WARM_UP and begun[-1] - begun[0] > SECONDS:
            break
    after, seconds = cpu(), time.perf_counter() - begun[0]
    spans = [first.elapsed_time(then) for first, then in itertools.pairwise(marks)]
    found = {"mean step": 1e3 * seconds / len(begun), "waits": waits}
    found["steps"] = [1e3 * (then - first) for first, then in itertools.pairwise(begun)]
    found["cores"] = [(then - first) / seconds for first, then in zip(before, after, strict=True)]
    return found | {"busy": spans[::2], "idle": spans[1::2]}


def answer(step: Callable, loader: DataLoader) -> dict[str, Any]:
    """Return the numbers and the verdict that `measured` prints."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        loop = measured(loader, 1)  # in as few steps as possible
        for batch in itertools.takewhile(lambda _: not loop.reported, loop):
            step(batch)
    *lines, last = said.getvalue().splitlines()
    [verdict] = [line.split(None, 1)[1] for line in lines if line.startswith("verdict")]
    return json.loads(last)["measured"] | {"verdict": verdict.split(":")[0]}


def feeding(setting: Setting, results: dict) -> None:
    """Print how long steps and waits are for each way to get data."""
    step, photos, floors = trainer(setting), Photos(setting.is_small), {}
    begun, batch = time.process_time(), [photos[index] for index in range(setting.batch_size)]
    results["sample ms"] = 1e3 * (time.process_time() - begun) / len(batch)
    print(f"\nA sample takes {results['sample ms']:.1f} ms of CPU time.", flush=True)
    lying = [part.to(DEVICE) for part in torch.utils.data.default_collate(batch)]

    def rows(name: str, dataset: Dataset | None, *hosts: psutil.Popen) -> Iterator[list[str]]:
        for reads_loss in (True, False) if CUDA else (True,):
            data = iter(setting.loader(dataset)) if dataset else itertools.repeat(lying)
            found = timed(step, data, reads_loss, hosts)
            del data  # its workers end
            train = (lambda batch: step(batch).item()) if reads_loss else step
            said = answer(train, setting.loader(dataset)) if dataset else NOTHING
            kind = "loss.item()" if reads_loss else "runs ahead"
            results[f"{name}, {kind}"] = {**found, "measured": said}
            step_ms, usual = found["mean step"], median(found["steps"])
            cells = [step_ms, usual, 1e3 * setting.batch_size / step_ms]
            cells += [mean(found[each] or [math.nan]) for each in ("waits", "idle", "busy")]
            cells += [*found["cores"], step_ms - floors.setdefault(reads_loss, step_ms)]
            costs = said["step_ms"] - said["without_data_ms"]
            cells += [costs, 100 * costs / said["step_ms"], said.get("cpu_percent", math.nan)]
            shown = ["" if math.isnan(cell) else f"{cell:.1f}" for cell in cells]
            yield [name, kind, *shown, said["verdict"]]

    def all_rows() -> Iterator[list[str]]:
        k, n = len(setting.trainer), len(setting.host)
        yield from rows("one batch, on the device", None)  # the floor of the others
        yield from rows(f"{k} workers", photos)
        with contextlib.ExitStack() as stack:
            address, host = stack.enter_context(setting.data_host())
            common.use(address)
            yield from rows(f"data host, {n} cores", RemoteDataset(photos), host)
            if k > 1:  # as python -m hetero does
                own = f"unix-abstract:benchmark {os.getpid()}"
                _, spare = stack.enter_context(common.data_host(k - 1, address=own))
                for process in common.family(spare):
                    run_when_idle(process.pid)
                common.use(own, address)
                yield from rows(f"the same, {k - 1} spare cores", RemoteDataset(photos), host)

    heads = "data from | loop | step ms | median | images/s | process waits ms | GPU idle ms"
    heads += " | GPU busy ms | cores used: GPU instance | data host | step ms above the floor"
    heads += " | `measured`: data costs ms | % of a step | CPUs busy % | verdict"
    common.table(heads, all_rows())


PARTS = {"batches": batches, "ranks": ranks, "feeding": feeding}


def run(part: str, setting: Setting) -> None:
    """Run a part in this process, and add its results to the file, even if it fails."""
    os.sched_setaffinity(0, setting.trainer)
    torch.set_num_threads(1)
    torch.backends.cudnn.benchmark = True
    file, results = common.ROOT / "build" / "bench" / "gpu.json", {}
    try:
        PARTS[part](setting, results)
    finally:
        others = json.loads(file.read_text()) if file.exists() else {}
        common.write_results("gpu", others | {part: results})


def start(part: str, end: float) -> bool:
    """Run a part in a new process; return whether it has ended well, and before `end`."""
    print(f"\n{part}:", flush=True)
    begun, command = time.monotonic(), [sys.executable, __file__, "--part", part, *sys.argv[1:]]
    process = psutil.Popen(command, start_new_session=True)  # Ctrl-C does not reach it
    try:
        return process.wait(max(1, end - begun)) == 0
    except psutil.TimeoutExpired:
        return False  # it is too slow, or hangs
    finally:
        print(f"\n{part}: {time.monotonic() - begun:.0f} of {end - begun:.0f} s", flush=True)
        if process.poll() is None:
            everyone = common.family(process)
            process.send_signal(signal.SIGINT)
            for one in psutil.wait_procs(everyone, timeout=15)[1]:
                one.kill()


def main() -> None:
    """Run all parts; fail if one of them does."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="small sizes, as without a GPU")
    parser.add_argument("--batch-size", type=int, help="images in a batch: 128, or 8 if small")
    parser.add_argument("--part", choices=ENDS, help="run only this part, in this process")
    given, cores = parser.parse_args(), common.at_least_two_cores()[:MOST_CORES]
    is_small, k = given.small or not CUDA, max(1, len(cores) // 4)
    setting = Setting(is_small, given.batch_size or (8 if is_small else 128), cores[:k], cores[k:])
    if given.part:
        return run(given.part, setting)
    card = torch.cuda.get_device_name() if CUDA else "none"
    facts = {"date": time.strftime("%Y-%m-%d"), "torch": torch.__version__, "GPU": card}
    facts |= {"cores": os.cpu_count(), "of these, GPU instance": k, "data host": len(cores) - k}
    facts |= {"batch": setting.batch_size, "/dev/shm": psutil.disk_usage("/dev/shm").free}
    common.table("what | value", facts.items())
    common.write_results("gpu", facts)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does
    begun, slower = time.monotonic(), 2 if is_small else 1  # tests run on busy machines
    failed = [part for part, end in ENDS.items() if not start(part, begun + slower * end)]
    if failed:
        sys.exit(f"Failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
