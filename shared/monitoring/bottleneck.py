"""Compute how busy the hosts of a training job are, and find its bottleneck.

The CPU and GPU utilisation of each host comes from CloudWatch, the instance types of the groups
from DescribeTrainingJob, and the group of each host and its step times from the log. The module
calls AWS through boto3 only, so it works the same way on AWS and on the local SageMaker.

On the local SageMaker, the time that a host gets on its cores stands for the vCPUs of its instance
type. Hosts that share a core, with each other or with other programs, cannot reach 100 %. There is
no GPU: if an instance type has one, the host's cores stand in for it.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from math import isnan, nan
from operator import methodcaller
from typing import Any

import pandas as pd

from shared import prices
from shared.measured import BUSY_PERCENT, WORTH_PERCENT
from shared.monitoring.describe import ask, describe
from shared.monitoring.joblog import JobLog, read_log
from shared.monitoring.log import hosts_of

UNITS = {"CPU": "vcpus", "GPU": "gpus"}  # CloudWatch's names, and those in prices.csv
OTHERS = "other programs"  # in place of a host's name: the CPU use of this machine's other programs
QUIET_PERCENT = 5  # our choice: if other programs take more of the CPU time, times are not reliable
LOCAL_ROLE = ":role/LocalSageMakerRole"  # the role of every local job, and of no job on AWS
LATE = "they come once a minute, a few minutes late"
RULE = (
    f"Bottleneck: a group's CPUs that are at least {BUSY_PERCENT} % busy, on average from the "
    f"first step line to the last,\nif data costs at least {WORTH_PERCENT} % of a step (if that is "
    "not known: perhaps, if it can cost as much). Otherwise, GPUs that\nare as busy are the limit, "
    "as they should be."
)
UNKNOWN = "What data costs is not known: `measured` finds it (docs/when.md)."


@dataclass(frozen=True)
class Observed(JobLog):
    """All that is known about a training job at one time: what its log tells, and its hosts' use.

    Attributes:
        description: DescribeTrainingJob's response.
        hosts: One row per host: group, host, instance type, vcpus and gpus. The last two are nan
            if the instance type is not in prices.csv.
        use: Utilisation in percent of the instance, as a series over time (UTC), by (host, "CPU"
            or "GPU"). A series is empty if CloudWatch has no values. Its values are nan if the
            number of vCPUs or GPUs is not known, or is 0.
        others: The CPU use of other programs on this machine, in percent of all its cores, over
            time. Empty for jobs on AWS.
    """

    description: dict[str, Any]
    hosts: pd.DataFrame
    use: dict[tuple[str, str], pd.Series]
    others: pd.Series

    def plays_gpu(self, host: str) -> bool:
        """Whether the host is local, and its cores stand in for the GPU of its instance type.

        Missing GPU values do not show this: on AWS they may be late, and CloudWatch has none for
        Trainium.
        """
        is_local = self.description.get("RoleArn", "").endswith(LOCAL_ROLE)
        gpus = self.hosts.set_index("host")["gpus"][host]
        return is_local and gpus > 0 and not self.use[host, "CPU"].empty


def observe(job_name: str, synthetic_job: str | None = None) -> Observed:
    """Read all that is known about a training job, and the step time of the same job without data.

    Raises:
        ValueError: there is no such job, or it has no log (yet).
    """
    description, log = describe(job_name), read_log(job_name, synthetic_job, needs_steps=False)
    config = description["ResourceConfig"]
    sizes = {price.instance_type: (price.vcpus or nan, price.gpus) for price in prices.load()}
    groups = config.get("InstanceGroups") or []
    types = {group["InstanceGroupName"]: group["InstanceType"] for group in groups}
    hosts = []
    for group, host in hosts_of(log.lines):
        kind = types.get(group) or config.get("InstanceType") or "unknown"
        vcpus, gpus = sizes.get(kind, (nan, nan))
        size = {"instance type": kind, "vcpus": vcpus, "gpus": gpus}
        hosts.append({"group": group, "host": host, **size})
    start, end = log.lines[0].time, log.lines[-1].time
    use = {
        (row["host"], unit): _use(f"{job_name}/{row['host']}", unit, row[count], start, end)
        for row in hosts
        for unit, count in UNITS.items()
    }
    others = _use(f"{job_name}/{OTHERS}", "CPU", 1, start, end)
    return Observed(
        **vars(log), description=description, hosts=pd.DataFrame(hosts), use=use, others=others
    )


def _use(host: str, unit: str, count: float, start: datetime, end: datetime) -> pd.Series:
    """Read a host's CPU or GPU utilisation in percent of all `count` vCPUs or GPUs.

    CloudWatch counts 100 for each vCPU or GPU.
    """
    for period in _periods(start, end):
        question = methodcaller(
            "get_metric_statistics",
            Namespace="/aws/sagemaker/TrainingJobs",
            MetricName=f"{unit}Utilization",
            Dimensions=[{"Name": "Host", "Value": host}],
            StartTime=start,
            EndTime=end + timedelta(seconds=1),  # exclusive, and in whole seconds
            Period=period,
            Statistics=["Average"],
        )
        points = ask("cloudwatch", question)["Datapoints"]
        if points:
            break
    values = {point["Timestamp"]: point["Average"] / (count or nan) for point in points}
    return pd.Series(values, dtype=float).sort_index()


def _periods(start: datetime, end: datetime) -> list[int]:
    """List the periods, in seconds, to request one after the other until there are values.

    The local SageMaker has a value every second, AWS has one a minute. CloudWatch keeps values of
    periods below a minute for 3 hours, of one minute for 15 days, and of five minutes for 63 days
    (source: API reference of GetMetricStatistics).
    """
    age, seconds = datetime.now(timezone.utc) - start, (end - start).total_seconds()
    most = 1400  # a response has at most 1,440 values, and CloudWatch rounds its start down
    kept = 60 if age < timedelta(days=15) else 300 if age < timedelta(days=63) else 3600
    short = [p for p in (1, 5, 10, 20, 30) if age < timedelta(hours=3) and seconds < p * most]
    return [*short[:1], kept * (1 + int(seconds / kept) // most)]


def utilisation(job_name: str) -> pd.DataFrame:
    """Look up how busy each host was on average, from the first step line to the last.

    If there are no step lines, the average covers the whole log. On AWS, CloudWatch has one value
    a minute, which is too few for a training of less than two minutes.

    Returns:
        One row per host: group, host, instance type, "CPU (%)" and "GPU (%)", where 100 is the
        whole instance. A value is nan if CloudWatch has no values, or if prices.csv does not have
        the instance type. A column in which all values are nan is left out.

    Raises:
        ValueError: there is no such job, or it has no log.
    """
    return averages(observe(job_name)).dropna(axis="columns", how="all")


def averages(seen: Observed) -> pd.DataFrame:
    """Compute the table that `utilisation` returns, including the columns that are all nan."""
    table = seen.hosts[["group", "host", "instance type"]].copy()
    for unit in UNITS:
        table[f"{unit} (%)"] = [
            _average(seen.use[host, unit], seen.steps) for host in table["host"]
        ]
    return table


def _average(values: pd.Series, steps: pd.DataFrame) -> float:
    """Average the values between the first and the last step line."""
    if values.empty or steps.empty:
        return values.mean()
    first, last = steps["time"].iloc[0], steps["time"].iloc[-1]
    times = values.index.to_series()
    length = _length(times)
    inside = values[(times >= first) & (times + length <= last)]
    partly = values[(times > first - length) & (times <= last)]
    return (partly if inside.empty else inside).mean()


def _length(times: pd.Series) -> timedelta:
    """Return the length of the period that each value covers."""
    return timedelta(minutes=1) if len(times) == 1 else times.diff().min()


def others_percent(seen: Observed) -> float:
    """Compute how much of this machine's CPU time other programs took during the training.

    nan for jobs on AWS, whose hosts run nothing else.
    """
    return _average(seen.others, seen.steps)


def wait_percent(steps: pd.DataFrame) -> float:
    """Compute for what percentage of a step Python waits for data; nan if not known.

    Both times are medians. Data may cost less: CUDA runs behind Python, so a GPU can be busy with
    earlier steps meanwhile. And it may cost more: workers that share the cores with the training
    also slow down its steps.
    """
    if "data_wait_ms" not in steps:
        return nan
    return 100 * steps["data_wait_ms"].median() / steps["step_time_ms"].median()


def most_idle_percent(seen: Observed) -> float:
    """Compute for what percentage of a step accelerators wait for data at most; nan if unknown.

    That is while Python waits, and while no GPU of the hosts that train is in use.
    """
    trains = averages(seen).set_index("host")["GPU (%)"].reindex(seen.steps.get("host", []))
    known = [wait_percent(seen.steps), 100 - trains.mean()]
    return min((percent for percent in known if not isnan(percent)), default=nan)


def limits(seen: Observed) -> dict[tuple[str, str], float]:
    """Find what limits a job, by RULE: percent busy by (group, "CPU" or "GPU"); empty if none.

    The result has either only CPUs, which are the bottleneck, or only GPUs, which are the limit.
    """
    data_percent, hosts = seen.data_percent, averages(seen)
    trainers = set() if seen.steps.empty else set(seen.steps["host"])
    most = most_idle_percent(seen) if isnan(data_percent) else data_percent
    cpus_count = isnan(most) or round(most) >= WORTH_PERCENT  # as it is printed
    cpus, gpus = {}, {}
    for group, members in hosts.groupby("group"):
        percents = {unit: members[f"{unit} (%)"].mean() for unit in UNITS}
        if all(map(seen.plays_gpu, members["host"])):
            # If other hosts prepare the data, these cores only stand in for the GPU.
            both = set(hosts["host"]) <= trainers
            percents = {
                "CPU" if both and (cpus_count or isnan(data_percent)) else "GPU": percents["CPU"]
            }
        if cpus_count and is_busy(percents.get("CPU", 0)):
            cpus[group, "CPU"] = percents["CPU"]
        if is_busy(percents.get("GPU", 0)):
            gpus[group, "GPU"] = percents["GPU"]
    return cpus or gpus


def is_busy(percent: float) -> bool:
    """Whether CPUs or GPUs are as busy as a bottleneck is; as it is printed, so rounded."""
    return not isnan(percent) and round(percent) >= BUSY_PERCENT


def disturbed(percent: float) -> str:
    """Say what it means that other programs took `percent` of the CPU time."""
    return (
        f"{OTHERS.capitalize()} took {percent:.0f} % of this machine's CPU time, which makes steps "
        "longer, some more than others: use a quiet machine."
    )


def missing(seen: Observed) -> str:
    """Say which CPU values of the training CloudWatch does not have (yet); "" if it has all.

    A host's last period may have no value, so the last value may be two periods before the end.
    """
    end = seen.lines[-1].time if seen.steps.empty else seen.steps["time"].iloc[-1]
    texts = []
    for host in seen.hosts["host"]:
        times = seen.use[host, "CPU"].index.to_series()
        if times.empty:
            texts.append(f"none for {host}")
        elif end - times.iloc[-1] > max(2 * _length(times), timedelta(seconds=10)):
            texts.append(f"for {host} only up to {times.iloc[-1]:%H:%M:%S}")
    return f"CPU values in CloudWatch: {', '.join(texts)} (on AWS {LATE})." if texts else ""


def explain(seen: Observed) -> str:
    """Say in a few sentences what the bottleneck is."""
    data_percent, most, found = seen.data_percent, most_idle_percent(seen), limits(seen)
    waits = f"; data costs {data_percent:.0f} % of a step"
    perhaps = "perhaps " if isnan(data_percent) else ""
    if isnan(data_percent):
        waits = f"; the training waits for data for at most {most:.0f} % of a step"
        waits = "" if isnan(most) else waits
    unknown = seen.hosts["instance type"][seen.hosts["vcpus"].isna()].unique()
    if not len(unknown) and averages(seen)[["CPU (%)", "GPU (%)"]].isna().all(axis=None):
        return (
            "Bottleneck: unknown, because CloudWatch has no values for these hosts during training "
            f"(on AWS {LATE}){waits}."
        )
    absent = missing(seen)
    playing = [host for host in seen.hosts["host"] if seen.plays_gpu(host)]
    what = " and ".join(f"the {u}s of {group} ({p:.0f} % busy)" for (group, u), p in found.items())
    matters = (
        round(most if isnan(data_percent) else data_percent, 0) >= WORTH_PERCENT
    )  # False for nan
    if any(unit == "CPU" for _, unit in found):
        text = f"Bottleneck: {perhaps}{what}{waits}."
    elif found:
        as_it_should = "" if matters else ", as it should be"
        text = f"The limit: {what}{as_it_should}{waits}."
    elif len(unknown) or absent:
        text = f"Bottleneck: unknown{waits}."
    elif matters:
        others = f"{OTHERS} on this machine, " if playing else ""
        text = (
            f"Bottleneck: none of these CPUs and GPUs{waits}. Look at {others}the network, the "
            "storage, and the number of workers."
        )
    else:
        text = f"Bottleneck: none{' seen' if isnan(data_percent) else ''}{waits}."
    if isnan(data_percent) and not seen.steps.empty:
        text += f" {UNKNOWN}"
    if others_percent(seen) > QUIET_PERCENT:
        text += f" {disturbed(others_percent(seen))}"
    if playing:
        text += f" There is no GPU here: the cores of {', '.join(playing)} stand in for it."
    if len(unknown):
        text += f" Not judged: {', '.join(unknown)}, which is not in shared/prices.csv."
    return f"{text} {absent}" if absent else text
