"""`make demo`, apart from its notebooks: two runs at once, a second run, Ctrl-C, a failure."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import psutil
import pytest

from helpers.pages import ROOT

SAY_AND_WAIT = """
import os, time
open("kernel.pid", "w").write(str(os.getpid()))
time.sleep(100)
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Create a repository with the script, and a folder for a notebook."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "demo.py", tmp_path / "scripts")
    (tmp_path / "any.sagemaker").mkdir()
    return tmp_path


def start(repository: Path, *cells: str) -> subprocess.Popen:
    """Run the demo with a notebook of these cells; the last one is tagged `comparison`."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# A heading")])
    notebook.cells += [nbformat.v4.new_code_cell(cell) for cell in cells]
    notebook.cells[-1].metadata.tags = ["comparison"]
    nbformat.write(notebook, repository / "any.sagemaker" / "any.ipynb")
    return subprocess.Popen(
        [sys.executable, "scripts/demo.py"],
        cwd=repository,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # If the tests run in the background, Ctrl-C would be ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


@pytest.mark.thorough
def test_two_at_once_and_one_more(repository: Path):
    for count in (2, 1):
        for demo in [start(repository, "a = 6", "print(a * 7)") for _ in range(count)]:
            output = demo.communicate(timeout=100)[0]
            assert demo.returncode == 0, output
            assert "any: comparison\n\n42\n" in output
            assert f"{repository}/build/any.html" in output
    assert "42" in (repository / "build" / "any.html").read_text()


def test_ctrl_c_ends_the_kernel_too(repository: Path):
    demo, told = start(repository, SAY_AND_WAIT), repository / "any.sagemaker" / "kernel.pid"
    while not (told.exists() and told.read_text()):
        assert demo.poll() is None, demo.communicate()[0]
        time.sleep(0.1)
    kernel = psutil.Process(int(told.read_text()))
    os.killpg(demo.pid, signal.SIGINT)
    output = demo.communicate(timeout=30)[0]
    assert demo.returncode == 1 and "Interrupted; the kernel has been shut down." in output
    assert not kernel.is_running()


def test_a_notebook_that_fails_says_why_and_is_kept(repository: Path):
    demo = start(repository, "print('so far')", "1 / 0")
    output = demo.communicate(timeout=100)[0]
    assert demo.returncode == 1
    assert "any.ipynb failed: ZeroDivisionError: division by zero" in output
    assert "so far" in (repository / "build" / "any.html").read_text()
