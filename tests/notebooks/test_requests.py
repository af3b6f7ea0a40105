"""The notebooks' requests to AWS, recorded with moto instead of AWS, without running jobs.

The notebooks' role has AWS's managed policy, and nothing else is allowed. The requests are compared
with those stored in tests/notebooks/requests/. After an intended change, store the new requests and
read their diff:

    STORE_REQUESTS=1 .venv/bin/python -m pytest tests/notebooks/test_requests.py
    git diff tests/notebooks/requests
"""

import json
import multiprocessing
import os
import re
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
from moto import mock_aws

from helpers.ended_jobs import put_job
from helpers.pages import HELLO_NOTEBOOK, NOTEBOOKS, PYTORCH_NOTEBOOK, TENSORFLOW_NOTEBOOK
from helpers.permissions import TOLERATED
from shared import monitoring

thorough = pytest.mark.thorough
STORED = Path(__file__).parent / "requests"

# Less data saves time; the requests do not depend on it.
LESS_DATA = {
    '"records": 1024': '"records": 32',
    '"digits": 60_000': '"digits": 100',
    '("t10k", 2_000, 2)': '("t10k", 100, 2)',
}
# Replaces Studio: in moto's AWS, the caller has assumed a SageMaker execution role.
MOTO = """
import json, os, re
import boto3, moto
from moto.iam.responses import IamResponse
from moto.sagemaker.responses import SageMakerResponse
from shared.local_sagemaker.session import allow_everything

moto.mock_aws().start()
os.environ["AWS_DEFAULT_REGION"] = "us-east-1"
trust = {"Effect": "Allow", "Principal": {"Service": "sagemaker.amazonaws.com"}}
role_arn = boto3.client("iam").create_role(
    RoleName="StudioRole",
    AssumeRolePolicyDocument=json.dumps({"Statement": [trust | {"Action": "sts:AssumeRole"}]}),
)["Role"]["Arn"]
caller = boto3.client("sts").assume_role(RoleArn=role_arn, RoleSessionName="SageMaker")
os.environ["AWS_ACCESS_KEY_ID"] = caller["Credentials"]["AccessKeyId"]
os.environ["AWS_SECRET_ACCESS_KEY"] = caller["Credentials"]["SecretAccessKey"]
os.environ["AWS_SESSION_TOKEN"] = caller["Credentials"]["SessionToken"]
boto3.DEFAULT_SESSION = None
IamResponse.simulate_principal_policy = allow_everything

requests, create = [], SageMakerResponse.create_training_job


def recorded(self):
    # Add the command, which the SDK writes into a script on S3.
    request = json.loads(self.body)
    for channel in request.get("InputDataConfig", []):
        if channel["ChannelName"] == "sm_drivers":
            uri = channel["DataSource"]["S3DataSource"]["S3Uri"]
            bucket, key = f"{uri}/sm_train.sh".removeprefix("s3://").split("/", 1)
            script = boto3.client("s3").get_object(Bucket=bucket, Key=key)["Body"].read().decode()
            own = script.partition("BASE_COMMAND_EOF'\\n")[2].partition("\\nSAGEMAKER_BASE")[0]
            request["Command"] = own  # "" if the job has an entry_script
    requests.append(request)
    return create(self)


SageMakerResponse.create_training_job = recorded

from helpers import permissions
allowed, absent = permissions.enforce(permissions.managed_policy("AmazonSageMakerFullAccess"))
"""


# Importing these takes ten seconds. The fork server imports them once, and each run is a fork.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["matplotlib.pyplot", "moto", "pandas", "sagemaker.train"]
    + ["triton", "tensorflow", "torch"]  # in this order: docs/troubleshooting.md
)


def run_cells(folder: Path, cells: list[str], environment: dict[str, str]) -> object:
    """Run cells of Python in this process; return the value of their variable `result`."""
    os.environ.clear()
    os.environ.update(environment, MPLBACKEND="agg")
    os.chdir(folder)
    names = {"__name__": "__main__"}
    for number, cell in enumerate(cells):
        exec(compile(cell, f"cell {number}", "exec"), names)
    return names["result"]


