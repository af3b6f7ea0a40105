"""The parts that run on other machines: the devcontainer, and the weekly CI job."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from helpers.pages import ROOT

pytestmark = pytest.mark.quick
WEEKLY = yaml.safe_load((ROOT / ".github" / "workflows" / "newest.yml").read_text())
STEPS = {step["name"]: step for step in WEEKLY["jobs"]["demo"]["steps"] if "name" in step}


def test_devcontainer_is_ready_when_the_environment_is():
    text = (ROOT / ".devcontainer" / "devcontainer.json").read_text()
    container = json.loads(re.sub(r"^\s*//.*$", "", text, flags=re.M))  # JSON with comments
    version = re.fullmatch(r"mcr\.microsoft\.com/devcontainers/python:3\.(\d+)", container["image"])
    assert int(version[1]) in (11, 12, 13)
    make, target = container["postCreateCommand"].split()
    assert make == "make"
    plan = ["make", "--no-print-directory", "--dry-run", "--always-make"]
    [needed, demo] = [
        subprocess.check_output([*plan, name], cwd=ROOT, text=True) for name in (target, "demo")
    ]
    assert "scripts/setup.sh" in needed and demo.startswith(needed)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Create a repository with the files that the weekly job changes."""
    for name in ("requirements.txt", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    git = ["git", "-c", "user.name=any", "-c", "user.email=any@example.com"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "known"]):
        subprocess.run([*git, *command], cwd=tmp_path, check=True)
    return tmp_path


def run(step: str, folder: Path, **environment: str) -> None:
    """Run a step of the weekly job as GitHub does."""
    subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", STEPS[step]["run"]],
        cwd=folder,
        env={**os.environ, **environment},
        check=True,
        timeout=60,
    )


def test_weekly_job_takes_the_newest_versions_of_the_same_packages(clone: Path):
    before = (clone / "requirements.txt").read_text()
    run("forget which versions are known to work", clone)
    after = (clone / "requirements.txt").read_text()
    assert "==" in before and "==" not in after and "-c " not in after
    assert (clone / "constraints.txt").read_text() == ""
    names = [re.findall(r"^\w[\w-]*", text, re.M) for text in (before, after)]
    assert names[0] == names[1] and len(names[0]) > 20


def test_weekly_job_says_what_broke_and_what_is_newer(clone: Path):
    """A log replaces the notebooks' run, and two packages in the environment are newer."""
    (clone / "demo.log").write_text("a notebook failed: TypeError\n")
    run("say what broke", clone, GITHUB_STEP_SUMMARY=str(clone / "summary.md"))
    before_setup = (clone / "summary.md").read_text()
    (clone / "summary.md").unlink()
    assert "a notebook failed: TypeError" in before_setup
    known = re.search(r"^sagemaker==(\S+)", (clone / "requirements.txt").read_text(), re.M)[1]
    python = clone / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\nprintf 'sagemaker==99.0\\nMoto==98.0\\nunknown==1.0\\n'\n")
    python.chmod(0o755)
    run("say what broke", clone, GITHUB_STEP_SUMMARY=str(clone / "summary.md"))
    summary = (clone / "summary.md").read_text()
    assert "a notebook failed: TypeError" in summary
    newer = summary.split("known to work")[1].split("```")[1].splitlines()[1:]
    assert newer[0].startswith("moto ") and newer[0].endswith(" -> 98.0")
    assert newer[1:] == [f"sagemaker {known} -> 99.0"]
