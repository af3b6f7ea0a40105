"""What a training job cost, and whether the heterogeneous one was worth it.

SageMaker bills every instance of a job, whatever its group, for the job's billable seconds. From
that and from the step times in the job's log this module makes one table, `compare`, and one
figure, `plot`. The same columns can be computed for runs without a job, `compare_runs`: the two
tables that AWS published are here as `PUBLISHED`.

Prices are in prices.csv, each with the date on which it was seen and its source. They are SageMaker
training on-demand prices, without storage, data transfer and taxes: look at the current ones
before you decide with them.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from math import nan
from pathlib import Path
from typing import Any

import boto3
import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from shared import monitoring


@dataclass(frozen=True)
class Run:
    """What one row of the comparison is computed from.

    Attributes:
        instances: Number of instances by instance type.
        step_time_ms: Time of one training step, waiting for data included.
        data_wait_ms: Part of it spent waiting for data; nan if not known, like those below.
        samples_per_s: Samples trained per second, by all ranks together.
        billable_s: Billable time of the job.
    """

    instances: dict[str, int]
    step_time_ms: float
    data_wait_ms: float = nan
    samples_per_s: float = nan
    billable_s: float = nan


# The two tables of the AWS blog post named in prices.csv, to be priced as of PUBLISHED_ON. Its
# "Cost per Step" is the cost of 100 steps: 37.688 / 3600 * 0.192 * 100 = 0.201.
PUBLISHED_ON = "2022-10-27"
PUBLISHED = {
    "TensorFlow": {
        "homogeneous": Run({"ml.p4d.24xlarge": 1}, step_time_ms=192.0),
        "heterogeneous": Run({"ml.p4d.24xlarge": 1, "ml.c5.18xlarge": 2}, step_time_ms=86.0),
    },
    "PyTorch": {
        "homogeneous": Run({"ml.p3.2xlarge": 1}, step_time_ms=1193.0),
        "heterogeneous": Run({"ml.p3.2xlarge": 1, "ml.c5.9xlarge": 1}, step_time_ms=184.0),
    },
}


@functools.cache
def _prices() -> pd.DataFrame:
    return pd.read_csv(Path(__file__).with_name("prices.csv"))


def _price(instance_type: str, region: str, as_of: str | None) -> pd.Series:
    """Find the newest row of prices.csv that is not newer than `as_of`."""
    prices = _prices()
    rows = prices[prices["instance_type"] == instance_type]
    if rows.empty:
        known = ", ".join(sorted(prices["instance_type"].unique()))
        raise ValueError(f"prices.csv has no price of {instance_type!r}; it knows {known}.")
    in_region = rows[rows["region"] == region]
    if in_region.empty:
        known = ", ".join(sorted(rows["region"].unique()))
        raise ValueError(
            f"prices.csv has no price of {instance_type} in region {region!r}, only in {known}: "
            "add a row with its source, or name a region that it has."
        )
    try:
        until = date.fromisoformat(as_of).isoformat() if as_of else date.max.isoformat()
    except ValueError:
        raise ValueError(f"as_of is {as_of!r}, but must be a date such as 2022-10-27.") from None
    dated = in_region[in_region["as_of"] <= until]
    if dated.empty:
        raise ValueError(
            f"prices.csv has no price of {instance_type} in {region} as of {as_of}; "
            f"its first one is of {in_region['as_of'].min()}."
        )
    return dated.sort_values("as_of").iloc[-1]


def price_per_hour(
    instance_type: str, region: str = "us-east-1", as_of: str | None = None
) -> float:
    """Look up the on-demand price of one training instance.

    Args:
        instance_type: Such as "ml.g5.xlarge".
        region: AWS region.
        as_of: ISO date: the price known on that day instead of the newest one.

    Returns:
        US dollars per hour.

    Raises:
        ValueError: prices.csv does not have it; says what it has.
    """
    return float(_price(instance_type, region, as_of)["usd_per_hour"])


def instances_of(resource_config: dict[str, Any]) -> dict[str, int]:
    """Count the instances of a job's ResourceConfig by instance type, groups or not."""
    counts: dict[str, int] = {}
    for group in resource_config.get("InstanceGroups") or [resource_config]:
        instance_type = group["InstanceType"]
        counts[instance_type] = counts.get(instance_type, 0) + group["InstanceCount"]
    return counts


