"""The commonest ways in which a job of the PyTorch example ends, without PyTorch itself; SIGTERM.

helpers/endings.py lists all of them; `make thorough` runs all, with PyTorch (tests/endings.py).
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers.endings import ENDINGS, begin, finish
from helpers.jobs import Jobs, start_kernel
from helpers.pages import EXAMPLE
from helpers.running import LINGER, PAIR, Running, a_host, start_programs, upload_images
from helpers.waiting import wait_until_gone


# test_workshop.py kills the launcher of a data host, and below, StopTrainingJob is called.
@pytest.mark.parametrize(
    "name", ["training succeeds", "a rank is killed", "launcher killed on the leader"]
)
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
job = running.start(jobs, groups=running.PAIR, hyperparameters={"max-steps": 30}, torch=False)
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


# ---- SIGTERM

SAVES = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("saved", flush=True)))  # with status 0
print("ready", flush=True)
time.sleep(100)
"""


@pytest.mark.parametrize("by_api", [False, True])
def test_ranks_that_end_well_when_they_are_stopped_do_not_complete_the_job(
    jobs: Jobs, by_api: bool
):
    job = start_programs(jobs, SAVES, groups=PAIR)
    jobs.wait_for_log(job.name, "ready")
    if by_api:
        job.stop()
    else:  # of one data host, such as by AWS's maintenance
        job.launcher("data_group", 0).terminate()
    ended = jobs.wait(job.name)
    assert ended["TrainingJobStatus"] == ("Stopped" if by_api else "Failed")
    said = r"The job was stopped \(SIGTERM\)\. On algo-\d \(dnn_group\), train.py had not ended\."
    assert by_api or re.search(rf"{said}, exit code: 1$", ended["FailureReason"])
    assert sum(bool(re.match(f"hetero: {said}", line)) for line in job.log()) == 2  # on every host
    assert job.log().count("saved") == 1


def test_sigterm_after_the_training_changes_nothing(jobs: Jobs):
    serve = (
        "import signal, sys, time\n"
        "def end(*_):\n    print('ending', flush=True)\n    time.sleep(3)\n    sys.exit()\n"
        "signal.signal(signal.SIGTERM, end)\nprint('serving', flush=True)\ntime.sleep(100)"
    )
    job = start_programs(jobs, LINGER, "--spare-cores 0", serve, groups=PAIR)
    jobs.wait_for_log(job.name, "ending")
    for launcher in job.launchers():
        launcher.terminate()
    assert jobs.wait(job.name)["TrainingJobStatus"] == "Completed"


BRIEF = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit())
time.sleep(1)
print("trained", flush=True)
"""


def test_sigterm_at_any_moment_never_turns_into_success(tmp_path: Path):
    """From the launcher's first moment, before it handles SIGTERM, to its last."""
    (tmp_path / "train.py").write_text(BRIEF)
    address = {"addresses": {"algo-1": "127.77.1.1"}, "base_port": 20_000 + os.getpid() % 10_000}
    environment = a_host(tmp_path, {}) | {"LOCAL_SAGEMAKER": json.dumps(address)}
    command, chance = [sys.executable, "-m", "hetero", "train.py"], random.Random(0)
    settings = {"cwd": tmp_path, "env": environment, "stdout": subprocess.PIPE, "text": True}
    began = time.monotonic()
    assert subprocess.run(command, **settings).returncode == 0
    whole, ends = time.monotonic() - began, set()
    for _ in range(16):
        launcher = subprocess.Popen(command, **settings, stderr=subprocess.STDOUT)
        time.sleep(chance.uniform(0, 1.2 * whole))
        launcher.terminate()
        output, _ = launcher.communicate(timeout=30)
        assert launcher.returncode != 0 or "trained" in output.splitlines(), output
        assert launcher.returncode != 1 or "hetero: The job was stopped (SIGTERM)." in output
        # Python's start-up is killed; in a container, Linux would drop the signal then.
        assert launcher.returncode != -signal.SIGTERM or "trained" not in output, output
        assert launcher.returncode != 0 or "Traceback" not in output, output
        ends.add(launcher.returncode)
    assert {1} <= ends <= {0, 1, -signal.SIGTERM}
