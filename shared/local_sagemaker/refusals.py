"""Refuse what AWS refuses although its model allows it, in AWS's words if a public source has them.

`check` also asks supported.py, which refuses what this machine does not do. Where no other source
is named, it is the API reference of the member, which botocore ships as well. No public source was
found for the names of channels and groups, and for counts of at least 1.
"""

from collections.abc import Iterator

import boto3
from botocore.exceptions import ClientError
from moto.sagemaker.exceptions import AWSValidationException, ResourceInUseException
from moto.sagemaker.models import FakeTrainingJob

from . import cluster, supported

DEFAULT_MAX_RUNTIME, LONGEST_MAX_RUNTIME = 86_400, 28 * 86_400  # seconds


def check(request: dict, existing_job: FakeTrainingJob | None) -> None:
    """Raise what CreateTrainingJob returns if AWS or this machine refuses the request."""
    if existing_job:
        raise ResourceInUseException(
            "Training job names must be unique within an AWS account and region, "
            f"and a training job with this name already exists ({existing_job.arn})"
        )
    try:
        for rule in (supported.unsupported, _settings, _channels, supported.cannot_run, _objects):
            for why in rule(request):
                raise AWSValidationException(why)
    except ValueError as error:  # the model has instance types that EC2 has retired
        raise AWSValidationException(str(error)) from error


def _settings(request: dict) -> Iterator[str]:
    if not request.get("AlgorithmSpecification", {}).get("TrainingImage"):
        yield "AlgorithmSpecification needs either a TrainingImage or an AlgorithmName."
    keys = [tag["Key"] for tag in request.get("Tags", [])]
    yield from _unique("Tag keys", keys)
    if any(key.lower().startswith("aws:") for key in keys):
        yield f"Tag keys must not start with aws:, but the request has {keys}."
    condition = request.get("StoppingCondition", {})
    spot = request.get("EnableManagedSpotTraining")
    limit = condition.get("MaxRuntimeInSeconds", DEFAULT_MAX_RUNTIME)
    wait = condition.get("MaxWaitTimeInSeconds", 0)
    if limit > LONGEST_MAX_RUNTIME:
        yield f"MaxRuntimeInSeconds is {limit}, but must be at most 28 days."
    invalid = "Invalid MaxWaitTimeInSeconds. It "
    if wait and not spot:  # github.com/Kenza-AI/sagify/issues/111 has this message
        yield invalid + "is only supported when EnableManagedSpotTraining is set to true"
    if spot and wait < limit:
        yield invalid + "must be present and be greater than or equal to MaxRuntimeInSeconds"
    config = request.get("ResourceConfig", {})
    groups, single = config.get("InstanceGroups"), {"InstanceType", "InstanceCount"} & {*config}
    if groups and single:
        yield "InstanceType or InstanceCount cannot be specified with InstanceGroups"
    if not groups and len(single) < 2:
        yield "ResourceConfig needs InstanceType and InstanceCount, or InstanceGroups."
    names = [group["InstanceGroupName"] for group in groups or []]
    yield from _unique("Instance group names", names)
    for group in cluster.instance_groups(config):
        name, kind = group["InstanceGroupName"], group["InstanceType"]
        if group["InstanceCount"] < 1:
            yield f"The instance count of {name} must be at least 1."
        has_own_disk = cluster.facts(kind)["InstanceStorageSupported"]
        if has_own_disk and config.get("VolumeKmsKeyId"):
            yield f"VolumeKmsKeyId cannot be used with {kind}, which has local storage."
        if not has_own_disk and not config.get("VolumeSizeInGB"):
            yield f"VolumeSizeInGB is needed for {kind}, which has no local storage."


def _channels(request: dict) -> Iterator[str]:
    channels = request.get("InputDataConfig", [])
    groups = [g["InstanceGroupName"] for g in request["ResourceConfig"].get("InstanceGroups", [])]
    yield from _unique("Channel names", [channel["ChannelName"] for channel in channels])
    own = {}
    for channel in channels:
        name, source = channel["ChannelName"], channel["DataSource"].get("S3DataSource")
        own[name] = assigned = (source or {}).get("InstanceGroupNames", [])
        if not name.strip("."):
            yield f"The channel name {name!r} is not a folder of its own."
        if not source:
            yield f"Channel {name!r} has no data source."
        if unknown := [group for group in assigned if group not in groups]:
            yield f"Channel {name!r} is assigned to {unknown}, but the groups are {groups}."
    if any(own.values()) and not all(own.values()):
        some = ", ".join(name for name, assigned in own.items() if assigned)
        others = ", ".join(name for name, assigned in own.items() if not assigned)
        yield f"Some channels have assigned instance groups: [{some}] while others not: [{others}]"


def _objects(request: dict) -> Iterator[str]:
    s3, role = boto3.client("s3"), request["RoleArn"]
    for channel in request.get("InputDataConfig", []):
        uri = channel["DataSource"]["S3DataSource"]["S3Uri"]
        bucket, prefix = cluster.bucket_and_key(uri)
        try:
            found = s3.list_objects_v2(Bucket=bucket, Prefix=prefix, MaxKeys=1)["KeyCount"]
        except ClientError:
            found = 0
        if not found:  # github.com/aws/amazon-sagemaker-examples/issues/2267 has this message
            yield (
                f'No S3 objects found under S3 URL "{uri}" given in input data source. Please '
                "ensure that the bucket exists in the selected region, "
                f'that objects exist under that S3 prefix, and that the role "{role}" '
                f'has "s3:ListBucket" permissions on bucket "{bucket}".'
            )


def _unique(what: str, names: list[str]) -> Iterator[str]:
    if twice := sorted({name for name in names if names.count(name) > 1}):
        yield f"{what} must be unique, but {twice} are there twice."