def cluster_price_per_hour(
    resource_config: dict[str, Any], region: str = "us-east-1", as_of: str | None = None
) -> float:
    """Add up the prices of all instances of a job's ResourceConfig, in US dollars per hour."""
    return _usd_per_hour(instances_of(resource_config), region, as_of)


def _usd_per_hour(instances: dict[str, int], region: str, as_of: str | None) -> float:
    return sum(price_per_hour(name, region, as_of) * n for name, n in instances.items())


def job_cost(description: dict[str, Any], as_of: str | None = None) -> float:
    """Compute what a training job cost, in US dollars, from DescribeTrainingJob's response.

    BillableTimeInSeconds is per instance ("Multiply this value by the number of instances",
    API reference of DescribeTrainingJob). For managed spot training it is shorter than the
    training time: the saving is in the seconds, so on-demand prices apply to both.

    Raises:
        ValueError: the job has not ended, or was not billed.
    """
    seconds = _billable_seconds(description)
    region = _region(description)
    return cluster_price_per_hour(description["ResourceConfig"], region, as_of) * seconds / 3600


def _billable_seconds(description: dict[str, Any]) -> int:
    name, status = description["TrainingJobName"], description["TrainingJobStatus"]
    if status in ("InProgress", "Stopping"):
        raise ValueError(f"Training job {name!r} is {status}: its cost is known once it has ended.")
    if "BillableTimeInSeconds" not in description:
        raise ValueError(f"Training job {name!r} ({status}) has no billable time: nothing to cost.")
    return description["BillableTimeInSeconds"]


def _region(description: dict[str, Any]) -> str:
    return description["TrainingJobArn"].split(":")[3]


def compare(
    job_names: Sequence[str] | Mapping[str, str],
    session: boto3.Session | None = None,
    as_of: str | None = None,
    region: str | None = None,
) -> pd.DataFrame:
    """Compare training jobs that have ended; the first one is the baseline.

    Times are medians over the step lines in each job's log.

    Args:
        job_names: Names of the jobs, or {label: name} to have short labels in table and figure.
        session: boto3 session to use instead of the default one.
        as_of: ISO date of the prices, instead of the newest ones.
        region: Where the prices are from, if not from the first job's region.

    Returns:
        One row per job; columns as in `compare_runs`.
    """
    client = (session or boto3).client("sagemaker")
    runs = {}
    for label, name in monitoring.labelled(job_names).items():
        description = client.describe_training_job(TrainingJobName=name)
        region = region or _region(description)
        billable_s = _billable_seconds(description)
        median = monitoring.steps(name, session)[
            ["step_time_ms", "data_wait_ms", "samples_per_s"]
        ].median()
        runs[label] = Run(
            instances_of(description["ResourceConfig"]), billable_s=billable_s, **median
        )
    return compare_runs(runs, region, as_of)


def compare_runs(
    runs: Mapping[str, Run], region: str = "us-east-1", as_of: str | None = None
) -> pd.DataFrame:
    """Compute costs, speed-up and improvement of labelled runs; the first one is the baseline.

    Returns:
        One row per run. Speed-up is the baseline's step time over this one's; price-performance
        improvement is 1 - cost per step / the baseline's cost per step.
    """
    table = pd.DataFrame({label: _row(run, region, as_of) for label, run in runs.items()}).T
    table = table.infer_objects()
    baseline = table.iloc[0]
    table["speed-up"] = baseline["step time (ms)"] / table["step time (ms)"]
    table["price-performance improvement (%)"] = 100 * (
        1 - table["USD per 1,000 steps"] / baseline["USD per 1,000 steps"]
    )
    return table


