"""How it grows: what hosts and ranks cost when they become more, and where the next limit is.

    python benchmarks/scale.py          fifteen to twenty minutes

Measures the loader (scale_loader.py), the runtime (scale_runtime.py) and TensorFlow's service
(scale_tensorflow.py) with real processes and real sockets, as far as a small machine carries them:
where more than 30 % of its CPU time was taken, a figure is the machine's, and is left out. Past
that it reckons: what the networks of AWS's instances carry, and what a core can send and receive.
"""

import math
import os
import sys
from dataclasses import asdict
from statistics import median

import scale_loader
import scale_runtime
import scale_tensorflow
from common import ROOT, at_least_two_cores, free_port, table, write_results
from scale_loader import (
    BATCH_SECONDS,
    LARGE_HOSTS,
    LARGE_NUM_WORKERS,
    LARGE_SECONDS,
    LARGE_WATCHED,
    LARGE_WORKERS,
    MOST_OF_MACHINE,
    UNEVEN,
    UNEVEN_BATCHES,
    WORKERS,
    Traffic,
)
from transfer import joined_here, loaders, make_batch, measure

sys.path.append(str(ROOT))
from shared import prices  # noqa: E402

LEAST_OF_LIMIT, LEAST_BESIDE = 0.9, 0.95  # batches per second; and beside a frozen client
MOST_OF_FIRST = 1.05  # of a first epoch's seconds, to the later ones'
JOBS = [(hosts, True) for hosts in (2, 4, 8, 16)] + [(hosts, False) for hosts in (16, 64, 256)]
IMAGE = {"float32": 3 * 224 * 224 * 4, "uint8": 3 * 224 * 224}  # bytes
BATCHES = [f"64 x 3 x 224 x 224 {dtype}" for dtype in IMAGE]
BATCHES += [f"{images} x 3 x 32 x 32 uint8" for images in (32, 512)]
DATA_HOSTS = "c5.4xlarge", "c5.18xlarge", "c6i.8xlarge", "c6i.32xlarge", "c7i.48xlarge"
TRAINING_HOSTS = "g5.2xlarge", "g6.12xlarge", "g5.48xlarge", "p4d.24xlarge", "p5.48xlarge"


def cells(traffic: Traffic, limit: float) -> tuple:
    """The columns of TRAFFIC."""
    if traffic.machine > MOST_OF_MACHINE:
        return (f"left out: {traffic.machine:.0%} of the machine was busy", *[""] * 7)
    cpu = f"{traffic.server_ms:.1f} + {traffic.client_ms:.1f}"
    threads = f"{traffic.server_threads}, {traffic.client_threads}"
    share = f"{traffic.rate / limit:.0%}"
    row = f"{traffic.rate:.1f}", share, cpu, traffic.connections, threads, traffic.client_mib
    return *row, f"{traffic.machine:.0%}"


TRAFFIC = (
    "batches/s | of what workers can | CPU ms a batch, servers + clients | connections "
    "| threads of a server, a client | MiB of a client | machine"
)


def loader() -> tuple[dict, list[str]]:
    """Measure and print the loader; return what was found, and the targets that were missed."""
    found, missed = {}, []
    large = [LARGE_HOSTS], [1], LARGE_WORKERS, LARGE_SECONDS, LARGE_NUM_WORKERS, LARGE_WATCHED
    for workers, seconds, grid in (
        (WORKERS, BATCH_SECONDS, scale_loader.grid()),
        (LARGE_WORKERS, LARGE_SECONDS, scale_loader.grid(*large)),
    ):
        rate = workers / seconds
        print(f"\nData hosts of {workers} workers, which can prepare {rate:.1f} batches/s:")
        rows = [(*key, *cells(traffic, key[0] * rate)) for key, traffic in grid.items()]
        table(f"data hosts | ranks | num_workers | {TRAFFIC}", rows)
        for (hosts, ranks, own), traffic in grid.items():
            found[f"{hosts} x {workers}, {ranks} x {own}"] = asdict(traffic)
            low = traffic.rate < LEAST_OF_LIMIT * hosts * rate
            # Fewer workers of the DataLoader than README's rule asks for are there to show it.
            if low and own == max(key[2] for key in grid) and traffic.machine <= MOST_OF_MACHINE:
                missed.append(f"{hosts} data hosts of {workers}, {ranks} ranks")
    return found, missed


def epochs() -> tuple[list[float], list[str]]:
    """Measure and print epochs with a large and a small data host; return as `loader` does."""
    first, *later = found = scale_loader.epochs()
    best = UNEVEN_BATCHES * BATCH_SECONDS / sum(UNEVEN)
    each = ", ".join(f"{seconds:.1f}" for seconds in found)
    print(f"\nSeconds of epochs with hosts of {UNEVEN} workers: {each}; at best {best:.1f}")
    return found, ["the first epoch"] * (first > MOST_OF_FIRST * max(later))


def clients() -> tuple[dict, list[str]]:
    """Measure and print a server with many clients; return as `loader` does."""
    limit = scale_loader.MANY_WORKERS / scale_loader.CLIENT_SECONDS
    found = scale_loader.clients_of_one_server()
    rows = [
        (
            who,
            *cells(traffic, limit),
            f"{min(traffic.batches)} to {max(traffic.batches)} in {traffic.seconds:.0f} s",
        )
        for who, traffic in found.items()
    ]
    print(f"\nOne server, whose workers can prepare {limit:.0f} batches/s; figures of the 62:")
    table(f"clients | {TRAFFIC} | batches of each", rows)
    alone, beside = found.values()
    is_quiet = max(alone.machine, beside.machine) <= MOST_OF_MACHINE
    missed = ["a frozen client"] * (is_quiet and beside.rate < LEAST_BESIDE * alone.rate)
    return {who: asdict(traffic) for who, traffic in found.items()}, missed


