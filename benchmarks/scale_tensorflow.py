"""What tf.data.service's traffic costs as its workers become more, as scale_loader.py does.

The dispatcher and its workers are in one process, and the consumers, processes of their own, are
the ranks of one job: each batch goes to one of them. A worker prepares as many batches of 1 MiB at
a time as a data host does there, and sleeps over each.
"""

import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

from scale_loader import (
    FLOATS,
    SAMPLES,
    WARM_UP_SECONDS,
    WORKERS,
    Traffic,
    children,
    counters,
    quietly,
    wait_until_all_grow,
    watch,
)

COUNTS, CONSUMERS = (2, 4, 8), 4  # of workers; of ranks
BATCH_SECONDS = 0.5  # that each of a worker's batches takes
FILE_BATCHES = 1000  # batches that a worker makes of what the dispatcher gives it at a time


def serve(orders: Connection) -> None:
    """Be the dispatcher, with as many workers as the last order says."""
    import tensorflow as tf

    service = tf.data.experimental.service
    dispatcher, workers = service.DispatchServer(), []
    address = dispatcher.target.split("://")[1]
    while count := orders.recv():
        while len(workers) < count:
            config = service.WorkerConfig(dispatcher_address=address)
            workers.append(service.WorkerServer(config))
        orders.send(dispatcher.target)


def consume(number: int, orders: Connection, counts: Sequence[int]) -> None:
    """A rank: take batches of the job that the last order names, as fast as they come."""
    import tensorflow as tf
    from tensorflow.python.data.experimental.ops import testing

    def batches(file) -> tf.data.Dataset:
        dataset = tf.data.Dataset.range(FILE_BATCHES).apply(testing.sleep(int(1e6 * BATCH_SECONDS)))
        return dataset.map(lambda n: tf.fill([SAMPLES * FLOATS], tf.cast(n, tf.float32)))

    service = tf.data.experimental.service
    while order := orders.recv():
        target, job = order
        dataset = tf.data.Dataset.range(1_000_000)  # files, which workers get as they need them
        dataset = dataset.interleave(
            batches, cycle_length=WORKERS, num_parallel_calls=WORKERS, deterministic=False
        )
        dataset = dataset.apply(
            service.distribute(
                processing_mode=service.ShardingPolicy.DYNAMIC,
                service=target,
                job_name=job,
                compression=None,
            )
        )
        for _ in dataset.prefetch(tf.data.AUTOTUNE):
            counts[number] += 1
            if orders.poll():
                break


def grid(sizes: Sequence[int] = COUNTS) -> dict[int, Traffic]:
    """Return the traffic of all numbers of workers."""
    found, counts = {}, counters(CONSUMERS)
    server_pipe, server_end = multiprocessing.Pipe()
    pipes = [multiprocessing.Pipe() for _ in range(CONSUMERS)]
    rows = [(number, theirs, counts) for number, (_, theirs) in enumerate(pipes)]
    with children(serve, [(server_end,)]) as [server], children(consume, rows) as consumers:
        for workers in sizes:
            server_pipe.send(workers)
            target, before = server_pipe.recv(), list(counts)
            for ours, _ in pipes:
                ours.send((target, f"{workers} workers"))
            wait_until_all_grow(counts, before, [server, *consumers])
            time.sleep(WARM_UP_SECONDS)
            clients = [process.pid for process in consumers]
            found[workers] = quietly(lambda of=clients: watch([server.pid], of, counts))
    return found
