"""If the disk is full, the error names the file or folder, and no partial file is left."""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helpers.jobs import ROOT, Jobs

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Return a function that mounts a disk of a given size, such as "64k"."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(size: str) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "small", str(folder)]
        subprocess.run(command, check=True)
        return folder

    yield mount
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.parametrize(
    "example, name",
    [
        ("pt.grpc.sagemaker", "/checkpoint.pt"),
        pytest.param("tf.data.service.sagemaker", "", marks=pytest.mark.thorough),
    ],
)
def test_a_checkpoint(disk: Callable[[str], Path], tmp_path: Path, example: str, name: str):
    folder = disk("64k")
    options = "--data-mode synthetic --model small --batch-size 4 --max-steps 3"
    folders = ["--checkpoint-dir", str(folder), "--model-dir", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "train_dnn.py", *options.split(), *folders],
        cwd=ROOT / example / "code",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    said = done.stderr.splitlines()[-1]
    path = re.escape(f"'{folder}{name}'")
    why = r"OSError: \[Errno 28\] No space left on device for ([\d,]+) bytes: "
    assert int(re.fullmatch(why + path, said)[1].replace(",", "")) > 64 << 10, said
    # SageMaker would copy a partial file.
    assert not [path for path in folder.rglob("*") if path.is_file()]


def test_the_local_sagemaker(disk: Callable[[str], Path], jobs: Jobs, monkeypatch):
    folder = disk("8m")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    job = jobs.run({"train.py": "while True: print('x' * 5000)"}, "exec python train.py")
    assert job["TrainingJobStatus"] == "Failed"
    why = "the process that runs the hosts ended: OSError: [Errno 28] No space left on device"
    assert job["FailureReason"] == f"InternalServerError: local SageMaker: {why}"
