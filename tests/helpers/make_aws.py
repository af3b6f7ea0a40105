"""Run `make aws` in a copy of the repository, with a test's own notebooks and jobs."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import boto3
import nbformat
from moto.core.exceptions import JsonRESTError
from moto.core.responses import ActionResult
from moto.servicequotas.responses import ServiceQuotasResponse

from helpers.jobs import request
from helpers.pages import ROOT
from scripts import aws

ACCOUNT, BUCKET = "123456789012", "outputs-of-jobs"
# Some of the SDK's clients ignore AWS_ENDPOINT_URL and use AWS's own addresses.
NOTHING_GOES_OUT = """
import os, re
import botocore.handlers

def to_the_server(request, **_):
    request.url = re.sub(r"https?://[^/]+", os.environ["AWS_ENDPOINT_URL"], request.url)

botocore.handlers.BUILTIN_HANDLERS.append(("before-send", to_the_server))
"""


@contextmanager
def service_quotas() -> Iterator[dict[str, float]]:
    """Mock Service Quotas, which moto does not have; if the quotas are empty, it denies access."""
    yours = {f"ml.{kind} for training job usage": 2.0 for kind in ("g5.xlarge", "c6i.8xlarge")}

    def answer(_: ServiceQuotasResponse) -> ActionResult:
        if not yours:
            raise JsonRESTError("AccessDeniedException", "User: arn:aws:iam::... is not authorized")
        return ActionResult({"Quotas": [{"QuotaName": k, "Value": v} for k, v in yours.items()]})

    with mock.patch.object(ServiceQuotasResponse, "list_service_quotas", answer, create=True):
        yield yours


class Repository:
    """A copy of the repository with a test's own notebooks, in which tests run `make aws`."""

    def __init__(self, folder: Path, endpoint: str, role: str):
        self.folder = folder
        (folder / "scripts").mkdir()
        for script in (ROOT / "scripts").glob("*.py"):
            shutil.copy(script, folder / "scripts")
        (folder / "shared").symlink_to(ROOT / "shared")
        (folder / "results").mkdir()
        requests = Path("tests", "notebooks", "requests")
        (folder / requests).mkdir(parents=True)
        for path in aws.NOTEBOOKS:
            stored = ROOT / requests / "hetero-pytorch-mnist.aws.json"
            shutil.copy(stored, folder / requests / f"{path.stem}.aws.json")
            self.notebook(path)
        (folder / "sitecustomize.py").write_text(NOTHING_GOES_OUT)
        others = ("AWS_", "IPYTHONDIR")  # IPython's start-up file is for the real notebooks only
        aws_less = {k: v for k, v in os.environ.items() if not k.startswith(others)}
        self.environment = aws_less | {
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_MAX_ATTEMPTS": "1",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": endpoint,
            "SAGEMAKER_ROLE": role,
            "PYTHONPATH": str(folder),
            "XDG_CACHE_HOME": str(folder),  # hides the user's own prices
        }

    def notebook(self, path: Path, *cells: str, tag: str = "comparison") -> None:
        """Write a notebook with these cells in place of the repository's notebook at `path`."""
        there = self.folder / path.relative_to(ROOT)
        there.parent.mkdir(exist_ok=True)
        code = [nbformat.v4.new_code_cell(c, metadata={"tags": [tag]}) for c in cells]
        nbformat.write(nbformat.v4.new_notebook(cells=code), there)

    def start(self, *options: str, before: Sequence[str] = (), **settings) -> subprocess.Popen:
        """Start `make aws`."""
        return subprocess.Popen(
            [*before, sys.executable, "-m", "scripts.aws", *options],
            **{"cwd": self.folder, "env": self.environment, "stdin": subprocess.DEVNULL}
            | {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            | settings,
        )

    def run(self, *options: str) -> tuple[int, str]:
        """Run `make aws` to its end; return its exit status and its output."""
        process = self.start(*options)
        output = process.communicate(timeout=200)[0]
        return process.returncode, output

    def executed(self, path: Path) -> Path:
        """Return the path of the executed copy of the repository's notebook at `path`."""
        return self.folder / path.relative_to(ROOT).with_name(f"executed-{path.name}")

    def page(self) -> str:
        """Return the text of the page of results."""
        [page] = (self.folder / "results").iterdir()
        return page.read_text()


def job(name: str, script: str, seconds: int = 3600, **changes) -> str:
    """Return the code of a notebook cell that starts a job which runs a shell script."""
    asked = request(name, StoppingCondition={"MaxRuntimeInSeconds": seconds}, **changes)
    asked["OutputDataConfig"] = {"S3OutputPath": f"s3://{BUCKET}/output"}
    asked["AlgorithmSpecification"] |= {
        "TrainingImage": f"{ACCOUNT}.dkr.ecr.us-east-1.amazonaws.com/pytorch:2.12-test",
        "ContainerEntrypoint": ["bash", "-c", script],
    }
    return f"import boto3\nboto3.client('sagemaker').create_training_job(**{asked!r});"


def wait(name: str) -> str:
    return f"from shared import monitoring\nmonitoring.wait({name!r});"


def status_of(name: str) -> str:
    """Return the job's status on the local SageMaker; "" if there is no such job."""
    client = boto3.client("sagemaker")
    jobs = client.list_training_jobs(NameContains=name)["TrainingJobSummaries"]
    return next((j["TrainingJobStatus"] for j in jobs if j["TrainingJobName"] == name), "")


def is_training(name: str) -> bool:
    """Whether the job's hosts have started."""
    if not status_of(name):
        return False
    job = boto3.client("sagemaker").describe_training_job(TrainingJobName=name)
    return job["SecondaryStatus"] == "Training"
