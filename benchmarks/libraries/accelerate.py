# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = [
#   "accelerate==1.15.0", "torch==2.14.1", "grpcio==1.85.1", "cloudpickle==3.1.2",
# ]
# ///
"""[accelerate](https://github.com/huggingface/accelerate)

Mind: Nothing, but [streams](../pt.grpc.sagemaker/loader.md#streams) are different.
Compared: order, labels, images; at random: augmented images
"""

import random

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, Dataset

from batches import seen
from feed import RemoteDataset  # added


class Images(Dataset):
    def __init__(self):
        self.images = torch.rand(24, 3, 16, 16, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.images)

    def __getitem__(self, number):
        image = self.images[number]
        return image, image.roll(random.randrange(16), 2) + 0.1 * torch.randn(1), number


set_seed(1)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
dataset = Images()
dataset = RemoteDataset(dataset)  # added
loader = DataLoader(dataset, batch_size=4, shuffle=True, num_workers=2)
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(768, 24))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(2):
    for images, augmented, labels in loader:
        seen(epoch, labels, fixed=images, random=augmented)
        with accelerator.accumulate(model):
            loss = torch.nn.functional.cross_entropy(model(augmented), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
