"""A host's part in tf.data.service: a worker that prepares batches, and on one host the dispatcher.

The dispatcher shares out the files among the workers, and keeps a journal: started again with the
same work folder, it goes on where it was. Both run until a signal ends them.
"""

import os
import sys

os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # a dnn host's GPUs belong to its ranks
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # the autoscaler, not in use here, warns

import tensorflow as tf

import arguments
from pipeline import find_files, milliseconds_per_sample

service = tf.data.experimental.service


def main() -> None:
    """Start what this host serves, and wait for the signal that ends it."""
    parser = arguments.parser(fail=lambda message: sys.exit(f"train_data.py: error: {message}"))
    parser.add_argument("--channels", required=True, help="folder of the job's channels")
    args = parser.parse_args()

    # The pipeline comes from the training hosts with the names of its files, which are good on
    # every host because they are relative.
    os.chdir(args.channels)
    # What hetero/ says of the job, and of this host.
    dispatcher = os.environ["HETERO_DATA_HOSTS"].split(",")[0]  # on the first data host
    address, cores = os.environ["HETERO_WORKER"], len(os.sched_getaffinity(0))
    servers = []
    if os.environ["HETERO_FIRST"] == "1":
        port, journal = int(dispatcher.rpartition(":")[2]), os.environ["HETERO_JOURNAL"]
        config = service.DispatcherConfig(port=port, work_dir=journal, fault_tolerant_mode=True)
        servers.append(service.DispatchServer(config))
        print(f"dispatcher at {dispatcher}", flush=True)
    cost = milliseconds_per_sample(find_files(args.files), args.augment)
    print(f"data_ms_per_sample={cost:.3f} workers={cores}", flush=True)
    port = int(address.rpartition(":")[2])
    config = service.WorkerConfig(dispatcher, worker_address=address, port=port)
    servers.append(service.WorkerServer(config))
    print(f"worker at {address}", flush=True)
    servers[-1].join()


if __name__ == "__main__":
    main()
