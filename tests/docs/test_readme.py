"""The lines that README files and docs/ tell people to copy, run as they stand.

test_readme_tensorflow.py has TensorFlow's; some pages have test files of their own in this folder.
"""

import difflib
import io
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import boto3
import numpy as np
import pyarrow
import pytest
import webdataset as wds
from PIL import Image
from pyarrow import parquet
from sagemaker.core.training.configs import InputData

from helpers import pages
from helpers.jobs import Jobs, texts_in, upload
from helpers.mnist import idx
from helpers.running import log_of
from helpers.sdk_v2 import request_of_sdk_v2, start_with_a_channel_for_the_code

pytestmark = pytest.mark.usefixtures("nothing_is_left")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A reader's project as the working directory: code/ as README says, with two scripts."""
    code = tmp_path / "code"
    code.mkdir()
    shutil.copytree(pages.EXAMPLE / "code" / "hetero", code / "hetero")
    (code / "entry.py").write_text(pages.ENTRY)
    (code / "feed").mkdir()
    for name, text in pages.TOY_SCRIPTS.items():
        (code / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_what_is_to_be_copied_is_short():
    for lines in (pages.V3, pages.ENTRY + pages.V2):
        assert pages.count_lines(lines) < 30
    for blocks, most in ((pages.CHECKPOINTS, 20), (pages.STEPS, 26)):  # with the title
        assert max(map(pages.count_lines, blocks.values())) <= most


def test_readme_shows_how_after_differs_from_before():
    lines = [text.splitlines(keepends=True) for text in (pages.BEFORE, pages.AFTER)]
    _, _, *shown = difflib.unified_diff(*lines, n=1)
    assert "".join(line for line in shown if not line.startswith("@@")) == pages.DIFF
    assert len(re.findall(r"^\+(?!.*import)", pages.DIFF, re.M)) == 1


def test_lines_for_the_loader(jobs: Jobs, tmp_path: Path):
    """A training script that is moved over, before.py to after.py, keeps its losses."""
    images = np.random.default_rng(0).integers(0, 256, (192, 28, 28))
    (tmp_path / "train-images-idx3-ubyte").write_bytes(idx(images))
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(images[:, 0, 0] % 10))
    before = subprocess.check_output(
        [sys.executable, pages.EXAMPLE / "before.py"],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",  # several would take turns, and busy cores meanwhile
            "PYTHONPATH": str(pages.EXAMPLE / "code"),
            "SM_CHANNEL_TRAINING": str(tmp_path),
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),  # or it would litter TMPDIR
        },
        text=True,
    )

    data = upload(tmp_path, "s3://noise/train")
    mine = ("dataset.py", "model.py", "requirements.txt")
    log = log_of(
        jobs,
        pages.AFTER,
        serve=None,
        files={name: (pages.EXAMPLE / "code" / name).read_text() for name in mine},
        groups=TWO_DATA_HOSTS,
        input_data_config=[InputData(channel_name="training", data_source=data)],
    )
    assert not any("a secret" in line for line in log)  # the token
    told = [line for line in log if line.startswith("epoch=")]
    losses, expected = (
        [float(line.partition("loss=")[2]) for line in lines]
        for lines in (told, before.split("\n")[:-1])
    )
    assert losses == pytest.approx(expected, abs=2e-3) and len({*losses}) == 3


TWO_DATA_HOSTS = {"data_group": ("ml.c5.xlarge", 2), "dnn_group": ("ml.m5.xlarge", 1)}
# A reader's script around README's lines, which prints the host that prepared each sample.
STREAM = """
import itertools, os
import torch.distributed as dist
from torch.utils.data import DataLoader
from feed import RemoteDataset

dist.init_process_group("gloo")
rank, world_size, steps = dist.get_rank(), dist.get_world_size(), 1000
folder, epochs = os.environ["SM_CHANNEL_TRAINING"], 2

def host():
    assert dist.get_rank() in (0, 1)  # on data hosts, too
    return int(os.environ["HETERO_SERVE_AT"].split(":")[0].split(".")[-1])
"""
WITH_WEB_DATASET = """
import webdataset as wds
urls, samples = os.path.join(folder, "{00..31}.tar"), 4

def augment(image):
    assert image.shape == (3, 8, 8)
    return image + host()

LINES
for epoch in range(epochs):
    for images, labels in loader:
        hosts = images[:, 0, 0, 0].round().int().tolist()
        print(f"{rank=} {epoch=}", *zip(labels.tolist(), hosts), flush=True)
dist.destroy_process_group()
"""
WITH_HUGGING_FACE = """
from datasets import load_dataset
from datasets.distributed import split_dataset_by_node
files = sorted(os.path.join(folder, name) for name in os.listdir(folder))
prepare = lambda row: {"host": host()}

def train(batch):
    print(f"{rank=} {epoch=}", *zip(batch["x"].tolist(), batch["host"].tolist()), flush=True)

LINES
dist.destroy_process_group()
"""