def _row(run: Run, region: str, as_of: str | None) -> dict[str, Any]:
    """Compute what does not depend on the baseline."""
    prices = {name: _price(name, region, as_of) for name in run.instances}
    dearest_first = sorted(prices, key=lambda name: -prices[name]["usd_per_hour"])
    usd_per_hour = _usd_per_hour(run.instances, region, as_of)
    return {
        "instances": " + ".join(f"{run.instances[name]} x {name}" for name in dearest_first),
        "USD per hour": usd_per_hour,
        "region": region,
        "prices as of": ", ".join(sorted({price["as_of"] for price in prices.values()})),
        "billable time (s)": run.billable_s,
        "total USD": usd_per_hour * run.billable_s / 3600,
        "samples per s": run.samples_per_s,
        "step time (ms)": run.step_time_ms,
        "data wait (ms)": run.data_wait_ms,
        "data wait (%)": 100 * run.data_wait_ms / run.step_time_ms,
        "USD per 1,000 steps": usd_per_hour / 3600 * run.step_time_ms,  # ms * 1,000 steps = s
    }


def readable(table: pd.DataFrame) -> pd.DataFrame:
    """Turn a comparison on its side, one column per job, with sensibly rounded text for numbers."""
    formats = {"USD": "{:,.4f}", "(%)": "{:.0f} %", "(ms)": "{:,.1f}", "speed-up": "{:.1f}x"}
    turned = table.T.astype(object)
    for name, row in turned.iterrows():
        style = next((f for key, f in formats.items() if key in str(name)), "{:,.0f}")
        turned.loc[name] = [
            value if isinstance(value, str) else "-" if pd.isna(value) else style.format(value)
            for value in row
        ]
    return turned


def plot(table: pd.DataFrame, title: str = "", note: str = "") -> Figure:
    """Draw a comparison: step time, split into waiting for data and the rest, and cost.

    Args:
        table: From `compare` or `compare_runs`.
        title: Above the figure.
        note: Added to the small print, for instance "Measured on this machine.".
    """
    fig, (left, right) = plt.subplots(
        1, 2, figsize=(11, 1.9 + len(table)), sharey=True, layout="constrained"
    )
    names = [
        f"{label}\n" + row["instances"].replace(" + ", " +\n") for label, row in table.iterrows()
    ]
    step, wait = table["step time (ms)"], table["data wait (ms)"]
    cost = table["USD per 1,000 steps"]
    training, waiting, costing = monitoring.COLOURS[:3]
    busy = step - wait.fillna(0)
    left.barh(names, busy, height=0.55, color=training, label="training")
    if wait.notna().any():
        left.barh(
            names, wait, left=busy, height=0.55, color=waiting, hatch="//", label="waiting for data"
        )
        left.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False, fontsize=12)
    right.barh(names, cost, height=0.55, color=costing)

    beside = {"xytext": (6, 0), "textcoords": "offset points", "va": "center", "fontsize": 12}
    for i in range(len(table)):
        speed_up = table["speed-up"].iloc[i]
        saved = table["price-performance improvement (%)"].iloc[i]
        cheaper = "cheaper" if saved >= 0 else "more expensive"
        faster = f"\n{speed_up:.1f}x as fast" if i else ""  # row 0 is the baseline itself
        saving = f"\n{abs(saved):.0f} % {cheaper}" if i else ""
        left.annotate(f"{step.iloc[i]:,.1f} ms{faster}", (step.iloc[i], i), **beside)
        right.annotate(f"USD {cost.iloc[i]:,.4f}{saving}", (cost.iloc[i], i), **beside)

    left.invert_yaxis()  # the baseline on top
    left.set_xlabel("step time (ms)", fontsize=12)
    right.set_xlabel("cost per 1,000 steps (USD)", fontsize=12)
    right.locator_params(axis="x", nbins=5)  # more would touch each other
    for panel in (left, right):
        panel.margins(x=0.6)  # room for the text beside the bars
        panel.tick_params(labelsize=11)
        panel.spines[["top", "right"]].set_visible(False)
    region = table["region"].iloc[0]
    dates = ", ".join(sorted({day for days in table["prices as of"] for day in days.split(", ")}))
    small_print = f"SageMaker training on-demand prices in {region} as of {dates}.\n{note}"
    fig.supxlabel(small_print, fontsize=10, color="0.35")
    fig.suptitle(title, fontsize=14)
    plt.close(fig)  # the notebook draws the returned figure; left open, it would be drawn twice
    return fig
