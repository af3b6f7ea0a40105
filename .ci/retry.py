"""Runs failed tests again, alone, for .ci/run.

A test may time out on a busy machine; then it must pass when it runs alone. The tests of the code
that people copy, and the endings of a job, must pass five times. The names of the tests are added
to build/retried.txt, which .ci/run prints last.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

OF_WHAT_IS_COPIED = ("tests/pt.grpc.sagemaker/", "tests/tf.data.service.sagemaker/")
RUNS = 5
MOST = 10  # more failures than this are no coincidence; one fixture may fail all tests of a file
FAILED_TESTS = Path(".pytest_cache/v/cache/lastfailed")
FAILED_ENDINGS = Path("build/failed-endings.txt")  # tests/endings.py writes it


def run(*arguments: str) -> None:
    """Run Python with these arguments; exit if it fails."""
    if status := subprocess.run([sys.executable, *arguments]).returncode:
        sys.exit(status)


def main() -> None:
    """Run the failed tests and endings; exit with a status other than 0 if any fails again."""
    tests = list(json.loads(FAILED_TESTS.read_text())) if FAILED_TESTS.exists() else []
    endings = FAILED_ENDINGS.read_text().splitlines() if FAILED_ENDINGS.exists() else []
    count = len({name.split("::")[0] for name in tests}) + len(endings)
    if count == 0:
        sys.exit("No test failed, so nothing is run again: see the output above.")
    if count > MOST:
        sys.exit(f"{count} files of tests and endings failed, too many to run again: see above.")
    with open("build/retried.txt", "a") as file:
        file.writelines(f"{name}\n" for name in tests + endings)
    # Run whole notebooks, since cells need the cells above them.
    tests = sorted({re.sub(r"\.ipynb::.*", ".ipynb", name) for name in tests})
    for _ in range(RUNS):
        if tests:
            run("-m", "pytest", "-n", "1", *tests)
        tests = [name for name in tests if name.startswith(OF_WHAT_IS_COPIED)]
    if endings:
        run("tests/endings.py", str(RUNS), *endings)


if __name__ == "__main__":
    main()
