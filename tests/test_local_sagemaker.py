"""Jobs on the local SageMaker, through the real SDK and boto3: what they do and what comes back."""

import importlib.metadata
import json
import os
import re
import signal
import tarfile
import time
from io import BytesIO
from pathlib import Path

import boto3
import botocore.exceptions
import psutil
import pytest

from jobs import Jobs, group, processes_naming, request

pytestmark = pytest.mark.usefixtures("nothing_is_left")
ROOT = Path(__file__).parent.parent
TWO_GROUPS = {"data_group": ("ml.c5.9xlarge", 1), "dnn_group": ("ml.p3.2xlarge", 1)}
READ_CONFIG = """
import json, os, pathlib
path = pathlib.Path(os.environ["SM_INPUT_CONFIG_DIR"], "resourceconfig.json")
config = json.loads(path.read_text())
group = config["current_group_name"]
"""


def read_s3(uri: str) -> bytes:
    bucket, key = uri.removeprefix("s3://").split("/", 1)
    return boto3.client("s3").get_object(Bucket=bucket, Key=key)["Body"].read()


def archive(uri: str) -> dict[str, bytes]:
    with tarfile.open(fileobj=BytesIO(read_s3(uri))) as tar:
        return {m.name: tar.extractfile(m).read() for m in tar.getmembers()}


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
        {"a": ("ml.c5.xlarge", 2), "b": ("ml.m5.xlarge", 1)},
    )
    jobs.wait(name)
    configs = [json.loads(x.split(" ", 1)[1]) for x in jobs.log(name) if x.startswith("CONFIG ")]
    assert sorted(c["current_host"] for c in configs) == ["algo-1", "algo-2", "algo-3"]
    for config in configs:
        assert config["hosts"] == ["algo-1", "algo-2", "algo-3"]
        groups = {g["instance_group_name"]: g for g in config["instance_groups"]}
        assert [len(groups["a"]["hosts"]), len(groups["b"]["hosts"])] == [2, 1]
        assert config["current_host"] in groups[config["current_group_name"]]["hosts"]
        kind = {"a": "ml.c5.xlarge", "b": "ml.m5.xlarge"}[config["current_group_name"]]
        assert config["current_instance_type"] == kind


def test_metrics_and_cpu_use_reach_cloudwatch(jobs: Jobs):
    script = (
        "import os, time\nprint('cores:', len(os.sched_getaffinity(0)), 'score=0.25', flush=True)\n"
        "end = time.time() + 5\nwhile time.time() < end: pass\nprint('score=0.75')"
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

    def values(metric: str, dimension: str, value: str) -> list[float]:
        data = boto3.client("cloudwatch").get_metric_statistics(
            Namespace="/aws/sagemaker/TrainingJobs",
            MetricName=metric,
            Dimensions=[{"Name": dimension, "Value": value}],
            StartTime=job["TrainingStartTime"].timestamp() - 60,
            EndTime=job["TrainingEndTime"].timestamp() + 60,
            Period=1,
            Statistics=["Maximum"],
        )["Datapoints"]
        return [d["Maximum"] for d in sorted(data, key=lambda d: d["Timestamp"])]

    assert values("score", "TrainingJobName", "metrics") == [0.25, 0.75]
    # One of the host's cores is busy, and an ml.m5.large has 2 vCPUs: 200 % on CloudWatch's scale.
    cores = int(jobs.log("metrics")[0].split()[1])
    busiest = max(values("CPUUtilization", "Host", "metrics/algo-1"))
    assert 0.3 * 200 / cores < busiest <= 1.05 * 200 / cores


@pytest.mark.parametrize("group", ["data_group", "dnn_group"])
def test_a_host_that_fails_fails_the_job_and_ends_the_others(jobs: Jobs, group: str):
    name = jobs.create(
        {
            "train.py": READ_CONFIG
            + """
import signal, sys, time
if group == os.environ["FAILS"]:
    time.sleep(1)
    pathlib.Path(os.environ["SM_OUTPUT_FAILURE"]).write_text("no luck today")
    sys.exit(3)
def ended(*_):
    print("told to end"); sys.exit(0)
signal.signal(signal.SIGTERM, ended)
time.sleep(100)
"""
        },
        "exec python train.py",
        TWO_GROUPS,
        environment={"FAILS": group},
    )
    job = jobs.wait(name, seconds=30)
    assert (job["TrainingJobStatus"], job["SecondaryStatus"]) == ("Failed", "Failed")
    assert job["FailureReason"] == "AlgorithmError: no luck today, exit code: 3"
    assert "told to end" in jobs.log(name)


def test_stop(jobs: Jobs):
    name = jobs.create(
        {
            "train.py": "import os, signal, sys, time\n"
            "def ended(*_):\n"
            "    open(os.environ['SM_MODEL_DIR'] + '/late.txt', 'w').write('saved')\n"
            "    sys.exit(1)\n"
            "signal.signal(signal.SIGTERM, ended)\n"
            "print('ready', flush=True)\n"
            "time.sleep(100)"
        },
        "exec python train.py",
    )
    jobs.wait_for_log(name, "ready")
    client = boto3.client("sagemaker")
    client.stop_training_job(TrainingJobName=name)
    assert client.describe_training_job(TrainingJobName=name)["TrainingJobStatus"] == "Stopping"
    job = jobs.wait(name, seconds=20)
    assert (job["TrainingJobStatus"], job["SecondaryStatus"]) == ("Stopped", "Stopped")
    assert archive(job["ModelArtifacts"]["S3ModelArtifacts"]) == {"late.txt": b"saved"}
    with pytest.raises(botocore.exceptions.ClientError, match="in status Stopped"):
        client.stop_training_job(TrainingJobName=name)


def test_sigterm_is_for_pid_1_that_handles_it(jobs: Jobs):
    """A shell that waits for the script, as SDK v3 has it without `exec`, never passes it on."""
    name = jobs.create(
        {"train.py": "import time\nprint('ready', flush=True)\ntime.sleep(3)\nprint('never told')"},
        "python train.py; true",
    )
    jobs.wait_for_log(name, "ready")
    boto3.client("sagemaker").stop_training_job(TrainingJobName=name)
    assert jobs.wait(name, seconds=20)["TrainingJobStatus"] == "Stopped"
    assert "never told" in jobs.log(name)


def test_max_runtime(jobs: Jobs):
    started = time.monotonic()
    job = jobs.run(
        {
            "train.py": "import signal, sys, time\n"
            "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\ntime.sleep(100)"
        },
        "exec python train.py",
        max_runtime_seconds=3,
    )
    assert (job["TrainingJobStatus"], job["SecondaryStatus"]) == ("Stopped", "MaxRuntimeExceeded")
    assert 3 <= time.monotonic() - started < 15


def test_what_a_host_leaves_running_ends_with_it(jobs: Jobs):
    """Even a daemon in a session of its own that has cleared its environment."""
    mark = f"sleep 98{os.getpid()}"
    job = jobs.run(
        {"train.py": f"import os\nos.system('setsid {mark} & env -i setsid {mark} &')"},
        "exec python train.py",
    )
    assert job["TrainingJobStatus"] == "Completed"
    time.sleep(0.5)
    assert not processes_naming(mark.replace(" ", "\0"))


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


def test_a_channel_without_objects_fails_the_job(jobs: Jobs):
    from sagemaker.core.training.configs import InputData

    boto3.client("s3").create_bucket(Bucket="empty-bucket")
    data = InputData(channel_name="train", data_source="s3://empty-bucket/nothing")
    job = jobs.run({"train.py": ""}, "exec python train.py", input_data_config=[data])
    assert job["TrainingJobStatus"] == "Failed"
    assert 'No S3 objects found under S3 URL "s3://empty-bucket/nothing"' in job["FailureReason"]


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"OutputDataConfig": {"S3OutputPath": "s3://no-such-bucket/x"}}, "ClientError: .*404"),
        (
            {
                "InputDataConfig": [
                    {
                        "ChannelName": "x",
                        "DataSource": {
                            "S3DataSource": {
                                "S3DataType": "S3Prefix",
                                "S3Uri": "s3://no-such-bucket/x",
                            }
                        },
                    }
                ]
            },
            "ClientError: Data download failed: .*NoSuchBucket",
        ),
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


