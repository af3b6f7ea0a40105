"""What training jobs cost, and whether the heterogeneous one was worth it.

SageMaker bills every instance of a job, in every group, for the job's billable seconds. From these
and from the step times in the job's log, this module makes a table (`compare`) and a figure
(`plot`). `compare_runs` makes the same table from plain numbers, such as those that AWS published
(`PUBLISHED`).

This is also a command, for jobs on AWS:

    python -m shared.costs JOB JOB... [--region REGION]
    python -m shared.costs --refresh REGION

For jobs of the local SageMaker, run it in the notebook that started them:

    %run -m shared.costs JOB JOB...     (put options after the jobs; %run takes those before)

Prices come from shared/prices.py: check the current ones before you base a decision on them.
"""

import argparse
import builtins
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from math import nan
from typing import Any

import boto3
import matplotlib.pyplot as plt
import pandas as pd
from botocore.exceptions import BotoCoreError, ClientError
from matplotlib.figure import Figure

from shared import monitoring
from shared.commands import reader_may_leave
from shared.measured import data_percent
from shared.monitoring.describe import describe, instances_of
from shared.monitoring.joblog import read_log
from shared.prices import Price, cache_file, price_of, price_per_hour, refresh_prices

__all__ = [
    "PUBLISHED",
    "PUBLISHED_ON",
    "Run",
    "compare",
    "compare_runs",
    "plot",
    "price_per_hour",
    "readable",
    "refresh_prices",
]


@dataclass(frozen=True)
class Run:
    """The numbers for one row of the comparison; nan means unknown.

    Attributes:
        instances: Number of instances by instance type.
        step_time_ms: Time of one training step, including the wait for data.
        data_wait_ms: The part of it in which Python waits for data; a GPU waits at most so long.
        samples_per_s: Samples trained per second, by all ranks together.
        billable_s: Billable time of the job.
        training_s: Training time of the job.
        spot: Whether it was managed spot training, which is billed for less than its training time.
        without_data_ms: Time of one step without data.
    """

    instances: dict[str, int]
    step_time_ms: float
    data_wait_ms: float = nan
    samples_per_s: float = nan
    billable_s: float = nan
    training_s: float = nan
    spot: bool = False
    without_data_ms: float = nan


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


def compare(
    job_names: Mapping[str, str], region: str | None = None, synthetic_job: str | None = None
) -> pd.DataFrame:
    """Compare training jobs that have ended; the first one is the baseline.

    Args:
        job_names: Names of the jobs by short labels for the table and the figure.
        region: Region of the prices; default: the region of the jobs.
        synthetic_job: Name of the same job without data, to show what data costs of a step.

    Returns:
        One row per job, with the columns of `compare_runs`. Step times are those of `read_log`.

    Raises:
        ValueError: a job is unknown, has not ended, was not billed or has logged no steps, or a
            price is unknown.
    """
    runs = {}
    for label, name in job_names.items():
        description, log = _billed(name), read_log(name, synthetic_job)
        medians = log.steps.reindex(
            columns=["step_time_ms", "data_wait_ms", "samples_per_s"]
        ).median()
        runs[label] = Run(
            instances_of(description["ResourceConfig"]),
            log.step_ms,
            without_data_ms=log.without_data_ms,
            billable_s=description["BillableTimeInSeconds"],
            training_s=description.get("TrainingTimeInSeconds", nan),
            spot=description.get("EnableManagedSpotTraining", False),
            data_wait_ms=medians["data_wait_ms"],
            # In a job that used measured.py, some step lines are of repeated batches, and too fast.
            samples_per_s=medians["samples_per_s"] * (medians["step_time_ms"] / log.step_ms),
        )
    return compare_runs(runs, region or boto3.client("sagemaker").meta.region_name)


def _billed(name: str) -> dict[str, Any]:
    """Describe a training job that has ended and was billed."""
    description = describe(name)
    status = description["TrainingJobStatus"]
    if status in ("InProgress", "Stopping"):
        raise ValueError(f"Training job {name!r} is {status}: its cost is known once it has ended.")
    if "BillableTimeInSeconds" not in description:
        raise ValueError(f"Training job {name!r} ({status}) has no billable time, so no cost.")
    return description


