"""Read the log of a training job by instance group and host, and the numbers in it.

SageMaker writes the output of every host of a training job to CloudWatch Logs, and names the hosts
algo-1, algo-2, ... in an order that says nothing about their instance groups. This module reads
those logs, finds each host's group in the host's own log, and turns the lines that the training
script prints every N steps into a table:

    step=120 epoch=1 loss=0.1234 step_time_ms=12.34 data_wait_ms=4.56 samples_per_s=10372.1

It uses only boto3's `logs` and `sagemaker` clients, so it works the same way on AWS and on the
local SageMaker.

CloudWatch delivers the last lines of a job some seconds after its end. Therefore, reading the log
of a job that has just ended waits until one of these is true:

- Each host's log has its last line: `host=algo-1 ends`, or the last line of the SDK's start-up
  script.
- Each host has lines, and since the job's end both QUIET_SECONDS and twice the longest delay of
  any line have passed.
- LATEST_SECONDS have passed since the job's end.

Reading the log of a job that still runs, or that ended earlier, does not wait.

Managed spot training restarts an interrupted job. Each host then has a log stream for each attempt,
and can be in another instance group each time. Numbers, tables and figures cover only the last
attempt, and a line on stderr says so; `show_logs` shows all attempts.
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

# Pass these as a job's MetricDefinitions, and SageMaker graphs them as the job's metrics. As in
# `steps`, the first number of a name in a line counts, and val/loss is a different name from loss.
_NUMBER = r"([-+]?[0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?)(?:ms)?[,;]?(?:\s|$)"
METRIC_DEFINITIONS = [
    {"Name": name, "Regex": rf"\bstep=\d+[,;]?\s(?:.*?\s)?{name}={_NUMBER}"}
    for name in ("loss", "step_time_ms", "data_wait_ms", "samples_per_s")
]

LOG_GROUP = "/aws/sagemaker/TrainingJobs"
WIDTH = 96  # characters a line, as many as JupyterLab shows in a window of 1200 pixels
# AWS's own SDK waits this long after a job's end before it reads the log for the last time
# (_logs_for_job in sagemaker/core/remote_function/job.py). The delay that the log shows (ingestion
# time - timestamp) is not the whole delay: lines get their timestamps up to 3 s after they are
# printed, according to published logs of jobs that print the time.
QUIET_SECONDS = 10
LATEST_SECONDS = 60  # our choice: AWS does not say how late lines can be
LOOK_EVERY_SECONDS = 2

# Either of these in a host's log names its group: resourceconfig.json, which the SDK's start-up
# script prints on every host, or the first line of our launcher.
_GROUP = re.compile(r'"current_group_name":\s*"([^"]+)"|\bhost=\S+ group=(\S+)')
# The last line of a host: from our code, or from the SDK's start-up script (which prints none if
# the job's command is an `exec`).
_FAREWELL = re.compile(
    r"\bhost=\S+ ends$"
    r"|^Training Container Execution Completed$"
    r"|^An error occurred with exit code \d+$"
)
# key=value; a value ends before a space, or before a comma or semicolon and the next key.
_PAIR = re.compile(r"(?<![\w./@-])([\w./@-]+)=(\S*?)(?=\s|$|[,;][\w./@-]+=)")
_STEP = re.compile(r"(?<![\w./@-])step=\d.*(?<![\w./@-])step_time_ms=")
# The setup in the SDK's start-up script ends with one of these lines; bash traces (`+ cd ...`)
# can follow.
_SETUP_END = re.compile(r"(Executing command:|Running .+ [Dd]river)")
_SETUP_NOISE = re.compile(r"(\++ |SM_\w+=|Executing command: |Training Container Execution Comp)")


@dataclass(frozen=True)
class LogLine:
    """One line of a training job's log. `attempt` is 1, plus 1 for each spot interruption."""

    time: datetime
    host: str
    group: str
    text: str
    attempt: int = 1


