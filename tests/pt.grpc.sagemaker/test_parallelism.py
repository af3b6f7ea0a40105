"""Ranks that shard the model with FSDP train like ranks that replicate it with DDP.

test_spot.py has an interrupted job with FSDP.
"""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import parallel
from dataset import MnistDataset
from helpers.mnist import write_digits
from helpers.pages import ROOT
from helpers.training import STEP_LINE, run, torchrun, train, weights_in
from model import MnistNet

STATE_LINE = re.compile(
    r"^parallelism=(\w+) ranks=(\d+) parameters_per_rank=(\d+) state_bytes_per_rank=(\d+)$",
    re.MULTILINE,
)
TENSORS, PARAMETERS = 8, sum(p.numel() for p in MnistNet().parameters())
STATE_BYTES = 4 * 4 * PARAMETERS  # parameters, gradients and two moments, of four bytes each
STEP_BYTES = 4 * TENSORS  # Adam counts the steps for every tensor, on every rank


def losses(output: str) -> dict[int, float]:
    """Return the logged losses by step; the first step of a run is not logged."""
    return {int(line[0]): float(line[2]) for line in STEP_LINE.findall(output)}


def assert_close_models(folder: Path, reference: Path) -> None:
    torch.testing.assert_close(weights_in(folder), weights_in(reference), rtol=1e-3, atol=1e-4)


@pytest.mark.thorough
def test_fsdp_trains_as_ddp_with_half_of_the_state(tmp_path: Path):
    digits = write_digits(tmp_path, train_images=256)
    common = ["--train-dir", digits, "--model", "mnist", "--batch-size", "16", "--epochs", "3"]
    common += ["--workers", "1", "--log-every", "1"]
    reference = train(*common, "--model-dir", tmp_path / "ddp", ranks=2)
    assert list(losses(reference)) == list(range(2, 25))
    whole = ("ddp", "2", str(PARAMETERS), str(STATE_BYTES + STEP_BYTES))
    assert STATE_LINE.findall(reference) == [whole]

    command = [*common, "--parallelism", "fsdp", "--test-dir", digits]
    output = train(*command, "--model-dir", tmp_path / "fsdp", ranks=2)
    half = ("fsdp", "2", str(PARAMETERS // 2), str(STATE_BYTES // 2 + STEP_BYTES))
    assert STATE_LINE.findall(output) == [half]
    assert losses(output) == pytest.approx(losses(reference), abs=2e-3)
    assert_close_models(tmp_path / "fsdp", tmp_path / "ddp")

    # Rank 0 evaluates, with the weights of both ranks.
    model = MnistNet()
    model.load_state_dict(weights_in(tmp_path / "fsdp"))
    images, labels = zip(*MnistDataset(digits, train=False), strict=True)
    right = model.eval()(torch.stack(images)).argmax(dim=1) == torch.tensor(labels)
    assert f"test_accuracy={right.float().mean():.4f}\n" in output


@pytest.mark.thorough
def test_any_number_of_ranks_goes_on_from_a_checkpoint_of_either_parallelism(tmp_path: Path):
    """The batch is always the same, so the number of ranks makes no difference."""
    common = ["--data-mode", "synthetic", "--model", "small", "--batch-size", "8"]
    common += ["--log-every", "1"]
    folders = ["--checkpoint-dir", tmp_path / "one", "--model-dir", tmp_path / "one"]
    reference = train(*common, "--max-steps", "12", *folders)
    assert STATE_LINE.findall(reference)[0][:2] == ("ddp", "1")
    turns = [("ddp", 2), ("fsdp", 2), ("ddp", 1), ("fsdp", 3)]
    for turn, (parallelism, ranks) in enumerate(turns):
        command = [*common, "--max-steps", 3 * turn + 3, "--parallelism", parallelism]
        command += ["--checkpoint-dir", tmp_path / "turns", "--model-dir", tmp_path / "turns"]
        output = train(*command, ranks=ranks)
        assert (f"at step {3 * turn}\n" in output) == (turn > 0)
        steps = (3 * turn + 2, 3 * turn + 3)
        expected = {step: losses(reference)[step] for step in steps}
        assert losses(output) == pytest.approx(expected, abs=2e-4)
        assert [line[:2] for line in STATE_LINE.findall(output)] == [(parallelism, str(ranks))]
    # Gradients that are too large show in Adam's moments, but not in its steps and the losses.
    states = [torch.load(tmp_path / name / "checkpoint.pt")["state"] for name in ("turns", "one")]
    moments, expected = (state["optimizer"]["state"] for state in states)
    torch.testing.assert_close(moments, expected, rtol=1e-3, atol=1e-5)
    assert moments["fc.bias"]["step"] == 12
    assert_close_models(tmp_path / "turns", tmp_path / "one")


@pytest.mark.thorough
def test_tensor_parallel_ranks_compute_the_same_and_keep_what_workshop_md_says():
    done = run(*torchrun(2), "../tensor_parallel.py")
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"loss=(\S+) state_bytes_per_rank=(\d+)", done.stdout)
    (loss, whole), (same_loss, part) = [(float(loss), int(kept)) for loss, kept in lines]
    assert same_loss == pytest.approx(loss, abs=1e-5)
    kept = f"two ranks keep {part / 1e6:.1f} of {whole / 1e6:.1f} MB"
    assert kept in " ".join((ROOT / "workshop.md").read_text().split())


def test_fsdp_says_what_it_needs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dist, "init_process_group", lambda backend, timeout: None)
    monkeypatch.setattr(parallel, "fully_shard", None)
    with pytest.raises(SystemExit, match=r"fsdp needs PyTorch 2\.6 or newer; this is \d"):
        parallel.join_ranks(torch.device("cpu"), "fsdp")

    def add_up(part: torch.Tensor, whole: torch.Tensor, op: dist.ReduceOp) -> None:
        assert op == dist.ReduceOp.AVG
        part.copy_(whole.sum())

    monkeypatch.setattr(parallel, "fully_shard", print)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "reduce_scatter_single", add_up, raising=False)
    with pytest.raises(SystemExit, match=r"fsdp needs GPUs with PyTorch \d.*: use ddp"):
        parallel.join_ranks(torch.device("cpu"), "fsdp")


@pytest.mark.parametrize("kind, library", [("cpu", "gloo"), ("cuda", "nccl")])
def test_library_of_the_collective_operations(
    kind: str, library: str, monkeypatch: pytest.MonkeyPatch
):
    joined = []
    monkeypatch.setattr(dist, "init_process_group", lambda name, timeout: joined.append(name))
    monkeypatch.setattr(dist, "new_group", lambda backend, timeout: backend)
    assert parallel.join_ranks(torch.device(kind), "ddp") == "gloo"  # for control messages
    assert joined == [library]
