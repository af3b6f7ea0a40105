"""The cores of a training host that its ranks leave, for a data server beside them.

    python feed/spare.py 2,3,6,7 -m feed.server ...

runs the program on these vCPUs alone, and while nobody else wants to run there: Linux's scheduling
policy IDLE. `cores` leaves whole physical cores to the ranks, since two vCPUs share one.
"""

import os
import sys
from pathlib import Path

# The vCPUs of the core that a vCPU belongs to.
SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


def cores(ranks: int, most: int | None = None) -> list[int]:
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


if __name__ == "__main__":
    os.sched_setaffinity(0, map(int, sys.argv[1].split(",")))
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except PermissionError:  # a container may forbid it
        os.nice(19)
    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
