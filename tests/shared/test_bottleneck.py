"""How busy the hosts of a job are, what holds it up, the figure of it, and the command."""

import json
import os
import subprocess
import sys
from datetime import datetime, timedelta, timezone

import boto3
import matplotlib.pyplot as plt
import pytest
from botocore.stub import Stubber
from matplotlib.colors import to_rgb
from moto import mock_aws
from moto.core import DEFAULT_ACCOUNT_ID
from moto.sagemaker.models import sagemaker_backends

from jobs import ROOT, request, start_kernel
from shared import costs, monitoring

NAMESPACE = "/aws/sagemaker/TrainingJobs"  # of logs and of metrics
START = datetime.now(timezone.utc).replace(second=20, microsecond=0) - timedelta(minutes=40)
PUBLISHED = {"data_group": ("ml.c5.18xlarge", 2), "dnn_group": ("ml.p4d.24xlarge", 1)}
ONE_P4D = {"homogeneousCluster": ("ml.p4d.24xlarge", 1)}


@pytest.fixture
def aws(monkeypatch):
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    with mock_aws():
        yield


def put_job(
    groups: dict,
    hosts: dict,
    waits: list[float],
    name: str = "job",
    value_every_s: int = 60,
    step: float = 200,
) -> None:
    """Make a job as AWS would show it: started at START, a step line a minute from 2:00 on.

    Args:
        groups: {name: (instance type, count)}.
        hosts: {host: (group, CPU values, GPU values)}, one every `value_every_s` from 0:40 on.
        waits: Data wait of each step line, in ms. Hosts with another group than data_group print
            them.
        name: Of the job.
        value_every_s: A minute on AWS; the local SageMaker has a value every second.
        step: Time of each step, in ms.
    """
    if groups == ONE_P4D:
        config = {"InstanceType": "ml.p4d.24xlarge", "InstanceCount": 1}
    else:
        config = {
            "InstanceGroups": [
                {"InstanceGroupName": group, "InstanceType": kind, "InstanceCount": count}
                for group, (kind, count) in groups.items()
            ]
        }
    resources = {**config, "VolumeSizeInGB": 30}
    boto3.client("sagemaker").create_training_job(**request(name, ResourceConfig=resources))
    put_attempt(hosts, waits, name, value_every_s, step=step)


def put_attempt(
    hosts: dict,
    waits: list[float],
    name: str = "job",
    every_s: int = 60,
    start: datetime = START,
    step: float = 200,
) -> None:
    """Write logs and values of a job's hosts, as `put_job` says."""
    logs, cloudwatch = boto3.client("logs"), boto3.client("cloudwatch")
    if not logs.describe_log_groups()["logGroups"]:
        logs.create_log_group(logGroupName=NAMESPACE)
    for host, (group, cpus, gpus) in hosts.items():
        lines = [(start, f"host={host} group={group} instance_type=any")]
        for i, wait in enumerate(waits if group != "data_group" else []):
            line = (
                f"step={i} epoch=1 loss=1 step_time_ms={step} data_wait_ms={wait} samples_per_s=1"
            )
            lines.append((start + timedelta(minutes=2 + i), line))
        own = f"{name}/{host}-{start:%s}"
        stream = {"logGroupName": NAMESPACE, "logStreamName": own}
        logs.create_log_stream(**stream)
        events = [{"timestamp": int(t.timestamp() * 1000), "message": line} for t, line in lines]
        logs.put_log_events(**stream, logEvents=events)
        for metric, values in (("CPUUtilization", cpus), ("GPUUtilization", gpus)):
            for i, value in enumerate(values):
                datum = {
                    "MetricName": metric,
                    "Dimensions": [{"Name": "Host", "Value": f"{name}/{host}"}],
                    "Timestamp": start + timedelta(seconds=40 + i * every_s),
                    "Value": value,
                }
                cloudwatch.put_metric_data(Namespace=NAMESPACE, MetricData=[datum])


def put_published_job(data: float, cpu: float, gpu: float, wait: float) -> None:
    """Make a job on the published cluster with so many busy vCPUs (of 72; of 96) and GPUs."""
    dnn = ("dnn_group", [100 * cpu] * 6, [100 * gpu] * 6)
    busy = ("data_group", [100 * data] * 6, [])
    put_job(PUBLISHED, {"algo-1": busy, "algo-2": dnn, "algo-10": busy}, [wait] * 5)


