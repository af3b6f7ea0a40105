"""How fast tensors get from a data process into a training process: our loader and its peers.

    python benchmarks/feed.py

Each way sends the same batches from one process, pinned to the first core, to another, pinned to
the second, where they end as tensors; no transforms. All are measured in turn, ten times, and the
medians compared. benchmarks/README.md says what the ways are.
"""

import json
import multiprocessing
import os
import socket
import sys
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import numpy as np
import psutil
import torch

ROOT = Path(__file__).resolve().parent.parent
os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "GRPC_VERBOSITY": "NONE"}  # what they say is no result
sys.path += [str(ROOT / "pt.grpc.sagemaker" / "code"), str(ROOT / "benchmarks")]

SHAPES = {
    "8192 x 1 x 28 x 28 float32": ((8192, 1, 28, 28), torch.float32),
    "256 x 3 x 224 x 224 uint8": ((256, 3, 224, 224), torch.uint8),
}
TIMES, BATCHES = 10, 12
WARM_UP = 8, 0.25  # batches and seconds, at least: until nothing is left of what was held ready
TOKEN, MESSAGE_OPTIONS = "a token", [("grpc.max_receive_message_length", -1)]


def make_batch(shape: str) -> torch.Tensor:
    """The batch that is sent again and again: random bytes, the same in every process."""
    size, dtype = SHAPES[shape]
    random = torch.Generator().manual_seed(1)
    if dtype is torch.uint8:
        return torch.randint(256, size, dtype=dtype, generator=random)
    return torch.rand(size, dtype=dtype, generator=random)


# ------------------------------------------------------- ways: serve a batch, receive many of it


class Repeated(torch.utils.data.Dataset):
    """A Dataset of whole batches."""

    def __init__(self, batch: torch.Tensor):
        self.batch = batch

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.batch


def only(samples: list[torch.Tensor]) -> torch.Tensor:
    return samples[0]


def serve_ours(batch: torch.Tensor, port: int, num_workers: int = 0) -> None:
    from feed_server import serve

    serve(Repeated(batch), f"127.0.0.1:{port}", TOKEN, only, num_workers)


def serve_ours_with_a_worker(batch: torch.Tensor, port: int) -> None:
    serve_ours(batch, port, num_workers=1)


def receive_ours(port: int, like: torch.Tensor) -> Iterator[torch.Tensor]:
    from feed_client import FeedLoader

    yield from FeedLoader([f"127.0.0.1:{port}"], TOKEN, batch_size=1)


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


def serve_flight(batch: torch.Tensor, port: int) -> None:
    import pyarrow as pa
    from pyarrow import flight

    flat = batch.numpy().reshape(-1)
    column = pa.Array.from_buffers(
        pa.from_numpy_dtype(flat.dtype), len(flat), [None, pa.py_buffer(flat)]
    )
    record = pa.record_batch([column], names=["batch"])

    class Server(flight.FlightServerBase):
        def do_get(self, context, ticket):
            return flight.GeneratorStream(record.schema, iter(lambda: record, None))

    Server(f"grpc://127.0.0.1:{port}").serve()


def receive_flight(port: int, like: torch.Tensor) -> Iterator[torch.Tensor]:
    from pyarrow import flight

    warnings.filterwarnings("ignore", "The given NumPy array is not writable")
    with flight.connect(f"grpc://127.0.0.1:{port}") as client:
        reader = client.do_get(flight.Ticket(b""))
        while True:
            column = reader.read_chunk().data.column(0)
            yield torch.from_numpy(column.to_numpy()).view(like.shape)


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
    dataset = dataset.apply(
        service.distribute(
            processing_mode=service.ShardingPolicy.OFF,
            service=f"grpc://127.0.0.1:{port}",
            compression=None,
        )
    )
    for batch in dataset.prefetch(4):
        yield torch.from_numpy(batch.numpy())


