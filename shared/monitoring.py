"""What a training job is doing and how fast: its status, its logs, its step times.

SageMaker writes the output of every host of a training job to CloudWatch Logs, and names the hosts
algo-1, algo-2, ... in an order that says nothing about their instance groups. This module reads
those logs, finds each host's group in the host's own log, and turns the lines that the training
script prints every N steps,

    step=120 epoch=1 loss=0.1234 step_time_ms=12.34 data_wait_ms=4.56 samples_per_s=10372.1

into a table; and it reads how busy each host was. It uses nothing but boto3's `logs`, `cloudwatch`
and `sagemaker` clients, so that it works alike on AWS and on the local SageMaker.
"""

import re
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from itertools import zip_longest
from math import nan
from statistics import mean
from typing import Any

import boto3
import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

LOG_GROUP = "/aws/sagemaker/TrainingJobs"

# For the MetricDefinitions of a job: SageMaker then graphs these as the job's metrics.
METRIC_DEFINITIONS = [
    {"Name": name, "Regex": rf"step=\d+ .*\b{name}=([0-9.eE+-]+)"}
    for name in ("loss", "step_time_ms", "data_wait_ms", "samples_per_s")
]

# Either of these in a host's log names its group: resourceconfig.json, which the SDK's start-up
# script prints on every host, or the line with which our hetero.py introduces the host.
_GROUP = re.compile(r'"current_group_name":\s*"([^"]+)"|\bhost=\S+ group=(\S+)')
_STEP = re.compile(r"\bstep=\d+ .*\bstep_time_ms=")
# The SDK's start-up script ends with one of these lines; bash traces (`+ cd ...`) go on after it.
_SETUP_END = re.compile(r"(Executing command:|Running .+ [Dd]river)")
_SETUP_NOISE = re.compile(r"(\++ |SM_\w+=|Executing command: |Training Container Execution Comp)")

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")  # Okabe and Ito, colour-blind-safe


@dataclass(frozen=True)
class LogLine:
    """One line of a training job's log."""

    time: datetime
    host: str
    group: str
    text: str


def logs(job_name: str, session: boto3.Session | None = None) -> list[LogLine]:
    """Read the whole log of a training job, all hosts, in order of time.

    A host whose log does not say which instance group it is in gets the group "unknown".

    Raises:
        ValueError: the job has no log (yet).
    """
    client = (session or boto3).client("logs")
    try:
        streams = list(
            _pages(client, "describe_log_streams", "logStreams", logStreamNamePrefix=f"{job_name}/")
        )
    except client.exceptions.ResourceNotFoundException:
        streams = []  # the log group appears with the account's first training job
    lines = []
    for name in (stream["logStreamName"] for stream in streams):  # <job>/algo-1-<epoch>
        host = name.rsplit("/", 1)[1].rsplit("-", 1)[0]
        events = list(_pages(client, "filter_log_events", "events", logStreamNames=[name]))
        named = (_GROUP.search(event["message"]) for event in events)
        group = next((match[1] or match[2] for match in named if match), "unknown")
        for event in events:
            when = datetime.fromtimestamp(event["timestamp"] / 1000, timezone.utc)
            lines.append(LogLine(when, host, group, event["message"].rstrip()))
    if not lines:
        raise ValueError(
            f"There is no log of training job {job_name!r}: check the name and the region, "
            "or wait until its hosts have started."
        )
    return sorted(lines, key=lambda line: line.time)  # stable: a host's lines keep their order


def _pages(client: Any, operation: str, key: str, **arguments: Any) -> Iterator[dict[str, Any]]:
    """Yield what is under `key` in every page of a CloudWatch Logs operation."""
    for page in client.get_paginator(operation).paginate(logGroupName=LOG_GROUP, **arguments):
        yield from page[key]


