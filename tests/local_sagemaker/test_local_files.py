"""What a job leaves on S3, where its folders are, and what it is told, as on AWS."""

import json
import time
from datetime import timedelta
from pathlib import Path

import boto3
import pytest
from sagemaker.train.distributed import Torchrun

from helpers.jobs import READ_CONFIG, TWO_GROUPS, Jobs, archive, read_s3, request
from helpers.pages import ROOT

pytestmark = pytest.mark.usefixtures("nothing_is_left")
WRITE = """
import os, pathlib, sys
for name in ("SM_MODEL_DIR", "SM_OUTPUT_DATA_DIR"):
    folder = pathlib.Path(os.environ[name], "deep")
    folder.mkdir(exist_ok=True)
    (folder / "x.txt").write_text(name)
"""


def specification(*command: str) -> dict:
    return {
        "TrainingImage": "any",
        "TrainingInputMode": "File",
        "ContainerEntrypoint": list(command),
    }


def keys(bucket: str) -> list[str]:
    found = boto3.client("s3").list_objects_v2(Bucket=bucket).get("Contents", [])
    return sorted(item["Key"] for item in found)


def test_a_failed_job_uploads_its_model_and_output(jobs: Jobs):
    """As on AWS: github.com/aws/sagemaker-python-sdk/pull/746."""
    job = jobs.run({"train.py": WRITE + "sys.exit(3)"}, "exec python train.py", TWO_GROUPS)
    assert (job["TrainingJobStatus"], job["SecondaryStatus"]) == ("Failed", "Failed")
    assert job["FailureReason"].endswith("exit code: 3")
    steps = [t["Status"] for t in job["SecondaryStatusTransitions"]]
    assert steps == ["Starting", "Downloading", "Training", "Uploading", "Failed"]
    model = job["ModelArtifacts"]["S3ModelArtifacts"]
    assert archive(model) == {"deep/x.txt": b"SM_MODEL_DIR"}
    output = model.replace("model.tar.gz", "output.tar.gz")
    assert archive(output) == {"deep/x.txt": b"SM_OUTPUT_DATA_DIR"}


def test_a_failed_job_keeps_its_reason_if_its_files_cannot_be_uploaded(jobs: Jobs):
    s3 = boto3.client("s3")
    s3.create_bucket(Bucket="soon-gone")
    script = "import time; print('started'); time.sleep(5); exit(7)"
    boto3.client("sagemaker").create_training_job(
        **request(
            "nowhere-to-upload",
            AlgorithmSpecification=specification("python3", "-c", script),
            OutputDataConfig={"S3OutputPath": "s3://soon-gone/output"},
        )
    )
    jobs.wait_for_log("nowhere-to-upload", "started")
    s3.delete_bucket(Bucket="soon-gone")
    job = jobs.wait("nowhere-to-upload")
    assert job["FailureReason"] == "AlgorithmError: , exit code: 7"


def test_without_compression_the_files_are_in_folders(jobs: Jobs):
    from sagemaker.core.training.configs import OutputDataConfig

    boto3.client("s3").create_bucket(Bucket="plain")
    output = OutputDataConfig(s3_output_path="s3://plain/out", compression_type="NONE")
    job = jobs.run({"train.py": WRITE}, "exec python train.py", output_data_config=output)
    name = job["TrainingJobName"]
    model = job["ModelArtifacts"]["S3ModelArtifacts"]
    assert model == f"s3://plain/out/{name}/output/model/"
    assert read_s3(f"{model}deep/x.txt") == b"SM_MODEL_DIR"
    files = [f"out/{name}/output/{folder}/deep/x.txt" for folder in ("data", "model")]
    assert keys("plain") == files