def files_of_tar(folder: Path) -> None:
    for shard in range(32):
        with wds.TarWriter(str(folder / f"{shard:02}.tar")) as writer:
            for number in range(4 * shard, 4 * shard + 4):
                file = io.BytesIO()
                Image.new("RGB", (8, 8)).save(file, "PNG")
                writer.write({"__key__": str(number), "jpg": file.getvalue(), "cls": number})


def files_of_parquet(folder: Path) -> None:
    for file in range(32):
        table = pyarrow.table({"x": [*range(4 * file, 4 * file + 4)]})
        parquet.write_table(table, folder / f"{file:02}.parquet")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("write", "script", "lines"),
    [
        (files_of_tar, WITH_WEB_DATASET, pages.WEB_DATASET),
        (files_of_parquet, WITH_HUGGING_FACE, pages.HUGGING_FACE),
    ],
)
def test_lines_for_streams(jobs: Jobs, tmp_path: Path, write, script, lines):
    """In a job of two ranks, two data hosts prepare each sample once per epoch."""
    write(tmp_path)
    data = upload(tmp_path, f"s3://{write.__name__.replace('_', '-')}/train")
    log = log_of(
        jobs,
        STREAM + script.replace("LINES", lines),
        "--spare-cores 0 --ranks 2",
        serve=None,
        groups=TWO_DATA_HOSTS,
        input_data_config=[InputData(channel_name="training", data_source=data)],
    )
    log = "\n".join(log)
    orders = set()
    for epoch in range(2):
        seen = re.findall(rf"rank=(\d) epoch={epoch} (.*)", log)
        pairs = [pair for _, text in seen for pair in re.findall(r"\((\d+), (\d+)\)", text)]
        assert sorted(int(number) for number, _ in pairs) == [*range(128)]
        assert len({host for _, host in pairs}) == 2
        orders.add((*(text for rank, text in seen if rank == "0"),))
    assert len(orders) == 2


@pytest.mark.thorough
def test_lines_for_torchrun(jobs: Jobs):
    """torchrun starts four ranks on two hosts."""
    train = "import torch\nimport torch.distributed as dist\n"
    train += "dist.init_process_group('gloo')\nranks = [None] * dist.get_world_size()\n"
    train += "dist.all_gather_object(ranks, dist.get_rank())\nprint(f'ranks {ranks}')\n"
    train += "dist.destroy_process_group()\n"  # without it torch sometimes aborts at the end
    log = log_of(jobs, train, files={"launcher.py": pages.TORCHRUN})
    assert "\n".join(log).count("ranks [0, 1, 2, 3]") == 4


def test_lines_for_sdk_v3(jobs: Jobs, project: Path):
    shutil.copy(pages.EXAMPLE / "code" / "requirements.txt", project / "code")
    boto3.client("s3").create_bucket(Bucket="any")
    boto3.client("s3").put_object(Bucket="any", Key="data/file", Body=b"")
    names = {"role": jobs.role, "image": "123456789012.dkr.ecr.us-east-1.amazonaws.com/any:1"}
    names["data"] = "s3://any/data"
    exec(compile(pages.V3, "README.md", "exec"), names)
    name = names["trainer"]._latest_training_job.training_job_name
    job = jobs.wait(name)
    assert job["TrainingJobStatus"] == "Completed", job["FailureReason"]
    log = jobs.log(name)
    assert log.count("training with ['--epochs', '3']") == 1
    assert log.count("serving") == 2


