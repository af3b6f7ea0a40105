"""The data server of the PyTorch example: where it listens, whom it refuses, and how it ends."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator

import grpc
import psutil
import pytest
import torch
from feed.client import RemoteDataset

from data_hosts import (
    BIG,
    SAMPLES,
    SLOW,
    TOKEN,
    DataHost,
    Zoo,
    free_port,
    has_ended,
    service,
    up,
    wait_until,
)
from feed.wire import SERVICE, messages

SOAK = "SOAK" in os.environ
# A host that has sent the first batch of these is busy with the SLOW ones next, with all workers.
BUSY = [[0]] * 4 + [[SLOW]] * 6


def keep_busy(host: DataHost) -> Iterator:
    """The batches of an epoch in which all workers of a host have begun one of the SLOW samples."""
    batches = iter(service(up(host), BUSY))
    next(batches)
    wait_until(lambda: host.said().count("asleep") == host.options["num_workers"], seconds=30)
    return batches


def serves_on(host: DataHost) -> bool:
    batches = service([host], [[i] for i in range(SAMPLES)])
    return [batch["index"].item() for batch in batches] == list(range(SAMPLES))


# Where


def test_port_in_use_is_refused(start):
    [host] = up(start("zoo"))
    second = start("zoo", address=host.address)
    assert second.process.wait(timeout=60) != 0
    assert f"OSError: cannot listen at '{host.address}': in use" in second.said()


@pytest.mark.thorough
def test_addresses_of_all_kinds(start):
    kinds = [("localhost", "127.0.0.1"), ("0.0.0.0", "127.0.0.1")]
    if any(address.address == "::1" for address in psutil.net_if_addrs().get("lo", [])):
        kinds += [("[::1]", "[::1]"), ("[::]", "127.0.0.1")]
    ports = [free_port() for _ in kinds]
    for (serve_at, _), port in zip(kinds, ports, strict=True):
        start("zoo", address=f"{serve_at}:{port}")
    for (_, ask_at), port in zip(kinds, ports, strict=True):
        assert len(RemoteDataset([f"{ask_at}:{port}"], TOKEN)) == len(Zoo())


# What it says when it can't


def test_a_dataset_that_no_worker_can_load_ends_the_server(start):
    host = start("unloadable", num_workers=2)
    assert host.process.wait(timeout=60) != 0
    said = host.said()
    assert "RuntimeError: a worker process has died (exit code 1); is there memory for the" in said
    assert "LookupError: no such file" in said  # what the Dataset itself had to say


def test_serve_without_a_guard_says_so(tmp_path):
    program = tmp_path / "unguarded.py"
    program.write_text(
        f"import sys\nsys.path[:0] = {sys.path!r}\n"
        f"from feed.server import serve\nserve(range(9), '127.0.0.1:{free_port()}', 'a token')\n"
    )
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert 'RuntimeError: put serve under `if __name__ == "__main__":`' in done.stderr


# Strangers, and clients that have gone


def test_strangers_and_garbage_are_refused_and_do_no_harm(start):
    """One line in the log for all refused calls within ten seconds."""
    [host] = up(start("zoo"))
    with grpc.insecure_channel(host.address) as channel:
        ask = channel.unary_stream(f"/{SERVICE}/Batch", messages.BatchRequest.SerializeToString)
        many = messages.BatchRequest(indices=range(2_000_000))
        for request, token, code in [
            (messages.BatchRequest(), "a guess", grpc.StatusCode.UNAUTHENTICATED),
            (messages.BatchRequest(), "", grpc.StatusCode.UNAUTHENTICATED),
            (messages.BatchRequest(), TOKEN, grpc.StatusCode.FAILED_PRECONDITION),
            (many, TOKEN, grpc.StatusCode.RESOURCE_EXHAUSTED),
        ]:
            with pytest.raises(grpc.RpcError) as refused:
                list(ask(request, metadata=[("authorization", f"Bearer {token}")]))
            assert refused.value.code() is code
        silent = channel.stream_unary(f"/{SERVICE}/Batch")  # calls that never say more
        silence = threading.Event()
        calls = [silent.future(iter(silence.wait, None)) for _ in range(3000)]
        codes = {call.exception(timeout=60).code() for call in calls}
        silence.set()
    assert grpc.StatusCode.UNAUTHENTICATED in codes  # others: too many at once
    with socket.create_connection(("127.0.0.1", int(host.address.split(":")[1]))) as stranger:
        stranger.sendall(os.urandom(100_000))
        assert serves_on(host)
    assert host.said().count("feed: refused a call from ipv4:127.0.0.1:") <= 3  # in half a minute


@pytest.mark.thorough
@pytest.mark.parametrize("end", ["kill", "suspend"])
def test_a_client_that_dies_or_hangs_in_mid_transfer_does_not_hold_up_others(start, end):
    [host] = up(start("zoo"))
    code = f"""if True:
        import sys
        sys.path[:0] = {sys.path!r}
        from data_hosts import *
        dataset = RemoteDataset([{host.address!r}], TOKEN)
        loader = DataLoader(RemoteBatches(dataset, BatchKeys([[{BIG}]] * 1000)), batch_size=None)
        for batch in loader:
            print("batch", flush=True)"""
    client = psutil.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert client.stdout.readline() == b"batch\n"
        getattr(client, end)()
        assert serves_on(host)
    finally:
        client.kill()
        client.communicate()


# Memory


@pytest.mark.thorough
def test_memory_stays_flat(start):
    [host] = up(start("zoo", num_workers=2))
    count, early = (10_000, 1000) if SOAK else (1000, 200)
    sizes = []
    for number, _ in enumerate(service([host], [list(range(50))] * count), start=1):
        if number in (early, count):
            everyone = [psutil.Process(), *host.processes()]
            sizes.append([process.memory_info().rss / 2**20 for process in everyone])
    growth = [after - before for before, after in zip(*sizes, strict=True)]  # MiB, by process
    assert max(growth) < 20, growth


@pytest.mark.skipif(not SOAK, reason="takes 10 GB of memory: make soak")
def test_batches_of_more_than_a_gibibyte(start):
    for number, batch in enumerate(service([start("huge")], [[0], [1]])):
        assert batch.nbytes > 2**30
        assert torch.equal(batch[0], torch.arange(number, number + batch.shape[1]))


# Its end


@pytest.mark.parametrize("workers, signals", [(1, 1), (2, 5)])
def test_sigterm_to_all_of_a_busy_host_s_processes_ends_them_soon(
    start, monkeypatch, workers, signals
):
    folder = tempfile.mkdtemp()  # with a short name, as the sockets in it need
    monkeypatch.setenv("TMPDIR", folder)
    host = start("zoo", num_workers=workers)
    batches = keep_busy(host)
    processes = host.processes()
    for _ in range(signals):  # as the launcher sends it, and perhaps SageMaker, too
        os.killpg(host.process.pid, signal.SIGTERM)
        time.sleep(0.02)
    assert host.process.wait(timeout=10) == 0
    wait_until(lambda: all(map(has_ended, processes)))
    said = host.said()
    assert "worker" not in said and "Traceback" not in said
    os.rmdir(folder)  # it is empty
    del batches


@pytest.mark.parametrize("at_its_start", [True, False])
def test_sigterm_while_a_worker_is_started_ends_the_host_too(start, at_its_start):
    """The first one, or one that replaces it over a batch that is waited for."""
    host = start("heavy")
    if not at_its_start:
        batches = iter(service(up(host), BUSY))
        next(batches)
        [first] = host.workers()
        first.kill()
        wait_until(lambda: host.workers() and host.workers() != [first], seconds=30)
    else:
        wait_until(lambda: "loading" in host.said(), seconds=60)
    processes = host.processes()
    host.process.terminate()
    assert host.process.wait(timeout=10) == 0
    wait_until(lambda: all(map(has_ended, processes)))


def test_sigterm_that_another_thread_of_the_server_takes_ends_it(start):
    [host] = up(start("zoo"))
    another = next(thread.id for thread in host.process.threads() if thread.id != host.process.pid)
    assert ctypes.CDLL(None).tgkill(host.process.pid, another, signal.SIGTERM) == 0
    assert host.process.wait(timeout=10) == 0


def test_no_worker_outlives_its_server(start):
    host = start("zoo", num_workers=2)
    batches = keep_busy(host)
    processes = host.processes()
    host.kill()
    wait_until(lambda: all(map(has_ended, processes)))
    del batches
