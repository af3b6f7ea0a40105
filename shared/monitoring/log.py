"""The log of a training job: by instance group and host, and the numbers in it.

SageMaker writes the output of every host of a training job to CloudWatch Logs, and names the hosts
algo-1, algo-2, ... in an order that says nothing about their instance groups. This module reads
those logs, finds each host's group in the host's own log, and turns the lines that the training
script prints every N steps,

    step=120 epoch=1 loss=0.1234 step_time_ms=12.34 data_wait_ms=4.56 samples_per_s=10372.1

into a table. It uses nothing but boto3's `logs` and `sagemaker` clients, so that it works alike on
AWS and on the local SageMaker.

CloudWatch is late: the last lines of a job come some seconds after its end. Whoever reads its log
so soon waits until all is there, which is so when

- the log of each host ends with a farewell: `host=algo-1 ends`, or what the SDK's start-up script
  prints last;
- or each host has lines, and since the job's end QUIET_SECONDS have passed, and twice the longest
  delay of any line;
- or LATEST_SECONDS have passed since the job's end.

A job that runs, or that ended longer ago, is not waited for.

Managed spot training starts an interrupted job again: each host then has a log stream for each
attempt, and may be in another instance group in each. Numbers, tables and figures are those of the
last attempt, which stderr says; `show_logs` shows all attempts.
"""

import contextlib
import re
import sys
import time
from bisect import bisect_right
from dataclasses import dataclass, field
from datetime import datetime, timezone
from html import escape
from itertools import product, zip_longest
from math import isfinite, nan
from operator import methodcaller
from statistics import median
from typing import Any

import pandas as pd
from IPython.display import display

from shared.monitoring.describe import ask, describe, instances_of

# For the MetricDefinitions of a job: SageMaker then graphs these as the job's metrics. As in the
# table of `steps`, the first number of that name counts, and val/loss is another name than loss.
_NUMBER = r"([-+]?[0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?)(?:ms)?[,;]?(?:\s|$)"
METRIC_DEFINITIONS = [
    {"Name": name, "Regex": rf"\bstep=\d+[,;]?\s(?:.*?\s)?{name}={_NUMBER}"}
    for name in ("loss", "step_time_ms", "data_wait_ms", "samples_per_s")
]

LOG_GROUP = "/aws/sagemaker/TrainingJobs"
WIDTH = 96  # letters of a line, as many as JupyterLab has room for in a window of 1200 pixels
# What AWS's own SDK pauses after a job's end before it reads the log for the last time
# (_logs_for_job in sagemaker/core/remote_function/job.py). A delay that shows in the log (ingestion
# time - timestamp) is not all of it: lines get their timestamps up to 3 s after they were printed,
# as published logs of jobs that print the time show.
QUIET_SECONDS = 10
LATEST_SECONDS = 60  # our choice: AWS does not say how late lines can be
LOOK_EVERY_SECONDS = 2

# Either of these in a host's log names its group: resourceconfig.json, which the SDK's start-up
# script prints on every host, or the line with which our launcher introduces the host.
_GROUP = re.compile(r'"current_group_name":\s*"([^"]+)"|\bhost=\S+ group=(\S+)')
# What a host prints last: our code, and the SDK's start-up script (unless the command is an exec).
_FAREWELL = re.compile(
    r"\bhost=\S+ ends$"
    r"|^Training Container Execution Completed$"
    r"|^An error occurred with exit code \d+$"
)
# key=value; the value ends where a space, or a comma and the next key follows.
_PAIR = re.compile(r"(?<![\w./@-])([\w./@-]+)=(\S*?)(?=\s|$|[,;][\w./@-]+=)")
_STEP = re.compile(r"(?<![\w./@-])step=\d.*(?<![\w./@-])step_time_ms=")
# The SDK's start-up script ends with one of these lines; bash traces (`+ cd ...`) go on after it.
_SETUP_END = re.compile(r"(Executing command:|Running .+ [Dd]river)")
_SETUP_NOISE = re.compile(r"(\++ |SM_\w+=|Executing command: |Training Container Execution Comp)")


@dataclass(frozen=True)
class LogLine:
    """One line of a training job's log. attempt: 1, and more after each spot interruption."""

    time: datetime
    host: str
    group: str
    text: str
    attempt: int = 1