def test_utilisation_is_a_percentage_of_the_instance_while_it_trains(aws):
    # Step lines at 2:00 ... 5:00. Values of the minutes from 0:40, 1:40, 2:40, 3:40, 4:40, 5:40:
    # those from 2:40 and from 3:40 are of nothing but training.
    cpus, gpus = [100, 2400, 4800, 7200, 2400, 100], [0, 100, 400, 600, 100, 0]
    hosts = {"algo-1": ("dnn_group", cpus, gpus), "algo-2": ("data_group", [3600] * 6, [])}
    put_job(PUBLISHED, hosts, [10] * 4)
    data, dnn = monitoring.utilisation("job").to_dict("records")
    assert (data["group"], data["host"], data["instance type"]) == (
        "data_group",
        "algo-2",
        "ml.c5.18xlarge",
    )
    assert data["CPU (%)"] == pytest.approx(50) and data["busy vCPUs"] == 36  # of 72
    assert dnn["busy vCPUs"] == (48 + 72) / 2 and dnn["busy GPUs"] == (4 + 6) / 2
    assert dnn["CPU (%)"] == pytest.approx(100 * 60 / 96)
    assert dnn["GPU (%)"] == pytest.approx(100 * 5 / 8)


def test_utilisation_of_a_short_training_is_of_the_minute_that_it_is_in(aws):
    put_job(ONE_P4D, {"algo-1": ("homogeneousCluster", [1, 4800, 3], [])}, [10])
    (row,) = monitoring.utilisation("job").to_dict("records")
    assert row == {
        "group": "homogeneousCluster",
        "host": "algo-1",
        "instance type": "ml.p4d.24xlarge",
        "CPU (%)": pytest.approx(50),
        "busy vCPUs": 48,
    }


@pytest.mark.parametrize(
    "age, length, periods",
    [
        (timedelta(hours=1), timedelta(minutes=10), [1, 60]),
        (timedelta(hours=2), timedelta(minutes=100), [5, 60]),
        (timedelta(hours=4), timedelta(minutes=10), [60]),
        (timedelta(days=3), timedelta(days=2), [180]),
        (timedelta(days=16), timedelta(minutes=10), [300]),
        (timedelta(days=64), timedelta(hours=10), [3600]),
    ],
)
def test_asks_cloudwatch_for_what_it_still_has(age, length, periods):
    """CloudWatch answers with nothing to a period that it does not keep."""
    start = (datetime.now(timezone.utc) - age).replace(microsecond=0)
    end, middle = start + length, start + length / 2
    keys = {"aws_access_key_id": "a", "aws_secret_access_key": "b", "region_name": "us-east-1"}
    clients = {name: boto3.client(name, **keys) for name in ("sagemaker", "logs", "cloudwatch")}
    session = type("Session", (), {"client": lambda self, name: clients[name]})()
    stubs = {name: Stubber(client) for name, client in clients.items()}

    p4d = {"InstanceType": "ml.p4d.24xlarge", "InstanceCount": 1, "VolumeSizeInGB": 30}
    description = {
        "TrainingJobName": "job",
        "TrainingJobArn": "arn:aws:sagemaker:us-east-1:123456789012:training-job/job",
        "TrainingJobStatus": "Completed",
        "SecondaryStatus": "Completed",
        "ModelArtifacts": {"S3ModelArtifacts": "s3://bucket/model.tar.gz"},
        "AlgorithmSpecification": {"TrainingInputMode": "File"},
        "ResourceConfig": p4d,
        "StoppingCondition": {},
        "CreationTime": start,
    }
    for _ in range(2):  # for the log, and for the instance types
        stubs["sagemaker"].add_response("describe_training_job", description)
    stream = {"logStreamName": "job/algo-1-1700000000"}
    stubs["logs"].add_response("describe_log_streams", {"logStreams": [stream]})
    lines = [
        {"timestamp": int(when.timestamp() * 1000), "message": "step=1 loss=1 step_time_ms=10"}
        for when in (start, end)
    ]
    for events in (lines, []):
        page = {"events": events, "nextForwardToken": "f/1"}
        stubs["logs"].add_response("get_log_events", page)
    points = [  # in no order, as AWS says
        {"Timestamp": end, "Average": 9600.0, "Unit": "Percent"},
        {"Timestamp": middle, "Average": 4800.0, "Unit": "Percent"},
    ]
    for metric in ("CPUUtilization", "GPUUtilization"):
        for period in periods:
            assert length / timedelta(seconds=period) <= 1440, "AWS refuses that"
            asked = {
                "Namespace": NAMESPACE,
                "MetricName": metric,
                "Dimensions": [{"Name": "Host", "Value": "job/algo-1"}],
                "StartTime": start,
                "EndTime": end + timedelta(seconds=1),
                "Period": period,
                "Statistics": ["Average"],
            }
            known = metric == "CPUUtilization" and period == periods[-1]
            answer = {"Label": metric, "Datapoints": points if known else []}
            stubs["cloudwatch"].add_response("get_metric_statistics", answer, asked)
    for stub in stubs.values():
        stub.activate()
    (row,) = monitoring.utilisation("job", session).to_dict("records")
    stubs["cloudwatch"].assert_no_pending_responses()
    assert row["CPU (%)"] == pytest.approx(50)  # the second half, as the next value is of later


