"""What the benchmarks share: data hosts, cores, results."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
CODE = ROOT / "pt.grpc.sagemaker" / "code"
TOKEN = "a token"
# What they say is no result; processes that are killed leave something.
os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "GRPC_VERBOSITY": "NONE"}
os.environ["PYTHONWARNINGS"] = "ignore:resource_tracker"
warnings.filterwarnings("ignore", "This DataLoader will create")  # more workers than cores
sys.path[:0] = [str(CODE), str(ROOT / "benchmarks")]


@contextlib.contextmanager
def data_host(workers: int, *start: str, address: str = "") -> Iterator[tuple[str, psutil.Popen]]:
    """Run a data host; give its address and its process. start: what its command begins with."""
    address = address or f"127.0.0.1:{free_port()}"
    command = [*(start or [sys.executable]), "-m", "feed.server", address]
    # It finds classes of these benchmarks as it finds those of a job: beside feed/.
    environment = {**os.environ, "HETERO_TOKEN": TOKEN, "PYTHONPATH": str(ROOT / "benchmarks")}
    host = psutil.Popen(
        [*command, "--workers", str(workers)],
        cwd=CODE,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert "serving" in host.stdout.readline()
        yield address, host
    finally:
        host.terminate()
        host.communicate()


@contextlib.contextmanager
def data_hosts(*workers: int) -> Iterator[dict[str, psutil.Popen]]:
    """Run a data host with each of these numbers of workers; give their processes by address."""
    with contextlib.ExitStack() as stack:
        yield dict(stack.enter_context(data_host(count)) for count in workers)


def use(*addresses: str) -> None:
    """Have each new RemoteDataset of this process ask these data hosts."""
    os.environ.update(HETERO_DATA_HOSTS=",".join(addresses), HETERO_TOKEN=TOKEN)


def family(process: psutil.Process) -> list[psutil.Process]:
    """Return a process and all below it."""
    return [process, *process.children(recursive=True)]


def cpu_seconds(processes: list[psutil.Process]) -> float:
    """Return the CPU time that these processes have taken so far, to 10 ms."""
    return sum(sum(process.cpu_times()[:2]) for process in processes)  # user, system


def wait_until_idle() -> None:
    """Wait until no process of this benchmark is still busy with what it holds ready."""
    everyone, before = family(psutil.Process()), float("-inf")
    while (now := cpu_seconds(everyone)) - before >= 0.02:
        before = now
        time.sleep(0.2)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def wait_for(port: int) -> None:
    """Wait until something listens at a port."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def at_least_two_cores() -> list[int]:
    """Return the cores, two at least: the last is for the training."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        sys.exit("Needs two cores: one for the data host, one for the training.")
    return cores


def table(heads: str, rows) -> None:
    """Print a table of Markdown."""
    print(f"\n| {heads} |\n|{'---|' * (heads.count('|') + 1)}")
    for row in rows:
        print(f"| {' | '.join(map(str, row))} |", flush=True)


def write_results(name: str, results: dict) -> None:
    """Write all that was measured to build/bench/."""
    folder = ROOT / "build" / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(results, indent=1))
