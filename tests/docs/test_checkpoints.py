"""The training loops of docs/checkpoints.md, in jobs that are stopped, killed and continued."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from sagemaker.core.shapes import CheckpointConfig

from helpers.jobs import Jobs
from helpers.pages import CHECKPOINTS, EXAMPLE, TENSORFLOW
from helpers.running import log_of, start_programs

pytestmark = [pytest.mark.usefixtures("nothing_is_left"), pytest.mark.thorough]
pytestmark += [pytest.mark.timeout(600)]  # up to four jobs, one after another
EPOCHS, BATCHES = 3, 15  # BATCHES: per rank and epoch
GO_ON = "def stop_myself():\n    pass\n"
# A rank tells itself to stop. The kernel ends it when it has written 100 bytes to a file.
IN_THE_SAVE = """
import os, resource, signal, sys, tempfile

def stop_myself():
    os.kill(os.getpid(), signal.SIGTERM)
    if "lightning" not in sys.modules:
        end_at_100_bytes()

def end_at_100_bytes():
    print("the next file gets 100 bytes", flush=True)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))

# Lightning writes to /tmp, which in a container is another file system, and then copies.
tempfile.tempdir = "ANOTHER"
sys.addaudithook(lambda event, _: event == "shutil.move" and end_at_100_bytes())
"""
TORCH = """
import os, signal, sys, time
import hetero, torch
import torch.distributed as dist
from pathlib import Path
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler
from feed import RemoteDataset

class Numbers(Dataset):
    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        return {"x": torch.tensor([index, torch.rand(()).item()])}

def stop_myself():
    pass

def tell(epoch, values):
    time.sleep(0.2)  # so that the job is stopped before it completes
    text = " ".join(f"{value:.6f}" for value in values.flatten().tolist())
    print(f"trained rank={os.environ['RANK']} {epoch=} {text}", flush=True)
    stop_myself()

dataset, device = RemoteDataset(Numbers()), torch.device("cpu")
"""
LOOP = """
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
optimizer = torch.optim.Adam(model.parameters())
sampler = DistributedSampler(dataset)
batches = BatchSampler(sampler, 2, drop_last=True)

def train_step(batch):
    tell(epoch, batch["x"])
    optimizer.zero_grad()
    model(batch["x"]).mean().backward()
    optimizer.step()
"""
LIGHTNING = """
import lightning as L

class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch):
        tell(self.current_epoch, batch["x"])
        return self.layer(batch["x"]).mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())

model, loader = Model(), DataLoader(dataset, batch_size=2, shuffle=True)
"""
TRAINER = """
from transformers import Trainer, TrainerCallback, TrainingArguments

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, x):
        tell(int(trainer.state.epoch), x)
        return {"loss": self.layer(x).mean()}

model = Model()
arguments = TrainingArguments(
    output_dir=str(hetero.BASE_DIR / "checkpoints"), per_device_train_batch_size=2,
    num_train_epochs=3, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True,
)
"""
KERAS = """
import os, signal, time
import hetero
import tensorflow as tf
import keras

def stop_myself():
    pass

def build_model():
    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    return model

dataset = tf.data.Dataset.from_tensors((tf.zeros((2, 1)), tf.zeros((2, 1)))).repeat()
"""


TELL_STEPS = """
class StopOnSigterm(StopOnSigterm):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.02)
        print(f"\\ntrained step={int(self.model.optimizer.iterations)}", flush=True)
        stop_myself()
        super().on_train_batch_end(batch, logs)
"""


def groups_of(ranks: int) -> dict:
    return {"data_group": ("ml.c5.xlarge", 1), "dnn_group": ("ml.m5.xlarge", ranks)}


@pytest.fixture
def in_the_save() -> Iterator[str]:
    """Code for a script whose ranks are killed while they save."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield IN_THE_SAVE.replace("ANOTHER", folder)


def stop_and_continue(
    jobs: Jobs, script: str, in_the_save: str, folder: Path, ranks: int
) -> list[list[str]]:
    """Return what a job trains on until it is stopped, and then its successor.

    A job between the two continues as well, but is killed while it saves its own checkpoint.
    """
    bucket = f"checkpoints-{folder.name}".replace("_", "-").lower()
    boto3.client("s3").create_bucket(Bucket=bucket)
    goes_on = {"checkpoint_config": CheckpointConfig(s3_uri=f"s3://{bucket}/checkpoints")}
    told, killed = [], script.replace(GO_ON, in_the_save)
    assert killed != script
    for end, code in {"Stopped": script, "Failed": killed, "Completed": script}.items():
        job = start_programs(jobs, code, serve=None, groups=groups_of(ranks), **goes_on)
        if end == "Stopped":
            jobs.wait_for_log(job.name, "trained ", times=2 * ranks + 2, seconds=100)
            job.stop()
        ended = jobs.wait(job.name)
        assert ended["TrainingJobStatus"] == end, ended.get("FailureReason")
        if end == "Failed":
            assert "the next file gets 100 bytes" in job.log()
        else:
            told.append(sorted(line for line in job.log() if line.startswith("trained ")))
    return told


