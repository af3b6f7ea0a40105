"""The data host's program: prepare MNIST samples on every core, and serve them to training hosts.

It serves until it gets SIGTERM, and only clients that know the token in the environment variable
HETERO_TOKEN.
"""

import os
import sys

import arguments
from dataset import MnistDataset, milliseconds_per_sample
from feed.server import serve


def main() -> None:
    """Read the data set, print what a sample costs, and serve."""
    parser = arguments.parser(fail=lambda message: sys.exit(f"train_data.py: error: {message}"))
    parser.add_argument("--train-dir", required=True, help="folder of the MNIST files")
    parser.add_argument("--bind", required=True, metavar="HOST:PORT", help="address to serve at")
    args = parser.parse_args()
    token = os.environ.get("HETERO_TOKEN")
    if not token:
        parser.error("the environment variable HETERO_TOKEN must hold the job's token")

    workers = args.workers or len(os.sched_getaffinity(0))
    try:
        dataset = MnistDataset(args.train_dir, augment=args.augment)
        cost = milliseconds_per_sample(dataset)
        print(f"data_ms_per_sample={cost:.3f} workers={workers}", flush=True)
        serve(dataset, args.bind, token, num_workers=workers)
    except (OSError, RuntimeError, ValueError) as error:  # a missing file, an address in use
        sys.exit(f"train_data.py: error: {error}")


if __name__ == "__main__":
    main()
