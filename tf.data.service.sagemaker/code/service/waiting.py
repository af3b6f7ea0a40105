"""What `distribute` does and says until the first batch of a dataset arrives.

TensorFlow itself waits forever and says nothing, even if the hosts do not exist. Messages go to
Python's logger `service`.
"""

import logging
import os
import re
import socket
import threading
import time
import weakref
from typing import Any

import grpc
import tensorflow as tf

HOPELESS_SECONDS = 120  # without a dispatcher or a worker
TELL_SECONDS = 60  # between two messages

logger = logging.getLogger("service")


def wait_for_dispatcher(dispatcher: str) -> None:
    """Wait until the dispatcher answers. Raise ConnectionError if it does not within 120 s."""
    deadline = time.monotonic() + HOPELESS_SECONDS
    while missing := look(dispatcher)[0]:
        if missing.startswith("no worker"):
            return
        if time.monotonic() > deadline:
            raise ConnectionError(f"distribute: gave up after {HOPELESS_SECONDS} s: {missing}")
        time.sleep(1)


def watched(dataset: tf.data.Dataset, dispatcher: str, name: str) -> tf.data.Dataset:
    """Return the dataset. Until its first batch arrives, a thread says what it is waiting for.

    The thread ends the process if dispatcher or workers are missing for 120 s. An exception would
    not reach the training, which waits in C++.
    """
    with tf.device("CPU:0"):  # raw ops, because a strategy would turn a tf.Variable into its own
        has_come = tf.raw_ops.VarHandleOp(dtype=tf.bool, shape=[], shared_name=f"{name} has come")
        tf.raw_ops.AssignVariableOp(resource=has_come, value=False)

    @tf.autograph.experimental.do_not_convert
    def note(*_: Any) -> bool:
        tf.raw_ops.AssignVariableOp(resource=has_come, value=True)
        return True

    dataset = dataset.filter(note)
    is_used = weakref.ref(dataset)

    def watch() -> None:
        began = there_at = told_at = time.monotonic()
        while is_used() and not tf.raw_ops.ReadVariableOp(resource=has_come, dtype=tf.bool):
            time.sleep(1)
            missing, workers = look(dispatcher)
            now = time.monotonic()
            there_at = there_at if missing else now
            if now > there_at + HOPELESS_SECONDS:
                logger.error("distribute: gave up after %s s: %s.", HOPELESS_SECONDS, missing)
                os._exit(1)
            if now > told_at + TELL_SECONDS:
                told_at = now
                what = missing or f"workers are at {', '.join(workers)}"
                text = "distribute: no batch of %s in %.0f s: %s"
                logger.warning(text, name, now - began, what)

    threading.Thread(target=watch, daemon=True).start()
    return dataset


def look(dispatcher: str) -> tuple[str, list[str]]:
    """Return what keeps batches from arriving, as far as it can tell, and the workers' addresses.

    The first is "" if nothing does.
    """
    host, _, port = dispatcher.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
        with grpc.insecure_channel(dispatcher) as channel:
            ask = channel.unary_unary("/tensorflow.data.DispatcherService/GetWorkers")
            said = ask(b"", timeout=5).decode("latin-1")  # a message with the workers' addresses
    except OSError as error:
        return f"the dispatcher at {dispatcher} cannot be reached ({error})", []
    except grpc.RpcError as error:
        return (
            f"the program at {dispatcher} does not answer as a dispatcher ({error.details()})",
            [],
        )
    workers = sorted(re.findall(r"[\w.-]+:\d+", said))
    return "" if workers else f"no worker has come to the dispatcher at {dispatcher}", workers