@pytest.fixture
def trained(jobs: Jobs, in_the_save: str, tmp_path: Path):
    """Run a script on two ranks, stop and continue it; return what each job has trained on."""

    def trained(script: str) -> list[list[str]]:
        script = TORCH.replace("COUNT", str(2 * 2 * BATCHES)) + script
        first, second = stop_and_continue(jobs, script + END, in_the_save, tmp_path, ranks=2)
        assert 4 <= len(first) < 2 * BATCHES and len(first) % 2 == 0  # ranks stop together
        return [first, second]

    return trained


# Gloo's threads sometimes abort a process when its interpreter ends, even without process groups.
END = "\nif dist.is_initialized():\n    dist.barrier()\nos._exit(0)\n"


def test_a_loop_of_one_s_own(trained, jobs: Jobs):
    """It trains on the same samples and random numbers as a job that is not stopped."""
    script = LOOP + CHECKPOINTS["a loop of your own"] + CHECKPOINTS["the loop"]
    first, second = trained(script)
    script = TORCH.replace("COUNT", str(2 * 2 * BATCHES)) + script + END
    log = log_of(jobs, script, serve=None, groups=groups_of(2))
    whole = [line for line in log if line.startswith("trained ")]
    assert len(whole) == 2 * EPOCHS * BATCHES
    assert sorted(first + second) == sorted(whole)


def indices(lines: list[str], epoch: int) -> list[int]:
    """Return the samples that were trained on in an epoch."""
    values = [line.split()[3:] for line in lines if f"epoch={epoch} " in line]
    return sorted(int(float(value)) for of_batch in values for value in of_batch[::2])


def test_lightning(trained):
    """It must be told the number of hosts, or each would train on everything."""
    [told] = re.findall(r"Trainer\(num_nodes=(.*)\)`", (EXAMPLE / "job.md").read_text())
    assert f"{told}\n" in CHECKPOINTS["Lightning"]
    first, second = trained(LIGHTNING + CHECKPOINTS["Lightning"])
    assert len(first + second) == 2 * EPOCHS * BATCHES
    # As the page says, the interrupted epoch starts again with its first batches.
    assert {*indices(first, 0)} < {*indices(second, 0)}
    for epoch in (1, 2):
        assert indices(second, epoch) == [*range(2 * 2 * BATCHES)]


def test_trainer(trained):
    first, second = trained(TRAINER + CHECKPOINTS["Trainer"])
    assert len(first + second) == 2 * EPOCHS * BATCHES
    for epoch in range(EPOCHS):
        assert indices(first + second, epoch) == [*range(2 * 2 * BATCHES)]


def test_keras(jobs: Jobs, in_the_save: str, tmp_path: Path):
    callback, rest = CHECKPOINTS["Keras"].split("\npath =")
    script = f"{KERAS}{callback}{TELL_STEPS}path ={rest}"
    first, second = stop_and_continue(jobs, script, in_the_save, tmp_path, ranks=1)
    steps = [sorted(int(line.split("=")[1]) for line in lines) for lines in (first, second)]
    assert steps[0] == [*range(1, len(steps[0]) + 1)]
    # The interrupted epoch, of 100 steps, starts again.
    left = 500 - len(steps[0]) // 100 * 100
    assert steps[1] == [*range(len(steps[0]) + 1, len(steps[0]) + 1 + left)]


KILLED = """
import train_dnn

save = train_dnn.Checkpoint.save
train_dnn.Checkpoint.save = lambda *args: (end_at_100_bytes(), save(*args))
train_dnn.main()
"""


@pytest.mark.parametrize("example", [EXAMPLE, TENSORFLOW], ids=lambda path: path.name)
def test_the_examples_own_scripts(example: Path, in_the_save: str, tmp_path: Path):
    """They continue at the step of the last checkpoint, although they were killed in a save."""
    options = ["--data-mode", "synthetic", "--model", "small", "--batch-size", "4", "--max-steps"]
    folder = tmp_path / "checkpoints"
    folders = ["--checkpoint-dir", str(folder), "--model-dir", str(tmp_path / "model")]
    killed = ["-c", in_the_save + KILLED]
    for steps, script in ((3, ["train_dnn.py"]), (5, killed), (6, ["train_dnn.py"])):
        done = subprocess.run(
            [sys.executable, *script, *options, str(steps), *folders],
            cwd=example / "code",
            env={**os.environ, "TMPDIR": str(tmp_path)},  # the frameworks leave files there
            stdout=subprocess.PIPE,
            text=True,
        )
        assert done.returncode == (-signal.SIGXFSZ if script == killed else 0)
    assert f"resumed from {folder} at step 3\n" in done.stdout
