"""Signs of life of a host's training processes, for the launcher on the host (hetero.py).

    with pulse.watched("rank 3"):
        main()

torchrun and the like tell of a process that has died only after its neighbours have ended too, and
never of one that does not run. Each process here keeps a file in a folder of the launcher's:
touched every few seconds, with the exception that ended the process, or gone when it ended well.
"""

import contextlib
import os
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

BEAT_SECONDS, HUNG_SECONDS = 2, 30
START_SECONDS = 600  # instead, until the first step: CUDA, a large model and compilers take long
_trains = threading.Event()


def first_step_done() -> None:
    """Say that this process trains: from now on it hangs when it does not run for HUNG_SECONDS."""
    _trains.set()


@contextlib.contextmanager
def watched(name: str) -> Iterator[None]:
    """Let the launcher, if there is one, watch this training process within the block.

    The job then fails at once when the process dies or an exception leaves the block, and
    START_SECONDS after Python has stopped running here, or HUNG_SECONDS once `first_step_done` has
    been called: the process is frozen, or in a C call that keeps the GIL. Deadlocks and endless
    loops are not noticed. name: for the FailureReason.
    """
    folder, left = os.environ.get("HETERO_PULSES"), threading.Event()
    if not folder:
        yield
        return
    path = Path(folder, f"{os.getpid()} {name}")

    def beat() -> None:
        with contextlib.suppress(FileNotFoundError):  # the launcher has ended before us
            path.touch()
            while not left.is_set():
                now = time.monotonic()  # the host's clock that nobody sets
                patience = HUNG_SECONDS if _trains.is_set() else START_SECONDS
                os.utime(path, (now, now + patience))  # until when we are not missed
                left.wait(BEAT_SECONDS)

    def end() -> None:
        left.set()
        thread.join()
        path.unlink(missing_ok=True)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            end()
        else:
            last_line = traceback.format_exception_only(type(error), error)[-1]
            what = " ".join(last_line.split()).removeprefix("SystemExit: ")
            what = f"status {what}" if what.isdigit() else what
            with contextlib.suppress(FileNotFoundError):
                path.write_text(f"{time.time()} {what}")
        raise
    end()


def processes(folder: Path) -> list[int]:
    """The process ids of all that are within `watched`."""
    return [int(path.name.split()[0]) for path in folder.iterdir()]


def failures(folder: Path) -> set[tuple[float, str]]:
    """When each process failed that is still within `watched` (0: unknown), and what it did."""
    found = set()
    for path in folder.iterdir():
        pid, name = path.name.split(" ", 1)
        with contextlib.suppress(FileNotFoundError):  # it has left its block meanwhile
            is_silent = time.monotonic() > path.stat().st_mtime
            is_dead = True
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                is_dead = ") Z" in Path("/proc", pid, "stat").read_text()  # a zombie
            when, _, error = path.read_text().partition(" ")
            if error:
                found.add((float(when), f"{name} ended with {error[:500].rstrip('.')}"))
            elif is_dead:
                found.add((0.0, f"{name} died without an exception"))
            elif is_silent:
                found.add((0.0, f"{name} no longer runs"))
    return found
