"""CloudWatch that is late, as on AWS: readers of a log wait for it, and figures say what lacks."""

import time

import boto3
import pytest

from jobs import READ_CONFIG, TWO_GROUPS, Jobs, group, request
from shared import logs, monitoring

# The data host has nothing to say until the end.
SCRIPT = (
    READ_CONFIG
    + """
import time
if group == "dnn_group":
    for step in range(1, 4):
        print(f"step={step} loss=1 step_time_ms=100 data_wait_ms=60 samples_per_s=1", flush=True)
        time.sleep(0.5)
time.sleep(2)
print(f"host={config['current_host']} ends", flush=True)
"""
)


@pytest.fixture
def late(local):
    """The session, set to deliver late in one test."""
    yield local
    local.log_delay_seconds = local.metric_delay_seconds = 0


def run(jobs: Jobs, script: str = SCRIPT) -> str:
    return jobs.run({"train.py": script}, "exec python train.py", TWO_GROUPS)["TrainingJobName"]


def farewells(name: str) -> int:
    return sum(line.text.endswith(" ends") for line in monitoring.logs(name))


def test_readers_wait_for_the_last_line_of_each_host(late, jobs: Jobs):
    late.log_delay_seconds = 4
    name = run(jobs)
    assert not any(line.endswith("ends") for line in jobs.log(name)), "was not late"
    session, received = boto3.Session(), []
    session.events.register(
        "after-call.logs.GetLogEvents", lambda parsed, **_: received.extend(parsed["events"])
    )
    asked = time.monotonic()
    lines = monitoring.logs(name, session)
    assert sum(line.text.endswith(" ends") for line in lines) == 2
    assert time.monotonic() - asked < 8  # no longer than for the last line, and one more look
    assert len(received) == len(lines), "what was there already was read again"


def test_readers_wait_for_a_log_of_which_nothing_is_there(late, jobs: Jobs):
    late.log_delay_seconds = 8
    assert list(monitoring.steps(run(jobs))["step"]) == [1, 2, 3]


def test_where_hosts_do_not_say_that_they_end_readers_wait_twice_the_longest_delay(
    late, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(logs, "QUIET_SECONDS", 0)
    late.log_delay_seconds = 3
    name = run(jobs, SCRIPT.replace(" ends", " has no more"))
    assert sum("has no more" in line.text for line in monitoring.logs(name)) == 2


def test_nobody_waits_for_a_log_that_is_there(jobs: Jobs):
    name = run(jobs)
    asked = time.monotonic()
    assert farewells(name) == 2
    assert time.monotonic() - asked < 0.5


def test_nobody_waits_for_a_job_that_runs(late, jobs: Jobs):
    late.log_delay_seconds = 30
    name = jobs.create({"train.py": "import time; time.sleep(60)"}, "exec python train.py")
    asked = time.monotonic()
    with pytest.raises(ValueError, match="There is no log"):
        monitoring.logs(name)
    assert time.monotonic() - asked < 0.5
    boto3.client("sagemaker").stop_training_job(TrainingJobName=name)
    jobs.wait(name)


def test_the_wait_for_hosts_that_print_nothing_has_an_end(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(logs, "LATEST_SECONDS", 3)
    boto3.client("s3").create_bucket(Bucket="any")
    config = {"InstanceGroups": [group(count=2)], "VolumeSizeInGB": 1}
    boto3.client("sagemaker").create_training_job(**request("silent", ResourceConfig=config))
    end = jobs.wait("silent")["TrainingEndTime"].timestamp()
    with pytest.raises(ValueError, match="There is no log"):
        monitoring.logs("silent")
    assert 3 <= time.time() - end < 4
    with pytest.raises(ValueError, match="There is no log"):  # and is over then
        monitoring.logs("silent")
    assert time.time() - end < 4.5


def test_a_figure_without_all_metrics_says_so(late, jobs: Jobs, capsys: pytest.CaptureFixture):
    late.metric_delay_seconds = 12
    name = run(jobs)
    assert "Bottleneck: not known, as CloudWatch has no values of these hosts" in said(name)
    figure = monitoring.plot_job(name)
    hosts = [panel for panel in figure.axes if "algo-" in panel.get_title("left")]
    assert [panel.texts[0].get_text() for panel in hosts] == [
        "CloudWatch has no values of this host."
    ] * 2
    monitoring.main([name])
    assert "CloudWatch has no values" in capsys.readouterr().out
    time.sleep(13)
    assert "CloudWatch has" not in said(name)


def said(name: str) -> str:
    """What stands above the figure."""
    return " ".join(monitoring.plot_job(name).get_suptitle().split())
