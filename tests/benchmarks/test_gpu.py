"""The benchmark for a machine with a GPU runs without one, too; then everything is small."""

import json
import subprocess
import sys

import pytest

from helpers.pages import ROOT


@pytest.mark.thorough
@pytest.mark.timeout(720)
def test_all_parts_run_and_print_what_they_measure():
    command = [sys.executable, "benchmarks/gpu.py", "--small"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("| equal |") == 6
    results = json.loads((ROOT / "build" / "bench" / "gpu.json").read_text())
    assert {*results["batches"].values()} == {True}
    assert {name: len(its["losses"]) for name, its in results["ranks"].items()} == {
        "ddp": 20,
        "fsdp": 20,
    }
    floor, *fed = (its for its in results["feeding"].values() if isinstance(its, dict))
    assert floor["mean step"] > 0 and len(fed) >= 2
    for way in fed:
        assert len(way["waits"]) > 1 and sum(way["waits"]) > 0
        assert way["measured"]["step_ms"] > 0 and "CPU-bound" in way["measured"]["verdict"]
