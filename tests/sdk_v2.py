"""What SageMaker Python SDK v2, which has no place beside v3, asks SageMaker for."""

import json
import os
import subprocess
import sys
from pathlib import Path

SDK_V2 = Path(sys.prefix) / "sdk-v2"  # put there by scripts/setup.sh
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
    """What lines that use SDK v2 ask SageMaker for; their source archive is fetched, too."""
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
