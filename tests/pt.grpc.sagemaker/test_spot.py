"""An interrupted job of the PyTorch example continues from its checkpoint in S3.

Its ranks are on two hosts, and shard the model with FSDP.
"""

import io
import re

import boto3
import pytest
import torch
from sagemaker.core.shapes import CheckpointConfig

from helpers.jobs import Jobs, archive
from helpers.running import Running, after_steps, start, upload_images

pytestmark = pytest.mark.usefixtures("nothing_is_left")
STEPS = 24
# Logs the batch of each rank and step. One write per line, or ranks would mix their lines.
TELL_BATCHES = (
    "            at.step += 1\n",
    "            at.step += 1\n            import zlib\n"
    "            print(f'{rank=} step={at.step} batch={zlib.crc32(images.numpy())}\\n', end='')\n",
)


def trained_model(job: dict) -> dict[str, torch.Tensor]:
    """The weights in the job's model.tar.gz."""
    files = archive(job["ModelArtifacts"]["S3ModelArtifacts"])
    return torch.load(io.BytesIO(files["model.pt"]))


def batches(job: Running) -> list[str]:
    return sorted(line for line in job.log() if line.startswith("rank="))


@pytest.mark.thorough
def test_interrupted_job_ends_as_the_uninterrupted_one(jobs: Jobs):
    upload_images()
    boto3.client("s3").create_bucket(Bucket="spot")
    data_hosts, dnn_hosts = ("ml.c5.xlarge", 1), ("ml.m5.xlarge", 2)
    settings = {
        "groups": {"data_group": data_hosts, "dnn_group": dnn_hosts},
        "hyperparameters": {"max-steps": STEPS, "parallelism": "fsdp"},
        "changes": {"train_dnn.py": TELL_BATCHES},
        "checkpoint_config": CheckpointConfig(s3_uri="s3://spot/checkpoints"),
    }
    # A spot interruption sends SIGTERM, like StopTrainingJob. Then SageMaker restarts the job with
    # the checkpoint in S3.
    first = start(jobs, **settings)
    after_steps(first)
    first.stop()
    assert jobs.wait(first.name)["TrainingJobStatus"] == "Stopped"
    stopped = re.search(r"stopped by SIGTERM after step (\d+)", "\n".join(first.log()))
    assert 8 <= int(stopped[1]) < STEPS

    second = start(jobs, **settings)
    resumed = jobs.wait(second.name)
    assert resumed["TrainingJobStatus"] == "Completed", resumed["FailureReason"]
    assert any(line.endswith(f"at step {stopped[1]}") for line in second.log())
    assert any(line.startswith("parallelism=fsdp ranks=2 ") for line in second.log())

    # Uninterrupted, without a checkpoint, and with other group names.
    del settings["checkpoint_config"]
    names = "hetero.run(\n", 'hetero.run(\n    train_group="gpus", data_groups=["cpus"],\n'
    settings["changes"]["launcher.py"] = names
    settings["groups"] = {"cpus": data_hosts, "gpus": dnn_hosts}
    whole = start(jobs, **settings)
    uninterrupted = jobs.wait(whole.name)
    assert len(batches(whole)) == 2 * STEPS
    assert sorted(batches(first) + batches(second)) == batches(whole)
    # Bit-identical, since a sum over two ranks is the same in any order.
    weights, expected = trained_model(resumed), trained_model(uninterrupted)
    for name in expected:
        assert torch.equal(weights[name], expected[name]), name
