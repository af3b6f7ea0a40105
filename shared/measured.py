"""Does training wait for its CPUs? One line in a script of one's own, one run, on any machine.

    for batch in measured(loader):  # instead of: for batch in loader

For loops over a DataLoader or a tf.data.Dataset; `measured_fit` is for Keras. Copy this file: it
needs the standard library alone. A run alternates between K steps with real batches and K with one
batch again and again. It prints the step times of both, how busy the CPUs were and what follows,
with this repository on PYTHONPATH also which clusters would be better, and a line of JSON, which
`python -m shared.advisor --log FILE` and `--job NAME` read.

While a batch is repeated the loader fills its buffers, and real steps after that would not wait: so
what the buffers can hold is dropped before real steps. How much a tf.data.Dataset holds, nobody
can say, and an AUTOTUNE buffer doubles whenever it has run full and then empty: of a Dataset, what
comes within the time of some real steps is dropped, as what is ready comes at once. Filling buffers
takes CPU time: so repeated steps are timed only once they are full. Ranks must change at the same
step, so steps are counted, not timed. Batches are lost: what such a run trains is not to be used.

How busy the CPUs were is of the vCPUs that the process may use, whoever else uses them. Where its
container has a lower limit (cpu.max of cgroups), it is of that limit, and of what the container
uses; it is not known which instance has so many cores, so give instance_type. Linux alone says it.
"""

import atexit
import contextlib
import json
import os
import sys
import time
import urllib.request
from collections import deque
from collections.abc import Iterable, Iterator, MutableMapping
from copy import copy
from dataclasses import dataclass
from http.client import HTTPException
from itertools import cycle, islice, pairwise, takewhile
from math import ceil, lcm, nan
from pathlib import Path
from statistics import median
from typing import Any

MIN_CYCLES = 3
MOST_CYCLES = 5  # of a tf.data.Dataset, whose AUTOTUNE buffers may double with each
WORTH_PERCENT = 10  # where data costs less of each step, there is little to gain
CPU_BOUND_PERCENT = 80  # while the CPUs are less busy, something else holds the job up
CGROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
NOTICE = "measured: this run is for measuring, as batches are dropped and repeated"
# At its ends: time in s, ticks of the CPUs (by a limit: microseconds) that were busy, and in all.
Stretch = list[tuple[float, int, int]]
_loops: dict[int, "MeasuredLoop"] = {}


