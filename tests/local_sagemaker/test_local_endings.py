"""A job on the local SageMaker ends by SageMaker's rules, and leaves nothing behind."""

import os
import threading
import time

import boto3
import botocore.exceptions
import psutil
import pytest

from helpers.jobs import READ_CONFIG, TWO_GROUPS, Jobs, archive, processes_naming, request
from helpers.waiting import wait_until
from shared.local_sagemaker.job import Job

pytestmark = pytest.mark.usefixtures("nothing_is_left")
BUCKET = "endings-of-jobs"


@pytest.mark.parametrize("group", ["data_group", "dnn_group"])
def test_a_host_that_fails_fails_the_job_and_ends_the_others(jobs: Jobs, group: str):
    name = jobs.create(
        {
            "train.py": READ_CONFIG
            + """
import signal, sys, time
if group == os.environ["FAILS"]:
    time.sleep(1)
    pathlib.Path(os.environ["SM_OUTPUT_FAILURE"]).write_text("no luck today")
    sys.exit(3)
def ended(*_):
    print("told to end"); sys.exit(0)
signal.signal(signal.SIGTERM, ended)
time.sleep(100)
"""
        },
        "exec python train.py",
        TWO_GROUPS,
        environment={"FAILS": group},
    )
    job = jobs.wait(name, seconds=30)
    assert (job["TrainingJobStatus"], job["SecondaryStatus"]) == ("Failed", "Failed")
    assert job["FailureReason"] == "AlgorithmError: no luck today, exit code: 3"
    assert "told to end" in jobs.log(name)


def test_stop(jobs: Jobs):
    name = jobs.create(
        {
            "train.py": "import os, signal, sys, time\n"
            "def ended(*_):\n"
            "    open(os.environ['SM_MODEL_DIR'] + '/late.txt', 'w').write('saved')\n"
            "    sys.exit(1)\n"
            "signal.signal(signal.SIGTERM, ended)\n"
            "print('ready')\n"
            "time.sleep(100)"
        },
        "exec python train.py",
    )
    jobs.wait_for_log(name, "ready")
    client = boto3.client("sagemaker")
    client.stop_training_job(TrainingJobName=name)
    assert client.describe_training_job(TrainingJobName=name)["TrainingJobStatus"] == "Stopping"
    job = jobs.wait(name, seconds=20)
    assert (job["TrainingJobStatus"], job["SecondaryStatus"]) == ("Stopped", "Stopped")
    assert archive(job["ModelArtifacts"]["S3ModelArtifacts"]) == {"late.txt": b"saved"}
    with pytest.raises(botocore.exceptions.ClientError, match="in status Stopped"):
        client.stop_training_job(TrainingJobName=name)


def test_a_job_can_be_stopped_as_soon_as_it_is_known(jobs: Jobs, monkeypatch: pytest.MonkeyPatch):
    """One thread creates it, and another one stops it, as `make aws` does."""

    def slow(*args) -> Job:
        time.sleep(0.5)
        return Job(*args)

    monkeypatch.setattr("shared.local_sagemaker.session.Job", slow)
    client, asked = boto3.client("sagemaker"), request("soon")
    asked["OutputDataConfig"]["S3OutputPath"] = f"s3://{BUCKET}/output"
    asked["AlgorithmSpecification"]["ContainerEntrypoint"] = ["sleep", "100"]
    boto3.client("s3").create_bucket(Bucket=BUCKET)
    creating = threading.Thread(target=lambda: client.create_training_job(**asked))
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
    name = jobs.create(
        {"train.py": "import time\nprint('ready')\ntime.sleep(3)\nprint('never told')"},
        "python train.py; true",
    )
    jobs.wait_for_log(name, "ready")
    boto3.client("sagemaker").stop_training_job(TrainingJobName=name)
    assert jobs.wait(name, seconds=20)["TrainingJobStatus"] == "Stopped"
    assert "never told" in jobs.log(name)


def test_max_runtime(jobs: Jobs):
    started = time.monotonic()
    job = jobs.run(
        {
            "train.py": "import signal, sys, time\n"
            "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\ntime.sleep(100)"
        },
        "exec python train.py",
        max_runtime_seconds=3,
    )
    assert (job["TrainingJobStatus"], job["SecondaryStatus"]) == ("Stopped", "MaxRuntimeExceeded")
    assert 3 <= time.monotonic() - started < 15


def test_what_a_host_leaves_running_ends_with_it(jobs: Jobs):
    """This includes a daemon in its own session that has cleared its environment."""
    mark = f"sleep 98{os.getpid()}"
    job = jobs.run(
        {"train.py": f"import os\nos.system('setsid {mark} & env -i setsid {mark} &')"},
        "exec python train.py",
    )
    assert job["TrainingJobStatus"] == "Completed"
    time.sleep(0.5)
    assert not processes_naming(mark.replace(" ", "\0"))


def test_a_host_that_never_stops_printing_can_be_stopped(jobs: Jobs):
    script = (
        "import os, signal\nsignal.signal(signal.SIGTERM, lambda *_: os._exit(0))\n"
        "while True: os.write(1, b'x' * 50_000 + b'\\n')"
    )
    name = jobs.create({"train.py": script}, "exec python train.py", max_runtime_seconds=2)
    started = time.monotonic()
    assert jobs.wait(name, seconds=30)["SecondaryStatus"] == "MaxRuntimeExceeded"
    assert time.monotonic() - started < 15


def test_a_job_whose_supervisor_is_killed_fails_and_leaves_nothing(jobs: Jobs):
    name = jobs.create(
        {"train.py": "import time; print('ready'); time.sleep(100)"},
        "exec python train.py",
        TWO_GROUPS,
    )
    jobs.wait_for_log(name, "ready")
    children = [p for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE]
    (supervisor,) = (child for child in children if "supervisor.py" in " ".join(child.cmdline()))
    supervisor.kill()
    job = jobs.wait(name, seconds=20)
    assert job["TrainingJobStatus"] == "Failed"
    assert job["FailureReason"].endswith("the process that runs the hosts ended: it was killed")