def show_logs(
    job_name: str,
    group: str | None = None,
    host: str | None = None,
    last: int | None = 20,
    side_by_side: bool = False,
    skip_setup: bool = True,
    session: boto3.Session | None = None,
) -> None:
    """Print a training job's log by instance group and host.

    Args:
        job_name: Name of the training job.
        group: Only the hosts of this instance group.
        host: Only this host (algo-1, ...).
        last: So many lines of each host, the last ones; None prints all.
        side_by_side: One column per host instead of one block per host.
        skip_setup: Leave out what the SDK's start-up script prints before and around our code.
        session: boto3 session to use instead of the default one.

    Raises:
        ValueError: the job has no log, or no such host or group.
    """
    hosts: dict[tuple[str, str], list[LogLine]] = {}
    for line in logs(job_name, session):
        hosts.setdefault((line.group, line.host), []).append(line)
    names = sorted(hosts, key=lambda name: (name[0], len(name[1]), name[1]))  # algo-10 after -9
    chosen = [name for name in names if group in (None, name[0]) and host in (None, name[1])]
    if not chosen:
        known = ", ".join(f"{host} in {group}" for group, host in names)
        raise ValueError(
            f"No host matches group={group!r}, host={host!r}; the log of {job_name!r} has {known}."
        )
    blocks = []
    for group_name, host_name in chosen:
        lines = hosts[group_name, host_name]
        lines = _without_setup(lines) if skip_setup else lines
        shown = lines[-last:] if last else lines
        of_all = f"last {len(shown)} of " if len(shown) < len(lines) else ""
        title = f"== {group_name} / {host_name} ({of_all}{len(lines)} lines)"
        blocks.append([title] + [f"{line.time:%H:%M:%S} {line.text}" for line in shown])
    if side_by_side:
        _print_columns(blocks)
    else:
        for block in blocks:
            for text in block:
                print(text if len(text) <= 140 else text[:139] + "…")


def _without_setup(lines: list[LogLine]) -> list[LogLine]:
    """Drop the start-up script's lines; a host that failed during start-up keeps its messages."""
    ends = [i for i, line in enumerate(lines) if _SETUP_END.match(line.text)]
    start = ends[0] + 1 if ends else 0
    return [line for line in lines[start:] if not _SETUP_NOISE.match(line.text)]


def _print_columns(blocks: list[list[str]], total_width: int = 160) -> None:
    """Print blocks of text next to each other, wrapped to equal columns."""
    width = total_width // len(blocks) - 2
    columns = [[part for text in block for part in textwrap.wrap(text, width)] for block in blocks]
    for row in zip_longest(*columns, fillvalue=""):
        print("  ".join(cell.ljust(width) for cell in row).rstrip())


def steps(job_name: str, session: boto3.Session | None = None) -> pd.DataFrame:
    """Collect the step lines of a training job's log.

    Returns:
        One row per step line, in order of time: time (UTC), host, and a numeric column for every
        key of the line, such as step, epoch, loss, step_time_ms, data_wait_ms, samples_per_s.

    Raises:
        ValueError: the job has no log, or no step line in it.
    """
    rows = [
        {"time": line.time, "host": line.host, **dict(re.findall(r"(\w+)=(\S+)", line.text))}
        for line in logs(job_name, session)
        if _STEP.search(line.text)
    ]
    if not rows:
        raise ValueError(
            f"The log of training job {job_name!r} has no step lines ('step=... step_time_ms=...'):"
            f" did training start? See show_logs({job_name!r})."
        )
    table = pd.DataFrame(rows)
    keys = table.columns.drop(["time", "host"])
    return table.astype({key: float for key in keys}).astype({"step": int})