def serve_2022(batch: torch.Tensor, port: int) -> None:
    import grpc

    from batches import end_with_parent

    messages, services = grpc.protos_and_services("feed_2022.proto")
    queue = multiprocessing.Queue(4)

    def produce() -> None:
        end_with_parent()  # which is killed
        while True:
            queue.put(batch.numpy().tobytes())

    producer = multiprocessing.get_context("fork").Process(target=produce, daemon=True)
    producer.start()

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


OURS, TCP, FLIGHT = "this loader", "raw TCP", "Arrow Flight"
OLD = "2022 design"
WAYS = {
    TCP: (serve_tcp, receive_tcp),
    OURS: (serve_ours, receive_ours),
    f"{OURS}, a worker process": (serve_ours_with_a_worker, receive_ours),
    FLIGHT: (serve_flight, receive_flight),
    "tf.data.service": (serve_tf_data_service, receive_tf_data_service),
    OLD: (serve_2022, receive_2022),
}


def serve_on(core: int, way: str, shape: str, port: int) -> None:
    """The data process."""
    os.sched_setaffinity(0, {core})
    WAYS[way][0](make_batch(shape), port)


def measure(shape: str, cores: list[int]) -> dict[str, dict[str, list[float]]]:
    """Return, for each way, GB/s and the training process's CPU seconds per GB, of all times."""
    batch = make_batch(shape)
    processes, streams = [], {}
    spawn = multiprocessing.get_context("spawn")
    found = {way: {"GB/s": [], "CPU s/GB": []} for way in WAYS}
    gigabytes = BATCHES * batch.nbytes / 1e9
    try:
        for way, (_, receive) in WAYS.items():
            port = free_port()
            processes.append(spawn.Process(target=serve_on, args=(cores[0], way, shape, port)))
            processes[-1].start()
            wait_for(port)
            streams[way] = receive(port, batch)
            assert torch.equal(next(streams[way]), batch), way
        for _ in range(TIMES):
            for way, stream in streams.items():
                wait_until_idle()
                warm_up(stream)
                start, cpu_start = time.perf_counter(), time.process_time()
                for _ in range(BATCHES):
                    arrived = next(stream)
                found[way]["GB/s"].append(gigabytes / (time.perf_counter() - start))
                found[way]["CPU s/GB"].append((time.process_time() - cpu_start) / gigabytes)
                assert torch.equal(arrived, batch), way
    finally:  # else Python would wait for them
        for process in processes:
            process.kill()
            process.join()
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


def write_results(name: str, results: dict) -> None:
    """Write all that was measured to build/bench/."""
    folder = ROOT / "build" / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(results, indent=1))


def main() -> None:
    """Measure all shapes; print tables; fail if a target is missed."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        sys.exit("Needs two cores: one for the data process, one for the training process.")
    os.sched_setaffinity(0, {cores[1]})
    results, missed = {}, []
    for shape in SHAPES:
        results[shape] = measure(shape, cores)
        medians = {
            way: {unit: median(values) for unit, values in found.items()}
            for way, found in results[shape].items()
        }
        print(f"\nBatches of {shape}, medians of {TIMES}, on this machine:\n")
        print("| | GB/s | of raw TCP | CPU s/GB, training side |\n|---|---|---|---|")
        for way, found in medians.items():
            share = found["GB/s"] / medians[TCP]["GB/s"]
            print(f"| {way} | {found['GB/s']:.2f} | {share:.2f} | {found['CPU s/GB']:.2f} |")
        ours = medians[OURS]
        for peer, least in {TCP: 0.5, FLIGHT: 1.0, OLD: 5.0}.items():
            ratio = ours["GB/s"] / medians[peer]["GB/s"]
            print(f"{OURS} / {peer}: {ratio:.2f} (target: {least} or more)", flush=True)
            missed += [f"{shape}: {peer}"] if ratio < least else []
        if ours["CPU s/GB"] > medians[FLIGHT]["CPU s/GB"]:
            missed.append(f"{shape}: CPU of {FLIGHT}")
    write_results("feed", results)
    if missed:
        print(f"Targets missed: {missed}", file=sys.stderr)
    sys.stdout.flush()
    os._exit(bool(missed))  # not sys.exit, which waits for threads of the peers


if __name__ == "__main__":
    main()
