"""A training job as SageMaker describes it, how to wait for its end, and how AWS is asked: `ask`.

What a job's hosts have printed is in log.py.
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

PATIENCE_SECONDS = 600  # our choice: time enough to log in again
LONGEST_PAUSE_SECONDS = 15
POLL_SECONDS = 2
# SageMaker answers ValidationException for a job that it does not know (aws/aws-sdk issue 165).
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
    """Ask AWS, and ask again for up to `patience_s` if that fails for a reason that can pass.

    A job goes on, and costs money, while a network is away, AWS throttles, or credentials have
    expired: whoever watches it must outlast that. botocore itself tries again for some seconds;
    this goes on from there, and says so in one line on stderr.

    Args:
        service: Such as "sagemaker".
        question: Called with a client of the service; once more, with a new one, for each attempt.
        patience_s: For how long to ask again; after that the last error is raised as it is.

    Raises:
        PermissionError: these credentials may not ask that.
        ClientError: AWS does not know what is asked for, or goes on answering with an error.
        BotoCoreError: AWS cannot be asked.
    """
    deadline, pause = time.monotonic() + patience_s, 1.0
    while True:
        try:
            return question(boto3.client(service))
        except (ClientError, *LOGINS, *NETWORK) as error:
            code, text = _code(error), " ".join(str(error).split())
            if code in DENIED:
                raise PermissionError(
                    f"AWS does not allow that to these credentials: {text} (What they need is in "
                    "docs/aws.md.)"
                ) from None
            if code in NOT_FOUND or time.monotonic() > deadline:
                raise
            log_in = "; log in again meanwhile" * (code in EXPIRED or isinstance(error, LOGINS))
        if pause == 1:
            again = f"(asking again, for up to {patience_s / 60:.0f} minutes{log_in})"
            print(f"{text} {again}", file=sys.stderr, flush=True)
        session = boto3.DEFAULT_SESSION
        if code in EXPIRED and session.get_credentials().method != "explicit":
            # Else it would read a file of credentials only once. There is no public way.
            session._session._credentials = None
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


def _code(error: Exception) -> str:
    """AWS's code of an error; empty if AWS has not answered."""
    return error.response["Error"]["Code"] if isinstance(error, ClientError) else ""


def describe(job_name: str, patience_s: float = PATIENCE_SECONDS) -> dict[str, Any]:
    """Look a training job up; return DescribeTrainingJob's response.

    Raises:
        ValueError: there is no such job, or neither region nor credentials; says where else to
            look.
        PermissionError, ClientError, BotoCoreError: as `ask` raises them.
    """
    question = methodcaller("describe_training_job", TrainingJobName=job_name)
    try:
        return ask("sagemaker", question, patience_s)
    except (ClientError, exceptions.NoRegionError, exceptions.NoCredentialsError) as error:
        if isinstance(error, ClientError) and _code(error) not in NOT_FOUND:
            raise
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


def wait(job_name: str) -> dict[str, Any]:
    """Wait until a training job has ended, printing one line per change of its status.

    Returns:
        DescribeTrainingJob's response for the job, Completed or Stopped.

    Raises:
        RuntimeError: the job failed; says why.
        ValueError: there is no such job.
        PermissionError, ClientError, BotoCoreError: AWS cannot be asked; for a reason that can
            pass it is asked again for minutes before.
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
