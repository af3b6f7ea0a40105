"""Should this training job go heterogeneous, and with which instances?

    python -m shared.advisor --instance ml.p4d.24xlarge --step-ms 192 --without-data-ms 80
    python -m shared.advisor --job NAME --synthetic-job NAME
    python -m shared.advisor --log FILE

FILE is the output of a script that used measured.py. For a job whose script did, --job is enough.
In a notebook: %run -m shared.advisor --job NAME. Jobs of the local SageMaker are known only in the
notebook that started them.
"""

import argparse
import sys
from dataclasses import replace

from botocore.exceptions import BotoCoreError, ClientError

from shared.advisor.prediction import RANK_GB_PER_S, Measured
from shared.advisor.report import plot, shortlist
from shared.advisor.sources import from_numbers, read_job
from shared.advisor.verdict import advise
from shared.commands import reader_may_leave
from shared.measured_line import measured_numbers


def main(arguments: list[str] | None = None) -> None:
    """Advise on the job that the command line describes; exit with status 2 after an error."""
    parser = argparse.ArgumentParser("python -m shared.advisor", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--job", help="name of a homogeneous training job, to read its numbers")
    add("--synthetic-job", help="name of the same job with --data-mode synthetic")
    add("--log", metavar="FILE", help="output of a script that used measured.py; - is stdin")
    add("--instance", help="type of the training instances, such as ml.p4d.24xlarge")
    add("--count", type=int, help="number of training instances; default: 1")
    add("--step-ms", type=float, help="step time, including the wait for data")
    add("--without-data-ms", type=float, help="step time without data")
    add("--cpu-percent", type=float, help="how busy the CPUs are; 100 means all vCPUs")
    add("--mb-per-step", type=float, help="prepared data of a step, all ranks together, in MB")
    add("--rank-gb-per-s", type=float, help=f"GB/s a rank can receive; default: {RANK_GB_PER_S}")
    add("--kept-busy-percent", type=float, help="how busy a run with data hosts kept all CPUs")
    add("--data-hosts-only", action="store_true", help="only the data hosts prepare data")
    add("--region", default="us-east-1", help="region of the prices; default: us-east-1")
    add("--figure", metavar="FILE", help="draw the candidates to a .png, .svg or .pdf file")
    add("--short", action="store_true", help="print only the verdict and three clusters")
    args = parser.parse_args(arguments)
    try:
        if args.figure and not args.figure.endswith((".png", ".svg", ".pdf")):
            raise ValueError(f"--figure {args.figure} must end in .png, .svg or .pdf.")
        advice = advise(_measured(args), args.region, args.data_hosts_only)
        if args.figure:
            plot(advice).savefig(args.figure, dpi=120)
    except (ValueError, OSError, BotoCoreError, ClientError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    with reader_may_leave():
        print(shortlist(advice) if args.short else advice)


def _measured(args: argparse.Namespace) -> Measured:
    """Take the job's numbers from one of three sources, each with its own options."""
    sources = {
        "job": {"synthetic_job"},
        "log": {"instance", "count"},
        "step_ms": {"instance", "count", "without_data_ms", "cpu_percent"},
    }
    given = {name: value for name, value in vars(args).items() if value is not None}
    source = next((name for name in sources if name in given), "")
    if not source or (source == "step_ms" and not args.instance):
        raise ValueError("Give --job NAME, --log FILE, or --instance TYPE with --step-ms.")
    options = {*sources, *set.union(*sources.values())}
    if others := sorted(options & given.keys() - {source} - sources[source]):
        names = ", ".join(f"--{name.replace('_', '-')}" for name in others)
        raise ValueError(f"--{source.replace('_', '-')} cannot be combined with {names}.")
    numbers = {name: given[name] for name in options & given.keys() - {"instance"}}
    numbers |= {"instance_type": args.instance} if args.instance else {}
    if source == "job":
        measured = read_job(args.job, args.synthetic_job)
    elif source == "log":
        del numbers["log"]
        measured = _from_file(args.log, numbers)
    else:
        measured = Measured(**numbers)
    more = ("mb_per_step", "rank_gb_per_s", "kept_busy_percent")
    return replace(measured, **{name: given[name] for name in more if name in given})


def _from_file(path: str, corrections: dict) -> Measured:
    """Read the numbers that measured.py printed; the command line may override the instances."""
    with open(0 if path == "-" else path, errors="replace") as file:
        numbers = measured_numbers(file)
    if not numbers:
        raise ValueError(
            f'{path} has no line of numbers ({{"measured": ...}}), which measured.py prints last: '
            "give the whole output."
        )
    numbers |= corrections
    if "instance_type" not in numbers:
        raise ValueError(f"{path} does not say on which instance type it ran: add --instance TYPE.")
    return from_numbers(numbers)
