"""Runs a rank or data server: starts it, copies its output, and waits for its end."""

import asyncio
import collections
import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time

from hetero.reason import reason
from hetero.topology import BASE_DIR

TICK_SECONDS = 0.05
PIPE_BYTES = 1 << 20  # the most that a pipe can hold
LINE_END = re.compile(rb"\r+\n?|\n")  # a line of a progress bar ends with \r
# With the same hash seed in all processes, sets have the same order and pickle alike. Hydra prints
# its errors as Python's tracebacks.
ENVIRONMENT = {"PYTHONHASHSEED": "0", "HYDRA_FULL_ERROR": "1"}
REMEMBERED = 1000  # last lines of output, searched for the reason of a failure


def written() -> tuple[int, str]:
    """Return when a script last wrote this host's reason into SageMaker's file, and the reason."""
    with contextlib.suppress(OSError):  # usually there is no such file
        path = BASE_DIR / "output" / "failure"
        with path.open(encoding="utf-8", errors="replace") as file:
            return path.stat().st_mtime_ns, file.read(4000)
    return 0, ""


def shortened(line: bytes) -> bytes:
    """Return what is remembered of a line: a line of JSON may have a traceback at its end."""
    return line if len(line) < 4000 else line[:2000] + line[-2000:]


class Process:
    """A process of this host, in its own session and process group."""

    def __init__(self, command: list[str], environment: dict[str, str], name: str = ""):
        pairs = zip(["", *command], command, strict=False)
        scripts = (word for before, word in pairs if before == "-m" or word.endswith(".py"))
        script = next(scripts, command[0])
        self.name = f"{name} of {script}" if name else script
        self.output: collections.deque[bytes] = collections.deque(maxlen=REMEMBERED)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        environment = {**ENVIRONMENT, **os.environ, **environment}
        self.before = written()
        self.popen = subprocess.Popen(command, env=environment, start_new_session=True, **pipes)
        self.reader = threading.Thread(target=self._pass_output_on, daemon=True)
        self.reader.start()

    def _pass_output_on(self) -> None:
        """Print all output of the process, in whole lines, since others print to the log too."""
        pipe, rest, is_over = self.popen.stdout.fileno(), b"", False
        readable = select.poll()
        readable.register(pipe, select.POLLIN)
        while not is_over:
            # Its children may hold the pipe open after it has ended, but one more read gets the
            # rest of its own output.
            is_over = self.popen.returncode is not None
            if readable.poll(1000 * TICK_SECONDS):
                data = os.read(pipe, PIPE_BYTES)
                rest, is_over = rest + data, is_over or not data
            *lines, rest = LINE_END.split(rest)
            if rest and (is_over or len(rest) > 1 << 16):
                lines, rest = [*lines, rest], b""
            sys.stdout.buffer.write(b"".join(line + b"\n" for line in lines))
            sys.stdout.flush()
            self.output += map(shortened, lines)

    async def wait(self, seconds: float = 1e9) -> None:
        """Wait up to `seconds` for its end; then kill whatever is left of its process group."""
        deadline = time.monotonic() + seconds
        while self.popen.returncode is None and time.monotonic() < deadline:
            await asyncio.sleep(TICK_SECONDS)
        with contextlib.suppress(ProcessLookupError):  # nothing is left
            os.killpg(self.popen.pid, signal.SIGKILL)
        while self.reader.is_alive() and time.monotonic() < deadline + 1:
            await asyncio.sleep(TICK_SECONDS)

    def describe_end(self) -> tuple[str, bool]:
        """Return how and why it ended, and whether it was cut off from another rank."""
        status, lines, (when, words) = self.popen.returncode, [], written()
        if status > 0 or status == -signal.SIGABRT:  # an uncaught C++ exception aborts
            lines = [*self.output]  # a copy, as the reader thread may still append
        words = "" if (when, words) == self.before else words
        why, was_cut_off = reason((line.decode("utf-8", "replace") for line in lines), words)
        how = f"exited with status {status}" if status >= 0 else f"was killed by signal {-status}"
        return f"{self.name} {how}{why}", was_cut_off
