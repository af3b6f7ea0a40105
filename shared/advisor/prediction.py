"""Predict how long a step takes if a training job that waits for its CPUs gets more of them.

    step time = max(CPU work / (cores x speed, summed over the hosts that prepare data),
                    step without data,
                    data of a step / network,
                    data of a step / (ranks x what a rank receives per second))

CPU work is the step time of the measured, homogeneous job times its cores, in core-ms. (On AWS,
cores are vCPUs.) The formula is for jobs whose CPUs are the bottleneck. It assumes that the cores
of other hosts are kept as busy as the measured ones, unless a heterogeneous run has shown how busy
clusters with data hosts are: cores that are 80 % busy count as 80 %. A step without data is
measured by --data-mode synthetic, or else estimated by the time in which the GPUs were busy. The
network is the bandwidth of the training hosts or of the data hosts, whichever is less; all data is
assumed to cross it. Each GPU has a rank, which receives as much per second as benchmarks/ has
measured, unless another figure is given. If the CPU term and the largest of the others are within
KNEE_PERCENT of each other, the step time is reported as exact to about KNEE only: of five published
runs, four were off by up to 11 %, and one by 18 %. There are two bounds:

    at least: the training hosts prepare data beside the data hosts, as in the examples. CPU work
              includes the CPU time that the training itself needs.
    at most:  only the data hosts prepare data, as if the training hosts had no spare cores. CPU
              work excludes the training's share of the CPU time, if CPU use without data is known.

Speed is the ratio of the clocks in cores.csv, which are AWS's figures
(ProcessorInfo.SustainedClockSpeedInGhz of EC2's DescribeInstanceTypes). It is 1 if one of the
clocks is unknown, or if one is a base clock and the other a turbo clock: EC2 lists the same
processor with either. Different work per clock cycle is ignored. Nothing is fitted.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from math import inf, isfinite, isnan, nan
from pathlib import Path
from typing import Any

import pandas as pd

from shared import prices

NEAR_PERCENT = 5  # clusters that cost at most this much more are still near the frontier
MOST_DATA_HOSTS = 8  # for each training instance
RANK_GB_PER_S = 0.6  # benchmarks/README.md, loader.py: float32, one core for a rank and its workers
# CPU time that a training host needs to receive data: the mean of uint8 and float32 images there,
# and one tiny sample.
RECEIVE_MS_PER_MB, RECEIVE_MS_PER_BATCH = 1.6, 1.3
KNEE_PERCENT, KNEE = 30, "±10 %"  # benchmarks/README.md: how far off it is there
DATA_HOSTS = r"ml\.[cmr]\d"  # compute-optimized, general-purpose and memory-optimized families


@dataclass(frozen=True)
class Measured:
    """The numbers of a homogeneous job; nan means unknown.

    Attributes:
        instance_type: Type of the training instances, such as "ml.p4d.24xlarge".
        step_ms: Time of one step, including the wait for data.
        count: Number of training instances.
        without_data_ms: Step time without data.
        cpu_percent: How busy the CPUs were; 100 means all CPUs of all hosts.
        gpu_percent: How busy the GPUs were, likewise.
        training_cpu_percent: How busy the CPUs were without data, likewise.
        mb_per_step: Prepared data of one step, all ranks together, in megabytes.
        rank_gb_per_s: How much one rank can receive, in gigabytes per second.
        kept_busy_percent: How busy a heterogeneous run kept the CPUs of all its hosts, likewise.
        source: Where the numbers come from, as text for the reader.

    Raises:
        ValueError: a number is out of range.
    """

    instance_type: str
    step_ms: float
    count: int = 1
    without_data_ms: float = nan
    cpu_percent: float = nan
    gpu_percent: float = nan
    training_cpu_percent: float = nan
    mb_per_step: float = nan
    rank_gb_per_s: float = RANK_GB_PER_S
    kept_busy_percent: float = nan
    source: str = ""

    def __post_init__(self) -> None:
        may_be_unknown = ("without_data_ms", "mb_per_step", "kept_busy_percent")
        for name in ("step_ms", "count", "rank_gb_per_s", *may_be_unknown):
            value = getattr(self, name)
            unknown = isnan(value) and name in may_be_unknown
            if not unknown and not (isfinite(value) and value > 0):
                raise ValueError(f"{name} is {value:g}, but must be a positive number.")
        for name in ("cpu_percent", "gpu_percent", "training_cpu_percent", "kept_busy_percent"):
            value = getattr(self, name)
            if not (isnan(value) or 0 <= value <= 100):
                raise ValueError(
                    f"{name} is {value:g}, but must be from 0 to 100: here 100 means all vCPUs (or "
                    "GPUs) together, while CloudWatch counts 100 for each."
                )
        if self.without_data_ms > self.step_ms:
            raise ValueError(
                f"without_data_ms ({self.without_data_ms:g}) is above step_ms ({self.step_ms:g}): "
                "a step cannot take longer without data. Are they swapped, or from different jobs?"
            )

    @property
    def floor_ms(self) -> float:
        """The least that a step takes: that without data, or, if unknown, that of the busy GPUs."""
        if isnan(self.without_data_ms):
            return self.step_ms * self.gpu_percent / 100
        return self.without_data_ms

    @property
    def known_floor_ms(self) -> float:
        """Likewise; 0 if unknown."""
        return 0.0 if isnan(self.floor_ms) else self.floor_ms

    @property
    def known_mb(self) -> float:
        """Prepared data of one step in megabytes; 0 if unknown."""
        return 0.0 if isnan(self.mb_per_step) else self.mb_per_step

    @property
    def busy_percent(self) -> float:
        """How busy the CPUs were; 100 if unknown."""
        return 100 if isnan(self.cpu_percent) else self.cpu_percent

    @property
    def training_share(self) -> float:
        """The training's own share of a step's CPU time, from 0 to 1; 0 if unknown."""
        used = self.without_data_ms * self.training_cpu_percent
        in_all = self.step_ms * self.busy_percent
        return 0.0 if isnan(used) or not in_all else min(1.0, used / in_all)

    def taking_in_ms(self, gpus: int) -> float:
        """Time that the ranks need to receive a step's data; 0 if its amount is unknown."""
        return self.known_mb / (self.count * gpus * self.rank_gb_per_s)  # MB / GB/s = ms

    def receiving_ms(self, gpus: int) -> float:
        """CPU time in core-ms that training hosts need to receive a step's data from data hosts.

        If the amount of data is unknown, only the fixed cost of one batch per rank counts.
        """
        return RECEIVE_MS_PER_MB * self.known_mb + RECEIVE_MS_PER_BATCH * self.count * gpus

    def cpu_work(self, cores: int) -> tuple[float, float]:
        """CPU work in core-ms on instances with `cores` cores: all of it, and the part on data."""
        work = self.step_ms * self.count * cores
        return work, work * (1 - self.training_share)

    def preparing_ms(self, cores: int) -> float:
        """CPU time in core-ms for which preparing a step's data keeps CPUs busy."""
        return self.cpu_work(cores)[1] * self.busy_percent / 100

    @property
    def idle_factor(self) -> float:
        """How much longer CPU work takes if data hosts keep CPUs less busy; 1 if unknown."""
        factor = self.busy_percent / self.kept_busy_percent
        return 1.0 if isnan(factor) else factor


