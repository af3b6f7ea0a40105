# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = [
#   "webdataset==1.0.2", "pillow==13.0.0", "torch==2.14.1", "grpcio==1.85.1", "cloudpickle==3.1.2",
# ]
# ///
"""[webdataset](https://github.com/webdataset/webdataset)

Mind: A [stream](../pt.grpc.sagemaker/loader.md#streams). `shuffle`, `map` and so on return new
Datasets: call them first.
Compared: order, labels, images, also what is random in them
"""

from pathlib import Path

import numpy as np
import torch
import webdataset
from PIL import Image
from torch.utils.data import DataLoader

from batches import seen
from feed import RemoteDataset  # added

Path("data").mkdir()
for shard in range(4):
    with webdataset.TarWriter(f"data/{shard}.tar") as writer:
        for number in range(shard * 8, shard * 8 + 8):
            pixels = np.random.default_rng(number).integers(0, 255, (16, 16, 3), np.uint8)
            writer.write({"__key__": f"{number:02}", "png": Image.fromarray(pixels), "cls": number})


def augment(image):
    return image.roll(np.random.randint(16), 2) + 0.1 * torch.rand(1)


torch.manual_seed(1)
dataset = (
    webdataset.WebDataset("data/{0..3}.tar", shardshuffle=4, detshuffle=True, seed=1)
    .shuffle(10, seed=1)
    .decode("torchrgb")
    .to_tuple("png", "cls")
    .map_tuple(augment, int)
)
dataset = RemoteDataset(dataset)  # added
loader = DataLoader(dataset, batch_size=4, num_workers=2)
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(768, 32))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for epoch in range(2):
    for images, labels in loader:
        seen(epoch, labels, fixed=images)
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
