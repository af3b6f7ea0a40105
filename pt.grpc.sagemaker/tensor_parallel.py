"""Tensor parallelism on CPUs: each rank computes a part of every layer.

    torchrun --nproc-per-node 2 tensor_parallel.py

With FSDP a rank keeps a part of each layer, but gathers the whole layer to compute it. Here nobody
ever has the whole layer, so a layer may be larger than a GPU. In return, all ranks of a group
train on the same batch, and exchange activations in every layer instead of parameters.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def build() -> nn.Module:
    """Return a classifier of 784 numbers, with the same weights every time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(784, 4096), nn.ReLU(), nn.Linear(4096, 10))


def train(model: nn.Module) -> str:
    """Train for five steps. Return the last loss, and the bytes that this rank keeps."""
    optimizer = torch.optim.Adam(model.parameters())
    torch.manual_seed(1)  # the same batch on all ranks
    images, labels = torch.randn(64, 784), torch.randint(10, (64,))
    for _ in range(5):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    mine = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    # Parameters, gradients and Adam's two moments
    return f"loss={loss.item():.6f} state_bytes_per_rank={4 * sum(p.nbytes for p in mine)}"


world_size = int(os.environ["WORLD_SIZE"])  # torchrun sets it
if 4096 % world_size:
    sys.exit("tensor_parallel.py: error: use 1, 2, 4, ... ranks, which divide a layer of 4096")
dist.init_process_group("gloo")
ranks = init_device_mesh("cpu", (world_size,))
whole = train(build())
# The first layer is split by its outputs, and the second one by its inputs. So a rank's outputs of
# the first are its inputs of the second, and one all-reduce after the second adds everything up.
plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
parts = train(parallelize_module(build(), ranks, plan))
if dist.get_rank() == 0:
    print(f"whole model:     {whole}")
    print(f"tensor parallel: {parts} ranks={dist.get_world_size()}")
dist.destroy_process_group()
