"""tf.data.service in the test's own process, for tests that count what arrives."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def dispatcher_of(workers: int) -> Iterator[str]:
    """Start a dispatcher with so many workers; give its HOST:PORT."""
    import tensorflow as tf  # takes seconds in each process that only collects the tests

    service = tf.data.experimental.service
    dispatcher = service.DispatchServer()
    address = dispatcher.target.removeprefix("grpc://")
    servers = [service.WorkerServer(service.WorkerConfig(address)) for _ in range(workers)]
    yield address
    del servers, dispatcher  # their destructors stop them