def test_a_host_that_never_stops_printing_can_be_stopped(jobs: Jobs):
    script = (
        "import os, signal\nsignal.signal(signal.SIGTERM, lambda *_: os._exit(0))\n"
        "while True: os.write(1, b'x' * 50_000 + b'\\n')"
    )
    name = jobs.create({"train.py": script}, "exec python train.py", max_runtime_seconds=2)
    started = time.monotonic()
    assert jobs.wait(name, seconds=30)["SecondaryStatus"] == "MaxRuntimeExceeded"
    assert time.monotonic() - started < 15


def test_two_jobs_at_once_do_not_meet(jobs: Jobs):
    """Both bind the same names and ports, as their launchers tell them to."""
    script = """
import json, os, socket, time
local = json.loads(os.environ["LOCAL_SAGEMAKER"])
address = local["addresses"][os.environ["SM_CURRENT_HOST"]]
own = socket.create_server((address, local["base_port"]))
anywhere = socket.create_server(("", local["base_port"] + 1))
print("bound", flush=True)
time.sleep(4)
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
        "print('starting at', step, flush=True)\n"
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
    # "none": pip has not looked anywhere.
    assert any(f"six=={other} (from versions: none)" in line for line in jobs.log(name))
    assert importlib.metadata.version("six") == installed


def test_a_job_whose_supervisor_is_killed_fails_and_leaves_nothing(jobs: Jobs):
    name = jobs.create(
        {"train.py": "import time; print('ready', flush=True); time.sleep(100)"},
        "exec python train.py",
        TWO_GROUPS,
    )
    jobs.wait_for_log(name, "ready")
    children = [p for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE]
    (supervisor,) = (child for child in children if "supervisor.py" in child.cmdline()[-1])
    supervisor.kill()
    job = jobs.wait(name, seconds=20)
    assert job["TrainingJobStatus"] == "Failed"
    assert "hosts was killed" in job["FailureReason"]


def test_cores_are_shared_by_vcpus_on_one_scale(monkeypatch: pytest.MonkeyPatch):
    """A homogeneous job gets its own instance's share of the largest cluster, not the whole
    machine.
    """
    from shared.local_sagemaker import cluster

    def cores(count: int, groups: list[dict], scale: int) -> dict[str, list[int]]:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(count)))
        plan: dict[str, list[int]] = {}
        for host in cluster.plan_hosts(groups, scale, 1, Path("/nowhere")):
            plan.setdefault(host.group, []).append(len(host.cores))
        return plan

    both = [group("data", "ml.c5.9xlarge"), group("dnn", "ml.p3.2xlarge")]
    assert cluster.total_vcpus(both) == 36 + 8
    assert cores(22, both, 44) == {"data": [18], "dnn": [4]}
    assert cores(22, both[1:], 44) == {"dnn": [4]}
    assert cores(2, both, 44) == {"data": [1], "dnn": [1]}  # at least one each
    assert cores(2, both[1:], 44) == {"dnn": [1]}
