# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = [
#   "pycls==0.1.1", "setuptools==80.9.0", "torch==2.14.1", "grpcio==1.85.1", "cloudpickle==3.1.2",
# ]
# ///
"""[pycls](https://github.com/facebookresearch/pycls)

Mind: Its settings, `cfg`, reach data hosts from a clone, with `pycls` beside the script. If it is
installed, the first batch is refused.
Compared: order, labels; at random: crops, flips, lighting
"""

import importlib.util
import shutil
from pathlib import Path

import cv2
import numpy as np
import torch

# As with a clone of its repository: the package is beside the script, and not installed.
shutil.copytree(Path(importlib.util.find_spec("pycls").origin).parent, "pycls")
importlib.invalidate_caches()

from pycls.core.config import cfg  # noqa: E402
from pycls.datasets import loader  # noqa: E402

from batches import seen  # noqa: E402
from feed import RemoteDataset  # noqa: E402  # added

for number in range(24):
    folder = Path(f"data/train/n{number:02}")
    folder.mkdir(parents=True)
    pixels = np.random.default_rng(number).integers(0, 255, (48, 48, 3), np.uint8)
    cv2.imwrite(str(folder / "image.png"), pixels)

cfg.TRAIN.DATASET, cfg.TRAIN.IM_SIZE, cfg.TRAIN.BATCH_SIZE = "imagenet", 32, 4
cfg.DATA_LOADER.NUM_WORKERS, cfg.DATA_LOADER.PIN_MEMORY = 2, False
loader._PATHS["imagenet"] = Path("data").resolve()
ImageNet = loader.ImageNet
loader._DATASETS["imagenet"] = lambda *given: RemoteDataset(ImageNet(*given))  # added
np.random.seed(1)
torch.manual_seed(1)
train_loader = loader.construct_train_loader()
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 24))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for epoch in range(2):
    loader.shuffle(train_loader, epoch)
    for images, labels in train_loader:
        seen(epoch, labels, random=images)
        loss = torch.nn.functional.cross_entropy(model(images.float()), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
