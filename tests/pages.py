"""What README files, docs/ and workshop.md tell people to copy."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
MARK = "# needs AWS"  # in what cannot be run here


def blocks_of(folder: Path, language: str, section: str = "", page: str = "README.md") -> list[str]:
    """What a folder's README or other page, or a section of it, has in a language for us to run."""
    text = (folder / page).read_text()
    if section:
        text = re.split(r"\n##+ ", text.split(f" {section}\n")[1])[0]
    found = re.findall(rf"```{language}\n(.*?)```", text, re.S)
    return [block for block in found if MARK not in block]


EXAMPLE, TENSORFLOW = ROOT / "pt.grpc.sagemaker", ROOT / "tf.data.service.sagemaker"

[LOCAL] = blocks_of(ROOT / "docs", "python", page="files.md")
[MEASURED] = blocks_of(ROOT, "python")
V3, ENTRY, V2, TORCHRUN = blocks_of(EXAMPLE, "python", "Your own training script")
# By what the first line of each says that it is for.
CHECKPOINTS = {
    re.match("# checkpoint: (.*)\n", block)[1]: block
    for block in blocks_of(ROOT / "docs", "python", page="checkpoints.md")
}
[DIFF] = blocks_of(ROOT, "diff")
BEFORE, AFTER = ((EXAMPLE / name).read_text() for name in ("before.py", "after.py"))
*TF_FILES, TF_ENTRY, TF_V2, TF_FOLDERS = blocks_of(TENSORFLOW, "python")
[TF_COMMAND] = re.findall(r'command="exec (.*)"', (TENSORFLOW / "README.md").read_text())
SOLUTIONS = re.findall(
    r"<details>.*?```python\n(.*?)```.*?</details>", (ROOT / "workshop.md").read_text(), re.S
)
PYTHON = {LOCAL, MEASURED, V3, ENTRY, V2, TORCHRUN, *CHECKPOINTS.values()}
PYTHON |= {*TF_FILES, TF_ENTRY, TF_V2, TF_FOLDERS, *SOLUTIONS}

# In place of feed/, and of the reader's own script:
TOY_SCRIPTS = {
    "feed/server.py": "import time\nprint('serving', flush=True)\ntime.sleep(100)",
    "train.py": "import sys\nprint('training with', sys.argv[1:])",
}
# SDK v2 writes True, and its toolkit splits values at spaces. The script must get them as under v3.
V2_GIVEN = V2.replace('{"epochs": 3}', '{"epochs": 3, "name": "a b", "amp": True}')
V2_TOLD = "training with ['--amp', 'true', '--epochs', '3', '--name', 'a b']"  # it sorts them
# A reader's pipeline, which says where it was run, and a training step that prints it. It is so
# quick that all steps might be over before a second data host is up: until then it takes longer.
# A worker holds two files at a time: none begins the next pass while much of this one is left.
TF_TRAINING = """
import json, time
import tensorflow as tf

hosts = set()

def make_dataset(pattern, batch_size):
    files = tf.data.Dataset.list_files(pattern, shuffle=False)
    dataset = files.interleave(tf.data.TFRecordDataset, cycle_length=2)
    dataset = dataset.map(lambda r: (r, tf.io.read_file("../../config/resourceconfig.json")))
    return dataset.batch(batch_size)

def train_step(batch):
    records, configs = batch
    config = json.loads(configs[0].numpy())
    where = config["current_group_name"], config["current_host"]
    print("batch", *where, *records.numpy(), flush=True)  # whole lines, on several ranks too
    hosts.add(where)
    if len(hosts) == 1:
        time.sleep(0.05)
"""
