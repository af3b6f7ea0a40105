"""How the loader, the runtime and tf.data.service scale with the number of hosts.

    .venv/bin/python benchmarks/scale.py      eight minutes, and longer on a busy machine

Data hosts, ranks and launchers are separate processes that talk through sockets, as on AWS. The
samples only sleep, because the benchmark measures the traffic, and two cores could not prepare
batches for so many hosts. If this machine uses over 30 % of its CPU time, for this benchmark or for
others, the machine limits a figure. It is then measured again, and in the end left out.
"""

import contextlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from common import CODE, TOKEN, cpu_seconds, data_host, family, free_port, table, use, write_results
from torch.utils.data import DataLoader, Dataset

from feed import RemoteDataset

MOST_OF_MACHINE, TIMES = 30, 3  # percent of all cores' time; attempts at a measurement
SAMPLES, FLOATS = 64, 4096  # in a batch, in a sample: 1 MiB a batch
WARM_UP_SECONDS, SECONDS = 2.5, 20.0
CASES = [  # workers of each data host; ranks; num_workers; batch_size; seconds per sample
    *(([4] * hosts, ranks, 2, SAMPLES, 2 / SAMPLES) for ranks in (1, 4) for hosts in (1, 2, 4)),
    ([32, 2], 1, 4, SAMPLES, 4 / SAMPLES),  # a data host, and a training host's spare cores
    *(([48, 48], 1, *loader, 0.4) for loader in ((1, SAMPLES), (1, 192), (3, SAMPLES))),
]
LEAST = 0.9  # of the batches per second that the workers can prepare
JOBS = 2, 4, 16, 64  # hosts
HOLD_SECONDS, TRAINING_SECONDS, LIMIT_SECONDS = 4.0, 8.0, 120
TF_WORKERS, TF_CONSUMERS, TF_SECONDS, AT_ONCE = (2, 4, 8), 4, 0.5, 4
HEADS = "batches/s | of what workers can prepare | servers' CPU ms per batch"
HEADS += " | clients' CPU ms per batch | machine"


@dataclass
class Traffic:
    """What was measured of servers and clients."""

    rate: float  # batches per second
    server_ms: float  # CPU time per batch, of all servers and their workers
    client_ms: float  # the same, of all clients and their workers
    machine: float  # percent of all cores' time

    def cells(self, limit: float) -> tuple[str, ...]:
        """Return the columns of HEADS. limit: batches per second that the workers can prepare."""
        if self.machine > MOST_OF_MACHINE:
            return "left out", "", "", "", f"{self.machine:.0f} %"
        ms = f"{self.server_ms:.1f}", f"{self.client_ms:.1f}"
        return f"{self.rate:.1f}", f"{self.rate / limit:.0%}", *ms, f"{self.machine:.0f} %"


def watch(servers: list[psutil.Process], clients: list, counts: Sequence[int]) -> Traffic:
    """Measure processes and their descendants, after each client has received two batches.

    counts: batches that each client has received so far, in shared memory.
    """
    while min(counts) < 2:
        assert all(client.is_alive() for client in clients)
        time.sleep(0.1)
    time.sleep(WARM_UP_SECONDS)
    tops = servers, [psutil.Process(client.pid) for client in clients]
    sides = [[process for top in side for process in family(top)] for side in tops]

    def look() -> tuple[float, ...]:
        return time.perf_counter(), sum(counts), *map(cpu_seconds, sides)

    before, machine = look(), psutil.cpu_percent(SECONDS)
    passed, batches, *cpu = (new - old for new, old in zip(look(), before, strict=True))
    return Traffic(batches / passed, *(1e3 * s / max(1, batches) for s in cpu), machine)


def quietly(measure: Callable[..., Any], *arguments) -> Any:
    """Measure, and repeat it up to TIMES in all if the machine was too busy meanwhile."""
    for _ in range(TIMES):
        found = measure(*arguments)
        if found.machine <= MOST_OF_MACHINE:
            break
    return found


@contextlib.contextmanager
def children(work: Callable, rows: list[tuple]) -> Iterator[list[multiprocessing.Process]]:
    """Run `work` in a process for each row of arguments; yield the processes."""
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
    """Return `count` counters, which start at 0, in memory that processes share."""
    return multiprocessing.get_context("forkserver").RawArray("Q", count)


# ------------------------------------------------------- the loader


class Asleep(Dataset):
    """Samples that take `seconds` each, but hardly any CPU time."""

    def __init__(self, seconds: float):
        self.seconds = seconds

    def __len__(self) -> int:
        return 100_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.zeros(FLOATS)


