"""Spare cores of the PyTorch example's training hosts prepare data, too."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import endings
from data_hosts import service, up, wait_until
from jobs import Jobs

sys.path.insert(0, str(Path(__file__).parents[2] / "pt.grpc.sagemaker" / "code"))

from feed import spare  # noqa: E402
from feed.epoch import CALLS_BESIDE, MAX_THREADS, Host, share_calls  # noqa: E402


@pytest.mark.parametrize(
    "ranks, most, expected",
    [
        (1, None, [1, 5, 2, 6, 3, 7]),  # all but the first core, whose second vCPU is not ours
        (3, None, [3, 7]),
        (4, None, []),
        (9, None, []),
        (1, 0, []),
        (1, 2, [3, 7]),
        (4, 7, [0, 1, 5, 2, 6, 3, 7]),  # who asks for all gets them
        (4, 99, [0, 1, 5, 2, 6, 3, 7]),
    ],
)
def test_each_rank_keeps_a_physical_core(monkeypatch, tmp_path, ranks, most, expected):
    """Of eight vCPUs, of which four apart are a core, as on AWS, and this process has seven."""
    for cpu in range(8):
        (tmp_path / str(cpu)).write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    monkeypatch.setattr(spare, "SIBLINGS", f"{tmp_path}/{{}}")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 5, 6, 7})
    assert spare.cores(ranks, most) == expected


def test_vcpus_whose_cores_are_not_told_are_taken_as_cores(monkeypatch, tmp_path):
    monkeypatch.setattr(spare, "SIBLINGS", f"{tmp_path}/{{}}")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    assert spare.cores(1) == [1, 2]


FORBID = """
import os, runpy, sys
def refuse(*args): raise PermissionError(1, "Operation not permitted")
os.sched_setscheduler = refuse
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


def test_where_the_policy_idle_is_forbidden_it_runs_at_the_lowest_priority():
    arguments = [spare.__file__, str(min(os.sched_getaffinity(0))), "-c"]
    program = "import os; print(os.nice(0), len(os.sched_getaffinity(0)))"
    command = [sys.executable, "-c", FORBID, *arguments, program]
    assert subprocess.check_output(command, text=True) == "19 1\n"


def test_own_server_and_data_host_share_the_batches_and_either_does_for_both(start):
    address = f"unix-abstract:spare cores of {os.getpid()}"
    own = start("paced", address=address, environment={"PACE": "50"})
    hosts = up(own, start("paced", environment={"PACE": "51"}))
    loader = service(hosts, [[i] for i in range(60)])
    received = list(loader)
    assert [indices.item() for indices, _ in received] == list(range(60))
    served = Counter(pace.item() for _, pace in received)
    assert min(served[50], served[51]) >= 20, served

    own.kill()
    assert {pace.item() for _, pace in loader} == {51}
    own.start()
    up(own)
    hosts[1].kill()
    assert [indices.item() for indices, _ in loader] == list(range(60))


def test_ranks_of_a_host_share_its_own_server_and_all_ranks_the_others(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert Host("unix-abstract:own", workers=6).calls() == 3 + CALLS_BESIDE
    assert Host("algo-1:7712", workers=6).calls() == 6 + CALLS_BESIDE  # one rank in all, here


@pytest.mark.parametrize(
    "workers, calls",
    [
        ([2], [4]),
        ([100], [64]),
        ([2, 36], [4, 38]),
        ([100, 2, 72], [30, 4, 30]),
        ([2, 0], [4, 60]),  # one that has not answered may have any number
        ([5] * 100, [1] * 100),
    ],
)
def test_calls_that_a_small_server_leaves_are_the_large_ones(workers, calls):
    """All hosts together have MAX_THREADS, or one each."""
    hosts = [Host(f"algo-{number}:7712", count) for number, count in enumerate(workers)]
    share_calls(hosts)
    assert [host.calls() for host in hosts] == calls
    assert sum(calls) <= max(MAX_THREADS, len(hosts))


@pytest.mark.thorough
@pytest.mark.usefixtures("nothing_is_left")
def test_a_training_host_serves_its_own_ranks_and_survives_its_server_s_end(jobs: Jobs):
    endings.upload_images()
    job = endings.start(
        jobs,
        {"train_dnn.py": endings.ENOUGH},
        hyperparameters={"spare-cores": 1},
        groups={"data_group": ("ml.c5.xlarge", 1), "dnn_group": ("ml.m5.xlarge", 1)},
    )
    serving = f"serving 640 samples at unix-abstract:{job.host('dnn_group', 0)}:"
    jobs.wait_for_log(job.name, serving)
    server = job.process("train_data.py", host=job.host("dnn_group", 0))
    wait_until(lambda: os.sched_getscheduler(server.pid) == os.SCHED_IDLE)
    server.kill()
    job.finish_training(after=serving, times=2)
    done = jobs.wait(job.name)
    assert done["TrainingJobStatus"] == "Completed", done["FailureReason"]
    assert "spare_cores=1" in job.log()
