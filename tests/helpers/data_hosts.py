"""Data hosts as separate processes, which tests can kill or freeze, and loaders that they feed."""

import gc
import os
import random
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import torch.utils.data
from torch.utils.data import DataLoader, Dataset

from feed import RemoteDataset
from helpers.datasets import seed_all
from helpers.forks import fork_data_host
from helpers.pages import EXAMPLE, ROOT
from helpers.waiting import wait_until, wait_until_gone

CODE = EXAMPLE / "code"
# Data hosts can import everything that is next to the training script.
PATHS = f"{CODE}:{ROOT / 'tests'}"
TOKEN = "a token"
# The ports are below Linux's ephemeral ports. Each test process (pytest-xdist) has its own ports.
PROCESS = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
PORTS = iter(random.sample(range(30_000 + PROCESS % 8, 32_768, 8), 346))


# When Python deletes a loader that an error has ended, torch waits so long for each worker.
torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.5


class DataHost:
    """A data host that runs `python -m feed.server`; `start` restarts it at the same address.

    setup: Python code to run first, for example to shorten a timeout. folder: working directory.
    is_program: whether it is started as users do, which takes seconds, or else forked by forks.py.
    """

    def __init__(
        self,
        workers: int = 1,
        address: str = "",
        token: str = TOKEN,
        setup: str = "",
        environment: dict[str, str] | None = None,
        folder: Path = CODE,
        is_program: bool = False,
    ):
        self.workers, self.address = workers, address or f"127.0.0.1:{free_port()}"
        self.token, self.setup, self.environment = token, setup, environment or {}
        self.folder, self.is_program = folder, is_program
        self.start()

    def start(self) -> None:
        self.output = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed with this object)
        environment = os.environ | {"HETERO_TOKEN": self.token, "PYTHONPATH": PATHS}
        environment |= self.environment
        arguments = [self.address, "--workers", str(self.workers)]
        if not self.is_program:
            pid = fork_data_host(arguments, self.setup, self.folder, environment, self.output)
            self.process = psutil.Process(pid)
            return
        program = ["-m", "feed.server"]
        if self.setup:
            program = ["-c", f"{self.setup}\nimport feed.server; feed.server.main()"]
        self.process = psutil.Popen(
            # It must end with this process, even if this process is killed.
            ["setpriv", "--pdeathsig", "KILL", sys.executable, *program, *arguments],
            cwd=self.folder,
            env=environment,
            stdout=self.output,
            stderr=self.output,
            start_new_session=True,
        )

    def wait_until_serving(self) -> "DataHost":
        while "serving" not in (said := self.said()):
            assert not has_ended(self.process), said
            time.sleep(0.05)
        return self

    def said(self) -> str:
        # Not `read`, which would move the file offset that the data host writes at.
        return os.pread(self.output.fileno(), 1 << 20, 0).decode()

    def processes(self) -> list[psutil.Process]:
        """Return the data host's process and all of its descendants."""
        with suppress(psutil.NoSuchProcess):
            return [self.process, *self.process.children(recursive=True)]
        return []

    def worker_processes(self) -> list[psutil.Process]:
        """Return the processes that prepare samples: children of those that have a Dataset."""
        found = []
        for child in self.processes()[1:]:
            with suppress(psutil.NoSuchProcess):
                if child.parent() != self.process and not has_ended(child):
                    found.append(child)
        return found

    def kill(self) -> None:
        """Kill the data host's first process, and wait until its descendants have ended too."""
        processes = self.processes()
        self.process.kill()
        self.process.wait()
        wait_until(lambda: all(map(has_ended, processes)))

    def freeze(self) -> None:
        for process in self.processes():
            process.suspend()

    def thaw(self) -> None:
        for process in self.processes():
            process.resume()


def kill_at_random(hosts: list[DataHost], chance: random.Random, times: int) -> threading.Thread:
    """Start a thread that kills and restarts random hosts, and kills single worker processes."""

    def kill() -> None:
        for number in range(times):
            time.sleep(chance.uniform(0, 0.6))
            host = chance.choice(hosts)
            if number % 2 and (processes := host.worker_processes()):
                with suppress(psutil.NoSuchProcess):  # the worker has ended by itself
                    chance.choice(processes).kill()
            else:
                host.kill()
                time.sleep(chance.uniform(0, 0.5))
                host.start()

    killer = threading.Thread(target=kill)
    killer.start()
    return killer


@contextmanager
def starting() -> Iterator[Callable[..., DataHost]]:
    """Provide a function that starts data hosts, with one worker each by default.

    At the end, no process of theirs and no thread of their clients is left.
    """
    hosts, before = [], set(threading.enumerate())

    def start(**options: Any) -> DataHost:
        hosts.append(DataHost(**options))
        return hosts[-1]

    try:
        yield start
    finally:
        gc.collect()  # delete loaders that still wait for these hosts
        processes = [process for host in hosts for process in host.processes()]
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        wait_until(lambda: all(map(has_ended, processes)))
    wait_for_threads(before)


def up(*hosts: DataHost) -> list[DataHost]:
    """Wait until the hosts serve, and return them."""
    return [host.wait_until_serving() for host in hosts]


def has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_for_threads(before: set[threading.Thread]) -> None:
    """Wait until there are only the threads in `before`."""

    def left() -> list[threading.Thread]:
        gc.collect()  # a client's threads end when it is deleted, which its last call may delay
        return [*set(threading.enumerate()) - before]

    wait_until_gone(left, seconds=30)


def free_port() -> int:
    """Return a new port each time, outside the range of Linux's ephemeral ports."""
    for port in PORTS:
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no port is free")


def environment_of(hosts: list[DataHost]) -> dict[str, str]:
    """Return the environment of a training script that these data hosts feed."""
    addresses = ",".join(host.address for host in hosts)
    told = {"HETERO_DATA_HOSTS": addresses, "HETERO_TOKEN": TOKEN, "PYTHONPATH": PATHS}
    return os.environ | told


def remote(hosts: list[DataHost], dataset: Any, **options: Any) -> RemoteDataset:
    """Make a RemoteDataset on these data hosts; without hosts, it prepares samples locally."""
    with mock.patch.dict(os.environ, environment_of(hosts)):
        return RemoteDataset(dataset, **options)


def loader_of(
    hosts: list[DataHost], dataset: Any, batches: Any = None, timeout: float = 60.0, **options: Any
) -> DataLoader:
    """Return a DataLoader that collates samples into lists; `batches` is its batch sampler."""
    options = {"collate_fn": list, **options}
    if batches is not None:
        options["batch_sampler"] = batches
    return DataLoader(remote(hosts, dataset, timeout=timeout), **options)


def two_epochs(dataset: Dataset, **options: Any) -> list:
    """Return all batches of two epochs, with the same random seeds in each call."""
    seed_all()
    loader = DataLoader(dataset, **{"batch_size": 7, **options})
    return [list(loader) for _ in range(2)]
