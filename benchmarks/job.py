"""What the whole job gains: the notebooks' heterogeneous jobs compared with the homogeneous ones.

    .venv/bin/python benchmarks/job.py 5      five runs of each notebook, of two minutes each

All jobs run on the local SageMaker. The homogeneous job runs the same training script, but prepares
the data on the training host, with torch's DataLoader or tf.data. Its share of the machine's cores
is that of its instance, so the speed-up is what the added cores bring, minus the overhead. Before
the notebooks run the heterogeneous job, they have the advisor predict its step time. What was
possible is computed in shared/outcome.py. A run without a verdict, for instance because other
programs used the machine, is repeated.
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
from common import table, write_results  # noqa: E402

LEAST_SPEED_UP, LEAST_SHARE = 1.4, 0.9  # in the median; the share is that of the possible speed-up
TRIES = 3  # for a run with a verdict
MEDIAN_ERROR, WORST_ERROR = 0.15, 0.25  # of the predicted step time
SPEED_UP = re.compile(r"speed-up: ([\d.]+) of at most ([\d.]+)")
STEP_TIME = re.compile(r"step time: predicted ([\d.]+) ms, measured ([\d.]+) ms")


def run(path: Path) -> list[float]:
    """Run a notebook; return speed-up, possible speed-up, and predicted and measured step ms."""
    for _ in range(TRIES):
        notebook = nbformat.read(path, as_version=4)
        demo.execute(notebook, path.parent)
        text = "\n".join(demo.comparison(notebook))
        if found := SPEED_UP.search(text):
            return [float(n) for n in found.groups() + STEP_TIME.search(text).groups()]
        print(text, flush=True)
    sys.exit(f"{TRIES} runs of {path.name} gave no verdict, for the reasons above.")


def main() -> None:
    """Run each notebook with two kinds of jobs argv[1] times; print a table."""
    if len(sys.argv) != 2 or not sys.argv[1].isdecimal() or not int(sys.argv[1]):
        sys.exit("Give the number of runs of each notebook: benchmarks/job.py 5")
    os.environ["SAGEMAKER_TARGET"] = "local"
    demo.BUILD.mkdir(exist_ok=True)
    results, rows, missed = {}, [], []
    for path in sorted(ROOT.glob("*.sagemaker/hetero-*.ipynb")):
        found = results[path.stem] = [run(path) for _ in range(int(sys.argv[1]))]
        speed_ups = [speed_up for speed_up, *_ in found]
        share = median(speed_up / most for speed_up, most, *_ in found)
        errors = [predicted / measured - 1 for *_, predicted, measured in found]
        error, worst = median(errors), max(errors, key=abs)
        shown = f"{median(speed_ups):.2f} ({min(speed_ups):.2f} to {max(speed_ups):.2f})"
        rows.append((path.stem, shown, f"{share:.0%}", f"{error:+.0%}", f"{worst:+.0%}"))
        if median(speed_ups) < LEAST_SPEED_UP or share < LEAST_SHARE:
            missed.append(f"{path.stem}'s speed-up")
        if abs(error) > MEDIAN_ERROR or abs(worst) > WORST_ERROR:
            missed.append(f"{path.stem}'s prediction")
    errors = "prediction's median error | worst error"
    table(f"notebook | speed-up | of the largest possible | {errors}", rows)
    write_results("job", results)
    print(f"\nTargets: a speed-up of {LEAST_SPEED_UP}, {LEAST_SHARE:.0%} of the largest possible;")
    print(f"errors of at most {MEDIAN_ERROR:.0%} in the median, {WORST_ERROR:.0%} at worst.")
    if missed:
        sys.exit(f"Targets missed: {missed}: is the machine busy?")


if __name__ == "__main__":
    main()
