"""The server of a data host, which prepares samples of the Datasets that training scripts send.

    HETERO_TOKEN=... python -m feed.server [HOST:PORT] [--workers N]

It needs none of their code but the modules that they import. Until SIGTERM, it serves clients that
have the job's token. The main process has no threads, so that it can fork the others: one that uses
gRPC (front.py), and those that hold the Datasets (worker.py).
"""

import os

os.environ.update(  # one thread, since each worker has a core
    OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", OPENCV_FOR_THREADS_NUM="1"
)

import argparse
import contextlib
import errno
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

# The other modules of feed import torch, which takes seconds: only after a look at the arguments.

MOST_CALLS = 2048  # at the same time; each holds at most one reply
REFUSAL_SECONDS = 10  # between two lines about refused calls
CANNOT_LISTEN = "feed: cannot listen on {!r}: it is in use, or not this host's address"
OPTIONS = [
    ("grpc.so_reuseport", 0),  # or a second server on this port would take some of the calls
    ("grpc.max_receive_message_length", 64 << 20),  # a chunk's indices and worker_init_fn
    ("grpc.http2.max_ping_strikes", 0),  # clients may ping as often as they like
]


def serve(
    mains_end: socket.socket, main: socket.socket, address: str, token: str, workers: int
) -> None:
    """Serve until the main process ends."""
    import grpc  # only after the fork

    from feed import wire
    from feed.front import Front

    mains_end.close()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a worker of a Dataset takes one
    # Otherwise clients would wait for a thread that has failed. A launcher starts the server again.
    threading.excepthook = lambda failure: (threading.__excepthook__(failure), os._exit(1))
    front, printed_at = Front(main, token, workers), [-REFUSAL_SECONDS]

    class TokenCheck(grpc.ServerInterceptor):
        """Refuses calls without the job's token, before it reads their messages."""

        def intercept_service(self, continuation: Callable, call: Any) -> Any:
            is_ours = wire.verify(token, call.invocation_metadata)
            return continuation(call) if is_ours else refusal

    def refuse(requests: Iterator[bytes], context: Any) -> None:
        if time.monotonic() > printed_at[0] + REFUSAL_SECONDS:
            printed_at[0] = time.monotonic()
            print(f"feed: refused a call from {context.peer()}: wrong or missing token", flush=True)
        text = "wrong or missing token: do both sides have the same HETERO_TOKEN?"
        context.abort(grpc.StatusCode.UNAUTHENTICATED, text)

    refusal = grpc.stream_stream_rpc_method_handler(refuse)
    server = grpc.server(
        ThreadPoolExecutor(MOST_CALLS),
        interceptors=[TokenCheck()],
        options=[*OPTIONS, *wire.KEEPALIVE],
        maximum_concurrent_rpcs=MOST_CALLS,
    )
    methods = {
        "Get": grpc.unary_stream_rpc_method_handler(front.get),
        "Stream": grpc.stream_stream_rpc_method_handler(front.stream),
        "Upload": grpc.stream_unary_rpc_method_handler(front.upload),
    }
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(wire.SERVICE, methods)])
    try:
        server.add_insecure_port(address)
    except RuntimeError:
        sys.exit(CANNOT_LISTEN.format(address))
    server.start()
    print(f"serving at {address} workers={workers}", flush=True)
    server.wait_for_termination()


def is_taken(address: str) -> bool:
    """Return whether another program listens at this HOST:PORT; gRPC would find out later."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_server((host, int(port))).close()
    except ValueError:  # not a port, such as in unix-abstract:NAME
        return False
    except OSError as error:  # others, such as for an IPv6 address, are left to gRPC
        return error.errno == errno.EADDRINUSE
    return False


def main() -> None:
    """Fork the process that uses gRPC, and the processes that it needs."""
    parser = argparse.ArgumentParser(description="Prepares samples of Datasets that clients send.")
    add = parser.add_argument
    at = os.environ.get("HETERO_SERVE_AT")  # set by hetero/
    add("address", metavar="HOST:PORT", nargs="?", default=at, help="default: HETERO_SERVE_AT")
    cores = len(os.sched_getaffinity(0))
    add("--workers", type=int, default=cores, help="worker processes; default: one per core")
    args = parser.parse_args()
    token = os.environ.get("HETERO_TOKEN", "")
    if not token:
        parser.error("HETERO_TOKEN must be the job's token")
    if not args.address:
        parser.error("HOST:PORT is missing: give it, or set HETERO_SERVE_AT")
    if args.workers < 1:
        parser.error("--workers must be 1 or more")
    if is_taken(args.address):
        sys.exit(CANNOT_LISTEN.format(args.address))

    from feed.worker import fork, fork_for_each, run_template

    forked: list[int] = []  # a process for each Dataset

    def end(*_: Any) -> None:
        """Exit normally, even if a second SIGTERM comes."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if not forked:
            print(
                "feed: no Dataset was sent: does the script use RemoteDataset, and is what it "
                "returns in the DataLoader, not what map, shuffle or a slice has made of it?",
                flush=True,
            )
        sys.exit()

    signal.signal(signal.SIGTERM, end)
    ours, its = socket.socketpair()
    fork(serve, ours, its, args.address, token, args.workers)
    its.close()
    with contextlib.suppress(KeyboardInterrupt):
        fork_for_each(ours, run_template, forked)
        sys.exit("feed: the gRPC process has ended")


if __name__ == "__main__":
    main()
