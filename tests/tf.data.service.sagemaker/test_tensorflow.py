"""Training jobs of the TensorFlow example: batches, failures and checkpoints."""

import os
import re
import socket
import subprocess
import sys
import time
import zlib
from pathlib import Path

import psutil
import pytest
from sagemaker.core.shapes import CheckpointConfig
from sagemaker.core.training.configs import InputData

from helpers.data_service import LEAN
from helpers.images import image, write_records
from helpers.jobs import Jobs, texts_in, upload
from helpers.pages import EXAMPLE, TENSORFLOW
from helpers.running import Running, assert_nothing_left, seconds_to_end
from shared import monitoring

pytestmark = pytest.mark.first
CODE = TENSORFLOW / "code"
FILES, RECORDS, BUCKET = 64, 5, "records"
HYPERPARAMETERS = {"model": "small", "batch-size": 8, "log-every": 1, "max-steps": 100_000}
TWO_AND_TWO = {"data_group": ("ml.c5.xlarge", 2), "dnn_group": ("ml.m5.xlarge", 2)}


@pytest.fixture(scope="module")
def records(local, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The records' place in S3."""
    folder = tmp_path_factory.mktemp("records")
    write_records(folder, FILES, RECORDS, classes=10)
    return upload(folder, f"s3://{BUCKET}/a")


@pytest.fixture
def start(jobs: Jobs, records: str):
    """Start jobs of the example; `changes` has pairs of an old and a new text, by file."""

    def start(groups: dict | None, changes: dict | None = None, **settings) -> Running:
        files = {**texts_in(CODE), **texts_in(LEAN)}
        for file, pairs in (changes or {}).items():
            for old, new in pairs:
                assert files[file].count(old) == 1, (file, old)
                files[file] = files[file].replace(old, new)
        data = InputData(channel_name="training", data_source=records)
        name = jobs.create(
            files,
            "exec python launcher.py",
            groups,
            hyperparameters={**HYPERPARAMETERS, **settings.pop("hyperparameters", {})},
            environment={"HETERO_TOKEN": "a secret"},
            input_data_config=[data],
            max_runtime_seconds=600,
            **settings,
        )
        job = Running(jobs, name)
        assert job.environment  # read while it runs, since it is needed afterwards
        return job

    return start


def finish(job: Running, event_at: float = 0.0) -> tuple[dict, float]:
    """Wait until the job has ended and left nothing; return its description and the seconds."""
    answer = job.jobs.wait(job.name, seconds=200)
    assert_nothing_left(job)
    return answer, seconds_to_end(answer, since=event_at)


def test_the_runtime_is_the_same_as_in_the_pytorch_example():
    other = EXAMPLE / "code"
    assert texts_in(CODE, "hetero") == texts_in(other, "hetero")
    texts = [(code / "arguments.py").read_text() for code in (CODE, other)]
    assert len({text[text.index("def whole(") : text.index("def parser(")] for text in texts}) == 1


# In place of the training script: prints what a rank gets in two passes over the records.
COLLECT = """
import json, os, sys, time, zlib
import tensorflow as tf
import pipeline
from ranks import TensorFlowRanks
from service import distribute
ranks = TensorFlowRanks()
arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
files = pipeline.find_files(arguments["--channels"] + "/training/*")
pipeline.distribute = lambda dataset: distribute(dataset, name="it ends")
batches = pipeline.build(files, 8, augment=0, passes=2, on_data_hosts=True)
while not os.path.exists("GO"):
    time.sleep(0.1)
for n, (images, configs) in enumerate(batches):
    if n == 0:
        ranks.mean([tf.zeros(())])  # waits for the other rank, or one would take everything
    worker = json.loads(configs[0].numpy())["current_host"]
    seen = [zlib.crc32((image.numpy() * 255).round().astype("uint8")) for image in images]
    print("seen", ranks.rank, worker, *seen, flush=True)
"""
# In place of the data hosts' program, which measures first.
ONLY_SERVE = '"train_data.py", *words, *channels]', '"service/serve.py"]'
# In place of the label: a file that says which host the worker runs on.
TELL_WORKER = 'example["label"]\n', 'tf.io.read_file("../../config/resourceconfig.json")\n'
FEW_AT_ONCE = "SHUFFLE_RECORDS = 2048", "SHUFFLE_RECORDS = 20"  # or one worker would take all


def test_ranks_together_get_every_record_once_in_each_pass(start, tmp_path: Path):
    collect = COLLECT.replace("GO", f"{tmp_path}/go")
    change = {
        "train_dnn.py": [((CODE / "train_dnn.py").read_text(), collect)],
        "launcher.py": [ONLY_SERVE],
        "pipeline.py": [TELL_WORKER, FEW_AT_ONCE],
    }
    job = start(TWO_AND_TWO, change)
    job.jobs.wait_for_log(job.name, "worker at", seconds=120, times=2)  # all workers are up
    (tmp_path / "go").touch()
    answer, _ = finish(job)
    assert answer["TrainingJobStatus"] == "Completed", answer["FailureReason"]
    lines = [line.split()[1:] for line in job.log() if line.startswith("seen")]
    assert {rank for rank, *_ in lines} == {"0", "1"}
    assert len({worker for _, worker, *_ in lines}) == 2  # both data hosts work
    numbers = [*range(FILES * RECORDS)] * 2
    expected = sorted(str(zlib.crc32(image(number))) for number in numbers)
    assert sorted(seen for _, _, *batch in lines for seen in batch) == expected


def meet_strangers(job: Running) -> list[socket.socket]:
    """Connect to every port that the job listens on, and send nothing."""
    listening = {
        (c.laddr.ip if c.laddr.ip.startswith("127.") else "127.0.0.1", c.laddr.port)
        for process in job.processes()
        for c in process.net_connections("tcp")
        if c.status == psutil.CONN_LISTEN
    }
    assert len(listening) >= 7  # two ranks, three workers, the dispatcher and the leader
    return [socket.create_connection(address, timeout=5) for address in listening]


def kill_data_server(job: Running, number: int) -> None:
    """Kill a data host's server; wait until it is back, and training has done many more steps."""
    workers = sum("worker at" in line for line in job.log())
    job.kill_data_servers([number], times=1)
    job.jobs.wait_for_log(job.name, "worker at", seconds=60, times=workers + 1)
    done = max(int(line.split("=")[1].split()[0]) for line in job.log() if line.startswith("step="))
    # Enough passes for the dispatcher to have handed out all files again.
    step = done + 3 * FILES * RECORDS // (2 * HYPERPARAMETERS["batch-size"])
    job.jobs.wait_for_log(job.name, f"step={step} ", seconds=120)


TELL_WEIGHTS = (
    "    stopped = stopping and done",
    "    weights = sum(float(tf.norm(weight)) for weight in model.trainable_variables)\n"
    "    print(f'weights of {ranks.rank}: {weights}')\n"
    "    stopped = stopping and done",
)
# This starts a worker beside the ranks, as on hosts with more cores than ranks.
ONE_SPARE_CORE = ('    needed="first",', '    needed="first", spare_cores=1,')


@pytest.mark.thorough
def test_a_job_survives_its_data_servers_and_goes_on_from_its_checkpoint(start):
    goes_on = {"checkpoint_config": CheckpointConfig(s3_uri=f"s3://{BUCKET}/checkpoints")}
    job = start(TWO_AND_TWO, **goes_on)
    job.jobs.wait_for_log(job.name, "step=8 ", seconds=120)
    kill_data_server(job, 1)  # a worker
    kill_data_server(job, 0)  # the dispatcher, and a worker
    job.stop()
    answer, seconds = finish(job, time.time())
    assert answer["TrainingJobStatus"] == "Stopped" and seconds < 15
    stopped = re.search(r"stopped by SIGTERM after step (\d+)", "\n".join(job.log()))
    last = int(stopped[1]) + 100

    change = {"train_dnn.py": [TELL_WEIGHTS], "launcher.py": [ONE_SPARE_CORE]}
    groups = {**TWO_AND_TWO, "data_group": ("ml.c5.xlarge", 1)}
    job = start(groups, change, hyperparameters={"max-steps": last}, **goes_on)
    job.jobs.wait_for_log(job.name, f"step={last - 80} ", seconds=120)
    job.jobs.wait_for_log(job.name, "worker at", seconds=60, times=3)
    strangers = meet_strangers(job)  # which disturb neither training nor its end
    answer, _ = finish(job)
    assert answer["TrainingJobStatus"] == "Completed", answer["FailureReason"]
    # TensorFlow takes up to a minute to destroy an iterator that was long in use (similar: its
    # issue 56490). The example does not wait for that.
    end = next(line.time for line in monitoring.logs(job.name) if "training finished" in line.text)
    assert seconds_to_end(answer, since=end.timestamp()) < 10
    log = "\n".join(job.log())
    assert f"at step {stopped[1]}\n" in log and f"training finished after step {last}:" in log
    one, other = re.findall(r"^weights of \d: (.+)", log, re.MULTILINE)
    assert one == other  # both ranks have the same weights
    assert len(monitoring.steps(job.name)) == 99  # the first step is not measured
    for stranger in strangers:
        stranger.close()


@pytest.mark.thorough
def test_resnet50_trains_here_too(tmp_path: Path):
    import tensorflow as tf

    options = "--data-mode synthetic --model resnet50 --batch-size 2 --max-steps 2 --model-dir"
    command = [sys.executable, "train_dnn.py", *options.split(), str(tmp_path)]
    subprocess.run(command, cwd=CODE, check=True, timeout=200)
    model = tf.saved_model.load(f"{tmp_path}/1")  # where TensorFlow Serving looks for it
    logits = model.signatures["serving_default"](tf.zeros((2, 32, 32, 3)))
    assert [tuple(value.shape) for value in logits.values()] == [(2, 10)]


def test_an_image_without_horovod_is_the_failure_reason(start):
    answer, _ = finish(start(None, hyperparameters={"distribution": "horovod"}))
    assert answer["TrainingJobStatus"] == "Failed"
    assert "No module named 'horovod'. Use an image with Horovod" in answer["FailureReason"]


@pytest.mark.parametrize(
    "program, options, words",
    [
        ("launcher.py", "--batch-size 0", "argument --batch-size: must be 1 or more, not 0"),
        ("launcher.py", "--warmup 3", "unrecognized arguments: --warmup 3"),
        ("train_dnn.py", "--data-mode service", "--data-mode service needs data hosts"),
        ("train_dnn.py", "--model large", "There is no model 'large': choose one of resnet50, sm"),
    ],
)
def test_wrong_hyperparameters_are_refused(program: str, options: str, words: str, tmp_path: Path):
    """Whatever a program says when it fails is its job's FailureReason: see test_reason.py."""
    places = {"SAGEMAKER_BASE_DIR": str(tmp_path), "PYTHONPATH": str(LEAN)}
    done = subprocess.run(
        [sys.executable, program, *options.split()],
        cwd=CODE,
        env=os.environ | places | {"CUDA_VISIBLE_DEVICES": ""},
        stderr=subprocess.PIPE,
        text=True,
        timeout=200,
    )
    assert done.returncode and words in done.stderr
