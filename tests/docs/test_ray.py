"""docs/ray: Ray on all hosts of a job. Its packages are not in .venv; `make thorough` gets them.

Ray gives a node 30 s to start, so these tests run alone. `make soak` runs them with SOAK=1: then
they also end jobs in the ways that docs/ray.md names.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import boto3
import psutil
import pytest
import torch
from sagemaker.core.shapes import CheckpointConfig
from sagemaker.core.training.configs import InputData

from helpers.jobs import Jobs, archive, read_s3
from helpers.pages import ROOT
from helpers.ray import COMMAND, FILES, FOLDER, IMAGES, upload_images
from helpers.running import Running, seconds_to_end
from helpers.waiting import wait_until

pytestmark = [pytest.mark.usefixtures("nothing_is_left", "nothing_is_left_in_shared_memory")]
pytestmark += [pytest.mark.thorough, pytest.mark.timeout(600)]
PACKAGES = ROOT / "build" / "bench" / "packages"
HOSTS = {"data_group": ("ml.c5.xlarge", 2), "dnn_group": ("ml.m5.xlarge", 2)}
ENVIRONMENT = {"HETERO_TOKEN": "a secret", "PYTHONPATH": str(PACKAGES), "RAY_DEDUP_LOGS": "0"}
# Prints which images a rank gets: their color is their number, which a flip leaves as it is.
TOLD = {
    "        samples, step =": """        colors = (255 * batch["image"][:, :2, 0, 0]).round().int()
        print("images", epoch, *(colors @ colors.new_tensor([256, 1])).tolist(), flush=True)
        time.sleep(1)
        samples, step ="""
}
EPOCHS = "EPOCHS = 64, 32, 2"
soak = pytest.mark.skipif("SOAK" not in os.environ, reason="only in make soak")


@pytest.fixture(scope="module")
def temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for the jobs' files whose name is as short as Ray needs it."""
    tmp_path_factory.getbasetemp()  # must exist before, or pytest would create it in our folder
    (folder := Path("/tmp/ry")).mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        patch.setattr(tempfile, "tempdir", str(folder))
        yield folder
    shutil.rmtree(folder)  # so that the tests can run again after a failure


@pytest.fixture
def nothing_is_left_in_shared_memory():
    before = {*os.listdir("/dev/shm")}
    yield
    assert {*os.listdir("/dev/shm")} <= before


@pytest.fixture(scope="module")
def data(local) -> str:
    return upload_images()


def start(
    jobs: Jobs, script: str, data: str = "", changes: dict | None = None, **settings
) -> Running:
    """Start a script of docs/ray, or the text of another one, with replaced texts."""
    assert PACKAGES.is_dir(), "Ray's packages are missing: make build/bench/packages/.ready"
    files = {**FILES}
    del files["requirements.txt"]  # Ray comes from PACKAGES
    if script not in files:
        files["train.py"], script = script, "train.py"
    for old, new in (changes or {}).items():
        assert files[script].count(old) == 1, old
        files[script] = files[script].replace(old, new)
    channels = [InputData(channel_name="training", data_source=data)] if data else None
    name = jobs.create(
        files,
        COMMAND.replace("train.py", script),
        settings.pop("groups", HOSTS),
        environment=ENVIRONMENT,
        input_data_config=channels,
        max_runtime_seconds=400,
        **settings,
    )
    return Running(jobs, name)


def finish(job: Running) -> list[str]:
    """Wait for the job, which must complete; return its log."""
    end = job.jobs.wait(job.name, seconds=400)
    assert end["TrainingJobStatus"] == "Completed", (end["FailureReason"], job.log()[-30:])
    return job.log()


def seen(log: list[str], epoch: int) -> int:
    """Return how many images the ranks got in an epoch; none must come twice."""
    lines = [line.split() for line in log if line.startswith(f"images {epoch} ")]
    found = [number for _, _, *numbers in lines for number in numbers]
    assert len({*found}) == len(found)
    return len(found)


def node(job: Running, group: str, number: int, name: str = "raylet") -> psutil.Process:
    """Return a process of a host's node of Ray."""
    host = job.host(group, number)

    def find() -> list[psutil.Process]:
        return [p for p in job.processes(host=host) if p.name() == name]

    return wait_until(find, seconds=60)[0]


def who_connects(job: Running) -> list[bool]:
    """Try to connect to Ray's head with the job's token, with another one, and without; 15 s."""
    addresses = json.loads(job.environment["LOCAL_SAGEMAKER"])["addresses"]
    head = addresses[job.host("dnn_group", 0)]
    program = f"ray.init('{head}:{job.first_port() + 2}', _node_ip_address='{head}')"
    command = ["timeout", "15", sys.executable, "-c", f"import ray; {program}; print('connected')"]
    tried = []
    for mode, token in [("token", "a secret"), ("token", "another"), ("disabled", "")]:
        ray = {"PYTHONPATH": str(PACKAGES), "RAY_AUTH_MODE": mode, "RAY_AUTH_TOKEN": token}
        tried.append(subprocess.Popen(command, env=os.environ | ray, stdout=subprocess.PIPE))
    return [b"connected" in process.communicate()[0] for process in tried]


