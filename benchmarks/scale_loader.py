"""What the loader's traffic costs as hosts and ranks become more, seen from outside the processes.

A batch of 1 MiB "takes" 0.5 s: a worker sleeps, since it is the traffic that is measured, and two
cores could not prepare batches for eight hosts. Data hosts, their workers and ranks are processes
of their own, and talk through sockets, as on AWS.

Run with an address, this file is a data host: `python scale_loader.py HOST:PORT WORKERS SECONDS`.
"""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
from transfer import TOKEN, free_port

from feed.batches import BatchKeys, as_is
from feed.client import RemoteBatches, RemoteDataset
from feed.server import serve
from feed.wire import SERVICE, build, fill, messages

COUNTS = 1, 2, 4, 8  # of data hosts, and of ranks
WORKERS, BATCH_SECONDS, FLOATS = 4, 0.5, 262_144  # of a data host; of a batch; in a batch: 1 MiB
LARGE_HOSTS, LARGE_WORKERS = 2, 48  # more workers than a rank may have calls open
MOST_OF_MACHINE = 0.3  # of all cores' time: above it, what is measured is the machine
WARM_UP_SECONDS, SECONDS = 2.5, 5.0
TIMES = 3  # that something is measured at most, while others keep the machine busy
CLIENTS, CLIENT_PROCESSES, MANY_WORKERS = 62, 2, 24  # light ones, of one server
PAUSE_SECONDS, FROZEN_SECONDS = 2.0, 25.0  # of the slow one, each batch; longer than keepalive's 20
FROZEN_CALLS = 16  # batches that the frozen client has asked for, more than sockets hold


class Asleep(Dataset):
    """Batches of 1 MiB that take so many seconds each, and hardly any CPU time."""

    def __init__(self, seconds: float):
        self.seconds = seconds

    def __len__(self) -> int:
        return 1_000_000

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        time.sleep(self.seconds)
        return [torch.zeros(FLOATS) for _ in indices]


@dataclass
class Traffic:
    """What was seen of servers and clients, over some seconds."""

    seconds: float
    batches: list[int]  # of each client
    machine: float  # of all cores' time, whoever took it
    server_ms: float  # of CPU time for a batch, at all servers and their workers
    client_ms: float  # at all clients
    connections: int  # from clients to servers
    server_threads: int  # of the process that has most
    client_threads: int
    client_mib: int  # resident, of the process that has most

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
    families = [[p for top in side for p in (top, *top.children(recursive=True))] for side in sides]

    def look() -> tuple:
        cpu = [sum(sum(p.cpu_times()[:2]) for p in family) for family in families]
        machine = psutil.cpu_times()
        total = sum(machine[:8])  # without guests', which are in users' already
        return time.perf_counter(), total, total - machine.idle - machine.iowait, *cpu

    before, batches_before = look(), list(counts)
    time.sleep(seconds)
    batches = [after - old for after, old in zip(counts, batches_before, strict=True)]
    passed, total, busy, *cpu = (new - old for new, old in zip(look(), before, strict=True))
    tcp = [[c for p in family for c in p.net_connections("tcp")] for family in families]
    ports = {c.laddr.port for c in tcp[0] if c.status == psutil.CONN_LISTEN}
    threads = [max(p.num_threads() for p in family) for family in families]
    each = [1000 * cpu_seconds / max(1, sum(batches)) for cpu_seconds in cpu]
    connections = sum(c.status == psutil.CONN_ESTABLISHED and c.raddr.port in ports for c in tcp[1])
    mib = max(p.memory_info().rss for p in families[1]) >> 20
    return Traffic(passed, batches, busy / total, *each, connections, *threads, mib)


def quietly(measure: Callable[[], Any]) -> Any:
    """Measure, and do so again if others kept the machine busy meanwhile, which may be over."""
    for _ in range(TIMES):
        found = measure()
        if found.machine <= MOST_OF_MACHINE:
            break
    return found


@contextlib.contextmanager
def data_hosts(count: int, workers: int, rate: float) -> Iterator[dict[str, int]]:
    """Run this file as so many data hosts; give their addresses with their process ids.

    rate: batches per second that the workers of one can prepare together.
    """
    hosts: dict[str, subprocess.Popen] = {}
    try:
        for _ in range(count):
            address = f"127.0.0.1:{free_port()}"
            command = [sys.executable, __file__, address, str(workers), str(workers / rate)]
            hosts[address] = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        for host in hosts.values():
            assert "serving" in host.stdout.readline()
        yield {address: host.pid for address, host in hosts.items()}
    finally:
        for host in hosts.values():
            host.terminate()
            host.communicate()


