"""What a training job is doing and how fast: its status, step times, hosts, and bottleneck.

The notebooks' view of a job. What its hosts have printed is read in logs.py, how busy they were in
bottleneck.py; here are the figures, and the command

    python -m shared.monitoring JOB [--figure FILE]
    python -m shared.monitoring JOB --logs [--group data_group] [--host algo-1]

A job of the local SageMaker is known only in the notebook that started it: there, the command is
`%run -m shared.monitoring JOB`.
"""

import argparse
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import boto3
import matplotlib.pyplot as plt
import pandas as pd
from botocore.exceptions import BotoCoreError, ClientError
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from shared import bottleneck
from shared.bottleneck import utilisation
from shared.commands import reader_may_leave
from shared.jobs import describe
from shared.logs import LogLine, logged, logs, show_logs, steps

__all__ = [
    "COLOURS",
    "METRIC_DEFINITIONS",
    "LogLine",
    "labelled",
    "logged",
    "logs",
    "plot_job",
    "plot_steps",
    "show_logs",
    "steps",
    "utilisation",
    "wait",
]

# For the MetricDefinitions of a job: SageMaker then graphs these as the job's metrics. As in the
# table of `steps`, the first number of that name counts, and val/loss is another name than loss.
_NUMBER = r"([-+]?[0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?)(?:ms)?[,;]?(?:\s|$)"
METRIC_DEFINITIONS = [
    {"Name": name, "Regex": rf"\bstep=\d+[,;]?\s(?:.*?\s)?{name}={_NUMBER}"}
    for name in ("loss", "step_time_ms", "data_wait_ms", "samples_per_s")
]

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")  # Okabe and Ito, colour-blind-safe
# Of what is marked the text's colour and the background's: a bottleneck, and GPUs at their limit.
_MARKS = {"CPU": ("#B34E00", "#FFE5D3"), "GPU": ("#00664A", "#DDF1E9"), "": ("black", "0.93")}


def wait(
    job_name: str, poll_seconds: float = 2.0, session: boto3.Session | None = None
) -> dict[str, Any]:
    """Wait until a training job has ended, printing one line per change of its status.

    Returns:
        DescribeTrainingJob's response for the job, Completed or Stopped.

    Raises:
        RuntimeError: the job failed; says why.
        ValueError: there is no such job.
        PermissionError, ClientError, BotoCoreError: AWS cannot be asked; for a reason that can
            pass it is asked again for minutes before.
    """
    start, printed = time.monotonic(), 0
    while True:
        job = describe(job_name, session)
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
    synthetic_job: str | None = None,
) -> Figure:
    """Draw step time, and what data costs of it, over the steps of training jobs.

    Args:
        job_names: Names of the jobs, or {label: name}.
        title: Above the figure.
        session: boto3 session to use instead of the default one.
        synthetic_job: The same job without data: what a step takes longer is what data costs.
            Without it, that is the time in which the training waits for data.
    """
    fig, panels = plt.subplots(1, 2, figsize=(11, 3.8), sharey=True, layout="constrained")
    costs = "of which waiting for data"
    floor = 0.0
    if synthetic_job:
        costs, floor = (
            "What data costs of it",
            steps(synthetic_job, session)["step_time_ms"].median(),
        )
        panels[0].axhline(floor, color="0.35", ls="--", label="a step without data")
    for i, (label, job_name) in enumerate(labelled(job_names).items()):
        table = steps(job_name, session)
        longer = (table["step_time_ms"] - floor).clip(lower=0)
        table["costs"] = longer if floor else table.get("data_wait_ms")
        for panel, column in zip(panels, ("step_time_ms", "costs"), strict=True):
            colour, marker = COLOURS[i % len(COLOURS)], "os^D"[i % 4]
            if table[column].isna().all():
                continue  # a script of one's own may not log its waiting
            panel.plot(table["step"], table[column], marker=marker, color=colour, label=label)
    for panel, name in zip(panels, ("Step time", costs), strict=True):
        panel.set_title(name, fontsize=13)
        panel.set_xlabel("step", fontsize=12)
        panel.tick_params(labelsize=11)
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", alpha=0.3)
    panels[0].set_ylim(bottom=0)
    panels[0].set_ylabel("ms per step", fontsize=12)
    handles, labels = panels[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=11, frameon=False)
    fig.suptitle(title, fontsize=14)
    plt.close(fig)  # the notebook draws the returned figure; left open, it would be drawn twice
    return fig