def logs(job_name: str) -> list[LogLine]:
    """Read the log of a training job's last attempt, all hosts, in order of time.

    If the job has been interrupted, earlier attempts are left out, which is said on stderr. If it
    has just ended, this waits for its last lines, until LATEST_SECONDS after the end at
    most: see the module's docstring. A host whose log does not say which instance group it is in
    gets the group "unknown".

    Raises:
        ValueError: the job has no log (yet).
        PermissionError, ClientError, BotoCoreError: as `describe.ask` raises them.
    """
    lines = _all_attempts(job_name)
    last = max(line.attempt for line in lines)
    if last > 1:
        print(
            f"Training job {job_name!r} has been interrupted and started again: this is of attempt "
            f"{last} alone; show_logs({job_name!r}) shows all {last}.",
            file=sys.stderr,
        )
    return [line for line in lines if line.attempt == last]


def _all_attempts(job_name: str) -> list[LogLine]:
    """Read a job's log, and look again while some lines are still on their way."""
    log, hosts, ended = GrowingLog(job_name), 0, 0.0
    with contextlib.suppress(ValueError, PermissionError):  # not known, or not to us
        job = describe(job_name)
        hosts, ended = _hosts_to_wait_for(job), time.monotonic() - _seconds_since_end(job)
    lines = log.look()
    while hosts and (rest := ended + _complete_after(log.streams, hosts) - time.monotonic()) > 0:
        time.sleep(min(rest, LOOK_EVERY_SECONDS))
        lines = log.look()
    if not lines:
        raise ValueError(
            f"There is no log of training job {job_name!r}: check the name and the region, "
            "or wait until its hosts have started."
        )
    return lines


def _hosts_to_wait_for(job: dict[str, Any]) -> int:
    """How many hosts' lines may still come; none before a job's end, or if no host has started."""
    started = any(t["Status"] == "Training" for t in job.get("SecondaryStatusTransitions", []))
    if not started or job["TrainingJobStatus"] in ("InProgress", "Stopping"):
        return 0
    return sum(instances_of(job["ResourceConfig"]).values())


def _seconds_since_end(job: dict[str, Any]) -> float:
    """How long ago a job ended; 0 where it has not, or our clock is behind AWS's."""
    end = job.get("TrainingEndTime")
    return max(0.0, (datetime.now(timezone.utc) - end).total_seconds()) if end else 0.0


def _complete_after(streams: dict[str, list[dict[str, Any]]], hosts: int) -> float:
    """By what there is of a job's log, so many seconds after the job's end all of it is there."""
    attempts = _attempts(streams)
    last = [streams[name] for name in attempts if attempts[name] == max(attempts.values())]
    if len(last) < hosts:
        return LATEST_SECONDS
    if all(any(_FAREWELL.search(e["message"].rstrip()) for e in events) for events in last):
        return 0
    longest = max(e["ingestionTime"] - e["timestamp"] for events in last for e in events)
    return min(max(QUIET_SECONDS, 2 * longest / 1000), LATEST_SECONDS)


@dataclass
class GrowingLog:
    """A job's log for those who look more than once: each `look` reads only what is new.

    Attributes:
        job_name: Name of the training job.
        streams: CloudWatch's events that have been read, by log stream.
        tokens: Where to go on reading, by log stream; CloudWatch forgets them after 24 hours.
    """

    job_name: str
    streams: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    tokens: dict[str, str] = field(default_factory=dict)

    def look(self) -> list[LogLine]:
        """Read what there is by now, and wait for nothing; return all lines, in order of time."""
        for stream in ask("logs", self._names):
            while self._read_page(stream):
                pass
        return _lines(self.streams)

    def _names(self, client: Any) -> list[str]:
        """List the job's log streams."""
        pages = client.get_paginator("describe_log_streams").paginate(
            logGroupName=LOG_GROUP, logStreamNamePrefix=f"{self.job_name}/"
        )
        try:
            return [stream["logStreamName"] for page in pages for stream in page["logStreams"]]
        except client.exceptions.ResourceNotFoundException:
            return []  # the log group appears with the account's first training job

    def _read_page(self, stream: str) -> bool:
        """Read on in a stream, oldest events first; return whether there may be more.

        Not with FilterLogEvents, which AmazonSageMakerFullAccess does not allow. A page may be
        empty: only a token that comes back says that there is no more (API reference of
        GetLogEvents).
        """
        arguments = {"logGroupName": LOG_GROUP, "logStreamName": stream, "startFromHead": True}
        before = self.tokens.get(stream)
        if before:
            arguments["nextToken"] = before
        page = ask("logs", methodcaller("get_log_events", **arguments))
        self.streams.setdefault(stream, []).extend(page["events"])
        self.tokens[stream] = page["nextForwardToken"]
        return page["nextForwardToken"] != before


