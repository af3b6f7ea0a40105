"""`make aws` before it starts anything: what it checks, what it asks, and what it keeps private."""

import io
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
import pytest

from helpers.make_aws import service_quotas
from helpers.pages import NOTEBOOKS
from scripts import aws, demo, results

HELLO, PYTORCH, TENSORFLOW = aws.NOTEBOOKS


@pytest.fixture(autouse=True)
def quotas() -> Iterator[dict[str, float]]:
    with service_quotas() as quotas:
        yield quotas


@pytest.fixture
def refusal(
    local, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> Callable[[], str]:
    """Return a function that runs `make aws` here until it refuses, and returns the output."""
    monkeypatch.setattr(sys, "argv", ["aws"])
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))  # not a terminal
    monkeypatch.setattr(aws, "BUILD", tmp_path)
    monkeypatch.setattr(aws, "run", lambda *_: pytest.fail("it has started"))
    monkeypatch.setattr(aws, "planned", lambda: [("hello", {"ml.g5.xlarge": 2})])
    monkeypatch.setenv("SAGEMAKER_ROLE", local.role)

    def refuse() -> str:
        with pytest.raises(SystemExit) as exit_:
            aws.main()
        assert str(exit_.value).count("\n") == 0
        return f"{capsys.readouterr().out}{exit_.value}"

    return refuse


def test_jobs_that_may_still_run_are_not_forgotten(refusal):
    (aws.BUILD / "aws-jobs.us-east-1.txt").write_text("a-job\n")
    assert aws.STOP in refusal()


@pytest.mark.parametrize(
    "changes, quota, words",
    [
        ({"AWS_DEFAULT_REGION": ""}, 2.0, "AWS_DEFAULT_REGION=us-east-1"),
        (
            {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "AWS_SESSION_TOKEN": ""},
            2.0,
            r"AWS login failed \(Unable to locate credentials\)",
        ),
        # An IAM user, such as moto's caller, must set the role.
        ({"SAGEMAKER_ROLE": ""}, 2.0, "set SAGEMAKER_ROLE to the ARN"),
        ({"SAGEMAKER_ROLE": "MyRole"}, 2.0, "set SAGEMAKER_ROLE to the ARN"),
        ({}, 1.0, r"us-east-1: ml.g5.xlarge for training job usage: 2\."),
        ({}, None, r"ml.g5.xlarge .* usage: 2 \(.*needs servicequotas:ListServiceQuotas"),
        ({}, "of another type", r"ml.g5.xlarge .* usage: 2 \(.*not listed"),
    ],
)
def test_what_it_needs(changes, quota, words, refusal, quotas, monkeypatch: pytest.MonkeyPatch):
    """The output names quotas that cannot be checked, so that the user can decide."""
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name, value in changes.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    if isinstance(quota, float):
        quotas["ml.g5.xlarge for training job usage"] = quota
    else:
        quotas.clear()
        quotas |= {quota: 1.0} if quota else {}
    assert re.search(words, refusal())


def test_it_starts_only_for_somebody_who_says_yes(refusal, monkeypatch: pytest.MonkeyPatch):
    assert "run this in a terminal" in refusal()
    terminal = io.StringIO("no\n")
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", terminal)
    assert refusal().endswith("Nothing was started.")
    terminal = io.StringIO("y\n")
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", terminal)
    with pytest.raises(pytest.fail.Exception, match="it has started"):
        aws.main()


def test_the_plan_is_what_the_notebooks_ask_for():
    """The plan is read from tests/notebooks/requests/, which test_requests.py keeps correct."""
    assert sorted(aws.NOTEBOOKS) == sorted(NOTEBOOKS) == demo.notebooks()
    names = [name for name, _ in aws.planned()]
    assert len(names) == len(set(names)) >= 8
    hello = nbformat.read(HELLO, as_version=4)
    # Hello world's requests are the same for all targets.
    assert "TARGET" not in "".join(cell.source for cell in hello.cells[3:])


@pytest.mark.parametrize(
    "text, left",
    [
        ("role 'arn:aws-cn:iam::1:role/service-role/x', and", "role '<ARN>', and"),
        ("in sagemaker-eu-west-1-210987654321.", "in <bucket>."),
        ("account 210987654321, job-20261122035239", "account <account>, job-20261122035239"),
        ("210987654321.dkr.ecr.us-east-1.aws/x:1", "<account>.dkr.ecr.us-east-1.aws/x:1"),
        ("(s3://mine/data/x)", "(s3://<bucket>/data/x)"),
        (f"{Path.home()}/code", "~/code"),
        ("TheRole may not, TheRoles may", "<name> may not, TheRoles may"),
    ],
)
def test_what_is_private_is_left_out(text: str, left: str):
    assert results.redact(text, ["TheRole"]) == left
