"""How fast tensors get from a data process into a training process: our loader and its peers.

    python benchmarks/transfer.py

Each way sends the same batch again and again from a worker of a data process, both pinned to the
first core, to a training process, pinned to the last, where it ends as a tensor; no transforms. All
are measured in turn, eight times, and the medians compared. benchmarks/README.md says what the ways
are.
"""

import contextlib
import functools
import io
import json
import multiprocessing
import os
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import numpy as np
import psutil
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler

ROOT = Path(__file__).resolve().parent.parent
os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "GRPC_VERBOSITY": "NONE"}  # what they say is no result
os.environ["PYTHONWARNINGS"] = (
    "ignore:resource_tracker"  # processes that are killed leave something
)
sys.path += [str(ROOT / "pt.grpc.sagemaker" / "code"), str(ROOT / "benchmarks")]

FLOATS, IMAGES = "8192 x 1 x 28 x 28 float32", "256 x 3 x 224 x 224 uint8"
# What the loader's design before this one reached, with a worker process and on the machine of that
# time, in GB/s; and the target, as a multiple of it.
BEFORE = {FLOATS: (0.41, 1.5), IMAGES: (0.39, 1.2)}
TINY = "4 float32"
TIMES, SECONDS = 8, 0.4  # measured each time
WARM_UP = 8, 0.25  # batches and seconds, at least: until nothing is left of what was held ready
TOKEN, MESSAGE_OPTIONS = "a token", [("grpc.max_receive_message_length", -1)]


def make_batch(shape: str) -> torch.Tensor:
    """The batch that is sent again and again: random bytes, the same in every process."""
    *sizes, dtype = shape.replace(" x ", " ").split()
    random = torch.Generator().manual_seed(1)
    if dtype == "uint8":
        return torch.randint(256, [*map(int, sizes)], dtype=torch.uint8, generator=random)
    return torch.rand([*map(int, sizes)], generator=random)


# ------------------------------------------------------- ways: serve a batch, receive many of it


class Repeated(Dataset):
    """A Dataset of whole batches."""

    def __init__(self, batch: torch.Tensor):
        self.batch = batch

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.batch


def only(samples: list[torch.Tensor]) -> torch.Tensor:
    return samples[0]


def serve_ours(batch: torch.Tensor, port: int, num_workers: int = 1) -> None:
    from feed.server import serve

    with contextlib.redirect_stdout(io.StringIO()):  # that it serves is no result
        serve(Repeated(batch), f"127.0.0.1:{port}", TOKEN, only, num_workers)


def receive_ours(port: int, like: torch.Tensor) -> Iterator[torch.Tensor]:
    from feed.batches import BatchKeys, as_is
    from feed.client import RemoteBatches, RemoteDataset

    dataset = RemoteDataset([f"127.0.0.1:{port}"], TOKEN)
    keys = BatchKeys(BatchSampler(SequentialSampler(dataset), 1, drop_last=False))
    yield from DataLoader(RemoteBatches(dataset, keys), batch_size=None, collate_fn=as_is)


def serve_tcp(batch: torch.Tensor, port: int) -> None:
    data = memoryview(batch.numpy()).cast("B")
    with socket.create_server(("127.0.0.1", port)) as server:
        while True:
            connection, _ = server.accept()
            try:
                while True:
                    connection.sendall(data)
            except OSError:
                connection.close()


def receive_tcp(port: int, like: torch.Tensor) -> Iterator[torch.Tensor]:
    tensor = torch.empty_like(like)
    memory = memoryview(tensor.numpy()).cast("B")
    with socket.create_connection(("127.0.0.1", port)) as connection:
        while True:
            filled = 0
            while filled < len(memory):
                filled += connection.recv_into(memory[filled:])
            yield tensor


def serve_tf_data_service(batch: torch.Tensor, port: int) -> None:
    import tensorflow as tf

    service = tf.data.experimental.service
    dispatcher = service.DispatchServer(service.DispatcherConfig(port=port))
    address = dispatcher.target.split("://")[1]
    worker = service.WorkerServer(service.WorkerConfig(dispatcher_address=address))
    worker.join()


