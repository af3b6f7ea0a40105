"""README's lines for Lightning, the Hugging Face Trainer and accelerate, run with all three.

Run as a program, this file is a data host (`serve HOST:PORT`), or a rank that runs the lines for
one of them (`train FRAMEWORK HOST:PORT`), and writes the batches that it was trained on into files.
"""

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "pt.grpc.sagemaker"
sys.path[:0] = [str(ROOT / "tests"), str(EXAMPLE / "code")]

from feed.batches import BatchKeys, SeededBatches, as_is  # noqa: E402
from feed.client import RemoteBatches, RemoteDataset  # noqa: E402

import pages  # noqa: E402
from data_hosts import free_port  # noqa: E402
from feed.server import serve  # noqa: E402

RANKS, EPOCHS, BATCHES = 2, 3, 6  # batches: of each rank, in an epoch
STOP = 10  # the step, in the middle of an epoch, whose checkpoint is resumed
LIGHTNING, TRAINER, ACCELERATE = pages.FRAMEWORKS
RUNS = {
    "lightning": [
        LIGHTNING.replace("[SetEpoch()]", f"[SetEpoch(), SaveAt({STOP})]"),
        LIGHTNING.replace("(model, loader)", "(model, loader, ckpt_path='saved')"),
    ],
    "trainer": [
        TRAINER.replace("_epochs=3", f"_epochs=3, save_steps={STOP}"),
        TRAINER.replace(".train()", f".train('output/checkpoint-{STOP}')"),
    ],
    "accelerate": [ACCELERATE],
}


class Samples(Dataset):
    """Each has a random number."""

    def __len__(self) -> int:
        return 4 * BATCHES * RANKS

    def __getitem__(self, index: int) -> dict:
        return {"x": torch.rand(1), "index": index}


def keys_of(rank: int) -> BatchKeys:
    return BatchKeys(BatchSampler(DistributedSampler(Samples(), RANKS, rank), 4, drop_last=True))


# A rank


def train(framework: str, host: str) -> None:
    rank, trained_on = int(os.environ["RANK"]), []
    dataset = RemoteDataset([host], "a token")
    for number, lines in enumerate(RUNS[framework]):
        keys = keys_of(rank)
        loader = DataLoader(RemoteBatches(dataset, keys), batch_size=None, collate_fn=as_is)
        names = {"keys": keys, "loader": loader, **READERS_OWN[framework](trained_on)}
        exec(compile(lines, "README.md", "exec"), names)
        assert torch.distributed.get_world_size() == RANKS  # the framework has joined them
        torch.save(trained_on, f"{number}-{rank}")
        trained_on.clear()


def for_lightning(trained_on: list) -> dict:
    import lightning

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch: dict) -> torch.Tensor:
            trained_on.append(batch)
            return self.layer(batch["x"]).sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    class SaveAt(lightning.Callback):
        def __init__(self, step: int):
            self.step = step

        def on_train_batch_end(self, trainer: Any, *_) -> None:
            if trainer.global_step == self.step:
                trainer.save_checkpoint("saved")

    return {"model": Model(), "SaveAt": SaveAt}


def for_trainer(trained_on: list) -> dict:
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def forward(self, x: torch.Tensor, index: torch.Tensor) -> dict:
            trained_on.append({"x": x, "index": index})
            return {"loss": self.layer(x).sum()}

    return {"model": Model()}


def for_accelerate(trained_on: list) -> dict:
    def compute_loss(model: torch.nn.Module, batch: dict) -> torch.Tensor:
        trained_on.append(batch)
        return model(batch["x"]).sum()

    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return {"model": model, "optimizer": optimizer, "compute_loss": compute_loss}


READERS_OWN = {"lightning": for_lightning, "trainer": for_trainer, "accelerate": for_accelerate}


# The test


@pytest.fixture(scope="module")
def host() -> Iterator[str]:
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, __file__, "serve", address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline().startswith("serving")
        yield address
        process.terminate()


def local_batches(rank: int) -> Iterator[dict]:
    """What a rank is trained on without data hosts."""
    keys = keys_of(rank)
    loader = DataLoader(SeededBatches(Samples()), sampler=keys, batch_size=None, collate_fn=as_is)
    for epoch in range(EPOCHS):
        keys.set_epoch(epoch)
        yield from loader


def bits(batches: Iterable[dict]) -> list[tuple]:
    return [(*batch["x"].flatten().tolist(), *batch["index"].tolist()) for batch in batches]


@pytest.mark.thorough
@pytest.mark.parametrize("framework", RUNS)
def test_epochs_are_those_of_local_mode_also_when_resumed(
    framework: str, host: str, tmp_path: Path
):
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}"]
    # GPUs they would all take by themselves, but not CPUs.
    cpus = {"PL_TRAINER_DEVICES": str(RANKS), "ACCELERATE_USE_CPU": "true"}
    subprocess.run(
        [*torchrun, f"--master-port={free_port()}", __file__, "train", framework, host],
        cwd=tmp_path,
        env={**os.environ, **cpus, "CUDA_VISIBLE_DEVICES": ""},
        check=True,
        timeout=200,
    )
    for rank in range(RANKS):
        expected = bits(local_batches(rank))
        assert len({*expected}) == EPOCHS * BATCHES
        for number, first in enumerate([0, STOP][: len(RUNS[framework])]):
            assert bits(torch.load(tmp_path / f"{number}-{rank}")) == expected[first:]


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(Samples(), sys.argv[2], "a token", num_workers=1)
    else:
        train(*sys.argv[2:])
