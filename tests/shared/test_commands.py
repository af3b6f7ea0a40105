"""The commands of shared/, with their output piped into a program that ends before them."""

import subprocess
import sys

import pytest

from helpers.pages import ROOT

pytestmark = pytest.mark.quick
ADVISOR = "shared.advisor --instance ml.p4d.24xlarge --step-ms 192 --accelerator-ms 80"


def test_head_may_end_before_the_command():
    for lines, expected in ((0, ""), (1, "Verdict: go heterogeneous")):  # head -n 0 reads nothing
        done = subprocess.run(
            ["bash", "-c", f"set -o pipefail; '{sys.executable}' -m {ADVISOR} | head -n {lines}"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(expected) and done.stdout.count("\n") == lines
