"""The beginning of a PyTorch script, with a Dataset whose batches of two take a known time."""

TORCH = """
import sys, time
import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

torch.set_num_threads(1)  # several threads would wait for each other if other programs run

class Slow(Dataset):
    def __init__(self, batches, seconds):
        self.batches, self.seconds = batches, seconds

    def __len__(self):
        return 2 * self.batches

    def __getitem__(self, index):
        time.sleep(self.seconds / 2)
        return {"x": torch.ones(4)}
"""
