"""Draw figures of a training job: how busy its hosts are over time, and how long its steps take."""

import textwrap
from collections.abc import Mapping
from datetime import timedelta

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from shared.monitoring import bottleneck
from shared.monitoring.joblog import read_log
from shared.monitoring.log import steps

# The same in all figures. Four of Okabe and Ito's colours, which are safe for colour-blind people.
TRAINING, DATA, HETEROGENEOUS, HOMOGENEOUS = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
# Colours of text and background: for a bottleneck, for GPUs at their limit, and for other hosts.
_MARKS = {"CPU": ("#B34E00", "#FFE5D3"), "GPU": ("#005A8C", "#E3F0F8"), "": ("black", "0.93")}


def plot_steps(job_names: Mapping[str, str], synthetic_job: str | None = None) -> Figure:
    """Draw the step time of training jobs, and how much of it data costs, over the steps.

    Args:
        job_names: Names of the jobs by label, the homogeneous one first.
        synthetic_job: The same job without data. Data costs the difference from its step time. If
            this is not given, the figure shows the time that Python waits for data instead. A GPU,
            which runs behind Python, may not wait at all.
    """
    fig, panels = plt.subplots(1, 2, figsize=(11, 3.8), sharey=True, layout="constrained")
    title, without_data_ms = "Python's wait for data (a GPU waits at most so long)", 0.0
    if synthetic_job:
        title, without_data_ms = "Time that data costs", read_log(synthetic_job).step_ms
        panels[0].axhline(without_data_ms, color="0.35", ls="--", label="a step without data")
    for i, (label, job_name) in enumerate(job_names.items()):
        table = steps(job_name)
        longer = (table["step_time_ms"] - without_data_ms).clip(lower=0)
        table["data_ms"] = longer if synthetic_job else table.get("data_wait_ms")
        for panel, column in zip(panels, ("step_time_ms", "data_ms"), strict=True):
            colour = (HOMOGENEOUS, HETEROGENEOUS, TRAINING, DATA)[i % 4]
            if not table[column].isna().all():  # the user's script may not log its data wait
                looks = {"marker": "os^D"[i % 4], "color": colour, "label": label}
                panel.plot(table["step"], table[column], **looks)
    for panel, name in zip(panels, ("Step time", title), strict=True):
        panel.set_title(name, fontsize=13)
        panel.set_xlabel("step", fontsize=12)
        panel.tick_params(labelsize=11)
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", alpha=0.3)
    panels[0].set_ylim(bottom=0)
    panels[0].set_ylabel("ms per step", fontsize=12)
    handles, labels = panels[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=11, frameon=False)
    plt.close(fig)  # the notebook draws the returned figure; left open, it would be drawn twice
    return fig


def plot_job(job_name: str, synthetic_job: str | None = None) -> Figure:
    """Draw how busy each host of a training job was over time, and its step times.

    100 % is the whole instance. The hosts of the bottleneck are marked; the rule for it,
    `bottleneck.RULE`, is below the figure. If synthetic_job, the same job without data, is given,
    or if the job's script used measured.py, the figure shows how much of a step data costs;
    otherwise, for how much of it the training waits for data at most.

    Raises:
        ValueError: there is no such job, or it has no log (yet).
    """
    return plot_observed(bottleneck.observe(job_name, synthetic_job))


def plot_observed(seen: bottleneck.Observed) -> Figure:
    """Draw what `bottleneck.observe` has read, as `plot_job` does."""
    hosts = bottleneck.averages(seen)
    rows = len(hosts) + (not seen.steps.empty)
    fig, grid = plt.subplots(
        rows, 1, figsize=(11, 2.2 + 1.4 * rows), sharex=True, squeeze=False, layout="constrained"
    )
    panels, found = grid[:, 0], bottleneck.limits(seen)
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

    entries = {}  # each label once, even if several panels have it
    for panel in panels:
        handles, labels = panel.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    legend = {"loc": "outside lower center", "ncols": 4, "fontsize": 11, "frameon": False}
    fig.legend(entries.values(), entries, title=bottleneck.RULE, title_fontsize=10, **legend)
    clauses = bottleneck.explain(seen).replace("; ", ";\n").splitlines()
    explained = "\n".join(textwrap.fill(clause, 100) for clause in clauses)
    fig.suptitle(f"{seen.description['TrainingJobName']}\n{explained}", fontsize=13)
    plt.close(fig)  # the notebook draws the returned figure; left open, it would be drawn twice
    return fig


def _is_long(seen: bottleneck.Observed) -> bool:
    return seen.lines[-1].time - seen.lines[0].time > timedelta(minutes=10)