# The toolkit waits until the hosts' names resolve, which they do on AWS only.
TOOLKIT = (
    "import socket; socket.gethostbyname = lambda host: host; "
    "from sagemaker_training.cli.train import main; main()"
)


@pytest.mark.thorough
def test_sdk_v2_with_a_checkpoint_path(project: Path, capfd: pytest.CaptureFixture):
    """With instance groups it fails without the argument that docs/troubleshooting.md names."""
    paths = 'checkpoint_s3_uri="s3://any/c", checkpoint_local_path="/opt/ml/checkpoints",'
    given = pages.V2.replace("    max_run=", f"    {paths}\n    max_run=")
    with pytest.raises(subprocess.CalledProcessError):
        request_of_sdk_v2(given)
    said = "".join(capfd.readouterr())
    assert "'>' not supported between instances of 'NoneType' and 'int'" in said
    request = request_of_sdk_v2(given.replace(paths, f"{paths} debugger_hook_config=False,"))
    assert request["CheckpointConfig"]["S3Uri"] == "s3://any/c"


@pytest.mark.thorough
def test_lines_for_sdk_v2(jobs: Jobs, project: Path):
    """SDK v2 makes the request, and AWS's toolkit runs it as in framework images."""
    request = request_of_sdk_v2(pages.V2_GIVEN)
    [data_group, _] = request["ResourceConfig"]["InstanceGroups"]
    data_group["InstanceCount"] = 1  # the toolkit takes seconds on each host
    start_with_a_channel_for_the_code(request, f"python -c '{TOOLKIT}'")
    name = request["TrainingJobName"]
    job = jobs.wait(name)
    assert job["TrainingJobStatus"] == "Completed", job["FailureReason"]
    log = jobs.log(name)
    assert log.count(pages.V2_TOLD) == 1
    assert log.count("serving") == 1


TELL_STATUS = """
    from sagemaker.core.resources import TrainingJob

    print(*[job.training_job_status for job in TrainingJob.get_all()])
"""


def test_lines_for_local_jobs(tmp_path: Path):
    """In a separate process, in which these lines start the local SageMaker."""
    train = "import os\nassert os.listdir(os.environ['SM_CHANNEL_TRAINING']) == ['a']\n"
    train += "print('said by the training')"
    files = {**texts_in(pages.EXAMPLE / "code", "hetero"), **pages.TOY_SCRIPTS, "train.py": train}
    files = {f"code/{name}": text for name, text in files.items()} | {"data/a/b.txt": "any"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", pages.LOCAL + TELL_STATUS],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(pages.ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "Completed"
    assert "said by the training" in done.stderr  # printed by the SDK while it waits


def test_lines_for_one_s_own_script(tmp_path: Path):
    """With a copy of measured.py, and nothing else from this repository."""
    shutil.copy(pages.ROOT / "shared" / "measured.py", tmp_path)
    (tmp_path / "train.py").write_text(
        "import time\nfrom torch.utils.data import DataLoader\n"
        f"loader = DataLoader(range(100))\n{pages.MEASURED}    time.sleep(0.001)\n"
    )
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert re.search(r"step time .* ms \(.*\nwithout data .* ms \(", done.stdout)
    assert "clusters      the instance type is unknown: pass instance_type" in done.stdout


def wheel(folder: Path) -> bytes:
    """Return a wheel such as `pip download` fetches."""
    info = "offline_package-1.0.dist-info"
    with zipfile.ZipFile(folder / "any.whl", "w") as file:
        file.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: offline-package\nVersion: 1.0"
        )
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any")
        file.writestr(f"{info}/RECORD", "")
    return (folder / "any.whl").read_bytes()


def test_requirements_without_internet(jobs: Jobs, tmp_path: Path):
    """The lines that job.md puts before the requirements let pip find wheels in code/."""
    [lines] = re.findall(
        r"```text\n(--no-index\n.*?)```", (pages.EXAMPLE / "job.md").read_text(), re.S
    )
    files = {"train.py": "", "requirements.txt": f"{lines}offline-package==1.0\n"}
    files["offline_package-1.0-py3-none-any.whl"] = wheel(tmp_path)
    assert jobs.run(files, "exec python train.py")["TrainingJobStatus"] == "Completed"
