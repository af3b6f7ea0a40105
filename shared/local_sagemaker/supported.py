"""Which parts of SageMaker this machine has: docs/moving.md shows them. All others are refused."""

import re
from collections.abc import Iterator
from pathlib import PurePosixPath

# Members of CreateTrainingJob, by the structure that they are in.
SOURCE = "InputDataConfig.DataSource.S3DataSource"
AS_ON_AWS = {
    "": ["TrainingJobName", "HyperParameters", "Environment", "Tags", "CheckpointConfig"],
    "AlgorithmSpecification": ["ContainerEntrypoint", "ContainerArguments", "MetricDefinitions"],
    "InputDataConfig": ["ChannelName", "ContentType"],
    SOURCE: ["S3Uri", "InstanceGroupNames"],
    "OutputDataConfig": ["S3OutputPath", "CompressionType"],
    "ResourceConfig": ["InstanceGroups", "InstanceType", "InstanceCount"],
    "StoppingCondition": ["MaxRuntimeInSeconds"],
}
ONLY_CHECKED = {
    "": ["RoleArn", "VpcConfig", "RetryStrategy", "ExperimentConfig", "EnableNetworkIsolation"]
    + ["EnableManagedSpotTraining", "EnableInterContainerTrafficEncryption"]
    + ["DebugHookConfig", "ProfilerConfig"],  # SDK v2 adds them to each request
    "AlgorithmSpecification": ["TrainingImage", "EnableSageMakerMetricsTimeSeries"],
    "OutputDataConfig": ["KmsKeyId"],
    "ResourceConfig": ["VolumeSizeInGB", "VolumeKmsKeyId"],
    "StoppingCondition": ["MaxWaitTimeInSeconds", "MaxPendingTimeInSeconds"],
}
FILE, NONE = ["File", "FastFile"], ["None"]
ONLY = {
    "AlgorithmSpecification": {"TrainingInputMode": FILE},
    "InputDataConfig": {"InputMode": FILE, "CompressionType": NONE, "RecordWrapperType": NONE},
    # AWS does not say which hosts share the data if there are instance groups.
    SOURCE: {"S3DataType": ["S3Prefix"], "S3DataDistributionType": ["FullyReplicated"]},
}


def cannot_run(request: dict) -> Iterator[str]:
    """Yield why this machine cannot run a CreateTrainingJob as it asks, if it cannot."""
    for name, value in (request.get("HyperParameters", {})).items():
        if "'" in value:
            yield (
                f"Hyperparameter {name!r} has an apostrophe: AWS would accept it, but the SDK's "
                "start-up script would break on it (export SM_HP_...='...'). Remove it."
            )
    specification = request["AlgorithmSpecification"]
    if not specification.get("ContainerEntrypoint"):
        yield (
            "The local SageMaker runs no container image: give the job a ContainerEntrypoint, "
            "as the SDK's ModelTrainer does when it has a source_code."
        )
    for definition in specification.get("MetricDefinitions", []):
        name, regex = definition["Name"], definition["Regex"]
        try:
            if re.compile(regex).groups < 1:
                raise re.error("it has no group")
        except re.error as error:
            yield f"Metric {name!r}: the regular expression {regex!r} cannot be used: {error}."
    folder = request.get("CheckpointConfig", {}).get("LocalPath", "/opt/ml/checkpoints")
    path = PurePosixPath(folder)
    if ".." in path.parts or not path.name:
        yield f"CheckpointConfig.LocalPath is {folder!r}: for a local run give it its own folder."


def unsupported(structure: dict, name: str = "") -> Iterator[str]:
    """Yield what the local SageMaker does not do of a structure with this dotted name."""
    for key, value in structure.items():
        path, values = f"{name}.{key}".lstrip("."), ONLY.get(name, {}).get(key, [])
        if values and value not in values:
            yield (
                f"{path} is {value}, which the local SageMaker does not support: for a local run "
                f"set {' or '.join(values)}."
            )
        if values or key in AS_ON_AWS.get(name, []) + ONLY_CHECKED.get(name, []):
            continue
        if any(f"{known}.".startswith(f"{path}.") for known in {**AS_ON_AWS, **ONLY_CHECKED}):
            for part in value if isinstance(value, list) else [value]:
                yield from unsupported(part, path)
        else:
            yield f"The local SageMaker does not do {path}: for a local run leave it out."