@pytest.mark.parametrize(
    "data, cpu, gpu, wait, sentence, marked",
    [
        # busy of 72, 96 and 8; ms of 200
        (36, 95, 4, 100, "the CPUs of dnn_group (99 % busy); the training waits for data for 50 %",
         {"algo-2"}),
        (70, 48, 4, 100, "the CPUs of data_group (97 % busy); the training waits for data for 50 %",
         {"algo-1", "algo-10"}),
        (70, 90, 7.6, 10, "The limit: the GPUs of dnn_group (95 % busy), as it should be; the trai",
         {"algo-2"}),
        (36, 48, 7.6, 60, "The limit: the GPUs of dnn_group (95 % busy); the training waits for da",
         {"algo-2"}),
        (70, 48, 6, 10, "Bottleneck: none; the training waits for data for 5 % of a step.", set()),
        (70, 90, 7.6, 60, "the CPUs of data_group (97 % busy) and the CPUs of dnn_group (94 % bus",
         {"algo-1", "algo-2", "algo-10"}),
        (36, 48, 4, 100, "none of these CPUs and GPUs; the training waits for data for 50 % of",
         set()),
        (64.7, 86.3, 7.19, 100, "Bottleneck: none of these", set()),  # each just below 90 %
        (64.9, 48, 4, 20, "the CPUs of data_group (90 % busy)", {"algo-1", "algo-10"}),
        (64.9, 48, 4, 19.9, "Bottleneck: none;", set()),
    ],
)  # fmt: skip
def test_the_bottleneck_is_named_and_marked(aws, capsys, data, cpu, gpu, wait, sentence, marked):
    put_published_job(data, cpu, gpu, wait)
    monitoring.main(["job"])
    assert sentence in capsys.readouterr().out
    figure = monitoring.plot_job("job")
    assert sentence in " ".join(figure.get_suptitle().split())
    said = {panel.get_title("left"): panel.get_title("right") for panel in figure.axes[:3]}
    names = {
        "algo-1": "data_group / algo-1 (ml.c5.18xlarge)",
        "algo-10": "data_group / algo-10 (ml.c5.18xlarge)",
        "algo-2": "dnn_group / algo-2 (ml.p4d.24xlarge)",
    }
    assert list(said) == list(names.values())
    mark = "= the limit" if sentence.startswith("The limit") else "= BOTTLENECK"
    assert {host for host, name in names.items() if mark in said[name]} == marked
    cpus, gpus = said[names["algo-2"]].split(", GPUs ")
    assert cpus.startswith(f"CPUs {100 * cpu / 96:.0f} % busy")
    assert gpus.startswith(f"{100 * gpu / 8:.0f} % busy")
    assert ("but data costs less than 10 %" in cpus) == (cpu >= 86.4 and wait < 20)
    assert "at least 90 % busy" in figure.legends[0].get_title().get_text()


