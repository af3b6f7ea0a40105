"""How much faster the heterogeneous jobs of the notebooks are than the homogeneous ones, locally.

    python benchmarks/speedup.py 3      runs each notebook three times and prints the medians

Fails if a median is below what we promise.

The peer is the homogeneous job: the same training script with its framework's own way to prepare
data on the training host, torch's DataLoader or tf.data. Its share of the machine's cores is that
of its instance, so the speed-up is what added cores bring, less the overhead of the way there.
"""

import os
import re
import sys
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import demo  # noqa: E402
import nbformat  # noqa: E402

LEAST_SPEED_UP, LEAST_SHARE = 1.4, 0.8  # of the homogeneous job, of the ideal
RESULT = re.compile(r"speed-up: ([\d.]+) of at most ([\d.]+)")


def main() -> None:
    """Run the notebooks with two kinds of jobs so many times as argv[1] says."""
    os.environ["SAGEMAKER_TARGET"] = "local"
    demo.BUILD.mkdir(exist_ok=True)
    for path in sorted(ROOT.glob("*.sagemaker/hetero-*.ipynb")):
        found = []
        for _ in range(int(sys.argv[1])):
            notebook = nbformat.read(path, as_version=4)
            demo.execute(notebook, path.parent)
            text = "\n".join(demo.comparison(notebook))
            found.append([float(number) for number in RESULT.search(text).groups()])
        shares = [speed_up / ideal for speed_up, ideal in found]
        print(f"{path.stem}, speed-up of the heterogeneous job in {len(found)} runs:")
        print("  " + ", ".join(f"{speed_up:.2f} of {ideal:.2f}" for speed_up, ideal in found))
        speed_up = median(speed_up for speed_up, _ in found)
        print(f"  median {speed_up:.2f}, {median(shares):.0%} of the ideal", flush=True)
        if speed_up < LEAST_SPEED_UP or median(shares) < LEAST_SHARE:
            sys.exit(f"Less than {LEAST_SPEED_UP} or {LEAST_SHARE:.0%}: is the machine busy?")


if __name__ == "__main__":
    main()