def train(rank: int, ranks: int, port: int, hosts: list, case: tuple, counts: Sequence) -> None:
    """Be a rank, which takes batches as fast as they come."""
    meeting = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    use(*hosts)
    _, _, num_workers, batch_size, seconds = case
    options = {"num_workers": num_workers, "multiprocessing_context": "fork"}
    for _ in DataLoader(RemoteDataset(Asleep(seconds)), batch_size, **options):
        counts[rank] += 1


def loader_traffic(*case) -> Traffic:
    """Run the data hosts and ranks of a row of CASES."""
    workers, ranks, *_ = case
    with contextlib.ExitStack() as stack:
        hosts = dict(stack.enter_context(data_host(count)) for count in workers)
        counts, port = counters(ranks), free_port()
        rows = [(rank, ranks, port, [*hosts], case, counts) for rank in range(ranks)]
        clients = stack.enter_context(children(train, rows))
        return watch([*hosts.values()], clients, counts)


def loader() -> tuple[dict, list[str]]:
    """Print the loader's traffic; return all values, and the targets that were missed."""
    found, rows, missed = {}, [], []
    for case in CASES:
        workers, ranks, num_workers, batch_size, seconds = case
        limit = sum(workers) / seconds / batch_size
        hosts = f"{len(workers)} x {workers[0]}" if len({*workers}) == 1 else str(workers)
        traffic = quietly(loader_traffic, *case)
        rows.append((hosts, ranks, num_workers, batch_size, *traffic.cells(limit)))
        found[f"{hosts}, {ranks} x {num_workers}, {batch_size}"] = asdict(traffic)
        # Cases with fewer workers than loader.md's rule asks for only show what that costs.
        enough = ranks * num_workers * batch_size >= 2 * sum(workers)
        if enough and traffic.rate < LEAST * limit and traffic.machine <= MOST_OF_MACHINE:
            missed.append(f"data hosts of {hosts}, {ranks} ranks")
    table(f"data hosts x workers of each | ranks | num_workers | batch_size | {HEADS}", rows)
    return found, missed


# ------------------------------------------------------- the runtime


RANK = ["sh", "-c", f"date +started=%s.%N; exec sleep {TRAINING_SECONDS:g}"]
GROUPS = 'train_group="dnn", data_groups=["data"]'
LAUNCHER = f"""import hetero, time
print(f"coming={{time.time()}}", flush=True)
hetero.run({RANK}, ["sleep", "1000"], {GROUPS}, ranks=1, spare_cores=0)"""


@dataclass
class Job:
    """What was measured of a job."""

    start_ms: float  # from the last host's start to the last rank's start
    cpu_seconds: float  # the leader's until then, with 0.1 s for Python's start
    cpu_percent: float  # of a core, used by the leader while the training runs
    goodbye_seconds: float  # from the decision to end the job to the last goodbye
    machine: float  # percent of all cores' time while the training runs