@pytest.mark.parametrize(
    "data_group, floor, sentence, said",
    [
        # One group, whose cores do both; and, with data hosts, its cores do the GPU's part alone.
        (False, 100, "Bottleneck: the CPUs of dnn_group (99 % busy); data costs 50 % of a step.",
         "cores that also play the GPU 99 % busy = BOTTLENECK"),
        (False, 190, "The limit: the GPUs of dnn_group (99 % busy), as it should be; data costs ",
         "cores that play the GPU 99 % busy = the limit"),
        (True, 190, "The limit: the GPUs of dnn_group (99 % busy), as it should be; data costs ",
         "cores that play the GPU 99 % busy = the limit"),
        (True, 150, "The limit: the GPUs of dnn_group (99 % busy); data costs 25 % of a step.",
         "cores that play the GPU 99 % busy = the limit"),
    ],
)  # fmt: skip
def test_where_no_gpu_is_seen_the_cores_play_it(aws, data_group, floor, sentence, said):
    hosts = {"algo-2": ("dnn_group", [9500] * 6, [])}
    hosts |= {"algo-1": ("data_group", [3600] * 6, [])} if data_group else {}
    put_job(PUBLISHED, hosts, [10] * 5)
    put_job(ONE_P4D, {"algo-1": ("homogeneousCluster", [], [])}, [0] * 5, "synthetic", step=floor)
    figure = monitoring.plot_job("job", synthetic_job="synthetic")
    told = " ".join(figure.get_suptitle().split())
    assert sentence in told and "There is no GPU here: the cores of algo-2 play it." in told
    panels = {panel.get_title("left").split(" ")[0]: panel for panel in figure.axes}
    assert panels["dnn_group"].get_title("right") == said
    step = panels["Step"]
    assert set(step.lines[-1].get_ydata()) == {floor}
    assert f"median 200.0 ms, {floor}.0 without data, which costs" in step.get_title("right")


def test_the_figure_draws_percentages_of_the_instance_over_time(aws):
    cpus, gpus = [4800, 9600, 2400], [200, 400, 600]
    put_job(ONE_P4D, {"algo-1": ("homogeneousCluster", cpus, gpus)}, [20, 50, 100])
    figure = monitoring.plot_job("job", title="My job")
    assert figure.get_suptitle().startswith("My job\n")
    host, step = figure.axes
    cpu, gpu, *_ = host.lines
    assert (cpu.get_label(), gpu.get_label()) == ("CPUs", "GPUs")
    assert list(cpu.get_ydata()) == pytest.approx([50, 100, 25])
    assert list(gpu.get_ydata()) == pytest.approx([25, 50, 75])
    assert list(cpu.get_xdata()) == [40, 100, 160]
    assert list(step.lines[0].get_ydata()) == [200] * 3
    assert list(step.lines[0].get_xdata()) == [120, 180, 240]
    assert list(step.lines[1].get_ydata()) == pytest.approx([20, 50, 100])
    assert step.get_title("right") == "median 200.0 ms, of which it waits for data for 25 %"
    assert step.get_xlabel() == "seconds since the first line of the log"
    (training,) = [p for p in host.patches if p.get_label() == "first to last step line"]
    assert (training.get_x(), training.get_width()) == (120, 120)
    assert training.get_facecolor()[:3] == pytest.approx(to_rgb("0.93"))


def test_values_of_less_than_a_minute_are_drawn_one_by_one(aws):
    cpus = [96 * i for i in range(60)]
    put_job(ONE_P4D, {"algo-1": ("homogeneousCluster", cpus, [])}, [20], value_every_s=2)
    host, *_ = monitoring.plot_job("job").axes
    assert list(host.lines[0].get_ydata()) == pytest.approx(list(range(41)))  # to 2:00
    assert list(host.lines[0].get_xdata()) == list(range(40, 121, 2))


def test_a_long_job_is_drawn_in_minutes_and_no_figure_stays_open(aws):
    put_job(ONE_P4D, {"algo-1": ("homogeneousCluster", [], [])}, [20] * 11)
    _, step = monitoring.plot_job("job").axes
    assert step.get_xlabel() == "minutes since the first line of the log"
    assert list(step.lines[0].get_xdata()) == pytest.approx(list(range(2, 13)))
    assert not plt.get_fignums()


