"""`measured` finds the step times in a framework if it is put where docs/when.md says."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.pages import ROOT
from helpers.slow import TORCH

ROWS = dict(re.findall(r"^\| (.+?) \| .*?`(.+?)`", (ROOT / "docs/when.md").read_text(), re.M))
# Each of two workers takes 60 ms per batch, and a step without data takes 15 ms.
BEGIN = """
from measured import measured

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x):
        time.sleep(0.015)
        return {"loss": self.layer(x).mean()}

dataset = Slow(110, 0.06)
loader = DataLoader(dataset, batch_size=2, num_workers=2)
"""
LIGHTNING = """
import lightning as L

class Module(Model, L.LightningModule):
    def training_step(self, batch):
        return self(**batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

trainer = L.Trainer(max_epochs=1, logger=False, enable_checkpointing=False)
model = Module()
LINE
"""
TRAINER = """
import transformers

class Trainer(transformers.Trainer):
    LINE

arguments = transformers.TrainingArguments(
    sys.argv[1], per_device_train_batch_size=2, num_train_epochs=1, dataloader_num_workers=2,
    use_cpu=True, report_to=[], save_strategy="no",
)
Trainer(Model(), arguments, train_dataset=dataset).train()
"""
ACCELERATE = """
from accelerate import Accelerator

accelerator, model = Accelerator(cpu=True), Model()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
LINE:
    accelerator.backward(model(**batch)["loss"])
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    "row, script",
    [("Lightning", LIGHTNING), ("the Hugging Face Trainer", TRAINER), ("accelerate", ACCELERATE)],
)
def test_measured_finds_both_step_times_in(row: str, script: str, tmp_path: Path):
    (tmp_path / "train.py").write_text(TORCH + BEGIN + script.replace("LINE", ROWS[row]))
    for _ in range(4):  # the machine may be too busy at times
        said = subprocess.check_output(
            [sys.executable, "train.py", str(tmp_path)],
            cwd=tmp_path,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT / "shared"),
                "AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://127.0.0.1:9",
            },
            text=True,
        )
        found = json.loads(re.search(r'^\{"measured".*', said, re.M)[0])["measured"]
        print(found)
        if [found["step_ms"], found["accelerator_ms"]] == pytest.approx([30, 15], abs=4):
            return
    pytest.fail("the step times are wrong: see the output")
