"""The examples' jobs in environments like those of AWS's images, on hosts like AWS's.

`make containers` calls run.sh, which builds the environments and runs this file. Each image has a
list of its packages here (pytorch-2.12-cu130.txt, ...); container.py makes the hosts. The notebooks
run from top to bottom, with all their jobs, in local sizes. The other jobs here show what those do
not: two training hosts of two ranks each, names that resolve late, GPUs that the framework does not
see, and SDK v2, whose jobs AWS's toolkit starts.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from sagemaker.core.training.configs import InputData

from helpers import pages, ray
from helpers.data_service import put_numbers
from helpers.images import write_records
from helpers.jobs import TWO_GROUPS, Jobs, texts_in, upload
from helpers.pages import EXAMPLE, HELLO_NOTEBOOK, PYTORCH_NOTEBOOK, TENSORFLOW, TENSORFLOW_NOTEBOOK
from helpers.running import upload_images
from helpers.sdk_v2 import request_of_sdk_v2, start_with_a_channel_for_the_code
from shared import local_sagemaker

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
HELLO = HELLO_NOTEBOOK.parent / "code"
CONTAINER = [sys.executable, str(HERE / "container.py")]
BUILT = {name: ROOT / ".containers" / name for name in os.environ["CONTAINERS"].split()}
URI = {name: (HERE / f"{name}.txt").read_text().split()[1] for name in BUILT}
IMAGES = {URI[name]: str(environment) for name, environment in BUILT.items()}
TWO_AND_TWO = {"data_group": ("ml.c5.xlarge", 2), "dnn_group": ("ml.m5.xlarge", 2)}
PYTORCH, PYTORCH_CPU = "pytorch-2.12-cu130", "pytorch-2.12-cpu"
TENSORFLOW_221, HOROVOD = "tensorflow-2.21", "tensorflow-2.12"
COMMAND = "exec python launcher.py"


def needs(*names: str) -> pytest.MarkDecorator:
    """Skip a test if the environment of one of these images was not built."""
    missing = [name for name in names if name not in BUILT]
    return pytest.mark.skipif(bool(missing), reason=f"not built: {', '.join(missing)}")


def cases(*rows: tuple) -> list:
    """Return the rows as cases of a test, which need the image or images that each begins with."""
    names = [(row[0],) if isinstance(row[0], str) else row[0] for row in rows]
    return [pytest.param(*row, marks=needs(*n)) for row, n in zip(rows, names, strict=True)]


def describe(image: str) -> str:
    """Return an image's URI, without the registry, and the versions in its environment."""
    [packages] = Path(IMAGES[image]).glob("lib/python*/site-packages")
    versions = {
        d.name.lower().replace("_", "-"): d.version
        for d in metadata.distributions(path=[str(packages)])
    }
    python = subprocess.check_output([f"{IMAGES[image]}/bin/python", "-V"], text=True).strip()
    names = ("torch", "tensorflow-cpu", "horovod", "sagemaker-training")
    parts = [f"{name} {versions[name]}" for name in names if name in versions]
    return f"{image.split('/', 1)[1]} ({', '.join([python, *parts])})"


@pytest.fixture(scope="module")
def local() -> Iterator:
    """A local SageMaker whose images are the environments here, and whose hosts are containers."""
    with local_sagemaker.start(images=IMAGES, container=CONTAINER) as session:
        yield session


@pytest.fixture
def completed(jobs: Jobs, capsys: pytest.CaptureFixture):
    """Run a job in an image's environment, where it must complete; return its log."""

    def run(name: str, *args, **settings) -> str:
        job_name = jobs.create(*args, image=URI[name], max_runtime_seconds=200, **settings)
        return check(name, jobs.wait(job_name, seconds=240))

    def check(name: str, job: dict) -> str:
        log = "\n".join(jobs.log(job["TrainingJobName"]))
        with capsys.disabled():
            print(f"\n{describe(URI[name])}: {job['TrainingJobName']} {job['TrainingJobStatus']}")
        assert job["TrainingJobStatus"] == "Completed", f"{job['FailureReason']}\n{log[-8000:]}"
        return log

    run.check = check
    return run


