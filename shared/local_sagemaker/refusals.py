"""Refuse requests that SageMaker refuses before anything starts, or that this machine cannot run.

The messages of the first kind use AWS's words if a public source has them.
"""

import re

from moto.sagemaker.exceptions import AWSValidationException, ResourceInUseException

from . import cluster

MOST_INSTANCE_GROUPS = 5  # botocore's model of ResourceConfig.InstanceGroups says the same


def check(request: dict, arn_of_existing_job: str | None) -> None:
    """Raise the error that CreateTrainingJob returns, if any."""
    if arn_of_existing_job:
        raise ResourceInUseException(
            "Training job names must be unique within an AWS account and region, "
            f"and a training job with this name already exists ({arn_of_existing_job})"
        )
    _check_groups(request["ResourceConfig"])
    _check_channels(request)
    _check_local_limits(request)


def _check_groups(config: dict) -> None:
    groups = config.get("InstanceGroups") or []
    if groups and (config.get("InstanceType") or config.get("InstanceCount")):
        raise AWSValidationException(
            "InstanceType or InstanceCount cannot be specified with InstanceGroups"
        )
    if not groups and not (config.get("InstanceType") and config.get("InstanceCount")):
        raise AWSValidationException(
            "ResourceConfig needs InstanceType and InstanceCount, or InstanceGroups."
        )
    if len(groups) > MOST_INSTANCE_GROUPS:
        raise AWSValidationException(
            "1 validation error detected: Value at 'resourceConfig.instanceGroups' failed to "
            "satisfy constraint: Member must have length less than or equal to "
            f"{MOST_INSTANCE_GROUPS}"
        )
    names = [group["InstanceGroupName"] for group in groups]
    if len(set(names)) < len(names):
        raise AWSValidationException(f"Instance group names must be unique, but are {names}.")
    if groups and config.get("KeepAlivePeriodInSeconds"):
        raise AWSValidationException(
            "KeepAlivePeriodInSeconds (warm pools) cannot be used with InstanceGroups."
        )
    for group in cluster.instance_groups(config):
        try:
            cluster.vcpus(group["InstanceType"])
        except ValueError as error:
            raise AWSValidationException(str(error)) from None


def _check_channels(request: dict) -> None:
    groups = request["ResourceConfig"].get("InstanceGroups") or []
    group_names = [group["InstanceGroupName"] for group in groups]
    assigned, unassigned = [], []
    for channel in request.get("InputDataConfig") or []:
        name, source = channel["ChannelName"], channel["DataSource"].get("S3DataSource")
        if source is None:
            raise AWSValidationException(
                f"Channel {name!r} is not on S3; the local SageMaker reads only S3."
            )
        own_groups = source.get("InstanceGroupNames") or []
        (assigned if own_groups else unassigned).append(name)
        if unknown := [group for group in own_groups if group not in group_names]:
            raise AWSValidationException(
                f"Channel {name!r} is assigned to {unknown}, "
                f"but the job's instance groups are {group_names}."
            )
    if assigned and unassigned:
        raise AWSValidationException(
            f"Some channels have assigned instance groups: [{', '.join(assigned)}] "
            f"while others not: [{', '.join(unassigned)}]"
        )


def _check_local_limits(request: dict) -> None:
    for name, value in (request.get("HyperParameters") or {}).items():
        if "'" in value:
            raise AWSValidationException(
                f"Hyperparameter {name!r} has an apostrophe: AWS would accept it, but the SDK's "
                "start-up script would break on it (export SM_HP_...='...'). Remove it."
            )
    specification = request.get("AlgorithmSpecification") or {}
    if not specification.get("ContainerEntrypoint"):
        raise AWSValidationException(
            "The local SageMaker runs no container image: give the job a ContainerEntrypoint, "
            "as the SDK's ModelTrainer does when it has a source_code."
        )
    for definition in specification.get("MetricDefinitions") or []:
        name, regex = definition["Name"], definition["Regex"]
        try:
            if re.compile(regex).groups < 1:
                raise re.error("it has no group")
        except re.error as error:
            raise AWSValidationException(
                f"Metric {name!r}: the regular expression {regex!r} cannot be used: {error}."
            ) from None
    for channel in request.get("InputDataConfig") or []:
        name, source = channel["ChannelName"], channel["DataSource"]["S3DataSource"]
        only = {
            "its mode": (cluster.input_mode(channel, request), ["File", "FastFile"]),
            "S3DataType": (source["S3DataType"], ["S3Prefix"]),
            # AWS does not say which hosts share the data if there are instance groups.
            "S3DataDistributionType": (source.get("S3DataDistributionType"), ["FullyReplicated"]),
            "CompressionType": (channel.get("CompressionType"), ["None"]),
            "RecordWrapperType": (channel.get("RecordWrapperType"), ["None"]),
        }
        for setting, (given, known) in only.items():
            if given not in (None, *known):
                raise AWSValidationException(
                    f"Channel {name!r}: {setting} is {given}, which the local SageMaker does not "
                    f"support, although AWS does: for a local run set {' or '.join(known)}."
                )
