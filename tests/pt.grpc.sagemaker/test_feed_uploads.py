"""How often a Dataset is pickled and uploaded. Run as a program, this file is a training script."""

import os
import subprocess
import sys
from pathlib import Path

import torch.multiprocessing
from torch.utils.data import DataLoader, Dataset

CODE = Path(__file__).parents[2] / "pt.grpc.sagemaker" / "code"
sys.path.insert(0, str(CODE))

from feed import RemoteDataset  # noqa: E402

RANKS, EPOCHS, WORKERS, BATCHES = 2, 2, 2, 20


class Noisy(Dataset):
    """Says when it is pickled."""

    def __len__(self) -> int:
        return BATCHES

    def __getitem__(self, index: int) -> int:
        return index

    def __getstate__(self) -> dict:
        print("pickled", flush=True)
        return {}


def train(rank: int) -> None:
    dataset = RemoteDataset(Noisy())
    options = {"num_workers": WORKERS, "multiprocessing_context": "fork"}
    for _ in range(EPOCHS):
        assert sum(map(sum, DataLoader(dataset, **options))) == sum(range(BATCHES))


def test_a_dataset_of_a_script_that_spawns_its_ranks_is_uploaded_once():
    environment = {**os.environ, "HETERO_TOKEN": "a token"}
    serve = [sys.executable, "-m", "feed.server", "127.0.0.1:29871", "--workers", "2"]
    with subprocess.Popen(
        serve, cwd=CODE, env=environment, stdout=subprocess.PIPE, text=True
    ) as host:
        try:
            assert "serving" in host.stdout.readline()
            environment["HETERO_DATA_HOSTS"] = "127.0.0.1:29871"
            script = [sys.executable, __file__]
            said = subprocess.check_output(script, env=environment, text=True, timeout=200)
        finally:
            host.terminate()
    assert said.count("has gone to data host") == 1
    # Once by each worker of each epoch, to know whether it is another one now, and to be uploaded.
    assert said.count("pickled") <= 2 * RANKS * EPOCHS * WORKERS


if __name__ == "__main__":
    torch.multiprocessing.spawn(train, nprocs=RANKS)
