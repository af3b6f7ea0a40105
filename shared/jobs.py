"""A training job as SageMaker describes it, and how AWS is asked about one: `ask`.

What a job's hosts have printed is in logs.py.
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
    service: str,
    question: Callable[[Any], Answer],
    session: boto3.Session | None = None,
    patience_s: float = PATIENCE_SECONDS,
) -> Answer:
    """Ask AWS, and ask again for up to `patience_s` if that fails for a reason that can pass.

    A job goes on, and costs money, while a network is away, AWS throttles, or credentials have
    expired: whoever watches it must outlast that. botocore itself tries again for some seconds;
    this goes on from there, and says so in one line on stderr.

    Args:
        service: Such as "sagemaker".
        question: Called with a client of the service; once more, with a new one, for each attempt.
        session: boto3 session to use instead of the default one.
        patience_s: For how long to ask again; after that the last error is raised as it is.

    Raises:
        PermissionError: these credentials may not ask that.
        ClientError: AWS does not know what is asked for, or goes on answering with an error.
        BotoCoreError: AWS cannot be asked.
    """
    deadline, pause, has_said = time.monotonic() + patience_s, 1.0, False
    while True:
        try:
            return question((session or boto3).client(service))
        except (ClientError, *LOGINS, *NETWORK) as error:
            code, text = _code(error), " ".join(str(error).split())
            if code in DENIED:
                raise PermissionError(
                    f"AWS does not allow that to these credentials: {text} (What they need is in "
                    "docs/permissions.md.)"
                ) from None
            if code in NOT_FOUND or time.monotonic() > deadline:
                raise
            is_login = code in EXPIRED or isinstance(error, LOGINS)
        if not has_said:
            advice = "; log in again meanwhile" if is_login else ""
            minutes = f"{patience_s / 60:.0f} minutes"
            print(
                f"{text} (asking again, for up to {minutes}{advice})", file=sys.stderr, flush=True
            )
            has_said = True
        if code in EXPIRED:
            _forget_credentials(session or boto3.DEFAULT_SESSION)
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


def _code(error: Exception) -> str:
    """AWS's code of an error; empty if AWS has not answered."""
    return error.response["Error"]["Code"] if isinstance(error, ClientError) else ""


def _forget_credentials(session: boto3.Session) -> None:
    """Have the session look for its credentials again: those of a file it would read only once."""
    if session.get_credentials().method != "explicit":  # else it has them from its caller
        session._session._credentials = None  # not public: there is no other way


def describe(
    job_name: str, session: boto3.Session | None = None, patience_s: float = PATIENCE_SECONDS
) -> dict[str, Any]:
    """Look a training job up; return DescribeTrainingJob's response.

    Raises:
        ValueError: there is no such job, or neither region nor credentials; says where else to
            look.
        PermissionError, ClientError, BotoCoreError: as `ask` raises them.
    """
    question = methodcaller("describe_training_job", TrainingJobName=job_name)
    try:
        return ask("sagemaker", question, session, patience_s)
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
