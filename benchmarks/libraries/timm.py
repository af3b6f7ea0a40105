# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = [
#   "timm==1.0.31", "torch==2.14.1", "torchvision==0.29.1", "grpcio==1.85.1", "cloudpickle==3.1.2",
# ]
# ///
"""[timm](https://github.com/huggingface/pytorch-image-models)

Mind: The line comes between `create_dataset` and `create_loader`. With `input_size_choices`, images
are augmented on the training host.
Compared: order, labels; at random: crops, RandAugment, erasing
"""

from pathlib import Path

import numpy as np
import timm
import torch
from PIL import Image
from timm import utils
from timm.data import create_dataset, create_loader

from batches import seen
from feed import RemoteDataset  # added

for label in range(24):  # each image has a label of its own
    folder = Path(f"data/train/{label:02}")
    folder.mkdir(parents=True)
    pixels = np.random.default_rng(label).integers(0, 255, (48, 48, 3), np.uint8)
    Image.fromarray(pixels).save(folder / "image.png")

utils.random_seed(1)
device = torch.device("cpu")
dataset = create_dataset("", root="data", split="train", is_training=True, batch_size=4)
dataset = RemoteDataset(dataset)  # added
loader = create_loader(
    dataset,
    input_size=(3, 32, 32),
    batch_size=4,
    is_training=True,
    auto_augment="rand-m9-mstd0.5-inc1",
    re_prob=0.25,
    num_workers=2,
    device=device,
)
model = timm.create_model("test_resnet", num_classes=24)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for epoch in range(2):
    for images, labels in loader:
        seen(epoch, labels, random=images)
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
