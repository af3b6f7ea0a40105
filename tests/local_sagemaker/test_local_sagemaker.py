"""Jobs on the local SageMaker, started with the real SDK and boto3: what they do and return."""

import importlib.metadata
import json
import os
import re
import signal
import threading
import time
import venv
from datetime import datetime, timedelta
from pathlib import Path

import boto3
import pytest
from sagemaker.core.training.configs import InputData, S3DataSource

from helpers.jobs import (
    READ_CONFIG,
    TWO_GROUPS,
    Jobs,
    archive,
    group,
    processes_naming,
    read_s3,
)
from helpers.waiting import wait_until
from shared import local_sagemaker

pytestmark = pytest.mark.usefixtures("nothing_is_left")


def upload_text(uri: str, text: str) -> None:
    bucket, key = uri.removeprefix("s3://").split("/", 1)
    boto3.client("s3").create_bucket(Bucket=bucket)
    boto3.client("s3").put_object(Bucket=bucket, Key=key, Body=text.encode())


def test_a_job_runs_on_every_host_with_its_channels_and_its_files_come_back(jobs: Jobs):
    """What a host leaves running ends with it, even a daemon that has cleared its environment."""
    for key in ("train/a.txt", "train/deep/b.txt", "test/c.txt"):
        upload_text(f"s3://channel-data/{key}", key)
    mark = f"sleep 98{os.getpid()}"
    script = (
        READ_CONFIG
        + f"""
print(os.environ["SM_HPS"])
root = pathlib.Path(os.environ["SM_INPUT_DATA_DIR"])
files = [str(path.relative_to(root)) for path in root.glob("t*/**/*") if path.is_file()]
print("FILES", group, sorted(files), sorted(json.loads(os.environ["SM_CHANNELS"])))
pathlib.Path(os.environ["SM_MODEL_DIR"], f"{{group}}.txt").write_text("model of " + group)
pathlib.Path(os.environ["SM_OUTPUT_DATA_DIR"], f"{{group}}.txt").write_text("data of " + group)
os.system("setsid {mark} & env -i setsid {mark} &")
"""
    )

    def channel(name: str, *groups: str) -> InputData:
        source = S3DataSource(
            s3_data_type="S3Prefix",
            s3_uri=f"s3://channel-data/{name}",
            s3_data_distribution_type="FullyReplicated",
            instance_group_names=list(groups),
        )
        return InputData(channel_name=name, data_source=source)

    job = jobs.run(
        {"train.py": script},
        "exec python train.py",
        TWO_GROUPS,
        hyperparameters={"epochs": 3, "flag": True, "name": "a b"},
        environment={"COLOUR": "blue"},
        input_data_config=[channel("train", "data_group"), channel("test", *TWO_GROUPS)],
    )
    assert (job["TrainingJobStatus"], job["SecondaryStatus"]) == ("Completed", "Completed")
    assert job["Environment"] == {"COLOUR": "blue"}
    assert 1 <= job["BillableTimeInSeconds"] == job["TrainingTimeInSeconds"] < 60
    steps = [t["Status"] for t in job["SecondaryStatusTransitions"]]
    assert steps == ["Starting", "Downloading", "Training", "Uploading", "Completed"]
    log = jobs.log(job["TrainingJobName"])
    assert any('"epochs": 3' in line and '"flag": true' in line for line in log)
    assert sorted(line for line in log if line.startswith("FILES")) == [
        "FILES data_group ['test/c.txt', 'train/a.txt', 'train/deep/b.txt'] "
        "['code', 'sm_drivers', 'test', 'train']",
        "FILES dnn_group ['test/c.txt'] ['code', 'sm_drivers', 'test']",
    ]
    model = job["ModelArtifacts"]["S3ModelArtifacts"]
    assert archive(model) == {f"{x}.txt": f"model of {x}".encode() for x in TWO_GROUPS}
    output = archive(model.replace("model.tar.gz", "output.tar.gz"))
    assert output["dnn_group.txt"] == b"data of dnn_group"
    time.sleep(0.5)
    assert not processes_naming(mark.replace(" ", "\0"))


