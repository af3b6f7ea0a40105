"""The PyTorch example's data set and training scripts, run as its users run them.

test_parallelism.py has other ways to train on several ranks, and test_spot.py an interrupted job.
"""

import gzip
import math
import re
import signal
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

import train_dnn
from dataset import MEAN, STD, MnistDataset, milliseconds_per_sample
from helpers.mnist import idx, write_digits
from helpers.training import STEP_LINE, run, start, torchrun, train, weights_in

TRAIN_IMAGES, BATCH_SIZE = 630, 16
STEPS_PER_EPOCH, TOTAL_STEPS = 40, 80  # the last batch of each epoch is smaller
TRAINING = ["--model", "mnist", "--batch-size", str(BATCH_SIZE), "--epochs", "2", "--seed", "7"]
TRAINING += ["--log-every", "10", "--augment", "2"]


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_digits(tmp_path_factory.mktemp("digits"), TRAIN_IMAGES)


def assert_same_model(folder: Path, reference: Path) -> None:
    torch.testing.assert_close(weights_in(folder), weights_in(reference), rtol=0, atol=0)


# ---- the data set


def test_plain_and_gzipped_files_hold_the_images_written(digits: Path):
    random = np.random.default_rng(0)
    dataset, test_set = MnistDataset(digits), MnistDataset(digits, train=False)
    assert (len(dataset), len(test_set)) == (TRAIN_IMAGES, 100)
    assert [label for _, label in dataset] == random.integers(0, 10, TRAIN_IMAGES).tolist()

    raw = (digits / "train-images-idx3-ubyte").read_bytes()
    written = np.frombuffer(raw, np.uint8, offset=16).reshape(-1, 1, 28, 28)
    image, label = dataset[5]
    assert (image.dtype, image.shape, type(label)) == (torch.float32, (1, 28, 28), int)
    np.testing.assert_allclose(image.numpy(), (written[5] / 255 - MEAN) / STD, atol=1e-5)


GZIPPED = "train-images-idx3-ubyte.gz"


