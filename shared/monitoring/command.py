"""The command that prints the status, utilisation, step time and bottleneck of a training job.

    python -m shared.monitoring JOB [--figure FILE]
    python -m shared.monitoring JOB --logs

A job of the local SageMaker is known only in the notebook that started it. In that notebook, use
`%run -m shared.monitoring JOB`.
"""

import argparse
import sys

from botocore.exceptions import BotoCoreError, ClientError

from shared.commands import reader_may_leave
from shared.monitoring import bottleneck, figures
from shared.monitoring.describe import describe
from shared.monitoring.log import show_logs


def main(arguments: list[str] | None = None) -> None:
    """Run the command: print a report on a training job, or its logs.

    Raises:
        SystemExit: with code 2, if the arguments are wrong, or the job or its log cannot be read
            or drawn; stderr says why.
    """
    parser = argparse.ArgumentParser(
        "python -m shared.monitoring",
        description="Print how busy a training job's hosts are, its step time and its bottleneck.",
    )
    parser.add_argument("job", help="name of the training job")
    parser.add_argument("--figure", metavar="FILE", help="also draw a figure (.png, .svg, .pdf)")
    parser.add_argument("--logs", action="store_true", help="print the job's logs instead")
    chosen = parser.parse_args(arguments)
    if chosen.figure and chosen.logs:
        parser.error("--figure and --logs cannot be used together.")
    try:
        with reader_may_leave():
            if chosen.logs:
                describe(chosen.job)
                show_logs(chosen.job, last=None)
            else:
                _report(chosen.job, chosen.figure)
    except (ValueError, OSError, BotoCoreError, ClientError) as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None


def _report(job_name: str, figure: str | None) -> None:
    """Print a job's status, hosts, step time and bottleneck; draw them in the file `figure`."""
    job = describe(job_name)
    status = [job["TrainingJobStatus"], job.get("FailureReason", "")]
    billed = f"{job['BillableTimeInSeconds']} s billed" if "BillableTimeInSeconds" in job else ""
    print(f"{job_name}: {', '.join(filter(None, [*status, billed]))}")
    seen = bottleneck.observe(job_name)
    if figure:
        try:
            figures.plot_observed(seen).savefig(figure, dpi=120)
        except (OSError, ValueError) as error:
            raise ValueError(f"The figure cannot be written to {figure!r}: {error}.") from None
    table = bottleneck.averages(seen).round(1)
    print(f"\n{table.to_string(index=False, na_rep='-')}\n")
    if seen.steps.empty:
        print("No step lines ('step=... step_time_ms=...') in the log: averages cover all of it")
    else:
        known = {"Step time": "step_time_ms", "data wait": "data_wait_ms"}
        medians = [
            f"{name} {seen.steps[key].median():.1f} ms"
            for name, key in known.items()
            if key in seen.steps
        ]
        print(f"{', '.join(medians)} (medians; step lines: {len(seen.steps)})")
    print(bottleneck.explain(seen))
    if figure:
        print(f"The figure is in {figure}.")
