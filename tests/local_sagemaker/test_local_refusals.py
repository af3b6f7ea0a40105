"""The local SageMaker refuses invalid requests before anything starts."""

import boto3
import botocore.exceptions
import pytest

from helpers.jobs import Jobs, group, request

pytestmark = pytest.mark.usefixtures("nothing_is_left")


def s3_channel(name: str, *groups: str, **source) -> dict:
    source = {"S3DataType": "S3Prefix", "S3Uri": "s3://any/data", **source}
    if groups:
        source["InstanceGroupNames"] = list(groups)
    return {"ChannelName": name, "DataSource": {"S3DataSource": source}}


def metric(regex: str) -> dict:
    return {
        "AlgorithmSpecification": {
            "TrainingImage": "any",
            "TrainingInputMode": "File",
            "ContainerEntrypoint": ["/bin/true"],
            "MetricDefinitions": [{"Name": "m", "Regex": regex}],
        }
    }


REFUSED = {
    "instance type beside groups": (
        {
            "ResourceConfig": {
                "InstanceGroups": [group()],
                "InstanceType": "ml.m5.large",
                "VolumeSizeInGB": 1,
            }
        },
        "InstanceType or InstanceCount cannot be specified with InstanceGroups",
    ),
    "neither": ({"ResourceConfig": {"VolumeSizeInGB": 1}}, "or InstanceGroups"),
    "two groups of one name": (
        {"ResourceConfig": {"InstanceGroups": [group(), group()], "VolumeSizeInGB": 1}},
        "must be unique",
    ),
    "six groups": (
        {"ResourceConfig": {"InstanceGroups": [group(c) for c in "abcdef"], "VolumeSizeInGB": 1}},
        "less than or equal to 5",
    ),
    "warm pool": (
        {
            "ResourceConfig": {
                "InstanceGroups": [group()],
                "KeepAlivePeriodInSeconds": 60,
                "VolumeSizeInGB": 1,
            }
        },
        "warm pools",
    ),
    "unknown instance type": (
        {"ResourceConfig": {"InstanceGroups": [group(kind="ml.c5.huge")], "VolumeSizeInGB": 1}},
        "ml.c5.huge",
    ),
    "some channels with groups": (
        {
            "ResourceConfig": {"InstanceGroups": [group("a"), group("b")], "VolumeSizeInGB": 1},
            "InputDataConfig": [s3_channel("x", "a"), s3_channel("y")],
        },
        r"Some channels have assigned instance groups: \[x\] while others not: \[y\]",
    ),
    "channel of an unknown group": (
        {
            "ResourceConfig": {"InstanceGroups": [group("a")], "VolumeSizeInGB": 1},
            "InputDataConfig": [s3_channel("x", "c")],
        },
        r"\['c'\]",
    ),
    "no entry point": (
        {"AlgorithmSpecification": {"TrainingImage": "any", "TrainingInputMode": "File"}},
        "ContainerEntrypoint",
    ),
    "pipe mode": (
        {"InputDataConfig": [{**s3_channel("x"), "InputMode": "Pipe"}]},
        "Channel 'x': its mode is Pipe, .* for a local run set File or FastFile",
    ),
    "pipe mode of the algorithm": (
        {
            "AlgorithmSpecification": {
                "TrainingImage": "any",
                "TrainingInputMode": "Pipe",
                "ContainerEntrypoint": ["/bin/true"],
            },
            "InputDataConfig": [{**s3_channel("x"), "InputMode": "File"}, s3_channel("y")],
        },
        "Channel 'y': its mode is Pipe",
    ),
    "manifest": (
        {"InputDataConfig": [s3_channel("x", S3DataType="ManifestFile")]},
        "S3DataType is ManifestFile, .* set S3Prefix",
    ),
    "shards": (
        {"InputDataConfig": [s3_channel("x", S3DataDistributionType="ShardedByS3Key")]},
        "S3DataDistributionType is ShardedByS3Key, .* set FullyReplicated",
    ),
    "apostrophe": ({"HyperParameters": {"name": "it's"}}, "apostrophe"),
    "no regular expression": (metric("score=("), r"Metric 'm': the regular expression 'score=\('"),
    "a regular expression without a group": (metric("score"), "it has no group"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(jobs: Jobs, case: str):
    changes, words = REFUSED[case]
    client = boto3.client("sagemaker")
    with pytest.raises(botocore.exceptions.ClientError, match=words) as error:
        client.create_training_job(**request("refused", **changes))
    assert error.value.response["Error"]["Code"] == "ValidationException"
    with pytest.raises(botocore.exceptions.ClientError):
        client.describe_training_job(TrainingJobName="refused")  # nothing was started


def test_a_second_job_of_the_same_name_is_refused(jobs: Jobs):
    client = boto3.client("sagemaker")
    boto3.client("s3").create_bucket(Bucket="any")
    client.create_training_job(**request("same-name"))
    with pytest.raises(botocore.exceptions.ClientError, match="names must be unique") as error:
        client.create_training_job(**request("same-name"))
    assert error.value.response["Error"]["Code"] == "ResourceInUse"
    assert jobs.wait("same-name")["TrainingJobStatus"] == "Completed"
