"""Whole jobs side by side: a training that RemoteDataset feeds, and one that Ray Data feeds.

    .venv/bin/python benchmarks/ray_jobs.py 3      three jobs of each, in turn; four minutes

Each job runs on the local SageMaker and has a data host and a training host, with a core each. It
prepares the same images as benchmarks/loader.py, and does nothing else with them. The jobs print
what they measure, among it the CPU time of all processes of each host.
"""

import inspect
import json
import re
import sys
import tempfile
from pathlib import Path
from statistics import median

from common import CODE, ROOT, table, write_results

sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from loader import AUGMENT, BATCH_SIZE, IMAGES, Digits, Prepare  # noqa: E402

from helpers.jobs import Jobs, texts_in  # noqa: E402
from helpers.ray import COMMAND, FILES  # noqa: E402
from shared import local_sagemaker  # noqa: E402

PACKAGES = ROOT / "build" / "bench" / "packages"
SAMPLES = f"""
import tempfile
from pathlib import Path
import torch
from dataset import MnistDataset
IMAGES, AUGMENT = {IMAGES}, {AUGMENT}
{inspect.getsource(Digits)}
{inspect.getsource(Prepare)}
"""
# Takes batches from `stream`, and prints what that costs. All hosts are on this machine.
MEASURE = """
import json, os, time
import psutil

def used():
    here, seconds, memory = os.environ["SAGEMAKER_BASE_DIR"], {}, {}
    for process in psutil.process_iter():
        try:
            environment = process.environ()
            if environment.get("TRAINING_JOB_NAME") == os.environ["TRAINING_JOB_NAME"]:
                host = environment["SAGEMAKER_BASE_DIR"] == here
                times = process.cpu_times()
                seconds[host] = seconds.get(host, 0) + times.user + times.system
                memory[host] = memory.get(host, 0) + process.memory_full_info().pss
        except psutil.Error:
            continue
    return seconds, memory

def measure(stream, batch_size, begin):
    next(stream)
    first, warm = time.perf_counter() - begin, time.perf_counter() + 5
    while time.perf_counter() < warm:
        next(stream)
    (before, _), start, samples = used(), time.perf_counter(), 0
    while time.perf_counter() < start + 15:
        next(stream)
        samples += batch_size
    seconds = time.perf_counter() - start
    after, memory = used()
    found = {"first": first, "rate": samples / seconds, "GB": memory[False] / 1e9}
    for host, name in {False: "data", True: "training"}.items():
        found[name] = 1000 * (after[host] - before[host]) / samples
    print("measured", json.dumps(found), flush=True)
"""
OURS = f"""
from torch.utils.data import DataLoader
from feed import RemoteDataset
from measure import measure, time
from samples import Digits

begin = time.perf_counter()
loader = DataLoader(RemoteDataset(Digits()), {BATCH_SIZE}, num_workers=1)
measure(iter(loader), {BATCH_SIZE}, begin)
"""
RAYS = f"""
import serve
import ray
from measure import measure, time
from samples import Prepare

begin = time.perf_counter()
serve.join()
numbers = ray.data.range(10_000_000, override_num_blocks=10_000)
one = ray.data.ActorPoolStrategy(size=1)
batches = numbers.map_batches(Prepare, batch_size={BATCH_SIZE}, compute=one)
measure(iter(batches.iter_torch_batches(batch_size={BATCH_SIZE}, prefetch_batches=2)),
        {BATCH_SIZE}, begin)
"""
WAYS = {
    "RemoteDataset": (texts_in(CODE, "hetero", "feed") | {"train.py": OURS}, "--spare-cores 0"),
    "Ray Data": (FILES | {"train.py": RAYS}, COMMAND.split("hetero ")[1].split("train.py")[0]),
}


def run(jobs: Jobs, way: str) -> dict[str, float]:
    """Run a job, which must complete; return what it has measured."""
    files, options = WAYS[way]
    files = files | {"measure.py": MEASURE, "samples.py": SAMPLES}
    files["dataset.py"] = (CODE / "dataset.py").read_text()
    files.pop("requirements.txt", None)  # what they name is in .venv and in PACKAGES
    job = jobs.run(
        files,
        f"exec python -m hetero {options} train.py",
        {"data_group": ("ml.c5.xlarge", 1), "dnn_group": ("ml.m5.xlarge", 1)},
        environment={"HETERO_TOKEN": "a secret", "PYTHONPATH": str(PACKAGES)},
        max_runtime_seconds=300,
    )
    log = "\n".join(jobs.log(job["TrainingJobName"]))
    assert job["TrainingJobStatus"] == "Completed", job["FailureReason"]
    return json.loads(re.search("^measured (.*)", log, re.M)[1])


def main() -> None:
    """Run argv[1] jobs of each way in turn; print a table of the medians."""
    if len(sys.argv) != 2 or not sys.argv[1].isdecimal() or not int(sys.argv[1]):
        sys.exit("Give the number of jobs of each kind: benchmarks/ray_jobs.py 3")
    if not PACKAGES.is_dir():
        sys.exit("Ray is missing: run `make bench` once, which installs it in build/bench/.")
    found: dict[str, list[dict]] = {way: [] for way in WAYS}
    with local_sagemaker.start() as local, tempfile.TemporaryDirectory() as folder:
        jobs = Jobs(local.role, Path(folder))
        for _ in range(int(sys.argv[1])):
            for way in WAYS:
                found[way].append(run(jobs, way))
    rows = []
    for way, runs in found.items():
        middle = {name: median(run[name] for run in runs) for name in runs[0]}
        rates = f"{middle['rate']:,.0f} ({min(r['rate'] for r in runs):,.0f} to "
        rates += f"{max(r['rate'] for r in runs):,.0f})"
        shown = [f"{middle[name]:.2f}" for name in ("data", "training")]
        rows.append([way, rates, *shown, f"{middle['first']:.1f}", f"{middle['GB']:.2f}"])
    heads = "fed by | samples/s | CPU ms a sample: data host | training host"
    table(f"{heads} | s until the first batch | GB on the data host", rows)
    write_results("ray_jobs", found)


if __name__ == "__main__":
    main()
