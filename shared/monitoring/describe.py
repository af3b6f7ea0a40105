"""Describe a training job, wait for its end, and call AWS with retries (`ask`).

log.py reads what a job's hosts print.
"""

import sys
import time
from collections.abc import Callable
from operator import methodcaller
from typing import Any, TypeVar

import boto3
from botocore import exceptions
from botocore.exceptions import ClientError

Answer = TypeVar("Answer")

PATIENCE_SECONDS = 600  # our choice: enough time to log in again
LONGEST_PAUSE_SECONDS = 15
POLL_SECONDS = 2
# SageMaker raises ValidationException for an unknown job (aws/aws-sdk issue 165).
NOT_FOUND = ("ValidationException", "ResourceNotFound", "ResourceNotFoundException")
DENIED = (
    "AccessDenied",
    "AccessDeniedException",
    "InvalidClientTokenId",
    "UnrecognizedClientException",
)
EXPIRED = ("ExpiredToken", "ExpiredTokenException", "RequestExpired")
LOGINS = (
    exceptions.CredentialRetrievalError,
    exceptions.LoginError,
    exceptions.MetadataRetrievalError,
    exceptions.SSOError,
    exceptions.TokenRetrievalError,
)
NETWORK = (
    exceptions.ConnectionError,
    exceptions.HTTPClientError,
    exceptions.IncompleteReadError,
)


def ask(
    service: str, question: Callable[[Any], Answer], patience_s: float = PATIENCE_SECONDS
) -> Answer:
    """Call AWS; after a temporary failure, retry for up to `patience_s`.

    While the network is down, AWS throttles, or credentials have expired, a job continues to run
    and to cost money, so monitoring must survive this. botocore itself retries for a few seconds;
    this function continues from there, and prints one line about it on stderr.

    Args:
        service: Name of the service, such as "sagemaker".
        question: Function that makes the call. Each attempt passes it a new client of the service.
        patience_s: How long to retry, in seconds; after that, the last error is raised.

    Raises:
        PermissionError: the credentials do not allow this call, or are not valid.
        ClientError: AWS does not find what was requested, or still returns an error.
        BotoCoreError: AWS cannot be reached, or there are no valid credentials or region.
    """
    deadline, pause = time.monotonic() + patience_s, 1.0
    while True:
        try:
            return question(boto3.client(service))
        except (ClientError, *LOGINS, *NETWORK) as error:
            code, text = _code(error), " ".join(str(error).split())
            if code in DENIED:
                raise PermissionError(
                    f"AWS denied the request for these credentials: {text} (docs/aws.md lists the "
                    "permissions they need.)"
                ) from None
            if code in NOT_FOUND or time.monotonic() > deadline:
                raise
            log_in = "; please log in again" * (code in EXPIRED or isinstance(error, LOGINS))
        if pause == 1:
            again = f"(retrying for up to {patience_s / 60:.0f} minutes{log_in})"
            print(f"{text} {again}", file=sys.stderr, flush=True)
        session = boto3.DEFAULT_SESSION
        if code in EXPIRED and session.get_credentials().method != "explicit":
            # Make boto3 read the credentials file again. There is no public way to do this.
            session._session._credentials = None
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


def _code(error: Exception) -> str:
    """Return AWS's error code; "" if the error is not a response from AWS."""
    return error.response["Error"]["Code"] if isinstance(error, ClientError) else ""


def describe(job_name: str, patience_s: float = PATIENCE_SECONDS) -> dict[str, Any]:
    """Return DescribeTrainingJob's response for a training job.

    Raises:
        ValueError: there is no such job, or boto3 has no region or no credentials; the message
            says what to check.
        PermissionError, ClientError, BotoCoreError: as `ask` raises them.
    """
    question = methodcaller("describe_training_job", TrainingJobName=job_name)
    try:
        return ask("sagemaker", question, patience_s)
    except (ClientError, exceptions.NoRegionError, exceptions.NoCredentialsError) as error:
        if isinstance(error, ClientError) and _code(error) not in NOT_FOUND:
            raise
        raise ValueError(
            f"No training job {job_name!r} found ({error}): check its name, the region and the "
            "credentials. A local job is known only in the notebook that started it: use %run -m "
            "there."
        ) from None


def instances_of(resource_config: dict[str, Any]) -> dict[str, int]:
    """Count the instances of a job's ResourceConfig by type, with or without instance groups."""
    counts: dict[str, int] = {}
    for group in resource_config.get("InstanceGroups") or [resource_config]:
        instance_type = group["InstanceType"]
        counts[instance_type] = counts.get(instance_type, 0) + group["InstanceCount"]
    return counts


def wait(job_name: str) -> dict[str, Any]:
    """Wait until a training job has ended, and print a line for each change of its status.

    Returns:
        DescribeTrainingJob's response for the job, whose status is Completed or Stopped.

    Raises:
        RuntimeError: the job failed; the message has the reason.
        ValueError, PermissionError, ClientError, BotoCoreError: as `describe` raises them.
    """
    start, printed = time.monotonic(), 0
    while True:
        job = describe(job_name)
        elapsed = f"{time.monotonic() - start:7.1f} s"
        transitions = job.get("SecondaryStatusTransitions", [])
        for transition in transitions[printed:]:
            print(f"{elapsed}  {transition['Status']}: {transition.get('StatusMessage', '')}")
        printed = len(transitions)
        status = job["TrainingJobStatus"]
        if status == "Failed":
            reason = job.get("FailureReason", "SageMaker gave no reason.")
            raise RuntimeError(f"Training job {job_name!r} failed: {reason}")
        if status in ("Completed", "Stopped"):
            print(f"{elapsed}  {job_name} {status}, {job.get('BillableTimeInSeconds', 0)} s billed")
            return job
        time.sleep(POLL_SECONDS)