@pytest.mark.parametrize(
    "path, prefix", [("/é/ck/", "c/"), ("ck/points", "c/"), ("/opt/ml/ck", "")]
)
def test_checkpoints_of_two_jobs_are_in_their_own_folders_wherever_they_are(
    jobs: Jobs, path: str, prefix: str
):
    s3, client = boto3.client("s3"), boto3.client("sagemaker")
    names = [f"checkpoints-{len(path)}-{number}" for number in (1, 2)]
    for name in names:
        s3.create_bucket(Bucket=name)
        s3.put_object(Bucket=name, Key=f"{prefix}before.txt", Body=b"before")
        s3.put_object(Bucket=name, Key="c0/neighbor.txt", Body=b"another job's")
        client.create_training_job(
            **request(
                name,
                # The entry point gets the path in each way in which a script may get it.
                AlgorithmSpecification=specification(
                    "sh", "-c", f"ls {path} && cd $THERE && pwd && touch {name} && sleep 3"
                ),
                Environment={"THERE": path},
                CheckpointConfig={"S3Uri": f"s3://{name}/{prefix}", "LocalPath": path},
                OutputDataConfig={"S3OutputPath": f"s3://{name}/output"},
            )
        )
    for name in names:
        job = jobs.wait(name)
        assert job["TrainingJobStatus"] == "Completed", jobs.log(name)
        assert job["CheckpointConfig"]["LocalPath"] == path
        assert jobs.log(name)[0] == "before.txt"
        assert {f"{prefix}before.txt", f"{prefix}{name}"} <= {*keys(name)} and len(keys(name)) == 5
    assert not (ROOT / "ck").exists()


def test_a_host_is_told_where_its_own_opt_ml_is(jobs: Jobs):
    script = (
        READ_CONFIG
        + """
parameters = json.loads(os.environ["SM_HPS"])
path.with_name("hyperparameters.json").read_text()
print("TOLD", json.dumps([parameters, os.environ["PLACES"], os.environ["SAGEMAKER_BASE_DIR"]]))
"""
    )
    kept = "s3://bucket/opt/ml/x s3://opt/ml ../opt/ml /opt/mlflow /srv/opt/ml"
    given = {"folder": "/opt/ml/model", "kept": kept}
    environment = {"PLACES": f"sqlite:////opt/ml/a:/opt/ml\n/opt/ml/b {kept}"}
    name = jobs.create(
        {"train.py": script},
        "exec python train.py",
        hyperparameters=given,
        environment=environment,
    )
    job = jobs.wait(name)
    assert job["Environment"] == environment
    assert job["HyperParameters"]["folder"] == "/opt/ml/model"
    [line] = [line for line in jobs.log(name) if line.startswith("TOLD ")]
    parameters, places, own = json.loads(line.removeprefix("TOLD "))
    assert own != "/opt/ml"
    assert parameters == {"folder": f"{own}/model", "kept": kept}
    assert places == f"sqlite:///{own}/a:{own}\n{own}/b {kept}"


def test_jobs_are_listed_as_asked(jobs: Jobs):
    client = boto3.client("sagemaker")
    boto3.client("s3").create_bucket(Bucket="any")
    for name in ("listed-b", "listed-c", "listed-a"):
        run = "/bin/false" if name == "listed-b" else "/bin/true"
        client.create_training_job(**request(name, AlgorithmSpecification=specification(run)))
        jobs.wait(name)
        time.sleep(2)  # boto3 sends times in seconds

    def listed(**how) -> str:
        found = client.get_paginator("list_training_jobs").paginate(
            NameContains="listed-", PaginationConfig={"PageSize": 2}, **how
        )
        return "".join(
            job["TrainingJobName"][-1] for page in found for job in page["TrainingJobSummaries"]
        )

    assert listed() == "bca"
    assert listed(SortOrder="Descending") == "acb"
    assert listed(SortBy="Name") == "abc"
    assert listed(SortBy="Name", SortOrder="Descending") == "cba"
    assert listed(SortBy="Status", SortOrder="Descending")[0] == "b"  # Failed, before Completed
    assert listed(StatusEquals="Failed") == "b"
    times = [
        client.describe_training_job(TrainingJobName=f"listed-{x}")["CreationTime"] for x in "bca"
    ]
    second = timedelta(seconds=1)
    assert listed(CreationTimeAfter=times[0] + second, CreationTimeBefore=times[2]) == "c"
    assert listed(LastModifiedTimeAfter=times[1]) == "ca"
    assert listed(WarmPoolStatusEquals="Available") == ""  # no job here has a warm pool
    first = client.list_training_jobs(NameContains="listed-a", MaxResults=1)  # not the first of all
    assert [job["TrainingJobName"] for job in first["TrainingJobSummaries"]] == ["listed-a"]
    assert "NextToken" not in first
    with pytest.raises(client.exceptions.ClientError, match="use that of the previous page"):
        client.list_training_jobs(NextToken="-1")


