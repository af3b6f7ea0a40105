# /// script
# requires-python = ">=3.12,<3.14"
# dependencies = [
#   "lerobot[dataset]==0.6.1", "torch==2.11.0", "grpcio==1.85.1", "cloudpickle==3.1.2",
# ]
# ///
"""[LeRobot](https://github.com/huggingface/lerobot)

Mind: The Dataset uses a cache on disk that data hosts lack, so give RemoteDataset a callable. Data
hosts need the Dataset's folder.
Compared: order, states, actions; at random: images from videos
"""

import functools  # added

import numpy as np
import torch
from lerobot.datasets import EpisodeAwareSampler, LeRobotDataset
from lerobot.transforms import ImageTransforms, ImageTransformsConfig

from batches import seen
from feed import RemoteDataset  # added

features = {
    "observation.state": {"dtype": "float32", "shape": (2,), "names": None},
    "observation.images.top": {
        "dtype": "video",
        "shape": (64, 64, 3),
        "names": ["height", "width", "channels"],
    },
    "action": {"dtype": "float32", "shape": (2,), "names": None},
}
recorded = LeRobotDataset.create("me/data", 10, features, root="data")
chance = np.random.default_rng(1)
for _ in range(2):
    for _ in range(12):
        frame = {key: chance.random(2, np.float32) for key in ("observation.state", "action")}
        frame["observation.images.top"] = chance.integers(0, 255, (64, 64, 3), np.uint8)
        recorded.add_frame(frame | {"task": "push"})
    recorded.save_episode()
recorded.finalize()

torch.manual_seed(1)
arguments = {
    "repo_id": "me/data",
    "root": "data",
    "image_transforms": ImageTransforms(ImageTransformsConfig(enable=True)),
    "delta_timestamps": {"action": [0.0, 0.1, 0.2]},
}
dataset = LeRobotDataset(**arguments)
sampler = EpisodeAwareSampler(
    dataset.meta.episodes["dataset_from_index"],
    dataset.meta.episodes["dataset_to_index"],
    shuffle=True,
)
dataset = RemoteDataset(functools.partial(LeRobotDataset, **arguments))  # added
loader = torch.utils.data.DataLoader(dataset, batch_size=4, sampler=sampler, num_workers=2)
model = torch.nn.Linear(2, 6)
optimizer = torch.optim.Adam(model.parameters())
for epoch in range(2):
    for batch in loader:
        numbers, state, actions = batch["index"], batch["observation.state"], batch["action"]
        fixed = zip(state, actions, strict=True)
        seen(epoch, numbers, fixed, random=batch["observation.images.top"])
        loss = (model(state) - actions.flatten(1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