def compare_runs(
    runs: Mapping[str, Run], region: str = "us-east-1", as_of: str | None = None
) -> pd.DataFrame:
    """Compute costs, speed-up and improvement of labelled runs; the first one is the baseline.

    BillableTimeInSeconds is per instance ("Multiply this value by the number of instances", API
    reference of DescribeTrainingJob), so total USD = USD per hour / 3600 * billable time. Managed
    spot training saves 1 - billable / training time (same source), which also lowers the cost of
    steps and samples: USD per 1,000 steps = USD per hour / 3600 * step time in seconds * 1,000 *
    (1 - saving).

    Returns:
        One row per run. Speed-up is the baseline's step time / the run's; price-performance
        improvement is 1 - cost per step / the baseline's cost per step. The prices used, with their
        sources, are in the table's attrs["prices"].
    """
    prices = {n: price_of(n, region, as_of) for run in runs.values() for n in run.instances}
    rows = {label: _row(run, prices) for label, run in runs.items()}
    table = pd.DataFrame(rows).T.infer_objects()
    baseline = table.iloc[0]
    table["speed-up"] = baseline["step time (ms)"] / table["step time (ms)"]
    table["price-performance improvement (%)"] = 100 * (
        1 - table["USD per 1,000 steps"] / baseline["USD per 1,000 steps"]
    )
    table.attrs["prices"] = list(prices.values())
    return table


def _row(run: Run, prices: dict[str, Price]) -> dict[str, Any]:
    """Compute the columns that do not depend on the baseline."""
    # The training instances first: those with GPUs, then by falling price.
    names = sorted(run.instances, key=lambda n: (-prices[n].gpus, -prices[n].usd_per_hour))
    usd_per_hour = sum(run.instances[name] * prices[name].usd_per_hour for name in names)
    summands = " + ".join(f"{run.instances[name]} x {prices[name].usd_per_hour}" for name in names)
    days = ", ".join(sorted({prices[name].as_of for name in names}))
    saving = 1 - run.billable_s / run.training_s if run.spot else 0.0
    usd_per_s = usd_per_hour / 3600
    return {
        "instances": " + ".join(f"{run.instances[name]} x {name}" for name in names),
        "USD per instance-hour": summands,
        "USD per hour": usd_per_hour,
        "region": prices[names[0]].region,
        "prices as of": days,
        "billable time (s)": run.billable_s,
        "training time (s)": run.training_s,
        "saved by spot (%)": 100 * saving if run.spot else nan,
        "total USD": usd_per_s * run.billable_s,
        "samples per s": run.samples_per_s,
        "step time (ms)": run.step_time_ms,
        "data wait (ms)": run.data_wait_ms,
        "data wait (%)": 100 * run.data_wait_ms / run.step_time_ms,
        "step without data (ms)": run.without_data_ms,
        "data costs (%)": data_percent(run.step_time_ms, run.without_data_ms),
        "USD per 1,000 steps": usd_per_s * run.step_time_ms * (1 - saving),  # 1,000 ms are 1 s
        "USD per 1,000 samples": usd_per_s * 1000 / run.samples_per_s * (1 - saving),
    }


def readable(table: pd.DataFrame) -> pd.DataFrame:
    """Transpose a comparison, one column per job, and round its numbers for display.

    Rows without any known value are left out.
    """
    formats = {
        "samples per s": "{:,.1f}",
        "USD per 1,000 samples": "{:,.6f}",
        "USD": "{:,.4f}",
        "(%)": "{:.0f} %",
        "(ms)": "{:,.1f}",
        "speed-up": "{:.1f}x",
    }
    turned = table.dropna(axis="columns", how="all").T.astype(object)
    for name, row in turned.iterrows():
        style = next((f for key, f in formats.items() if key in str(name)), "{:,.0f}")
        turned.loc[name] = [
            value if isinstance(value, str) else "-" if pd.isna(value) else style.format(value)
            for value in row
        ]
    return turned


