"""Run the example notebooks on AWS, on small instances, and write a page of results.

    make aws                                  shows the jobs and their cost, then asks
    .venv/bin/python -m scripts.aws --yes     does not ask
    .venv/bin/python -m scripts.aws --stop    stops the jobs of a run that was killed (kill -9), or
                                              that is still going on and then ends early

A run that ends in any other way stops its remaining jobs itself.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

import boto3
import nbformat
from botocore.exceptions import BotoCoreError, ClientError

from scripts import results, started_jobs
from scripts.demo import BUILD, ROOT, comparison, execute, reason, save
from shared import prices
from shared.monitoring.describe import instances_of

NOTEBOOKS = [  # hello world comes first: its preflight checks what the others need
    ROOT / "hello.world.sagemaker" / "helloworld-example.ipynb",
    ROOT / "pt.grpc.sagemaker" / "hetero-pytorch-mnist.ipynb",
    ROOT / "tf.data.service.sagemaker" / "hetero-tensorflow-restnet50.ipynb",
]
TARGET = "aws-small"
GRACE_SECONDS = 120  # between SIGTERM and SIGKILL, when a job has reached its time limit
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # SIGHUP: the terminal was closed
STOP = ".venv/bin/python -m scripts.aws --stop"
FIRST_CELL = """\
# Added by `make aws`: limits each job's time, and records its name before requesting it.
import sys
from pathlib import Path

sys.path.insert(0, {root!r})
from scripts import started_jobs

started_jobs.watch(Path({file!r}))"""


def main() -> int:
    """Run the command described in the module's docstring; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.aws", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument(
        "--stop", action="store_true", help="stop the jobs of a run, even one that was killed"
    )
    options = parser.parse_args()
    BUILD.mkdir(exist_ok=True)
    files = sorted(BUILD.glob("aws-jobs.*.txt"))
    if options.stop:
        return 0 if all([stop(file) for file in files]) else 1
    if files:
        sys.exit(f"The jobs of an earlier or parallel run may still be running. Stop them: {STOP}")

    region, account = whereabouts()
    role = execution_role()
    jobs = planned()
    print(f"On AWS, in {region}, account ********{account[-4:]}, one job after another:\n")
    print_plan(jobs, region)
    check_quotas(quotas_for(jobs), region)
    if not options.yes:
        ask()
    os.environ |= {"SAGEMAKER_ROLE": role, "SAGEMAKER_TARGET": TARGET}
    return run(BUILD / f"aws-jobs.{region}.txt", role)


def whereabouts() -> tuple[str, str]:
    """Return the region and the account number; exit if there is no region or no account."""
    try:
        session = boto3.Session()
        if not session.region_name:
            sys.exit("No AWS region is set: set one, such as AWS_DEFAULT_REGION=us-east-1.")
        return session.region_name, session.client("sts").get_caller_identity()["Account"]
    except (BotoCoreError, ClientError) as error:
        sys.exit(f"AWS login failed ({error}): set AWS_PROFILE, or log in with the AWS CLI.")


def execution_role() -> str:
    """Return the ARN of the role that the jobs get; exit if there is none."""
    role = os.environ.get("SAGEMAKER_ROLE", "")
    if not role:
        from sagemaker.core.helper.session_helper import get_execution_role  # takes seconds

        with contextlib.suppress(ValueError, BotoCoreError, ClientError):
            role = get_execution_role()
    if not re.match(r"arn:aws[\w-]*:iam::\d{12}:role/", role):
        sys.exit(
            "The jobs need a role, and your credentials do not belong to one: set SAGEMAKER_ROLE "
            "to the ARN of a SageMaker execution role."
        )
    return role


def planned() -> list[tuple[str, dict[str, int]]]:
    """List the jobs that the notebooks will start: name, and number of instances by type.

    tests/notebooks/requests/ contains the notebooks' requests; test_requests.py keeps it current.
    """
    jobs, folder = [], ROOT / "tests" / "notebooks" / "requests"
    for path in NOTEBOOKS:
        file = folder / f"{path.stem}.{TARGET}.json"
        if not file.exists():  # hello world sends the same requests for all targets
            file = folder / f"{path.stem}.aws.json"
        for request in json.loads(file.read_text()):
            name = request["TrainingJobName"].removesuffix("-<time>")
            jobs.append((name, instances_of(request["ResourceConfig"])))
    return jobs


def print_plan(jobs: list[tuple[str, dict[str, int]]], region: str) -> None:
    """Print the jobs and their maximum cost."""
    prices_of = results.price_region({kind for _, types in jobs for kind in types}, region)
    seconds, total = started_jobs.LIMIT_SECONDS + GRACE_SECONDS, 0.0
    for name, types in jobs:
        usd = sum(n * prices.price_per_hour(kind, prices_of) for kind, n in types.items())
        instances = " + ".join(f"{n} x {kind}" for kind, n in types.items())
        print(f"  {name:24}{instances:40}USD {usd:6.2f} per hour")
        total += usd * seconds / 3600
    print(
        f"\nEach job is stopped after {started_jobs.LIMIT_SECONDS // 60} minutes, and then has "
        f"{GRACE_SECONDS // 60} minutes to end.\nTogether they cost at most USD {total:.2f}, "
        f"at the prices of {prices_of} in shared/prices.csv, without storage and taxes.\n"
        "If AWS has no free instances for a job of the TensorFlow notebook, the notebook tries\n"
        "again, up to six times ten minutes apart. This can add an hour for each of these jobs.\n"
        "You do not pay while it waits.\n"
    )


