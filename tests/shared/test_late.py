"""If CloudWatch is late, as on AWS, readers of a job's log wait for it, but no longer."""

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import boto3
import pytest
from moto.core import DEFAULT_ACCOUNT_ID
from moto.logs.models import logs_backends

from helpers.jobs import READ_CONFIG, TWO_GROUPS, Jobs, group, request
from shared import monitoring
from shared.local_sagemaker import job
from shared.monitoring import log

# The data host has nothing to say until the end.
SCRIPT = f"""{READ_CONFIG}
import time
if group == "dnn_group":
    for step in range(1, 4):
        print("step=1 loss=1 step_time_ms=100 data_wait_ms=60 samples_per_s=1", flush=True)
time.sleep(1)
print("host=" + config["current_host"], "ends", flush=True)
"""


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], None]]:
    """Set after how many seconds the printed lines of a job reach CloudWatch."""
    timers: list[threading.Timer] = []

    def set_delay(seconds: float) -> None:
        real = logs_backends[DEFAULT_ACCOUNT_ID]["us-east-1"]

        def later(call: Callable) -> Callable:
            def start(*arguments: object) -> None:
                timers.append(threading.Timer(seconds, call, arguments))
                timers[-1].start()

            return start

        slow = SimpleNamespace(groups=real.groups, create_log_group=real.create_log_group)
        slow.create_log_stream = later(real.create_log_stream)
        slow.put_log_events = later(real.put_log_events)
        monkeypatch.setattr(job, "logs_backends", {DEFAULT_ACCOUNT_ID: {"us-east-1": slow}})

    yield set_delay
    for timer in timers:
        timer.cancel()


def run(jobs: Jobs, script: str = SCRIPT) -> str:
    return jobs.run({"train.py": script}, "exec python train.py", TWO_GROUPS)["TrainingJobName"]


def test_readers_wait_for_the_last_line_of_each_host(late, jobs: Jobs):
    late(3)
    name, received = run(jobs), []
    assert not jobs.log(name), "was not late"
    boto3.client("logs")  # creates the default session
    boto3.DEFAULT_SESSION.events.register(
        "after-call.logs.GetLogEvents", lambda parsed, **_: received.extend(parsed["events"])
    )
    asked = time.monotonic()
    lines = monitoring.logs(name)
    assert sum(line.text.endswith(" ends") for line in lines) == 2
    assert time.monotonic() - asked < 7  # until the last line is there, and one more look
    assert len(received) == len(lines), "what was there already was read again"
    asked = time.monotonic()
    assert len(monitoring.logs(name)) == len(lines)
    assert time.monotonic() - asked < log.LOOK_EVERY_SECONDS  # now that all is there


def test_where_hosts_do_not_say_that_they_end_readers_wait_twice_the_longest_delay(
    late, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(log, "QUIET_SECONDS", 0)
    late(2)
    # The first lines are there when the job ends, and tell the delay of the last ones.
    name = run(jobs, SCRIPT.replace('"ends"', '"has no more"').replace("sleep(1)", "sleep(3)"))
    assert sum("has no more" in line.text for line in monitoring.logs(name)) == 2


def test_nobody_waits_for_a_job_that_runs(late, jobs: Jobs):
    late(30)
    name = jobs.create({"train.py": "import time; time.sleep(4)"}, "exec python train.py")
    asked = time.monotonic()
    with pytest.raises(ValueError, match="There is no log"):
        monitoring.logs(name)
    assert time.monotonic() - asked < 0.5
    boto3.client("sagemaker").stop_training_job(TrainingJobName=name)
    jobs.wait(name)


def test_the_wait_for_hosts_that_print_nothing_has_an_end(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(log, "LATEST_SECONDS", 3)
    boto3.client("s3").create_bucket(Bucket="any")
    config = {"InstanceGroups": [group(count=2)], "VolumeSizeInGB": 1}
    boto3.client("sagemaker").create_training_job(**request("silent", ResourceConfig=config))
    end = jobs.wait("silent")["TrainingEndTime"].timestamp()
    with pytest.raises(ValueError, match="There is no log"):
        monitoring.logs("silent")
    ended = time.time()
    assert 3 <= ended - end < 20
    with pytest.raises(ValueError, match="There is no log"):  # the second call does not wait again
        monitoring.logs("silent")
    assert time.time() - ended < 2
