"""Keeps this process's AWS settings out of the way while AWS is this machine."""

import os
from contextlib import AbstractContextManager
from unittest import mock

REGION = "us-east-1"
# Settings that would lead the SDK or boto3 out of this machine, or bring in someone's defaults.
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


def set_aside() -> AbstractContextManager:
    """While it is open, the environment leads boto3 and the SDK nowhere but to the mock."""
    kept = {
        key: value
        for key, value in os.environ.items()
        if key not in SET_ASIDE and not key.startswith("AWS_ENDPOINT_URL_")
    }
    ours = {key: value for key, value in SET_ASIDE.items() if value is not None}
    return mock.patch.dict(os.environ, {**kept, **ours}, clear=True)
