"""`make aws` on the local SageMaker instead of AWS: jobs run, fail, are interrupted, stopped.

The command and its notebooks' kernels are separate processes, as they are for a user. Their
requests to AWS go to an HTTP server in this process, which passes them to the local SageMaker.
test_aws_asks.py tests what the command does before it starts anything.
"""

import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import boto3
import nbformat
import pytest
from moto.core.exceptions import ServiceException
from moto.sagemaker.models import FakeTrainingJob
from moto.server import ThreadedMotoServer

from helpers.jobs import request
from helpers.make_aws import (
    ACCOUNT,
    BUCKET,
    Repository,
    is_training,
    job,
    service_quotas,
    status_of,
    wait,
)
from helpers.waiting import wait_until
from scripts import aws, started_jobs
from shared import prices
from shared.local_sagemaker import session

PRIVATE = f"arn:aws:iam::{ACCOUNT}:role/x s3://my-data/x https://my-data.s3.amazonaws.com/y"
STEPS = (
    "echo torch=2.12.0; echo 'sees   1 GPUs, CUDA 13.0'; "
    "for step in 10 20 30; do echo step=$step step_time_ms=12.5 data_wait_ms=1.5; done"
)


@pytest.fixture(scope="module")
def endpoint(local) -> Iterator[str]:
    """Serve the local SageMaker to other processes; yield its URL."""
    boto3.client("s3").create_bucket(Bucket=BUCKET)
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(autouse=True)
def quotas() -> Iterator[dict[str, float]]:
    with service_quotas() as quotas:
        yield quotas


@pytest.fixture(autouse=True)
def no_signal_is_ignored() -> Iterator[None]:
    """Make sure that the processes of a test get signals, even if it runs with nohup or `&`."""
    ignored = [n for n in aws.SIGNALS if signal.getsignal(n) == signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, lambda *_: None)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


@pytest.fixture
def repository(tmp_path: Path, endpoint: str, local) -> Repository:
    return Repository(tmp_path, endpoint, local.role)


HELLO, PYTORCH, TENSORFLOW = aws.NOTEBOOKS
# It prints a line: without one, reading the log after the job's end would wait for a minute.
UNTIL_STOPPED = "echo ready; trap 'exit 0' TERM; while true; do sleep 0.1; done"

SDK_JOB = """
import os
from sagemaker.core.training.configs import Compute, SourceCode
from sagemaker.train import ModelTrainer

ModelTrainer(
    base_job_name="aws-sdk",
    role=os.environ["SAGEMAKER_ROLE"],
    training_image="any:1",
    source_code=SourceCode(command="echo step=1/2 step_time_ms=5"),
    compute=Compute(instance_type="ml.m5.large", instance_count=1),
).train(wait=True, logs=False)
"""


def assert_private(page: str) -> None:
    for text in (ACCOUNT, "arn:aws", BUCKET, "my-data", "LocalSageMakerRole"):
        assert text not in page


def test_a_run_leaves_a_page(repository: Repository):
    group = {"VolumeSizeInGB": 1, "InstanceGroups": [
        {"InstanceGroupName": "data_group", "InstanceType": "ml.c6i.8xlarge", "InstanceCount": 1},
        {"InstanceGroupName": "dnn_group", "InstanceType": "ml.g5.xlarge", "InstanceCount": 1},
    ]}  # fmt: skip
    repository.notebook(HELLO, SDK_JOB, tag="any")
    repository.notebook(
        PYTORCH,
        job("aws-steps", STEPS, ResourceConfig=group),
        wait("aws-steps"),
        f"print('step time: predicted 12.0 ms, measured 12.5 ms'); print({PRIVATE!r})",
    )
    commit = "git init -q; git add scripts; git -c user.name=x -c user.email=x commit -qm x"
    subprocess.run(commit, shell=True, check=True, cwd=repository.folder)
    status, output = repository.run("--yes")
    assert status == 0, output
    assert "mnist-heterogeneous" in output
    assert "ml.g5.xlarge for training job usage: 1 (yours: 2)" in output
    # Three times the PyTorch notebook's jobs, each for 22 minutes.
    assert f"at most USD {3 * (4 * 1.41 + 3 * 1.632) * 22 / 60:.2f}" in output
    assert "again, up to six times ten minutes apart" in output  # as in the notebook
    assert ACCOUNT not in output

    client = boto3.client("sagemaker")
    [sdk] = client.list_training_jobs(NameContains="aws-sdk")["TrainingJobSummaries"]
    names = "aws-steps", sdk["TrainingJobName"]
    jobs = [client.describe_training_job(TrainingJobName=name) for name in names]
    assert [job["StoppingCondition"] for job in jobs] == [{"MaxRuntimeInSeconds": 20 * 60}] * 2
    seconds, more = (job["BillableTimeInSeconds"] for job in jobs)
    usd = seconds * (1.41 + 1.632) / 3600
    more_usd = more * prices.price_per_hour("ml.m5.large") / 3600
    instances = "1 x ml.g5.xlarge + 1 x ml.c6i.8xlarge"
    head = subprocess.check_output(["git", "describe", "--always"], cwd=repository.folder)
    page = repository.page()
    for text in (
        f"| aws-steps | Completed | {instances} | {seconds} | {usd:.4f} | 12.5 | 1.5 |",
        f"| {names[1]} | Completed | 1 x ml.m5.large | {more} | {more_usd:.4f} | - | - |",
        f"Together USD {usd + more_usd:.4f}, at prices of us-east-1",
        "| aws-steps | pytorch:2.12-test | CUDA 13.0, torch 2.12.0 |",
        "step time: predicted 12.0 ms, measured 12.5 ms",
        f"Commit {head.decode().strip()}, SageMaker SDK 3.",
        "All notebooks ran to the end.",
    ):
        assert text in page
    assert_private(page)
    assert not list(repository.folder.glob("build/aws-jobs.*"))


