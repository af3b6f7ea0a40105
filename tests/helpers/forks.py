"""Forks data hosts for data_hosts.py, so that not each of them takes seconds to import torch.

A fork runs `python -m feed.server` as if it were a new process. Run as a program, this file gets a
message for each fork through the socket that is its standard input, and answers with its id.
"""

import ctypes
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, Any

PR_SET_PDEATHSIG = 1
LONGEST = 1 << 20  # bytes of a message
OF_SERVER = "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OPENCV_FOR_THREADS_NUM"

_lock = threading.Lock()
_forker: socket.socket | None = None


def fork_data_host(
    arguments: list[str], setup: str, folder: Path, environment: dict[str, str], output: IO[str]
) -> int:
    """Start a data host in a process that ends with this one; return its id."""
    global _forker
    wanted = arguments, setup, str(folder), environment
    with _lock:
        if not _forker:
            _forker, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            command = ["setpriv", "--pdeathsig", "KILL", sys.executable, __file__]
            paths = environment["PYTHONPATH"]
            with its:
                subprocess.Popen(command, stdin=its, env=os.environ | {"PYTHONPATH": paths})
        socket.send_fds(_forker, [json.dumps(wanted).encode()], [output.fileno()])
        return int(_forker.recv(LONGEST))


def be_data_host(
    arguments: list[str], setup: str, folder: str, environment: dict[str, str], **threads: str
) -> None:
    """Become a data host, in a new process."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment | threads)
    sys.path[:0] = [folder, *environment["PYTHONPATH"].split(":")]
    sys.argv = ["feed.server", *arguments]
    if setup:
        exec(f"{setup}\nimport feed.server; feed.server.main()", {})
    else:
        runpy.run_module("feed.server", run_name="__main__")


def main() -> None:
    """Import what a data host imports, and fork one for each message."""
    own = sys.path[:]
    import feed.server  # first, since it sets variables that torch reads
    import feed.worker  # noqa: F401  (with torch)

    threads: dict[str, Any] = {name: os.environ[name] for name in OF_SERVER}
    paths = {str(Path(__file__).parent), *os.environ["PYTHONPATH"].split(":")}
    sys.path[:] = [path for path in own if path not in paths]
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
    requests = socket.socket(fileno=0)
    while True:
        message, fds, _, _ = socket.recv_fds(requests, LONGEST, 1)
        if not message:
            return
        if pid := os.fork():
            os.close(fds[0])
            requests.send(str(pid).encode())
            continue
        os.dup2(fds[0], 1)
        os.dup2(fds[0], 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), requests.detach())
        os.close(fds[0])
        return be_data_host(*json.loads(message), **threads)


if __name__ == "__main__":
    main()
