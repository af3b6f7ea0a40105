"""Strangers at every port that a running job of the PyTorch example listens on.

test_feed_servers.py tests what strangers could ask of a data server.
"""

import contextlib
import itertools
import json
import os
import socket
import time

import psutil
import pytest

from helpers.jobs import Jobs
from helpers.running import Running, after_steps, start, upload_images
from helpers.waiting import wait_until

MAY_GROW = 50 << 20  # bytes per process, including what training itself takes
ATTACKS = [
    os.urandom(1 << 16),
    b"",  # nothing at all
    b'{"host": "algo-1", "tok',  # half a message
    b"a" * (16 << 20),  # a line of 16 MiB
    b"[" * 8000 + b"\n",  # nested too deep
]
REFUSED = {"a guess": "wrong token", "a secret": "unknown host, or already connected"}


def last_step(job: Running) -> int:
    return max(int(line.split()[0][5:]) for line in job.log() if line.startswith("step="))


def sizes_and_ports(job: Running) -> tuple[dict[psutil.Process, int], set[tuple[str, int]]]:
    """Return the size of each process in memory, and the addresses that processes listen on."""
    sizes, addresses = {}, set()
    for process in job.processes():
        with contextlib.suppress(psutil.NoSuchProcess):  # a DataLoader's worker, after its epoch
            sizes[process] = process.memory_info().rss
            connections = process.net_connections("tcp")
            addresses |= {c.laddr for c in connections if c.status == psutil.CONN_LISTEN}
    everywhere = ("0.0.0.0", "::")
    return sizes, {("127.0.0.1" if ip in everywhere else ip, port) for ip, port in addresses}


@pytest.mark.thorough
def test_strangers_do_no_harm(jobs: Jobs):
    """Training continues, no process grows, and the log has only a few lines about them."""
    upload_images()
    job = start(jobs, max_runtime_seconds=600)
    after_steps(job)
    before, addresses = sizes_and_ports(job)
    # Ours, which are the launcher's, rank 0's and the data servers', and gloo's in each rank.
    assert len({port for _, port in addresses}) >= 3 + 2
    with contextlib.ExitStack() as connections:
        for address, attack in itertools.product(addresses, ATTACKS):
            connection = connections.enter_context(socket.create_connection(address, timeout=5))
            connection.settimeout(1)
            with contextlib.suppress(OSError):  # cut off or ignored: both are fine
                connection.sendall(attack)
        time.sleep(8)  # held open longer than the launcher waits
    for address in addresses:
        with contextlib.ExitStack() as connections:
            for _ in range(500):
                with contextlib.suppress(OSError):
                    connections.enter_context(socket.create_connection(address, timeout=5))
            time.sleep(0.5)
    [leader] = [address for address in addresses if address[1] == job.first_port()]
    for token, reason in REFUSED.items():
        with socket.create_connection(leader) as connection:
            hello = {"token": token, "host": job.host("data_group", 0)}
            connection.sendall(json.dumps(hello).encode() + b"\n")
            assert json.loads(connection.makefile().read()) == {"refused": reason}
        jobs.wait_for_log(job.name, f"refused a connection from 127.0.0.1: {reason}")

    step = last_step(job)
    wait_until(lambda: last_step(job) >= step + 3)
    after, _ = sizes_and_ports(job)
    grown = {process: after[process] - before[process] for process in {*before} & {*after}}
    assert max(grown.values()) < MAY_GROW, grown
    refusals = [line for line in job.log() if line.startswith("hetero: refused")]
    reasons = {line.split(": ", 2)[2] for line in refusals}
    assert {"not a launcher's message", "silent for 5 s", "wrong token"} <= reasons
    assert len(refusals) < 30
    job.stop()
    assert jobs.wait(job.name)["TrainingJobStatus"] == "Stopped"
