"""The program of a data host: measure what a sample costs, then serve (service/serve.py).

A job that does not need to know the cost can run `service/serve.py` directly.
"""

import sys

import arguments
from service import serve


def main() -> None:
    parser = arguments.parser(fail=lambda message: sys.exit(f"train_data.py: error: {message}"))
    parser.add_argument("--channels", required=True, help="folder of the job's channels")
    args = parser.parse_args()

    from pipeline import find_files, milliseconds_per_sample

    cost = milliseconds_per_sample(find_files(f"{args.channels}/{args.files}"), args.augment)
    print(f"data_ms_per_sample={cost:.3f}", flush=True)
    serve.main()


if __name__ == "__main__":  # but not in the processes that serve.main starts
    main()