def instance_types(
    instance_type: str, region: str = "us-east-1", cores: Mapping[str, int] | None = None
) -> pd.DataFrame:
    """Collect what is known about the instance types, including those without a price (nan).

    Args:
        instance_type: The type of the training instances.
        region: Region of the prices.
        cores: For jobs of the local SageMaker, whose hosts do not have the vCPUs of their types:
            {instance type: cores here}. The result has only these types, all with speed 1.

    Returns:
        One row per type: the fields of `prices.Price`, cores, ghz, the kind of clock, the speed
        relative to `instance_type`, and since when AWS no longer offers the type, or "". Such
        retired types are only there if the arguments name them.

    Raises:
        ValueError: a type is unknown, or `instance_type` has no GPU or no known number of vCPUs, or
            the region is empty or has no known prices of data hosts.
    """
    if not region:
        raise ValueError("The region is empty: give the name of one, such as us-east-1.")
    known = prices.load()
    newest = {price.instance_type: price for price in known if isnan(price.usd_per_hour)}
    for name in {price.instance_type for price in known if price.region == region}:
        newest[name] = prices.price_of(name, region)
    anywhere = {price.instance_type: price for price in known}
    for name in {instance_type, *(cores or {})} - newest.keys():
        if f"ml.{name}" in anywhere:
            raise ValueError(f"No training instance is called {name}: did you mean ml.{name}?")
        other = anywhere.get(name) or prices.price_of(name)  # raises; says which types are known
        newest[name] = replace(other, region="", usd_per_hour=nan, as_of="")
    types = pd.DataFrame(map(asdict, newest.values())).set_index("instance_type").sort_index()
    families = types.index.str.extract(r"^ml\.([^.]+)\.", expand=False)
    types["retired"] = _read("retired.csv")["since"].reindex(families).fillna("").to_numpy()
    asked_for = types.index.isin([instance_type, *(cores or {})])
    types = types[asked_for | (types["retired"] == "")]
    if types["gpus"][instance_type] == 0:
        raise ValueError(
            f"{instance_type} has no GPU, so no accelerator can wait for its CPUs: give the type "
            "of the instances that train."
        )
    if types["vcpus"][instance_type] == 0:
        raise ValueError(f"AWS's price list does not say how many vCPUs {instance_type} has.")
    if cores is None and not _data_hosts(types).any():
        raise ValueError(
            f"No prices of data hosts in {region} are known: python -m shared.costs --refresh "
            f"{region} gets them."
        )
    if cores is not None:
        if instance_type not in cores:
            raise ValueError(f"cores must say how many cores {instance_type} has here.")
        alike = {"ghz": nan, "clock": "", "speed": 1.0}
        return types.loc[list(cores)].assign(cores=list(cores.values()), **alike)
    clocks = _read("cores.csv")
    names = [name.removeprefix("ml.") for name in types.index]
    names = [name if name in clocks.index else name.split(".")[0] for name in names]
    found = clocks.reindex(names).set_index(types.index)
    types = types.assign(cores=types["vcpus"], ghz=found["ghz"], clock=found["clock"].fillna(""))
    alike = types["clock"] == types["clock"][instance_type]
    speed = (types["ghz"] / types["ghz"][instance_type]).where(alike).fillna(1.0)
    return types.assign(speed=speed.round(3))  # as printed, so that it can be recomputed


