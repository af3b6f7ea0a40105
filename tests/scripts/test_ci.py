"""How .ci/run handles failing tests, in a project of toy tests."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.pages import ROOT

# Each test counts its own runs, and fails in some of them.
TEST = """
from pathlib import Path
import pytest

@pytest.mark.parametrize("number", range({count}))
def test_toy(number):
    counter = Path(f"runs-of-{name}-{{number}}")
    with counter.open("a") as file:
        file.write(".")
    assert len(counter.read_text()) not in {fails_in}
"""
ENDINGS = """
import sys
from pathlib import Path

with Path("endings").open("a") as file:
    print(*sys.argv[1:], sep=",", file=file)
if sys.argv[1] == "1":
    Path("build/failed-endings.txt").write_text("a rank hangs\\n")
    sys.exit("a rank hangs: it does not")
Path("build/failed-endings.txt").write_text("")
"""
MAKEFILE = """
test:
	@.venv/bin/python -m pytest -n 1
thorough:
	@echo part $(PART)
	@.venv/bin/python tests/endings.py 1
versions containers:
	@echo $@ $(VERSIONS)$(IMAGES)
"""
COPIED = "tests/pt.grpc.sagemaker/test_feed.py"
OTHER = "tests/shared/test_costs.py"
# What .ci/run runs after the tests, if there are no commits.
VERSIONS = [f"versions {version}" for version in ("3.11", "3.12", "3.13", "oldest")]
PARTS = [*VERSIONS, "part 0", "containers"]


def run_ci(
    folder: Path, fails_in: dict[str, tuple], count: int = 1, seconds: int = 0
) -> subprocess.CompletedProcess:
    """Run .ci/run in a project whose test files fail in these of their runs.

    Each has `count` tests. It runs as if `seconds` had passed already.
    """
    shutil.copytree(ROOT / ".ci", folder / ".ci")
    (folder / ".venv").symlink_to(sys.prefix)
    (folder / "Makefile").write_text(MAKEFILE)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -p no:nbval\n")  # saves a second
    for name, numbers in fails_in.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        text = TEST.format(name=Path(name).stem, fails_in=numbers, count=count)
        (folder / name).write_text(text)
    (folder / "tests" / "endings.py").write_text(ENDINGS)
    return subprocess.run(
        [folder / ".ci" / "run"],
        # Without the variables that make and pytest have set for this test.
        env={k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "MAKE", "MFLAGS"))}
        | {"SECONDS": str(seconds)},
        capture_output=True,
        text=True,
    )


def runs(folder: Path, name: str) -> int:
    """Return how often a file's first test has run."""
    return len((folder / f"runs-of-{Path(name).stem}-0").read_text())


@pytest.mark.timeout(600)  # eight runs of pytest
def test_what_fails_once_is_run_again_and_named_last(tmp_path: Path):
    ended = run_ci(tmp_path, {COPIED: (1,), OTHER: (1, 3)})
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert (runs(tmp_path, COPIED), runs(tmp_path, OTHER)) == (1 + 5, 1 + 1)
    assert (tmp_path / "endings").read_text() == "1\n5,a rank hangs\n"
    said = ended.stdout.splitlines()
    # The folder has no commits.
    assert [line.strip() for line in said if line.strip() in PARTS] == PARTS
    assert said[-4] == "Tests that failed and were run again alone: 3"
    assert sorted(said[-3:]) == ["a rank hangs", *(f"{n}::test_toy[0]" for n in (COPIED, OTHER))]


def test_one_failure_in_five_runs_alone_is_enough_for_what_people_copy(tmp_path: Path):
    ended = run_ci(tmp_path, {COPIED: (1, 4)})
    assert ended.returncode != 0
    assert runs(tmp_path, COPIED) == 4
    assert ended.stdout.splitlines()[-1] == f"{COPIED}::test_toy[0]"


def test_many_files_that_fail_are_no_chance(tmp_path: Path):
    files = [f"tests/shared/test_{number}.py" for number in range(11)]
    ended = run_ci(tmp_path, dict.fromkeys(files, (1,)))
    assert ended.returncode != 0
    assert runs(tmp_path, files[0]) == 1
    assert "11 files of tests and endings failed, too many to run again" in ended.stderr
    assert not {*PARTS} & {*ended.stdout.splitlines()}


def test_a_slow_machine_runs_all_tests_but_says_which_other_parts_it_left_out(tmp_path: Path):
    """It runs tests again, too. A fixture that fails all tests of a file is one failure."""
    ended = run_ci(tmp_path, {OTHER: (1,)}, count=11, seconds=3001)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert runs(tmp_path, OTHER) == 2
    left_out = re.findall(r"left out: (\S+)", ended.stdout)
    assert left_out == ["3.11", "3.12", "3.13", "oldest", "thorough", "containers"]
    assert not {*PARTS} & {*ended.stdout.splitlines()}