def test_a_job_that_fails_ends_the_run(repository: Repository):
    """Other jobs are stopped, no notebook follows, and the page has the reason, without names."""
    repository.notebook(
        PYTORCH,
        job("aws-other", "sleep 100"),
        job("aws-bad", f"echo ready; echo 'no {PRIVATE}' > /opt/ml/output/failure; exit 3"),
        wait("aws-bad"),
    )
    repository.notebook(TENSORFLOW, "open('was-here', 'w');")
    status, output = repository.run("--yes")
    assert status == 1 and "Stopped aws-other." in output, output
    assert status_of("aws-other") in ("Stopping", "Stopped")
    assert not list(repository.folder.rglob("was-here"))
    page = repository.page()
    assert "Ended early" in page and "| aws-bad | Failed |" in page and "| aws-other | Stop" in page
    assert "no <ARN> s3://<bucket>/x <URL>" in page
    assert_private(page)


@pytest.mark.thorough
def test_a_blip_or_a_closed_terminal_under_nohup_stops_no_job(repository: Repository):
    """If AWS throttles, or the login expires, the run continues afterwards."""
    errors = [("ThrottlingException", "Rate exceeded"), ("ExpiredTokenException", "is expired")]
    find_job = session.find_job

    def find_or_fail(*asked) -> FakeTrainingJob:
        if errors:
            raise ServiceException(*errors.pop(0))
        return find_job(*asked)

    repository.notebook(HELLO, job("aws-blip", f"{STEPS}; sleep 6"), wait("aws-blip"))
    process = repository.start("--yes", before=["nohup"])
    wait_until(lambda: is_training("aws-blip"), seconds=60)
    with mock.patch.object(session, "find_job", find_or_fail):
        wait_until(lambda: not errors)
        process.send_signal(signal.SIGHUP)
        output = process.communicate(timeout=60)[0]
    assert process.returncode == 0 and "Stopped" not in output, output
    assert "| aws-blip | Completed |" in repository.page()


def test_ctrl_c_stops_also_what_is_started_meanwhile(repository: Repository):
    """Press Ctrl-C several times, while the notebook continues to start jobs."""
    names = [f"aws-one-of-many-{n}" for n in range(6)]
    stubborn = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    starts = [job(name, "sleep 100") + "\ntime.sleep(0.4)\n" for name in names]
    repository.notebook(HELLO, stubborn + "".join(starts))
    process = repository.start("--yes")
    wait_until(lambda: is_training(names[0]), seconds=60)
    for _ in range(3):
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
    output = process.communicate(timeout=60)[0]
    started = [name for name in names if status_of(name)]
    page = repository.page()
    assert process.returncode == 1 and len(started) > 1, output
    for name in started:
        assert f"Stopped {name}." in output and f"| {name} | Stop" in page
        assert status_of(name) in ("Stopping", "Stopped")
    assert "KeyboardInterrupt: SIGINT" in page