def test_each_host_sees_what_aws_would_show_it(jobs: Jobs):
    groups = [group("a", "ml.c5.xlarge", 9), group("b", "ml.m5.xlarge", 1)]
    cluster = {"InstanceGroups": groups, "VolumeSizeInGB": 1}
    jobs.ask("shown", "cat", "/opt/ml/input/config/resourceconfig.json", ResourceConfig=cluster)
    jobs.wait("shown")
    configs = [json.loads(line) for line in jobs.log("shown")]
    names = ["algo-1", "algo-10", *(f"algo-{number}" for number in range(2, 10))]
    assert sorted(c["current_host"] for c in configs) == names
    in_group_a = [
        group["hosts"]
        for config in configs
        for group in config["instance_groups"]
        if group["instance_group_name"] == "a"
    ]
    assert any(hosts != sorted(hosts) for hosts in in_group_a)  # in no particular order
    for config in configs:
        assert config["hosts"] == names
        groups = {g["instance_group_name"]: g for g in config["instance_groups"]}
        assert [len(groups["a"]["hosts"]), len(groups["b"]["hosts"])] == [9, 1]
        assert config["current_host"] in groups[config["current_group_name"]]["hosts"]
        kind = {"a": "ml.c5.xlarge", "b": "ml.m5.xlarge"}[config["current_group_name"]]
        assert config["current_instance_type"] == kind


def test_a_job_s_record_gets_no_new_attributes_while_it_may_be_described(jobs: Jobs):
    """moto iterates over them."""
    name = jobs.ask("described", "sleep", "1")
    [job] = [each for each in threading.enumerate() if each.name == f"local-sagemaker-{name}"]
    before = {*vars(job.record)}
    jobs.wait(name)
    assert {*vars(job.record)} == before


def test_output_is_in_the_log_as_soon_as_it_is_printed(jobs: Jobs):
    text = r"a whole line\r\nof a job\n 50 %%\r100 %%\r and more"
    jobs.ask("printing", "sh", "-c", f"printf '{text}'; sleep 4")
    jobs.wait_for_log("printing", "100 %", seconds=30)
    lines = ["a whole line", "of a job", " 50 %", "100 %"]
    assert jobs.log("printing") == lines
    jobs.wait("printing")
    assert jobs.log("printing") == [*lines, " and more"]


def test_metrics_and_cpu_use_reach_cloudwatch(jobs: Jobs):
    script = (  # in one line, because AWS refuses others
        "import os, time; print('cores:', len(os.sched_getaffinity(0)), 'score=0.25'); "
        "end = time.time() + 5; all(time.time() < end for _ in iter(int, 1)); "
        "print('busy:', time.process_time() / 5, 'score=0.75')"
    )
    score = {"MetricDefinitions": [{"Name": "score", "Regex": "score=([0-9.]+)"}]}
    job = jobs.wait(jobs.ask("metrics", "python3", "-c", script, algorithm=score))
    final = [(m["MetricName"], m["Value"]) for m in job["FinalMetricDataList"]]
    assert final == [("score", 0.75)]

    def values(metric: str, dimension: str, value: str) -> dict[datetime, float]:
        data = boto3.client("cloudwatch").get_metric_statistics(
            Namespace="/aws/sagemaker/TrainingJobs",
            MetricName=metric,
            Dimensions=[{"Name": dimension, "Value": value}],
            StartTime=job["TrainingStartTime"].timestamp() - 60,
            EndTime=job["TrainingEndTime"].timestamp() + 60,
            Period=1,
            Statistics=["Maximum"],
        )["Datapoints"]
        return {d["Timestamp"]: d["Maximum"] for d in sorted(data, key=lambda d: d["Timestamp"])}

    assert [*values("score", "TrainingJobName", "metrics").values()] == [0.25, 0.75]
    # An ml.m5.large has 2 vCPUs: 200 % on CloudWatch's scale if all of the host's cores are busy.
    # The job keeps one core busy, as far as other tests leave that core to it.
    first, last = (line.split() for line in jobs.log("metrics"))
    cores, busy = int(first[1]), float(last[1])
    cpu = values("CPUUtilization", "Host", "metrics/algo-1")
    assert 0.7 * busy * 200 / cores < max(cpu.values()) <= 1.05 * 200 / cores
    # A value's timestamp is the start of its period. The first one covers the host's first seconds.
    assert abs(min(cpu) - job["TrainingStartTime"]) < timedelta(seconds=1.5)


