"""What a job leaves on S3, where its folders are, and what it is told, as on AWS."""

import json
import time
from datetime import timedelta
from pathlib import Path

import boto3
import pytest
from sagemaker.train.distributed import Torchrun

from helpers.jobs import READ_CONFIG, TWO_GROUPS, Jobs, read_s3, request
from helpers.pages import ROOT
from helpers.waiting import wait_until

pytestmark = pytest.mark.usefixtures("nothing_is_left")


def keys(bucket: str) -> list[str]:
    found = boto3.client("s3").list_objects_v2(Bucket=bucket).get("Contents", [])
    return sorted(item["Key"] for item in found)


def test_a_failed_job_keeps_its_reason_if_its_files_cannot_be_uploaded(jobs: Jobs):
    jobs.ask("unsaved", "sh", "-c", "echo started; sleep 5; exit 7", bucket="soon-gone")
    jobs.wait_for_log("unsaved", "started")
    boto3.client("s3").delete_bucket(Bucket="soon-gone")
    assert jobs.wait("unsaved")["FailureReason"] == "AlgorithmError: , exit code: 7"


def test_without_compression_the_files_are_in_folders(jobs: Jobs):
    write = "cd /opt/ml; mkdir model/deep; echo a >model/deep/x.txt; echo b >output/data/y.txt"
    output = {"S3OutputPath": "s3://plain/out", "CompressionType": "NONE"}
    jobs.ask("plain", "sh", "-c", write, bucket="plain", OutputDataConfig=output)
    model = jobs.wait("plain")["ModelArtifacts"]["S3ModelArtifacts"]
    assert model == "s3://plain/out/plain/output/model/"
    assert read_s3(f"{model}deep/x.txt") == b"a\n"
    files = [f"out/plain/output/{path}" for path in ("data/y.txt", "model/deep/x.txt")]
    assert keys("plain") == files


@pytest.mark.parametrize(
    "path, prefix", [("/é/ck/", "c/"), ("ck/points", "c/"), ("/opt/ml/ck", "")]
)
def test_checkpoints_of_two_jobs_are_in_their_own_folders_wherever_they_are(
    jobs: Jobs, path: str, prefix: str
):
    s3 = boto3.client("s3")
    names = [f"checkpoints-{len(path)}-{number}" for number in (1, 2)]
    for name in names:
        s3.create_bucket(Bucket=name)
        s3.put_object(Bucket=name, Key=f"{prefix}before.txt", Body=b"before")
        s3.put_object(Bucket=name, Key="c0/neighbor.txt", Body=b"another job's")
        # The entry point gets the path in each way in which a script may get it.
        script = f"ls {path} && cd $THERE && pwd && touch {name} && sleep 3"
        checkpoints = {"S3Uri": f"s3://{name}/{prefix}", "LocalPath": path}
        told = {"Environment": {"THERE": path}, "CheckpointConfig": checkpoints}
        jobs.ask(name, "sh", "-c", script, bucket=name, **told)
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
    told = {"hyperparameters": given, "environment": environment}
    name = jobs.create({"train.py": script}, "exec python train.py", **told)
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
    for name in ("listed-b", "listed-c", "listed-a"):
        jobs.wait(jobs.ask(name, "/bin/false" if name == "listed-b" else "/bin/true"))
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


@pytest.mark.parametrize(
    "groups, end",
    [
        (TWO_GROUPS, "so `distributed=` needs one instance"),
        pytest.param(None, "", marks=pytest.mark.thorough),
    ],
)
def test_distributed_needs_one_instance(jobs: Jobs, groups: dict | None, end: str):
    distributed = Torchrun(process_count_per_node=1)
    files = {"train.py": "print('trained')"}
    job = jobs.run(files, "train.py", groups, distributed=distributed)
    assert job["TrainingJobStatus"] == ("Failed" if end else "Completed"), job["FailureReason"]
    assert job.get("FailureReason", "").endswith(end)


def test_a_key_that_leaves_its_folder_fails_the_job(jobs: Jobs):
    s3 = boto3.client("s3")
    s3.create_bucket(Bucket="leaves")
    s3.put_object(Bucket="leaves", Key="data/../../../../../../../../tmp/left", Body=b"x")
    source = {"S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": "s3://leaves/data"}}
    jobs.ask("leaves", InputDataConfig=[{"ChannelName": "x", "DataSource": source}])
    reason = jobs.wait("leaves")["FailureReason"]
    assert reason.startswith("ClientError: Data download failed: the key 'data/../../")
    assert not Path("/tmp/left").exists()


def test_a_job_of_another_region_with_tags_and_signs_in_its_output_path(jobs: Jobs):
    there = {"region_name": "eu-west-1"}
    where = {"LocationConstraint": "eu-west-1"}
    boto3.client("s3", **there).create_bucket(Bucket="signs", CreateBucketConfiguration=where)
    client, tags = boto3.client("sagemaker", **there), [{"Key": "team", "Value": "vision"}]
    metrics = {"MetricDefinitions": [{"Name": "m", "Regex": "a([0-9])?"}]}
    asked = request("signs", "echo", "a", algorithm=metrics, bucket="signs/a#1?b", Tags=tags)
    arn = client.create_training_job(**asked)["TrainingJobArn"]
    assert client.list_tags(ResourceArn=arn)["Tags"] == tags
    with pytest.raises(client.exceptions.ClientError, match="Requested resource not found"):
        client.list_tags(ResourceArn=arn.replace("eu-west-1", "us-east-1"))

    def ended() -> dict | None:
        job = client.describe_training_job(TrainingJobName="signs")
        return job if job["TrainingJobStatus"] != "InProgress" else None

    job = wait_until(ended)
    assert job["TrainingJobStatus"] == "Completed", job["FailureReason"]
    output = "a#1?b/output/signs/output"
    assert job["ModelArtifacts"]["S3ModelArtifacts"] == f"s3://signs/{output}/model.tar.gz"
    assert keys("signs") == [f"{output}/{x}.tar.gz" for x in ("model", "output")]


def test_a_long_line_becomes_events_that_cloudwatch_accepts(jobs: Jobs):
    script = "print('a' * 1_000_000); print('short'); print('b\\r' * 3)"
    jobs.wait(jobs.ask("long-line", "python3", "-c", script))
    *parts, short, first, second, third = jobs.log("long-line")
    assert "".join(parts) == "a" * 1_000_000
    assert max(map(len, parts)) <= 262_118  # CloudWatch's limit, less 26 bytes of each event
    assert [short, first, second, third] == ["short", "b", "b", "b"]
