"""The lines that the TensorFlow example's README tells people to copy, run as they stand."""

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sagemaker.core.training.configs import InputData

from helpers import pages
from helpers.data_service import data_hosts, put_numbers
from helpers.images import image
from helpers.jobs import Jobs, texts_in
from helpers.sdk_v2 import request_of_sdk_v2

pytestmark = pytest.mark.usefixtures("nothing_is_left")
WORKERS = [2, *(pytest.param(n, marks=pytest.mark.thorough) for n in (1, 3))]


def trained_on(log: list[str]) -> list[tuple[int, int]]:
    """Return what Tell has printed: pairs of a number, and the host or process it came from."""
    pairs = re.findall(r"\[(\d+) (\d+)\]", "\n".join(log))
    return [(int(number), int(who)) for number, who in pairs]


TRAINING = pages.TF_TRAINING.replace("CONFIG", "../../config/resourceconfig.json")


def train_with_tensorflow(jobs: Jobs, data: InputData | None, files: dict, options: str) -> list:
    """Run lines of TensorFlow's README on two data hosts; return the log."""
    copied = texts_in(pages.TENSORFLOW / "code", "hetero", "service", "ranks")
    files = {"my_training.py": TRAINING, "my_functions.py": pages.MY_FUNCTIONS, **copied, **files}
    job = jobs.run(
        files,
        f"exec python -m hetero --spare-cores 0 {options} train.py",
        {"data_group": ("ml.c5.xlarge", 2), "dnn_group": ("ml.m5.xlarge", 1)},
        environment={"HETERO_TOKEN": "a secret"},
        input_data_config=[data] if data else None,
    )
    assert job["TrainingJobStatus"] == "Completed", job["FailureReason"]
    return jobs.log(job["TrainingJobName"])


@pytest.mark.thorough
def test_lines_for_one_rank(jobs: Jobs, tmp_path: Path):
    """Two devices in one process get each sample once in each of three epochs."""
    assert pages.count_lines(pages.TF_FIT) < 20
    options = pages.TF_COMMAND.removeprefix("python -m hetero ").removesuffix(" train.py")
    data = put_numbers(tmp_path, 1500)
    log = train_with_tensorflow(jobs, data, {"train.py": pages.TF_FIT}, options)
    pairs = trained_on(log)
    assert sorted(number for number, _ in pairs) == sorted([*range(1500)] * 3)
    data_hosts = re.findall(r"host=algo-(\d+) group=data_group", "\n".join(log))
    assert {host for _, host in pairs} <= set(map(int, data_hosts))


@pytest.mark.thorough
def test_lines_for_several_ranks(jobs: Jobs, tmp_path: Path):
    """No record comes twice in a pass over the data."""
    arrive = 2 * 300 * 64  # ranks, steps, batch size
    data = put_numbers(tmp_path, 2 * arrive)  # so that the first pass does not end
    options = "--ranks 2 --serve service/serve.py --needed first"
    log = train_with_tensorflow(jobs, data, {"train.py": pages.TF_RANKS}, options)
    numbers = [number for number, _ in trained_on(log)]
    assert len({*numbers}) == len(numbers) == arrive


@pytest.mark.thorough
def test_lines_for_python_functions(jobs: Jobs, tmp_path: Path):
    """Four processes of each data host call them."""
    [line] = [line for line in pages.TF_MAP.splitlines() if not line.startswith("#")]
    line += "\n    dataset = dataset.map(lambda x, y: (tf.ensure_shape(x, [2]), y))"
    batch = "    return dataset.batch("
    training = TRAINING.replace(batch, f"    {line}\n{batch}")
    files = {"train.py": pages.TF_FIT, "serve.py": pages.TF_SERVE, "my_training.py": training}
    data = put_numbers(tmp_path, 3000)
    pairs = trained_on(train_with_tensorflow(jobs, data, files, "--serve serve.py --needed first"))
    assert sorted(number for number, _ in pairs) == sorted([*range(3000)] * 3)
    assert len({process for _, process in pairs}) > 2