def plot(table: pd.DataFrame, title: str, note: str = "") -> Figure:
    """Draw a comparison: the cost, and the step time, split into what data costs and the rest.

    What data costs is the step time minus the step time without data. If the latter is unknown, the
    figure shows the time in which Python waits for data. A GPU runs behind Python: it may not wait.

    Args:
        table: From `compare` or `compare_runs`.
        title: Title of the figure.
        note: Added to the small print, for instance "Measured on this machine.".
    """
    fig, (left, right) = plt.subplots(
        1, 2, figsize=(11, 1.9 + len(table)), sharey=True, layout="constrained"
    )
    names = [
        f"{label}\n" + row["instances"].replace(" + ", " +\n") for label, row in table.iterrows()
    ]
    step, data = table["step time (ms)"], table["data wait (ms)"]
    cost = table["USD per 1,000 steps"]
    labels = "the rest of a step", "waits for data (a GPU: at most)"
    if table["step without data (ms)"].notna().all():
        data = step * table["data costs (%)"] / 100
        labels = "a step without data", "what data costs"
    clusters = [
        monitoring.HETEROGENEOUS if " + " in instances else monitoring.HOMOGENEOUS
        for instances in table["instances"]
    ]
    busy = step - data.fillna(0)
    left.barh(names, busy, height=0.55, color=monitoring.TRAINING, label=labels[0])
    if data.notna().any():
        looks = {"height": 0.55, "color": monitoring.DATA, "hatch": "//", "label": labels[1]}
        left.barh(names, data, left=busy, **looks)
        left.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False, fontsize=12)
    right.barh(names, cost, height=0.55, color=clusters)

    beside = {"xytext": (6, 0), "textcoords": "offset points", "va": "center", "fontsize": 12}
    for i in range(len(table)):
        speed_up = table["speed-up"].iloc[i]
        saved = table["price-performance improvement (%)"].iloc[i]
        cheaper = "cheaper" if saved >= 0 else "more expensive"
        faster = f"\n{speed_up:.1f}x as fast" if i else ""  # row 0 is the baseline itself
        saving = f"\n{abs(saved):.0f} % {cheaper}" if i else ""
        left.annotate(f"{step.iloc[i]:,.1f} ms{faster}", (step.iloc[i], i), **beside)
        of_samples = table["USD per 1,000 samples"].iloc[i]
        samples = "" if pd.isna(of_samples) else f"\nUSD {of_samples:,.6f} per 1,000 samples"
        right.annotate(f"USD {cost.iloc[i]:,.4f}{samples}{saving}", (cost.iloc[i], i), **beside)

    left.invert_yaxis()  # the baseline on top
    left.set_xlabel("step time (ms)", fontsize=12)
    right.set_xlabel("cost per 1,000 steps (USD)", fontsize=12)
    right.locator_params(axis="x", nbins=5)  # more labels would touch each other
    for panel, room in ((left, 0.6), (right, 1.0)):
        panel.margins(x=room)  # for the text beside the bars
        panel.tick_params(labelsize=11)
        panel.spines[["top", "right"]].set_visible(False)
    region = table["region"].iloc[0]
    dates = ", ".join(sorted({day for days in table["prices as of"] for day in days.split(", ")}))
    spot = ", less managed spot's saving" if table["saved by spot (%)"].notna().any() else ""
    small_print = f"SageMaker training on-demand prices in {region} as of {dates}{spot}.\n{note}"
    fig.supxlabel(small_print, fontsize=10, color="0.35")
    fig.suptitle(title, fontsize=14)
    plt.close(fig)  # otherwise a notebook would draw it twice
    return fig


def main(arguments: list[str] | None = None) -> int:
    """Run the command that the module's docstring describes; return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m shared.costs",
        description="Compare what SageMaker training jobs cost with the first of them.",
        epilog="For jobs of the local SageMaker, use %run -m shared.costs in the notebook that "
        "started them. Set the region of the jobs as for boto3 (AWS_DEFAULT_REGION).",
    )
    parser.add_argument("jobs", nargs="*", metavar="JOB", help="name of a training job that ended")
    parser.add_argument("--refresh", metavar="REGION", help="get current prices from AWS")
    parser.add_argument("--region", help="region of the prices; default: the region of the jobs")
    options = parser.parse_args(arguments)
    try:
        with reader_may_leave():
            if bool(options.jobs) == bool(options.refresh):
                raise ValueError("Name training jobs, or give --refresh REGION.")
            if options.refresh:
                print(f"asking AWS for its training prices of {options.refresh} ...", flush=True)
                count, file = len(refresh_prices(options.refresh)), cache_file(options.refresh)
                print(f"{count} training prices of {options.refresh} are now in {file}.")
            else:
                _print(compare({name: name for name in options.jobs}, options.region))
    except (ValueError, OSError) as error:  # OSError: the prices cannot be written
        print(error, file=sys.stderr)
        return 2
    except (BotoCoreError, ClientError) as error:
        hint = " (the local SageMaker has no prices: use a terminal)" * bool(options.refresh)
        print(f"AWS: {error}{hint}", file=sys.stderr)
        return 2
    return 0


def _print(table: pd.DataFrame) -> None:
    """Print a table, and below it the source of each price."""
    print(f"{readable(table).to_string()}\n")
    for price in sorted(
        table.attrs["prices"], key=lambda price: (price.as_of, price.instance_type)
    ):
        print(f"{price.instance_type} in {price.region}: USD {price.usd_per_hour} per hour", end="")
        print(f" as of {price.as_of}, {price.source}")


if __name__ == "__main__":
    status = main()
    if status and not hasattr(builtins, "__IPYTHON__"):  # %run would print a traceback
        sys.exit(status)
