"""Training jobs on this machine, through the SageMaker SDK, for tests."""

import functools
import io
import itertools
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace

import boto3
from sagemaker.core.helper import session_helper
from sagemaker.core.training.configs import Compute, InstanceGroup, SourceCode, StoppingCondition
from sagemaker.train import ModelTrainer

from helpers.pages import ROOT
from shared.monitoring.log import GrowingLog

# Without the cache, the SDK reads botocore's table of all endpoints five times for each job.
session_helper.botocore_resolver = functools.cache(session_helper.botocore_resolver)
TWO_GROUPS = {"data_group": ("ml.c5.9xlarge", 1), "dnn_group": ("ml.g5.2xlarge", 1)}
# The beginning of a job's script: it reads the host's instance group.
READ_CONFIG = """
import json, os, pathlib
path = pathlib.Path(os.environ["SM_INPUT_CONFIG_DIR"], "resourceconfig.json")
config = json.loads(path.read_text())
group = config["current_group_name"]
"""
KERNEL = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background ignores it
sys.path[:0] = [{root!r}, {tests!r}]
from pathlib import Path
from shared import local_sagemaker
session = local_sagemaker.start()
from helpers.jobs import Jobs
jobs = Jobs(session.role, Path(sys.argv[1]))
"""
_numbers = itertools.count(1)


def texts_in(code: Path, *folders: str) -> dict[str, str]:
    """Return the texts of all files in `code`, or in these folders of it, by path, except .pyc."""
    paths = [path for folder in folders or [""] for path in (code / folder).rglob("*")]
    files = [path for path in paths if path.is_file() and path.suffix != ".pyc"]
    return {str(path.relative_to(code)): path.read_text() for path in files}


class Jobs:
    """Creates training jobs through the SageMaker SDK, from files given as text or bytes."""

    def __init__(self, role: str, folder: Path):
        self.role, self.folder = role, folder
        # Creates each client only once: tests that wait make many calls.
        self.aws = SimpleNamespace(client=functools.cache(boto3.client))

    def create(
        self, files: dict[str, str | bytes], command: str, groups: dict | None = None, **settings
    ) -> str:
        """Start a job and return its name.

        command: a command line, or the name of one of the files, which becomes the entry script.
        groups: {name: (instance type, count)}.
        """
        code = self.folder / f"code-{next(_numbers)}"
        code.mkdir()
        for name, text in files.items():
            (code / name).parent.mkdir(exist_ok=True)
            (code / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        if groups is None:
            compute = Compute(instance_type="ml.c5.xlarge", instance_count=1)
        else:
            compute = Compute(
                instance_groups=[
                    InstanceGroup(instance_group_name=name, instance_type=kind, instance_count=n)
                    for name, (kind, n) in groups.items()
                ]
            )
        seconds = settings.pop("max_runtime_seconds", 120)
        image = settings.pop("image", "123456789012.dkr.ecr.us-east-1.amazonaws.com/any:1")
        requirements = "requirements.txt" if "requirements.txt" in files else None
        trainer = ModelTrainer(
            role=self.role,
            training_image=image,
            # The SDK adds the time in seconds; other processes may start jobs in the same second.
            base_job_name=f"test-{os.getpid()}-{next(_numbers)}",
            source_code=SourceCode(
                source_dir=str(code),
                requirements=requirements,
                **{"entry_script" if command in files else "command": command},
            ),
            compute=compute,
            stopping_condition=StoppingCondition(max_runtime_in_seconds=seconds),
            **settings,
        )
        trainer.train(wait=False, logs=False)
        return trainer._latest_training_job.training_job_name

    def ask(self, name: str, *command: str, bucket: str = "any", **changes) -> str:
        """Start the job of a `request` with boto3 alone, and return its name."""
        self.aws.client("s3").create_bucket(Bucket=bucket)
        asked = request(name, *command, bucket=bucket, **changes)
        self.aws.client("sagemaker").create_training_job(**asked)
        return name

    def describe(self, name: str) -> dict:
        """Return DescribeTrainingJob's response."""
        return self.aws.client("sagemaker").describe_training_job(TrainingJobName=name)

    def wait(self, name: str, seconds: float = 120) -> dict:
        """Wait for the job's end and return DescribeTrainingJob's response."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            job = self.describe(name)
            if job["TrainingJobStatus"] not in ("InProgress", "Stopping"):
                return job
            time.sleep(0.25)
        raise AssertionError(f"{name} is {job['TrainingJobStatus']} after {seconds} s")

    def run(self, *args, **settings) -> dict:
        """Call `create`, then `wait`."""
        return self.wait(self.create(*args, **settings))

    def wait_for_log(self, name: str, text: str, seconds: float = 60, times: int = 1) -> None:
        """Wait until `text` is in this many lines of the log; AssertionError if it never is."""
        deadline, status = time.monotonic() + seconds, "InProgress"
        log = GrowingLog(name)
        while time.monotonic() < deadline and status in ("InProgress", "Stopping"):
            status = self.describe(name)["TrainingJobStatus"]
            if sum(text in line.text for line in log.look()) >= times:
                return
            time.sleep(0.25)
        raise AssertionError(f"{text!r} is not in the log of {name}: {self.log(name)[-20:]}")

    def log(self, name: str) -> list[str]:
        """Return all lines of all hosts so far."""
        return [line.text for line in GrowingLog(name).look()]


def start_kernel(body: str, folder: Path, **environment: str) -> subprocess.Popen:
    """Run `body` in a separate process, as a user's notebook kernel would."""
    text = KERNEL.format(root=str(ROOT), tests=str(ROOT / "tests")) + body
    return subprocess.Popen(
        [sys.executable, "-c", text, str(folder)],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def processes_naming(text: str) -> list[int]:
    """List the processes whose command line or environment has `text`."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            content = (path / "cmdline").read_bytes() + (path / "environ").read_bytes()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if text.encode() in content:
            found.append(int(path.name))
    return found


def upload(folder: Path, uri: str) -> str:
    """Upload a folder's files to S3, and create the bucket if needed; return the URI."""
    bucket, prefix = uri.removeprefix("s3://").split("/", 1)
    s3 = boto3.client("s3")
    s3.create_bucket(Bucket=bucket)
    for path in filter(Path.is_file, folder.iterdir()):
        s3.upload_file(str(path), bucket, f"{prefix}/{path.name}")
    return uri


def read_s3(uri: str) -> bytes:
    """Return the content of an S3 object."""
    bucket, key = uri.removeprefix("s3://").split("/", 1)
    return boto3.client("s3").get_object(Bucket=bucket, Key=key)["Body"].read()


def archive(uri: str) -> dict[str, bytes]:
    """Return the files in a tar archive on S3, such as model.tar.gz."""
    with tarfile.open(fileobj=io.BytesIO(read_s3(uri))) as tar:
        return {m.name: tar.extractfile(m).read() for m in tar.getmembers()}


def request(
    name: str, *command: str, algorithm: dict | None = None, bucket: str = "any", **changes
) -> dict:
    """Return a valid CreateTrainingJob request that runs a command, with changes.

    algorithm: changes of its AlgorithmSpecification. bucket: for the output.
    """
    specification = {
        "TrainingImage": "any",
        "TrainingInputMode": "File",
        "ContainerEntrypoint": [*command] or ["/bin/true"],
    }
    return {
        "TrainingJobName": name,
        "RoleArn": "arn:aws:iam::123456789012:role/any",
        "AlgorithmSpecification": {**specification, **(algorithm or {})},
        "OutputDataConfig": {"S3OutputPath": f"s3://{bucket}/output"},
        "ResourceConfig": {"InstanceType": "ml.m5.large", "InstanceCount": 1, "VolumeSizeInGB": 1},
        "StoppingCondition": {"MaxRuntimeInSeconds": 60},
        **changes,
    }


def group(name: str = "a", kind: str = "ml.m5.large", count: int = 1) -> dict:
    """Return an entry of ResourceConfig.InstanceGroups."""
    return {"InstanceGroupName": name, "InstanceType": kind, "InstanceCount": count}