@pytest.mark.parametrize(
    "name, command, changes, words",
    [
        ("no-bucket", "true", {"OutputDataConfig": {"S3OutputPath": "s3://no-such-bucket/x"}},
         "ClientError: .*404"),
        ("no-command", "/no/such/command", {}, "AlgorithmError: .*exit code: 127"),
    ],
)  # fmt: skip
def test_what_only_shows_when_the_job_runs_fails_it(
    jobs: Jobs, name: str, command: str, changes: dict, words: str
):
    job = jobs.wait(jobs.ask(name, command, **changes))
    assert job["TrainingJobStatus"] == "Failed"
    assert re.match(words, job["FailureReason"]), job["FailureReason"]
    assert job["SecondaryStatusTransitions"][-1]["StatusMessage"] == job["FailureReason"]


def test_a_minimal_request_and_metrics_that_are_no_numbers(jobs: Jobs):
    said = "score=nan score=0.5. score=1"
    score = {"MetricDefinitions": [{"Name": "score", "Regex": r"score=(\S+)"}]}
    job = jobs.wait(jobs.ask("minimal", "echo", said, algorithm=score, StoppingCondition={}))
    assert job["TrainingJobStatus"] == "Completed", job["FailureReason"]
    assert job["FinalMetricDataList"] == []


def test_fast_file_is_taken_as_file_which_a_line_says(jobs: Jobs, capsys: pytest.CaptureFixture):
    upload_text("s3://any/data/digits.txt", "1 2 3")
    source = {"S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": "s3://any/data"}}
    channels = [
        {"ChannelName": "fast", "DataSource": source},
        {"ChannelName": "whole", "DataSource": source, "InputMode": "File"},
    ]
    fast = {"TrainingInputMode": "FastFile"}
    command = "cat", "/opt/ml/input/data/fast/digits.txt"
    jobs.ask("fast", *command, algorithm=fast, InputDataConfig=channels)
    said = [line for line in capsys.readouterr().out.splitlines() if "FastFile" in line]
    assert len(said) == 1 and said[0].startswith("FastFile: here, files are downloaded first;")
    assert jobs.wait("fast")["TrainingJobStatus"] == "Completed"
    assert jobs.log("fast") == ["1 2 3"]


def test_two_jobs_at_once_do_not_meet(jobs: Jobs):
    """Both bind their own host's address and ports, as launchers do."""
    script = (
        "import json, os, socket, time; local = json.loads(os.environ['LOCAL_SAGEMAKER']); "
        "own = socket.create_server((local['addresses']['algo-1'], local['base_port'])); "
        "anywhere = socket.create_server(('', local['base_port'] + 1)); "
        "print('bound'); time.sleep(8)"
    )
    started = time.monotonic()
    names = [jobs.ask(name, "python3", "-c", script) for name in ("one", "two")]
    for name in names:
        jobs.wait_for_log(name, "bound")
    status = [jobs.describe(name)["TrainingJobStatus"] for name in names]
    assert status == ["InProgress", "InProgress"], time.monotonic() - started
    assert [jobs.wait(name)["TrainingJobStatus"] for name in names] == ["Completed"] * 2


