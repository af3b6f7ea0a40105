"""The set-up from scratch: in a path with spaces and umlauts, interrupted, without a home folder.

The packages come from uv's cache, if the set-up for these tests has left them there.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from helpers.pages import ROOT, copy_repository, start_in_a_terminal

CACHE = os.environ.get("UV_CACHE_DIR", Path.home() / ".cache" / "uv")


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the repository's files to a new folder, in which nothing is set up."""
    folder = tmp_path_factory.mktemp("a b") / "ü"
    copy_repository(folder)
    return folder


def set_up(clone: Path) -> subprocess.Popen:
    """Start the set-up as the Makefile's targets do."""
    environment = {"HOME": "/proc/no-such-home", "UV_CACHE_DIR": str(CACHE)}
    return start_in_a_terminal(["make", ".venv/.ready"], clone, **environment)


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


# A Python that says that it is 3.14.
TOO_NEW = """#!/bin/sh
exec {python} -c "import sys; sys.version_info = (3, 14, 0); exec(sys.argv[1])" "$2"
"""


@pytest.mark.quick
def test_a_python_that_is_too_new_is_refused_in_one_line(tmp_path: Path):
    (tmp_path / "scripts").mkdir()
    script = tmp_path / "scripts" / "setup.sh"
    script.write_bytes((ROOT / "scripts" / "setup.sh").read_bytes())
    python = tmp_path / "python"
    python.write_text(TOO_NEW.format(python=sys.executable))
    python.chmod(0o755)
    environment = os.environ | {"PYTHON": str(python)}
    ended = subprocess.run(["bash", script], env=environment, capture_output=True, text=True)
    assert ended.returncode == 1 and ended.stderr.count("\n") == 1
    assert "found no Python 3.11, 3.12 or 3.13 with the venv module (3.14 is too new: there" in (
        ended.stderr
    )


@pytest.mark.quick
def test_pages_promise_the_pythons_that_the_set_up_takes_and_ci_runs():
    """`make versions` reads them from the set-up."""
    script = (ROOT / "scripts" / "setup.sh").read_text()
    versions = re.search(r'^supported="(.*)"$', script, re.M)[1].split()
    *most, last = versions
    words = f"{', '.join(most)} (or|and) {last}"
    for page in ("docs/setup.md", "docs/teaching.md", "docs/limits.md", "workshop.md"):
        assert re.search(words, " ".join((ROOT / page).read_text().split())), page
    assert f"Python {versions[0]} to {last}," in (ROOT / "README.md").read_text()
    assert re.search(f"^# .*for Python {words}", (ROOT / "requirements.txt").read_text())
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())
    assert workflow["jobs"]["tests"]["strategy"]["matrix"]["python"] == versions
    parts = f"\nparts=({' '.join(versions)} oldest thorough containers)\n"
    assert parts in (ROOT / ".ci" / "run").read_text()


@pytest.mark.quick
def test_pages_promise_the_oldest_versions_that_ci_runs():
    script = (ROOT / "tests" / "versions.sh").read_text()
    python, torch = re.search(r"^oldest_python=(\S+) oldest_torch=(\S+)$", script, re.M).groups()
    limits = " ".join((ROOT / "docs" / "limits.md").read_text().split())
    assert f"with {torch} on Python {python} (`make versions`)" in limits
    assert f"needs Python {python} or newer" in (ROOT / "pt.grpc.sagemaker/README.md").read_text()