def quotas_for(jobs: list[tuple[str, dict[str, int]]]) -> dict[str, int]:
    """Return how many instances each quota must allow; the jobs run one after another."""
    needed: dict[str, int] = {}
    for _, types in jobs:
        for kind, n in types.items():
            quota = f"{kind} for training job usage"
            needed[quota] = max(n, needed.get(quota, 0))
    return needed


def check_quotas(needed: Mapping[str, int], region: str) -> None:
    """Print the quotas that the jobs need and those of the account; exit if one is too low."""
    yours, unknown = {}, "not listed by Service Quotas"
    try:
        client = boto3.client("service-quotas", region_name=region)
        pages = client.get_paginator("list_service_quotas").paginate(ServiceCode="sagemaker")
        yours = {quota["QuotaName"]: quota["Value"] for page in pages for quota in page["Quotas"]}
    except (BotoCoreError, ClientError) as error:
        denied = "AccessDenied" in str(error)
        why = "needs servicequotas:ListServiceQuotas" if denied else type(error).__name__
        unknown = f"not checked: {why}"
    print("Quotas needed:")
    for name, count in needed.items():
        print(f"  {name}: {count} ({f'yours: {yours[name]:.0f}' if name in yours else unknown})")
    low = [f"{name}: {n}" for name, n in needed.items() if yours.get(name, n) < n]
    if low:
        where = f"in Service Quotas, Amazon SageMaker, {region}"
        sys.exit(f"Quotas too low: request {where}: {'; '.join(low)}.")


def ask() -> None:
    """Ask whether to start; exit unless the answer is yes."""
    if sys.stdin is None or not sys.stdin.isatty():
        sys.exit("Nothing was started: run this in a terminal, so that it can ask, or use --yes.")
    try:
        answer = input("\nStart? [y/N] ")
    except (EOFError, KeyboardInterrupt):
        answer = ""
    if answer.strip().lower() not in ("y", "yes"):
        sys.exit("Nothing was started.")


def run(file: Path, role: str) -> int:
    """Run the notebooks until one fails; return the exit status.

    The notebooks write the names of their jobs to `file`, which exists for as long as one of them
    may run. `--stop` takes the file away, so that the notebooks can start no more jobs.
    """
    executed, failure, path = {}, "", NOTEBOOKS[0]
    started = file.open("w+")  # stays readable after the file has been deleted
    say(f"If this process is killed (kill -9, power failure), stop its jobs yourself: {STOP}")
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, interrupt)
    try:
        for path in NOTEBOOKS:
            say(f"\n{path.relative_to(ROOT)}")
            notebook = nbformat.read(path, as_version=4)
            first = nbformat.v4.new_code_cell(FIRST_CELL.format(root=str(ROOT), file=str(file)))
            notebook.cells.insert(0, first)
            executed[path] = notebook
            execute(notebook, path.parent)
    except BaseException as error:  # whatever happens, stop the jobs
        ignore_signals()
        failure = f"{path.name} failed: {reason(error)}"
        say(f"\n{failure}")
    ignore_signals()
    stopped_all = stop(file)
    say("\nThe executed notebooks:")
    for path, notebook in executed.items():  # before writing the page, which calls AWS and may fail
        del notebook.cells[0]  # the first cell: it would refuse to start jobs after this run
        say(f"  {save(notebook, path)}")
    shown = {path.stem: "\n".join(comparison(notebook)) for path, notebook in executed.items()}
    region, role_name, names = region_of(file), role.rpartition("/")[2], started.read().split()
    page, failed = results.write(region, role_name, names, shown, failure)
    say(f"The page of results, which you can review and send as a pull request: {page}")
    return 1 if failed or not stopped_all else 0


def interrupt(number: int, _: object) -> None:
    """Raise KeyboardInterrupt, once."""
    ignore_signals()
    with contextlib.suppress(OSError):  # the terminal may be gone
        os.write(2, b"\nInterrupted. Stopping the jobs ...\n")
    raise KeyboardInterrupt(signal.Signals(number).name)


def ignore_signals() -> None:
    """Ignore signals from now on, so that stopping the jobs is not interrupted."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def stop(file: Path) -> bool:
    """Stop and print the jobs in `file` that still run; return False if one may still run.

    Renames `file` first, so that the notebooks can add no more jobs to it.
    """
    try:
        file = file.rename(file.with_name(f"aws-jobs.{region_of(file)}.stopped.txt"))
        names = file.read_text().split()
    except FileNotFoundError:  # `--stop` in another process has already stopped the jobs
        return True
    stopped, unsure = started_jobs.stop(names, region_of(file))
    for name in stopped:
        say(f"Stopped {name}.")
    for name in unsure:
        say(f"AWS does not answer, so {name} may still run: {STOP}")
    if not unsure:
        file.unlink(missing_ok=True)
    return not unsure


def region_of(file: Path) -> str:
    """Return the region from the file's name: aws-jobs.<region>.txt, or .stopped.txt."""
    return file.name.split(".")[1]


def say(text: str) -> None:
    """Print, unless the terminal is gone."""
    with contextlib.suppress(OSError):
        print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
