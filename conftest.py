"""Set-up and fixtures for all tests. Tests run jobs on this machine only, never on AWS."""

import contextlib
import logging
import os
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

# Import triton before TensorFlow: otherwise triton's import crashes (docs/troubleshooting.md).
with contextlib.suppress(ImportError):
    import triton  # noqa: F401

# Every notebook's kernel runs this first. Like AWS, it refuses calls that the policy of docs/aws.md
# does not allow.
STARTUP = Path(__file__).parent / "build" / "ipython" / "profile_default" / "startup"
STARTUP.mkdir(parents=True, exist_ok=True)
(STARTUP / "policy.py").write_text(
    f"""
import sys
sys.path[:0] = places = {[str(Path(__file__).parent), str(Path(__file__).parent / "tests")]}
from helpers import permissions
allowed, absent = permissions.enforce(permissions.managed_policy("AmazonSageMakerFullAccess"))
del sys.path[: len(places)], places  # the notebook must find its modules by itself
"""
)
os.environ["IPYTHONDIR"] = str(STARTUP.parents[1])
os.environ["SAGEMAKER_TARGET"] = "local"  # overrides the shell's value, for notebooks too
os.environ.pop("SAGEMAKER_ROLE", None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put notebooks and the files marked `first` before the others.

    A long file that starts last keeps one process busy while the others are idle. With a PART of 0
    to 4, keep a fifth of the tests.
    """
    if part := os.environ.get("PART"):
        items[:] = [item for item in items if zlib.crc32(item.nodeid.encode()) % 5 == int(part)]
    items.sort(
        key=lambda item: not (item.path.suffix == ".ipynb" or item.get_closest_marker("first"))
    )


@pytest.fixture(scope="session", autouse=True)
def no_litter() -> Iterator[None]:
    """After all tests, delete temporary files of the processes that tests have killed."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)  # for child processes; this process keeps its own
        yield


@pytest.fixture(autouse=True)
def logging_is_not_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo what an earlier test's libraries have configured: the loader then prints nothing."""
    monkeypatch.setattr(logging.root, "handlers", [])


@pytest.fixture(scope="module")
def local(temporary_folder) -> Iterator:
    """A local SageMaker session for the tests of one module."""
    from shared import local_sagemaker

    with local_sagemaker.start() as session:
        yield session


@pytest.fixture(scope="module")
def jobs(local, tmp_path_factory: pytest.TempPathFactory):
    """Starts training jobs in the session of `local`."""
    from helpers.jobs import Jobs

    return Jobs(local.role, tmp_path_factory.mktemp("code"))


@pytest.fixture(scope="module")
def hosts() -> Iterator[list]:
    """Three data hosts with different numbers of worker processes.

    They are forked; test_feed_servers.py, scripts and all jobs start them as users do.
    """
    from helpers.data_hosts import DataHost, up

    hosts = up(*[DataHost(workers) for workers in (1, 2, 3)])
    yield hosts
    for host in hosts:
        host.kill()


@pytest.fixture
def start() -> Iterator:
    """Starts data hosts that the test may break: see `data_hosts.starting`."""
    from helpers.data_hosts import starting

    with starting() as start:
        yield start


@pytest.fixture(scope="module")
def temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A separate temporary folder for the jobs' files, so that tests can check what jobs leave.

    Its name is short, because sockets need short paths; pytest's are too long.
    """
    tmp_path_factory.getbasetemp()  # must exist before, or pytest would create it in our folder
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


@pytest.fixture
def nothing_is_left(temporary_folder: Path):
    """After each test, check that its jobs have left neither folders nor processes."""
    yield
    from helpers.jobs import processes_naming  # this file is read before tests/ is on the path
    from helpers.waiting import wait_until_gone

    wait_until_gone(
        lambda: [*temporary_folder.iterdir(), *processes_naming(f"{temporary_folder}/")]
    )
