"""The ways in which a job of the PyTorch example can end, except those that need PyTorch itself.

helpers/endings.py lists them; `make thorough` runs all of them with PyTorch (tests/endings.py).
"""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from helpers.endings import ENDINGS, Begun, begin, finish
from helpers.jobs import Jobs, start_kernel
from helpers.pages import EXAMPLE
from helpers.running import Running, upload_images
from helpers.waiting import wait_until_gone

pytestmark = pytest.mark.first
SLOW = [name for name, ending in ENDINGS.items() if ending.slow and not ending.torch]
QUICK = [name for name, ending in ENDINGS.items() if not ending.slow and not ending.torch]


@pytest.fixture(scope="module")
def waiting(jobs: Jobs) -> dict[str, Begun]:
    """Start the slow endings first: the other tests run while these wait."""
    upload_images()
    return {name: begin(jobs, name, torch=False) for name in SLOW}


@pytest.mark.parametrize("name", QUICK)
def test_ending(jobs: Jobs, waiting: dict, name: str):
    finish(begin(jobs, name, torch=False))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SLOW)
def test_slow_ending(waiting: dict, name: str):
    finish(waiting[name])


# Rows of the table that the last test here checks.
BELOW = {"Ctrl-C in the notebook", "the notebook's kernel ends (locally)"}


def test_every_row_of_the_table_has_an_ending_with_its_reason():
    text = (EXAMPLE / "job.md").read_text().split("## How a job ends")[1]
    rows = [line.split("|") for line in re.findall(r"^\| (.+)\|$", text, re.M)]
    reasons = {name.strip(): reason.strip() for name, _, reason, _ in rows[1:]}
    assert reasons.keys() == ENDINGS.keys() | BELOW
    for name, ending in ENDINGS.items():
        if ending.status == "Failed":
            said = re.sub("(600|300) s", "20 s", reasons[name])  # the tests wait less
            assert re.fullmatch(ending.reason, said), name


KERNEL = """
from helpers import running
from shared import monitoring
running.upload_images()
groups = {"data_group": ("ml.c5.xlarge", 1), "dnn_group": ("ml.m5.xlarge", 1)}
job = running.start(jobs, groups=groups, hyperparameters={"max-steps": 30}, torch=False)
running.after_steps(job)
try:
    print("RUNNING", job.name, flush=True)
    monitoring.wait(job.name)
except KeyboardInterrupt:  # ends a notebook's cell, not its kernel
    print("INTERRUPTED", flush=True)
monitoring.wait(job.name)
print("ENDED WELL", flush=True)
"""


def read_until(word: str, kernel: subprocess.Popen) -> str:
    """Return the first line that begins with `word`; the lines before it are lost."""
    lines = []
    for line in kernel.stdout:
        lines.append(line)
        if line.startswith(word):
            return line
    raise AssertionError(f"the kernel ended without {word}: {lines}")


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.thorough)]
)
def test_ctrl_c_and_the_end_of_the_kernel(tmp_path: Path, temporary_folder: Path, number: int):
    kernel = start_kernel(KERNEL, tmp_path)
    job = Running(None, read_until("RUNNING", kernel).split()[1])
    assert job.processes(has="RANK")
    os.kill(kernel.pid, number)
    if number == signal.SIGINT:
        read_until("INTERRUPTED", kernel)
        assert job.processes(has="RANK")
        read_until("ENDED WELL", kernel)
    wait_until_gone(lambda: [*job.processes(), *temporary_folder.iterdir()])
    kernel.communicate(timeout=30)
