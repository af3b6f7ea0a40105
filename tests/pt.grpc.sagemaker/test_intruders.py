"""Strangers at every port that a running job of the PyTorch example listens on."""

import contextlib
import itertools
import json
import os
import socket
import threading
import time

import grpc
import psutil
import pytest

import endings
from endings import Running
from jobs import Jobs

pytestmark = pytest.mark.thorough
GIVEN_UP = 50 << 20  # bytes that a process may grow by, among them what training itself takes
ATTACKS = [
    os.urandom(1 << 16),
    b"",  # nothing at all
    b'{"host": "algo-1", "tok',  # half a message
    b"a" * (16 << 20),  # a line of 16 MiB
    b"[" * 8000 + b"\n",  # nested too deep
]


@pytest.fixture(scope="module")
def job(jobs: Jobs) -> Running:
    """A job that trains until it is stopped; it must still do so after each test."""
    endings.upload_images()
    running = endings.start(jobs, max_runtime_seconds=600)
    endings.after_steps(running)
    return running


@pytest.fixture
def unharmed(job: Running):
    """After the test training goes on, and no process has grown much."""
    before = {}
    for process in job.processes():
        with contextlib.suppress(psutil.NoSuchProcess):  # a DataLoader's, whose epoch is over
            before[process] = process.memory_info().rss
    yield
    step = last_step(job)
    deadline = time.monotonic() + 30
    while last_step(job) < step + 3:
        assert time.monotonic() < deadline, f"training has stopped at step {step}"
        time.sleep(0.3)
    grown = {}
    for process, size in before.items():
        with contextlib.suppress(psutil.NoSuchProcess):
            grown[process] = process.memory_info().rss - size
    assert max(grown.values()) < GIVEN_UP, grown


def last_step(job: Running) -> int:
    return max(int(line.split()[0][5:]) for line in job.log() if line.startswith("step="))


def listeners(job: Running) -> list[tuple[str, int]]:
    """Where the job's processes listen: launcher, rank 0, data servers, and gloo in each rank."""
    found = set()
    for process in job.processes():
        with contextlib.suppress(psutil.NoSuchProcess):  # a DataLoader's, whose epoch is over
            connections = process.net_connections("tcp")
            found |= {c.laddr for c in connections if c.status == psutil.CONN_LISTEN}
    return [("127.0.0.1" if ip in ("0.0.0.0", "::") else ip, port) for ip, port in found]


def first_port(job: Running) -> int:
    return json.loads(job.environment()["LOCAL_SAGEMAKER"])["base_port"]


def leader(job: Running) -> tuple[str, int]:
    return next(address for address in listeners(job) if address[1] == first_port(job))


def refusals(job: Running, why: str) -> int:
    return sum(line.startswith("hetero: refused") and why in line for line in job.log())


def test_talk_that_is_not_ours_on_every_port(job: Running, unharmed):
    addresses = listeners(job)
    assert len({port for _, port in addresses}) >= 3 + 2  # ours, and at least one of each rank
    with contextlib.ExitStack() as connections:
        for address, attack in itertools.product(addresses, ATTACKS):
            connection = connections.enter_context(socket.create_connection(address, timeout=5))
            connection.settimeout(1)
            with contextlib.suppress(OSError):  # cut off, or not listened to: both will do
                connection.sendall(attack)
        time.sleep(8)  # held open longer than the launcher waits


def test_500_connections_at_once_on_every_port(job: Running, unharmed):
    for address in listeners(job):
        with contextlib.ExitStack() as connections:
            for _ in range(500):
                with contextlib.suppress(OSError):
                    connections.enter_context(socket.create_connection(address, timeout=5))
            time.sleep(0.5)


def test_wrong_token_and_a_host_that_is_there_are_refused_with_a_line(job: Running, unharmed):
    reasons = {"a guess": "wrong token", "a secret": "a host that is not awaited"}
    for token, reason in reasons.items():
        with socket.create_connection(leader(job)) as connection:
            hello = {"token": token, "host": job.host("data_group", 0)}
            connection.sendall(json.dumps(hello).encode() + b"\n")
            assert json.loads(connection.makefile().read()) == {"refused": reason}
        job.jobs.wait_for_log(job.name, f"refused a connection from 127.0.0.1: {reason}")


def test_wrong_token_is_refused_by_data_servers_with_a_line(job: Running, unharmed):
    feed = next(a for a in listeners(job) if a[1] == first_port(job) + 2)
    with grpc.insecure_channel(f"{feed[0].removeprefix('::ffff:')}:{feed[1]}") as channel:
        ask = channel.unary_unary("/dataset_feed.DatasetFeed/Ask")
        for _ in range(20):
            with pytest.raises(grpc.RpcError) as refused:
                ask(b"", metadata=[("feed-bin", bytes(80))])
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    job.jobs.wait_for_log(job.name, "refused a call")
    assert sum("refused a call" in line for line in job.log()) <= 2  # in 20 calls


def test_calls_without_a_token_that_never_say_more(job: Running, unharmed):
    """More of them than a data server takes at a time; training asks for batches meanwhile."""
    feed = next(a for a in listeners(job) if a[1] == first_port(job) + 2)
    with grpc.insecure_channel(f"{feed[0].removeprefix('::ffff:')}:{feed[1]}") as channel:
        method = channel.stream_unary("/dataset_feed.DatasetFeed/Upload")
        silence = threading.Event()
        calls = [method.future(iter(silence.wait, None)) for _ in range(3000)]
        codes = {call.exception(timeout=10).code() for call in calls}
        silence.set()
    assert grpc.StatusCode.UNAUTHENTICATED in codes  # others: too many at once
    refused = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.CANCELLED}  # as said, or cut off
    assert codes <= {*refused, grpc.StatusCode.RESOURCE_EXHAUSTED}


def test_refusals_are_few_and_the_job_ends_as_it_should(job: Running):
    """The last test of this module: 500 connections and more have left a few lines."""
    reasons = {line.split(": ", 2)[2] for line in job.log() if line.startswith("hetero: refused")}
    assert {"not a launcher's message", "silent for 5 s", "wrong token"} <= reasons
    assert refusals(job, "") < 30
    job.stop()
    assert job.jobs.wait(job.name)["TrainingJobStatus"] == "Stopped"
