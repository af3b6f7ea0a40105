"""What a worker forked from the training script has besides the Dataset, for the data hosts.

The environment goes with each request, since it may differ between ranks.
"""

import contextlib
import os

# torchrun's variables, and the beginnings of those that each host has for itself.
OF_A_RANK = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("NODE_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
)
OF_A_HOST = (
    *("CUDA", "NVIDIA", "NCCL", "GLOO", "OMP_", "MKL_", "KMP_", "OPENBLAS", "OPENCV_FOR"),
    *("HETERO", "SM_", "SAGEMAKER", "HOME", "HOSTNAME", "LD_", "PATH", "PWD", "PYTHON", "TMPDIR"),
)


def environment_at_start() -> dict[str, str]:
    """Return the environment that this process was started with, as far as Linux still has it."""
    with contextlib.suppress(OSError), open("/proc/self/environ", "rb") as file:
        lines = [os.fsdecode(line).partition("=") for line in file.read().split(b"\0")]
        if "PATH" in (found := {name: value for name, _, value in lines if name}):
            return found
    return dict(os.environ)  # some program has written over it


def environment(before: dict[str, str]) -> dict[str, str | None]:
    """Return the variables that data hosts need: torchrun's, and what the script has changed."""
    now = os.environ
    changed = {name: now.get(name) for name in {*now, *before} if now.get(name) != before.get(name)}
    shared = {k: v for k, v in changed.items() if not k.startswith(OF_A_HOST)}
    return shared | {name: now[name] for name in OF_A_RANK if name in now}