def hosts_of(lines: list[LogLine]) -> list[tuple[str, str]]:
    """List the (group, host) pairs of a log in order, algo-10 after algo-9."""
    pairs = {(line.group, line.host) for line in lines}
    return sorted(pairs, key=lambda pair: (pair[0], len(pair[1]), pair[1]))


def _attempts(streams: dict[str, list[dict[str, Any]]]) -> dict[str, int]:
    """Number the attempt that each stream with lines is of: 1, 2, ..."""
    times = {name: (events[0]["timestamp"], name) for name, events in streams.items() if events}
    starts, seen = [], set()
    for start, name in sorted(times.values()):
        if _host(name) in seen:  # a second stream of a host: all hosts have been started again
            starts.append(start)
            seen.clear()
        seen.add(_host(name))
    # By the last line: a host may have its first one before the host that shows the restart.
    return {name: 1 + bisect_right(starts, streams[name][-1]["timestamp"]) for name in times}


def _lines(streams: dict[str, list[dict[str, Any]]]) -> list[LogLine]:
    lines = []
    for name, attempt in _attempts(streams).items():
        events = streams[name]
        named = (_GROUP.search(event["message"]) for event in events)
        group = next((match[1] or match[2] for match in named if match), "unknown")
        for event in events:
            when = datetime.fromtimestamp(event["timestamp"] / 1000, timezone.utc)
            lines.append(LogLine(when, _host(name), group, event["message"].rstrip(), attempt))
    return sorted(lines, key=lambda line: line.time)  # stable: a host's lines keep their order


def _host(stream: str) -> str:
    """The host whose stream <job>/algo-1-<epoch> is."""
    return stream.rsplit("/", 1)[1].rsplit("-", 1)[0]


def show_logs(
    job_name: str,
    group: str | None = None,
    last: int | None = 20,
    side_by_side: bool = False,
) -> None:
    """Print a training job's log by instance group and host, and by attempt if it has several.

    What the SDK's start-up script prints before and around our code is left out.

    Args:
        job_name: Name of the training job.
        group: Only the hosts of this instance group.
        last: So many lines of each host, the last ones; None prints all.
        side_by_side: One column per host instead of one block per host.

    Raises:
        ValueError: the job has no log, or no such group.
    """
    read = _all_attempts(job_name)
    names, attempts = hosts_of(read), max(line.attempt for line in read)
    chosen = [name for name in names if group in (None, name[0])]
    if not chosen:
        known = ", ".join(f"{host} in {of_group}" for of_group, host in names)
        raise ValueError(f"No host is in {group!r}: the log of {job_name!r} has {known}.")
    blocks = []
    for attempt, (group_name, host_name) in product(range(1, attempts + 1), chosen):
        whose = group_name, host_name, attempt
        lines = [line for line in read if (line.group, line.host, line.attempt) == whose]
        if not lines:
            continue  # in this attempt the host was in another group
        lines = _without_setup(lines)
        shown = lines[-last:] if last else lines
        of_all = f"last {len(shown)} of " if len(shown) < len(lines) else ""
        of_attempt = f", attempt {attempt} of {attempts}" if attempts > 1 else ""
        title = f"== {group_name} / {host_name}{of_attempt} ({of_all}{len(lines)} lines)"
        blocks.append([title] + [f"{line.time:%H:%M:%S} {line.text}" for line in shown])
    if side_by_side:
        _show_columns(blocks)
    else:
        for block in blocks:
            for text in block:
                print(text if len(text) <= WIDTH else text[: WIDTH - 1] + "…")


