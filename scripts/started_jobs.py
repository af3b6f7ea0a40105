"""The training jobs that `make aws` starts: written down and limited before, stopped afterwards.

`watch` works in the kernel of the notebook that starts them, `stop` in the process of `make aws`.
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
    """Limit each job to LIMIT_SECONDS, and write its name to `file` before it is asked for.

    This holds in this process, for the AWS clients of all sessions that are made from now on.
    Once `file` has gone, the run has been stopped, and every further job is refused.
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
            message = f"{name} was not started: this run has been stopped, {file} has gone."
            raise RuntimeError(message) from None

    def only_if_it_exists(path: str, flags: int) -> int:
        return os.open(path, flags & ~os.O_CREAT)

    event = "before-parameter-build.sagemaker.CreateTrainingJob"
    # What every new session starts with: the SDK and `shared` make sessions of their own.
    botocore.handlers.BUILTIN_HANDLERS.append((event, before_request))


def stop(names: Iterable[str], region: str, patience_s: float = 15) -> tuple[list[str], list[str]]:
    """Stop those of the jobs that still run.

    A job that SageMaker does not know is looked for again for `patience_s`: the request for it may
    still be on its way when the process that sent it has ended.

    Returns:
        The jobs that were stopped, and those that may still run, because AWS did not answer.
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
    # With this code SageMaker answers for a job that it does not know (aws/aws-sdk issue 165).
    return stopped, [name for name, code in left.items() if code != "ValidationException"]