def test_tags_can_be_read(jobs: Jobs):
    client = boto3.client("sagemaker")
    boto3.client("s3").create_bucket(Bucket="any")
    tags = [{"Key": "team", "Value": "vision"}]
    arn = client.create_training_job(**request("tagged", Tags=tags))["TrainingJobArn"]
    assert client.list_tags(ResourceArn=arn)["Tags"] == tags
    jobs.wait("tagged")


def test_distributed_needs_one_instance(jobs: Jobs):
    files = {"train.py": "print('trained')"}
    distributed = Torchrun(process_count_per_node=1)
    job = jobs.run(files, "train.py", TWO_GROUPS, distributed=distributed)
    assert job["FailureReason"].endswith("so `distributed=` needs one instance")
    job = jobs.run(files, "train.py", distributed=distributed)
    assert job["TrainingJobStatus"] == "Completed", job["FailureReason"]


def test_a_key_that_leaves_its_folder_fails_the_job(jobs: Jobs):
    s3 = boto3.client("s3")
    s3.create_bucket(Bucket="leaves")
    s3.put_object(Bucket="leaves", Key="data/../../../../../../../../tmp/left", Body=b"x")
    source = {"S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": "s3://leaves/data"}}
    boto3.client("sagemaker").create_training_job(
        **request(
            "leaves",
            InputDataConfig=[{"ChannelName": "x", "DataSource": source}],
            OutputDataConfig={"S3OutputPath": "s3://leaves/output"},
        )
    )
    reason = jobs.wait("leaves")["FailureReason"]
    assert reason.startswith("ClientError: Data download failed: the key 'data/../../")
    assert not Path("/tmp/left").exists()


def test_a_job_of_another_region_with_signs_in_its_output_path(jobs: Jobs):
    there = {"region_name": "eu-west-1"}
    where = {"LocationConstraint": "eu-west-1"}
    boto3.client("s3", **there).create_bucket(Bucket="signs", CreateBucketConfiguration=where)
    client = boto3.client("sagemaker", **there)
    metrics = {"MetricDefinitions": [{"Name": "m", "Regex": "a([0-9])?"}]}
    client.create_training_job(
        **request(
            "signs",
            AlgorithmSpecification=specification("echo", "a") | metrics,
            OutputDataConfig={"S3OutputPath": "s3://signs/a#1?b"},
        )
    )
    while (job := client.describe_training_job(TrainingJobName="signs"))["TrainingJobStatus"] == (
        "InProgress"
    ):
        time.sleep(0.2)
    assert job["TrainingJobStatus"] == "Completed", job["FailureReason"]
    assert job["ModelArtifacts"]["S3ModelArtifacts"] == "s3://signs/a#1?b/signs/output/model.tar.gz"
    assert keys("signs") == [f"a#1?b/signs/output/{x}.tar.gz" for x in ("model", "output")]
    with pytest.raises(client.exceptions.ClientError, match="Requested resource not found"):
        client.list_tags(ResourceArn=job["TrainingJobArn"] + "x")


def test_a_long_line_becomes_events_that_cloudwatch_accepts(jobs: Jobs):
    boto3.client("s3").create_bucket(Bucket="any")
    script = "print('a' * 1_000_000); print('short'); print('b\\r' * 3)"
    boto3.client("sagemaker").create_training_job(
        **request("long-line", AlgorithmSpecification=specification("python3", "-c", script))
    )
    jobs.wait("long-line")
    *parts, short, first, second, third = jobs.log("long-line")
    assert "".join(parts) == "a" * 1_000_000
    assert max(map(len, parts)) <= 262_118  # CloudWatch's limit, less 26 bytes of each event
    assert [short, first, second, third] == ["short", "b", "b", "b"]