def _data_hosts(types: pd.DataFrame) -> pd.Series:
    """Tell which types can be proposed as data hosts: their price and vCPUs are known."""
    return types.index.str.match(DATA_HOSTS) & types["usd_per_hour"].notna() & (types["vcpus"] > 0)


def _read(name: str) -> pd.DataFrame:
    """Read a table of this folder, indexed by its first column."""
    return pd.read_csv(Path(__file__).with_name(name), index_col=0)


def predict(measured: Measured, types: pd.DataFrame, data_hosts_only: bool = False) -> pd.DataFrame:
    """Apply the formula to larger instances of the family and to all kinds of data hosts.

    Args:
        measured: The homogeneous job.
        types: From `instance_types`.
        data_hosts_only: Use the upper bound of the step time instead of the lower one.

    Returns:
        One row per cluster, the measured one first. Each type of data host that has a price has
        rows for 1, 2, ... MOST_DATA_HOSTS hosts, and as many for each training instance, as long as
        more hosts are faster.
    """
    trainer = types.loc[measured.instance_type]
    work, _ = measured.cpu_work(trainer["cores"])
    trainers, step = {measured.instance_type: measured.count}, measured.step_ms
    capacity = f"{measured.count} x {trainer['cores']}"
    rows = [_row(measured, types, "measured", trainers, capacity, (step, step), 0.0)]
    family = measured.instance_type.rsplit(".", 1)[0] + "."
    larger = (types["gpus"] == trainer["gpus"]) & (types["cores"] > trainer["cores"])
    comparable = types["usd_per_hour"].notna() | isnan(trainer["usd_per_hour"])
    of_family = types.index.str.startswith(family)
    for name, kind in types[of_family & larger & comparable].iterrows():
        step = work / (measured.count * kind["cores"] * kind["speed"])
        capacity = f"{measured.count} x {kind['cores']} x {kind['speed']:.3f}"
        larger_ones = {name: measured.count}
        floor = measured.known_floor_ms
        rows.append(_row(measured, types, "scale up", larger_ones, capacity, (step, step), floor))
    few = range(1, MOST_DATA_HOSTS + 1)
    counts = sorted({*few, *(measured.count * count for count in few)})
    for name in types[_data_hosts(types)].index:
        before = inf
        for count in counts:
            row = with_data_hosts(measured, types, name, count, data_hosts_only)
            if row["step time (ms)"] >= before:
                break
            before = row["step time (ms)"]
            rows.append(row)
    table = pd.DataFrame(rows)
    table["frontier"] = _frontier(table["step time (ms)"], table["USD per 1,000 steps"])
    return table


