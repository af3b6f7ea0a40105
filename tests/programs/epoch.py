"""A training that asks for 0s, and then for SAMPLE: python epoch.py SAMPLE NUM_WORKERS END."""

import sys

from torch.utils.data import DataLoader

from feed import RemoteDataset
from helpers.datasets import TROUBLED

numbers = [[0]] * 3 + [[int(sys.argv[1])]] * 99
dataset = RemoteDataset(TROUBLED)
batches = iter(DataLoader(dataset, batch_sampler=numbers, num_workers=int(sys.argv[2])))
next(batches)
print("begun", flush=True)
if sys.argv[3] == "raises":
    raise ZeroDivisionError("division by zero")
if sys.argv[3] == "exits":
    sys.exit(5)
for _ in batches:
    print("a batch", flush=True)