def plot_job(
    job_name: str,
    title: str = "",
    session: boto3.Session | None = None,
    synthetic_job: str | None = None,
) -> Figure:
    """Draw how busy each host of a training job was, and its steps, over time.

    100 % is all of the instance. The hosts of the bottleneck are marked; the rule for it,
    `bottleneck.RULE`, is below the figure. Where prices.csv does not have the instance type, the
    numbers of busy vCPUs and GPUs are drawn instead. With synthetic_job, the same job without data,
    it is known what data costs of a step; else only for how long the training waits for it.

    Raises:
        ValueError: there is no such job, or it has no log (yet).
    """
    return _plot(bottleneck.observe(job_name, session, synthetic_job), title)


def _plot(seen: bottleneck.Observed, title: str = "") -> Figure:
    hosts = bottleneck.averages(seen).join(seen.hosts[["vcpus", "gpus"]])
    rows = len(hosts) + (not seen.steps.empty)
    fig, grid = plt.subplots(
        rows, 1, figsize=(11, 2.2 + 1.4 * rows), sharex=True, squeeze=False, layout="constrained"
    )
    panels, found = grid[:, 0], bottleneck.find(seen)
    for panel, (_, host) in zip(panels, hosts.iterrows(), strict=False):
        _draw_host(panel, host, seen, {unit for group, unit in found if group == host["group"]})
    if not seen.steps.empty:
        _draw_steps(panels[-1], seen)
    for panel in panels:
        panel.tick_params(labelsize=11)
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", alpha=0.3)
    panels[-1].set_xlim(left=0)
    unit = "minutes" if _is_long(seen) else "seconds"
    panels[-1].set_xlabel(f"{unit} since the first line of the log", fontsize=12)

    entries = {}  # each label once, whichever panel has it
    for panel in panels:
        handles, labels = panel.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    legend = {"loc": "outside lower center", "ncols": 4, "fontsize": 11, "frameon": False}
    fig.legend(entries.values(), entries, title=bottleneck.RULE, title_fontsize=10, **legend)
    title = title or seen.description["TrainingJobName"]
    clauses = bottleneck.verdict(seen).replace("; ", ";\n").splitlines()
    verdict = "\n".join(textwrap.fill(clause, 100) for clause in clauses)
    fig.suptitle(f"{title}\n{verdict}", fontsize=13)
    plt.close(fig)  # the notebook draws the returned figure; left open, it would be drawn twice
    return fig


def _is_long(seen: bottleneck.Observed) -> bool:
    return seen.end - seen.start > timedelta(minutes=10)


def _elapsed(seen: bottleneck.Observed, times: pd.Series | pd.Index) -> pd.Index:
    """Convert times to seconds since the first line of the log; for a long job, to minutes."""
    return (pd.Index(times) - seen.start).total_seconds() / (60 if _is_long(seen) else 1)


def _draw_host(panel: Axes, host: pd.Series, seen: bottleneck.Observed, marked: set[str]) -> None:
    """Draw one host's CPUs and GPUs over time, say their averages, and mark what is the limit."""
    said, top, plays = [], 105.0, seen.plays_gpu(host["host"])
    styles = {"CPU": (COLOURS[0], "o-"), "GPU": (COLOURS[2], "s--")}
    for unit, count, busy in bottleneck.UNITS:
        values, percent = seen.busy[host["host"], unit], host[f"{unit} (%)"]
        if values.empty:
            continue
        name, looks = f"{unit}s", unit
        if plays:
            name = "cores that also play the GPU" if "CPU" in marked else "cores that play the GPU"
            looks = "CPU" if "CPU" in marked else "GPU"
        if pd.isna(host[busy]):
            said.append(f"no values of its {unit}s while it trained")
        elif host[count] > 0:
            said.append(f"{name} {percent:.0f} % busy{_judgement(looks, percent, marked, seen)}")
        else:
            said.append(f"{host[busy]:.1f} {busy}")
        values, top = (100 * values / host[count], top) if host[count] > 0 else (values, None)
        times = _elapsed(seen, values.index)
        colour, style = styles[looks]
        panel.plot(times, values, style, color=colour, markersize=4, label=name)
    if not said:
        nothing = "CloudWatch has no values of this host."
        panel.text(0.5, 0.5, nothing, transform=panel.transAxes, ha="center", fontsize=12)
    text_colour, background = _MARKS[min(marked, default="")]
    if not seen.steps.empty:
        first_and_last = _elapsed(seen, seen.steps["time"].iloc[[0, -1]])
        panel.axvspan(*first_and_last, color=background, zorder=0, label="first to last step line")
    panel.set_ylim(0, top)
    if top:
        limit = f"{bottleneck.LIMIT_PERCENT} %"
        panel.axhline(bottleneck.LIMIT_PERCENT, color="0.4", ls=":", label=limit)
        panel.set_yticks([0, 50, 100])
    panel.set_ylabel("% of instance" if top else "busy", fontsize=11)
    name = f"{host['group']} / {host['host']} ({host['instance type']})"
    panel.set_title(name, loc="left", fontsize=12)
    looks = {"color": text_colour, "weight": "bold"} if marked else {}
    panel.set_title(", ".join(said), loc="right", fontsize=12, **looks)