def launch(number: int, hosts: int, port: int, folder: Path, log: int) -> subprocess.Popen:
    """Start a host's launcher as SageMaker does, with the job's description in its folder."""
    names = [f"algo-{n}" for n in range(1, hosts + 1)]
    groups = {"dnn": names[: hosts // 2], "data": names[hosts // 2 :]}
    [group] = [group for group, members in groups.items() if names[number] in members]
    resources = {
        "current_host": names[number],
        "current_group_name": group,
        "current_instance_type": "local",
        "network_interface_name": "lo",
        "instance_groups": [{"instance_group_name": g, "hosts": h} for g, h in groups.items()],
    }
    config = folder / names[number] / "input" / "config"
    config.mkdir(parents=True)
    (config / "resourceconfig.json").write_text(json.dumps(resources))
    local = {"addresses": dict.fromkeys(names, "127.0.0.1"), "base_port": port}
    environment = {"SAGEMAKER_BASE_DIR": str(folder / names[number]), "HETERO_TOKEN": TOKEN}
    environment |= {"LOCAL_SAGEMAKER": json.dumps(local), "PYTHONPATH": str(CODE)}
    environment = {**os.environ, **environment}
    command = [sys.executable, "-c", LAUNCHER]
    return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def run_job(hosts: int) -> Job:
    """Run the launchers of a job. The last one starts later, because hosts do not start at once."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder, tempfile.NamedTemporaryFile("a+") as log:

        def said(pattern: str) -> list[float]:
            text = Path(log.name).read_text()
            return [float(number) for number in re.findall(rf"{pattern}([\d.]+)", text)]

        processes: list[subprocess.Popen] = []
        try:
            for number in range(hosts):
                time.sleep(HOLD_SECONDS if number == hosts - 1 else 0)
                processes.append(launch(number, hosts, port, Path(folder), log.fileno()))
            deadline = time.monotonic() + LIMIT_SECONDS
            while len(said("started=")) < hosts // 2:
                assert time.monotonic() < deadline, Path(log.name).read_text()
                time.sleep(0.1)
            leader = [psutil.Process(processes[0].pid)]
            cpu, began = cpu_seconds(leader), time.monotonic()
            machine = psutil.cpu_percent(TRAINING_SECONDS / 2)
            taken = 100 * (cpu_seconds(leader) - cpu) / (time.monotonic() - began)
            for process in processes:
                process.wait(LIMIT_SECONDS)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        start_ms = 1000 * (max(said("started=")) - max(said("coming=")))
        [goodbye] = said("all hosts have signed off ")
        return Job(start_ms, cpu, taken, goodbye, machine)


def runtime() -> tuple[dict, list[str]]:
    """Print how long launchers take; return all values. There is no target."""
    found, rows = {}, []
    for hosts in JOBS:
        job = found[hosts] = quietly(run_job, hosts)
        row = f"{job.start_ms:.0f}", f"{job.cpu_seconds:.2f}", f"{job.cpu_percent:.1f} %"
        row = *row, f"{job.goodbye_seconds:.2f}", f"{job.machine:.0f} %"
        rows.append((hosts, *(row if job.machine <= MOST_OF_MACHINE else ("left out", *row[1:]))))
    heads = "hosts | ms from the last host to the last rank's start | leader's CPU s until then"
    table(f"{heads} | of a core, then | s from the decision to the last goodbye | machine", rows)
    return {hosts: asdict(job) for hosts, job in found.items()}, []


# ------------------------------------------------------- tf.data.service


def serve(workers: int, pipe: Connection) -> None:
    """Be the dispatcher and its workers."""
    import tensorflow as tf

    service = tf.data.experimental.service
    dispatcher = service.DispatchServer()
    config = service.WorkerConfig(dispatcher_address=dispatcher.target.split("://")[1])
    all_workers = [service.WorkerServer(config) for _ in range(workers)]
    pipe.send(dispatcher.target)
    all_workers[0].join()


def consume(number: int, target: str, counts: Sequence[int]) -> None:
    """Be a rank, which takes batches as fast as they come, from a job that all ranks share."""
    import tensorflow as tf
    from tensorflow.python.data.experimental.ops import testing

    def batches(file) -> tf.data.Dataset:
        dataset = tf.data.Dataset.range(1000).apply(testing.sleep(int(1e6 * TF_SECONDS)))
        return dataset.map(lambda n: tf.fill([SAMPLES * FLOATS], tf.cast(n, tf.float32)))

    service = tf.data.experimental.service
    dataset = tf.data.Dataset.range(1_000_000)  # files, which workers request as they need them
    dataset = dataset.interleave(
        batches, cycle_length=AT_ONCE, num_parallel_calls=AT_ONCE, deterministic=False
    )
    way = {"processing_mode": service.ShardingPolicy.DYNAMIC, "compression": None}
    dataset = dataset.apply(service.distribute(service=target, job_name="all", **way))
    for _ in dataset.prefetch(tf.data.AUTOTUNE):
        counts[number] += 1


def service_traffic(workers: int) -> Traffic:
    """Run the dispatcher with its workers, and the consumers."""
    counts, (pipe, its) = counters(TF_CONSUMERS), multiprocessing.Pipe()
    with children(serve, [(workers, its)]) as [server]:
        target = pipe.recv()
        rows = [(number, target, counts) for number in range(TF_CONSUMERS)]
        with children(consume, rows) as clients:
            return watch([psutil.Process(server.pid)], clients, counts)


def tf_data_service() -> tuple[dict, list[str]]:
    """Print the service's traffic; return all values. There is no target."""
    found = {workers: quietly(service_traffic, workers) for workers in TF_WORKERS}
    rows = [(n, *traffic.cells(n * AT_ONCE / TF_SECONDS)) for n, traffic in found.items()]
    table(f"tf.data.service's workers | {HEADS}", rows)
    return {workers: asdict(traffic) for workers, traffic in found.items()}, []


def main() -> None:
    """Measure and print all; fail if a target is missed."""
    found, missed = {}, []
    for part in (loader, runtime, tf_data_service):
        found[part.__name__], late = part()
        missed += late
    write_results("scale", found)
    print(f"\nTarget: {LEAST:.0%} of the batches that the loader's workers can prepare.")
    if missed:
        sys.exit(f"Targets missed: {missed}: is the machine busy?")


if __name__ == "__main__":
    main()