def receive_tf_data_service(port: int, like: torch.Tensor) -> Iterator[torch.Tensor]:
    import tensorflow as tf

    service = tf.data.experimental.service
    # The pipeline goes to the worker with its constants: the batch is made of them there.
    dataset = tf.data.Dataset.from_tensors(like.numpy()).cache().repeat()
    dataset = dataset.map(lambda batch: tf.raw_ops.DeepCopy(x=batch))
    dataset = dataset.apply(
        service.distribute(
            processing_mode=service.ShardingPolicy.OFF,
            service=f"grpc://127.0.0.1:{port}",
            compression=None,
        )
    )
    for batch in dataset.prefetch(4):
        yield torch.from_numpy(batch.numpy())


def serve_flight(batch: torch.Tensor, port: int) -> None:
    import pyarrow as pa
    from pyarrow import flight

    record = pa.record_batch([pa.array(batch.numpy().reshape(-1))], names=["batch"])
    ours, workers = socket.socketpair()  # faster than os.pipe, and than pickled record batches

    def work() -> None:
        with pa.ipc.new_stream(workers.makefile("wb"), record.schema) as writer:
            while True:
                writer.write_batch(record)

    # Forked before there are threads of gRPC's.
    multiprocessing.get_context("fork").Process(target=work, daemon=True).start()

    class Server(flight.FlightServerBase):
        def do_get(self, context, ticket):
            return flight.RecordBatchStream(pa.ipc.open_stream(ours.makefile("rb")))

    Server(f"grpc://127.0.0.1:{port}").serve()


def receive_flight(port: int, like: torch.Tensor) -> Iterator[torch.Tensor]:
    from pyarrow import flight

    warnings.filterwarnings("ignore", "The given NumPy array is not writable")
    with flight.connect(f"grpc://127.0.0.1:{port}") as client:
        reader = client.do_get(flight.Ticket(b""))
        while True:
            column = reader.read_chunk().data.column(0)
            yield torch.from_numpy(column.to_numpy()).view(like.shape)