def _judgement(unit: str, percent: float, marked: set[str], seen: bottleneck.Observed) -> str:
    """What follows from so many percent by bottleneck.RULE."""
    if unit in marked:
        return " = BOTTLENECK" if unit == "CPU" else " = the limit"
    is_busy = unit == "CPU" and percent >= bottleneck.LIMIT_PERCENT
    if is_busy and bottleneck.data_percent(seen) < bottleneck.LEAST_WAIT_PERCENT:
        return f", but data costs less than {bottleneck.LEAST_WAIT_PERCENT} % of a step"
    return ""


def _draw_steps(panel: Axes, seen: bottleneck.Observed) -> None:
    """Draw the step time, what the training waits for data of it, and the step without data."""
    times, median = (
        pd.Series(_elapsed(seen, seen.steps["time"])),
        seen.steps["step_time_ms"].median(),
    )
    series = {"step_time_ms": ("0.25", "step time"), "data_wait_ms": (COLOURS[1], "waits for data")}
    for rows in seen.steps.groupby("host").groups.values():
        for key, (colour, label) in series.items():
            if key in seen.steps:
                values = seen.steps[key][rows]
                panel.plot(times[rows], values, "D-", color=colour, markersize=4, label=label)
    said, costs = f"median {median:.1f} ms", bottleneck.data_percent(seen)
    if not pd.isna(seen.without_data_ms):
        panel.axhline(seen.without_data_ms, color="0.35", ls="--", label="a step without data")
        said += f", {seen.without_data_ms:.1f} without data, which costs {costs:.0f} % of it"
    elif not pd.isna(costs):
        said += f", of which it waits for data for {costs:.0f} %"
    panel.set_ylim(0, 1.15 * seen.steps["step_time_ms"].max())
    panel.set_ylabel("ms", fontsize=11)
    panel.set_title("Step time", loc="left", fontsize=12)
    panel.set_title(said, loc="right", fontsize=12)


def main(arguments: list[str] | None = None) -> None:
    """Run the command: print what a training job is doing, or its logs.

    Raises:
        SystemExit: with code 2 and a sentence on stderr, where there is nothing to print.
    """
    parser = argparse.ArgumentParser(
        "python -m shared.monitoring", description="What a training job is doing, and how fast."
    )
    parser.add_argument("job", help="name of the training job")
    parser.add_argument("--figure", metavar="FILE", help="draw it too (.png, .svg, .pdf)")
    parser.add_argument("--logs", action="store_true", help="print its logs instead")
    parser.add_argument("--group", help="only the logs of this instance group")
    parser.add_argument("--host", help="only the logs of this host, such as algo-1")
    chosen = parser.parse_args(arguments)
    if (chosen.group or chosen.host) and not chosen.logs:
        parser.error("--group and --host choose among logs: add --logs.")
    if chosen.figure and chosen.logs:
        parser.error("--figure does not go with --logs.")
    try:
        with reader_may_leave():
            if chosen.logs:
                describe(chosen.job)
                show_logs(chosen.job, chosen.group, chosen.host, last=None)
            else:
                _report(chosen.job, chosen.figure)
    except (ValueError, OSError, BotoCoreError, ClientError) as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None


def _report(job_name: str, figure: str | None) -> None:
    """Print a job's status, hosts, step time and bottleneck; draw them into the file `figure`."""
    job = describe(job_name)
    status = [job["TrainingJobStatus"], job.get("FailureReason", "")]
    billed = f"{job['BillableTimeInSeconds']} s billed" if "BillableTimeInSeconds" in job else ""
    print(f"{job_name}: {', '.join(filter(None, [*status, billed]))}")
    seen = bottleneck.observe(job_name)
    if figure:
        try:
            _plot(seen).savefig(figure, dpi=120)
        except (OSError, ValueError) as error:
            raise ValueError(f"The figure cannot be written to {figure!r}: {error}.") from None
    table = bottleneck.averages(seen).round(1)
    print(f"\n{table.to_string(index=False, na_rep='-')}\n")
    if seen.steps.empty:
        print("No step lines ('step=... step_time_ms=...') in the log: averages are over all of it")
    else:
        known = {"Step time": "step_time_ms", "data wait": "data_wait_ms"}
        medians = [
            f"{name} {seen.steps[key].median():.1f} ms"
            for name, key in known.items()
            if key in seen.steps
        ]
        print(f"{', '.join(medians)} (medians; step lines: {len(seen.steps)})")
    print(bottleneck.verdict(seen))
    if figure:
        print(f"Drawn in {figure}.")


if __name__ == "__main__":
    main()