@pytest.mark.parametrize(
    "name, content, message",
    [
        (None, b"", f"neither train-images-idx3-ubyte nor {GZIPPED} in"),
        (GZIPPED, gzip.compress(bytes(99), mtime=0)[:-9], f"{GZIPPED} is not a complete gzip file"),
        ("train-images-idx3-ubyte", struct.pack(">4I", 0x0D03, 2, 28, 28) + bytes(1568),
         "0x0d03 instead of"),
        ("train-images-idx3-ubyte", struct.pack(">4I", 0x0803, 2, 28, 28) + bytes(1567),
         "1567 bytes of data"),
        ("train-images-idx3-ubyte", b"\0\0", "instead of 0x0803"),
        ("train-images-idx3-ubyte", struct.pack(">4I", 0x0803, 2, 14, 56) + bytes(1568),
         "14x56 pixels"),
        ("train-images-idx3-ubyte", idx(np.zeros((3, 28, 28))), "3 train images but 2 labels"),
    ],
)  # fmt: skip
def test_damaged_files_are_named(tmp_path: Path, name: str | None, content: bytes, message: str):
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(np.zeros(2)))
    if name:
        (tmp_path / name).write_bytes(content)
    with pytest.raises((FileNotFoundError, ValueError), match=message) as caught:
        MnistDataset(tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("augment", [1, 2, 5])
def test_augmentation_varies_the_image_and_repeats_with_the_seed(digits: Path, augment: int):
    dataset, original = MnistDataset(digits, augment=augment), MnistDataset(digits)[0][0]
    torch.manual_seed(3)
    first, second = dataset[0][0], dataset[0][0]
    torch.manual_seed(3)
    assert torch.equal(dataset[0][0], first)
    assert not torch.equal(first, second)
    # Still the same digit: much closer to its original than to a blank or a different image.
    distance = (first - original).square().mean()
    assert 0 < distance < 0.7 * (MnistDataset(digits)[1][0] - original).square().mean()
    assert first.shape == original.shape
    assert original.min() - 1e-5 <= first.min() and first.max() <= original.max() + 1e-5


def test_measuring_a_sample_disturbs_nothing(digits: Path):
    torch.manual_seed(0)
    expected, threads = torch.rand(3), torch.get_num_threads()
    torch.manual_seed(0)
    weak = milliseconds_per_sample(MnistDataset(digits, augment=1))
    strong = milliseconds_per_sample(MnistDataset(digits, augment=8))
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_num_threads() == threads
    assert strong > 3 * weak > 0


# ---- training


@pytest.fixture(scope="module")
def local_run(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return the folder of the model that local mode trains, and the run's output."""
    folder = tmp_path_factory.mktemp("local")
    arguments = ["--train-dir", digits, "--test-dir", digits, "--workers", "1"]
    return folder, train(*TRAINING, *arguments, "--model-dir", folder)


def test_local_training_learns_and_says_so(local_run: tuple[Path, str]):
    folder, output = local_run
    lines = STEP_LINE.findall(output)
    assert [(int(line[0]), int(line[1])) for line in lines] == [
        (step, 1 + (step - 1) // STEPS_PER_EPOCH) for step in range(10, TOTAL_STEPS + 1, 10)
    ]
    losses = [float(line[2]) for line in lines]
    assert losses[-1] < 0.6 * losses[0]
    for _, _, _, step_time, data_wait, samples_per_s in lines[:3]:
        assert 0 <= float(data_wait) <= float(step_time)
        assert float(samples_per_s) == pytest.approx(1000 * BATCH_SIZE / float(step_time), rel=0.01)
    assert re.search(r"^data_ms_per_sample=\d+\.\d{3}$", output, re.MULTILINE)
    assert float(re.search(r"^test_accuracy=([\d.]+)$", output, re.MULTILINE)[1]) > 0.6
    assert re.search(r"^training finished after step 80: loss [\d.]+$", output, re.MULTILINE)
    assert weights_in(folder)["fc2.bias"].shape == (10,)


@pytest.fixture
def data_hosts() -> Iterator[str]:
    """The addresses of two data hosts, which must end cleanly on SIGTERM."""
    with (
        socket.create_server(("127.0.0.1", 0)) as one,
        socket.create_server(("127.0.0.1", 0)) as two,
    ):
        addresses = [f"127.0.0.1:{server.getsockname()[1]}" for server in (one, two)]
    hosts = [start("-m", "feed.server", address, "--workers", "1") for address in addresses]
    yield ",".join(addresses)
    for host in hosts:
        host.terminate()
    for host, address in zip(hosts, addresses, strict=True):
        output, _ = host.communicate(timeout=60)
        assert f"serving at {address} workers=1\n" in output
        assert "feed: a Dataset" in output  # both took part
        assert host.returncode == 0


def test_two_data_hosts_train_the_same_model_as_local_mode(local_run, data_hosts, digits, tmp_path):
    arguments = ["--data-mode", "service", "--train-dir", digits, "--model-dir", tmp_path]
    output = train(*TRAINING, *arguments, data_hosts=data_hosts)
    assert len(STEP_LINE.findall(output)) == 8
    assert re.search(r"^data_ms_per_sample=\d+\.\d{3}$", output, re.MULTILINE)
    assert_same_model(tmp_path, local_run[0])


@pytest.mark.thorough
def test_run_resumed_after_sigterm_equals_the_uninterrupted_one(local_run, digits, tmp_path):
    command = [*TRAINING, "--train-dir", digits, "--workers", "1"]
    command += ["--checkpoint-dir", tmp_path, "--model-dir", tmp_path]
    train(*command, "--max-steps", "50", "--checkpoint-every", "50")  # into the second epoch
    (tmp_path / "model.pt").unlink()

    stopped = start("train_dnn.py", *command)
    assert stopped.stdout.readline().startswith("torch=")
    assert stopped.stdout.readline().startswith("data_ms_per_sample=")
    assert stopped.stdout.readline() == f"resumed from {tmp_path} at step 50\n"
    stopped.send_signal(signal.SIGTERM)
    _, errors = stopped.communicate(timeout=60)
    assert stopped.returncode != 0
    step = int(re.search(r"stopped by SIGTERM after step (\d+)$", errors)[1])
    assert 50 < step < TOTAL_STEPS
    assert not (tmp_path / "model.pt").exists()

    assert f"resumed from {tmp_path} at step {step}\n" in train(*command)
    assert_same_model(tmp_path, local_run[0])

    # As if the job had been stopped after the training, before it wrote the model.
    (tmp_path / "model.pt").unlink()
    output = train(*command)
    assert f"training was complete already: step={TOTAL_STEPS}\n" in output and "nan" not in output
    assert_same_model(tmp_path, local_run[0])


@pytest.mark.parametrize("ranks_before, ranks", [(2, 2), (3, 2), (1, 3)])
def test_what_is_left_of_an_epoch_is_each_sample_that_no_rank_has_seen(
    ranks_before: int, ranks: int, monkeypatch: pytest.MonkeyPatch
):
    """The same number of ranks gets the same batches as without the interruption."""
    dataset = range(240)

    def left(ranks: int, samples_done: int) -> list[tuple[list[list[int]], int]]:
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        at, found = train_dnn.Progress(epoch=1, samples_done=samples_done), []
        for rank in range(ranks):
            monkeypatch.setenv("RANK", str(rank))
            found.append(train_dnn.batches_left(dataset, at, batch_size=8, seed=3))
        return found

    whole = left(ranks_before, 0)
    assert all(first == 0 for _, first in whole)
    seen = [i for batches, _ in whole for batch in batches[:3] for i in batch]
    rest = left(ranks, samples_done=ranks_before * 3 * 8)
    if ranks == ranks_before:
        assert rest == [(batches[3:], 3) for batches, _ in whole]
    new = [i for batches, _ in rest for batch in batches for i in batch]
    assert sorted(seen + new) == [*dataset]


@pytest.mark.thorough
def test_sigterm_leaves_the_data_workers_until_the_checkpoint_is_written(digits, tmp_path):
    """Then one rank can continue within the epoch, which two have begun."""
    command = [*TRAINING, "--train-dir", digits, "--workers", "1", "--log-every", "1"]
    command += ["--checkpoint-dir", tmp_path, "--model-dir", tmp_path]
    stopped = start(*torchrun(2), "train_dnn.py", *command)
    while not stopped.stdout.readline().startswith("step=3 "):
        assert stopped.poll() is None
    processes = psutil.Process(stopped.pid).children(recursive=True)
    workers = [process for process in processes if process.ppid() != stopped.pid]
    assert len(processes) == 4 and len(workers) == 2
    stopped.send_signal(signal.SIGTERM)
    output, errors = stopped.communicate(timeout=60)
    step = int(re.search(r"training stopped by SIGTERM after step (\d+)$", errors, re.MULTILINE)[1])
    assert torch.load(tmp_path / "checkpoint.pt")["step"] == step < 40
    psutil.wait_procs(processes, timeout=5)
    assert not any(process.is_running() for process in processes)

    output = train(*command)
    assert f"resumed from {tmp_path} at step {step}\n" in output
    epochs, steps = divmod(step, STEPS_PER_EPOCH // 2)  # of two ranks
    left = math.ceil((TRAIN_IMAGES - steps * 2 * BATCH_SIZE) / BATCH_SIZE)
    last_step = step + left + (1 - epochs) * STEPS_PER_EPOCH
    assert f"training finished after step {last_step}: loss " in output


@pytest.mark.thorough  # the notebook has such a job, too
def test_synthetic_mode_needs_no_data(tmp_path: Path):
    output = train("--data-mode", "synthetic", "--max-steps", "12", "--model", "small",
                   "--log-every", "4", "--model-dir", tmp_path)  # fmt: skip
    lines = STEP_LINE.findall(output)
    assert [line[0] for line in lines] == ["4", "8", "12"]
    assert all(float(line[4]) < 1 for line in lines)
    assert (tmp_path / "model.pt").exists()


@pytest.mark.parametrize(
    "command, message",
    [
        ("--data-mode service --train-dir .", "needs data hosts, in HETERO_DATA_HOSTS"),
        ("--data-mode service", "--data-mode service needs --train-dir, the training files' f"),
        ("--data-mode synthetic", "set --max-steps"),
        ("--train-dir /nowhere", "neither train-images-.* the folder /nowhere"),
        ("--data-mode synthetic --max-steps 1 --model huge", "no model 'huge'"),
        ("--train-dir . --max-steps -1", "--max-steps: must be 0 or more, not -1"),
        ("--train-dir . --seed 4294967296", "--seed: must be from 0 to 4294967295"),
        ("--data-mode synthetic --max-steps 1 --test-dir /nowhere",
         "neither t10k-images-.* the folder /nowhere"),
        ("--train-dir . --epoch 3", "unrecognized arguments: --epoch 3"),
    ],
)  # fmt: skip
def test_bad_arguments_get_one_sentence(
    command: str, message: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "argv", ["train_dnn.py", *command.split()])
    threads = torch.get_num_threads()
    with pytest.raises(SystemExit, match=message) as end:
        train_dnn.main()
    torch.set_num_threads(threads)
    assert "\n" not in end.value.code


@pytest.mark.parametrize(
    "arguments, words",
    [
        ("--processes-per-host 0", "argument --processes-per-host: must be 1 or more, not 0"),
        ("--parallelism zero", "argument --parallelism: invalid choice: 'zero'"),
        ("--batch 3", "unrecognized arguments: --batch 3"),
        ("--train-dir x", "unrecognized arguments: --train-dir x"),
    ],
)
def test_the_launcher_refuses_bad_arguments_first(
    arguments: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It writes the error to the file from which SageMaker reads the FailureReason."""
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", str(tmp_path))
    assert run("launcher.py", *arguments.split()).returncode != 0
    assert words in (tmp_path / "output" / "failure").read_text()
