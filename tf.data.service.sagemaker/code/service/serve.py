"""The program of a data host: workers of tf.data.service and, on the first host, the dispatcher.

    python -m hetero --serve service/serve.py --needed first train.py

It needs nothing from the training script, because pipelines arrive as graphs. If they call Python
functions by `numpy_function`, use a script of your own instead, which passes these functions:

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
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # hide warnings of the unused autoscaler
if not __package__:  # this file runs as a script
    sys.path[0] = str(Path(__file__).parents[1])


def main(functions: Sequence[Callable] = (), processes: int = 1) -> None:
    """Serve until a signal ends this process. Exit with status 1 if a worker ends.

    functions: those that pipelines call through `numpy_function`.
    processes: how many workers to run, each in its own process. One is enough for TensorFlow's ops,
        which use all cores, but the Python functions of one process take turns.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # also ends the workers
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
    sys.exit("service: a worker process has ended: see its output in this host's log")


def dispatch(dispatcher: str, ended: list[int]) -> None:
    """Run the dispatcher, which divides the sources among the workers, until a worker here ends.

    It keeps a journal, so that it continues where it was if it is restarted.
    """
    import tensorflow as tf

    from service.waiting import look

    service = tf.data.experimental.service
    port, journal = int(dispatcher.rpartition(":")[2]), os.environ["HETERO_JOURNAL"]
    config = service.DispatcherConfig(port=port, work_dir=journal, fault_tolerant_mode=True)
    _server, known = service.DispatchServer(config), []
    print(f"dispatcher at {dispatcher}", flush=True)
    while not wait(ended, timeout=1):
        missing, workers = look(dispatcher)  # the dispatcher may be too busy to answer
        if not missing and workers != known:
            known = workers
            print(f"dispatcher: {len(known)} workers: {', '.join(known)}", flush=True)


def work(dispatcher: str, functions: Sequence[Callable], number: int) -> None:
    """Run a worker, which runs pipelines on its share of their sources."""
    import tensorflow as tf

    from service.functions import register

    for function in functions:
        register(function)
    host, _, port = os.environ["HETERO_WORKER"].rpartition(":")
    config = tf.data.experimental.service.WorkerConfig(
        dispatcher,
        # The first worker has a fixed port; the others take any free one.
        worker_address=f"{host}:%port%" if number else f"{host}:{port}",
        port=0 if number else int(port),
    )
    server = tf.data.experimental.service.WorkerServer(config)
    print(f"worker at {host}", flush=True)
    server.join()


if __name__ == "__main__":
    main()
