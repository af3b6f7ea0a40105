"""What the loader's traffic costs as hosts and ranks become more, seen from outside the processes.

A batch of 64 samples and 1 MiB "takes" a worker 2 s, over which it sleeps, since it is the
traffic that is measured, and two cores could not prepare batches for eight hosts. Data hosts, their
workers, ranks and their DataLoader's workers are processes, and talk through sockets, as on AWS.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import psutil
import torch
import torch.distributed as dist
from common import cpu_seconds, data_hosts, family, free_port, use
from torch.utils.data import DataLoader, Dataset

from feed import RemoteDataset

COUNTS, RANKS = (1, 2, 4, 8), (1, 4)  # of data hosts; of ranks
WORKERS, BATCH_SECONDS = 4, 2.0  # of a data host; of a batch, in one worker
SAMPLES, FLOATS = 64, 4096  # in a batch, in a sample: 1 MiB a batch
NUM_WORKERS = 2  # of a rank's DataLoader
LARGE_HOSTS, LARGE_WORKERS, LARGE_SECONDS = 2, 48, 25.6  # 3.75 batches/s, together
LARGE_NUM_WORKERS = 1, 2, 4, 8
UNEVEN, UNEVEN_BATCHES = (32, 2), 170  # workers of a data host, and of spare cores; 10 s
MOST_OF_MACHINE = 0.3  # of all cores' time: above it, what is measured is the machine
WARM_UP_SECONDS, SECONDS, LARGE_WATCHED = 2.5, 20.0, 30.0
TIMES = 3  # that something is measured at most, while others keep the machine busy
CLIENTS, CLIENT_PROCESSES, MANY_WORKERS = 62, 2, 24  # light ones, of one server
CLIENT_SECONDS = 1.0  # of their batches
PAUSE_SECONDS, FROZEN_SECONDS = 2.0, 25.0  # of the slow one, each time; longer than keepalive's 20
FROZEN_CLIENTS = 16  # in the process that freezes


class Asleep(Dataset):
    """Samples that take so many seconds each, and hardly any CPU time."""

    def __init__(self, seconds: float, batches: int = 1_000_000):
        self.seconds, self.batches = seconds, batches

    def __len__(self) -> int:
        return self.batches * SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.zeros(FLOATS)


@dataclass
class Traffic:
    """What was seen of servers and clients, over some seconds."""

    seconds: float
    batches: list[int]  # of each client
    machine: float  # of all cores' time, whoever took it
    server_ms: float  # of CPU time for a batch, at all servers and their workers
    client_ms: float  # at all clients and their workers
    connections: int  # from clients to servers
    server_threads: int  # of the process that has most
    client_threads: int
    client_mib: int  # of one client and its workers, memory that they share counted once

    @property
    def rate(self) -> float:
        """Batches per second."""
        return sum(self.batches) / self.seconds


def watch(
    servers: list[int], clients: list[int], counts: Sequence[int], seconds: float = SECONDS
) -> Traffic:
    """Look at the processes with these ids, and at their children, now and in some seconds.

    counts: batches that each client has received, which go on growing.
    """
    sides = [[psutil.Process(pid) for pid in pids] for pids in (servers, clients)]
    families = [[p for top in side for p in family(top)] for side in sides]

    def look() -> tuple:
        machine = psutil.cpu_times()
        total = sum(machine[:8])  # without guests', which are in users' already
        busy = total - machine.idle - machine.iowait
        return time.perf_counter(), total, busy, *map(cpu_seconds, families)

    before, batches_before = look(), list(counts)
    time.sleep(seconds)
    batches = [after - old for after, old in zip(counts, batches_before, strict=True)]
    passed, total, busy, *cpu = (new - old for new, old in zip(look(), before, strict=True))
    tcp = [[c for p in group for c in p.net_connections("tcp")] for group in families]
    ports = {c.laddr.port for c in tcp[0] if c.status == psutil.CONN_LISTEN}
    threads = [max(p.num_threads() for p in group) for group in families]
    each = [1000 * seconds / max(1, sum(batches)) for seconds in cpu]
    connections = sum(c.status == psutil.CONN_ESTABLISHED and c.raddr.port in ports for c in tcp[1])
    mib = sum(p.memory_full_info().pss for p in families[1]) / len(clients) / 2**20
    return Traffic(passed, batches, busy / total, *each, connections, *threads, int(mib))


def quietly(measure: Callable[[], Any]) -> Any:
    """Measure, and do so again if others kept the machine busy meanwhile, which may be over."""
    for _ in range(TIMES):
        found = measure()
        if found.machine <= MOST_OF_MACHINE:
            break
    return found


def train(
    number: int,
    ranks: int,
    port: int,
    seconds: float,
    orders: Connection,
    counts: Sequence[int],
) -> None:
    """A rank: take batches from the hosts that the last order names, as fast as they come.

    seconds: that a sample takes.
    """
    meeting = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=meeting, rank=number, world_size=ranks)
    while order := orders.recv():
        hosts, num_workers = order
        use(*hosts)
        options = {"num_workers": num_workers, "multiprocessing_context": "fork"}
        stream = iter(DataLoader(RemoteDataset(Asleep(seconds)), SAMPLES, **options))
        while not orders.poll():
            next(stream)
            counts[number] += 1
        del stream  # ends its workers


@contextlib.contextmanager
def children(work, rows: Sequence[tuple]) -> Iterator[list[multiprocessing.Process]]:
    """Run `work` with each row of arguments in processes that have imported what this one has."""
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=work, args=row) for row in rows]
    try:
        for process in processes:
            process.start()
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()


def counters(count: int) -> Sequence[int]:
    """Return so many numbers from 0 in memory that processes share."""
    return multiprocessing.get_context("forkserver").RawArray("Q", count)


def grid(
    hosts: Sequence[int] = COUNTS,
    ranks: Sequence[int] = RANKS,
    workers: int = WORKERS,
    seconds: float = BATCH_SECONDS,
    num_workers: Sequence[int] = (NUM_WORKERS,),
    watched: float = SECONDS,
) -> dict[tuple[int, int, int], Traffic]:
    """Return the traffic of all these numbers of data hosts, ranks, and DataLoader workers of each.

    workers, seconds: of a data host, and that a batch takes in one. watched: seconds of each row.
    """
    found = {}
    with data_hosts(*[workers] * max(hosts)) as started:
        addresses, servers = [*started], [host.pid for host in started.values()]
        for world_size in ranks:
            counts, port = counters(world_size), free_port()
            pipes = [multiprocessing.Pipe() for _ in range(world_size)]
            each = world_size, port, seconds / SAMPLES
            rows = [(n, *each, theirs, counts) for n, (_, theirs) in enumerate(pipes)]
            with children(train, rows) as processes:
                clients = [process.pid for process in processes]
                for count, own in [(count, own) for count in hosts for own in num_workers]:
                    before = list(counts)
                    for ours, _ in pipes:
                        ours.send((addresses[:count], own))
                    wait_until_all_grow(counts, before, processes)
                    time.sleep(WARM_UP_SECONDS + seconds)
                    found[count, world_size, own] = quietly(
                        lambda count=count, of=(clients, counts, watched): watch(
                            servers[:count], *of
                        )
                    )
    return found


def wait_until_all_grow(counts: Sequence[int], before: list[int], processes: list) -> None:
    """Wait until each client has received some more batches than before, of the last order."""
    while any(new <= old + 1 for new, old in zip(counts, before, strict=True)):
        assert all(process.is_alive() for process in processes)
        time.sleep(0.1)


def epochs(num_workers: int = 4, times: int = 3) -> list[float]:
    """Return the seconds of epochs, the first one first, with a large and a small data host."""
    with data_hosts(*UNEVEN) as started:
        use(*started)
        dataset = RemoteDataset(Asleep(BATCH_SECONDS / SAMPLES, UNEVEN_BATCHES))
        found, loader = [], DataLoader(dataset, SAMPLES, num_workers=num_workers)
        for _ in range(times):
            start = time.perf_counter()
            for _ in loader:
                pass
            found.append(time.perf_counter() - start)
    return found


def take(address: str, numbers: range, counts: Sequence[int]) -> None:
    """Be so many light clients, each a thread that takes one batch after the other."""
    os.environ["WORLD_SIZE"] = str(CLIENTS)  # for each, a batch is one chunk
    use(address)

    def again_and_again(number: int) -> None:
        dataset = RemoteDataset(Asleep(CLIENT_SECONDS / SAMPLES))
        while True:
            dataset.__getitems__([*range(SAMPLES)])
            counts[number] += 1

    for number in numbers:
        threading.Thread(target=again_and_again, args=(number,), daemon=True).start()
    threading.Event().wait()


def stop_and_go(pid: int) -> None:
    """Have a process run for a moment, every PAUSE_SECONDS, until it has ended."""
    with contextlib.suppress(ProcessLookupError):
        while True:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(PAUSE_SECONDS)
            os.kill(pid, signal.SIGCONT)
            time.sleep(PAUSE_SECONDS / 10)


def clients_of_one_server(seconds: float = FROZEN_SECONDS) -> dict[str, Traffic]:
    """Return the traffic of 62 light clients by themselves, and beside a slow and a frozen one.

    What it says of clients is of the 62.
    """
    with data_hosts(MANY_WORKERS) as hosts:
        [(address, server)] = hosts.items()
        counts, others = counters(CLIENTS), counters(1 + FROZEN_CLIENTS)
        share = CLIENTS // CLIENT_PROCESSES
        rows = [(address, range(n, n + share), counts) for n in range(0, CLIENTS, share)]
        with children(take, rows) as processes:
            clients = [process.pid for process in processes]
            wait_until_all_grow(counts, [0] * CLIENTS, processes)
            alone = quietly(lambda: watch([server.pid], clients, counts))
            numbers = range(1), range(1, 1 + FROZEN_CLIENTS)
            with children(take, [(address, some, others) for some in numbers]) as (slow, frozen):
                wait_until_all_grow(others, [0] * len(others), [slow, frozen])
                os.kill(frozen.pid, signal.SIGSTOP)
                threading.Thread(target=stop_and_go, args=(slow.pid,), daemon=True).start()
                beside = watch([server.pid], clients, counts, seconds)
    return {"62 clients": alone, "and a slow, and a frozen one": beside}
