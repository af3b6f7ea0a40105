"""A job on the local SageMaker ends by SageMaker's rules, and leaves nothing behind."""

import threading
import time

import boto3
import botocore.exceptions
import psutil
import pytest

from helpers.jobs import READ_CONFIG, TWO_GROUPS, Jobs, archive
from helpers.waiting import wait_until
from shared.local_sagemaker.job import Job

pytestmark = pytest.mark.usefixtures("nothing_is_left")
FAILS = """
import signal, sys, time
for name in ("SM_MODEL_DIR", "SM_OUTPUT_DATA_DIR"):
    folder = pathlib.Path(os.environ[name], "deep")
    folder.mkdir()
    (folder / "x.txt").write_text(name)
if group == "dnn_group":
    time.sleep(1)
    pathlib.Path(os.environ["SM_OUTPUT_FAILURE"]).write_text("no luck today")
    sys.exit(3)
def ended(*_):
    print("told to end")
    sys.exit(0)
signal.signal(signal.SIGTERM, ended)
time.sleep(100)
"""


def test_a_host_that_fails_fails_the_job_and_ends_the_others(jobs: Jobs):
    """As on AWS, the model and output are uploaded: github.com/aws/sagemaker-python-sdk/pull/746"""
    name = jobs.create({"train.py": READ_CONFIG + FAILS}, "exec python train.py", TWO_GROUPS)
    job = jobs.wait(name, seconds=30)
    assert (job["TrainingJobStatus"], job["SecondaryStatus"]) == ("Failed", "Failed")
    assert job["FailureReason"] == "AlgorithmError: no luck today, exit code: 3"
    assert "told to end" in jobs.log(name)
    steps = [t["Status"] for t in job["SecondaryStatusTransitions"]]
    assert steps == ["Starting", "Downloading", "Training", "Uploading", "Failed"]
    model = job["ModelArtifacts"]["S3ModelArtifacts"]
    assert archive(model) == {"deep/x.txt": b"SM_MODEL_DIR"}
    output = model.replace("model.tar.gz", "output.tar.gz")
    assert archive(output) == {"deep/x.txt": b"SM_OUTPUT_DATA_DIR"}


def test_stop(jobs: Jobs):
    script = "trap 'echo saved >/opt/ml/model/late.txt; exit 1' TERM; echo ready; sleep 100 & wait"
    jobs.ask("stop", "sh", "-c", script)
    jobs.wait_for_log("stop", "ready")
    client = boto3.client("sagemaker")
    client.stop_training_job(TrainingJobName="stop")
    assert client.describe_training_job(TrainingJobName="stop")["TrainingJobStatus"] == "Stopping"
    job = jobs.wait("stop", seconds=20)
    assert (job["TrainingJobStatus"], job["SecondaryStatus"]) == ("Stopped", "Stopped")
    assert archive(job["ModelArtifacts"]["S3ModelArtifacts"]) == {"late.txt": b"saved\n"}
    with pytest.raises(botocore.exceptions.ClientError, match="in status Stopped"):
        client.stop_training_job(TrainingJobName="stop")


def test_a_job_can_be_stopped_as_soon_as_it_is_known(jobs: Jobs, monkeypatch: pytest.MonkeyPatch):
    """One thread creates it, and another one stops it, as `make aws` does."""

    def slow(*args) -> Job:
        time.sleep(0.5)
        return Job(*args)

    monkeypatch.setattr("shared.local_sagemaker.session.Job", slow)
    client = boto3.client("sagemaker")
    creating = threading.Thread(target=lambda: jobs.ask("soon", "sleep", "100"))
    creating.start()

    def is_stopped() -> bool:
        try:
            client.stop_training_job(TrainingJobName="soon")
        except botocore.exceptions.ClientError as error:
            assert "not found" in str(error)  # it is not known yet
            return False
        return True

    wait_until(is_stopped)
    creating.join()
    assert jobs.wait("soon")["TrainingJobStatus"] == "Stopped"


def test_sigterm_is_for_pid_1_that_handles_it(jobs: Jobs):
    """Without `exec`, SDK v3 runs the script in a shell, which does not forward SIGTERM to it."""
    script = "import time\nprint('ready')\ntime.sleep(3)\nprint('never told')"
    name = jobs.create({"train.py": script}, "python train.py; true")
    jobs.wait_for_log(name, "ready")
    boto3.client("sagemaker").stop_training_job(TrainingJobName=name)
    assert jobs.wait(name, seconds=20)["TrainingJobStatus"] == "Stopped"
    assert "never told" in jobs.log(name)


def test_max_runtime_ends_a_host_that_never_stops_printing(jobs: Jobs):
    script = (  # in one line, because AWS refuses others
        "import os, signal; signal.signal(signal.SIGTERM, lambda *_: os._exit(0)); "
        "all(os.write(1, b'x' * 50_000 + b'\\n') for _ in iter(int, 1))"
    )
    jobs.ask("prints", "python", "-c", script, StoppingCondition={"MaxRuntimeInSeconds": 2})
    started = time.monotonic()
    job = jobs.wait("prints", seconds=30)
    assert (job["TrainingJobStatus"], job["SecondaryStatus"]) == ("Stopped", "MaxRuntimeExceeded")
    assert 2 <= time.monotonic() - started < 15


def test_a_job_whose_supervisor_is_killed_fails_and_leaves_nothing(jobs: Jobs):
    jobs.ask("killed", "sh", "-c", "echo ready; sleep 100; true")
    jobs.wait_for_log("killed", "ready")
    children = [p for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE]
    (supervisor,) = (child for child in children if "supervisor.py" in " ".join(child.cmdline()))
    supervisor.kill()
    job = jobs.wait("killed", seconds=20)
    assert job["TrainingJobStatus"] == "Failed"
    assert job["FailureReason"].endswith("the process that runs the hosts ended: it was killed")
