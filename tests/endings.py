"""Run all ways in which a job of the PyTorch example can end, with PyTorch: `make thorough`.

    python tests/endings.py 5 [NAME...]

runs each ending of helpers/endings.py, or those named, five times. It prints a table of the longest
times, and writes the names of the endings that failed to build/failed-endings.txt. With a PART of 0
to 4 in the environment, it runs a fifth of them.
"""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from helpers.endings import ENDINGS, begin, finish
from helpers.jobs import Jobs
from helpers.running import upload_images
from shared import local_sagemaker

FAILED = Path(__file__).parent.parent / "build" / "failed-endings.txt"  # .ci/retry.py reads it


def main() -> None:
    """Run all endings, or those named, argv[1] times; print the longest time of each."""
    first, step = (int(part), 5) if (part := os.environ.get("PART")) else (0, 1)
    names = sys.argv[2:] or [*ENDINGS][first::step]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    broken: dict[str, AssertionError] = {}

    @contextlib.contextmanager
    def noting(name: str) -> Iterator[None]:
        try:
            yield
        except AssertionError as error:
            broken[name] = error

    with tempfile.TemporaryDirectory() as folder, local_sagemaker.start() as local:
        upload_images()
        jobs = Jobs(local.role, Path(folder))
        for _ in range(int(sys.argv[1])):
            waiting = []
            for name in names:
                if ENDINGS[name].slow:
                    with noting(name):
                        waiting.append(begin(jobs, name, torch=True))
            for name in names:
                if not ENDINGS[name].slow:
                    with noting(name):
                        seconds[name].append(finish(begin(jobs, name, torch=True)))
            for begun in waiting:
                with noting(begun.name):
                    seconds[begun.name].append(finish(begun))
    for name, measured in seconds.items():
        print(f"| {name} | {max(measured, default=float('nan')):.1f} s |")
    FAILED.parent.mkdir(exist_ok=True)
    FAILED.write_text("".join(f"{name}\n" for name in broken))
    if broken:
        sys.exit("\n".join(f"{name}: {error}" for name, error in broken.items()))


if __name__ == "__main__":
    main()