def train(number: int, ranks: int, port: int, orders: Connection, counts: Sequence[int]) -> None:
    """A rank: take batches from the hosts that the last order names, as fast as they come."""
    meeting = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=meeting, rank=number, world_size=ranks)
    while hosts := orders.recv():
        batches = RemoteBatches(RemoteDataset(hosts, TOKEN), BatchKeys([[0]] * 1_000_000))
        stream = iter(DataLoader(batches, batch_size=None, collate_fn=as_is))
        while not orders.poll():
            next(stream)
            counts[number] += 1
        del stream  # ends its threads and connections


@contextlib.contextmanager
def children(work, rows: Sequence[tuple]) -> Iterator[list[multiprocessing.Process]]:
    """Run `work` with each row of arguments in processes that have imported what this one has."""
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=work, args=row, daemon=True) for row in rows]
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
    ranks: Sequence[int] = COUNTS,
    workers: int = WORKERS,
    rate: float = WORKERS / BATCH_SECONDS,
) -> dict[tuple[int, int], Traffic]:
    """Return the traffic of all these numbers of data hosts and ranks.

    workers, rate: of a data host, and the batches per second that they can prepare together.
    """
    found = {}
    with data_hosts(max(hosts), workers, rate) as started:
        addresses, servers = [*started], [*started.values()]
        for world_size in ranks:
            counts, port = counters(world_size), free_port()
            pipes = [multiprocessing.Pipe() for _ in range(world_size)]
            rows = [(n, world_size, port, theirs, counts) for n, (_, theirs) in enumerate(pipes)]
            with children(train, rows) as processes:
                clients = [process.pid for process in processes]
                for count in hosts:
                    before = list(counts)
                    for ours, _ in pipes:
                        ours.send(addresses[:count])
                    wait_until_all_grow(counts, before, processes)
                    time.sleep(WARM_UP_SECONDS + workers / rate)
                    found[count, world_size] = quietly(
                        lambda count=count, of=(clients, counts): watch(servers[:count], *of)
                    )
    return found


def wait_until_all_grow(counts: Sequence[int], before: list[int], processes: list) -> None:
    """Wait until each client has received some more batches than before, of the last order."""
    while any(new <= old + 1 for new, old in zip(counts, before, strict=True)):
        assert all(process.is_alive() for process in processes)
        time.sleep(0.1)


def take(address: str, numbers: range, calls: int, pause: float, counts: Sequence[int]) -> None:
    """Be light clients, each a connection with `calls` threads that take one batch after the other.

    pause: seconds between a batch's header and the rest, which waits at the server meanwhile.
    """
    dataset = RemoteDataset([address], TOKEN)
    request = messages.BatchRequest(fingerprint=dataset.description.fingerprint, indices=[0])

    def again_and_again(number: int, ask) -> None:
        while True:
            call, memory = ask(request, metadata=dataset.metadata), []
            header = messages.BatchHeader.FromString(next(call))
            time.sleep(pause)
            build(header.batch, memory)
            fill(memory, call)
            counts[number] += 1

    for number in numbers:
        channel = dataset.hosts[0].connect()
        ask = channel.unary_stream(f"/{SERVICE}/Batch", messages.BatchRequest.SerializeToString)
        for _ in range(calls):
            threading.Thread(target=again_and_again, args=(number, ask), daemon=True).start()
    threading.Event().wait()


def clients_of_one_server(seconds: float = FROZEN_SECONDS) -> dict[str, Traffic]:
    """Return the traffic of 62 light clients by themselves, and beside a slow and a frozen one.

    What it says of clients is of the 62.
    """
    with data_hosts(1, MANY_WORKERS, MANY_WORKERS / BATCH_SECONDS) as hosts:
        [(address, server)] = hosts.items()
        counts, others = counters(CLIENTS), counters(2)
        share = CLIENTS // CLIENT_PROCESSES
        numbers = [range(n, n + share) for n in range(0, CLIENTS, share)]
        rows = [(address, some, 1, 0.0, counts) for some in numbers]
        slow, frozen = (address, range(1), 1, PAUSE_SECONDS, others), (address, range(1, 2))
        with children(take, rows) as processes:
            clients = [process.pid for process in processes]
            wait_until_all_grow(counts, [0] * CLIENTS, processes)
            alone = quietly(lambda: watch([server], clients, counts))
            with children(take, [slow, (*frozen, FROZEN_CALLS, 0.0, others)]) as (_, freezing):
                wait_until_all_grow(others, [0, 0], processes)
                os.kill(freezing.pid, signal.SIGSTOP)
                beside = watch([server], clients, counts, seconds)
    return {"62 clients": alone, "and a slow, and a frozen one": beside}


if __name__ == "__main__":
    serve(Asleep(float(sys.argv[3])), sys.argv[1], TOKEN, num_workers=int(sys.argv[2]))
