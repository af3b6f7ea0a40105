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

pytestmark = pytest.mark.thorough
MAY_GROW = 50 << 20  # bytes per process, including what training itself takes
ATTACKS = [
    os.urandom(1 << 16),
    b"",  # nothing at all
    b'{"host": "algo-1", "tok',  # half a message
    b"a" * (16 << 20),  # a line of 16 MiB
    b"[" * 8000 + b"\n",  # nested too deep
]


@pytest.fixture(scope="module")
def job(jobs: Jobs) -> Running:
    """A job that trains until it is stopped; it must still train after each test."""
    upload_images()
    running = start(jobs, max_runtime_seconds=600)
    after_steps(running)
    return running


@pytest.fixture
def unharmed(job: Running):
    """Check after the test that training continues and no process has grown much."""
    before = {}
    for process in job.processes():
        with contextlib.suppress(psutil.NoSuchProcess):  # a DataLoader's worker, after its epoch
            before[process] = process.memory_info().rss
    yield
    step = last_step(job)
    wait_until(lambda: last_step(job) >= step + 3)
    grown = {}
    for process, size in before.items():
        with contextlib.suppress(psutil.NoSuchProcess):
            grown[process] = process.memory_info().rss - size
    assert max(grown.values()) < MAY_GROW, grown


def last_step(job: Running) -> int:
    return max(int(line.split()[0][5:]) for line in job.log() if line.startswith("step="))


def listeners(job: Running) -> list[tuple[str, int]]:
    """Return where the job listens: launcher, rank 0, data servers, and gloo in each rank."""
    found = set()
    for process in job.processes():
        with contextlib.suppress(psutil.NoSuchProcess):  # a DataLoader's worker, after its epoch
            connections = process.net_connections("tcp")
            found |= {c.laddr for c in connections if c.status == psutil.CONN_LISTEN}
    return [("127.0.0.1" if ip in ("0.0.0.0", "::") else ip, port) for ip, port in found]


def leader(job: Running) -> tuple[str, int]:
    return next(address for address in listeners(job) if address[1] == job.first_port())


def refusals(job: Running, why: str) -> int:
    return sum(line.startswith("hetero: refused") and why in line for line in job.log())


def test_garbage_on_every_port(job: Running, unharmed):
    addresses = listeners(job)
    assert len({port for _, port in addresses}) >= 3 + 2  # ours, and at least one per rank
    with contextlib.ExitStack() as connections:
        for address, attack in itertools.product(addresses, ATTACKS):
            connection = connections.enter_context(socket.create_connection(address, timeout=5))
            connection.settimeout(1)
            with contextlib.suppress(OSError):  # cut off or ignored: both are fine
                connection.sendall(attack)
        time.sleep(8)  # held open longer than the launcher waits


def test_500_connections_at_once_on_every_port(job: Running, unharmed):
    for address in listeners(job):
        with contextlib.ExitStack() as connections:
            for _ in range(500):
                with contextlib.suppress(OSError):
                    connections.enter_context(socket.create_connection(address, timeout=5))
            time.sleep(0.5)


def test_a_wrong_token_and_a_host_that_has_joined_are_refused_and_logged(job: Running, unharmed):
    reasons = {"a guess": "wrong token", "a secret": "unknown host, or already connected"}
    for token, reason in reasons.items():
        with socket.create_connection(leader(job)) as connection:
            hello = {"token": token, "host": job.host("data_group", 0)}
            connection.sendall(json.dumps(hello).encode() + b"\n")
            assert json.loads(connection.makefile().read()) == {"refused": reason}
        job.jobs.wait_for_log(job.name, f"refused a connection from 127.0.0.1: {reason}")


def test_refusals_are_few_and_the_job_ends_as_it_should(job: Running):
    """The last test here: after more than 500 connections, the log has only a few lines."""
    reasons = {line.split(": ", 2)[2] for line in job.log() if line.startswith("hetero: refused")}
    assert {"not a launcher's message", "silent for 5 s", "wrong token"} <= reasons
    assert refusals(job, "") < 30
    job.stop()
    assert job.jobs.wait(job.name)["TrainingJobStatus"] == "Stopped"
