"""What a heterogeneous job could have reached, and when its numbers allow no verdict."""

import os
import re
import subprocess
import sys
from datetime import datetime, timedelta, timezone

import pytest

from helpers.ended_jobs import put_job, put_log, put_use
from helpers.jobs import READ_CONFIG, TWO_GROUPS, Jobs
from helpers.pages import PYTORCH_NOTEBOOK, ROOT, TENSORFLOW_NOTEBOOK
from shared import outcome
from shared.monitoring import bottleneck

START = datetime.now(timezone.utc) - timedelta(minutes=40)
CORES = {"ml.p4d.24xlarge": 3, "ml.c5.18xlarge": 2}
GROUPS = {"dnn_group": ("ml.p4d.24xlarge", 1), "data_group": ("ml.c5.18xlarge", 2)}


def put(name: str, step_ms: float, wait_ms: float = 0, groups: dict | None = None, *more: str):
    """Make a job with a batch of 100 samples."""
    put_job(name, groups or {"": ("ml.p4d.24xlarge", 1)})
    samples_per_s = 1000 * 100 / step_ms
    lines = [
        f"step={n} step_time_ms={step_ms} data_wait_ms={wait_ms} samples_per_s={samples_per_s}"
        for n in range(5)
    ]
    put_log(name, "algo-1", ["host=algo-1 group=dnn_group", *more, *lines], start=START, every_s=10)


def judge(homogeneous=200, heterogeneous=100, floor=90, sample_ms=1.0, wait=0) -> outcome.Outcome:
    """Judge jobs with these step times and this CPU time of a sample."""
    put("homogeneous", homogeneous, 0, None, f"data_ms_per_sample={sample_ms}")
    put("synthetic", floor)
    put("heterogeneous", heterogeneous, wait, GROUPS, "spare_cores=1")
    put_log("heterogeneous", "algo-2", ["host=algo-2 group=data_group"], start=START)
    return outcome.judge("homogeneous", "heterogeneous", "synthetic", CORES)


@pytest.mark.parametrize("sample_ms, possible", [(1.0, 90), (4.8, 96)])
def test_possible_is_the_floor_or_the_data_on_all_cores_that_prepare_it(aws, sample_ms, possible):
    """Two data hosts have two cores each, and the training host one spare core."""
    found = judge(sample_ms=sample_ms)
    assert found.possible_ms == pytest.approx(possible) and found.cores == 5
    most = 200 / possible
    assert str(found).endswith(
        f"speed-up: 2.00 of at most {most:.2f}\n          = {2 / most:.0%} of what was possible"
    )


def test_the_judged_jobs_own_wait_and_cpus_do_not_make_it_possible(aws):
    """However long it waits for its data: what was possible stays the same."""
    put_use("heterogeneous", "algo-2", "CPUUtilization", [7200] * 6, START)
    assert judge(heterogeneous=150, wait=60).possible_ms == pytest.approx(90)


@pytest.mark.parametrize(
    "times, reason",
    [
        ((200, 80, 90), "took 80.0 ms, less than was possible by the numbers of the homogeneous"),
        ((200, 100, 220), "without data a step took longer (220.0 ms) than in the homogeneous job"),
    ],
)
def test_numbers_that_contradict_each_other_give_no_verdict(times, reason):
    said = str(outcome.Outcome(*times, work_ms=100, cores=5))
    assert "; no verdict, because " in said and reason in said
    assert "of what was possible" not in said and "at most" not in said
    nearly = outcome.Outcome(200, 87, 90, 100, 5)  # a few percent are no contradiction
    assert str(nearly).endswith("= 100% of what was possible")


def test_other_programs_are_named_and_there_is_no_verdict(aws):
    put_use("homogeneous", bottleneck.OTHERS, "CPUUtilization", [4] * 30, START, every_s=5)
    assert not judge().problem
    put_use("heterogeneous", bottleneck.OTHERS, "CPUUtilization", [28] * 30, START, every_s=5)
    put_use("synthetic", bottleneck.OTHERS, "CPUUtilization", [30] * 30, START, every_s=5)
    assert (
        "no verdict, because other programs took CPU time: 28 % during the heterogeneous job, "
        "30 % during the data-free job."
    ) in str(judge())


def test_measured_has_the_floor_too(aws):
    judge()
    with pytest.raises(ValueError, match="without data is not known: give the name"):
        outcome.judge("homogeneous", "heterogeneous", None, CORES)
    line = '{"measured": {"step_ms": 200, "without_data_ms": 80}}'
    put_log("homogeneous", "algo-1", [line], at_s=60, start=START)
    assert outcome.judge("homogeneous", "heterogeneous", None, CORES).possible_ms == 80


BUSY = (
    READ_CONFIG
    + """
import time
if group == "dnn_group":
    for step in range(1, 7):
        until = time.process_time() + 0.4
        while time.process_time() < until:
            pass
        print(f"step={step} step_time_ms=400 data_wait_ms=1 samples_per_s=1", flush=True)
"""
)


def test_the_local_sagemaker_measures_what_other_programs_take(make_client, request):
    """The job's own processes and the kernel do not count."""
    make_client.cache_clear()  # the local SageMaker does not start beside AWS's clients
    jobs: Jobs = request.getfixturevalue("jobs")

    def run(program: str) -> float:
        name = jobs.create({"train.py": BUSY}, "exec python train.py", TWO_GROUPS)
        jobs.wait_for_log(name, "step=1 ")
        with subprocess.Popen([sys.executable, "-c", program]) as other:
            jobs.wait(name)
            other.kill()
        return bottleneck.others_percent(bottleneck.observe(name))

    cores = len(os.sched_getaffinity(0))
    quiet, busy = run("pass"), run("while True: pass")
    # Other tests may run meanwhile; the program takes a core, or its share of one.
    assert busy > 40 / cores and (busy > quiet + 20 / cores or quiet > 30)


@pytest.mark.parametrize("notebook", [PYTORCH_NOTEBOOK, TENSORFLOW_NOTEBOOK], ids=lambda p: p.stem)
def test_notebooks_and_the_benchmark_leave_it_to_this_one_function(notebook):
    text = notebook.read_text()
    assert "print(outcome.judge(homogeneous_job, heterogeneous_job, synthetic_job, cores))" in text
    benchmark = (ROOT / "benchmarks" / "job.py").read_text()
    pattern = re.search(r'SPEED_UP = re.compile\(r"(.+)"\)', benchmark)[1]
    said = str(outcome.Outcome(200, 100, 90, 100, 5))
    assert re.search(pattern, said).groups() == ("2.00", "2.22")
    assert not re.search(pattern, str(outcome.Outcome(200, 50, 90, 100, 5)))
