"""The local SageMaker refuses invalid requests before anything starts."""

import boto3
import botocore.config
import botocore.exceptions
import pytest

from helpers.jobs import Jobs, group, request

pytestmark = pytest.mark.usefixtures("nothing_is_left")


def s3_channel(name: str, *groups: str, **source) -> dict:
    source = {"S3DataType": "S3Prefix", "S3Uri": "s3://any/data", **source}
    if groups:
        source["InstanceGroupNames"] = list(groups)
    return {"ChannelName": name, "DataSource": {"S3DataSource": source}}


def config(*groups: dict, **changes) -> dict:
    """Return the change of a request to these groups and settings; by default, one has a disk."""
    default = [group("cpu", "ml.c5.xlarge"), group("gpu", "ml.g5.xlarge")]
    return {
        "ResourceConfig": {"InstanceGroups": groups or default, "VolumeSizeInGB": 30, **changes}
    }


def spot(**condition: int) -> dict:
    return {"EnableManagedSpotTraining": True, "StoppingCondition": condition}


def metric(regex: str) -> dict:
    return {"algorithm": {"MetricDefinitions": [{"Name": "m", "Regex": regex}]}}


def channels(*channels: dict) -> dict:
    return {"InputDataConfig": [*channels]}


# What each of AWS's own constraints refuses is in test_local_model.py.
REFUSED = {
    "instance type beside groups": (
        config(InstanceType="ml.m5.large"),
        "InstanceType or InstanceCount cannot be specified with InstanceGroups",
    ),
    "neither": ({"ResourceConfig": {"VolumeSizeInGB": 1}}, "or InstanceGroups"),
    "no cluster": ({"ResourceConfig": None}, "ResourceConfig needs InstanceType and InstanceCount"),
    "two groups of one name": (config(group(), group()), "must be unique"),
    "a count of 0": (config(group(count=0)), "instance count of a must be at least 1"),
    "a type that AWS has retired": (
        config(group(kind="ml.p2.xlarge")),
        "The local SageMaker does not know the instance type 'ml.p2.xlarge'",
    ),
    "no volume for an instance without storage": (
        config(VolumeSizeInGB=0),
        "VolumeSizeInGB is needed for ml.c5.xlarge",
    ),
    "a key for local storage": (
        config(VolumeKmsKeyId="alias/x"),
        "VolumeKmsKeyId cannot be used with ml.g5.xlarge",
    ),
    "some channels with groups": (
        config() | channels(s3_channel("x", "cpu"), s3_channel("y")),
        r"Some channels have assigned instance groups: \[x\] while others not: \[y\]",
    ),
    "channel of an unknown group": (config() | channels(s3_channel("x", "c")), r"\['c'\]"),
    "two channels of one name": (
        channels(s3_channel("x"), s3_channel("x")),
        r"Channel names must be unique, but \['x'\]",
    ),
    "a channel that would replace the configuration": (
        channels(s3_channel("..")),
        r"The channel name '\.\.' is not a folder of its own",
    ),
    "a channel without a source": (
        channels({"ChannelName": "x", "DataSource": {}}),
        "Channel 'x' has no data source",
    ),
    "a channel without objects": (
        channels(s3_channel("x", S3Uri="s3://no-such-bucket/x")),
        'No S3 objects found under S3 URL "s3://no-such-bucket/x" .* on bucket "no-such-bucket"',
    ),
    "pipe mode": (
        channels({**s3_channel("x"), "InputMode": "Pipe"}),
        "InputDataConfig.InputMode is Pipe, .* for a local run set File or FastFile",
    ),
    "pipe mode of the algorithm": (
        {"algorithm": {"TrainingInputMode": "Pipe"}},
        "AlgorithmSpecification.TrainingInputMode is Pipe, .* for a local run set File",
    ),
    "manifest": (
        channels(s3_channel("x", S3DataType="ManifestFile")),
        "S3DataType is ManifestFile, .* set S3Prefix",
    ),
    "shards": (
        channels(s3_channel("x", S3DataDistributionType="ShardedByS3Key")),
        "S3DataDistributionType is ShardedByS3Key, .* set FullyReplicated",
    ),
    "no entry point": (
        {"AlgorithmSpecification": {"TrainingImage": "any", "TrainingInputMode": "File"}},
        "ContainerEntrypoint",
    ),
    "no image": (
        {"AlgorithmSpecification": {"TrainingInputMode": "File"}},
        "needs either a TrainingImage or an AlgorithmName",
    ),
    "no specification": ({"AlgorithmSpecification": None}, "needs either a TrainingImage"),
    "no regular expression": (metric("score=("), r"Metric 'm': the regular expression 'score=\('"),
    "a regular expression without a group": (metric("score"), "it has no group"),
    "two tags of one key": (
        {"Tags": [{"Key": "k", "Value": "1"}, {"Key": "k", "Value": "2"}]},
        r"Tag keys must be unique, but \['k'\]",
    ),
    "a reserved tag": ({"Tags": [{"Key": "AWS:x", "Value": "1"}]}, "must not start with aws:"),
    "a time to wait without spot": (
        {"StoppingCondition": {"MaxWaitTimeInSeconds": 60}},
        "only supported when EnableManagedSpotTraining is set to true",
    ),
    "spot without a time to wait": (spot(MaxRuntimeInSeconds=60), "must be present and be greater"),
    "spot with less time to wait than to run": (
        spot(MaxRuntimeInSeconds=60, MaxWaitTimeInSeconds=59),
        "must be present and be greater than or equal to MaxRuntimeInSeconds",
    ),
    "spot with less time to wait than a day, the default": (
        spot(MaxWaitTimeInSeconds=86_399),
        "greater than or equal to MaxRuntimeInSeconds",
    ),
    "29 days": ({"StoppingCondition": {"MaxRuntimeInSeconds": 29 * 86_400}}, "at most 28 days"),
    "what is not here": (
        {"TensorBoardOutputConfig": {"S3OutputPath": "s3://any/board"}},
        "does not do TensorBoardOutputConfig: for a local run leave it out",
    ),
    "what is not here, in a structure that is": (
        config(KeepAlivePeriodInSeconds=60),
        "does not do ResourceConfig.KeepAlivePeriodInSeconds: for a local run leave it out",
    ),
    "what is not here, in a list": (
        channels({**s3_channel("x"), "ShuffleConfig": {"Seed": 1}}),
        "does not do InputDataConfig.ShuffleConfig",
    ),
    "what is not here, and has what is": (
        {"ResourceConfig": {"InstancePreferences": [{"InstanceType": "ml.m5.large"}]}},
        "does not do ResourceConfig.InstancePreferences",
    ),
    "checkpoints everywhere": (
        {"CheckpointConfig": {"S3Uri": "s3://any/c", "LocalPath": "/opt/ml/../.."}},
        "give it its own folder",
    ),
    "apostrophe": ({"HyperParameters": {"name": "it's"}}, "apostrophe"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(jobs: Jobs, case: str):
    changes, words = REFUSED[case]
    client = boto3.client("sagemaker")
    asked = {k: v for k, v in request("refused", **changes).items() if v is not None}
    with pytest.raises(botocore.exceptions.ClientError, match=words) as error:
        client.create_training_job(**asked)
    assert error.value.response["Error"]["Code"] == "ValidationException"
    with pytest.raises(botocore.exceptions.ClientError):
        client.describe_training_job(TrainingJobName="refused")  # nothing was started


def test_a_second_job_of_the_same_name_is_refused(jobs: Jobs):
    client = boto3.client("sagemaker")
    jobs.ask("same-name")
    with pytest.raises(botocore.exceptions.ClientError, match="names must be unique") as error:
        client.create_training_job(**request("same-name"))
    assert error.value.response["Error"]["Code"] == "ResourceInUse"
    assert jobs.wait("same-name")["TrainingJobStatus"] == "Completed"


@pytest.mark.parametrize(
    "call, settings",
    [
        ("delete_training_job", {"TrainingJobName": "any"}),  # moto has no answer
        ("create_endpoint", {"EndpointName": "any", "EndpointConfigName": "any"}),  # it pretends
    ],
)
def test_calls_that_are_not_here_are_refused(jobs: Jobs, call: str, settings: dict):
    with pytest.raises(botocore.exceptions.ClientError) as error:
        getattr(boto3.client("sagemaker"), call)(**settings)
    assert "The local SageMaker does not do " in str(error.value)
    assert "It does CreateTrainingJob, " in str(error.value)


def test_a_request_that_boto3_did_not_check_is_refused(jobs: Jobs):
    unchecked = botocore.config.Config(parameter_validation=False)
    wrong = request("any", OutputDataConfig={}, RoleArn=1)
    with pytest.raises(botocore.exceptions.ClientError) as error:
        boto3.client("sagemaker", config=unchecked).create_training_job(**wrong)
    assert 'Missing required parameter in OutputDataConfig: "S3OutputPath"' in str(error.value)
    assert "Invalid type for parameter RoleArn" in str(error.value)
