"""If AWS does not answer for a while, code that watches a job asks again, and says so once.

These tests replace some of AWS's answers in botocore; the other answers are moto's.
"""

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import boto3
import pytest
from botocore.awsrequest import AWSPreparedRequest, AWSResponse
from botocore.exceptions import ClientError, EndpointConnectionError, UnauthorizedSSOTokenError
from moto import mock_aws

from helpers.ended_jobs import put_job, put_log
from shared import costs, monitoring
from shared.monitoring import bottleneck, describe

DESCRIBE = "sagemaker.DescribeTrainingJob"


class Body(io.BytesIO):
    """The body of a response, as botocore reads it."""

    def stream(self, **_) -> Iterator[bytes]:
        yield self.read()


def error(code: str, message: str, status: int = 400) -> AWSResponse:
    """An error response of AWS."""
    body = Body(json.dumps({"__type": code, "message": message}).encode())
    return AWSResponse("", status, {"x-amzn-errortype": code}, body)


def throttled() -> AWSResponse:
    return error("ThrottlingException", "Rate exceeded")


def expired() -> AWSResponse:
    return error("ExpiredTokenException", "The security token included in the request is expired")


def away() -> Exception:
    return EndpointConnectionError(endpoint_url="https://api.sagemaker.us-east-1.amazonaws.com/")


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The file with the default session's keys. There is also a job "job", which has ended."""
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # botocore's own attempts take real seconds
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    log_in(tmp_path / "credentials", "FIRST")
    with mock_aws():
        monkeypatch.setattr(boto3, "DEFAULT_SESSION", boto3.Session(profile_name="mine"))
        put_job("job", billable_time_in_seconds=60)
        put_log("job", "algo-1", ["step=1 step_time_ms=12.5"])
        yield tmp_path / "credentials"


def log_in(file: Path, key: str) -> None:
    """Put temporary keys into the file, as a tool for logging in does."""
    names = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
    file.write_text("[mine]\n" + "".join(f"{name}={key}\n" for name in names))


def instead(operation: str, answer: Callable[[str], object]) -> list[str]:
    """Answer requests for an operation with an error or a response; None leaves them to moto.

    Returns:
        The Authorization header of each request, which is also passed to `answer`.
    """
    asked = []

    def before_send(request: AWSPreparedRequest, **_) -> AWSResponse | None:
        header = request.headers["Authorization"]
        asked.append(header.decode() if isinstance(header, bytes) else header)
        found = answer(asked[-1])
        if isinstance(found, Exception):
            raise found
        return found

    boto3.DEFAULT_SESSION.events.register_first(f"before-send.{operation}", before_send)
    return asked


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses between attempts. They take no real time, but they advance the clock."""
    pauses = []
    monkeypatch.setattr(describe.time, "sleep", pauses.append)
    monkeypatch.setattr(describe.time, "monotonic", lambda: sum(pauses))
    return pauses


@pytest.mark.parametrize(
    "answers, said",
    [
        ([throttled] * 3, "(ThrottlingException) when calling the DescribeTrainingJob"),
        ([lambda: error("SomethingNew", "never seen")], "never seen"),
        ([expired], "is expired (retrying for up to 10 minutes; please log in again)"),
        ([UnauthorizedSSOTokenError], "SSO session"),
        ([away] * 2, "api.sagemaker.us-east-1.amazonaws.com"),
    ],
    ids=["throttled", "unknown", "expired", "sso", "network"],
)
def test_who_waits_for_a_job_outlasts_that(answers, said, pauses, capsys):
    left = list(answers)
    instead(DESCRIBE, lambda _: left.pop(0)() if left else None)
    assert monitoring.wait("job")["TrainingJobStatus"] == "Completed"
    output = capsys.readouterr()
    assert said in output.err and output.err.count("\n") == 1
    assert "retrying for up to 10 minutes" in output.err
    assert pauses == [1, 2, 4][: len(answers)]


def test_after_minutes_it_is_raised_as_it_is(pauses, capsys):
    instead(DESCRIBE, lambda _: away())
    with pytest.raises(EndpointConnectionError, match="Could not connect"):
        monitoring.wait("job")
    assert 600 <= sum(pauses) < 630 and capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("code", ["ValidationException", "ResourceNotFound"])
def test_no_job_is_no_job_at_once(code, pauses):
    instead(DESCRIBE, lambda _: error(code, "Requested resource not found."))
    with pytest.raises(ValueError, match=r"^No training job 'job' .*resource not found\."):
        monitoring.wait("job")
    assert pauses == []


@pytest.mark.parametrize(
    "code, operation",
    [("AccessDeniedException", DESCRIBE), ("UnrecognizedClientException", "logs.GetLogEvents")],
)
def test_what_is_not_allowed_is_not_asked_again(code, operation, pauses, capsys):
    instead(operation, lambda _: error(code, "You are not authorized to perform that."))
    with pytest.raises(SystemExit):
        monitoring.main(["job"])
    said = capsys.readouterr().err
    assert said.startswith("AWS denied the request for these credentials: ")
    assert operation.split(".")[1] in said and "You are not authorized to perform that." in said
    assert said.endswith("(docs/aws.md lists the permissions they need.)\n")
    assert said.count("\n") == 1 and pauses == []


def test_new_keys_in_the_file_are_taken(keys, pauses, monkeypatch):
    """Temporary keys get renewed, but the default session would read the file only once."""
    asked = instead(DESCRIBE, lambda header: expired() if "FIRST" in header else None)
    monkeypatch.setattr(describe.time, "sleep", lambda _: log_in(keys, "SECOND"))
    assert monitoring.wait("job")["TrainingJobStatus"] == "Completed"
    assert len(asked) == 2


def test_keys_that_a_session_was_given_stay_its_own(pauses):
    """Otherwise it would continue with other credentials, perhaps of another account."""
    given = {"aws_access_key_id": "GIVEN", "aws_secret_access_key": "x", "aws_session_token": "x"}
    boto3.DEFAULT_SESSION = boto3.Session(**given)
    asked = instead(DESCRIBE, lambda _: expired())
    with pytest.raises(ClientError, match="is expired"):
        monitoring.wait("job")
    assert len(asked) > 40 and all("Credential=GIVEN/" in header for header in asked)


@pytest.mark.parametrize(
    "operation",
    [DESCRIBE, "logs.DescribeLogStreams", "logs.GetLogEvents", "cloudwatch.GetMetricStatistics"],
)
def test_figures_outlast_it_too(operation, pauses):
    failing = [away]
    asked = instead(operation, lambda _: failing.pop()() if failing else None)
    assert list(bottleneck.observe("job").steps["step"]) == [1]
    assert list(costs.compare({"job": "job"})["step time (ms)"]) == [12.5]
    assert len(asked) > 1 and pauses == [1]