def test_images_survive_killed_nodes_and_a_stop(jobs: Jobs, data: str):
    boto3.client("s3").create_bucket(Bucket="ray-checkpoints")
    saved = {"checkpoint_config": CheckpointConfig(s3_uri="s3://ray-checkpoints/all")}
    job = start(jobs, "train.py", data, TOLD | {EPOCHS: f"{EPOCHS}00"}, **saved)
    jobs.wait_for_log(job.name, "step=1 ", seconds=120)
    assert who_connects(job) == [True, False, False]
    for number in (0, 1):
        node(job, "data_group", number).kill()
    jobs.wait_for_log(job.name, "restart in 1 s", seconds=60, times=2)
    last = int(re.findall(r"images (\d+) ", "\n".join(job.log()))[-1]) + 2
    jobs.wait_for_log(job.name, f"images {last} ", seconds=120)
    job.stop()
    assert jobs.wait(job.name)["TrainingJobStatus"] == "Stopped"
    assert [seen(job.log(), epoch) for epoch in range(last)] == [IMAGES - 1] * last
    checkpoint = torch.load(BytesIO(read_s3("s3://ray-checkpoints/all/last.pt")))
    assert checkpoint["epoch"] == last
    changes = TOLD | {EPOCHS: EPOCHS.replace(" 2", f" {last + 1}")}
    log = finish(following := start(jobs, "train.py", data, changes, **saved))
    assert not seen(log, last - 1) and seen(log, last) == IMAGES - 1
    model = archive(jobs.describe(following.name)["ModelArtifacts"]["S3ModelArtifacts"])
    assert {*model} == {"model.pt"}


def test_rllib_learns(jobs: Jobs):
    groups = {**HOSTS, "dnn_group": ("ml.m5.xlarge", 1)}
    log = finish(start(jobs, "rllib_train.py", changes={", 10": ", 5"}, groups=groups))
    returns = [
        float(number) for number in re.findall(r"^step=.* return=(\S+)", "\n".join(log), re.M)
    ]
    assert len(returns) == 5 and returns[-1] > 3 * returns[0]
    page, folder = FOLDER.with_suffix(".md").read_text(), FOLDER.parent / "environments"
    script, node, other = (
        sum(text.count("\n") for text in texts)
        for texts in (
            [FILES["rllib_train.py"]],
            [FILES["serve.py"]],
            [path.read_text() for path in folder.glob("*.py")],
        )
    )
    said = f"have {script + node} lines, of which {script} are about reinforcement learning;"
    assert f"{said} [environments/](environments) has {other}" in " ".join(page.split())


def test_ray_train_and_tune(jobs: Jobs):
    job = start(jobs, (Path(__file__).parent / "train_and_tune.py").read_text())
    data_hosts, training = ({job.host(group, n) for n in (0, 1)} for group in HOSTS)
    log = "\n".join(finish(job))
    # Ray Train prints each line twice.
    found = set(re.findall(r"trainer: epoch=(\d) rank=(\d) on=(\S+) from=(\S+) ids=(\S+)", log))
    draws = "+".join(re.findall(r" draws=(\S+)", "\n".join({*log.splitlines()}))).split("+")
    assert len({*draws}) == len(draws) == 2 * 320  # differ from row to row, and in each epoch
    for epoch in "01":
        lines = [line for line in found if line[0] == epoch]
        assert sorted(rank for _, rank, *_ in lines) == ["0", "1"]
        assert {host for *_, host, _, _ in lines} == training
        assert {*"+".join(hosts for *_, hosts, _ in lines).split("+")} <= data_hosts
        ids = "+".join(ids for *_, ids in lines).split("+")
        assert sorted(map(int, ids)) == [*range(320)]
    trials = re.findall(r"trial: lr=(\S+) on=(\S+)", log)
    assert sorted(lr for lr, _ in trials) == ["0.001", "0.01", "0.1", "0.3"]
    assert {host for _, host in trials} == data_hosts
    assert "best of 4: lr=0.3" in log


def kill_a_rank(job: Running) -> None:
    [rank] = [p for p in job.processes(RANK="1") if p.cmdline()[1:] == ["train.py"]]
    rank.kill()


GONE = r"The launcher on algo-\d \(%s\) is gone: connection closed\."
ENDINGS = {  # the cause, its FailureReason, and the seconds until the last host has ended
    "rank": (kill_a_rank, r"train\.py was killed by signal 9\.", 10),
    "data host's launcher": (
        lambda job: job.launcher("data_group", 0).kill(), GONE % "data_group", 10
    ),
    "training host's launcher": (
        lambda job: job.launcher("dnn_group", 1).kill(), GONE % "dnn_group", 10
    ),
    "training host's raylet": (
        lambda job: node(job, "dnn_group", 1).kill(), r"train\.py exited with status 1", 10
    ),
    "head": (
        lambda job: node(job, "dnn_group", 0, "gcs_server").kill(),
        r"Failed to connect to GCS within 30 seconds", 45
    ),
}  # fmt: skip


@soak
@pytest.mark.parametrize("ending", ENDINGS)
def test_endings(jobs: Jobs, data: str, ending: str):
    job = start(jobs, "train.py", data, TOLD | {EPOCHS: f"{EPOCHS}00"})
    jobs.wait_for_log(job.name, "step=3 ", seconds=120)
    cause, reason, most = ENDINGS[ending]
    since = time.time()
    cause(job)
    end = jobs.wait(job.name)
    assert end["TrainingJobStatus"] == "Failed" and re.search(reason, end["FailureReason"])
    assert seconds_to_end(end, since) < most
