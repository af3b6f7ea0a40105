"""For all tests: they never leave this machine, and may run training jobs on it."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before TensorFlow, or it crashes in the tests that have both (docs/troubleshooting.md).
with contextlib.suppress(ImportError):
    import triton  # noqa: F401

# Every notebook's kernel begins with this: a call that the policy of docs/aws.md does not
# allow is refused, as on AWS.
STARTUP = Path(__file__).parent / "build" / "ipython" / "profile_default" / "startup"
STARTUP.mkdir(parents=True, exist_ok=True)
(STARTUP / "policy.py").write_text(
    f"""
import sys
sys.path[:0] = places = {[str(Path(__file__).parent), str(Path(__file__).parent / "tests")]}
from helpers import permissions
allowed, absent = permissions.enforce(permissions.managed_policy("AmazonSageMakerFullAccess"))
del sys.path[: len(places)], places  # the notebook finds its modules by itself
"""
)
os.environ["IPYTHONDIR"] = str(STARTUP.parents[1])
os.environ["SAGEMAKER_TARGET"] = "local"  # the notebooks among them, whatever the shell says
os.environ.pop("SAGEMAKER_ROLE", None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put notebooks and the files marked `first` before the others.

    A long file that is started last keeps one process busy while the others idle.
    """
    items.sort(
        key=lambda item: not (item.path.suffix == ".ipynb" or item.get_closest_marker("first"))
    )


@pytest.fixture(scope="session", autouse=True)
def no_litter() -> Iterator[None]:
    """Processes that tests kill cannot clean up: what they leave goes when the tests have ended."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)  # theirs: this process knows its own by now
        yield


@pytest.fixture(scope="module")
def local(temporary_folder) -> Iterator:
    """A local SageMaker session for the tests of one module."""
    from shared import local_sagemaker

    with local_sagemaker.start() as session:
        yield session


@pytest.fixture(scope="module")
def jobs(local, tmp_path_factory: pytest.TempPathFactory):
    """Training jobs in that session."""
    from helpers.jobs import Jobs

    return Jobs(local.role, tmp_path_factory.mktemp("code"))


@pytest.fixture(scope="module")
def hosts() -> Iterator[list]:
    """Three data hosts with different numbers of worker processes, which end cleanly."""
    from helpers.data_hosts import DataHost, has_ended, up
    from helpers.waiting import wait_until

    hosts = up(*[DataHost(workers) for workers in (1, 2, 3)])
    yield hosts
    processes = [process for host in hosts for process in host.processes()]
    for host in hosts:
        host.process.terminate()
    assert [host.process.wait(timeout=30) for host in hosts] == [0, 0, 0]
    wait_until(lambda: all(map(has_ended, processes)))


@pytest.fixture
def start() -> Iterator:
    """Starts data hosts that a test may harm: see `data_hosts.starting`."""
    from helpers.data_hosts import starting

    with starting() as start:
        yield start


@pytest.fixture(scope="module")
def temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of our own for the jobs' files, so that what they leave can be told from others'.

    With a short name, as the sockets in it need: those of pytest are too long.
    """
    tmp_path_factory.getbasetemp()  # now, or pytest would put its own into ours
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


@pytest.fixture
def nothing_is_left(temporary_folder: Path):
    """After every test, the jobs that it waited for have left neither folders nor processes."""
    yield
    from helpers.jobs import processes_naming  # tests/ gets on the path after this file is read
    from helpers.waiting import wait_until_gone

    wait_until_gone(
        lambda: [*temporary_folder.iterdir(), *processes_naming(f"{temporary_folder}/")]
    )
