"""A host's part in tf.data.service: a worker that prepares batches, and on one host the dispatcher.

The dispatcher shares out the files among the workers, and keeps a journal: started again with the
same work folder, it goes on where it was. Nobody stops either of them but a signal.
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
    add = parser.add_argument
    add("--dispatcher", required=True, metavar="HOST:PORT", help="where workers reach it")
    add("--work-dir", help="the dispatcher's journal; if given, the dispatcher runs here")
    add("--address", required=True, metavar="HOST:PORT", help="where this worker is reached")
    add("--channels", required=True, help="folder of the job's channels")
    add("--spare-cores", type=int, help="use only so many, and only while nobody else needs them")
    args = parser.parse_args()

    # The pipeline comes from the training hosts with the names of its files, which are good on
    # every host because they are relative.
    os.chdir(args.channels)
    if args.spare_cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-args.spare_cores :])
        os.nice(19)
    cores = len(os.sched_getaffinity(0))
    servers = []
    if args.work_dir:
        port = int(args.dispatcher.rpartition(":")[2])
        config = service.DispatcherConfig(
            port=port, work_dir=args.work_dir, fault_tolerant_mode=True
        )
        servers.append(service.DispatchServer(config))
        print(f"dispatcher at {args.dispatcher}", flush=True)
    cost = milliseconds_per_sample(find_files(args.files), args.augment)
    print(f"data_ms_per_sample={cost:.3f} workers={cores}", flush=True)
    port = int(args.address.rpartition(":")[2])
    config = service.WorkerConfig(args.dispatcher, worker_address=args.address, port=port)
    servers.append(service.WorkerServer(config))
    print(f"worker at {args.address}", flush=True)
    servers[-1].join()


if __name__ == "__main__":
    main()
