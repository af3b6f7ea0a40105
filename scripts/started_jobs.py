"""Records, limits and stops the training jobs that `make aws` starts.

`watch` runs in the kernel of the notebook that starts the jobs, `stop` in the `make aws` process.
"""

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import boto3
import botocore.handlers
from botocore.exceptions import BotoCoreError, ClientError

LIMIT_SECONDS = 20 * 60


def watch(file: Path) -> None:
    """Limit each job to LIMIT_SECONDS, and write its name to `file` before it is requested.

    This applies to AWS clients of this process whose sessions are created after this call.
    A missing `file` means that the run has been stopped: then every further job is refused.
    """

    def before_request(params: dict[str, Any], **_: Any) -> None:
        condition = params.setdefault("StoppingCondition", {})
        asked = condition.get("MaxRuntimeInSeconds", LIMIT_SECONDS)
        condition["MaxRuntimeInSeconds"] = min(asked, LIMIT_SECONDS)
        name = params["TrainingJobName"]
        try:
            with open(file, "a", opener=only_if_it_exists) as names:
                names.write(name + "\n")
        except FileNotFoundError:
            message = f"{name} was not started: this run has been stopped ({file} is gone)."
            raise RuntimeError(message) from None

    def only_if_it_exists(path: str, flags: int) -> int:
        return os.open(path, flags & ~os.O_CREAT)

    event = "before-parameter-build.sagemaker.CreateTrainingJob"
    # Every new session gets these handlers; the SDK and `shared` create their own sessions.
    botocore.handlers.BUILTIN_HANDLERS.append((event, before_request))


def stop(names: Iterable[str], region: str, patience_s: float = 15) -> tuple[list[str], list[str]]:
    """Stop the jobs that are still running.

    Looks again for unknown jobs, for `patience_s`: a request may still be on its way after the
    process that sent it has ended.

    Returns:
        The jobs that were stopped, and those that may still run because AWS did not answer.
    """
    client = boto3.client("sagemaker", region_name=region)
    left, stopped, deadline = dict.fromkeys(names, ""), [], time.monotonic() + patience_s
    while left:
        for name in list(left):
            try:
                job = client.describe_training_job(TrainingJobName=name)
                if job["TrainingJobStatus"] == "InProgress":
                    client.stop_training_job(TrainingJobName=name)
                    stopped.append(name)
                del left[name]
            except ClientError as error:
                left[name] = error.response["Error"]["Code"]
            except BotoCoreError as error:
                left[name] = type(error).__name__
        if time.monotonic() > deadline:
            break
        time.sleep(0.5 if left else 0)
    # ValidationException: SageMaker does not know the job (aws/aws-sdk issue 165).
    return stopped, [name for name, code in left.items() if code != "ValidationException"]
