"""A training whose files only the data hosts have: see test_channels.py."""

import os
from pathlib import Path

from torch.utils.data import DataLoader, Dataset

from feed import RemoteDataset


class Words(Dataset):
    def __init__(self):
        self.paths = sorted(Path(os.environ["SM_CHANNEL_TRAINING"]).iterdir())

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> str:
        return self.paths[index].read_text() + " at " + os.environ["SM_CURRENT_HOST"]


if __name__ == "__main__":
    print("the training host has", "SM_CHANNEL_TRAINING" in os.environ)
    dataset = RemoteDataset(Words)
    print("length", len(dataset), "first", dataset[0])
    for _ in range(int(os.environ["EPOCHS"])):
        for words in DataLoader(dataset, batch_size=2, num_workers=1):
            print("trained", words)
