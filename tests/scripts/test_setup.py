"""The set-up from scratch: in a path with spaces and umlauts, interrupted, without a home folder.

The packages come from uv's cache, if the set-up for these tests has left them there.
"""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from helpers.pages import copy_repository

CACHE = os.environ.get("UV_CACHE_DIR", Path.home() / ".cache" / "uv")


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the repository's files to a new folder, in which nothing is set up."""
    folder = tmp_path_factory.mktemp("a b") / "ü"
    copy_repository(folder)
    return folder


def set_up(clone: Path) -> subprocess.Popen:
    """Start the set-up as the Makefile's targets do, in its own session for Ctrl-C."""
    environment = os.environ | {"HOME": "/proc/no-such-home", "UV_CACHE_DIR": str(CACHE)}
    return subprocess.Popen(
        ["make", ".venv/.ready"],
        cwd=clone,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # If the tests run in the background, Ctrl-C would be ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_hello_world_runs_after_a_set_up_that_was_interrupted(clone: Path):
    process = set_up(clone)
    while not (clone / ".venv" / ".unfinished").exists():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    assert "interrupted. Run the same command again" in process.communicate(timeout=30)[0]
    assert not (clone / ".venv" / ".ready").exists()

    process = set_up(clone)
    assert "PyTorch: " in process.communicate()[0] and process.returncode == 0
    python = str(clone / ".venv" / "bin" / "python")
    hello = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "hello.world.sagemaker"]
    done = subprocess.run(hello, cwd=clone, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_what_can_be_had_is_installed_and_the_rest_named(clone: Path):
    requirements = clone / "requirements.txt"
    requirements.write_text(requirements.read_text().replace("ruff\n", "ruff==0.0.0\n"))
    output = set_up(clone).communicate()[0]
    assert "Everything that does not need them works:\nruff==0.0.0: " in output, output
    ready = clone / ".venv" / ".ready"
    assert not ready.exists() or ready.stat().st_mtime < requirements.stat().st_mtime
