"""How much faster the heterogeneous jobs of the notebooks are than the homogeneous ones, locally.

    python benchmarks/cluster.py 3      runs each notebook three times and prints the medians

Fails if a target below is missed.

The peer is the homogeneous job: the same training script with its framework's own way to prepare
data on the training host, torch's DataLoader or tf.data. Its share of the machine's cores is that
of its instance, so the speed-up is what added cores bring, less the overhead of the way there.
The notebooks also have the advisor predict the heterogeneous job's step time before they run it.
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
from common import write_results  # noqa: E402

LEAST_SPEED_UP = 1.4
LEAST_SHARE = 0.9  # of the ideal
MEDIAN_ERROR, WORST_ERROR = 0.15, 0.25  # of the predicted step time
SPEED_UP = re.compile(r"speed-up: ([\d.]+) of at most ([\d.]+)")
STEP_TIME = re.compile(r"step time: predicted ([\d.]+) ms, measured ([\d.]+) ms")


def main() -> None:
    """Run the notebooks with two kinds of jobs so many times as argv[1] says."""
    os.environ["SAGEMAKER_TARGET"] = "local"
    demo.BUILD.mkdir(exist_ok=True)
    results, missed = {}, []
    for path in sorted(ROOT.glob("*.sagemaker/hetero-*.ipynb")):
        found = []
        for _ in range(int(sys.argv[1])):
            notebook = nbformat.read(path, as_version=4)
            demo.execute(notebook, path.parent)
            text = "\n".join(demo.comparison(notebook))
            numbers = SPEED_UP.search(text).groups() + STEP_TIME.search(text).groups()
            found.append([float(number) for number in numbers])
        results[path.stem] = found  # speed-up, ideal, predicted ms, measured ms
        shares = [speed_up / ideal for speed_up, ideal, *_ in found]
        errors = [predicted / measured - 1 for *_, predicted, measured in found]
        print(f"{path.stem}, speed-up of the heterogeneous job in {len(found)} runs:")
        print("  " + ", ".join(f"{speed_up:.2f} of {ideal:.2f}" for speed_up, ideal, *_ in found))
        speed_up = median(speed_up for speed_up, *_ in found)
        print(f"  median {speed_up:.2f}, {median(shares):.0%} of the ideal")
        steps = (f"{predicted:.1f} for {measured:.1f}" for *_, predicted, measured in found)
        print(f"  its step time predicted: {', '.join(steps)} ms")
        worst = max(errors, key=abs)
        print(f"  median error {median(errors):+.0%}, worst {worst:+.0%}", flush=True)
        if speed_up < LEAST_SPEED_UP or median(shares) < LEAST_SHARE:
            missed.append(f"{path.stem}'s speed-up")
        if abs(median(errors)) > MEDIAN_ERROR or abs(worst) > WORST_ERROR:
            missed.append(f"{path.stem}'s prediction")
    write_results("cluster", results)
    if missed:
        sys.exit(f"Targets missed: {missed}: is the machine busy?")


if __name__ == "__main__":
    main()
