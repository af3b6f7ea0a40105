# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = [
#   "torchdata==0.11.0", "torch==2.14.1", "numpy==2.4.6", "grpcio==1.85.1", "cloudpickle==3.1.2",
# ]
# ///
"""[torchdata](https://github.com/meta-pytorch/data), StatefulDataLoader

Mind: `load_state_dict` works as before. To also get the random numbers of a run that has not
stopped, call `start_at_batch`.
Compared: order, labels, also after resuming in an epoch; at random: images
"""

import numpy as np
import torch
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from batches import seen
from feed import RemoteDataset  # added


class Images(Dataset):
    def __init__(self):
        self.images = np.random.default_rng(1).random((24, 3, 16, 16), np.float32)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, number):
        image = np.roll(self.images[number], np.random.randint(16), axis=2)
        return torch.tensor(image) + 0.1 * torch.rand(1), number


torch.manual_seed(1)
dataset = Images()
dataset = RemoteDataset(dataset)  # added
loader = StatefulDataLoader(dataset, batch_size=4, shuffle=True, num_workers=2)
for epoch in range(2):
    for batch, (images, labels) in enumerate(loader):
        seen(epoch, labels, random=images)
        if epoch == 1 and batch == 2:
            state, rest = loader.state_dict(), []
        elif epoch == 1 and batch > 2:
            rest.append(images)
loader = StatefulDataLoader(dataset, batch_size=4, shuffle=True, num_workers=2)
loader.load_state_dict(state)
dataset.start_at_batch(3)  # added
for images, labels in loader:
    seen(2, labels, random=images)
    assert torch.equal(images, rest.pop(0))  # check
assert not rest  # check
