"""The cores of a training host that its ranks leave, for a data server."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

# The vCPUs of the physical core that a vCPU belongs to.
SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


def find_spare_cores(ranks: int, most: int | None = None) -> list[int]:
    """Return the numbers of the vCPUs that are spare: all but a physical core for each rank.

    most: return the last so many of all vCPUs instead, whole cores or not.
    """
    by_core: dict[str, list[int]] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        siblings = Path(SIBLINGS.format(cpu))
        core = siblings.read_text() if siblings.exists() else str(cpu)  # a container may hide it
        by_core.setdefault(core, []).append(cpu)
    if most is None:
        return sum([*by_core.values()][ranks:], [])
    everyone = sum(by_core.values(), [])
    return everyone[max(0, len(everyone) - most) :]


@contextlib.contextmanager
def starting_on(cores: list[int]) -> Iterator[None]:
    """Have processes that are started meanwhile run on these vCPUs alone; without any, on all."""
    everyone = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, cores or everyone)
        yield
    finally:
        os.sched_setaffinity(0, everyone)


def run_when_idle(pid: int) -> None:
    """Let a process, and all that it will start, run only where nobody else wants to."""
    with contextlib.suppress(ProcessLookupError):  # it has ended already
        try:
            os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))
        except PermissionError:  # a container may forbid it
            os.setpriority(os.PRIO_PROCESS, pid, 19)  # the lowest