def runtime() -> dict:
    """Measure and print the runtime."""
    found = {
        job: scale_loader.quietly(lambda job=job: scale_runtime.measure(*job, free_port()))
        for job in JOBS
    }
    rows = []
    for (hosts, real), job in found.items():
        row = hosts, "processes" if real else "in one process"
        if job.machine > MOST_OF_MACHINE:
            rows.append((*row, f"left out: {job.machine:.0%} of the machine was busy", *[""] * 4))
            continue
        row = *row, f"{job.start_ms:.0f}", f"{job.cpu_seconds:.2f}", f"{job.cpu_share:.1%}"
        rows.append((*row, f"{job.goodbye_seconds:.2f}", f"{job.machine:.0%}"))
    print("\nRuntime:")
    heads = "hosts | the others' launchers | ms from the last host to the last rank's start"
    heads += " | leader's CPU s until then | of a core, then | s from the decision to the last "
    table(heads + "goodbye | machine", rows)
    return {f"{hosts}, {real}": asdict(job) for (hosts, real), job in found.items()}


def tensorflow() -> dict:
    """Measure and print TensorFlow's service."""
    found = scale_tensorflow.grid()
    rate = WORKERS / scale_tensorflow.BATCH_SECONDS
    print(f"\ntf.data.service, {scale_tensorflow.CONSUMERS} consumers:")
    rows = [(workers, *cells(traffic, workers * rate)) for workers, traffic in found.items()]
    table(f"workers | {TRAFFIC}", rows)
    return {str(workers): asdict(traffic) for workers, traffic in found.items()}


def batches() -> dict[str, tuple[float, ...]]:
    """Measure and print what images cost on their way.

    Returns CPU seconds for a GB: the training process, its DataLoader's workers, the process of the
    data host that sends.
    """
    data_core, *_, training_core = at_least_two_cores()
    os.sched_setaffinity(0, {training_core})
    rows, costs = [], {}
    for shape in BATCHES:
        [way] = measure(shape, loaders((2,), joined_here), data_core).values()
        gigabytes = make_batch(shape).nbytes / 1e9
        parts = [median(p) for p in (way.training_process, way.training_workers, way.front)]
        costs[shape] = tuple(part / gigabytes for part in parts)
        ms = (f"{1e6 * part / int(shape.split()[0]):.0f}" for part in parts)
        rows.append((shape, f"{1e3 * gigabytes:.1f}", *ms))
    print("\nms of CPU time for 1,000 images:")
    heads = "batch | MB | training process | its DataLoader's workers | data host's sending process"
    table(heads, rows)
    return costs


def reckon(costs: dict[str, tuple[float, ...]]) -> None:
    """Print where the next limit is on AWS, with the CPU seconds for a GB from `batches`."""
    dtypes = dict(zip(IMAGE, BATCHES, strict=False))
    rank, server = ({t: 1 / costs[dtypes[t]][i] for t in IMAGE} for i in (0, 2))  # GB/s of a core
    rows = []
    for name in DATA_HOSTS:
        host = prices.find(f"ml.{name}")
        network = host.network_gbps / 8
        carried = [network, network, *server.values()]
        sizes = [*IMAGE.values()] * 2
        limits = [host.vcpus * s / (1e6 * c) for s, c in zip(sizes, carried, strict=True)]
        row = name, host.vcpus, f"{host.network_gbps:g}", *(f"{ms:.1f}" for ms in limits)
        rows.append((*row, math.ceil(network / server["uint8"])))
    print(
        "\nData hosts: the limit is no more the cores below so many ms of CPU time for an image of"
    )
    print("3 x 224 x 224. And how many server processes fill the network:")
    heads = "ml. | vCPUs | Gbit/s | but the network: float32 | uint8 "
    table(heads + "| or one server process: float32 | uint8 | processes", rows)
    rows = []
    for name in TRAINING_HOSTS:
        host = prices.find(f"ml.{name}")
        row = [name, host.gpus, f"{host.network_gbps:g}"]
        row += [f"{1e9 * host.network_gbps / 8 / size:,.0f}" for size in IMAGE.values()]
        rows.append((*row, *(f"{1e9 * host.gpus * rank[t] / IMAGE[t]:,.0f}" for t in IMAGE)))
    workers = ", ".join(f"{costs[dtypes[t]][1] / costs[dtypes[t]][0]:.1f} ({t})" for t in IMAGE)
    print("\nTraining hosts, one rank for each GPU. So many workers of a rank's DataLoader bring")
    print(f"what its process can take: {workers}.")
    heads = "ml. | GPUs | Gbit/s | images/s in the network: float32 | uint8 "
    table(heads + "| that the ranks can receive: float32 | uint8", rows)


def main() -> None:
    """Measure and print all; fail if a target is missed."""
    found, missed = {}, []
    for part in (loader, epochs, clients):
        found[part.__name__], late = part()
        missed += late
    for part in (runtime, tensorflow, batches):  # the last pins this process
        found[part.__name__] = part()
    reckon(found["batches"])
    write_results("scale", found)
    if missed:
        sys.exit(f"Targets missed: {missed}: is the machine busy?")


if __name__ == "__main__":
    main()
