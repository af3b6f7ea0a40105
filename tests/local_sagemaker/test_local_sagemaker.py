"""Jobs on the local SageMaker, started with the real SDK and boto3: what they do and return."""

import importlib.metadata
import json
import os
import re
import signal
import sys
import threading
import time
import venv
from datetime import datetime, timedelta
from pathlib import Path

import boto3
import pytest

from helpers.jobs import (
    READ_CONFIG,
    TWO_GROUPS,
    Jobs,
    archive,
    group,
    processes_naming,
    read_s3,
    request,
)
from shared import local_sagemaker

pytestmark = pytest.mark.usefixtures("nothing_is_left")


def test_a_job_runs_on_every_host_and_its_files_come_back(jobs: Jobs):
    job = jobs.run(
        {
            "train.py": READ_CONFIG
            + """
print("cores", sorted(os.sched_getaffinity(0)), "hyperparameters", os.environ["SM_HPS"])
print("score=0.25"); print("score=0.75")
pathlib.Path(os.environ["SM_MODEL_DIR"], f"{group}.txt").write_text("model of " + group)
pathlib.Path(os.environ["SM_OUTPUT_DATA_DIR"], f"{group}.txt").write_text("data of " + group)
"""
        },
        "exec python train.py",
        TWO_GROUPS,
        hyperparameters={"epochs": 3, "flag": True, "name": "a b"},
        environment={"COLOUR": "blue"},
    )
    assert (job["TrainingJobStatus"], job["SecondaryStatus"]) == ("Completed", "Completed")
    assert job["Environment"] == {"COLOUR": "blue"}
    assert 1 <= job["BillableTimeInSeconds"] == job["TrainingTimeInSeconds"] < 60
    steps = [t["Status"] for t in job["SecondaryStatusTransitions"]]
    assert steps == ["Starting", "Downloading", "Training", "Uploading", "Completed"]
    assert any(
        '"epochs": 3' in line and '"flag": true' in line
        for line in jobs.log(job["TrainingJobName"])
    )
    model = job["ModelArtifacts"]["S3ModelArtifacts"]
    assert archive(model) == {
        "data_group.txt": b"model of data_group",
        "dnn_group.txt": b"model of dnn_group",
    }
    output = archive(model.replace("model.tar.gz", "output.tar.gz"))
    assert output["dnn_group.txt"] == b"data of dnn_group"


def test_each_host_sees_what_aws_would_show_it(jobs: Jobs):
    name = jobs.create(
        {"train.py": READ_CONFIG + "print('CONFIG', json.dumps(config))"},
        "exec python train.py",
        {"a": ("ml.c5.xlarge", 9), "b": ("ml.m5.xlarge", 1)},
    )
    jobs.wait(name)
    configs = [json.loads(x.split(" ", 1)[1]) for x in jobs.log(name) if x.startswith("CONFIG ")]
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
    name = jobs.create({"train.py": "import time\ntime.sleep(1)"}, "exec python train.py")
    [job] = [each for each in threading.enumerate() if each.name == f"local-sagemaker-{name}"]
    before = {*vars(job.record)}
    jobs.wait(name)
    assert {*vars(job.record)} == before


def test_output_is_in_the_log_as_soon_as_it_is_printed(jobs: Jobs):
    script = """
import sys, time
sys.stdout.write("a whole line\\r\\nof a job\\n 50 %\\r100 %\\r and more")
time.sleep(4)
"""
    name = jobs.create({"train.py": script}, "exec python train.py")
    jobs.wait_for_log(name, "100 %", seconds=30)
    log = jobs.log(name)
    assert log[log.index("a whole line") :] == ["a whole line", "of a job", " 50 %", "100 %"]
    jobs.wait(name)
    assert jobs.log(name)[-1] == " and more"


def test_metrics_and_cpu_use_reach_cloudwatch(jobs: Jobs):
    script = (  # in one line, because AWS refuses others
        "import os, time; print('cores:', len(os.sched_getaffinity(0)), 'score=0.25'); "
        "end = time.time() + 5; all(time.time() < end for _ in iter(int, 1)); "
        "print('busy:', time.process_time() / 5, 'score=0.75')"
    )
    boto3.client("s3").create_bucket(Bucket="metrics")
    boto3.client("sagemaker").create_training_job(
        **request(
            "metrics",
            AlgorithmSpecification={
                "TrainingImage": "any",
                "TrainingInputMode": "File",
                "ContainerEntrypoint": ["python3", "-c", script],
                "MetricDefinitions": [{"Name": "score", "Regex": "score=([0-9.]+)"}],
            },
            OutputDataConfig={"S3OutputPath": "s3://metrics/output"},
        )
    )
    job = jobs.wait("metrics")
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


