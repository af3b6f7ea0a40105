"""Times in frameworks, from docs/steps.md's callbacks, and `measured` as in docs/when.md.

Data and steps take a known time. Each script is run again if the machine is too busy.
"""

import json
import os
import re
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

import pandas as pd
import pytest

from helpers.pages import ROOT, STEPS
from shared.monitoring import METRIC_DEFINITIONS
from shared.monitoring.log import LogLine, step_table

# Keys: seconds per batch, seconds per step, and how many workers prepare batches meanwhile.
# Values, in ms: the resulting step time, which includes the wait for data, and that wait.
CASES = {
    (0.04, 0.0, 0): (40, 40),
    (0.04, 0.02, 1): (40, 20),
    (0.0, 0.04, 0): (40, 0),
}
ROWS = dict(re.findall(r"^\| (.+?) \| .*?`(.+?)`", (ROOT / "docs/when.md").read_text(), re.M))
TORCH = """
import sys, time
import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

torch.set_num_threads(1)  # several threads would wait for each other if other programs run

class Slow(Dataset):
    def __init__(self, batches, seconds):
        self.batches, self.seconds = batches, seconds

    def __len__(self):
        return 2 * self.batches

    def __getitem__(self, index):
        time.sleep(self.seconds / 2)
        return {"x": torch.ones(4)}
"""
# Between two hooks there is more than the wait: the copy to the GPU, logging, and validation.
LIGHTNING = """
import lightning as L
from lightning.pytorch.profilers import Profiler

class Model(L.LightningModule):
    def __init__(self, seconds):
        super().__init__()
        self.layer, self.seconds = torch.nn.Linear(4, 1), seconds

    def transfer_batch_to_device(self, batch, *_):
        time.sleep(self.seconds / 2)
        return batch

    def training_step(self, batch):
        time.sleep(self.seconds / 2)
        return self.layer(batch["x"]).mean()

    def validation_step(self, batch):
        time.sleep(0.1)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
"""
LIGHTNING_STEPS = """
for data, step, workers in CASES:
    print(f"case {data} {step} {workers}", flush=True)
    loader = DataLoader(Slow(40, data), batch_size=2, num_workers=workers)
    trainer = L.Trainer(
        max_epochs=1, logger=False, enable_checkpointing=False, callbacks=[StepLog()],
        val_check_interval=25, default_root_dir=sys.argv[1],
    )
    trainer.fit(Model(step), loader, DataLoader(Slow(4, 0.1), batch_size=2))
"""
TRAINER = """
from transformers import Trainer, TrainerCallback, TrainingArguments

class Model(torch.nn.Module):
    def __init__(self, seconds):
        super().__init__()
        self.layer, self.seconds = torch.nn.Linear(4, 1), seconds

    def forward(self, x):
        time.sleep(self.seconds / 2 if self.training else 0.1)
        return {"loss": self.layer(x).mean()}
"""
TRAINER_STEPS = """
class Tracker(TrainerCallback):
    def on_log(self, *_, **__):
        time.sleep(step / 2)

for data, step, workers in CASES:
    folder = f"{sys.argv[1]}/{data} {step} {workers}"
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=2, per_device_eval_batch_size=2, use_cpu=True,
        num_train_epochs=1, dataloader_num_workers=workers, report_to=[], save_steps=25,
        eval_strategy="steps", eval_steps=25, logging_steps=1,
    )
    for resumed in (None, f"{folder}/checkpoint-25")[: 2 - workers]:
        print(f"case {data} {step} {workers}" + " resumed" * bool(resumed), flush=True)
        slow, few, callbacks = Slow(40, data), Slow(4, 0.1), [StepLog(), Tracker()]
        trainer = Trainer(
            Model(step), arguments, train_dataset=slow, eval_dataset=few, callbacks=callbacks
        )
        trainer.train(resume_from_checkpoint=resumed)
"""
KERAS = """
import itertools, os, sys, time
import tensorflow as tf
import keras
from tensorflow.python.data.experimental.ops import testing  # its sleep takes no CPU time

class Layer(keras.layers.Layer):
    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def call(self, x, training=None):
        def wait(x):
            time.sleep(self.seconds if training else 0.1)
            return x
        return tf.ensure_shape(tf.numpy_function(wait, [x], x.dtype), x.shape)

def slow(batches, seconds, workers):
    dataset = tf.data.Dataset.from_tensors(([[1.0, 2.0]] * 4, [[3.0]] * 4)).repeat(batches)
    dataset = dataset.apply(testing.sleep(int(1e6 * seconds)))
    options = tf.data.Options()  # otherwise it prefetches anyway
    options.experimental_optimization.inject_prefetch = False
    return dataset.prefetch(1) if workers else dataset.with_options(options)

[cpu] = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, 2 * [tf.config.LogicalDeviceConfiguration()])
both = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])  # which compute in turn here
one = tf.distribute.get_strategy()
runs = [(one, *case, 1) for case in CASES] + [(one, 0.04, 0.0, 0, 5), (both, 0.04, 0.02, 1, 1)]
for strategy, data, step, workers, steps in runs:
    print(f"case {data} {step} {workers}", flush=True)
    with strategy.scope():
        layer = Layer(step / strategy.num_replicas_in_sync)
        model = keras.Sequential([keras.Input((2,)), layer, keras.layers.Dense(1)])
        model.compile("sgd", "mse", steps_per_execution=steps)
    few = slow(4, 0.1, 0)
    model.fit(slow(20, data, workers), epochs=2, validation_data=few, callbacks=[StepLog()])
os.environ["RANK"] = "1"
print("case another rank", flush=True)
model.fit(slow(20, 0.0, 0), callbacks=[StepLog()])
os._exit(0)  # TensorFlow can take a minute to destroy an iterator
"""


