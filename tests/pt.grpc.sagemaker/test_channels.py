"""Which hosts need the files: jobs whose channel only data hosts get, as in README's table."""

import re

import boto3
import pytest
from sagemaker.core.training.configs import InputData, S3DataSource

from helpers.jobs import Jobs
from helpers.pages import ROOT
from helpers.running import run_programs

pytestmark = pytest.mark.usefixtures("nothing_is_left")


def train(jobs: Jobs, options: str, epochs: int) -> tuple[dict, list[str]]:
    """Run programs/words.py; return DescribeTrainingJob's response and the log."""
    s3 = boto3.client("s3")
    s3.create_bucket(Bucket="words")
    for word in "abcdef":
        s3.put_object(Bucket="words", Key=f"{word}.txt", Body=word.encode())
    source = S3DataSource(
        s3_data_type="S3Prefix",
        s3_uri="s3://words",
        s3_data_distribution_type="FullyReplicated",
        instance_group_names=["data_group"],
    )
    return run_programs(
        jobs,
        (ROOT / "tests/programs/words.py").read_text(),
        options,
        serve=None,
        groups={"data_group": ("ml.m5.large", 1), "dnn_group": ("ml.m5.large", 1)},
        environment={"HETERO_TOKEN": "a secret", "EPOCHS": str(epochs)},
        input_data_config=[InputData(channel_name="training", data_source=source)],
    )


def test_with_a_callable_data_hosts_alone_need_the_files(jobs: Jobs):
    ended, log = train(jobs, "--spare-cores 0", epochs=1)
    assert ended["TrainingJobStatus"] == "Completed", ended["FailureReason"]
    assert "the training host has False" in log
    [data_host] = re.findall(r"host=(\S+) group=data_group", "\n".join(log))
    assert f"length 6 first a at {data_host}" in log
    assert [line for line in log if line.startswith("trained")] == [
        f"trained ['{first} at {data_host}', '{second} at {data_host}']"
        for first, second in ("ab", "cd", "ef")
    ]


@pytest.mark.thorough
def test_spare_cores_of_the_training_host_need_the_files_too(jobs: Jobs):
    ended, _ = train(jobs, "--spare-cores 1", epochs=1000)  # its server starts late
    assert ended["TrainingJobStatus"] == "Failed"
    words = "on data host unix-abstract:.*KeyError: 'SM_CHANNEL_TRAINING'"
    assert re.search(words, ended["FailureReason"]), ended["FailureReason"]