def test_channels_go_to_their_groups(jobs: Jobs):
    from sagemaker.core.training.configs import InputData, S3DataSource

    s3, bucket = boto3.client("s3"), "channel-data"
    s3.create_bucket(Bucket=bucket)
    for key in ("train/a.txt", "train/deep/b.txt", "test/c.txt"):
        s3.put_object(Bucket=bucket, Key=key, Body=key.encode())

    def channel(name: str, *groups: str) -> InputData:
        source = S3DataSource(
            s3_data_type="S3Prefix",
            s3_uri=f"s3://{bucket}/{name}",
            s3_data_distribution_type="FullyReplicated",
            instance_group_names=list(groups),
        )
        return InputData(channel_name=name, data_source=source)

    script = READ_CONFIG + (
        "root = pathlib.Path(os.environ['SM_INPUT_DATA_DIR'])\n"
        "files = [str(p.relative_to(root)) for p in root.glob('t*/**/*') if p.is_file()]\n"
        "print('FILES', group, sorted(files), sorted(json.loads(os.environ['SM_CHANNELS'])))"
    )
    name = jobs.create(
        {"train.py": script},
        "exec python train.py",
        TWO_GROUPS,
        input_data_config=[
            channel("train", "data_group"),
            channel("test", "data_group", "dnn_group"),
        ],
    )
    jobs.wait(name)
    assert sorted(line for line in jobs.log(name) if line.startswith("FILES")) == [
        "FILES data_group ['test/c.txt', 'train/a.txt', 'train/deep/b.txt'] "
        "['code', 'sm_drivers', 'test', 'train']",
        "FILES dnn_group ['test/c.txt'] ['code', 'sm_drivers', 'test']",
    ]


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"OutputDataConfig": {"S3OutputPath": "s3://no-such-bucket/x"}}, "ClientError: .*404"),
        (
            {
                "AlgorithmSpecification": {
                    "TrainingImage": "any",
                    "TrainingInputMode": "File",
                    "ContainerEntrypoint": ["/no/such/command"],
                }
            },
            "AlgorithmError: .*exit code: 127",
        ),
    ],
)
def test_what_only_shows_when_the_job_runs_fails_it(jobs: Jobs, changes: dict, words: str):
    boto3.client("s3").create_bucket(Bucket="any")
    name = f"wrong-{abs(hash(words))}"
    boto3.client("sagemaker").create_training_job(**request(name, **changes))
    job = jobs.wait(name)
    assert job["TrainingJobStatus"] == "Failed"
    assert re.match(words, job["FailureReason"]), job["FailureReason"]
    assert job["SecondaryStatusTransitions"][-1]["StatusMessage"] == job["FailureReason"]


def test_a_minimal_request_and_metrics_that_are_no_numbers(jobs: Jobs):
    boto3.client("s3").create_bucket(Bucket="any")
    specification = {
        "TrainingImage": "any",
        "TrainingInputMode": "File",
        "ContainerEntrypoint": ["echo", "score=nan score=0.5. score=1"],
        "MetricDefinitions": [{"Name": "score", "Regex": r"score=(\S+)"}],
    }
    boto3.client("sagemaker").create_training_job(
        **request("minimal", AlgorithmSpecification=specification, StoppingCondition={})
    )
    job = jobs.wait("minimal")
    assert job["TrainingJobStatus"] == "Completed", job["FailureReason"]
    assert job["FinalMetricDataList"] == []


def test_fast_file_is_taken_as_file_which_a_line_says(jobs: Jobs, capsys: pytest.CaptureFixture):
    s3 = boto3.client("s3")
    s3.create_bucket(Bucket="any")
    s3.put_object(Bucket="any", Key="data/digits.txt", Body=b"1 2 3")
    source = {"S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": "s3://any/data"}}
    boto3.client("sagemaker").create_training_job(
        **request(
            "fast",
            AlgorithmSpecification={
                "TrainingImage": "any",
                "TrainingInputMode": "FastFile",
                "ContainerEntrypoint": ["cat", "/opt/ml/input/data/fast/digits.txt"],
            },
            InputDataConfig=[
                {"ChannelName": "fast", "DataSource": source},
                {"ChannelName": "whole", "DataSource": source, "InputMode": "File"},
            ],
        )
    )
    said = [line for line in capsys.readouterr().out.splitlines() if "FastFile" in line]
    assert len(said) == 1 and said[0].startswith("FastFile: here, files are downloaded first;")
    assert jobs.wait("fast")["TrainingJobStatus"] == "Completed"
    assert jobs.log("fast") == ["1 2 3"]


