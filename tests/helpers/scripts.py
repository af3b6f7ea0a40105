"""Run functions of a test file in a training script, with two data hosts.

The script is the test file itself, so that its classes and functions are in `__main__`. Run as a
program, it is a rank of a training, and calls `main` with its functions.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Collection
from pathlib import Path

from helpers.data_hosts import DataHost, environment_of, free_port, up

LIBRARY = "def double(value):\n    return value * 2\n"  # modules of the script


def said() -> str:
    """Return what the function that runs and its DataLoader workers have printed."""
    return os.pread(1, 1 << 20, 0).decode()


def run(script: str, folder: Path, names: Collection[str], ranks: int = 1) -> dict[str, str]:
    """Run functions of a script, which is in the subfolder tools; return their tracebacks."""
    for place in ("library", "tools"):
        (folder / place).mkdir()
        (folder / place / f"{place}_of_mine.py").write_text(LIBRARY)
    command = [sys.executable, Path(shutil.copy(script, folder / "tools")).relative_to(folder)]
    told = {"PLACE": "there", "REMOVED": "no"}
    programs = {"environment": told, "folder": folder, "is_program": True}
    hosts = [DataHost(workers, **programs) for workers in (2, 1)]
    processes = []
    try:
        environment = environment_of(up(*hosts)) | {"CUDA_VISIBLE_DEVICES": "", "REMOVED": "no"}
        if ranks > 1:
            environment |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        for rank in range(ranks):
            if ranks > 1:
                environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "NODE_RANK": "0"}
            own = environment | {"ENDED": f"ended-{rank}"}
            processes.append(subprocess.Popen([*command, *names], cwd=folder, env=own))
        assert [process.wait(timeout=580) for process in processes] == [0] * ranks
        ended = [json.loads((folder / f"ended-{rank}").read_text()) for rank in range(ranks)]
        return {name: "".join(of_rank[name] for of_rank in ended) for name in names}
    finally:
        for process in processes:
            process.kill()
        for host in hosts:
            host.kill()


def main(functions: dict[str, Callable[[], None]]) -> None:
    """Run the functions named in argv, and write their tracebacks into the file ENDED."""
    ended = {}
    for name in sys.argv[1:]:
        with tempfile.TemporaryFile() as output:  # of this process and of DataLoader workers
            os.dup2(output.fileno(), 1)
            try:
                functions[name]()
                ended[name] = ""
            except BaseException:
                ended[name] = traceback.format_exc()
    Path(os.environ["ENDED"]).write_text(json.dumps(ended))


def checks(names: dict) -> dict[str, Callable[[], None]]:
    """Return a script's functions whose names begin with `check_`."""
    return {name: value for name, value in names.items() if name.startswith("check_")}
