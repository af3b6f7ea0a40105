"""The set-up from nothing: in a path with spaces and umlauts, interrupted, without a home folder.

The packages come from uv's cache where the set-up of these tests has left them.
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
    """The repository's files in another place, which nothing has been set up in."""
    folder = tmp_path_factory.mktemp("a b") / "ü"
    copy_repository(folder)
    return folder


def set_up(clone: Path) -> subprocess.Popen:
    """Start it as the Makefile's targets do, in a terminal's process group of its own."""
    environment = os.environ | {"HOME": "/proc/no-such-home", "UV_CACHE_DIR": str(CACHE)}
    return subprocess.Popen(
        ["make", ".venv/.ready"],
        cwd=clone,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # Where the tests run in the background, Ctrl-C would be ignored.
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
    assert "interrupted; the same command continues it." in process.communicate(timeout=30)[0]
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
    assert "what does not need them runs:\nruff==0.0.0: " in output, output
    ready = clone / ".venv" / ".ready"
    assert not ready.exists() or ready.stat().st_mtime < requirements.stat().st_mtime