def _without_setup(lines: list[LogLine]) -> list[LogLine]:
    """Drop the start-up script's lines; a host that failed during start-up keeps its messages."""
    ends = [i for i, line in enumerate(lines) if _SETUP_END.match(line.text)]
    start = ends[0] + 1 if ends else 0
    return [line for line in lines[start:] if not _SETUP_NOISE.match(line.text)]


def _show_columns(blocks: list[list[str]]) -> None:
    """Show blocks of text next to each other: in a notebook in columns that share its width."""
    widths = [max(map(len, block)) for block in blocks]
    rows = zip_longest(*blocks, fillvalue="")
    text = "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    style = "flex: 1; min-width: 0; white-space: pre-wrap; overflow-wrap: anywhere"
    columns = (escape("\n".join(block)) for block in blocks)
    html = "".join(f'<pre style="{style}">{column}</pre>' for column in columns)
    html = f'<div style="display: flex; gap: 2em">{html}</div>'
    display({"text/plain": text, "text/html": html}, raw=True)


def steps(job_name: str) -> pd.DataFrame:
    """Collect the step lines of a training job's log: those with step=... and step_time_ms=...

    What else such a line says is free. Each key=number in it gives a column. A number is what
    Python reads as one, nan and inf too; punctuation after it and the unit with which the key ends
    do not matter (lr=1e-4, and step_time_ms=12.3ms). Another value, such as epoch=1/10, counts as
    not given. Of a key that a line has twice, the first number counts. The columns time and host
    are ours, whatever the line says. Each rank's lines are rows, also those of the same step.

    A line in which step is not a whole number, or step_time_ms not a finite one, is left out, which
    is said on stderr.

    Returns:
        One row per step line, in order of time: time (UTC), host, and a numeric column for every
        key, such as step, epoch, loss, step_time_ms, data_wait_ms, samples_per_s; nan in the rows
        of lines that do not have it.

    Raises:
        ValueError: the job has no log, no step line in it, or none that can be read.
    """
    table = step_table(logs(job_name))
    if table.empty:
        raise ValueError(
            f"The log of training job {job_name!r} has no step lines ('step=... step_time_ms=...'):"
            f" did training start? See show_logs({job_name!r})."
        )
    return table


def step_table(lines: list[LogLine]) -> pd.DataFrame:
    """Collect the step lines among `lines`, as `steps` does; an empty table if there is none."""
    rows, unreadable = [], []
    for line in lines:
        if not _STEP.search(line.text):
            continue
        numbers = _numbers(line.text)
        if numbers.get("step", nan).is_integer() and isfinite(numbers.get("step_time_ms", nan)):
            ours = {"time": line.time, "host": line.host}
            rows.append(ours | numbers | ours)  # ours come first, and count
        else:
            unreadable.append(line)
    if unreadable:
        bad = unreadable[0]
        text = (
            f"{len(unreadable)} of {len(unreadable) + len(rows)} step lines cannot be read, such "
            f"as {bad.text!r} of {bad.host}: step must be a whole number, and step_time_ms a "
            "finite one, as in step=10 step_time_ms=12.3."
        )
        if not rows:
            raise ValueError(text)
        print(f"{text} They are left out.", file=sys.stderr)
    return pd.DataFrame(rows).astype({"step": int}) if rows else pd.DataFrame()


def _numbers(text: str) -> dict[str, float]:
    """Find the numbers that a line gives as key=number, by the rule that `steps` describes."""
    numbers: dict[str, float] = {}
    for key, value in _PAIR.findall(text):
        value = value.rstrip(",;:.)]}|'\"")
        for number in (value, value.removesuffix(key.rpartition("_")[2])):
            with contextlib.suppress(ValueError):
                numbers.setdefault(key, float(number))
    return numbers


def logged(job_name: str, key: str) -> float:
    """Return the median of a number that a job's hosts have logged as key=number.

    What is a number, `steps` says.

    Raises:
        ValueError: the job has no log, or nothing of that kind in it.
    """
    found = [_numbers(line.text) for line in logs(job_name) if key in line.text]
    values = [numbers[key] for numbers in found if key in numbers]
    if not values:
        raise ValueError(
            f"No host of training job {job_name!r} has logged a number as {key}=...: "
            f"see show_logs({job_name!r})."
        )
    return median(values)
