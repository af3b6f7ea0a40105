"""A training job as SageMaker describes it. What its hosts have printed is in logs.py."""

from typing import Any

import boto3
from botocore.exceptions import BotoCoreError, ClientError


def describe(job_name: str, session: boto3.Session | None = None) -> dict[str, Any]:
    """Look a training job up; return DescribeTrainingJob's response.

    Raises:
        ValueError: there is no such job, or AWS cannot be asked; says where else to look.
    """
    try:
        client = (session or boto3).client("sagemaker")
        return client.describe_training_job(TrainingJobName=job_name)
    except (BotoCoreError, ClientError) as error:
        raise ValueError(
            f"No training job {job_name!r} to be seen from here ({error}): check its name, the "
            "region and the credentials; a local job is known only in the notebook that started "
            "it: use %run -m there."
        ) from None


def instances_of(resource_config: dict[str, Any]) -> dict[str, int]:
    """Count the instances of a job's ResourceConfig by instance type, groups or not."""
    counts: dict[str, int] = {}
    for group in resource_config.get("InstanceGroups") or [resource_config]:
        instance_type = group["InstanceType"]
        counts[instance_type] = counts.get(instance_type, 0) + group["InstanceCount"]
    return counts
