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


def config(**changes) -> dict:
    """Return the change of a request to two groups, one with local storage, and these settings."""
    groups = [group("cpu", "ml.c5.xlarge"), group("gpu", "ml.g5.xlarge")]
    return {"ResourceConfig": {"InstanceGroups": groups, "VolumeSizeInGB": 30, **changes}}


def spot(**condition: int) -> dict:
    return {"EnableManagedSpotTraining": True, "StoppingCondition": condition}


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
        "does not do ResourceConfig.KeepAlivePeriodInSeconds: for a local run leave it out",
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
        "InputDataConfig.InputMode is Pipe, .* for a local run set File or FastFile",
    ),
    "pipe mode of the algorithm": (
        {
            "AlgorithmSpecification": {
                "TrainingImage": "any",
                "TrainingInputMode": "Pipe",
                "ContainerEntrypoint": ["/bin/true"],
            },
            "InputDataConfig": [s3_channel("x")],
        },
        "AlgorithmSpecification.TrainingInputMode is Pipe, .* for a local run set File",
    ),
    "manifest": (
        {"InputDataConfig": [s3_channel("x", S3DataType="ManifestFile")]},
        "S3DataType is ManifestFile, .* set S3Prefix",
    ),
    "shards": (
        {"InputDataConfig": [s3_channel("x", S3DataDistributionType="ShardedByS3Key")]},
        "S3DataDistributionType is ShardedByS3Key, .* set FullyReplicated",
    ),
    "a count of 0": (
        config(InstanceGroups=[group(count=0)]),
        "instance count of a must be at least 1",
    ),
    "no volume for an instance without storage": (
        config(VolumeSizeInGB=0),
        "VolumeSizeInGB is needed for ml.c5.xlarge",
    ),
    "a key for local storage": (
        config(VolumeKmsKeyId="alias/x"),
        "VolumeKmsKeyId cannot be used with ml.g5.xlarge",
    ),
    "no image": (
        {"AlgorithmSpecification": {"TrainingInputMode": "File"}},
        "needs either a TrainingImage or an AlgorithmName",
    ),
    "no specification": ({"AlgorithmSpecification": None}, "needs either a TrainingImage"),
    "no cluster": ({"ResourceConfig": None}, "ResourceConfig needs InstanceType and InstanceCount"),
    "two channels of one name": (
        {"InputDataConfig": [s3_channel("x"), s3_channel("x")]},
        r"Channel names must be unique, but \['x'\]",
    ),
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
        "greater than or equal to MaxRuntimeInSeconds",
    ),
    "spot with less time to wait than a day, the default": (
        spot(MaxWaitTimeInSeconds=86_399),
        "greater than or equal to MaxRuntimeInSeconds",
    ),
    "29 days": ({"StoppingCondition": {"MaxRuntimeInSeconds": 29 * 86_400}}, "at most 28 days"),
    "an instance type that EC2 has and SageMaker has not": (
        config(InstanceGroups=[group(kind="ml.c6a.xlarge")]),
        "'ml.c6a.xlarge' at 'resourceConfig.instanceGroups.1.member.instanceType' failed",
    ),
    "a type that AWS has retired": (
        config(InstanceGroups=[group(kind="ml.p2.xlarge")]),
        "The local SageMaker does not know the instance type 'ml.p2.xlarge'",
    ),
    "what is not here": (
        {"TensorBoardOutputConfig": {"S3OutputPath": "s3://any/board"}},
        "does not do TensorBoardOutputConfig: for a local run leave it out",
    ),
    "what is not here, in a structure that is": (
        {"InputDataConfig": [{**s3_channel("x"), "ShuffleConfig": {"Seed": 1}}]},
        "does not do InputDataConfig.ShuffleConfig",
    ),
    "a warm pool of one group": (
        {
            "ResourceConfig": {
                "InstanceType": "ml.m5.large",
                "InstanceCount": 1,
                "VolumeSizeInGB": 1,
                "KeepAlivePeriodInSeconds": 60,
            }
        },
        "does not do ResourceConfig.KeepAlivePeriodInSeconds",
    ),
    "checkpoints everywhere": (
        {"CheckpointConfig": {"S3Uri": "s3://any/c", "LocalPath": "/opt/ml/../.."}},
        "give it its own folder",
    ),
    "a channel that would replace the configuration": (
        {"InputDataConfig": [s3_channel("..")]},
        r"The channel name '\.\.' is not a folder of its own",
    ),
    "an API that needs no instance type": (
        {
            "ResourceConfig": {
                "InstancePreferences": [{"InstanceType": "ml.m5.large", "InstanceCount": 1}]
            }
        },
        "does not do ResourceConfig.InstancePreferences",
    ),
    "a channel without a source": (
        {"InputDataConfig": [{"ChannelName": "x", "DataSource": {}}]},
        "Channel 'x' has no data source",
    ),
    "a channel without objects": (
        {"InputDataConfig": [s3_channel("x", S3Uri="s3://no-such-bucket/x")]},
        'No S3 objects found under S3 URL "s3://no-such-bucket/x" .* on bucket "no-such-bucket"',
    ),
    "apostrophe": ({"HyperParameters": {"name": "it's"}}, "apostrophe"),
    "no regular expression": (metric("score=("), r"Metric 'm': the regular expression 'score=\('"),
    "a regular expression without a group": (metric("score"), "it has no group"),
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
    boto3.client("s3").create_bucket(Bucket="any")
    client.create_training_job(**request("same-name"))
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
