"""Should this training job go heterogeneous, and with what?

    python -m shared.advisor --instance ml.p4d.24xlarge --step-ms 192 --accelerator-ms 80
    python -m shared.advisor --instance ml.p4d.24xlarge --vcpus-per-gpu 20
    python -m shared.advisor --job NAME --synthetic-job NAME
    python -m shared.advisor --log FILE

FILE is the output of a script that was run with measured.py. For a job that was, --job is enough.
In a notebook: %run -m shared.advisor --job NAME. Jobs of the local SageMaker are known only there.

prediction.py has the formula, verdict.py the flowchart, and advice_shown.py what is shown of both.
"""

import argparse
import json
import sys
from dataclasses import replace
from math import nan

from botocore.exceptions import BotoCoreError, ClientError

from shared.advice_shown import as_text, plot
from shared.commands import reader_may_leave
from shared.prediction import RANK_GB_PER_S, Measured, from_numbers, measure, needing, numbers_in
from shared.verdict import advise


def main(arguments: list[str] | None = None) -> None:
    """Advise on the job that the command line describes; end with status 2 if that cannot be."""
    parser = argparse.ArgumentParser("python -m shared.advisor", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--job", help="a homogeneous training job: its numbers are looked up")
    add("--synthetic-job", help="the same job with --data-mode synthetic")
    add("--log", metavar="FILE", help="output of a script that was run with measured.py")
    add("--instance", help="instance type that trains, such as ml.p4d.24xlarge")
    add("--count", type=int, help="number of these instances; default: 1")
    add("--step-ms", type=float, help="time of a step, waiting for data included")
    add("--vcpus-per-gpu", type=float, help="instead: vCPUs that keep one GPU busy")
    add("--accelerator-ms", type=float, help="time of a step without data")
    add("--cpu-percent", type=float, help="use of the CPUs, all together 100")
    add("--gpu-percent", type=float, help="use of the GPUs, all together 100")
    add("--mb-per-step", type=float, default=nan, help="prepared data of a step, in megabytes")
    add("--rank-gb-per-s", type=float, default=RANK_GB_PER_S, help="what one rank takes in of it")
    add("--kept-busy-percent", type=float, default=nan, help="use of all CPUs with data hosts")
    add("--data-hosts-only", action="store_true", help="with them, training hosts prepare no data")
    add("--cores", nargs="+", metavar="TYPE=N", help="for local jobs: cores of an instance here")
    add("--region", default="us-east-1", help="of the prices")
    add("--as-of", help="date of the prices, such as 2022-10-27; default: the newest")
    add("--figure", metavar="FILE", help="draw the candidates to a .png or .svg")
    add("--json", action="store_true", help="print JSON, with all candidates")
    args = parser.parse_args(arguments)
    try:
        cores = dict(map(_cores, args.cores)) if args.cores else None
        advice = advise(_measured(args), args.region, args.as_of, args.data_hosts_only, cores)
        if args.figure:
            plot(advice).savefig(args.figure, dpi=120)
    except (ValueError, OSError, BotoCoreError, ClientError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    with reader_may_leave():
        if args.json:
            tables = {"types": advice.types.reset_index(), "candidates": advice.candidates}
            rows = {
                key: json.loads(table.to_json(orient="records")) for key, table in tables.items()
            }
            known = {key: value for key, value in vars(advice.measured).items() if value == value}
            print(json.dumps({**vars(advice), "measured": known, **rows}, indent=2))
        else:
            print(as_text(advice))


def _measured(args: argparse.Namespace) -> Measured:
    """Take the job's numbers from one of four sources, of which each has options of its own."""
    sources = {
        "job": {"synthetic_job"},
        "log": {"instance", "count"},
        "step_ms": {"instance", "count", "accelerator_ms", "cpu_percent", "gpu_percent"},
        "vcpus_per_gpu": {"instance", "count", "accelerator_ms"},
    }
    options = {*sources, *set.union(*sources.values())}
    given = {name: getattr(args, name) for name in options if getattr(args, name) is not None}
    source = next((name for name in sources if name in given), None)
    if source is None or (source not in ("job", "log") and not args.instance):
        raise ValueError(
            "Give --job NAME, --log FILE, or --instance TYPE with either --step-ms or "
            "--vcpus-per-gpu."
        )
    if others := sorted(given.keys() - {source} - sources[source]):
        names = ", ".join(f"--{name.replace('_', '-')}" for name in others)
        raise ValueError(f"--{source.replace('_', '-')} cannot be combined with {names}.")
    instance_type = given.pop("instance", None)
    if source == "job":
        measured = measure(args.job, args.synthetic_job)
    elif source == "log":
        measured = _read_log(args.log, instance_type, args.count)
    elif source == "step_ms":
        measured = Measured(instance_type, **given)
    else:
        measured = needing(instance_type, **given, region=args.region, as_of=args.as_of)
    names = ("mb_per_step", "rank_gb_per_s", "kept_busy_percent")
    return replace(measured, **{name: getattr(args, name) for name in names})


def _read_log(path: str, instance_type: str | None, count: int | None) -> Measured:
    """Take the numbers that measured.py has printed; the command line may correct the instances."""
    with open(path, errors="replace") as file:
        numbers = numbers_in(file)
    if not numbers:
        raise ValueError(
            f'{path} has no line of numbers ({{"measured": ...}}): measured.py prints it last.'
        )
    given = {"instance_type": instance_type, "count": count}
    numbers |= {name: value for name, value in given.items() if value is not None}
    if "instance_type" not in numbers:
        raise ValueError(f"{path} does not say on which instance type it ran: add --instance TYPE.")
    return from_numbers(numbers)


def _cores(text: str) -> tuple[str, int]:
    """Read TYPE=N."""
    name, _, number = text.partition("=")
    if not (number.isdigit() and int(number) > 0):
        raise ValueError(f"--cores has {text!r}, but needs pairs such as ml.c5.9xlarge=1.")
    return name, int(number)


if __name__ == "__main__":
    main()
