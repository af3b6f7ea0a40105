"""The commonest ways in which a job of the PyTorch example ends, without PyTorch itself.

helpers/endings.py lists all of them; `make thorough` runs all, with PyTorch (tests/endings.py).
"""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from helpers.endings import ENDINGS, begin, finish
from helpers.jobs import Jobs, start_kernel
from helpers.pages import EXAMPLE
from helpers.running import Running, upload_images
from helpers.waiting import wait_until_gone

COMMON = [
    "training succeeds",
    "a rank is killed",
    "launcher killed on a data host",
    "launcher killed on the leader",
    "StopTrainingJob",
]


@pytest.mark.parametrize("name", COMMON)
def test_ending(jobs: Jobs, name: str):
    upload_images()
    finish(begin(jobs, name, torch=False))


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


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
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
