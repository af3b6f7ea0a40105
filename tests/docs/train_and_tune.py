"""Ray Train and Tune in one job, for test_ray.py: two workers and four trials say what they do.

They save to a folder that all hosts share, which only jobs on one machine have.
"""

import serve  # before ray  # isort: skip

import os

import numpy as np
import ray
import torch
from ray import train, tune
from ray.train.torch import TorchTrainer, prepare_model

serve.drive()
STORAGE = os.path.join(os.environ["SM_OUTPUT_DATA_DIR"], "ray")


def mark(batch: dict) -> dict:
    """Add the host that prepares the batch, and random numbers; data hosts call it."""
    count = len(batch["id"])
    return batch | {"host": [os.environ["SM_CURRENT_HOST"]] * count, "draw": np.random.rand(count)}


def loop() -> None:
    """Train for two epochs; each worker of TorchTrainer calls it."""
    rank, model = train.get_context().get_world_rank(), prepare_model(torch.nn.Linear(1, 1))
    for epoch in range(2):
        ids, draws, hosts = [], [], set()
        for batch in train.get_dataset_shard("train").iter_batches(batch_size=8):
            ids += batch["id"].tolist()
            draws += batch["draw"].tolist()
            hosts |= {*batch["host"].tolist()}
            model(torch.ones(1, 1)).sum().backward()
        words = f"{epoch=} {rank=} on={os.environ['SM_CURRENT_HOST']} from={'+'.join(hosts)}"
        values = f"ids={'+'.join(map(str, ids))} draws={'+'.join(map(str, draws))}"
        print(f"trainer: {words} {values}", flush=True)
        train.report({"rows": len(ids)})


def objective(config: dict) -> None:
    """Fit a line with SGD; each trial of Tune calls it."""
    torch.manual_seed(0)
    x, model = torch.randn(64, 4), torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), config["lr"])
    for _ in range(30):
        loss = (model(x)[:, 0] - x.sum(1)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"trial: lr={config['lr']} on={os.environ['SM_CURRENT_HOST']}", flush=True)
    tune.report({"loss": loss.item()})


TorchTrainer(
    loop,
    datasets={"train": ray.data.range(320).map_batches(mark, batch_size=8)},
    scaling_config=train.ScalingConfig(num_workers=2, resources_per_worker={"dnn_group": 1}),
    run_config=train.RunConfig(name="trainer", storage_path=STORAGE),
).fit()
trials = tune.Tuner(
    objective,
    param_space={"lr": tune.grid_search([0.001, 0.01, 0.1, 0.3])},
    tune_config=tune.TuneConfig(metric="loss", mode="min"),
    run_config=tune.RunConfig(name="tune", storage_path=STORAGE, verbose=0),
).fit()
print(f"best of {len(trials)}: lr={trials.get_best_result().config['lr']}", flush=True)