TORCH_DATASET = """
import numpy as np

class MyDataset:
    def __len__(self):
        return 400

    def __getitem__(self, index):
        return np.float32([index, 0]), np.float32(0)
"""


@pytest.mark.thorough
def test_lines_for_keras_on_pytorch_s_loader(jobs: Jobs):
    training = pages.TF_TRAINING.replace(
        "from service import numpy_function\nimport my_functions\n", ""
    )
    files = {"train.py": pages.TF_TORCH, "my_training.py": training + TORCH_DATASET}
    files |= texts_in(pages.EXAMPLE / "code", "feed")
    pairs = trained_on(train_with_tensorflow(jobs, None, files, "--serve feed/server.py"))
    assert sorted(number for number, _ in pairs) == sorted([*range(400)] * 3)


@pytest.mark.parametrize("workers", WORKERS)
def test_lines_for_images_in_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int):
    """Workers give each image once, with its own label."""
    from service import distribute

    classes, labels = 5, {}
    for number in range(300):
        folder = tmp_path / "images" / f"class {number % classes}"
        folder.mkdir(parents=True, exist_ok=True)
        picture = image(number)
        Image.fromarray(picture).save(folder / f"{number}.png")
        labels[picture.tobytes()] = number % classes
    monkeypatch.chdir(tmp_path)
    said = {}
    exec(pages.TF_FOLDERS.replace("(256, 256)", "(32, 32)"), said)
    with data_hosts(workers):
        batches = distribute(said["dataset"]).as_numpy_iterator()
        seen = [
            (picture.round().astype(np.uint8).tobytes(), int(label))
            for pictures, numbers in batches
            for picture, label in zip(pictures, numbers, strict=True)
        ]
    assert sorted(seen) == sorted(labels.items())


@pytest.mark.parametrize("workers", WORKERS)
def test_lines_for_random_numbers_that_can_be_repeated(tmp_path: Path, workers: int):
    """Two runs draw the same numbers, and others in each pass."""
    import tensorflow as tf

    from service import distribute

    files = [f"{tmp_path}/{file}.tfrecord" for file in range(5)]
    for file, name in enumerate(files):
        with tf.io.TFRecordWriter(name) as writer:
            for number in range(20):
                writer.write(b"%d" % (20 * file + number))
    said = {"tf": tf, "files": files, "PASSES": 2, "SEED": 7}
    exec(pages.TF_SEED, said)
    runs = []
    for _ in range(2):
        with data_hosts(workers):
            batches = distribute(said["dataset"].batch(8)).unbatch().as_numpy_iterator()
            runs.append(sorted((int(record), float(number)) for record, number in batches))
    assert runs[0] == runs[1] and len({*runs[0]}) == 200
    assert [record for record, _ in runs[0]] == sorted([*range(100)] * 2)


@pytest.mark.parametrize("workers", WORKERS)
def test_lines_for_time_series(workers: int):
    import tensorflow as tf

    from service import distribute

    said = {"tf": tf, "series": np.arange(200) ** 2, "LENGTH": 5}
    exec(pages.TF_SERIES, said)
    with data_hosts(workers):
        samples = distribute(said["dataset"].batch(8)).unbatch().as_numpy_iterator()
        seen = sorted([*map(int, sequence), int(after)] for sequence, after in samples)
    assert seen == [[n**2 for n in range(start, start + 6)] for start in range(195)]


@pytest.mark.thorough
def test_lines_for_sdk_v2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "entry.py").touch()
    monkeypatch.chdir(tmp_path)
    request = request_of_sdk_v2(pages.TF_V2)
    groups = {g["InstanceGroupName"] for g in request["ResourceConfig"]["InstanceGroups"]}
    assert groups == {"data_group", "dnn_group"} and "HETERO_TOKEN" in request["Environment"]
    names = set(request["HyperParameters"])  # the toolkit's, which it does not pass on
    assert names and all(name.startswith("sagemaker_") for name in names)
    [channel] = request["InputDataConfig"]
    assert channel["ChannelName"] == "training"
    assert "InstanceGroupNames" not in channel["DataSource"]["S3DataSource"]  # so all groups get it
