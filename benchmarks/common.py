"""What the benchmarks share: data hosts, CPU time, tables, results."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
CODE = ROOT / "pt.grpc.sagemaker" / "code"
TOKEN = "a token"
# Hide messages of TensorFlow and gRPC, and warnings about what killed processes leave behind.
os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "GRPC_VERBOSITY": "NONE"}
os.environ["PYTHONWARNINGS"] = "ignore:resource_tracker"
warnings.filterwarnings("ignore", "This DataLoader will create")  # more workers than cores
sys.path.insert(0, str(CODE))


@contextlib.contextmanager
def data_host(workers: int, *start: str, address: str = "") -> Iterator[tuple[str, psutil.Popen]]:
    """Run a data host; yield its address and process. start: words to put before its command."""
    address = address or f"127.0.0.1:{free_port()}"
    command = [*start, sys.executable, "-m", "feed.server", address, "--workers", str(workers)]
    environment = {**os.environ, "HETERO_TOKEN": TOKEN}
    host = psutil.Popen(command, cwd=CODE, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert "serving" in host.stdout.readline()
        yield address, host
    finally:
        host.terminate()
        host.communicate()


def use(*addresses: str) -> None:
    """Make new RemoteDatasets of this process use these data hosts."""
    os.environ.update(HETERO_DATA_HOSTS=",".join(addresses), HETERO_TOKEN=TOKEN)


def family(process: psutil.Process) -> list[psutil.Process]:
    """Return a process and all its descendants."""
    return [process, *process.children(recursive=True)]


def cpu_seconds(processes: list[psutil.Process]) -> float:
    """Return the CPU time that these processes have used so far, to the nearest 10 ms."""
    return sum(sum(process.cpu_times()[:2]) for process in processes)  # user, system


def free_port() -> int:
    """Return a free port of this machine."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def at_least_two_cores() -> list[int]:
    """Return the numbers of the cores. End the program if there are fewer than two."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        sys.exit("This benchmark needs two cores: one for the data host, one for the training.")
    return cores


def table(heads: str, rows) -> None:
    """Print a Markdown table."""
    print(f"\n| {heads} |\n|{'---|' * (heads.count('|') + 1)}")
    for row in rows:
        print(f"| {' | '.join(map(str, row))} |", flush=True)


def write_results(name: str, results: dict) -> None:
    """Write all measured values to build/bench/NAME.json."""
    folder = ROOT / "build" / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(results, indent=1))
