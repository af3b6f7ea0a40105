"""Run the training script of the PyTorch example as users do, without a job."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import train_dnn
from helpers.pages import EXAMPLE

CODE = EXAMPLE / "code"
STEP_LINE = re.compile(
    r"^step=(\d+) epoch=(\d+) loss=([\d.]+) step_time_ms=([\d.]+) data_wait_ms=([\d.]+) "
    r"samples_per_s=([\d.]+)$",
    re.MULTILINE,
)


def start(*command: str | Path, data_hosts: str = "") -> subprocess.Popen:
    """Start a Python program of the example (or a module, with -m)."""
    job = {"HETERO_TOKEN": "a token", "HETERO_DATA_HOSTS": data_hosts, "PYTHONHASHSEED": "0"}
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        cwd=CODE,
        env={**os.environ, **job, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(*command: str | Path, data_hosts: str = "") -> subprocess.CompletedProcess:
    """Run a Python program of the example to its end."""
    with start(*command, data_hosts=data_hosts) as program:
        try:
            output, errors = program.communicate(timeout=120)
        finally:
            program.kill()
    return subprocess.CompletedProcess(command, program.returncode, output, errors)


def torchrun(ranks: int) -> list[str]:
    """Return the arguments before a program that run it on this many ranks."""
    return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]


def train(*arguments: str | Path, ranks: int = 0, data_hosts: str = "") -> str:
    """Run train_dnn.py, which must succeed; return its output. With 0 ranks, without torchrun."""
    command = [*(torchrun(ranks) if ranks else []), "train_dnn.py", *arguments]
    done = run(*command, data_hosts=data_hosts)
    assert done.returncode == 0, done.stderr
    return done.stdout


def refusal(command: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Call train_dnn.py's main function, which must refuse these options; return its message."""
    monkeypatch.setattr(sys, "argv", ["train_dnn.py", *command.split()])
    threads = torch.get_num_threads()
    with pytest.raises(SystemExit) as end:
        train_dnn.main()
    torch.set_num_threads(threads)
    assert "\n" not in end.value.code
    return end.value.code
