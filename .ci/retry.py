"""Runs again, alone, what failed beside other tests: for .ci/run.

On a machine that does other things too a test may fail for want of time, and must then pass alone.
The tests of hetero/ and feed/, which people copy, must pass alone five times, and so must the
endings of a job. The names are added to build/retried.txt, which .ci/run prints last.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

OF_WHAT_IS_COPIED = ("tests/pt.grpc.sagemaker/", "tests/tf.data.service.sagemaker/")
RUNS = 5
MOST = 10  # more than that do not fail by chance
FAILED_TESTS = Path(".pytest_cache/v/cache/lastfailed")
FAILED_ENDINGS = Path("build/failed-endings.txt")  # tests/endings.py writes it


def run(*arguments: str) -> None:
    """Run Python with these arguments; if that fails, so does this program."""
    if status := subprocess.run([sys.executable, *arguments]).returncode:
        sys.exit(status)


def main() -> None:
    """Run what has failed; exit with a status other than 0 if any of it fails again."""
    tests = list(json.loads(FAILED_TESTS.read_text())) if FAILED_TESTS.exists() else []
    endings = FAILED_ENDINGS.read_text().splitlines() if FAILED_ENDINGS.exists() else []
    count = len(tests) + len(endings)
    if count == 0:
        sys.exit("It was no test that failed: nothing is run again.")
    if count > MOST:
        sys.exit(f"{count} tests failed, too many for chance: none is run again.")
    with open("build/retried.txt", "a") as file:
        file.writelines(f"{name}\n" for name in tests + endings)
    # A notebook's cells need those above them.
    tests = sorted({re.sub(r"\.ipynb::.*", ".ipynb", name) for name in tests})
    for _ in range(RUNS):
        if tests:
            run("-m", "pytest", "-n", "1", *tests)
        tests = [name for name in tests if name.startswith(OF_WHAT_IS_COPIED)]
    if endings:
        run("tests/endings.py", str(RUNS), *endings)


if __name__ == "__main__":
    main()
