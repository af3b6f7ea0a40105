"""Train on digits. before.py prepares the samples itself; after.py lets data hosts do it."""

import os

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from dataset import MnistDataset
from feed import RemoteDataset
from model import SmallNet

dataset = RemoteDataset(MnistDataset(os.environ["SM_CHANNEL_TRAINING"]))
sampler = DistributedSampler(dataset, num_replicas=1, rank=0)
batches = BatchSampler(sampler, 64, drop_last=True)
loader = DataLoader(dataset, batch_sampler=batches, num_workers=4)

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = SmallNet().to(device)
optimizer = torch.optim.Adam(model.parameters())
for epoch in range(3):
    sampler.set_epoch(epoch)
    for images, labels in loader:
        loss = torch.nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"{epoch=} loss={loss:.4f}")
