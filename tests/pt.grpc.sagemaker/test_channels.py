"""Which hosts need the files: jobs whose channel only data hosts get, as in README's table."""

import re

import boto3
import pytest
from sagemaker.core.training.configs import InputData, S3DataSource

from helpers.jobs import Jobs
from helpers.running import Running, start_programs

pytestmark = pytest.mark.usefixtures("nothing_is_left")
GROUPS = {"data_group": ("ml.m5.large", 1), "dnn_group": ("ml.m5.large", 1)}
TRAIN = """
import os, pathlib
from torch.utils.data import DataLoader, Dataset
from feed import RemoteDataset

class Words(Dataset):
    def __init__(self, folder):
        self.paths = sorted(pathlib.Path(folder).iterdir())
    def __len__(self):
        return len(self.paths)
    def __getitem__(self, index):
        return self.paths[index].read_text() + " at " + os.environ["SM_CURRENT_HOST"]

def make():
    return Words(os.environ["SM_CHANNEL_TRAINING"])

if __name__ == "__main__":
    print("the training host has", "SM_CHANNEL_TRAINING" in os.environ)
    dataset = RemoteDataset(make)
    print("length", len(dataset), "first", dataset[0])
    for epoch in range(EPOCHS):
        for words in DataLoader(dataset, batch_size=2, num_workers=1):
            print("trained", words)
"""


def start(jobs: Jobs, options: str, epochs: int) -> Running:
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
    return start_programs(
        jobs,
        TRAIN.replace("EPOCHS", str(epochs)),
        options,
        serve=None,
        groups=GROUPS,
        input_data_config=[InputData(channel_name="training", data_source=source)],
    )


def test_with_a_callable_data_hosts_alone_need_the_files(jobs: Jobs):
    job = start(jobs, "--spare-cores 0", epochs=1)
    ended, log = jobs.wait(job.name), job.log()
    assert ended["TrainingJobStatus"] == "Completed", ended["FailureReason"]
    assert "the training host has False" in log
    [data_host] = re.findall(r"host=(\S+) group=data_group", "\n".join(log))
    assert f"length 6 first a at {data_host}" in log
    assert [line for line in log if line.startswith("trained")] == [
        f"trained ['{first} at {data_host}', '{second} at {data_host}']"
        for first, second in ("ab", "cd", "ef")
    ]


def test_spare_cores_of_the_training_host_need_the_files_too(jobs: Jobs):
    job = jobs.wait(start(jobs, "--spare-cores 1", epochs=1000).name)  # its server starts late
    assert job["TrainingJobStatus"] == "Failed"
    words = "on data host unix-abstract:.*KeyError: 'SM_CHANNEL_TRAINING'"
    assert re.search(words, job["FailureReason"]), job["FailureReason"]
