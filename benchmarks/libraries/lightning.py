# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = [
#   "lightning==2.6.6", "torch==2.14.1", "numpy==2.4.6", "grpcio==1.85.1", "cloudpickle==3.1.2",
# ]
# ///
"""[Lightning](https://github.com/Lightning-AI/pytorch-lightning)

Mind: The line goes into `setup`, once for each Dataset.
Compared: order, labels; at random: images of training and validation
"""

import lightning
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from batches import seen
from feed import RemoteDataset  # added


class Images(Dataset):
    def __init__(self, length):
        self.images = np.random.default_rng(1).random((length, 3, 16, 16), np.float32)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, number):
        image = np.roll(self.images[number], np.random.randint(16), axis=2)
        return torch.tensor(image) + 0.1 * torch.rand(1), number


class Data(lightning.LightningDataModule):
    def setup(self, stage):
        self.train, self.val = Images(24), Images(8)
        self.train = RemoteDataset(self.train)  # added
        self.val = RemoteDataset(self.val)  # added

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=4, shuffle=True, num_workers=2)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=4, num_workers=2, persistent_workers=True)


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(768, 24))

    def training_step(self, batch, index):
        images, labels = batch
        seen(self.current_epoch, labels, random=images)
        return torch.nn.functional.cross_entropy(self.model(images), labels)

    def validation_step(self, batch, index):
        images, labels = batch
        seen(self.current_epoch, labels + 100, random=images)
        self.log("loss", torch.nn.functional.cross_entropy(self.model(images), labels))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


lightning.seed_everything(1, workers=True)
trainer = lightning.Trainer(accelerator="cpu", devices=1, max_epochs=2, logger=False)
trainer.fit(Model(), datamodule=Data())
