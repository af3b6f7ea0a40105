"""The lines that the PyTorch example's README tells people to copy, run as they stand."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import boto3
import pytest

from jobs import Jobs

pytestmark = pytest.mark.usefixtures("nothing_is_left")
EXAMPLE = Path(__file__).parent.parent / "pt.grpc.sagemaker"
LAUNCHER, V3, V2, *LOADER = re.findall(
    r"```python\n(.*?)```", (EXAMPLE / "README.md").read_text(), re.S
)
SDK_V2 = Path(sys.prefix) / "sdk-v2"  # put there by scripts/setup.sh
TOY_SCRIPTS = {
    "serve.py": "import time\nprint('serving', flush=True)\ntime.sleep(100)",
    "train.py": "import sys\nprint('training with', *sys.argv[1:])",
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A reader's project, the working directory: code/ with two scripts and what README says."""
    code = tmp_path / "code"
    code.mkdir()
    for name in ("hetero.py", "pulse.py"):
        (code / name).write_text((EXAMPLE / "code" / name).read_text())
    (code / "launcher.py").write_text(LAUNCHER)
    for name, text in TOY_SCRIPTS.items():
        (code / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_what_is_to_be_copied_is_short():
    for job in (V3, V2):
        assert count_lines(LAUNCHER, job) < 30


def count_lines(*texts: str) -> int:
    return len([line for line in "".join(texts).splitlines() if line.strip()])


def test_lines_for_the_loader(jobs: Jobs):
    """In a job with a Dataset and a training step of somebody's own."""
    assert len(LOADER) == 3 and count_lines(*LOADER) < 30
    files = {path.name: path.read_text() for path in (EXAMPLE / "code").iterdir()}
    needed = ["hetero.py", "pulse.py", "batches.py", "wire.py", "dataset_feed.proto"]
    needed += ["feed_client.py", "feed_server.py"]
    copied = {name: files[name] for name in needed}
    for text in LOADER:
        copied[re.match(r"# code/(\w+\.py)\n", text)[1]] = text
    copied["my_data.py"] = (
        "class MyDataset(list):\n    def __init__(self): super().__init__(range(640))"
    )
    copied["my_training.py"] = "def train_step(batch): print('sum', batch.sum().item())"
    groups = {"data_group": ("ml.c5.xlarge", 2), "dnn_group": ("ml.m5.xlarge", 1)}
    command, environment = "exec python launcher.py", {"HETERO_TOKEN": "a secret"}
    job = jobs.run(copied, command, groups, environment=environment)
    assert job["TrainingJobStatus"] == "Completed", job["FailureReason"]
    log = jobs.log(job["TrainingJobName"])
    sums = [int(line.split()[1]) for line in log if line.startswith("sum")]
    assert len(sums) == 30 and sum(sums) == 3 * sum(range(640))
    assert len(set(sums)) > 20  # shuffled, otherwise in each epoch


def test_lines_for_sdk_v3(jobs: Jobs, project: Path):
    names = {"role": jobs.role, "image": "123456789012.dkr.ecr.us-east-1.amazonaws.com/any:1"}
    exec(compile(V3, "README.md", "exec"), names)
    name = names["trainer"]._latest_training_job.training_job_name
    job = jobs.wait(name)
    assert job["TrainingJobStatus"] == "Completed", job["FailureReason"]
    log = jobs.log(name)
    assert log.count("training with --epochs 3") == 1
    assert log.count("serving") == 2


RECORD_V2 = """
import json, sys
import boto3, moto
from botocore.client import BaseClient

requests, make_api_call = [], BaseClient._make_api_call

def record(client, operation, arguments):
    if operation == "CreateTrainingJob":
        requests.append(arguments)
    return make_api_call(client, operation, arguments)

BaseClient._make_api_call = record
names = {"role": "arn:aws:iam::123456789012:role/any", "image": "any:1"}
with moto.mock_aws():
    exec(compile(open(sys.argv[1]).read(), "README.md", "exec"), names)
    hyperparameters = requests[0]["HyperParameters"]
    bucket, key = json.loads(hyperparameters["sagemaker_submit_directory"])[5:].split("/", 1)
    boto3.client("s3").download_file(bucket, key, "sourcedir.tar.gz")
json.dump(requests, open("requests.json", "w"))
"""
# The toolkit waits until the hosts' names resolve, which they do on AWS only.
TOOLKIT = (
    "import socket; socket.gethostbyname = lambda host: host; "
    "from sagemaker_training.cli.train import main; main()"
)


def test_lines_for_sdk_v2(jobs: Jobs, project: Path):
    """The request is SDK v2's own, and AWS's toolkit does what it does in framework images."""
    (project / "lines.py").write_text(V2)
    subprocess.run(
        [sys.executable, "-c", RECORD_V2, "lines.py"],
        env={**os.environ, "PYTHONPATH": str(SDK_V2), "AWS_DEFAULT_REGION": "us-east-1",
             "AWS_ACCESS_KEY_ID": "none", "AWS_SECRET_ACCESS_KEY": "none"},
        check=True,
        timeout=120,
    )  # fmt: skip
    [request] = json.loads((project / "requests.json").read_text())
    # The image would fetch the code from S3 and run the toolkit. Here a channel brings it.
    s3 = boto3.client("s3")
    s3.create_bucket(Bucket="sdk-v2")
    s3.upload_file("sourcedir.tar.gz", "sdk-v2", "source/sourcedir.tar.gz")
    source = {"S3DataType": "S3Prefix", "S3Uri": "s3://sdk-v2/source"}
    request["InputDataConfig"] = [{"ChannelName": "source", "DataSource": {"S3DataSource": source}}]
    request["OutputDataConfig"]["S3OutputPath"] = "s3://sdk-v2/output"
    request["HyperParameters"]["sagemaker_submit_directory"] = '"sourcedir.tar.gz"'
    command = f"cd /opt/ml/input/data/source && exec python -c '{TOOLKIT}'"
    request["AlgorithmSpecification"]["ContainerEntrypoint"] = ["/bin/bash", "-c", command]
    boto3.client("sagemaker").create_training_job(**request)
    name = request["TrainingJobName"]
    job = jobs.wait(name)
    assert job["TrainingJobStatus"] == "Completed", job["FailureReason"]
    log = jobs.log(name)
    assert log.count("training with --epochs 3") == 1
    assert log.count("serving") == 2
