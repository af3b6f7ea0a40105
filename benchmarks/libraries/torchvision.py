# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = [
#   "torchvision==0.29.1", "pycocotools==2.0.11", "torch==2.14.1", "grpcio==1.85.1",
#   "cloudpickle==3.1.2",
# ]
# ///
"""[torchvision](https://github.com/pytorch/vision), detection

Mind: What asks for the Dataset's class comes first: `wrap_dataset_for_transforms_v2`, and the
grouping by aspect ratio in the reference script.
Compared: order; at random: colours, crops, boxes
"""

import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import BatchSampler, DataLoader, RandomSampler
from torchvision.datasets import CocoDetection, wrap_dataset_for_transforms_v2
from torchvision.models.detection import fasterrcnn_mobilenet_v3_large_320_fpn
from torchvision.transforms import v2

from batches import seen
from feed import RemoteDataset  # added

Path("data").mkdir()
images, boxes = [], []
for number in range(16):
    width, height = 64 + 4 * (number % 5), 60 + 4 * (number % 3)
    pixels = np.random.default_rng(number).integers(0, 255, (height, width, 3), np.uint8)
    Image.fromarray(pixels).save(f"data/{number:02}.png")
    image = {"id": number, "file_name": f"{number:02}.png", "width": width, "height": height}
    images.append(image)
    box = {"image_id": number, "category_id": 1, "iscrowd": 0, "area": 900, "id": number + 1}
    boxes.append(box | {"bbox": [8 + number % 5, 10, 30, 30]})
content = {"images": images, "annotations": boxes, "categories": [{"id": 1, "name": "square"}]}
Path("annotations.json").write_text(json.dumps(content))

torch.manual_seed(1)
transforms = v2.Compose(
    [
        v2.ToImage(),
        v2.RandomPhotometricDistort(p=1),
        v2.RandomIoUCrop(),
        v2.RandomHorizontalFlip(),
        v2.SanitizeBoundingBoxes(),
        v2.ToDtype(torch.float32, scale=True),
    ]
)
dataset = CocoDetection("data", "annotations.json", transforms=transforms)
keys = "image_id", "boxes", "labels"
dataset = wrap_dataset_for_transforms_v2(dataset, target_keys=keys)
order = torch.Generator().manual_seed(1)  # its own, since the model uses random numbers, too
batch_sampler = BatchSampler(RandomSampler(dataset, generator=order), 2, drop_last=True)
dataset = RemoteDataset(dataset)  # added
loader = DataLoader(
    dataset,
    batch_sampler=batch_sampler,
    num_workers=2,
    collate_fn=lambda batch: tuple(zip(*batch, strict=True)),
)
model = fasterrcnn_mobilenet_v3_large_320_fpn(weights_backbone=None, num_classes=2, min_size=64)
optimizer = torch.optim.SGD(model.parameters(), 0.001)
for epoch in range(2):
    for images, targets in loader:
        numbers = [target["image_id"] for target in targets]
        seen(epoch, numbers, random=zip(images, [t["boxes"] for t in targets], strict=True))
        loss = sum(model(images, targets).values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
