"""For all tests: they never leave this machine, and may run training jobs on it."""

import os
from collections.abc import Iterator

import pytest

os.environ["SAGEMAKER_TARGET"] = "local"  # the notebooks among them, whatever the shell says


@pytest.fixture(scope="module")
def local() -> Iterator:
    """A local SageMaker session for the tests of one module."""
    from shared import local_sagemaker

    with local_sagemaker.start() as session:
        yield session


@pytest.fixture(scope="module")
def jobs(local, tmp_path_factory: pytest.TempPathFactory):
    """Training jobs in that session."""
    from jobs import Jobs

    return Jobs(local.role, tmp_path_factory.mktemp("code"))
