# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = [
#   "keras==3.15.1", "torch==2.14.1", "grpcio==1.85.1", "cloudpickle==3.1.2",
# ]
# ///
"""[Keras](https://github.com/keras-team/keras), PyTorch as its backend

Mind: Nothing. As before, `fit` also fetches some batches that it does not train on.
Compared: order, labels; at random: images
"""

import os

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np
from torch.utils.data import DataLoader, Dataset

from batches import seen
from feed import RemoteDataset  # added


class Images(Dataset):
    def __init__(self):
        self.images = np.random.default_rng(1).random((24, 16, 16, 3), np.float32)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, number):
        image = np.roll(self.images[number], np.random.randint(16), axis=1)
        return (image + 0.1 * np.random.rand()).astype(np.float32), number


class Model(keras.Sequential):
    def train_step(self, batch):
        images, labels = batch
        seen(len(self.history.epoch), labels, random=images.cpu())
        return super().train_step(batch)


keras.utils.set_random_seed(1)
dataset = Images()
dataset = RemoteDataset(dataset)  # added
loader = DataLoader(dataset, batch_size=4, shuffle=True, num_workers=2)
model = Model([keras.layers.Flatten(), keras.layers.Dense(24)])
model.compile(
    "sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False
)
model.fit(loader, epochs=2, verbose=0)