def logs(job_name: str) -> list[LogLine]:
    """Read the log of a training job's last attempt: all hosts, in order of time.

    If the job was interrupted, earlier attempts are left out, and a line on stderr says so. If the
    job has just ended, this waits for its last lines, at most until LATEST_SECONDS after its end:
    see the module's docstring. A host whose log does not name its instance group gets the group
    "unknown".

    Raises:
        ValueError: the job has no log (yet).
        PermissionError, ClientError, BotoCoreError: as `describe.ask` raises them.
    """
    lines = _all_attempts(job_name)
    last = max(line.attempt for line in lines)
    if last > 1:
        print(
            f"Training job {job_name!r} was interrupted and restarted. Only attempt {last} is used "
            f"here; show_logs({job_name!r}) shows all {last} attempts.",
            file=sys.stderr,
        )
    return [line for line in lines if line.attempt == last]


def _all_attempts(job_name: str) -> list[LogLine]:
    """Read a job's log, and read again while some lines may still be missing."""
    log, hosts, ended = GrowingLog(job_name), 0, 0.0
    with contextlib.suppress(ValueError, PermissionError):  # no such job, or no permission
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
    """Return how many hosts must have logs; 0 before a job's end, or if no host has started."""
    started = any(t["Status"] == "Training" for t in job.get("SecondaryStatusTransitions", []))
    if not started or job["TrainingJobStatus"] in ("InProgress", "Stopping"):
        return 0
    return sum(instances_of(job["ResourceConfig"]).values())


def _seconds_since_end(job: dict[str, Any]) -> float:
    """Return how long ago a job ended; 0 if it has not, or if our clock is behind AWS's."""
    end = job.get("TrainingEndTime")
    return max(0.0, (datetime.now(timezone.utc) - end).total_seconds()) if end else 0.0


def _complete_after(streams: dict[str, list[dict[str, Any]]], hosts: int) -> float:
    """Estimate from a job's log so far how many seconds after the job's end it will be complete."""
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
    """A job's log that can be read repeatedly: each `look` reads only what is new.

    Attributes:
        job_name: Name of the training job.
        streams: The CloudWatch events read so far, by log stream.
        tokens: Where to continue reading, by log stream; they expire after 24 hours.
    """

    job_name: str
    streams: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    tokens: dict[str, str] = field(default_factory=dict)

    def look(self) -> list[LogLine]:
        """Read what is there now, without waiting; return all lines so far in order of time."""
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
            return []  # the account's first training job creates the log group

    def _read_page(self, stream: str) -> bool:
        """Read the next page of a stream, oldest events first; return whether there may be more.

        This does not use FilterLogEvents, because AmazonSageMakerFullAccess does not allow it. A
        page may be empty although more follow; the stream has ended only if the same token comes
        back (API reference of GetLogEvents).
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
    """List the (group, host) pairs of a log in order, with algo-10 after algo-9."""
    pairs = {(line.group, line.host) for line in lines}
    return sorted(pairs, key=lambda pair: (pair[0], len(pair[1]), pair[1]))


def _attempts(streams: dict[str, list[dict[str, Any]]]) -> dict[str, int]:
    """Return the number of the attempt, 1, 2, ..., that each non-empty stream belongs to."""
    times = {name: (events[0]["timestamp"], name) for name, events in streams.items() if events}
    starts, seen = [], set()
    for start, name in sorted(times.values()):
        if _host(name) in seen:  # a second stream of a host: all hosts were restarted
            starts.append(start)
            seen.clear()
        seen.add(_host(name))
    # Use the last line: a restarted host's first line may be older than the first line of the host
    # that showed the restart.
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
    """Return the host of a stream, such as algo-1 of <job>/algo-1-<epoch>."""
    return stream.rsplit("/", 1)[1].rsplit("-", 1)[0]


def show_logs(
    job_name: str,
    group: str | None = None,
    last: int | None = 20,
    side_by_side: bool = False,
) -> None:
    """Print a training job's log by instance group and host, and by attempt if it has several.

    The output of the SDK's start-up script is left out.

    Args:
        job_name: Name of the training job.
        group: Print only the hosts of this instance group.
        last: Print only this many lines of each host, the last ones; None prints all.
        side_by_side: Print one column per host instead of one block per host.

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
    """Drop the start-up script's lines, but keep the messages of a host that failed in start-up."""
    ends = [i for i, line in enumerate(lines) if _SETUP_END.match(line.text)]
    start = ends[0] + 1 if ends else 0
    return [line for line in lines[start:] if not _SETUP_NOISE.match(line.text)]