def test_unknown_types_and_hosts_without_values_are_said_to_be_so(aws, capsys):
    groups = {"data_group": ("ml.x9.large", 1), "dnn_group": ("ml.p4d.24xlarge", 1)}
    put_job(
        groups, {"algo-1": ("data_group", [150] * 6, []), "algo-2": ("dnn_group", [], [])}, [100]
    )
    monitoring.main(["job"])
    shown = capsys.readouterr().out
    assert "Bottleneck: not known; the training waits for data for 50 % of a step." in shown
    assert "Not judged: ml.x9.large, which is not in shared/prices.csv." in shown
    data, _ = monitoring.utilisation("job").to_dict("records")
    assert data["busy vCPUs"] == 1.5 and "CPU (%)" not in data
    raw, nothing, *_ = monitoring.plot_job("job").axes
    assert set(raw.lines[0].get_ydata()) == {1.5} and raw.get_title("right") == "1.5 busy vCPUs"
    assert nothing.texts[0].get_text() == "CloudWatch has no values of this host."


def test_values_that_are_not_there_yet_are_not_taken_for_idle_hosts(aws, capsys):
    put_job(ONE_P4D, {"algo-1": ("homogeneousCluster", [9600], [])}, [20] * 5)
    assert monitoring.plot_job("job").axes[0].get_title("right") == (
        "no values of its CPUs while it trained"
    )
    monitoring.main(["job"])
    assert "Bottleneck: not known, as CloudWatch has no values" in capsys.readouterr().out


def test_values_that_come_later_are_said_to_be_missing(aws, capsys):
    """Step lines at 2:00 ... 9:00; of one host the values to 3:40 are there, of another none."""
    hosts = {
        "algo-1": ("data_group", [], []),
        "algo-2": ("dnn_group", [4800] * 4, [400] * 4),
        "algo-3": ("data_group", [3600] * 8, []),
    }
    put_job(PUBLISHED, hosts, [100] * 8)
    until = START + timedelta(minutes=3, seconds=40)
    sentence = (
        "Bottleneck: not known; the training waits for data for 50 % of a step. Of CPU values "
        f"CloudWatch has none of algo-1, of algo-2 only those up to {until:%H:%M:%S} (on AWS they "
        "come once a minute, some minutes late)."
    )
    monitoring.main(["job"])
    assert sentence in capsys.readouterr().out
    figure = monitoring.plot_job("job")
    assert sentence in " ".join(figure.get_suptitle().split())
    values = {p.get_title("left").split()[2]: len(p.lines[0].get_ydata()) for p in figure.axes[:3]}
    assert (values["algo-2"], values["algo-3"]) == (4, 8)  # what there is, is drawn


def test_after_a_spot_restart_all_figures_are_of_the_last_attempt(aws, capsys):
    """Its hosts have changed places: algo-1 has been in data_group before, and algo-2 trained."""
    busy, idle = [7200] * 6, [720] * 6
    put_job(PUBLISHED, {"algo-1": ("data_group", busy, []), "algo-2": ("dnn_group", idle, [])}, [9])
    again = {"algo-1": ("dnn_group", [4800] * 6, []), "algo-2": ("data_group", idle, [])}
    put_attempt(again, [20] * 5, start=START + timedelta(minutes=15))
    record = sagemaker_backends[DEFAULT_ACCOUNT_ID]["us-east-1"].training_jobs["job"]
    record.billable_time_in_seconds = 1800  # of both attempts

    table = monitoring.steps("job")
    notice = "'job' has been interrupted and started again: this is of attempt 2 alone; show_logs("
    assert capsys.readouterr().err.count(notice) == 1
    assert list(table["step"]) == [0, 1, 2, 3, 4] and set(table["host"]) == {"algo-1"}
    assert monitoring.logged("job", "data_wait_ms") == 20
    used = monitoring.utilisation("job")
    assert list(used["group"] + " " + used["host"]) == ["data_group algo-2", "dnn_group algo-1"]
    assert list(used["CPU (%)"]) == pytest.approx([10, 50])
    data, dnn, step = monitoring.plot_job("job").axes
    assert [len(panel.lines[0].get_ydata()) for panel in (data, dnn)] == [6, 6]
    assert list(step.lines[1].get_ydata()) == [20] * 5
    cost = costs.compare(["job"]).loc["job"]
    assert cost["billable time (s)"] == 1800 and cost["data wait (ms)"] == 20

    capsys.readouterr()
    monitoring.main(["job", "--logs"])
    shown, said = capsys.readouterr()
    assert [line for line in shown.splitlines() if line.startswith("==")] == [
        "== data_group / algo-1, attempt 1 of 2 (1 lines)",
        "== dnn_group / algo-2, attempt 1 of 2 (2 lines)",
        "== data_group / algo-2, attempt 2 of 2 (1 lines)",
        "== dnn_group / algo-1, attempt 2 of 2 (6 lines)",
    ]
    assert not said


