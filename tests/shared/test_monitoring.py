"""What a job's hosts printed, its step lines, and the wait for its end."""

import json
import math
import re

import pytest

from helpers.ended_jobs import put_job, put_log
from shared import monitoring

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("aws")]


def start_up(host: str, group: str) -> list[str]:
    """Return what the SDK's start-up script prints before it starts our command.

    The output of `cat` has no final newline, so bash's trace of the next command is on its line.
    """
    other = {"instance_group_name": "other", "instance_type": "ml.m5.xlarge", "hosts": ["algo-9"]}
    config = {"current_host": host, "current_group_name": group, "instance_groups": [other]}
    return [
        "+ cat /opt/ml/input/config/resourceconfig.json",
        json.dumps(config) + "+ echo",
        "SM_MODEL_DIR=/opt/ml/model",
        "+ echo 'Executing command: exec python launcher.py'",
        "Executing command: exec python launcher.py",
        "++ exec python launcher.py",
    ]


STEP_LINES = [
    "step=10 epoch=1 loss=2.25 step_time_ms=12.34 data_wait_ms=4.56 samples_per_s=10372.1",
    "step=20 epoch=1 loss=1e-05 step_time_ms=11 data_wait_ms=0.0 samples_per_s=11000",
    "step=30 epoch=2 loss=nan step_time_ms=13.5 data_wait_ms=0.1 samples_per_s=9000.5",
]


def test_hosts_come_in_order_of_time_with_their_groups():
    put_log("job", "algo-1", start_up("algo-1", "dnn_group") + ["a1", "a2"])
    introduction = "host=algo-2 group=data_group instance_type=ml.c5.9xlarge rank=0"
    put_log("job", "algo-2", [introduction, "b1", "b2"], at_s=0.005)
    put_log("job", "algo-10", ["says nothing of its group"])
    put_log("job-2", "algo-1", ["another job's log"])
    lines = monitoring.logs("job")
    assert [line.time for line in lines] == sorted(line.time for line in lines)
    texts = [line.text for line in lines]
    assert texts[1:3] == ["says nothing of its group", introduction]
    assert "another job's log" not in texts
    assert {(line.host, line.group) for line in lines} == {
        ("algo-1", "dnn_group"),
        ("algo-2", "data_group"),
        ("algo-10", "unknown"),
    }


def test_reads_all_pages_and_keeps_the_order_of_lines_of_one_millisecond():
    written = [f"line {i}" for i in range(10_050)]  # a page has at most 10,000
    put_log("job", "algo-1", written, every_s=0)
    assert [line.text for line in monitoring.logs("job")] == written


@pytest.mark.parametrize("other", [[], ["other"]], ids=["no log group", "no log of the job"])
def test_no_log_is_a_clear_error(other):
    for name in other:
        put_log(name, "algo-1", ["text"])
    with pytest.raises(ValueError, match="There is no log of training job 'job'"):
        monitoring.logs("job")


def test_show_logs_leaves_out_start_up_and_shortens(capsys):
    put_log("job", "algo-1", start_up("algo-1", "dnn_group") + ["x" * 300, "first", "second"])
    put_log("job", "algo-2", start_up("algo-2", "data_group") + ["serving"])
    failed = start_up("algo-10", "data_group")[:3] + ["No space left on device"]
    put_log("job", "algo-10", failed)

    monitoring.show_logs("job", last=2)
    data, dnn = capsys.readouterr().out.split("== dnn_group / algo-1 ")
    assert data.startswith("== data_group / algo-2 (1 lines)") and "serving" in data
    assert "No space left on device" in data and "SM_MODEL_DIR" not in data
    assert dnn.startswith("(last 2 of 3 lines)")
    assert [line[9:] for line in dnn.splitlines()[1:]] == ["first", "second"]

    monitoring.show_logs("job", group="dnn_group", last=None)
    shown = capsys.readouterr().out
    assert "algo-2" not in shown and "SM_MODEL_DIR" not in shown and "exec python" not in shown
    assert max(len(line) for line in shown.splitlines()) == 96

    known = "algo-2 in data_group, algo-10 in data_group, algo-1 in dnn_group"
    with pytest.raises(ValueError, match=f"No host is in 'gpu': .* has {known}"):
        monitoring.show_logs("job", group="gpu")


