"""Signs of life of a host's training processes, for the launcher on the host (hetero.py).

    with pulse.watched("rank 3"):
        main()

torchrun and the like tell of a process that has died only after its neighbours have ended too, and
never of one that hangs. Each process here keeps a file in a folder of the launcher's: touched every
few seconds, with the exception that ended the process, or gone when it has ended well.
"""

import contextlib
import os
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

BEAT_SECONDS, HUNG_SECONDS = 2, 30


@contextlib.contextmanager
def watched(name: str) -> Iterator[None]:
    """Let the launcher, if there is one, watch this training process within the block.

    The job then fails at once when the process dies or an exception leaves the block, with which
    torchrun and the like wait for its neighbours, and HUNG_SECONDS after Python has stopped
    running here. name: for the FailureReason, such as "rank 3".
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
                os.utime(path, (now, now))
                left.wait(BEAT_SECONDS)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code:
            with contextlib.suppress(FileNotFoundError):
                last_line = traceback.format_exception_only(type(error), error)[-1].strip()
                path.write_text(f"{time.time()} {last_line.removeprefix('SystemExit: ')}")
            raise
    left.set()
    thread.join()
    path.unlink(missing_ok=True)


def failures(folder: Path) -> set[tuple[float, str]]:
    """When each process failed that is still within `watched` (0: unknown), and what it did."""
    found = set()
    for path in folder.iterdir():
        pid, name = path.name.split(" ", 1)
        with contextlib.suppress(FileNotFoundError):  # it has left its block meanwhile
            is_silent = time.monotonic() - path.stat().st_mtime > HUNG_SECONDS
            is_dead = True
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                is_dead = ") Z" in Path("/proc", pid, "stat").read_text()  # a zombie
            when, _, error = path.read_text().partition(" ")
            if error:
                found.add((float(when), f"{name} ended with {error[:500].rstrip('.')}"))
            elif is_dead:
                found.add((0.0, f"{name} died without an exception"))
            elif is_silent:
                found.add((0.0, f"{name} has not run for {HUNG_SECONDS} s"))
    return found