def test_a_job_without_metrics_or_step_lines_says_so(aws, capsys):
    put_job(ONE_P4D, {"algo-1": ("homogeneousCluster", [], [])}, [])
    monitoring.main(["job"])
    shown = capsys.readouterr().out
    assert "No step lines" in shown and "not known, as CloudWatch has no values" in shown
    assert len(monitoring.plot_job("job").axes) == 1


def test_the_command_prints_what_is_known_and_writes_the_figure(aws, capsys, tmp_path):
    put_published_job(36, 95, 4, 90)
    figure = tmp_path / "job.png"
    monitoring.main(["job", "--figure", str(figure)])
    status, _, heading, *shown = capsys.readouterr().out.splitlines()
    assert status == "job: Completed"
    assert heading.split()[-4:] == ["GPU", "(%)", "busy", "GPUs"]
    assert [line.split() for line in shown[:3]] == [
        ["data_group", "algo-1", "ml.c5.18xlarge", "50.0", "36.0", "-", "-"],
        ["data_group", "algo-10", "ml.c5.18xlarge", "50.0", "36.0", "-", "-"],
        ["dnn_group", "algo-2", "ml.p4d.24xlarge", "99.0", "95.0", "50.0", "4.0"],
    ]
    assert "Step time 200.0 ms, data wait 90.0 ms (medians; step lines: 5)" in shown
    assert plt.imread(figure).shape[1] == 1320


