"""Run typical training scripts unchanged, and with one more line, which wraps a RemoteDataset.

A test file has such scripts as functions. Each takes a function that wraps a Dataset, and returns
the batches that it has trained on. Run as a program, the test file is a rank, and calls `main`.
"""

import json
import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils.data import Dataset

from feed import RemoteDataset
from helpers.data_hosts import DataHost, environment_of, free_port, up
from helpers.datasets import assert_same

RANKS = 2
Wrap = Callable[[Dataset], Dataset]  # either RemoteDataset, or a function that changes nothing
LIBRARY = "def double(value):\n    return value * 2\n"  # modules of the script


def is_there() -> bool:
    """Whether data hosts must prepare the samples; called when a Dataset is created."""
    return "IS_THERE" in os.environ


class Numbers(Dataset):
    """Sample i has the number i; preparing it fails if this does not happen where it should."""

    def __init__(self, length: int = 45):
        self.length, self.classes, self.is_there = length, ["even", "odd"], is_there()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self.is_there:
            assert os.environ["PLACE"] == "a data host"
        generator = torch.Generator().manual_seed(index)
        return torch.rand(4, generator=generator) + index, index % 2


def new_model() -> torch.nn.Module:
    """Return a model with the same weights each time."""
    torch.manual_seed(3)
    return torch.nn.Linear(4, 2)


def run(script: str, folder: Path, names: list[str]) -> dict[str, list[str]]:
    """Run scripts, which are in the subfolder tools, on two ranks with two data hosts.

    Returns:
        By script, how it ended on each rank: "" or a traceback.
    """
    for place in ("library", "tools"):
        (folder / place).mkdir()
        (folder / place / f"{place}_of_mine.py").write_text(LIBRARY)
    script = Path(shutil.copy(script, folder / "tools")).relative_to(folder)
    place, ranks = {"PLACE": "a data host"}, []
    hosts = [DataHost(workers, environment=place, folder=folder) for workers in (1, 2)]
    try:
        environment = environment_of(up(*hosts)) | {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(RANKS),
            "LOCAL_WORLD_SIZE": str(RANKS),
            "CUDA_VISIBLE_DEVICES": "",
        }
        for number in range(RANKS):
            local = {"RANK": str(number), "LOCAL_RANK": str(number), "NODE_RANK": "0"}
            command = [sys.executable, script, *names]
            ranks.append(subprocess.Popen(command, cwd=folder, env=environment | local))
        assert [rank.wait(timeout=280) for rank in ranks] == [0] * RANKS
        ended = [json.loads((folder / f"ended-{rank}").read_text()) for rank in range(RANKS)]
        return {name: [of_rank[name] for of_rank in ended] for name in names}
    finally:
        for rank in ranks:
            rank.kill()
        for host in hosts:
            host.kill()


def main(scripts: dict) -> None:
    """Run the scripts named in argv without and with RemoteDataset, and compare the results."""
    ended = {}
    for name in sys.argv[1:]:
        try:
            os.environ.pop("IS_THERE", None)
            expected = scripts[name](lambda dataset: dataset)
            os.environ["IS_THERE"] = "yes"
            assert_same(scripts[name](RemoteDataset), expected)
            ended[name] = ""
        except BaseException:
            ended[name] = traceback.format_exc()
    Path(f"ended-{os.environ['RANK']}").write_text(json.dumps(ended))
