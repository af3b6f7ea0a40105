"""How it grows: what hosts and ranks cost when they become more, and where the next limit is.

    python benchmarks/scale.py          eight to twelve minutes

Measures the loader (scale_loader.py), the runtime (scale_runtime.py) and TensorFlow's service
(scale_tensorflow.py) with real processes and real sockets, as far as a small machine carries them:
where more than 30 % of its CPU time was taken, a figure is the machine's, and is left out. Past
that it reckons: what the networks of AWS's instances carry, and what one server process sends.
"""

import math
import os
import sys
from collections.abc import Iterable
from dataclasses import asdict
from statistics import median

import scale_loader
import scale_runtime
import scale_tensorflow
from scale_loader import (
    BATCH_SECONDS,
    LARGE_HOSTS,
    LARGE_WORKERS,
    MOST_OF_MACHINE,
    WORKERS,
    Traffic,
)
from transfer import OURS, ROOT, WAYS, at_least_two_cores, free_port, measure, write_results

from feed.epoch import MAX_THREADS

sys.path.append(str(ROOT))
from shared import prices  # noqa: E402

LEAST_OF_LIMIT, LEAST_BESIDE = 0.9, 0.95  # batches per second; and beside a frozen client
JOBS = [(hosts, True) for hosts in (2, 4, 8, 16)] + [(hosts, False) for hosts in (16, 64, 256)]
IMAGE = {"float32": 3 * 224 * 224 * 4, "uint8": 3 * 224 * 224}  # bytes
BATCHES = [f"64 x 3 x 224 x 224 {dtype}" for dtype in IMAGE]
BATCHES += [f"{images} x 3 x 32 x 32 uint8" for images in (32, 512)]
DATA_HOSTS = "c5.4xlarge", "c5.18xlarge", "c6i.8xlarge", "c6i.32xlarge", "c7i.48xlarge"
TRAINING_HOSTS = "g5.2xlarge", "g6.12xlarge", "g5.48xlarge", "p4d.24xlarge", "p5.48xlarge"


def table(heads: str, rows: Iterable[tuple]) -> None:
    """Print a table of Markdown."""
    print(f"\n| {heads} |\n|{'---|' * (heads.count('|') + 1)}")
    for row in rows:
        print(f"| {' | '.join(map(str, row))} |", flush=True)


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
    rate, found, missed = WORKERS / BATCH_SECONDS, {}, []
    grids = {WORKERS: (rate, scale_loader.grid())}
    large_rate = rate * max(scale_loader.COUNTS) / LARGE_HOSTS
    large = scale_loader.grid([LARGE_HOSTS], [1, 2], LARGE_WORKERS, large_rate)
    grids[LARGE_WORKERS] = large_rate, large
    for workers, (rate, grid) in grids.items():
        print(f"\nData hosts of {workers} workers, which can prepare {rate:.0f} batches/s:")
        rows = [(*key, *cells(traffic, key[0] * rate)) for key, traffic in grid.items()]
        table(f"data hosts | ranks | {TRAFFIC}", rows)
        for (hosts, ranks), traffic in grid.items():
            found[f"{hosts} x {workers}, {ranks}"] = asdict(traffic)
            # Of all workers so many can be busy as the ranks have calls open.
            busy = min(hosts * workers, ranks * MAX_THREADS) / (hosts * workers)
            if traffic.machine <= MOST_OF_MACHINE:
                low = traffic.rate < LEAST_OF_LIMIT * busy * hosts * rate
                missed += [f"{hosts} data hosts, {ranks} ranks"] * low
    return found, missed


def clients() -> tuple[dict, list[str]]:
    """Measure and print a server with many clients; return as `loader` does."""
    limit, found = scale_loader.MANY_WORKERS / BATCH_SECONDS, scale_loader.clients_of_one_server()
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
    rate = WORKERS / BATCH_SECONDS
    print(f"\ntf.data.service, {scale_tensorflow.CONSUMERS} consumers:")
    rows = [(workers, *cells(traffic, workers * rate)) for workers, traffic in found.items()]
    table(f"workers | {TRAFFIC}", rows)
    return {str(workers): asdict(traffic) for workers, traffic in found.items()}


def batches() -> dict:
    """Measure and print what a server process sends of images, at full speed; return GB/s."""
    *data_cores, training_core = at_least_two_cores()
    os.sched_setaffinity(0, {training_core})
    rows, speeds = [], {}
    for shape in BATCHES:
        found = measure({OURS: WAYS[OURS]}, shape, data_cores)[OURS]
        images, *sizes, dtype = shape.replace(" x ", " ").split()
        gigabytes = int(images) * int(sizes[0]) * int(sizes[1]) * int(sizes[2]) / 1e9
        gigabytes *= 4 if dtype == "float32" else 1
        rate, cpu = median(found["batches/s"]), median(found["CPU s"])
        speeds[shape] = rate * gigabytes
        row = shape, f"{1e3 * gigabytes:.1f}", f"{rate:.0f}", f"{rate * int(images):,.0f}"
        cpu_ms = 1e6 * cpu / int(images)
        rows.append((*row, f"{speeds[shape]:.2f}", f"{cpu_ms:.0f}"))
    print("\nOne server process and one rank at full speed:")
    heads = "batch | MB | batches/s | images/s | GB/s | ms of CPU for 1,000 images, training side"
    table(heads, rows)
    return speeds


def reckon(speeds: dict[str, float]) -> None:
    """Print where the next limit is on AWS, with the GB/s of one server process from `batches`."""
    process = {dtype: speeds[shape] for dtype, shape in zip(IMAGE, BATCHES, strict=False)}
    rows = []
    for name in DATA_HOSTS:
        host = prices.find(f"ml.{name}")
        network = host.network_gbps / 8
        carried = [network, network, process["float32"], process["uint8"]]
        sizes = [*IMAGE.values()] * 2
        limits = [host.vcpus * s / (1e6 * c) for s, c in zip(sizes, carried, strict=True)]
        processes = math.ceil(network / process["uint8"])
        row = name, host.vcpus, f"{host.network_gbps:g}", *(f"{ms:.1f}" for ms in limits)
        rows.append((*row, processes, math.ceil(host.vcpus / MAX_THREADS)))
    print(
        "\nData hosts: the limit is no more the cores below so many ms of CPU time for an image of"
    )
    print(
        "3 x 224 x 224. How many server processes fill the network; ranks that keep all cores busy:"
    )
    heads = "ml. | vCPUs | Gbit/s | but the network: float32 | uint8 "
    table(heads + "| or one server process: float32 | uint8 | processes | ranks", rows)
    rows = []
    for name in TRAINING_HOSTS:
        host = prices.find(f"ml.{name}")
        row = [name, host.gpus, f"{host.network_gbps:g}"]
        row += [f"{1e9 * host.network_gbps / 8 / size:,.0f}" for size in IMAGE.values()]
        rows.append((*row, *(f"{1e9 * host.gpus * process[t] / IMAGE[t]:,.0f}" for t in IMAGE)))
    print("\nTraining hosts, one rank for each GPU:")
    heads = "ml. | GPUs | Gbit/s | images/s in the network: float32 | uint8 "
    table(heads + "| that the ranks can receive: float32 | uint8", rows)


def main() -> None:
    """Measure and print all; fail if a target is missed."""
    found, missed = {}, []
    for part in (loader, clients):
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