# Our cells around a notebook's: the last one prints the image that each job ran in.
FIRST_CELL = """
from shared import local_sagemaker
containers = local_sagemaker.start({cluster}, images={images!r}, container={container!r})
"""
LAST_CELL = """
for job in containers.jobs.values():
    print(job.request["AlgorithmSpecification"]["TrainingImage"], job.job_name,
          job.record.training_job_status)
"""


LARGEST = {"ml.c6i.2xlarge": 2, "ml.g5.xlarge": 1}
LARGEST_TF = {"ml.c5.18xlarge": 2, "ml.p4d.24xlarge": 1}
# On this instance type the preflight would rightly fail, since there is no GPU.
NO_GPU = ('"dnn_group": "ml.g5.xlarge"', '"dnn_group": "ml.m5.xlarge"')
WITH_HOROVOD = ('DISTRIBUTION = "tf.distribute"', 'DISTRIBUTION = "horovod"')


@pytest.mark.parametrize(
    "name, notebook, largest_cluster, change",
    cases(
        ((PYTORCH, PYTORCH_CPU), HELLO_NOTEBOOK, None, NO_GPU),
        (PYTORCH, PYTORCH_NOTEBOOK, LARGEST, None),
        (TENSORFLOW_221, TENSORFLOW_NOTEBOOK, LARGEST_TF, None),
        (HOROVOD, TENSORFLOW_NOTEBOOK, LARGEST_TF, WITH_HOROVOD),
    ),
)
def test_notebook(
    name: str | tuple[str, ...],
    notebook: Path,
    largest_cluster: dict | None,
    change: tuple[str, str] | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    content = nbformat.read(notebook, as_version=4)
    first = FIRST_CELL.format(cluster=largest_cluster, images=IMAGES, container=CONTAINER)
    if change:
        [cell] = [cell for cell in content.cells if change[0] in cell.source]
        cell.source = cell.source.replace(*change)
    content.cells.insert(0, nbformat.v4.new_code_cell(first))
    content.cells.append(nbformat.v4.new_code_cell(LAST_CELL))
    resources = {"metadata": {"path": str(notebook.parent)}}
    NotebookClient(content, timeout=280, resources=resources).execute()
    ran = [line.split() for line in content.cells[-1].outputs[0].text.splitlines()]
    assert ran
    for image, job, status in ran:
        assert image in IMAGES, f"{job} asked for {image}, which has no environment here"
        assert status == "Completed"
        with capsys.disabled():
            print(f"\n{describe(image)}: {job} {status}")


# ---- two training hosts of two ranks each, whose names resolve late


@needs(PYTORCH)
def test_pytorch_on_two_hosts_with_names_that_resolve_late(completed):
    """A Dataset of 47 MB travels; two ranks' prefetched batches just fit into /dev/shm."""
    files = texts_in(EXAMPLE / "code")
    data = upload_images("late", count=60_000)  # 47 MB, as MNIST
    log = completed(
        PYTORCH,
        files,
        COMMAND,
        TWO_AND_TWO,
        hyperparameters={"model": "small", "batch-size": 2048, "augment": 0, "workers": 2,
                         "processes-per-host": 2, "max-steps": 6, "epochs": 100, "log-every": 3},
        environment={"HETERO_TOKEN": "a secret", "CONTAINER_NAMES_AFTER": "30"},
        input_data_config=[InputData(channel_name="training", data_source=data)],
    )  # fmt: skip
    assert "training finished after step 6" in log


@needs(PYTORCH)
def test_ray(completed):
    """Two hosts of each group; /dev/shm is too small for Ray, and names resolve late."""
    told = {"environment": {"HETERO_TOKEN": "a secret", "CONTAINER_NAMES_AFTER": "20"}}
    told["input_data_config"] = [
        InputData(channel_name="training", data_source=ray.upload_images())
    ]
    log = completed(PYTORCH, ray.FILES, ray.COMMAND, TWO_AND_TWO, **told)
    assert len(re.findall(r"epoch=\d rank=\d samples=160", log)) == 4


# Sends a byte a second to a port of rank 0's host, from when it opens to the job's end.
STRANGER = """
import socket, threading, time
import hetero

def bother():
    cluster = hetero.read_cluster()
    leader = cluster.address(cluster.groups["dnn_group"][0]), cluster.base_port + PORT
    while True:
        try:
            with socket.create_connection(leader) as connection:
                print("stranger connected", flush=True)
                while True:
                    connection.send(b"x")
                    time.sleep(1)
        except OSError:
            time.sleep(0.2)

threading.Thread(target=bother, daemon=True).start()
"""


@pytest.mark.parametrize(
    "name, distribution, port",
    cases((TENSORFLOW_221, "tf.distribute", 14), (HOROVOD, "horovod", 1)),  # 1: its rendezvous
)
def test_tensorflow_on_two_hosts_with_a_stranger(
    completed, tmp_path: Path, name: str, distribution: str, port: int
):
    write_records(tmp_path, files=48, records=10, classes=10)
    data = upload(tmp_path, "s3://records/data")
    files = texts_in(TENSORFLOW / "code")
    title, rest = files["train_data.py"].split("import arguments", 1)
    files["train_data.py"] = f"{title}{STRANGER.replace('PORT', str(port))}\nimport arguments{rest}"
    log = completed(
        name,
        files,
        COMMAND,
        TWO_AND_TWO,
        hyperparameters={"model": "small", "batch-size": 8, "processes-per-host": 2,
                         "max-steps": 40, "log-every": 10, "distribution": distribution},
        environment={"HETERO_TOKEN": "a secret", "CONTAINER_NAMES_AFTER": "30",
                     "CONTAINER_LOCALHOST": "aws"},
        input_data_config=[InputData(channel_name="training", data_source=data)],
    )  # fmt: skip
    assert "training finished after step 40" in log and "stranger connected" in log


@needs(HOROVOD)
def test_pipelines_with_random_numbers_and_state():
    """tests/tf.data.service.sagemaker/ counts the same pipelines with the newest TensorFlow."""
    command = [f"{BUILT[HOROVOD]}/bin/python", ROOT / "tests" / "helpers" / "carried.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert "all right with TensorFlow 2.12" in done.stdout, done.stdout + done.stderr[-4000:]


# ---- what must fail, and say why


@pytest.mark.parametrize(
    "name, example, words",
    cases(
        (PYTORCH, EXAMPLE, "but torch sees 0: driver"),
        (TENSORFLOW_221, TENSORFLOW, "but TensorFlow sees 0: driver"),
    ),
)
def test_a_gpu_that_the_framework_misses_ends_the_job(
    jobs: Jobs, name: str, example: Path, words: str
):
    """SM_NUM_GPUS is set here, since SageMaker counts with nvidia-smi, which is missing."""
    files = texts_in(example / "code")
    job = jobs.run(
        files,
        f"export SM_NUM_GPUS=1; {COMMAND}",
        image=URI[name],
        hyperparameters={"data-mode": "synthetic", "model": "small", "max-steps": 5},
    )
    assert job["TrainingJobStatus"] == "Failed"
    assert words in job["FailureReason"] and "CUDA" in job["FailureReason"]
    assert not any("step=" in line for line in jobs.log(job["TrainingJobName"]))


# ---- the preflight, on hosts that have a network and names of their own

PREFLIGHT = (HELLO / "preflight.py").read_text()


@needs(PYTORCH)
def test_preflight_with_names_that_resolve_late(completed):
    """Two training hosts, so that the all-reduce goes from one to the other."""
    log = completed(
        PYTORCH,
        {"preflight.py": PREFLIGHT},
        "exec python preflight.py",
        TWO_AND_TWO,
        environment={"HETERO_TOKEN": "a secret", "CONTAINER_NAMES_AFTER": "30"},
    )
    assert "All checks passed." in log
    assert re.search(r"^/dev/shm +64 MiB +64 MiB", log, re.MULTILINE)
    assert re.search(r"^hostname +aws, unresolved +aws, unresolved", log, re.MULTILINE)
    assert re.search(r"^network interface +eth0 +eth0", log, re.MULTILINE)
    assert re.search(r"^ports reached +12 of 12 +12 of 12", log, re.MULTILINE)
    assert len(re.findall(r"gloo, 2 ranks, \d", log)) == 2


# Lets nothing out of the training host, as if no rule allowed traffic between the hosts.
DEAF = """
import json, pathlib, socket, subprocess
config = json.loads(pathlib.Path("/opt/ml/input/config/resourceconfig.json").read_text())
if config["current_group_name"] == "dnn_group":
    for host in set(config["hosts"]) - {config["current_host"]}:
        subprocess.run(["ip", "route", "add", "blackhole", socket.gethostbyname(host)], check=True)
"""


@needs(PYTORCH)
def test_preflight_without_a_way_between_the_hosts(jobs: Jobs):
    text = PREFLIGHT.replace("JOIN_SECONDS = 600", "JOIN_SECONDS = 10")
    job = jobs.run(
        {"preflight.py": text, "deaf.py": DEAF},
        "python deaf.py; exec python preflight.py",
        TWO_GROUPS,
        image=URI[PYTORCH],
        environment={"HETERO_TOKEN": "a secret"},
    )
    assert job["TrainingJobStatus"] == "Failed"
    assert "the job's security group must allow all traffic from itself" in job["FailureReason"]
    log = " ".join("\n".join(jobs.log(job["TrainingJobName"])).split())
    assert re.search(r"algo-\d \(dnn_group\) cannot be reached, timed out", log)
    assert re.search(r"algo-\d \(data_group\) did not report", log)


# ---- SDK v2, and AWS's toolkit


@needs(HOROVOD)
def test_hello_world_with_an_old_toolkit(completed):
    """The image with Horovod has one. Both ways to read the cluster must agree."""
    log = completed(
        HOROVOD, {"train.py": (HELLO / "train.py").read_text()}, "exec python train.py", TWO_GROUPS
    )
    assert log.count("Read by the toolkit and by hand") == 2
    assert log.count("This image's toolkit does not know: topology.") == 2


@pytest.mark.parametrize(
    "name, lines, module",
    cases(
        (PYTORCH, pages.V2_GIVEN, "sagemaker_pytorch_container"),
        (TENSORFLOW_221, pages.TF_V2, "sagemaker_tensorflow_container"),
    ),
)
def test_lines_for_sdk_v2(
    completed,
    jobs: Jobs,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    lines: str,
    module: str,
):
    """SDK v2 makes the request, and the image's toolkit starts the launcher.

    The image's own entry point, which changes gethostname() and calls `train`, is missing here.
    """
    folder = tmp_path / "project"
    for path, text in project(name).items():
        (folder / "code" / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / "code" / path).write_text(text)
    monkeypatch.chdir(folder)
    request = request_of_sdk_v2(lines)
    channels = {}
    if "InputDataConfig" in request:
        channels["training"] = put_numbers(tmp_path, 1500).data_source
    request["Environment"]["SAGEMAKER_TRAINING_MODULE"] = f"{module}.training:main"
    request["AlgorithmSpecification"]["TrainingImage"] = URI[name]
    start_with_a_channel_for_the_code(request, "train", **channels)
    completed.check(name, jobs.wait(request["TrainingJobName"], seconds=200))
    if name == PYTORCH:
        assert jobs.log(request["TrainingJobName"]).count(pages.V2_TOLD) == 1


def project(name: str) -> dict[str, str]:
    """Return a reader's code/: what the example's README says, and the reader's scripts."""
    if name == PYTORCH:
        files = {"entry.py": pages.ENTRY, **pages.TOY_SCRIPTS}
        runtime = EXAMPLE
    else:
        training = pages.TF_TRAINING.replace("CONFIG", "/opt/ml/input/config/resourceconfig.json")
        files = {"train.py": pages.TF_FIT, "entry.py": pages.TF_ENTRY, "my_training.py": training}
        files |= {"my_functions.py": pages.MY_FUNCTIONS, **texts_in(TENSORFLOW / "code", "service")}
        runtime = TENSORFLOW
    return {**texts_in(runtime / "code", "hetero"), **files}
