"""Record the requests of SageMaker Python SDK v2, which has its own folder, apart from v3."""

import json
import os
import subprocess
import sys
from pathlib import Path

import boto3

SDK_V2 = Path(sys.prefix) / "sdk-v2"  # scripts/setup.sh installs it there
RECORD_V2 = """
import json, sys
import boto3, moto
from botocore.client import BaseClient

requests, make_api_call = [], BaseClient._make_api_call

def record(client, operation, arguments):
    if operation == "CreateTrainingJob":
        requests.append(arguments)
    return make_api_call(client, operation, arguments)

BaseClient._make_api_call = record
names = {"role": "arn:aws:iam::123456789012:role/any", "image": "any:1", "data": "s3://any/data"}
with moto.mock_aws():
    exec(compile(open(sys.argv[1]).read(), "README.md", "exec"), names)
    hyperparameters = requests[0]["HyperParameters"]
    bucket, key = json.loads(hyperparameters["sagemaker_submit_directory"])[5:].split("/", 1)
    boto3.client("s3").download_file(bucket, key, "sourcedir.tar.gz")
json.dump(requests, open("requests.json", "w"))
"""


def request_of_sdk_v2(lines: str) -> dict:
    """Run lines that use SDK v2; return their request, and download their source archive."""
    Path("lines.py").write_text(lines)
    subprocess.run(
        [sys.executable, "-c", RECORD_V2, "lines.py"],
        env={**os.environ, "PYTHONPATH": str(SDK_V2), "AWS_DEFAULT_REGION": "us-east-1",
             "AWS_ACCESS_KEY_ID": "none", "AWS_SECRET_ACCESS_KEY": "none"},
        check=True,
        timeout=120,
    )  # fmt: skip
    [request] = json.loads(Path("requests.json").read_text())
    return request


def start_with_a_channel_for_the_code(request: dict, command: str, **channels: str) -> None:
    """Start a job of SDK v2 without its image, which would download the code: use a channel.

    command: Bash command, run in the folder with sourcedir.tar.gz. channels: S3 URIs by name.
    """
    bucket = "source-of-sdk-v2"
    s3 = boto3.client("s3")
    s3.create_bucket(Bucket=bucket)
    s3.upload_file("sourcedir.tar.gz", bucket, "source/sourcedir.tar.gz")
    channels["source"] = f"s3://{bucket}/source"
    request["InputDataConfig"] = [
        {
            "ChannelName": channel,
            "DataSource": {"S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": uri}},
        }
        for channel, uri in channels.items()
    ]
    request["OutputDataConfig"]["S3OutputPath"] = f"s3://{bucket}/output"
    request["HyperParameters"]["sagemaker_submit_directory"] = '"sourcedir.tar.gz"'
    command = f"cd /opt/ml/input/data/source && exec {command}"
    request["AlgorithmSpecification"]["ContainerEntrypoint"] = ["/bin/bash", "-c", command]
    boto3.client("sagemaker").create_training_job(**request)
