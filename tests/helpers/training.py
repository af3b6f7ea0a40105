"""Run the training script of the PyTorch example as users do, without a job."""

import os
import re
import subprocess
import sys
from pathlib import Path

import torch

from helpers.pages import EXAMPLE

STEP_LINE = re.compile(
    r"^step=(\d+) epoch=(\d+) loss=([\d.]+) step_time_ms=([\d.]+) data_wait_ms=([\d.]+) "
    r"samples_per_s=([\d.]+)$",
    re.MULTILINE,
)


def settings(data_hosts: str = "") -> dict:
    """Return subprocess's settings for a program of a host that knows these data hosts."""
    host = {"HETERO_TOKEN": "a token", "HETERO_DATA_HOSTS": data_hosts}
    env = {**os.environ, **host, "PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1"}
    pipe = subprocess.PIPE
    return {"cwd": EXAMPLE / "code", "env": env, "stdout": pipe, "stderr": pipe, "text": True}


def start(*command: str | Path) -> subprocess.Popen:
    """Start a Python program of the example (or a module, with -m)."""
    return subprocess.Popen([sys.executable, *map(str, command)], **settings())


def run(*command: str | Path, data_hosts: str = "") -> subprocess.CompletedProcess:
    """Run a Python program of the example to its end."""
    words = [sys.executable, *map(str, command)]
    return subprocess.run(words, **settings(data_hosts), timeout=120)


def torchrun(ranks: int) -> list[str]:
    """Return the arguments before a program that run it on this many ranks."""
    return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]


def train(*arguments: str | Path, ranks: int = 0, data_hosts: str = "") -> str:
    """Run train_dnn.py, which must succeed; return its output. With 0 ranks, without torchrun."""
    command = [*(torchrun(ranks) if ranks else []), "train_dnn.py", *arguments]
    done = run(*command, data_hosts=data_hosts)
    assert done.returncode == 0, done.stderr
    return done.stdout


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights that a run has saved."""
    return torch.load(folder / "model.pt")