def test_the_command_prints_logs(aws, capsys):
    put_published_job(36, 95, 4, 90)
    monitoring.main(["job", "--logs", "--group", "data_group"])
    shown = capsys.readouterr().out
    assert "== data_group / algo-10 (1 lines)" in shown and "algo-2" not in shown
    monitoring.main(["job", "--logs", "--host", "algo-2"])
    assert capsys.readouterr().out.count("step_time_ms=200") == 5


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["nojob"], "No training job 'nojob' to be seen from here"),
        (["nojob", "--logs"], "in the notebook that started it: use %run -m there."),
        (["silent"], "There is no log of training job 'silent'"),
        (["silent", "--logs"], "There is no log of training job 'silent'"),
        (["job", "--logs", "--group", "gpu"], "No host matches group='gpu'"),
        (["job", "--group", "data_group"], "--group and --host choose among logs: add --logs."),
        (["job", "--logs", "--figure", "a.png"], "--figure does not go with --logs."),
        (["job", "--figure", "/no/folder/a.png"], "figure cannot be written to '/no/folder/a.png'"),
        (["job", "--figure", "a.xyz"], "'a.xyz': Format 'xyz' is not supported"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(aws, capsys, arguments, sentence):
    put_published_job(36, 95, 4, 90)
    put_job(ONE_P4D, {}, [], name="silent")
    with pytest.raises(SystemExit) as end:
        monitoring.main(arguments)
    assert end.value.code == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    "region, reason", [({}, "specify a region"), ({"AWS_DEFAULT_REGION": "us-east-1"}, "credent")]
)
def test_without_an_account_the_command_says_where_local_jobs_are(tmp_path, region, reason):
    environment = {key: value for key, value in os.environ.items() if not key.startswith("AWS_")}
    ended = subprocess.run(
        [sys.executable, "-m", "shared.monitoring", "my-local-job"],
        cwd=ROOT,
        env=environment | region | {"HOME": str(tmp_path), "AWS_EC2_METADATA_DISABLED": "true"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert reason in ended.stderr and "use %run -m there" in ended.stderr


PRINT_LOG = f"""
job = {request("job")}"""
PRINT_LOG += """
import sys, time, boto3, moto
from shared import monitoring
with moto.mock_aws():
    stream = {"logGroupName": "/aws/sagemaker/TrainingJobs", "logStreamName": "job/algo-1-1"}
    logs = boto3.client("logs")
    logs.create_log_group(logGroupName=stream["logGroupName"])
    logs.create_log_stream(**stream)
    now, count = int(time.time() * 1000), int(sys.argv[1])
    events = [{"timestamp": now, "message": f"line {i} " + 90 * "."} for i in range(count)]
    logs.put_log_events(**stream, logEvents=events)
    boto3.client("sagemaker").create_training_job(**job)
    monitoring.main(["job", "--logs"])
"""


@pytest.mark.parametrize("lines, reader", [(1500, "head -2"), (5, "true")])
def test_a_reader_that_has_seen_enough_is_no_error(lines, reader):
    ended = subprocess.run(
        ["bash", "-c", f'"$0" -c "$1" {lines} | {reader}', sys.executable, PRINT_LOG],
        cwd=ROOT,
        env={**os.environ, "AWS_DEFAULT_REGION": "us-east-1", "PYTHONUNBUFFERED": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.stderr == ""
    if reader != "true":
        assert ended.stdout.startswith("== unknown / algo-1 (1500 lines)")


LOCAL_JOB = """
import json
import boto3
from jobs import READ_CONFIG, TWO_GROUPS
from shared import monitoring

script = READ_CONFIG + '''
import time
end = time.monotonic() + 4.5
while time.monotonic() < end:
    if group == "dnn_group":
        time.sleep(1)
        print("step=1 loss=1 step_time_ms=100 data_wait_ms=60 samples_per_s=1", flush=True)
'''
name = jobs.run({"train.py": script}, "exec python train.py", TWO_GROUPS)["TrainingJobName"]
monitoring.main([name])
monitoring.main([name, "--logs", "--group", "dnn_group"])
figure = monitoring.plot_job(name)
drawn = {p.get_title("left"): [list(line.get_ydata()) for line in p.lines] for p in figure.axes}
values = {}
lines = monitoring.logs(name)
for host in ("algo-1", "algo-2"):
    points = boto3.client("cloudwatch").get_metric_statistics(
        Namespace="/aws/sagemaker/TrainingJobs", MetricName="CPUUtilization", Period=1,
        Dimensions=[{"Name": "Host", "Value": f"{name}/{host}"}],
        StartTime=lines[0].time, EndTime=lines[-1].time, Statistics=["Average"])["Datapoints"]
    values[host] = [point["Average"] for point in points]
table = monitoring.utilisation(name).to_dict("records")
print("RESULT" + json.dumps([drawn, values, table]))
"""


@pytest.mark.thorough
def test_a_job_on_this_machine_is_seen_by_the_same_code(tmp_path):
    process = start_kernel(LOCAL_JOB, tmp_path)
    output = process.communicate(timeout=200)[0]
    assert process.returncode == 0, output
    drawn, values, (data, dnn) = json.loads(output.split("RESULT")[1])
    assert (data["group"], data["instance type"]) == ("data_group", "ml.c5.9xlarge")
    assert (dnn["group"], dnn["instance type"]) == ("dnn_group", "ml.g5.2xlarge")
    for row, vcpus in ((data, 36), (dnn, 8)):
        percentages = [value / vcpus for value in values[row["host"]]]
        assert len(percentages) >= 2 and 0 <= min(percentages) <= max(percentages) <= 100.001
        shown = drawn[f"{row['group']} / {row['host']} ({row['instance type']})"][0]
        assert shown[: len(percentages)] == pytest.approx(percentages)
        assert row["CPU (%)"] == pytest.approx(100 * row["busy vCPUs"] / vcpus)
        assert min(percentages) <= row["CPU (%)"] <= max(percentages)
    assert data["CPU (%)"] > 2 * dnn["CPU (%)"]  # one is in a loop, the other sleeps
    waits = drawn["Step time"][1]
    assert set(waits) == {60} and len(waits) >= 3
    assert "Step time 100.0 ms, data wait 60.0 ms" in output
    assert f"== dnn_group / {dnn['host']} ({len(waits)} lines)" in output
