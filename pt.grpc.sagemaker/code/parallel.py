"""How the ranks share the model.

    control = join_ranks(device, "fsdp")
    model = share_model(model, "fsdp", device)

With "ddp", every rank holds the whole model, and each step all-reduces the gradients. With "fsdp",
every rank holds its shard of each parameter, of its gradient and of the optimizer's state, and
gathers a whole layer only while it computes that layer. Both train the same model, and each can
resume from the other's checkpoint, which holds the whole state. A single process does not call
`join_ranks`, but calls the other functions all the same.
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

# How long ranks wait for a rank that hangs. A checkpoint takes less time. A data host gives up on
# samples about as late: after three attempts of 300 s.
TIMEOUT = timedelta(minutes=15)
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)  # on rank 0; {} on the others


def join_ranks(device: torch.device, parallelism: str) -> dist.ProcessGroup:
    """Connect the ranks for training.

    Returns a second group, which uses gloo, for short messages between the ranks' CPUs.
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
    """Leave the process group once all ranks have reached this point.

    The ranks find each other through a store on rank 0, so rank 0 must not leave first.
    """
    if control is not None:
        dist.barrier(control)
        dist.destroy_process_group()


def gloo_averages() -> bool:
    """Return whether gloo averages gradients, as fully_shard requires.

    In older versions of PyTorch it sums them: github.com/pytorch/pytorch/issues/162338.
    """
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    part, whole = torch.zeros(1), torch.ones(dist.get_world_size())
    try:
        reduce_scatter(part, whole, op=dist.ReduceOp.AVG)
    except RuntimeError:  # not supported
        return False
    return part.item() == 1


def share_model(model: nn.Module, parallelism: str, device: torch.device) -> nn.Module:
    """Return the model to train on `device`. Create the optimizer afterwards, from its parameters.

    The weights must be the same on all ranks.
    """
    if not dist.is_initialized():
        return model.to(device)
    if parallelism == "ddp":
        return DistributedDataParallel(model.to(device))
    # FSDP gathers one of these layers at a time; in a larger model, shard its blocks. fully_shard
    # moves them to the device one by one, so it never has to hold the whole model.
    for layer in model.children():
        if next(layer.parameters(), None) is not None:
            fully_shard(layer)
    return fully_shard(model)


def whole_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights of the plain model on rank 0. All ranks must call this."""
    return get_model_state_dict(model, options=WHOLE)


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return on rank 0 the state that `load_state` restores. All ranks must call this."""
    moments = get_optimizer_state_dict(model, optimizer, options=WHOLE)
    return {"model": whole_weights(model), "optimizer": moments}


def load_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Restore rank 0's state on all ranks, whatever number of ranks and parallelism saved it."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=dist.is_initialized())
    set_model_state_dict(model, state.get("model", {}), options=options)
    set_optimizer_state_dict(model, optimizer, state.get("optimizer", {}), options=options)


def describe(model: nn.Module, optimizer: torch.optim.Optimizer, parallelism: str) -> str:
    """Describe what this rank keeps between steps. Call it after a step. Rank 0 keeps the most.

    The state is the parameters, their gradients, and what the optimizer keeps (Adam: two moments).
    """
    parameters = [local(parameter) for parameter in model.parameters()]
    gradients = [local(p.grad) for p in model.parameters() if p.grad is not None]
    moments = [local(value) for values in optimizer.state.values() for value in values.values()]
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return (
        f"parallelism={parallelism} ranks={ranks} "
        f"parameters_per_rank={sum(tensor.numel() for tensor in parameters)} "
        f"state_bytes_per_rank={sum(t.nbytes for t in parameters + gradients + moments)}"
    )


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a sharded tensor, or the whole tensor if it is not sharded."""
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
