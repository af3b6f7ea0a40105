"""What SageMaker refuses before anything starts, and what this machine cannot do.

The first kind is in AWS's words where a public source has them; the second says so.
"""

from moto.sagemaker.exceptions import AWSValidationException, ResourceInUseException

from . import cluster

MOST_INSTANCE_GROUPS = 5  # botocore's model of ResourceConfig.InstanceGroups says the same


def check(request: dict, arn_of_existing_job: str | None) -> None:
    """Raises the error that CreateTrainingJob answers with, or returns."""
    if arn_of_existing_job:
        raise ResourceInUseException(
            "Training job names must be unique within an AWS account and region, and a training "
            "job with "
            f"this name already exists ({arn_of_existing_job})"
        )
    _check_groups(request["ResourceConfig"])
    _check_channels(request)
    _check_local_limits(request)


def _check_groups(config: dict) -> None:
    groups = config.get("InstanceGroups") or []
    if groups and (config.get("InstanceType") or config.get("InstanceCount")):
        raise AWSValidationException(
            "Cannot specify InstanceType or InstanceCount in ResourceConfig when InstanceGroups "
            "is specified."
        )
    if not groups and not (config.get("InstanceType") and config.get("InstanceCount")):
        raise AWSValidationException(
            "ResourceConfig needs InstanceType and InstanceCount, or InstanceGroups."
        )
    if len(groups) > MOST_INSTANCE_GROUPS:
        raise AWSValidationException(
            "1 validation error detected: Value at 'resourceConfig.instanceGroups' failed to "
            "satisfy "
            f"constraint: Member must have length less than or equal to {MOST_INSTANCE_GROUPS}"
        )
    names = [group["InstanceGroupName"] for group in groups]
    if len(set(names)) < len(names):
        raise AWSValidationException(f"Instance group names must be unique, but are {names}.")
    if groups and config.get("KeepAlivePeriodInSeconds"):
        raise AWSValidationException(
            "KeepAlivePeriodInSeconds (warm pools) cannot be used with InstanceGroups "
            "(heterogeneous clusters)."
        )
    for group in cluster.instance_groups(config):
        try:
            cluster.vcpus(group["InstanceType"])
        except ValueError as error:
            raise AWSValidationException(str(error)) from None


def _check_channels(request: dict) -> None:
    group_names = [
        g["InstanceGroupName"] for g in request["ResourceConfig"].get("InstanceGroups") or []
    ]
    assigned, unassigned = [], []
    for channel in request.get("InputDataConfig") or []:
        source = channel["DataSource"].get("S3DataSource")
        if source is None:
            raise AWSValidationException(
                f"Channel {channel['ChannelName']!r} is not on S3; the local SageMaker reads S3 "
                "only."
            )
        names = source.get("InstanceGroupNames")
        (assigned if names else unassigned).append(channel["ChannelName"])
        if unknown := [name for name in names or [] if name not in group_names]:
            raise AWSValidationException(
                f"Channel {channel['ChannelName']!r} is assigned to instance groups {unknown}, "
                "but the job's "
                f"instance groups are {group_names}."
            )
    if assigned and unassigned:
        raise AWSValidationException(
            f"Some channels have assigned instance groups: [{', '.join(assigned)}] while others "
            "not: "
            f"[{', '.join(unassigned)}]"
        )


def _check_local_limits(request: dict) -> None:
    for name, value in (request.get("HyperParameters") or {}).items():
        if "'" in value:
            raise AWSValidationException(
                f"Hyperparameter {name!r} has an apostrophe, which AWS accepts and on which the "
                "SDK's "
                "start-up script then breaks (export SM_HP_...='...'): leave it out."
            )
    specification = request["AlgorithmSpecification"]
    if not specification.get("ContainerEntrypoint"):
        raise AWSValidationException(
            "The local SageMaker runs no container image: give the job a ContainerEntrypoint, as "
            "the SageMaker "
            "SDK's ModelTrainer does when it has a source_code."
        )
    for channel in request.get("InputDataConfig") or []:
        source, name = channel["DataSource"]["S3DataSource"], channel["ChannelName"]
        mode = channel.get("InputMode") or specification["TrainingInputMode"]
        if mode == "Pipe":
            raise AWSValidationException(
                f"Channel {name!r}: the local SageMaker has no Pipe mode; use File."
            )
        if source["S3DataType"] != "S3Prefix":
            raise AWSValidationException(
                f"Channel {name!r}: the local SageMaker takes an S3Prefix only."
            )
        if source.get("S3DataDistributionType", "FullyReplicated") != "FullyReplicated":
            raise AWSValidationException(
                f"Channel {name!r}: the local SageMaker replicates data fully only."
            )