def serve_2022(batch: torch.Tensor, port: int) -> None:
    import grpc

    messages, services = grpc.protos_and_services("feed_2022.proto")
    queue = multiprocessing.Queue(4)

    def produce() -> None:
        while True:
            queue.put(batch.numpy().tobytes())

    multiprocessing.get_context("fork").Process(target=produce, daemon=True).start()

    class Feed(services.FeedServicer):
        def Next(self, request, context):
            return messages.Batch(data=queue.get())

    server = grpc.server(ThreadPoolExecutor(1), options=MESSAGE_OPTIONS)
    services.add_FeedServicer_to_server(Feed(), server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    server.wait_for_termination()


def receive_2022(port: int, like: torch.Tensor) -> Iterator[torch.Tensor]:
    import grpc

    messages, services = grpc.protos_and_services("feed_2022.proto")
    dtype = like.numpy().dtype
    with grpc.insecure_channel(f"127.0.0.1:{port}", MESSAGE_OPTIONS) as channel:
        stub = services.FeedStub(channel)
        while True:
            data = stub.Next(messages.Request()).data
            yield torch.tensor(np.frombuffer(data, dtype)).view(like.shape)


TCP, OURS, TF, FLIGHT, OLD = (
    "raw TCP",
    "this loader",
    "tf.data.service",
    "Arrow Flight",
    "2022 design",
)
WAYS = {
    TCP: (serve_tcp, receive_tcp),
    OURS: (serve_ours, receive_ours),
    TF: (serve_tf_data_service, receive_tf_data_service),
    FLIGHT: (serve_flight, receive_flight),
    OLD: (serve_2022, receive_2022),
}
WORKERS = {  # of one data host
    f"{n} worker{'s' * (n > 1)}": (functools.partial(serve_ours, num_workers=n), receive_ours)
    for n in (1, 2, 4)
}


# ------------------------------------------------------- measuring


def serve_on(cores: list[int], serve: Callable, shape: str, port: int) -> None:
    """The data process."""
    os.sched_setaffinity(0, cores)
    serve(make_batch(shape), port)


@contextlib.contextmanager
def started(ways: dict, shape: str, cores: list[int]) -> Iterator[dict[str, Iterator]]:
    """Start each way's data process on `cores`; give the stream of what arrives from it."""
    like, spawn = make_batch(shape), multiprocessing.get_context("spawn")
    processes, streams = [], {}
    try:
        for way, (serve, receive) in ways.items():
            port = free_port()
            processes.append(spawn.Process(target=serve_on, args=(cores, serve, shape, port)))
            processes[-1].start()
            wait_for(port)
            streams[way] = receive(port, like)
            assert torch.equal(next(streams[way]), like), way
        yield streams
    finally:  # else Python would wait for them
        for stream in streams.values():
            stream.close()
        for process in processes:
            for worker in reversed(psutil.Process(process.pid).children(recursive=True)):
                worker.kill()
            process.kill()


def measure(ways: dict, shape: str, cores: list[int]) -> dict[str, dict[str, list[float]]]:
    """Return batches per second, and the training process's CPU seconds per batch, of all times."""
    batch = make_batch(shape)
    found = {way: {"batches/s": [], "CPU s": []} for way in ways}
    with started(ways, shape, cores) as streams:
        for _ in range(TIMES):
            for way, stream in streams.items():
                wait_until_idle()
                warm_up(stream)
                count, start, cpu_start = 0, time.perf_counter(), time.process_time()
                while (seconds := time.perf_counter() - start) < SECONDS:
                    arrived = next(stream)
                    count += 1
                found[way]["batches/s"].append(count / seconds)
                found[way]["CPU s"].append((time.process_time() - cpu_start) / count)
                assert torch.equal(arrived, batch), way
    return found


def warm_up(stream: Iterator[torch.Tensor]) -> None:
    """Take what was held ready, and some more: of Arrow Flight, more than a dozen batches."""
    batches, seconds = WARM_UP
    start = time.perf_counter()
    while batches > 0 or time.perf_counter() < start + seconds:
        next(stream)
        batches -= 1


def wait_until_idle() -> None:
    """Wait until no way is still busy with what it holds ready for its next turn."""
    everyone = [psutil.Process(), *psutil.Process().children(recursive=True)]

    def cpu_seconds() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in everyone)  # user, system

    before = float("-inf")
    while (now := cpu_seconds()) - before >= 0.02:
        before = now
        time.sleep(0.2)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def wait_for(port: int) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def at_least_two_cores() -> list[int]:
    """Return the cores, two at least: the last is for the training process."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        sys.exit("Needs two cores: one for the data process, one for the training process.")
    return cores


def write_results(name: str, results: dict) -> None:
    """Write all that was measured to build/bench/."""
    folder = ROOT / "build" / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(results, indent=1))


def medians(found: dict, unit: str, factor: float = 1.0) -> dict[str, float]:
    return {way: factor * median(units[unit]) for way, units in found.items()}


def main() -> None:
    """Measure all shapes; print tables; fail if a target is missed."""
    *data_cores, training_core = at_least_two_cores()
    os.sched_setaffinity(0, {training_core})
    results, missed = {}, []
    for shape, (before, times_before) in BEFORE.items():
        gigabytes = make_batch(shape).nbytes / 1e9
        found = results[shape] = measure(WAYS, shape, data_cores[:1])
        speeds = medians(found, "batches/s", gigabytes)
        costs = medians(found, "CPU s", 1 / gigabytes)
        print(f"\nBatches of {shape}, medians of {TIMES}, on this machine:\n")
        print("| | GB/s | of raw TCP | CPU s/GB, training side |\n|---|---|---|---|")
        for way, speed in speeds.items():
            print(f"| {way} | {speed:.2f} | {speed / speeds[TCP]:.2f} | {costs[way]:.2f} |")
        print(f"{OURS} / {FLIGHT}: {speeds[OURS] / speeds[FLIGHT]:.2f}")
        targets = {TF: (speeds[TF], 1.0), OLD: (speeds[OLD], 5.0)}
        targets["the design before"] = before, times_before
        for peer, (speed, least) in targets.items():
            ratio = speeds[OURS] / speed
            print(f"{OURS} / {peer}: {ratio:.2f} (target: {least} or more)", flush=True)
            missed += [f"{shape}: {peer}"] if ratio < least else []

        found = results[f"workers, {shape}"] = measure(WORKERS, shape, data_cores)
        speeds = medians(found, "batches/s", gigabytes)
        each = ", ".join(f"{way} {speed:.2f} GB/s" for way, speed in speeds.items())
        print(f"One data host, {len(data_cores)} core(s): {each}", flush=True)

    found = results[TINY] = measure({OURS: WAYS[OURS]}, TINY, data_cores)
    calls, cost = medians(found, "batches/s")[OURS], medians(found, "CPU s", 1e3)[OURS]
    print(f"\nTiny batches: {calls:.0f} calls per second, {cost:.2f} ms of the training side's CPU")
    write_results("transfer", results)
    if missed:
        print(f"Targets missed: {missed}", file=sys.stderr)
    sys.stdout.flush()
    os._exit(bool(missed))  # not sys.exit, which waits for threads of the peers


if __name__ == "__main__":
    main()
