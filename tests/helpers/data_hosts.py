"""Data hosts as processes of their own, which tests may harm, and loaders that they feed."""

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

import numpy as np
import psutil
import torch
from torch.utils.data import DataLoader, IterableDataset

from feed import RemoteDataset
from helpers.pages import EXAMPLE, ROOT
from helpers.waiting import wait_until, wait_until_gone

CODE = EXAMPLE / "code"
PATHS = (
    f"{CODE}:{ROOT / 'tests'}"  # what is beside a training script is beside the data hosts' code
)
TOKEN = "a token"
# Below those that Linux gives; of several test processes (pytest-xdist) each has its own.
PROCESS = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
PORTS = iter(random.sample(range(30_000 + PROCESS % 8, 32_768, 8), 346))


class DataHost:
    """`python -m feed.server`. When it has ended, `start` starts it again at its address.

    setup: Python code to run before, such as one that shortens a time. folder: where it runs.
    """

    def __init__(
        self,
        workers: int = 1,
        address: str = "",
        token: str = TOKEN,
        setup: str = "",
        environment: dict[str, str] | None = None,
        folder: Path = CODE,
    ):
        self.workers, self.address = workers, address or f"127.0.0.1:{free_port()}"
        self.token, self.setup, self.environment = token, setup, environment or {}
        self.folder = folder
        self.start()

    def start(self) -> None:
        self.output = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed with this object)
        program = ["-m", "feed.server"]
        if self.setup:
            program = ["-c", f"{self.setup}; import feed.server; feed.server.main()"]
        self.process = psutil.Popen(
            # It shall end with this process, also when that is killed.
            ["setpriv", "--pdeathsig", "KILL", sys.executable, *program, self.address]
            + ["--workers", str(self.workers)],
            cwd=self.folder,
            env=os.environ | {"HETERO_TOKEN": self.token, "PYTHONPATH": PATHS} | self.environment,
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
        return os.pread(self.output.fileno(), 1 << 20, 0).decode()  # it writes to the same file

    def processes(self) -> list[psutil.Process]:
        """It and all of its children."""
        with suppress(psutil.NoSuchProcess):
            return [self.process, *self.process.children(recursive=True)]
        return []

    def worker_processes(self) -> list[psutil.Process]:
        """Those that prepare samples: each is the child of a process that has a Dataset."""
        found = []
        for child in self.processes()[1:]:
            with suppress(psutil.NoSuchProcess):
                if child.parent() != self.process and not has_ended(child):
                    found.append(child)
        return found

    def kill(self) -> None:
        """Kill its first process, whose end is that of the others."""
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
    """Start a thread that kills hosts, which come back, and single processes of theirs."""

    def kill() -> None:
        for number in range(times):
            time.sleep(chance.uniform(0, 0.6))
            host = chance.choice(hosts)
            if number % 2 and (processes := host.worker_processes()):
                with suppress(psutil.NoSuchProcess):  # it has ended by itself
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
    """Start data hosts, one worker each, that a test may harm.

    After it nothing is left of them, nor of their clients in this process.
    """
    hosts, before = [], set(threading.enumerate())

    def start(**options: Any) -> DataHost:
        hosts.append(DataHost(**options))
        return hosts[-1]

    try:
        yield start
    finally:
        gc.collect()  # loaders that still wait for hosts would wait for them in vain
        processes = [process for host in hosts for process in host.processes()]
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        wait_until(lambda: all(map(has_ended, processes)))
    wait_for_threads(before)


def up(*hosts: DataHost) -> list[DataHost]:
    """The hosts, once they serve."""
    return [host.wait_until_serving() for host in hosts]


def has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_for_threads(before: set[threading.Thread]) -> None:
    """Wait until there are no other threads than before."""
    gc.collect()  # those of a client end with it
    wait_until_gone(lambda: [*set(threading.enumerate()) - before], seconds=30)


def free_port() -> int:
    """Return a port that has not been returned before, and that no connection is given by Linux."""
    for port in PORTS:
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no port is free")


def environment_of(hosts: list[DataHost]) -> dict[str, str]:
    """The environment of a training script that these data hosts feed."""
    addresses = ",".join(host.address for host in hosts)
    told = {"HETERO_DATA_HOSTS": addresses, "HETERO_TOKEN": TOKEN, "PYTHONPATH": PATHS}
    return os.environ | told


def remote(hosts: list[DataHost], dataset: Any, **options: Any) -> RemoteDataset:
    """The line of a training script, on these data hosts; without any, samples are made here."""
    with mock.patch.dict(os.environ, environment_of(hosts)):
        return RemoteDataset(dataset, **options)


def loader_of(
    hosts: list[DataHost], dataset: Any, batches: Any = None, timeout: float = 60.0, **options: Any
) -> DataLoader:
    """A loader of some batches of samples, which are joined to lists only."""
    options = {"collate_fn": list, **options}
    if batches is not None:
        options["batch_sampler"] = batches
    return DataLoader(remote(hosts, dataset, timeout=timeout), **options)


def two_epochs(dataset: IterableDataset, **options: Any) -> list:
    """All batches of a stream, of a training that begins with the same random numbers each time."""
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    loader = DataLoader(dataset, **{"batch_size": 7, **options})
    return [list(loader) for _ in range(2)]