def test_two_jobs_at_once_do_not_meet(jobs: Jobs):
    """Both bind their own host's address and ports, as launchers do."""
    script = """
import json, os, socket, time
local = json.loads(os.environ["LOCAL_SAGEMAKER"])
address = local["addresses"][os.environ["SM_CURRENT_HOST"]]
own = socket.create_server((address, local["base_port"]))
anywhere = socket.create_server(("", local["base_port"] + 1))
print("bound")
time.sleep(8)
"""
    started = time.monotonic()
    names = [jobs.create({"train.py": script}, "exec python train.py") for _ in range(2)]
    for name in names:
        jobs.wait_for_log(name, "bound")
    client = boto3.client("sagemaker")
    status = [client.describe_training_job(TrainingJobName=n)["TrainingJobStatus"] for n in names]
    assert status == ["InProgress", "InProgress"], time.monotonic() - started
    assert [jobs.wait(name)["TrainingJobStatus"] for name in names] == ["Completed"] * 2


def test_checkpoints_go_to_s3_and_come_back(jobs: Jobs):
    from sagemaker.core.shapes import CheckpointConfig

    boto3.client("s3").create_bucket(Bucket="checkpoints")
    checkpoints = CheckpointConfig(s3_uri="s3://checkpoints/run")
    script = (
        "import os, pathlib, signal, sys, time\n"
        "path = pathlib.Path(os.environ['SAGEMAKER_BASE_DIR'], 'checkpoints', 'step.txt')\n"
        "step = int(path.read_text()) if path.exists() else 0\n"
        "print('starting at', step)\n"
        "path.write_text(str(step + 1))\n"
        "time.sleep(100 if step == 0 else 0)"
    )
    name = jobs.create({"train.py": script}, "exec python train.py", checkpoint_config=checkpoints)
    deadline = time.monotonic() + 20  # synced while the job runs
    while boto3.client("s3").list_objects_v2(Bucket="checkpoints")["KeyCount"] == 0:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    for pid in processes_naming(f"TRAINING_JOB_NAME={name}"):
        os.kill(pid, signal.SIGKILL)  # a spot interruption without notice
    assert jobs.wait(name)["TrainingJobStatus"] == "Failed"

    again = jobs.create({"train.py": script}, "exec python train.py", checkpoint_config=checkpoints)
    assert jobs.wait(again)["TrainingJobStatus"] == "Completed"
    assert "starting at 1" in jobs.log(again)
    assert read_s3("s3://checkpoints/run/step.txt") == b"2"


def test_requirements_are_verified_and_never_installed(jobs: Jobs):
    files = {"train.py": "", "requirements.txt": "numpy>=1.20\n"}
    assert jobs.run(files, "exec python train.py")["TrainingJobStatus"] == "Completed"
    installed = importlib.metadata.version("six")
    other = "1.15.0" if installed != "1.15.0" else "1.16.0"  # both exist
    files["requirements.txt"] = f"six=={other}\n"
    name = jobs.create(files, "exec python train.py")
    assert jobs.wait(name)["TrainingJobStatus"] == "Failed"
    # "none" shows that pip has not searched any index.
    assert any(f"six=={other} (from versions: none)" in line for line in jobs.log(name))
    assert importlib.metadata.version("six") == installed


def test_an_image_is_the_environment_that_is_named_for_it(local, jobs: Jobs, tmp_path: Path):
    venv.create(tmp_path / "image")
    local.images["an-image"] = tmp_path / "image"
    script = {"train.py": "import os, sys\nprint('prefix:', os.path.realpath(sys.prefix))"}
    for image, prefix in (("an-image", tmp_path / "image"), ("another", Path(sys.prefix))):
        job = jobs.run(script, "exec python train.py", image=image)
        assert f"prefix: {prefix.resolve()}" in jobs.log(job["TrainingJobName"])
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
