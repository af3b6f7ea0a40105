"""Fixtures for the tests of shared/: prices come from prices.csv, and moto stands in for AWS."""

import functools
from types import SimpleNamespace

import boto3
import pytest
import torch
from moto import mock_aws

from shared import measured as module


@pytest.fixture(autouse=True)
def no_refreshed_prices(tmp_path, monkeypatch):
    """Use only the prices of prices.csv, not those that this user has fetched from AWS."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture(scope="module")
def make_client():
    """Like boto3.client, but a module's tests share each client: one takes long to make."""
    cached = functools.cache(boto3.client)
    yield cached
    cached.cache_clear()  # the local SageMaker does not start beside AWS's clients


@pytest.fixture
def aws(monkeypatch, make_client):
    """Replace AWS with moto."""
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setattr(boto3, "client", make_client)
    with mock_aws():
        yield


@pytest.fixture
def alone(monkeypatch):
    """No EC2 metadata service answers, and no test continues the measurement of another.

    Torch uses one thread: several would wait for each other while other programs use a core.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(module, "_loops", {})
    # Replaced only in this module: otherwise h5py, which TensorFlow imports, crashes at exit.
    monkeypatch.setattr(module, "atexit", SimpleNamespace(register=lambda report: None))
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def clock(monkeypatch):
    """The clock that measured.py sees; `now` is in seconds."""
    world = SimpleNamespace(now=0.0)
    world.perf_counter = lambda: world.now
    world.sleep = lambda seconds: setattr(world, "now", world.now + seconds)
    monkeypatch.setattr(module, "time", world)
    return world