def _show_columns(blocks: list[list[str]]) -> None:
    """Show blocks of text side by side; in a notebook, the columns share its width."""
    widths = [max(map(len, block)) for block in blocks]
    rows = zip_longest(*blocks, fillvalue="")
    text = "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    style = "flex: 1; min-width: 0; white-space: pre-wrap; overflow-wrap: anywhere"
    columns = (escape("\n".join(block)) for block in blocks)
    html = "".join(f'<pre style="{style}">{column}</pre>' for column in columns)
    html = f'<div style="display: flex; gap: 2em">{html}</div>'
    display({"text/plain": text, "text/html": html}, raw=True)


def steps(job_name: str, lines: list[LogLine] | None = None) -> pd.DataFrame:
    """Collect the step lines of a training job's log: those with step=... and step_time_ms=...

    A step line may contain anything else. Each key=number in it becomes a column. A number is
    anything that Python's `float` accepts, including nan and inf. Punctuation after it, and the
    unit that the key ends with, are ignored (`lr=1e-4,` and step_time_ms=12.3ms). Other values,
    such as epoch=1/10, are ignored. If a line has a key twice, the first number counts. A line
    cannot set the columns time and host. Each rank's lines are separate rows, even for the same
    step.

    A line is left out if step is not a whole number, or step_time_ms not a finite one; stderr then
    says so.

    Returns:
        One row per step line, in order of time: time (UTC), host, and a numeric column for every
        key, such as step, epoch, loss, step_time_ms, data_wait_ms, samples_per_s; nan in the rows
        of lines that do not have the key.

    Raises:
        ValueError: the job has no log, or the log has no step line that can be read.
    """
    table = step_table(lines or logs(job_name))
    if table.empty:
        raise ValueError(
            f"The log of training job {job_name!r} has no step lines ('step=... step_time_ms=...'):"
            f" did training start? See show_logs({job_name!r})."
        )
    return table


def step_table(lines: list[LogLine]) -> pd.DataFrame:
    """Collect the step lines among `lines`, as `steps` does; return an empty table if none."""
    rows, unreadable = [], []
    for line in lines:
        if not _STEP.search(line.text):
            continue
        numbers = _numbers(line.text)
        if numbers.get("step", nan).is_integer() and isfinite(numbers.get("step_time_ms", nan)):
            ours = {"time": line.time, "host": line.host}
            rows.append(ours | numbers | ours)  # `ours` first, to order columns; last, to override
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
        print(f"{text} These lines are ignored.", file=sys.stderr)
    return pd.DataFrame(rows).astype({"step": int}) if rows else pd.DataFrame()


def _numbers(text: str) -> dict[str, float]:
    """Find all key=number in a line, by the rules that `steps` describes."""
    numbers: dict[str, float] = {}
    for key, value in _PAIR.findall(text):
        value = value.rstrip(",;:.)]}|'\"")
        for number in (value, value.removesuffix(key.rpartition("_")[2])):
            with contextlib.suppress(ValueError):
                numbers.setdefault(key, float(number))
    return numbers


def logged(job_name: str, key: str) -> float:
    """Return the median of the numbers that a job's hosts have logged as key=number.

    `steps` describes what counts as a number.

    Raises:
        ValueError: the job has no log, or its log has no such number.
    """
    found = [_numbers(line.text) for line in logs(job_name) if key in line.text]
    values = [numbers[key] for numbers in found if key in numbers]
    if not values:
        raise ValueError(
            f"No host of training job {job_name!r} has logged a number as {key}=...: "
            f"see show_logs({job_name!r})."
        )
    return median(values)
