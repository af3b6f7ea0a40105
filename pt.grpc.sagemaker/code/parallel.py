"""How the ranks of a training share the model.

    control = join_ranks(device, "fsdp")
    model = share_model(model, "fsdp", device)

With "ddp" every rank has all of the model: each step all-reduces the gradients. With "fsdp" every
rank keeps its part of each parameter, of its gradient and of the optimizer's state; a layer is
whole only while it is computed. Both train the same model, and can continue each other's training:
a checkpoint has the whole state. A single process joins nobody: it calls the same functions.
"""

import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:
    fully_shard = None  # an older PyTorch

# After this time the other ranks give up on one that hangs. A checkpoint takes less, and so does
# the loader, which gives up on a batch after two attempts of 300 s.
TIMEOUT = timedelta(minutes=15)
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)  # on rank 0, {} on the others


def join_ranks(device: torch.device, parallelism: str) -> dist.ProcessGroup:
    """Connect the ranks for training.

    Returns a second group, over gloo, for the few words that ranks exchange on CPUs.
    """
    if parallelism == "fsdp" and fully_shard is None:
        sys.exit(
            f"parallel.py: error: fsdp needs PyTorch 2.6 or newer; this is {torch.__version__}."
        )
    backend = "gloo" if device.type == "cpu" else "nccl"
    dist.init_process_group(backend, timeout=TIMEOUT)
    if parallelism == "fsdp" and device.type == "cpu" and not gloo_averages():
        sys.exit(f"parallel.py: error: fsdp needs GPUs with PyTorch {torch.__version__}: use ddp.")
    return dist.new_group(backend="gloo", timeout=TIMEOUT)


def leave_ranks(control: dist.ProcessGroup | None) -> None:
    """Part with the other ranks, when all have come so far.

    Rank 0 has the store by which they find each other, so it must not be the first to go.
    """
    if control is not None:
        dist.barrier(control)
        dist.destroy_process_group()


def gloo_averages() -> bool:
    """Try out what fully_shard does with gradients, which gloo has not always averaged.

    In older versions of PyTorch it adds them up: github.com/pytorch/pytorch/issues/162338.
    """
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    part, whole = torch.zeros(1), torch.ones(dist.get_world_size())
    try:
        reduce_scatter(part, whole, op=dist.ReduceOp.AVG)
    except RuntimeError:  # not supported
        return False
    return part.item() == 1


def share_model(model: nn.Module, parallelism: str, device: torch.device) -> nn.Module:
    """Return the model to train on `device`; make the optimizer afterwards, of its parameters.

    All ranks must bring the same weights.
    """
    if not dist.is_initialized():
        return model.to(device)
    if parallelism == "ddp":
        return DistributedDataParallel(model.to(device))
    # A layer is what is gathered in one go. Those of a larger model are its blocks; fully_shard
    # moves one after the other to the device, which never has to hold all of them.
    for layer in model.children():
        if next(layer.parameters(), None) is not None:
            fully_shard(layer)
    return fully_shard(model)


def whole_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return on rank 0 the weights as the plain model has them. All ranks must call this."""
    return get_model_state_dict(model, options=WHOLE)


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return on rank 0 what `load_state` continues from. All ranks must call this."""
    moments = get_optimizer_state_dict(model, optimizer, options=WHOLE)
    return {"model": whole_weights(model), "optimizer": moments}


def load_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Continue on all ranks from rank 0's state, whatever number of ranks saved it, and how."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=dist.is_initialized())
    set_model_state_dict(model, state.get("model", {}), options=options)
    set_optimizer_state_dict(model, optimizer, state.get("optimizer", {}), options=options)


def describe(model: nn.Module, optimizer: torch.optim.Optimizer, parallelism: str) -> str:
    """Say what this rank keeps between two steps; call it after a step. Rank 0 has most.

    State is parameters, their gradients, and what the optimizer keeps: of Adam, two moments.
    """
    parameters = [local(parameter) for parameter in model.parameters()]
    gradients = [local(p.grad) for p in model.parameters() if p.grad is not None]
    moments = [local(value) for values in optimizer.state.values() for value in values.values()]
    return (
        f"parallelism={parallelism} ranks={dist.get_world_size()} "
        f"parameters_per_rank={sum(tensor.numel() for tensor in parameters)} "
        f"state_bytes_per_rank={sum(t.nbytes for t in parameters + gradients + moments)}"
    )


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor that ranks share, or else all of it."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def from_rank_0(value: Any, control: dist.ProcessGroup | None) -> Any:
    """Return rank 0's value on all ranks."""
    values = [value]
    if control is not None:
        dist.broadcast_object_list(values, group=control)
    return values[0]


def any_rank(flag: bool, control: dist.ProcessGroup | None) -> bool:
    """Return whether `flag` is true on any rank, so that all ranks stop after the same step."""
    if control is None:
        return flag
    votes = torch.tensor(int(flag))
    dist.all_reduce(votes, group=control)
    return votes.item() > 0
