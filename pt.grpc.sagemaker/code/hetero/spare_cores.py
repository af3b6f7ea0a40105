"""Runs a data server on the cores of a training host that its ranks do not need."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

# Lists the vCPUs that share a physical core with a vCPU.
SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


def find_spare_cores(ranks: int, most: int | None = None) -> list[int]:
    """Return the numbers of the spare vCPUs: all except one physical core for each rank.

    most: if given, return the last `most` of all vCPUs instead, ignoring physical cores.
    """
    by_core: dict[str, list[int]] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        siblings = Path(SIBLINGS.format(cpu))
        core = siblings.read_text() if siblings.exists() else str(cpu)  # containers may hide it
        by_core.setdefault(core, []).append(cpu)
    if most is None:
        return sum([*by_core.values()][ranks:], [])
    everyone = sum(by_core.values(), [])
    return everyone[max(0, len(everyone) - most) :]


@contextlib.contextmanager
def starting_on(cores: list[int]) -> Iterator[None]:
    """Within this context, start processes on these vCPUs only, or on all if `cores` is empty."""
    everyone = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, cores or everyone)
        yield
    finally:
        os.sched_setaffinity(0, everyone)


def run_when_idle(pid: int) -> None:
    """Let a process, and the processes that it starts, use only CPU time that is otherwise idle."""
    with contextlib.suppress(ProcessLookupError):  # it has already ended
        try:
            os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))
        except PermissionError:  # containers may forbid it
            os.setpriority(os.PRIO_PROCESS, pid, 19)  # the lowest priority
