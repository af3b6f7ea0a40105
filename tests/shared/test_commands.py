"""The commands of shared/, with their output piped into one that ends before them."""

import subprocess
import sys

import pytest

from pages import ROOT

ADVISOR = "shared.advisor --instance ml.p4d.24xlarge --step-ms 192 --accelerator-ms 80"


@pytest.mark.parametrize(
    "command, first",
    [(ADVISOR, "Verdict: go heterogeneous"), ("shared.costs --published", "TensorFlow")],
)
def test_head_may_end_before_the_command(command: str, first: str):
    for lines, expected in ((0, ""), (1, first)):  # head -n 0 ends without reading
        done = subprocess.run(
            ["bash", "-c", f"set -o pipefail; '{sys.executable}' -m {command} | head -n {lines}"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(expected) and done.stdout.count("\n") == lines
