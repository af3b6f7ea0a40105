"""A data host's part in tf.data.service: workers, and on the first host the dispatcher.

    python -m hetero --serve service/serve.py --needed first train.py

It needs nothing of the training script, since pipelines come to it as graphs. Only what these call
by `numpy_function` it must be given, by a script of yours in its place:

    import my_data
    from service import serve

    if __name__ == "__main__":
        serve.main(functions=[my_data.augment], processes=4)
"""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # a training host's GPUs belong to its ranks
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # the autoscaler, not in use here, warns
if not __package__:  # it runs as a script
    sys.path[0] = str(Path(__file__).parents[1])


def main(functions: Sequence[Callable] = (), processes: int = 1) -> None:
    """Serve until a signal ends this process; exit with status 1 if a worker ends.

    processes: workers, each a process. One is enough for TensorFlow's ops, which use all cores;
    Python functions of one process take turns.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # which ends the workers, too
    dispatcher = os.environ["HETERO_DATA_HOSTS"].split(",")[0]
    spawn = multiprocessing.get_context("spawn")
    workers = [
        spawn.Process(target=work, args=(dispatcher, functions, number), daemon=True)
        for number in range(processes)
    ]
    for worker in workers:
        worker.start()
    ended = [worker.sentinel for worker in workers]
    if os.environ["HETERO_FIRST"] == "1":
        dispatch(dispatcher, ended)
    wait(ended)
    sys.exit("service: a worker has ended")


def dispatch(dispatcher: str, ended: list[int]) -> None:
    """Be the dispatcher, which shares out the sources, until a worker process here ends.

    Its journal lets it go on where it was when it is started again.
    """
    import tensorflow as tf

    from service.waiting import look

    service = tf.data.experimental.service
    port, journal = int(dispatcher.rpartition(":")[2]), os.environ["HETERO_JOURNAL"]
    config = service.DispatcherConfig(port=port, work_dir=journal, fault_tolerant_mode=True)
    _server, known = service.DispatchServer(config), []
    print(f"dispatcher at {dispatcher}", flush=True)
    while not wait(ended, timeout=1):
        missing, workers = look(dispatcher)  # it may be too busy to answer
        if not missing and workers != known:
            known = workers
            print(f"dispatcher: {len(known)} workers: {', '.join(known)}", flush=True)


def work(dispatcher: str, functions: Sequence[Callable], number: int) -> None:
    """Be a worker, which runs pipelines on its share of their sources."""
    import tensorflow as tf

    from service.functions import register

    for function in functions:
        register(function)
    host, _, port = os.environ["HETERO_WORKER"].rpartition(":")
    config = tf.data.experimental.service.WorkerConfig(
        dispatcher,
        # Only the first one has a port of its own; the others take any that is free.
        worker_address=f"{host}:%port%" if number else f"{host}:{port}",
        port=0 if number else int(port),
    )
    server = tf.data.experimental.service.WorkerServer(config)
    print(f"worker at {host}", flush=True)
    server.join()


if __name__ == "__main__":
    main()