def measured(
    loader: Any,
    steps: int = 0,
    *,
    buffer: int | None = None,
    accumulation: int = 1,
    instance_type: str = "",
) -> "MeasuredLoop":
    """Iterate over `loader`, and measure; called again for the next epoch, it goes on.

    An epoch has len(loader) steps at most. Rank 0 prints the result when the program ends.

    Args:
        loader: The one that training takes its batches from.
        steps: Print after so many, for notebooks and programs that end with os._exit; it takes
            MIN_CYCLES cycles at least. From then on batches come as they are.
        buffer: How many batches the loader can hold ready, where it is neither a DataLoader nor a
            tf.data.Dataset, or a Dataset that holds over 40.
        accumulation: How many steps add up their gradients for one update of the weights.
        instance_type: Such as "ml.g5.xlarge", where neither SageMaker nor EC2 says it.

    Raises:
        ValueError: how many batches the loader can hold ready is not known, or a number is wrong.
    """
    if id(loader) not in _loops:  # there it stays alive, so that no other loader gets its id
        workers = getattr(loader, "num_workers", None)
        known = 0 if workers == 0 else None
        if workers and getattr(loader, "prefetch_factor", None):
            known = loader.prefetch_factor * workers + 2
        buffer = known if buffer is None else buffer
        if buffer is None and not (hasattr(loader, "cardinality") and hasattr(loader, "repeat")):
            raise ValueError(
                f"How many batches this {type(loader).__name__} can hold ready is not known: give "
                "measured(loader, buffer=N), 0 if it prepares each batch when asked for it."
            )
        if (buffer or 0) < 0 or accumulation < 1:
            raise ValueError("buffer must be 0 or more, and accumulation 1 or more")
        workers = workers or (8 if buffer is None else buffer // 2)
        loop = MeasuredLoop(loader, steps, buffer, workers, accumulation, instance_type)
        loop.reported = _rank() > 0  # known now: when the program ends the ranks may have parted
        _loops[id(loader)] = loop
        _say(NOTICE)
        atexit.register(loop.report)
    return _loops[id(loader)]


@dataclass(eq=False)
class MeasuredLoop:
    """What `measured` returns: iterate over it."""

    loader: Any
    steps: int
    buffer: int | None  # None: a tf.data.Dataset
    workers: int
    accumulation: int
    instance_type: str

    def __post_init__(self) -> None:
        # Workers that began together are ready together: whole rounds, and whole updates.
        unit = lcm(max(1, self.workers), self.accumulation)
        self.stretch = unit * ceil(max(10, 5 * self.workers) / unit)  # K
        self.settling = max(2, self.workers)  # untimed steps, in which all get in pace
        if self.buffer is None:
            most = 2 * MOST_CYCLES * (self.settling + self.stretch)
            self.steps = min(self.steps or most, most)
        self.done = self.left = 0  # steps: in all, and still to be done in this epoch
        self.real: list[Stretch] = []
        self.repeated: list[Stretch] = []
        self.reported = False

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        loader, least = self.loader, (self.buffer or 0) + self.settling + self.stretch
        try:
            self.left = len(loader)
            # Ranks may drop different numbers of batches, but must have the same number of steps.
            loader = loader.repeat() if self.buffer is None else loader
        except TypeError:  # only its end says how long it is
            self.left = sys.maxsize
        batches = iter(loader)
        if self.left < least:  # the batches come as they are
            if not self.reported:
                _say(f"measured: epochs of {self.left} batches are too short: it takes {least}")
            self.reported = True
            yield from self._steps(batches, self.left)
            return
        while not self.steps or self.done < self.steps or len(self.repeated) < MIN_CYCLES:
            if len(self.real) == len(self.repeated):
                self._drop(batches)
                source, stretches = batches, self.real
            else:
                source, stretches = map(_fresh, cycle(list(islice(batches, 1)))), self.repeated
                # The loader takes at most a real step's time for a batch, so this pause fills its
                # buffers. No rank takes a step meanwhile.
                holds = self.stretch if self.buffer is None else self.buffer
                time.sleep(holds * self._real_step())
            yield from self._steps(source, self.settling)
            sample, before = _sample(self.loader), self.done
            yield from self._steps(source, self.stretch)
            if self.done - before < self.stretch:
                return  # the epoch is over: the next one begins with a stretch of the same kind
            stretches.append([sample, _sample(self.loader)])
        self.report()
        yield from self._steps(batches, self.left)

    def _drop(self, batches: Iterator) -> None:
        """Take what the loader has ready."""
        if self.buffer is None:
            end = time.perf_counter() + self.settling * self._real_step()
            batches = takewhile(lambda _: time.perf_counter() < end, batches)
        deque(islice(batches, self.buffer), maxlen=0)

    def _real_step(self) -> float:
        """Seconds of a step in the last stretch with real batches."""
        if not self.real:
            return 0.0
        (start, *_), (end, *_) = self.real[-1]
        return (end - start) / self.stretch

    def _steps(self, batches: Iterable, count: int) -> Iterator[Any]:
        for batch in islice(batches, min(count, self.left)):
            self.left -= 1
            self.done += 1
            yield batch

    def report(self) -> None:
        """Print what has been measured, once, or what it would have taken."""
        if self.reported:
            return
        self.reported, once = True, self.settling + self.stretch
        if len(self.repeated) >= MIN_CYCLES:
            return _report(self.real, self.repeated, self.stretch, self.instance_type)
        _say(
            f"measured: {self.done} steps were too few: it takes {MIN_CYCLES} x {2 * once}, in "
            f"epochs of {max(self.buffer + once, 2 * once)} batches or more"
        )


def measured_fit(
    model: Any,
    dataset: Any,
    *,
    stretch: int = 10,
    settling: int = 10,
    instance_type: str = "",
    **settings: Any,
) -> None:
    """Measure Keras' model.fit: on the dataset, and then on its first batch again and again.

    Each of both has `settling` steps and then five stretches, which are timed.

    Args:
        model: Compiled.
        dataset: A tf.data.Dataset of batches, or a keras.utils.PyDataset.
        stretch: Number of steps; a multiple of steps_per_execution.
        settling: Likewise; as many as the dataset can hold batches ready, and the first steps.
        instance_type: As in `measured`.
        **settings: Others of model.fit, but for epochs.

    Raises:
        TypeError: the data is in memory already, as arrays.
    """
    if not hasattr(dataset, "cardinality") and not hasattr(dataset, "on_epoch_end"):
        raise TypeError(
            f"measured_fit({type(dataset).__name__}): give it what prepares batches, a "
            "tf.data.Dataset or PyDataset; arrays are prepared already"
        )
    _say(NOTICE)
    callbacks, kinds, last = settings.pop("callbacks", []), [], settling + 5 * stretch
    for is_real in (True, False):
        samples: Stretch = []
        steps = iter(range(1, last + 1))  # a batch's number begins anew in each epoch

        def look(
            batch: int, logs: Any = None, samples: Stretch = samples, steps: Iterator = steps
        ) -> None:
            step = next(steps, last)
            if step >= settling and (step - settling) % stretch == 0:
                samples.append(_sample(dataset))
            model.stop_training = step >= last

        clock = sys.modules["tensorflow"].keras.callbacks.LambdaCallback(on_train_batch_end=look)
        clock._supports_tf_logs = True  # else Keras 2 waits for the GPU in each step
        if hasattr(dataset, "cardinality"):
            batches = dataset.repeat() if is_real else dataset.take(1).cache().repeat()
            settings |= {"epochs": 1, "steps_per_epoch": last}
        elif is_real:
            batches = dataset
            settings |= {"epochs": last}
        else:
            first = dataset[0]
            batches = (first for _ in cycle([None]))
            settings |= {"epochs": 1, "steps_per_epoch": last}
        model.fit(batches, callbacks=[*callbacks, clock], **settings)
        kinds.append([*pairwise(samples)])
    _report(*kinds, stretch, instance_type)


def _fresh(batch: Any) -> Any:
    """Copy the containers in a batch, which scripts take things out of, but not its tensors."""
    if isinstance(batch, tuple):
        parts = [_fresh(part) for part in batch]
        return type(batch)._make(parts) if hasattr(batch, "_fields") else tuple(parts)
    if not isinstance(batch, (list, MutableMapping)):
        return batch
    copied = copy(batch)  # of the same class
    for key in batch if isinstance(batch, MutableMapping) else range(len(batch)):
        copied[key] = _fresh(batch[key])
    return copied


def _sample(loader: Any) -> tuple[float, int, int]:
    """Read the clock and the CPUs' ticks, when accelerators have done all that they were given."""
    torch, tf = sys.modules.get("torch"), sys.modules.get("tensorflow")
    if tf and (not torch or isinstance(loader, tf.data.Dataset)):
        tf.test.experimental.sync_devices()
    elif torch and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    now = time.perf_counter()
    if limit := _limit():
        cores, used = limit
        return now, used, int(1e6 * cores * now)
    try:
        with open("/proc/stat") as file:  # of each vCPU: user, nice, system, idle, iowait, ...
            rows = [line.split() for line in file]
        own = {f"cpu{number}" for number in os.sched_getaffinity(0)}  # which this process may use
        used = [[int(number) for number in row[1:9]] for row in rows if row[0] in own]
        ticks = [sum(column) for column in zip(*used, strict=True)] or [0] * 8
    except OSError:  # not Linux: the use of the CPUs is not known
        ticks = [0] * 8
    return now, sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def _limit() -> tuple[float, int] | None:
    """CPU limit of the container in cores, and microseconds that it has used; None: there is none.

    That is the lowest one of this process's cgroup and those above it, if it is lower than the
    vCPUs. A container's own may be at the top, under a path that only its host has.
    """
    limits = []
    rows = OWN_CGROUPS.read_text().splitlines() if OWN_CGROUPS.exists() else []
    for _, kinds, path in (row.split(":", 2) for row in rows):  # 0::/a, or 4:cpu,cpuacct:/a
        parts = Path(path).parts[1:]
        for parents in (parts[:number] for number in range(len(parts) + 1)):
            with contextlib.suppress(OSError):  # it is not there, or has no limits
                if not kinds:  # version 2
                    folder = CGROUPS.joinpath(*parents)
                    quota, period = (folder / "cpu.max").read_text().split()
                    used = int((folder / "cpu.stat").read_text().split()[1])  # usage_usec N
                elif "cpu" in kinds.split(","):
                    folder = CGROUPS.joinpath("cpu", *parents)
                    quota = (folder / "cpu.cfs_quota_us").read_text()
                    period = (folder / "cpu.cfs_period_us").read_text()
                    accounts = CGROUPS.joinpath("cpuacct", *parents)
                    used = int((accounts / "cpuacct.usage").read_text()) // 1000
                else:
                    continue
                if quota != "max" and 0 < int(quota) < int(period) * len(os.sched_getaffinity(0)):
                    limits.append((int(quota) / int(period), used))
    return min(limits, default=None)


def _report(real: list, repeated: list, steps: int, instance_type: str) -> None:
    """Print all that is found by stretches of so many steps."""
    step_ms, spread, cpu = _summary(real, steps)
    floor_ms, floor_spread, training_cpu = _summary(repeated, steps)
    costs = max(0.0, 100 * (1 - floor_ms / step_ms))
    verdict = "CPU-bound: more vCPUs for each GPU make it faster"
    if costs < WORTH_PERCENT:
        verdict = "not CPU-bound: there is little to gain"
    elif cpu < CPU_BOUND_PERCENT:
        verdict = "not CPU-bound: look at the number of data workers, at storage and network"
    use = "not known"
    if cpu == cpu and training_cpu == training_cpu:
        use = f"{cpu:.0f} %, without data {training_cpu:.0f} %"
    known_type, count, machine = _machine()
    if limit := _limit():  # the instance has more
        known_type, machine = "", f"{limit[0]:g} cores, its container's limit, of {machine}"
    numbers = {
        "step_ms": step_ms,
        "accelerator_ms": floor_ms,
        "cpu_percent": cpu,
        "training_cpu_percent": training_cpu,
        "instance_type": instance_type or known_type,
        "count": count,
        "source": f"Measured in one run on {machine}: medians of {len(repeated)} stretches of "
        f"{steps} steps, {spread} with real batches, {floor_spread} with a repeated one",
    }
    numbers = {k: value for k, value in numbers.items() if value != "" and value == value}  # nan
    _say(
        f"step time     {step_ms:.1f} ms ({spread})\nwithout data  {floor_ms:.1f} ms "
        f"({floor_spread})\ndata costs    {costs:.0f} % of a step\n"
        f"CPUs busy     {use}, on {machine}\n"
        f"verdict       {verdict}\n{_clusters(numbers)}\n{NOTICE}\n"
        + json.dumps({"measured": numbers})
    )


def _summary(stretches: list, steps: int) -> tuple[float, str, float]:
    """Median step time in ms, its spread, and percent of all CPUs in use; nan if not known."""
    times = [1000 * (end[0] - start[0]) / steps for start, end in stretches]
    busy, ticks = (sum(end[i] - start[i] for start, end in stretches) for i in (1, 2))
    spread = f"{min(times):.1f} to {max(times):.1f} ms"
    return median(times), spread, 100 * busy / ticks if ticks else nan


def _clusters(numbers: dict[str, Any]) -> str:
    """What the advisor makes of the numbers, or why it cannot tell."""
    if "instance_type" not in numbers:
        return "clusters      for which instance? Give it as instance_type"
    try:
        from shared import advice_shown, prediction, verdict

        return advice_shown.shortlist(verdict.advise(prediction.from_numbers(numbers)))
    except ImportError:
        return "clusters      see python -m shared.advisor --log FILE, with this output in FILE"
    except ValueError as error:
        return f"clusters      {error}"


def _machine() -> tuple[str, int, str]:
    """Type of the instances that train, or "", their number, and what this one has."""
    torch, gpus = sys.modules.get("torch"), os.environ.get("SM_NUM_GPUS")
    if not gpus and torch and torch.cuda.is_available():
        gpus = str(torch.cuda.device_count())
    machine = f"{os.cpu_count()} vCPUs" + f" and {gpus} GPUs" * bool(gpus)
    folder = os.environ.get("SM_INPUT_CONFIG_DIR", "/opt/ml/input/config")
    path = Path(folder, "resourceconfig.json")
    if path.exists():
        try:
            config = json.loads(path.read_text())
            name, hosts = config["current_instance_type"], len(config["hosts"])
            # Other groups' hosts may prepare data: there is no formula for that.
            known = name.startswith("ml.") and len(config.get("instance_groups") or []) < 2
            return (name, hosts, machine) if known else ("", 1, machine)
        except (AttributeError, LookupError, TypeError, ValueError):  # not SageMaker's
            return "", 1, machine
    ranks = os.environ.get("WORLD_SIZE", "1")  # torchrun's: in all, and on this host
    hosts = int(ranks) // int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    place = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://169.254.169.254")
    try:
        token = _ask(f"{place}/latest/api/token", "PUT", "X-aws-ec2-metadata-token-ttl-seconds: 60")
        token = f"X-aws-ec2-metadata-token: {token}"
        name = _ask(f"{place}/latest/meta-data/instance-type", "GET", token)
        return f"ml.{name}", hosts, machine
    except (OSError, ValueError, HTTPException):  # this is no instance of EC2
        return "", hosts, machine


def _ask(url: str, method: str, header: str) -> str:
    """Answer of EC2's metadata service, which comes at once and without a proxy, or not at all."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    headers = dict([header.split(": ")])
    request = urllib.request.Request(url, method=method, headers=headers)
    with direct.open(request, timeout=0.3) as answer:
        return answer.read().decode()


def _joined_ranks() -> Any:
    """torch.distributed, if this process has joined the other ranks by it."""
    dist = getattr(sys.modules.get("torch"), "distributed", None)
    return dist if dist and dist.is_available() and dist.is_initialized() else None


def _rank() -> int:
    """This process's rank: PyTorch's, or what torchrun, mpirun or horovodrun say; else 0."""
    if dist := _joined_ranks():
        return dist.get_rank()
    names = ("RANK", "OMPI_COMM_WORLD_RANK", "HOROVOD_RANK")
    return int(next((os.environ[name] for name in names if name in os.environ), 0))


def _say(text: str) -> None:
    """Print on rank 0."""
    if _rank() == 0:
        print(text, flush=True)