@pytest.mark.thorough
def test_closing_the_terminal_stops_the_jobs(repository: Repository):
    """Use a real terminal, in which somebody has said yes."""
    repository.notebook(HELLO, job("aws-closed", "sleep 100"), wait("aws-closed"))
    ours, theirs = pty.openpty()
    files = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    process = repository.start(before=["setsid", "--ctty"], **files)
    os.close(theirs)
    text = b""
    while b"Start? [y/N]" not in text:
        text += os.read(ours, 1000)
    os.write(ours, b"y\n")
    wait_until(lambda: is_training("aws-closed"), seconds=60)
    os.close(ours)
    assert process.wait(timeout=60) == 1
    assert status_of("aws-closed") in ("Stopping", "Stopped")
    assert "KeyboardInterrupt: SIGHUP" in repository.page()


@pytest.mark.thorough
def test_a_dead_kernels_jobs_are_stopped(repository: Repository):
    death = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    repository.notebook(HELLO, job("aws-orphan", "sleep 100"), death)
    status, output = repository.run("--yes")
    assert status == 1 and "its kernel died" in output, output
    assert status_of("aws-orphan") in ("Stopping", "Stopped")


def test_what_a_killed_run_leaves_can_be_stopped(repository: Repository):
    repository.notebook(HELLO, job("aws-left", "sleep 100"), wait("aws-left"))
    process = repository.start("--yes")
    wait_until(lambda: is_training("aws-left"), seconds=60)
    process.kill()
    output = process.communicate(timeout=60)[0]
    assert f"stop its jobs yourself: {aws.STOP}" in output
    assert status_of("aws-left") == "InProgress"
    assert repository.run("--stop") == (0, "Stopped aws-left.\n")
    assert status_of("aws-left") in ("Stopping", "Stopped")


@pytest.mark.thorough
@pytest.mark.parametrize("goes_on", [True, False], ids=["a job follows", "none follows"])
def test_a_run_that_goes_on_can_be_stopped(goes_on: bool, repository: Repository):
    """The run starts no more jobs, and still writes its page, which names the jobs so far.

    The first job is cut off by its own limit, which is a failure, too.
    """
    cut, first, second = (f"aws-{name}-{goes_on}" for name in ("cut", "first", "second"))
    jobs = [job(cut, UNTIL_STOPPED, seconds=2), wait(cut), job(first, UNTIL_STOPPED), wait(first)]
    following = [job(second, "echo ready"), wait(second)] if goes_on else []
    repository.notebook(HELLO, *jobs, *following)
    process = repository.start("--yes")
    wait_until(lambda: is_training(first), seconds=60)
    assert repository.run("--stop") == (0, f"Stopped {first}.\n")
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 1, output
    assert status_of(second) == ""
    page = repository.page()
    assert f"{cut}: Stopped, MaxRuntimeExceeded" in page and f"{first}: Stopped" in page
    assert (f"{second} was not started: this run has been stopped" in page) == goes_on
    assert ("All notebooks ran to the end; see Failures." in page) != goes_on
    assert repository.executed(HELLO).exists()
    assert not list(repository.folder.glob("build/aws-jobs.*"))


@pytest.mark.thorough
def test_the_notebooks_are_kept_when_the_page_cannot_be_written(repository: Repository):
    (repository.folder / "results").rmdir()
    repository.notebook(HELLO, "print('what it has cost to find out')")
    status, output = repository.run("--yes")
    copy = repository.executed(HELLO)
    assert status == 1 and f"{copy.relative_to(repository.folder)}\n" in output
    # Without the cell that `make aws` has added: it would refuse to start a job again.
    [cell] = nbformat.read(copy, as_version=4).cells
    assert "to find out" in cell.outputs[0].text


def test_a_job_whose_request_is_on_its_way_is_stopped_too(endpoint: str):
    asked = request("aws-late", OutputDataConfig={"S3OutputPath": f"s3://{BUCKET}/output"})
    asked["AlgorithmSpecification"]["ContainerEntrypoint"] = ["sleep", "100"]
    client = boto3.client("sagemaker")
    timer = threading.Timer(1.5, lambda: client.create_training_job(**asked))
    timer.start()
    stopped, unsure = started_jobs.stop(["aws-late", "aws-never"], "us-east-1", patience_s=4)
    timer.join()
    assert (stopped, unsure) == (["aws-late"], [])
    assert status_of("aws-late") in ("Stopping", "Stopped")


def test_a_job_is_not_forgotten_while_aws_does_not_answer(repository: Repository):
    repository.environment["AWS_ENDPOINT_URL"] = "http://127.0.0.1:9"
    code = "from scripts import started_jobs; print(started_jobs.stop(['a'], 'us-east-1', 1))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=repository.environment,
        cwd=repository.folder,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "([], ['a'])\n", done.stderr