def utilisation(job_name: str, session: boto3.Session | None = None) -> pd.DataFrame:
    """Look up how many vCPUs and GPUs of each host were busy, from the first step line to the last.

    On AWS CloudWatch has one value a minute: too few for a job of a few minutes.

    Returns:
        One row per host: group, host, and the means of its "busy vCPUs" (CPUUtilization is 100 for
        each) and, where there are GPUs, "busy GPUs"; nan if CloudWatch has no value.

    Raises:
        ValueError: the job has no log, or no step line in it.
    """
    client = (session or boto3).client("cloudwatch")
    times = steps(job_name, session)["time"]
    start, end = times.iloc[0], times.iloc[-1]
    minutes = 1 + int((end - start).total_seconds()) // 60 // 1440  # an answer has 1440 at most
    rows = []
    for group, host in sorted({(line.group, line.host) for line in logs(job_name, session)}):
        row = {"group": group, "host": host}
        for metric, name in (("CPUUtilization", "busy vCPUs"), ("GPUUtilization", "busy GPUs")):
            points = client.get_metric_statistics(
                Namespace="/aws/sagemaker/TrainingJobs",
                MetricName=metric,
                Dimensions=[{"Name": "Host", "Value": f"{job_name}/{host}"}],
                StartTime=start,
                EndTime=end + timedelta(seconds=1),  # exclusive, and in whole seconds
                Period=60 * minutes,
                Statistics=["Average"],
            )["Datapoints"]
            row[name] = mean(point["Average"] for point in points) / 100 if points else nan
        rows.append(row)
    return pd.DataFrame(rows).dropna(axis="columns", how="all")


def labelled(job_names: Sequence[str] | Mapping[str, str]) -> Mapping[str, str]:
    """Give jobs their names as labels, unless they come as {label: name}."""
    if isinstance(job_names, str) or not job_names:
        raise ValueError(
            f"Give training jobs as [name, ...] or {{label: name}}, not {job_names!r}."
        )
    return job_names if isinstance(job_names, Mapping) else {name: name for name in job_names}


def plot_steps(
    job_names: Sequence[str] | Mapping[str, str],
    title: str = "",
    session: boto3.Session | None = None,
) -> Figure:
    """Draw step time and data wait over the steps of training jobs, by name or as {label: name}."""
    fig, panels = plt.subplots(1, 2, figsize=(11, 3.8), sharey=True, layout="constrained")
    for i, (label, job_name) in enumerate(labelled(job_names).items()):
        table = steps(job_name, session)
        for panel, column in zip(panels, ("step_time_ms", "data_wait_ms"), strict=True):
            colour, marker = COLOURS[i % len(COLOURS)], "os^D"[i % 4]
            panel.plot(table["step"], table[column], marker=marker, color=colour, label=label)
    for panel, name in zip(panels, ("Step time", "of which waiting for data"), strict=True):
        panel.set_title(name, fontsize=13)
        panel.set_xlabel("step", fontsize=12)
        panel.tick_params(labelsize=11)
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", alpha=0.3)
    panels[0].set_ylim(bottom=0)
    panels[0].set_ylabel("ms per step", fontsize=12)
    handles, labels = panels[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=11, frameon=False)
    fig.suptitle(title, fontsize=14)
    plt.close(fig)  # the notebook draws the returned figure; left open, it would be drawn twice
    return fig


def wait(
    job_name: str, poll_seconds: float = 2.0, session: boto3.Session | None = None
) -> dict[str, Any]:
    """Wait until a training job has ended, printing one line per change of its status.

    Returns:
        DescribeTrainingJob's response for the job, Completed or Stopped.

    Raises:
        RuntimeError: the job failed; says why.
    """
    client = (session or boto3).client("sagemaker")
    start, printed = time.monotonic(), 0
    while True:
        job = client.describe_training_job(TrainingJobName=job_name)
        elapsed = f"{time.monotonic() - start:7.1f} s"
        transitions = job.get("SecondaryStatusTransitions", [])
        for transition in transitions[printed:]:
            print(f"{elapsed}  {transition['Status']}: {transition.get('StatusMessage', '')}")
        printed = len(transitions)
        status = job["TrainingJobStatus"]
        if status == "Failed":
            reason = job.get("FailureReason", "SageMaker gave no reason.")
            raise RuntimeError(f"Training job {job_name!r} failed: {reason}")
        if status in ("Completed", "Stopped"):
            print(f"{elapsed}  {job_name} {status}, {job.get('BillableTimeInSeconds', 0)} s billed")
            return job
        time.sleep(poll_seconds)