def with_data_hosts(
    measured: Measured,
    types: pd.DataFrame,
    data_type: str,
    count: int,
    data_hosts_only: bool = False,
) -> dict[str, Any]:
    """Apply the formula to the measured cluster plus `count` data hosts of one type.

    Unlike `predict`, it takes any number of data hosts, even if fewer would be as fast.

    Returns:
        A row like those of `predict`, without the frontier.
    """
    trainer, kind = types.loc[measured.instance_type], types.loc[data_type]
    work, data_work = measured.cpu_work(trainer["cores"])
    gbps = min(measured.count * trainer["network_gbps"], count * kind["network_gbps"])
    taking_in = measured.taking_in_ms(trainer["gpus"])
    network = 8 * measured.known_mb / gbps  # Mbit / Gbit/s = ms
    limit = max(measured.known_floor_ms, network, taking_in)
    data_cores = count * kind["cores"] * kind["speed"]
    cpu = work / (measured.count * trainer["cores"] + data_cores), data_work / data_cores
    cpu = tuple(ms * measured.idle_factor for ms in cpu)
    instances = {measured.instance_type: measured.count, data_type: count}
    capacity = f"{measured.count} x {trainer['cores']}"
    capacity += f" + {count} x {kind['cores']} x {kind['speed']:.3f}"
    return _row(measured, types, "heterogeneous", instances, capacity, cpu, limit, data_hosts_only)


def _row(
    measured: Measured,
    types: pd.DataFrame,
    kind: str,
    instances: dict[str, int],
    capacity: str,
    cpu: tuple[float, float],
    limit: float,
    data_hosts_only: bool = False,
) -> dict[str, Any]:
    """Describe one cluster: its instances, its step time with both bounds, and its costs.

    `cpu` has both bounds of the formula's CPU term in ms; `limit` is the largest other term.
    """
    low, high = (max(ms, limit) for ms in cpu)
    step_ms, cpu_ms = (high, cpu[1]) if data_hosts_only else (low, cpu[0])
    at_knee = step_ms < min(cpu_ms, limit) * (1 + KNEE_PERCENT / 100)
    usd_per_hour = sum(types["usd_per_hour"][name] * n for name, n in instances.items())
    cost = usd_per_hour / 3600 * step_ms  # ms * 1,000 steps = s
    now = measured.count * types["usd_per_hour"][measured.instance_type] / 3600 * measured.step_ms
    return {
        "instances": " + ".join(f"{n} x {name}" for name, n in instances.items()),
        "kind": kind,
        "data hosts": sum(instances.values()) - measured.count,
        "cores x speed": capacity,
        "step time (ms)": step_ms,
        "at least (ms)": low,
        "at most (ms)": high,
        "USD per hour": usd_per_hour,
        "USD per 1,000 steps": cost,
        "improvement (%)": 100 * (1 - cost / now),
        "knee": KNEE if at_knee else "",
    }


def _frontier(step: pd.Series, cost: pd.Series) -> list[str]:
    """Return "yes" for each cluster if none that is as fast is cheaper, else "near" or ""."""
    dearer = [c / cost[step <= s * (1 + 1e-9)].min() - 1 for s, c in zip(step, cost, strict=True)]
    return ["yes" if d < 1e-9 else "near" if 100 * d <= NEAR_PERCENT else "" for d in dearer]