def tables(script: str, folder: Path) -> dict[str, pd.DataFrame]:
    """Run a script; return what `step_table` finds in its log, for each of its cases."""
    (folder / "train.py").write_text(script.replace("CASES", str([*CASES])))
    done = subprocess.run(
        [sys.executable, "train.py", str(folder)],
        cwd=folder,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    output = done.stdout.decode()  # text mode would split lines at a progress bar's \r
    assert done.returncode == 0, output
    found: dict[str, list[LogLine]] = {}
    for part in re.split("^case ", output, flags=re.M)[1:]:
        case, *texts = part.split("\n")
        now = datetime.now(timezone.utc)
        found.setdefault(case, []).extend(LogLine(now, "algo-1", "dnn_group", t) for t in texts)
    for definition in METRIC_DEFINITIONS[1:3]:  # SageMaker finds the same values
        for lines in found.values():
            graphed = [re.search(definition["Regex"], line.text) for line in lines]
            values = [float(match[1]) for match in graphed if match]
            assert values == [*step_table(lines).get(definition["Name"], [])]
    return {case: step_table(lines) for case, lines in found.items()}


def differences(found: dict[str, pd.DataFrame], is_keras: bool) -> list[str]:
    """Return the cases whose lines have wrong times, or include validation."""
    wrong = []
    assert {*found} >= {f"{data} {step} {workers}" for data, step, workers in CASES}
    for case, table in found.items():
        data, step, workers = case.split()[:3]
        expected = CASES[float(data), float(step), int(workers)]
        print(f"{case}: {expected}\n{table.drop(columns=['time', 'host'])}")
        medians = table[["step_time_ms", "data_wait_ms"]].median().to_list()
        at_most = expected[0] + (1e9 if is_keras else 35)  # TensorFlow may begin epochs slowly
        if medians != pytest.approx(expected, abs=10) or table["step_time_ms"].max() > at_most:
            wrong.append(case)
    return wrong


@pytest.mark.thorough
@pytest.mark.parametrize("framework", STEPS)
def test_steps_and_waits_are_what_they_take(framework: str, tmp_path: Path):
    """With data as the limit, with steps as the limit, and with half of the data time hidden."""
    script = {
        "Lightning": TORCH + LIGHTNING + STEPS[framework] + LIGHTNING_STEPS,
        "Trainer": TORCH + TRAINER + STEPS[framework] + TRAINER_STEPS,
        "Keras": KERAS.replace("\nclass Layer", f"{STEPS[framework]}\nclass Layer"),
    }[framework]
    for _ in range(4):
        found = tables(script, tmp_path)
        if framework == "Keras":
            assert found.pop("another rank").empty
            # No line covers steps on both sides of validation, which follows step 20.
            assert [*found["0.04 0.0 0"]["step"]] == [11, 30, 40, 15, 30, 40]
        if not differences(found, framework == "Keras"):
            return
    pytest.fail("the times are wrong: see the tables in the output")


# Each of two workers takes 60 ms per batch, and a step without data takes 15 ms.
MEASURED = (
    TORCH
    + """
from measured import measured
loader = DataLoader(dataset := Slow(110, 0.06), batch_size=2, num_workers=2)
"""
)
MEASURED_IN = {
    "Lightning": LIGHTNING + """
trainer = L.Trainer(max_epochs=1, logger=False, enable_checkpointing=False)
model = Model(0.015)
LINE
""",
    "the Hugging Face Trainer": TRAINER + """
class Mine(Trainer):
    LINE

arguments = TrainingArguments(
    sys.argv[1], per_device_train_batch_size=2, num_train_epochs=1, dataloader_num_workers=2,
    use_cpu=True, report_to=[], save_strategy="no",
)
Mine(Model(0.03), arguments, train_dataset=dataset).train()
""",
    "accelerate": TRAINER + """
from accelerate import Accelerator

accelerator, model = Accelerator(cpu=True), Model(0.03)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
LINE:
    accelerator.backward(model(**batch)["loss"])
    optimizer.step()
    optimizer.zero_grad()
""",
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("row", MEASURED_IN)
def test_measured_finds_both_step_times_in(row: str, tmp_path: Path):
    (tmp_path / "train.py").write_text(MEASURED + MEASURED_IN[row].replace("LINE", ROWS[row]))
    metadata = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://127.0.0.1:9"}  # nobody answers
    for _ in range(4):
        said = subprocess.check_output(
            [sys.executable, "train.py", str(tmp_path)],
            cwd=tmp_path,
            env={**os.environ, **metadata, "PYTHONPATH": str(ROOT / "shared")},
            text=True,
        )
        found = json.loads(re.search(r'^\{"measured".*', said, re.M)[0])["measured"]
        print(found)
        if [found["step_ms"], found["without_data_ms"]] == pytest.approx([30, 15], abs=4):
            return
    pytest.fail("the step times are wrong: see the output")
