"""Spare cores of the PyTorch example's training hosts prepare data, too."""

import os
import subprocess
from collections import Counter

import pytest

from feed.client import DataHost
from helpers.data_hosts import loader_of, up
from helpers.datasets import PACED
from hetero import spare_cores


@pytest.mark.parametrize(
    "cpus, ranks, most, expected",
    [
        (8, 1, None, [1, 5, 2, 6, 3, 7]),  # all but 0, the first core's only vCPU here
        (8, 3, None, [3, 7]),
        (8, 4, None, []),
        (8, 1, 0, []),
        (8, 1, 2, [3, 7]),
        (8, 4, 99, [0, 1, 5, 2, 6, 3, 7]),  # all of them, if asked for
        (0, 1, None, [1, 2, 3, 5, 6, 7]),  # cores are unknown: vCPUs count as cores
    ],
)
def test_each_rank_keeps_a_physical_core(monkeypatch, tmp_path, cpus, ranks, most, expected):
    """Eight vCPUs, of which n and n + 4 share a core, as on AWS. The process has all but 4."""
    for cpu in range(cpus):
        (tmp_path / str(cpu)).write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    monkeypatch.setattr(spare_cores, "SIBLINGS", f"{tmp_path}/{{}}")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 5, 6, 7})
    assert spare_cores.find_spare_cores(ranks, most) == expected


def test_where_sched_idle_is_forbidden_it_runs_at_the_lowest_priority(monkeypatch):
    def refuse(*_) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    with subprocess.Popen(["sleep", "100"]) as process:
        spare_cores.run_when_idle(process.pid)
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == 19
        process.kill()


def test_own_server_and_data_host_share_the_samples(start):
    address = f"unix-abstract:spare cores of {os.getpid()}"
    own = start(address=address, environment={"PACE": "20"})
    hosts = up(own, start(environment={"PACE": "21"}))
    batches = [*loader_of(hosts, PACED, [[*range(i, i + 8)] for i in range(0, 160, 8)])]
    assert [index for batch in batches for index, _ in batch] == [*range(160)]
    share = Counter(pace for batch in batches for _, pace in batch)
    assert min(share[20], share[21]) >= 40, share


def test_ranks_of_a_host_share_its_own_server_and_all_ranks_the_others(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    for address, share in [("unix-abstract:own", 3), ("algo-1:7712", 1.5)]:
        host = DataHost(address, "a token", b"")
        host.workers = 6
        assert host.workers_for_rank() == share
