"""`python -m hetero` gives ranks what the SDK's own driver gives them, also without the SDK."""

import json
import subprocess
import sys
from pathlib import Path

import boto3
import botocore.loaders
import pytest
import sagemaker.train

from helpers.jobs import Jobs, request
from helpers.running import CODE, start_programs

pytestmark = pytest.mark.usefixtures("nothing_is_left")
DRIVERS = Path(sagemaker.train.__file__).parent / "container_drivers"


def test_a_job_of_plain_boto3_gets_the_same_arguments(jobs: Jobs):
    """Without the SDK, nothing but SageMaker's file says what the hyperparameters are."""
    given = {"lr": 0.1, "amp": True, "sizes": [1, 2], "name": "a  b", "half": "1.10", "note": "é"}
    given |= {"no": None, "quoted": '"x y"', "map": {"a": 1}, "empty": "", "big": "1e5"}
    job = start_programs(
        jobs, "import sys\nprint(sys.argv[1:])", groups=None, hyperparameters=given
    )
    by_sdk = jobs.wait(job.name)
    own = {"sagemaker_program": '"train.py"', "_tuning_objective_metric": "loss"}
    script = "cd /opt/ml/input/data/code && exec python -m hetero train.py"
    boto3.client("sagemaker").create_training_job(
        **request(
            "plain",
            AlgorithmSpecification={
                "TrainingImage": "any",
                "TrainingInputMode": "File",
                "ContainerEntrypoint": ["/bin/bash", "-c", script],
            },
            HyperParameters={**by_sdk["HyperParameters"], **own},
            InputDataConfig=[c for c in by_sdk["InputDataConfig"] if c["ChannelName"] == "code"],
            OutputDataConfig={"S3OutputPath": by_sdk["OutputDataConfig"]["S3OutputPath"]},
        )
    )
    assert jobs.wait("plain")["TrainingJobStatus"] == "Completed"
    expected, [found] = job.log(), [line for line in jobs.log("plain") if line.startswith("[")]
    assert found in expected and "'--half', '1.1', '--note', 'é'" in found


def print_in(folder: Path, text: str, **environment: str) -> str:
    """Return the last line that Python code prints there, with `folder` first in sys.path."""
    text = f"import sys\nsys.path.insert(0, {str(folder)!r})\n{text}"
    return subprocess.check_output(
        [sys.executable, "-c", text], env=environment, text=True
    ).splitlines()[-1]


GPUS = "echo 'GPU 0: A100 (UUID: GPU-1)\n  MIG 1g.5gb Device 0: (UUID: MIG-2)\nGPU 1: A100'"
NEURONS = """echo '[{"neuron_device": 0, "nc_count": 2}, {"neuron_device": 1, "nc_count": 4}]'"""


@pytest.mark.parametrize(
    "programs, told, ranks",
    [
        ({"nvidia-smi": GPUS}, {}, 2),
        ({"neuron-ls": NEURONS}, {}, 6),
        ({"nvidia-smi": "echo failed; exit 9", "neuron-ls": "echo 'error=none'; exit 1"}, {}, 1),
        ({}, {}, 1),
        ({}, {"SM_NUM_GPUS": "0", "SM_NUM_NEURONS": "0"}, 1),
        ({}, {"SM_NUM_GPUS": "3", "SM_NUM_NEURONS": "0"}, 3),
        ({}, {"SM_NUM_GPUS": "", "SM_NUM_NEURONS": "2"}, 2),
        ({}, {"SM_NUM_GPUS": "2", "SM_NUM_NEURONS": "8"}, 2),
    ],
)
def test_there_is_a_rank_for_each_accelerator(
    tmp_path: Path, programs: dict[str, str], told: dict[str, str], ranks: int
):
    """The environment of a job of plain boto3 does not say how many; the SDK's driver counts."""
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    if not told:
        ask = "from environment import *\nprint(num_gpus() or num_neurons() or 1)"
        assert int(print_in(DRIVERS / "scripts", ask, PATH=str(tmp_path))) == ranks
    count = "from hetero.topology import accelerators; print(accelerators())"
    assert int(print_in(CODE, count, PATH=str(tmp_path), **told)) == ranks


EFA = """
import json, os
from distributed_drivers.torchrun_driver import setup_env
from hetero.topology import Cluster, rank_environment

found, before = [], dict(os.environ)
for kind in json.loads(before["KINDS"]):
    cluster = Cluster("algo-1", "gpus", kind, "lo", {"gpus": ["algo-1"]})
    ours = rank_environment(cluster, rank=0, ranks=1)
    os.environ["SM_CURRENT_INSTANCE_TYPE"] = kind
    setup_env()
    found.append([kind, ours, dict(os.environ)])
    os.environ.clear()
    os.environ.update(before)
print(json.dumps(found))
"""


def test_nccl_uses_efa_where_the_sdk_s_own_driver_makes_it():
    """The driver sets NCCL_PROTO on all types. Only older versions of NCCL's plugin need it."""
    model = botocore.loaders.Loader().load_service_model("sagemaker", "service-2")
    kinds = {*model["shapes"]["TrainingInstanceType"]["enum"], "local"}
    environment = {"KINDS": json.dumps(sorted(kinds)), "PYTHONPATH": str(CODE)}
    names = ("FI_PROVIDER", "FI_EFA_USE_DEVICE_RDMA", "RDMAV_FORK_SAFE")
    with_efa = []
    for kind, ours, theirs in json.loads(print_in(DRIVERS, EFA, **environment)):
        assert [ours.get(name) for name in names] == [theirs.get(name) for name in names], kind
        older = "FI_PROVIDER" in theirs and not kind.startswith("ml.p5")
        assert ours.get("NCCL_PROTO") == (theirs["NCCL_PROTO"] if older else None), kind
        with_efa += [kind] * ("FI_PROVIDER" in ours)
    assert {"ml.p4d.24xlarge", "ml.g5.48xlarge", "ml.p5.48xlarge"} < {*with_efa}
    environment |= {"KINDS": '["ml.p4d.24xlarge"]', "FI_PROVIDER": "tcp", "NCCL_PROTO": "^LL"}
    [[_, ours, _]] = json.loads(print_in(DRIVERS, EFA, **environment))
    assert not {"FI_PROVIDER", "NCCL_PROTO"} & {*ours} and "RDMAV_FORK_SAFE" in ours