@pytest.mark.parametrize(
    "notebook, target, stored",
    [
        (HELLO_NOTEBOOK, "aws", "aws"),
        (TENSORFLOW_NOTEBOOK, "aws-small", "aws-small"),
        (PYTORCH_NOTEBOOK, "aws", "aws"),
        # `make aws` runs all notebooks with aws-small; these two then ask for the same.
        pytest.param(HELLO_NOTEBOOK, "aws-small", "aws", marks=thorough),
        pytest.param(PYTORCH_NOTEBOOK, "aws-small", "aws", marks=thorough),
        pytest.param(TENSORFLOW_NOTEBOOK, "aws", "aws", marks=thorough),
    ],
)
def test_requests_to_aws(notebook: Path, target: str, stored: str, monkeypatch: pytest.MonkeyPatch):
    """Run the notebook's cells that do not need the jobs' results."""
    monkeypatch.setenv("SAGEMAKER_TARGET", target)
    for name in ("AWS_PROFILE", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    cells = [
        cell.source
        for cell in nbformat.read(notebook, as_version=4).cells
        if cell.cell_type == "code" and "results" not in cell.metadata.get("tags", [])
    ]
    for old, new in LESS_DATA.items():
        cells = [cell.replace(old, new) for cell in cells]
    end = "result = json.dumps(requests), allowed, absent"
    with ProcessPoolExecutor(1, FORKS) as pool:
        given = notebook.parent, [MOTO, *cells, end], dict(os.environ)
        result, allowed, absent = pool.submit(run_cells, *given).result()
    assert absent == TOLERATED and "CreateTrainingJob" in allowed
    text = re.sub(r"-\d{14}\b", "-<time>", result)
    text = re.sub(r'"HETERO_TOKEN": "[0-9a-f]{32}"', '"HETERO_TOKEN": "<token>"', text)
    path = STORED / f"{notebook.stem}.{stored}.json"
    if os.environ.get("STORE_REQUESTS") and stored == target:
        path.write_text(json.dumps(json.loads(text), indent=2) + "\n")
    assert json.loads(text) == json.loads(path.read_text())


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_only_the_first_cell_and_the_table_of_sizes_know_the_target(notebook: Path):
    cells = [c for c in nbformat.read(notebook, as_version=4).cells if c.cell_type == "code"]
    lines = [line for cell in cells[1:] for line in cell.source.splitlines() if "TARGET" in line]
    assert lines in ([], ["SIZE = SIZES[TARGET]"])


CAPACITY = "CapacityError: Unable to provision requested ML compute capacity."


@pytest.mark.parametrize(
    "reasons, ends",
    [
        ([CAPACITY, ""], "job-1"),
        ([CAPACITY] * 3, "CapacityError"),
        (["AlgorithmError: On algo-1 (dnn_group) ..."], "AlgorithmError"),
    ],
)
def test_a_job_for_lack_of_capacity_is_tried_again(
    reasons: list[str], ends: str, monkeypatch: pytest.MonkeyPatch
):
    """Call the notebook's own function, with jobs that fail in moto as they would on AWS."""
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    cells = nbformat.read(TENSORFLOW_NOTEBOOK, as_version=4).cells
    source = next(cell.source for cell in cells if "def run_job" in cell.source)
    names: dict = {"ModelTrainer": None, "monitoring": monitoring, "time": time}
    exec(source, names)
    trainer, started = SimpleNamespace(), []

    def train(**_: object) -> None:
        """Start a job that ends at once, with the next of the reasons."""
        started.append(f"job-{len(started)}")
        reason = reasons[len(started) - 1]
        status = "Failed" if reason else "Completed"
        put_job(started[-1], failure_reason=reason, training_job_status=status)
        trainer._latest_training_job = SimpleNamespace(training_job_name=started[-1])

    trainer.train = train
    with mock_aws():
        if reasons[-1]:
            with pytest.raises(RuntimeError, match=ends):
                names["run_job"](trainer, attempts=3, pause_seconds=0)
        else:
            assert names["run_job"](trainer, attempts=3, pause_seconds=0) == ends
    assert len(started) == len(reasons)


def test_the_diff_that_the_notebook_shows_is_in_the_code():
    cells = nbformat.read(TENSORFLOW_NOTEBOOK, as_version=4).cells
    text = next(cell.source for cell in cells if "```diff" in cell.source)
    code = "".join((TENSORFLOW_NOTEBOOK.parent / "code" / "pipeline.py").read_text().split())
    for line in text.split("```")[1].splitlines()[1:]:
        assert "".join(line[1:].split("#")[0].split()).split("...")[0] in code, line
    assert code.count("ifon_data_hosts:") == code.count("ifnoton_data_hosts:") == 1
