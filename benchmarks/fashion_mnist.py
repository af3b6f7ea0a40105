"""Real images through the whole example: does the fed training learn as the plain one does?

    apt-get install dataset-fashion-mnist
    .venv/bin/python -m benchmarks.fashion_mnist /usr/share/datasets/fashion-mnist

Trains on the 60,000 images of Fashion-MNIST (any folder of MNIST-format files will do) in two jobs
of the local SageMaker: homogeneous in mode `local`, heterogeneous in mode `service`, with the same
seed. Prints the accuracy of each on the 10,000 test images, and whether the two models are equal to
the last bit. Takes about five minutes on two cores. Fails below 88 % or when the models differ.
"""

import argparse
import io
import logging
import re
import secrets
import sys
import tarfile
from pathlib import Path

import boto3
import torch
from sagemaker.core.training.configs import Compute, InputData, InstanceGroup, SourceCode
from sagemaker.train import ModelTrainer

from shared import local_sagemaker, monitoring

CODE = Path(__file__).resolve().parent.parent / "pt.grpc.sagemaker" / "code"
GPU, CPU = "ml.p3.2xlarge", "ml.c5.9xlarge"
COMPUTE = {
    "local": Compute(instance_type=GPU, instance_count=1),
    "service": Compute(
        instance_groups=[
            InstanceGroup(instance_group_name="data_group", instance_type=CPU, instance_count=1),
            InstanceGroup(instance_group_name="dnn_group", instance_type=GPU, instance_count=1),
        ]
    ),
}


def train(role: str, mode: str, folder: Path, epochs: int) -> tuple[float, dict[str, torch.Tensor]]:
    """Run one job; return the accuracy that it logged and the weights of its model."""
    trainer = ModelTrainer(
        role=role,
        training_image="123456789012.dkr.ecr.us-east-1.amazonaws.com/any:1",  # not used locally
        base_job_name=f"fashion-{mode}",
        source_code=SourceCode(source_dir=str(CODE), command="exec python launcher.py"),
        compute=COMPUTE[mode],
        environment={"HETERO_TOKEN": secrets.token_hex(16)},
        hyperparameters={
            "data-mode": mode,
            "model": "small",
            "augment": 1,
            "batch-size": 128,
            "lr": 0.002,
            "epochs": epochs,
            "log-every": 100,
        },
    )
    data = [InputData(channel_name=name, data_source=str(folder)) for name in ("training", "test")]
    trainer.train(input_data_config=data, wait=False, logs=False)
    job = monitoring.wait(trainer._latest_training_job.training_job_name)
    log = "\n".join(line.text for line in monitoring.logs(job["TrainingJobName"]))
    accuracy = float(re.search(r"test_accuracy=([0-9.]+)", log)[1])

    bucket, key = job["ModelArtifacts"]["S3ModelArtifacts"].removeprefix("s3://").split("/", 1)
    archive = boto3.client("s3").get_object(Bucket=bucket, Key=key)["Body"].read()
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        model = tar.extractfile("model.pt").read()
    return accuracy, torch.load(io.BytesIO(model), weights_only=True)


def main() -> None:
    """Train in both modes and compares."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder of the MNIST-format files")
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args()
    if not args.folder.is_dir():
        parser.error(f"{args.folder} is not a folder: install dataset-fashion-mnist?")
    logging.getLogger("sagemaker").setLevel(logging.WARNING)

    role = local_sagemaker.start(largest_cluster={GPU: 1, CPU: 1}).role
    local_accuracy, local_weights = train(role, "local", args.folder, args.epochs)
    service_accuracy, service_weights = train(role, "service", args.folder, args.epochs)
    equal = all(torch.equal(local_weights[name], service_weights[name]) for name in local_weights)
    print(f"test accuracy: local {local_accuracy:.2%}, service {service_accuracy:.2%}")
    print(f"models equal to the last bit: {equal}")
    sys.exit(0 if equal and service_accuracy >= 0.88 else 1)


if __name__ == "__main__":
    main()
