"""Train on digits: before.py with its own DataLoader, after.py with batches from data hosts."""

import os
import sys

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from feed.batches import BatchKeys, as_is
from feed.client import RemoteBatches, RemoteDataset
from model import SmallNet

dataset = RemoteDataset(sys.argv[1].split(","), os.environ["HETERO_TOKEN"])
sampler = DistributedSampler(dataset, num_replicas=1, rank=0)
batches = BatchSampler(sampler, 64, drop_last=True)
keys = BatchKeys(batches, seed=0)
loader = DataLoader(RemoteBatches(dataset, keys), batch_size=None, collate_fn=as_is)

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = SmallNet().to(device)
optimizer = torch.optim.Adam(model.parameters())
for epoch in range(3):
    keys.set_epoch(epoch)
    for images, labels in loader:
        loss = torch.nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"{epoch=} loss={loss:.4f}")