def test_side_by_side_columns_are_as_wide_as_their_text(monkeypatch):
    put_log("job", "algo-1", start_up("algo-1", "dnn_group") + ["a < b"])
    put_log("job", "algo-2", start_up("algo-2", "data_group") + ["serving", "done"])
    shown = []
    monkeypatch.setattr("shared.monitoring.log.display", lambda data, raw: shown.append(data))
    monitoring.show_logs("job", side_by_side=True)
    first, second, third = shown[0]["text/plain"].splitlines()
    assert re.match(
        r"== data_group / algo-2 \(2 lines\)  == dnn_group / algo-1 \(1 lines\)$", first
    )
    assert re.match(r"[\d:]{8} serving +[\d:]{8} a < b$", second)
    assert second.index("a < b") - 9 == first.index("== dnn") and third.endswith("done")
    left, right = re.findall(r"<pre.*?>(.*?)</pre>", shown[0]["text/html"], re.S)
    assert "serving" in left and "a &lt; b" in right


def test_a_restart_is_seen_though_hosts_have_printed_nothing_before_it():
    """algo-2 has lines only of the second attempt, and the first comes before algo-1's."""
    put_log("job", "algo-1", ["workers=1"])
    put_log("job", "algo-2", ["workers=2", "workers=2"], 0.04, 0.02, attempt=2)
    put_log("job", "algo-1", ["workers=4"], 0.05, attempt=2)
    assert monitoring.logged("job", "workers") == 2
    put_log("job", "algo-1", ["workers=8"], 0.1, attempt=3)
    put_log("job", "algo-2", ["workers=10"], 0.11, attempt=3)
    assert monitoring.logged("job", "workers") == 9
    assert {line.attempt for line in monitoring.logs("job")} == {3}


def test_steps_are_a_typed_table_with_the_rows_of_all_ranks():
    put_log("job", "algo-1", ["Namespace(step=3)", *STEP_LINES, "finished after step 30"])
    put_log("job", "algo-2", STEP_LINES[:1], at_s=1)
    table = monitoring.steps("job")
    assert list(table["step"]) == [10, 20, 30, 10] and table["step"].dtype == int
    assert list(table["loss"][:2]) == [2.25, 1e-05] and table["loss"].isna()[2]
    assert list(table["step_time_ms"]) == [12.34, 11.0, 13.5, 12.34]
    assert list(table["samples_per_s"]) == [10372.1, 11000, 9000.5, 10372.1]
    assert list(table["host"]) == ["algo-1"] * 3 + ["algo-2"]
    assert str(table["time"].dt.tz) == "UTC"


# What a user's own step line may say, and which of its values get into the table.
OWN_LINES = {
    "step=1 epoch=1/10 lr=1e-4, step_time_ms=12.5": {"lr": 1e-4},
    "step=1 time=12 host=gpu7 step_time_ms=12.5": {},
    "step=1, loss=0.5, best (acc=0.75), step_time_ms=12.5.": {"loss": 0.5, "acc": 0.75},
    "step=1,loss=0.5,phase=train,step_time_ms=12.5": {"loss": 0.5},
    "step=1 loss=inf aux=nan step_time_ms=12.5ms": {"loss": math.inf, "aux": math.nan},
    "INFO:root:step=1 loss=0.5 step_time_ms=12.5 val/loss=0.9": {"loss": 0.5, "val/loss": 0.9},
    "step=1 step_time_ms=12.5 loss=0.5 loss=0.9 step=7": {"loss": 0.5},
    "step=1 step_time_ms=12.5 samples_per_s=10,372.1 data_wait_ms=1.2s loss=": {},
    STEP_LINES[0].replace("10 ", "1 ", 1).replace("12.34", "12.5"): {
        "loss": 2.25,
        "epoch": 1,
        "data_wait_ms": 4.56,
        "samples_per_s": 10372.1,
    },
}


@pytest.mark.parametrize("line", OWN_LINES)
def test_what_else_a_step_line_says_breaks_and_replaces_nothing(line):
    put_log("job", "algo-1", [line, STEP_LINES[0]])
    table = monitoring.steps("job")
    assert list(table["step"]) == [1, 10] and list(table["step_time_ms"]) == [12.5, 12.34]
    assert list(table["host"]) == ["algo-1"] * 2 and str(table["time"].dt.tz) == "UTC"
    read = table.drop(columns=["step", "step_time_ms", "host", "time"])
    usual = dict.fromkeys(["epoch", "loss", "data_wait_ms", "samples_per_s"], math.nan)
    assert read.iloc[0].to_dict() == pytest.approx(usual | OWN_LINES[line], nan_ok=True)
    last_line = "training finished after step 150: loss 0.0827"  # of one batch, not of an interval
    for metric in monitoring.METRIC_DEFINITIONS:  # CloudWatch graphs the same value or none
        if found := re.search(metric["Regex"], line):
            assert float(found[1]) == table[metric["Name"]][0]
        assert float(re.search(metric["Regex"], STEP_LINES[0])[1]) == table[metric["Name"]][1]
        assert not re.search(metric["Regex"], last_line)


