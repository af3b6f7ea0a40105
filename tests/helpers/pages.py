"""The code blocks in README files, docs/ and workshop.md that readers copy."""

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
MARK = "# needs AWS"  # in code blocks that cannot run here


def blocks_of(folder: Path, language: str, section: str = "", page: str = "README.md") -> list[str]:
    """Return the code blocks in a language that a page, or a section of it, has and we can run."""
    text = (folder / page).read_text()
    if section:
        text = re.split(r"\n##+ ", text.split(f" {section}\n")[1])[0]
    found = re.findall(rf"```{language}\n(.*?)```", text, re.S)
    return [block for block in found if MARK not in block]


def count_lines(*texts: str) -> int:
    """Count the lines that are not empty."""
    return len([line for line in "".join(texts).splitlines() if line.strip()])


def copy_repository(folder: Path) -> None:
    """Copy all tracked files, as they are in the working tree."""
    names = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")
    for path in filter(Path.is_file, (ROOT / name for name in names if name)):
        target = folder / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)


def start_in_a_terminal(command: list[str], folder: Path, **environment: str) -> subprocess.Popen:
    """Start a command in its own session, so that a test can press Ctrl-C."""
    return subprocess.Popen(
        command,
        cwd=folder,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # If the tests run in the background, Ctrl-C would be ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


EXAMPLE, TENSORFLOW = ROOT / "pt.grpc.sagemaker", ROOT / "tf.data.service.sagemaker"

HELLO_NOTEBOOK = ROOT / "hello.world.sagemaker" / "helloworld-example.ipynb"
PYTORCH_NOTEBOOK = EXAMPLE / "hetero-pytorch-mnist.ipynb"
TENSORFLOW_NOTEBOOK = TENSORFLOW / "hetero-tensorflow-restnet50.ipynb"
NOTEBOOKS = [HELLO_NOTEBOOK, PYTORCH_NOTEBOOK, TENSORFLOW_NOTEBOOK]  # `make demo` makes copies

[LOCAL] = blocks_of(ROOT / "docs", "python", page="moving.md")
[MEASURED] = blocks_of(ROOT, "python")
[V3] = blocks_of(EXAMPLE, "python")
ENTRY, V2, TORCHRUN = blocks_of(EXAMPLE, "python", page="job.md")
WEB_DATASET, HUGGING_FACE, TRAINER = blocks_of(EXAMPLE, "python", page="loader.md")
# By the framework that the first line of each block names.
CHECKPOINTS, STEPS = (
    {
        re.match(f"# {what}: (.*)\n", block)[1]: block
        for block in blocks_of(ROOT / "docs", "python", page=page)
    }
    for what, page in (("checkpoint", "checkpoints.md"), ("steps", "steps.md"))
)
[DIFF] = blocks_of(ROOT, "diff")
BEFORE, AFTER = ((EXAMPLE / name).read_text() for name in ("before.py", "after.py"))
TF_BLOCKS = blocks_of(TENSORFLOW, "python")
TF_FIT, TF_ENTRY, TF_V2, TF_RANKS, TF_MAP, TF_SERVE, TF_TORCH = TF_BLOCKS[:7]
TF_SEED, TF_SERIES, TF_FOLDERS = TF_BLOCKS[7:]
[TF_COMMAND] = re.findall(r'command="exec (.*)"', (TENSORFLOW / "README.md").read_text())
SOLUTIONS = re.findall(
    r"<details>.*?```python\n(.*?)```.*?</details>", (ROOT / "workshop.md").read_text(), re.S
)
PYTHON = {LOCAL, MEASURED, V3, ENTRY, V2, TORCHRUN, *CHECKPOINTS.values()}
PYTHON |= {WEB_DATASET, HUGGING_FACE, TRAINER, *STEPS.values()}
PYTHON |= {*TF_BLOCKS, *SOLUTIONS}

# These replace feed/ and the reader's own script.
TOY_SCRIPTS = {
    "feed/server.py": "import time\nprint('serving', flush=True)\ntime.sleep(100)",
    "train.py": "import sys\nprint('training with', sys.argv[1:])",
}
# SDK v2 writes True, and its toolkit splits values at spaces. The script must get the same values
# as with v3.
V2_GIVEN = V2.replace('{"epochs": 3}', '{"epochs": 3, "name": "a b", "amp": True}')
V2_TOLD = "training with ['--amp', 'true', '--epochs', '3', '--name', 'a b']"  # v2 sorts options
# A reader's pipeline: it yields numbers, each with the number of the host that has read it. The
# model prints what it is trained on. Two CPU devices stand in for GPUs.
TF_TRAINING = """
import functools, os, sys
import tensorflow as tf
from service import numpy_function
import my_functions

if os.environ.get("WORLD_SIZE") == "1":
    [cpu] = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, 2 * [tf.config.LogicalDeviceConfiguration()])
    strategy = tf.distribute.MirroredStrategy
    tf.distribute.MirroredStrategy = functools.partial(strategy, ["CPU:0", "CPU:1"])

def read(record):
    config = tf.io.read_file("CONFIG")
    host = tf.strings.regex_replace(config, r'(?s).*"current_host": *"algo-(\\d+)".*', r"\\1")
    x = tf.strings.to_number(tf.stack([record, host]))
    return tf.ensure_shape(x, [2]), 0.0

def make_dataset(folder, batch_size):
    files = tf.data.Dataset.list_files(folder + "/*.tfrecord", shuffle=False)
    dataset = files.interleave(tf.data.TFRecordDataset, cycle_length=2)
    dataset = dataset.map(read)
    return dataset.batch(batch_size)

class Tell(tf.keras.layers.Layer):
    def call(self, x):
        tf.print("trained", tf.cast(x, tf.int32), output_stream=sys.stdout, summarize=-1)
        return 0.0 * x

def build_model(kind=tf.keras.Model):
    x = tf.keras.Input((2,))
    model = kind(x, tf.keras.layers.Dense(1)(Tell()(x)))
    model.compile(optimizer="sgd", loss="mse", jit_compile=False)
    return model
"""
MY_FUNCTIONS = """
import os, time
import numpy as np

def augment(x):
    time.sleep(0.002)  # so that no single worker takes all samples
    return np.float32([x[0], os.getpid()])
"""
