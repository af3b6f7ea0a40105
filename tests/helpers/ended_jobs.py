"""Training jobs that have ended, as moto's SageMaker, CloudWatch and CloudWatch Logs show them."""

import contextlib
from datetime import datetime, timedelta, timezone

import boto3
from moto.core import DEFAULT_ACCOUNT_ID
from moto.sagemaker.models import sagemaker_backends

from helpers.jobs import request

NAMESPACE = "/aws/sagemaker/TrainingJobs"  # of logs and of metrics
NOW = datetime.now(timezone.utc)


def put_job(name: str = "job", groups: dict | None = None, **changes):
    """Create a job, which moto completes at once; change moto's record of it, and return that.

    groups: {name: (instance type, count)}; a single entry named "" makes a job without groups.
    """
    groups = groups or {"": ("ml.p3.2xlarge", 1)}
    members = [
        {"InstanceGroupName": group, "InstanceType": kind, "InstanceCount": count}
        for group, (kind, count) in groups.items()
    ]
    config = {"InstanceGroups": members}
    if "" in groups:
        config = {key: members[0][key] for key in ("InstanceType", "InstanceCount")}
    resources = {**config, "VolumeSizeInGB": 30}
    boto3.client("sagemaker").create_training_job(**request(name, ResourceConfig=resources))
    record = sagemaker_backends[DEFAULT_ACCOUNT_ID]["us-east-1"].training_jobs[name]
    for key, value in changes.items():
        setattr(record, key, value)
    return record


def put_log(
    job: str,
    host: str,
    lines: list[str],
    at_s: float = 0,
    every_s: float = 0.01,
    start: datetime = NOW,
    attempt: int = 1,
) -> None:
    """Write lines to a host's log, `every_s` seconds apart, the first `at_s` after `start`."""
    client = boto3.client("logs")
    stream = {"logGroupName": NAMESPACE, "logStreamName": f"{job}/{host}-170000000{attempt}"}
    with contextlib.suppress(client.exceptions.ResourceAlreadyExistsException):
        client.create_log_group(logGroupName=NAMESPACE)
    with contextlib.suppress(client.exceptions.ResourceAlreadyExistsException):
        client.create_log_stream(**stream)
    times = [start + timedelta(seconds=at_s + i * every_s) for i in range(len(lines))]
    events = [
        {"timestamp": int(time.timestamp() * 1000), "message": line}
        for time, line in zip(times, lines, strict=True)
    ]
    for i in range(0, len(events), 5000):
        client.put_log_events(**stream, logEvents=events[i : i + 5000])


def step_lines(*times: tuple[float, float]) -> list[str]:
    """Return a step line for each pair of step time and data wait, in ms."""
    return [
        f"step={i} epoch=1 loss=0.5 step_time_ms={step} data_wait_ms={wait} samples_per_s=9"
        for i, (step, wait) in enumerate(times)
    ]


def put_use(
    job: str, host: str, metric: str, values: list[float], start: datetime, every_s: float = 60
) -> None:
    """Write a host's CPUUtilization or GPUUtilization, the first value 40 s after `start`."""
    for i, value in enumerate(values):
        datum = {
            "MetricName": metric,
            "Dimensions": [{"Name": "Host", "Value": f"{job}/{host}"}],
            "Timestamp": start + timedelta(seconds=40 + i * every_s),
            "Value": value,
        }
        boto3.client("cloudwatch").put_metric_data(Namespace=NAMESPACE, MetricData=[datum])