@pytest.mark.parametrize(
    "line", ["step=10/100 step_time_ms=12.3", "step=2 step_time_ms=1.2s", "step=3 step_time_ms="]
)
def test_a_step_line_without_its_numbers_is_named(line, capsys):
    put_log("job", "algo-1", [*STEP_LINES, line])
    assert list(monitoring.steps("job")["step"]) == [10, 20, 30]
    said = f"1 of 4 step lines cannot be read, such as {line!r} of algo-1: step must be"
    assert said in capsys.readouterr().err
    put_log("bad", "algo-1", [line])
    with pytest.raises(ValueError, match=f"1 of 1 step lines .*{re.escape(repr(line))}"):
        monitoring.steps("bad")


def test_logged_is_the_median_over_all_hosts():
    put_log("job", "algo-1", ["data_ms_per_sample=2.5 workers=8", "workers=4", "workers=none"])
    put_log("job", "algo-2", ["dnn_workers=1 workers=6.", "lr=-1.5e-3,", "version=1.10.2"])
    assert monitoring.logged("job", "workers") == 6
    assert monitoring.logged("job", "data_ms_per_sample") == 2.5
    assert monitoring.logged("job", "lr") == -0.0015
    for key in ("version", "loss"):
        with pytest.raises(ValueError, match=f"No host of training job 'job' has logged .* {key}="):
            monitoring.logged("job", key)
    with pytest.raises(ValueError, match="'job' has no step lines"):
        monitoring.steps("job")


def test_plot_steps_draws_step_time_and_what_data_costs_of_it():
    put_log("one", "algo-1", STEP_LINES)
    put_log("two", "algo-1", STEP_LINES[:2])
    put_log("synthetic", "algo-1", ["step=1 step_time_ms=11", "step=2 step_time_ms=12"])
    step_time, data_wait = monitoring.plot_steps({"first": "one", "second": "two"}).axes
    assert [line.get_label() for line in step_time.lines] == ["first", "second"]
    assert [list(line.get_ydata()) for line in step_time.lines] == [[12.34, 11, 13.5], [12.34, 11]]
    assert [list(line.get_ydata()) for line in data_wait.lines] == [[4.56, 0, 0.1], [4.56, 0]]
    step_time, costs = monitoring.plot_steps({"first": "one"}, synthetic_job="synthetic").axes
    assert [line.get_label() for line in step_time.lines] == ["a step without data", "first"]
    assert set(step_time.lines[0].get_ydata()) == {11.5}
    assert list(costs.lines[0].get_ydata()) == pytest.approx([0.84, 0, 2])
    # A user's own script may not log how long it waits.
    step_time, data_wait = monitoring.plot_steps({"": "synthetic"}).axes
    assert list(step_time.lines[0].get_ydata()) == [11, 12] and not data_wait.lines


def test_wait_prints_each_change_of_status_once_and_raises_the_reason_of_a_failure(
    monkeypatch, capsys
):
    job = put_job(training_job_status="InProgress")
    sleeps = []

    def next_poll(seconds: float) -> None:
        sleeps.append(seconds)
        if len(sleeps) == 2:  # two changes between two polls
            for status in ("Downloading", "Training"):
                transition = {**job.secondary_status_transitions[0], "Status": status}
                job.secondary_status_transitions.append(transition)
        if len(sleeps) == 3:
            job.training_job_status = "Completed"
            job.billable_time_in_seconds = 58

    monkeypatch.setattr("shared.monitoring.describe.time.sleep", next_poll)
    assert monitoring.wait("job")["TrainingJobStatus"] == "Completed" and len(sleeps) == 3
    shown = re.findall(r"^ +\d+\.\d s  ([\w ]+)", capsys.readouterr().out, re.MULTILINE)
    assert shown == ["Starting", "Downloading", "Training", "job Completed"]
    job.training_job_status, job.failure_reason = "Failed", "AlgorithmError: no data host is left"
    with pytest.raises(RuntimeError, match=f"'job' failed: {job.failure_reason}"):
        monitoring.wait("job")
