"""For the tests of shared/: prices are those of prices.csv, AWS is moto's."""

from types import SimpleNamespace

import pytest
import torch
from moto import mock_aws

from shared import measured as module


@pytest.fixture(autouse=True)
def no_refreshed_prices(tmp_path, monkeypatch):
    """Only the prices of prices.csv, whatever this user has got from AWS."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def aws(monkeypatch):
    """Moto in place of AWS."""
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    with mock_aws():
        yield


@pytest.fixture
def alone(monkeypatch):
    """No instance of EC2 answers, and no test measures what another has begun.

    One thread: several would wait for each other where other programs have a core.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(module, "_loops", {})
    # Not for others: h5py, which TensorFlow imports, would crash at the end of the process.
    monkeypatch.setattr(module, "atexit", SimpleNamespace(register=lambda report: None))
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def clock(monkeypatch):
    """The time that measured.py sees: `now` in seconds."""
    world = SimpleNamespace(now=0.0)
    world.perf_counter = lambda: world.now
    world.sleep = lambda seconds: setattr(world, "now", world.now + seconds)
    monkeypatch.setattr(module, "time", world)
    return world