def _elapsed(seen: bottleneck.Observed, times: pd.Series | pd.Index) -> pd.Index:
    """Convert times to seconds since the first line of the log; for a long job, to minutes."""
    return (pd.Index(times) - seen.lines[0].time).total_seconds() / (60 if _is_long(seen) else 1)


def _draw_host(panel: Axes, host: pd.Series, seen: bottleneck.Observed, marked: set[str]) -> None:
    """Draw one host's CPUs and GPUs over time, with their averages, and mark the limit."""
    said, plays = [], seen.plays_gpu(host["host"])
    nothing = "CloudWatch has no values for this host."
    styles = {"CPU": (DATA, "o-"), "GPU": (TRAINING, "s--")}
    for unit in bottleneck.UNITS:
        values, percent = seen.use[host["host"], unit], host[f"{unit} (%)"]
        if values.isna().all():
            if not values.empty:
                nothing = "shared/prices.csv does not have this instance type."
            continue
        name, looks = f"{unit}s", unit
        if plays:
            name = "cores that also act as GPU" if "CPU" in marked else "cores that act as GPU"
            looks = "CPU" if "CPU" in marked else "GPU"
        if pd.isna(percent):
            said.append(f"no values for its {unit}s during training")
        else:
            said.append(f"{name} {percent:.0f} % busy{_remark(looks, percent, marked, seen)}")
        colour, style = styles[looks]
        times = _elapsed(seen, values.index)
        panel.plot(times, values, style, color=colour, markersize=4, label=name)
    if not said:
        panel.text(0.5, 0.5, nothing, transform=panel.transAxes, ha="center", fontsize=12)
    text_colour, background = _MARKS[min(marked, default="")]
    if not seen.steps.empty:
        first_and_last = _elapsed(seen, seen.steps["time"].iloc[[0, -1]])
        panel.axvspan(*first_and_last, color=background, zorder=0, label="first to last step line")
    panel.set_ylim(0, 105)
    limit = bottleneck.BUSY_PERCENT
    panel.axhline(limit, color="0.4", ls=":", label=f"{limit} %")
    panel.set_yticks([0, 50, 100])
    panel.set_ylabel("% of instance", fontsize=11)
    name = f"{host['group']} / {host['host']} ({host['instance type']})"
    panel.set_title(name, loc="left", fontsize=12)
    looks = {"color": text_colour, "weight": "bold"} if marked else {}
    panel.set_title(", ".join(said), loc="right", fontsize=12, **looks)


def _remark(unit: str, percent: float, marked: set[str], seen: bottleneck.Observed) -> str:
    """Return what to add to the percentage, according to bottleneck.RULE."""
    data_percent, most = seen.data_percent, bottleneck.most_idle_percent(seen)
    if unit in marked:
        bottlenecks = " = BOTTLENECK, perhaps" if pd.isna(data_percent) else " = BOTTLENECK"
        return bottlenecks if unit == "CPU" else " = the limit"
    if unit == "CPU" and bottleneck.is_busy(percent):
        least = bottleneck.WORTH_PERCENT
        if round(data_percent, 0) < least:  # False for nan
            return f", but data costs less than {least} % of a step"
        if round(most, 0) < least:
            return f", but the training waits for data for less than {least} % of a step"
    return ""


def _draw_steps(panel: Axes, seen: bottleneck.Observed) -> None:
    """Draw the step time, Python's wait for data, and the step time without data if known."""
    times = pd.Series(_elapsed(seen, seen.steps["time"]))
    median = seen.steps["step_time_ms"].median()
    series = {
        "step_time_ms": ("0.25", "step time"),
        "data_wait_ms": (DATA, "Python waits for data"),
    }
    for rows in seen.steps.groupby("host").groups.values():
        for key, (colour, label) in series.items():
            if key in seen.steps:
                values = seen.steps[key][rows]
                panel.plot(times[rows], values, "D-", color=colour, markersize=4, label=label)
    said = f"median {median:.1f} ms"
    if not pd.isna(seen.without_data_ms):
        panel.axhline(seen.without_data_ms, color="0.35", ls="--", label="a step without data")
        compared = "" if seen.step_ms == median else f"; measured: {seen.step_ms:.1f} ms"
        said += f"{compared}, {seen.without_data_ms:.1f} without data: data costs "
        said += f"{seen.data_percent:.0f} %"
    elif not pd.isna(most := bottleneck.most_idle_percent(seen)):
        said += f", at most {most:.0f} % of it waiting for data"
    panel.set_ylim(0, 1.15 * seen.steps["step_time_ms"].max())
    panel.set_ylabel("ms", fontsize=11)
    panel.set_title("Step time", loc="left", fontsize=12)
    panel.set_title(said, loc="right", fontsize=12)
