# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = [
#   "monai==1.6.1", "nibabel==5.4.2", "torch==2.14.1", "grpcio==1.85.1", "cloudpickle==3.1.2",
# ]
# ///
"""[MONAI](https://github.com/Project-MONAI/MONAI)

Mind: A `CacheDataset` is sent with all that it has cached.
Compared: order; at random: crops, rotations, noise
"""

from pathlib import Path

import nibabel
import numpy as np
import torch
from monai.data import CacheDataset, DataLoader
from monai.losses import DiceLoss
from monai.networks.nets import UNet
from monai.transforms import (
    Compose,
    EnsureChannelFirstd,
    LoadImaged,
    RandCropByPosNegLabeld,
    RandGaussianNoised,
    RandRotate90d,
    ScaleIntensityd,
)
from monai.utils import set_determinism

from batches import seen
from feed import RemoteDataset  # added

files = []
Path("data").mkdir()
for number in range(12):
    volume = np.random.default_rng(number).random((24, 24, 24), np.float32)
    paths = {key: f"data/{key}{number:02}.nii.gz" for key in ("image", "label")}
    nibabel.save(nibabel.Nifti1Image(volume, np.eye(4)), paths["image"])
    nibabel.save(nibabel.Nifti1Image((volume > 0.7).astype(np.float32), np.eye(4)), paths["label"])
    files.append(paths | {"number": number})

set_determinism(1)
keys = ["image", "label"]
transform = Compose(
    [
        LoadImaged(keys),
        EnsureChannelFirstd(keys),
        ScaleIntensityd("image"),
        RandCropByPosNegLabeld(keys, "label", spatial_size=(16, 16, 16), num_samples=2),
        RandRotate90d(keys, prob=0.5),
        RandGaussianNoised("image", prob=0.5),
    ]
)
dataset = CacheDataset(files, transform, cache_rate=0.5, progress=False)
dataset = RemoteDataset(dataset)  # added
loader = DataLoader(dataset, batch_size=2, shuffle=True, num_workers=2)
model = UNet(3, 1, 1, channels=(4, 8), strides=(2,))
optimizer, loss_function = torch.optim.Adam(model.parameters()), DiceLoss(sigmoid=True)
for epoch in range(2):
    for batch in loader:
        seen(epoch, batch["number"], random=zip(batch["image"], batch["label"], strict=True))
        loss = loss_function(model(batch["image"]), batch["label"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
