"""Writes the page of `make aws` to results/: what ran, how fast, what it cost, what failed.

The page is meant to be published, so it omits everything that identifies the AWS account.
"""

import contextlib
import json
import platform
import re
import subprocess
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from importlib.metadata import version
from math import isnan, nan
from pathlib import Path
from typing import Any

import pandas as pd
from botocore.exceptions import BotoCoreError, ClientError

from shared import costs, prices
from shared.monitoring import log
from shared.monitoring.describe import describe, instances_of

PATIENCE_SECONDS = 30  # for each job, because the run can no longer be interrupted
ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "results"
# Versions that hosts print, as torch=2.12.0 or in the table of preflight.py.
SOFTWARE = re.compile(r"\b((?:py)?torch|tensorflow|horovod|cuda|driver)[ =]+(\d[\w.+]*)", re.I)
PRIVATE = {  # in this order, since ARNs and bucket names may contain an account number
    r"\barn:aws[^\s\"'`,)\]]*": "<ARN>",
    r"https?://[^\s/]*amazonaws\.com[^\s\"'`,)\]]*": "<URL>",
    r"\bs3://[^\s/\"'`,)\]]+": "s3://<bucket>",
    r"\bsagemaker-[a-z0-9-]+-\d{12}\b": "<bucket>",
    r"(?<!\d)\d{12}(?!\d)": "<account>",
}


def redact(text: str, names: Iterable[str] = ()) -> str:
    """Replace ARNs, AWS's URLs, buckets, account numbers, the home folder and `names`."""
    for pattern, instead in PRIVATE.items():
        text = re.sub(pattern, instead, text)
    text = text.replace(str(Path.home()), "~")
    for name in names:
        text = re.sub(rf"\b{re.escape(name)}\b", "<name>", text)
    return text


def price_region(instance_types: Iterable[str], region: str) -> str:
    """Return the region if we know the prices of all these types there, otherwise us-east-1."""
    try:
        for name in instance_types:
            prices.price_of(name, region)
    except ValueError:
        return "us-east-1"
    return region


def write(
    region: str, role: str, names: Iterable[str], shown: Mapping[str, str], failure: str
) -> tuple[Path, bool]:
    """Write the page of a run to results/; return its path, and whether anything failed.

    Every job that is not *Completed* is a failure, even if only its time limit stopped it.

    Args:
        region: Where the jobs ran.
        role: Name of the execution role, which the page must not contain.
        names: The jobs that were requested.
        shown: For each notebook, the text of its comparison.
        failure: Why the run ended early, or "".
    """
    jobs, failures = {}, []
    for name in names:
        try:
            jobs[name] = describe(name, patience_s=PATIENCE_SECONDS)
        except (ValueError, OSError, BotoCoreError, ClientError):
            failures.append(f"{name} was not started, or AWS did not answer.")
            continue
        status = jobs[name]["TrainingJobStatus"]
        if status != "Completed":
            why = status, jobs[name]["SecondaryStatus"], jobs[name].get("FailureReason", "")
            failures.append(f"{name}: {', '.join(filter(None, dict.fromkeys(why)))}")
    if failure:
        failures.append(failure)

    today = datetime.now(timezone.utc).date()
    page = [f"# {today}, {region}"]
    ended = "Ended early" if failure else "All notebooks ran to the end"
    page.append(f"{ended}; see Failures." if failures else f"{ended}.")
    page.append(
        f"Commit {_commit()}, SageMaker SDK {version('sagemaker')}, "
        f"Python {platform.python_version()}."
    )
    page += ["## Jobs", *_tables(jobs, region)] if jobs else []
    for title, text in {"Failures": "\n".join(failures), **shown}.items():
        page += [f"## {title}", f"```\n{text.rstrip()}\n```"] if text else []

    buckets = re.findall(r"s3://([^\s/\"]+)", json.dumps(jobs, default=str))
    paths = (FOLDER / f"{today}-{region}{end}.md" for end in ("", *(f"-{n}" for n in range(2, 99))))
    path = next(path for path in paths if not path.exists())
    path.write_text(redact("\n\n".join(page) + "\n", [role, *buckets]), encoding="utf-8")
    return path, bool(failures)


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"  # no git, or a copy without history


def _tables(jobs: Mapping[str, Mapping[str, Any]], region: str) -> list[str]:
    """Return Markdown tables of the jobs' times and costs, and of their images and software."""
    runs, software = {}, {}
    for name, job in jobs.items():
        lines, steps = [], pd.DataFrame()
        # The log may be missing (no host has started), or it or its step lines can't be read.
        with contextlib.suppress(ValueError, OSError, BotoCoreError, ClientError):
            lines = log.logs(name)
            steps = log.step_table(lines)
        columns = ["step_time_ms", "data_wait_ms"]
        runs[name] = costs.Run(
            instances_of(job["ResourceConfig"]),
            **steps.reindex(columns=columns).median(),
            billable_s=job.get("BillableTimeInSeconds", nan),
        )
        found = {" ".join(pair) for line in lines for pair in SOFTWARE.findall(line.text)}
        software[name] = ", ".join(sorted(found)) or "not in the log"
    types = {instance_type for run in runs.values() for instance_type in run.instances}
    table = costs.compare_runs(runs, price_region(types, region))

    times = ["| job | status | instances | billed s | USD | step ms | Python waits for data, ms |"]
    times.append("|---|---|---|---|---|---|---|")
    for name, row in table.iterrows():
        cells = [name, jobs[name]["TrainingJobStatus"], row["instances"]]
        cells += [
            "-" if isnan(row[column]) else f"{row[column]:,.{digits}f}"
            for column, digits in (
                ("billable time (s)", 0),
                ("total USD", 4),
                ("step time (ms)", 1),
                ("data wait (ms)", 1),
            )
        ]
        times.append(f"| {' | '.join(cells)} |")
    usd = table["total USD"]
    total = f"Together USD {usd.sum():.4f}"
    total += ", without the jobs whose cost is not known yet" if usd.isna().any() else ""
    dates = sorted(price.as_of for price in table.attrs["prices"])
    total += f", at prices of {table['region'].iloc[0]}, as of {dates[0]} to {dates[-1]}."

    ran = ["| job | image | software, from its log |", "|---|---|---|"]
    for name, job in jobs.items():
        image = job["AlgorithmSpecification"]["TrainingImage"].rpartition("/")[2]
        ran.append(f"| {name} | {image} | {software[name]} |")
    return ["\n".join(times), total, "\n".join(ran)]