def test_checkpoints_are_on_s3_if_the_job_is_killed(jobs: Jobs):
    """A spot interruption without notice. (test_local_files.py has jobs that continue.)"""
    checkpoints = {"S3Uri": "s3://any/checkpoints"}
    script = "echo 1 >/opt/ml/checkpoints/step.txt; sleep 100"
    name = jobs.ask("interrupted", "sh", "-c", script, CheckpointConfig=checkpoints)
    found = {"Bucket": "any", "Prefix": "checkpoints"}
    wait_until(lambda: boto3.client("s3").list_objects_v2(**found)["KeyCount"], seconds=20)
    for pid in processes_naming(f"TRAINING_JOB_NAME={name}"):
        os.kill(pid, signal.SIGKILL)
    assert jobs.wait(name)["TrainingJobStatus"] == "Failed"
    assert read_s3("s3://any/checkpoints/step.txt") == b"1\n"


def test_requirements_are_verified_and_never_installed(jobs: Jobs):
    """The notebooks' jobs have requirements that are satisfied."""
    installed = importlib.metadata.version("six")
    other = "1.15.0" if installed != "1.15.0" else "1.16.0"  # both exist
    files = {"train.py": "", "requirements.txt": f"six=={other}\n"}
    name = jobs.create(files, "exec python train.py")
    assert jobs.wait(name)["TrainingJobStatus"] == "Failed"
    # "none" shows that pip has not searched any index.
    assert any(f"six=={other} (from versions: none)" in line for line in jobs.log(name))
    assert importlib.metadata.version("six") == installed


def test_an_image_is_the_environment_that_is_named_for_it(local, jobs: Jobs, tmp_path: Path):
    """For others, it is this process's own, as in all other jobs here."""
    venv.create(tmp_path / "image")
    local.images["an-image"] = tmp_path / "image"
    script = "import os, sys; print(os.path.realpath(sys.prefix))"
    image = {"TrainingImage": "an-image"}
    jobs.wait(jobs.ask("image", "python", "-c", script, algorithm=image))
    assert jobs.log("image") == [f"{(tmp_path / 'image').resolve()}"]
    with pytest.raises(ValueError, match=f"{tmp_path}, has no bin/python"):
        local_sagemaker.start(images={"an-image": tmp_path})


def test_cores_are_shared_by_vcpus_on_one_scale(monkeypatch: pytest.MonkeyPatch):
    """A homogeneous job gets its instance's share of the largest cluster, not the whole machine.

    `LocalSageMaker.cores` returns this share in advance.
    """
    from shared.local_sagemaker import LocalSageMaker, cluster

    def cores(count: int, groups: list[dict], scale: int) -> dict[str, list[int]]:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(count)))
        plan: dict[str, list[int]] = {}
        for host in cluster.plan_hosts(groups, scale, 1, Path("/nowhere")):
            plan.setdefault(host.group, []).append(len(host.cores))
        return plan

    both = [group("data", "ml.c5.9xlarge"), group("dnn", "ml.g5.2xlarge")]
    assert cluster.total_vcpus([("ml.c5.9xlarge", 1), ("ml.g5.2xlarge", 2)]) == 36 + 2 * 8
    assert cores(22, both, 44) == {"data": [18], "dnn": [4]}
    assert cores(22, both[1:], 44) == {"dnn": [4]}
    assert cores(2, both, 44) == {"data": [1], "dnn": [1]}  # at least one each
    assert cores(2, both[1:], 44) == {"dnn": [1]}

    session = LocalSageMaker({"ml.c5.9xlarge": 1, "ml.g5.2xlarge": 1})
    assert cores(22, both, 44) == {
        "data": [session.cores("ml.c5.9xlarge")],
        "dnn": [session.cores("ml.g5.2xlarge")],
    }
    with pytest.raises(ValueError, match="Name the largest cluster first"):
        LocalSageMaker(None).cores("ml.c5.9xlarge")
