"""Set this process's AWS settings aside while this machine replaces AWS."""

import contextlib
import os
from collections.abc import Iterator

REGION = "us-east-1"
# Instead of what would make the SDK or boto3 leave this machine or use somebody's defaults.
SET = {
    **dict.fromkeys(("AWS_REGION", "AWS_DEFAULT_REGION"), REGION),
    **dict.fromkeys(("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"), os.devnull),
    "SAGEMAKER_ADMIN_CONFIG_OVERRIDE": os.devnull,
    "SAGEMAKER_USER_CONFIG_OVERRIDE": os.devnull,
}


@contextlib.contextmanager
def set_aside() -> Iterator[None]:
    """Within the context, change the environment so that boto3 and the SDK find only the mock."""
    endpoints = [name for name in os.environ if name.startswith("AWS_ENDPOINT_URL")]
    names = [*SET, *endpoints, "AWS_PROFILE", "AWS_DEFAULT_PROFILE"]
    before = {name: os.environ.pop(name) for name in names if name in os.environ}
    os.environ.update(SET)
    try:
        yield
    finally:
        for name in names:
            os.environ.pop(name, None)
        os.environ.update(before)
