"""Set this process's AWS settings aside while this machine replaces AWS."""

import contextlib
import os
from collections.abc import Iterator

REGION = "us-east-1"
# Settings that would make the SDK or boto3 leave this machine or use somebody's defaults.
SET_ASIDE = {
    "AWS_PROFILE": None,
    "AWS_DEFAULT_PROFILE": None,
    "AWS_ENDPOINT_URL": None,
    "AWS_REGION": REGION,
    "AWS_DEFAULT_REGION": REGION,
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "SAGEMAKER_ADMIN_CONFIG_OVERRIDE": os.devnull,
    "SAGEMAKER_USER_CONFIG_OVERRIDE": os.devnull,
}


@contextlib.contextmanager
def set_aside() -> Iterator[None]:
    """Within the context, change the environment so that boto3 and the SDK find only the mock."""
    endpoints = {name: None for name in os.environ if name.startswith("AWS_ENDPOINT_URL_")}
    ours = {**SET_ASIDE, **endpoints}
    before = {name: os.environ.get(name) for name in ours}
    _set(ours)
    try:
        yield
    finally:
        _set(before)


def _set(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
