"""What the runtime takes as hosts become more: launchers of hetero/, half of them with a rank.

A job's last host comes 4 s after the others, as hosts do not come all at once. Measured are the
time from then until the last rank has been started, the CPU time that the leader needs, and the
time from the decision that the job has ended to the last goodbye. The ranks are `sleep`.

More launchers than a small machine can run are in one process, this file's, each with a connection
of its own to the leader; their ranks are no processes.
"""

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from common import CODE

from hetero.member import Member
from hetero.plan import Plan
from hetero.topology import Cluster

HOLD_SECONDS, TRAINING_SECONDS, WATCHED_SECONDS = 4.0, 8.0, 4.0
LIMIT_SECONDS = 120
RANK = ["sh", "-c", f"date +started=%s.%N; exec sleep {TRAINING_SECONDS:g}"]
SERVE = ["sleep", "1000"]
LAUNCHER = f"""import hetero, time
print(f"coming={{time.time()}}", flush=True)
hetero.run({RANK}, {SERVE}, train_group="dnn", data_groups=["data"], ranks=1, spare_cores=0)"""


@dataclass
class Job:
    """What was seen of a job."""

    start_ms: float  # from when the last host has come until the last rank has been started
    cpu_seconds: float  # the leader's until then, with the 0.1 s and more that Python takes
    cpu_share: float  # of a core that the leader takes while the training runs
    goodbye_seconds: float  # from the decision to the last goodbye
    machine: float  # of all cores' time while the training runs, whoever took it


def clusters(hosts: int, port: int) -> list[Cluster]:
    """What each host of a job reads of it; the first half of them train."""
    names = [f"algo-{number}" for number in range(1, hosts + 1)]
    groups = {"dnn": names[: hosts // 2], "data": names[hosts // 2 :]}
    addresses = dict.fromkeys(names, "127.0.0.1")
    return [
        Cluster(name, group, "local", "lo", groups, addresses, port)
        for group, members in groups.items()
        for name in members
    ]


def launch(cluster: Cluster, folder: Path, log: int) -> subprocess.Popen:
    """Start a launcher as SageMaker does, with the job's description in its own folder."""
    config = folder / cluster.host / "input" / "config"
    config.mkdir(parents=True)
    groups = [{"instance_group_name": g, "hosts": hosts} for g, hosts in cluster.groups.items()]
    resources = {"current_host": cluster.host, "current_group_name": cluster.group}
    resources |= {"current_instance_type": "local", "network_interface_name": "lo"}
    (config / "resourceconfig.json").write_text(json.dumps(resources | {"instance_groups": groups}))
    local = {name: asdict(cluster)[name] for name in ("addresses", "base_port")}
    environment = {"SAGEMAKER_BASE_DIR": str(folder / cluster.host), "PYTHONPATH": str(CODE)}
    environment |= {"LOCAL_SAGEMAKER": json.dumps(local)}
    environment = {**os.environ, "HETERO_TOKEN": "a token", **environment}
    command = [sys.executable, "-c", LAUNCHER]
    return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


@contextlib.contextmanager
def running(hosts: int, real: bool, port: int, log: int) -> Iterator[psutil.Process]:
    """Run a job's launchers, the last to come after a pause; give the leader's process."""
    first, *others = clusters(hosts, port)
    processes: list[subprocess.Popen] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            processes.append(launch(first, Path(folder), log))
            if real:
                processes += [launch(cluster, Path(folder), log) for cluster in others[:-1]]
                time.sleep(HOLD_SECONDS)
                processes.append(launch(others[-1], Path(folder), log))
            else:
                command = [sys.executable, __file__, str(hosts), str(port)]
                environment = {**os.environ, "HETERO_TOKEN": "a token"}
                processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
            yield psutil.Process(processes[0].pid)
            for process in processes:
                process.wait(LIMIT_SECONDS)
        finally:
            for process in processes:
                process.kill()
                process.wait()


def measure(hosts: int, real: bool, port: int) -> Job:
    """Run a job of so many hosts, each a real launcher, or all but the leader in one process."""
    with tempfile.NamedTemporaryFile("a+") as log:

        def times(what: str) -> list[float]:
            return [float(t) for t in re.findall(rf"^{what}=([\d.]+)$", read(log.name), re.M)]

        with running(hosts, real, port, log.fileno()) as leader:
            deadline = time.monotonic() + LIMIT_SECONDS
            while len(times("started")) < hosts // 2:
                assert time.monotonic() < deadline, read(log.name)
                time.sleep(0.1)
            cpu, machine, began = sum(leader.cpu_times()[:2]), psutil.cpu_times(), time.monotonic()
            time.sleep(WATCHED_SECONDS)
            share = (sum(leader.cpu_times()[:2]) - cpu) / (time.monotonic() - began)
            passed = [new - old for new, old in zip(psutil.cpu_times(), machine, strict=True)][:8]
            idle = passed[machine._fields.index("idle")] + passed[machine._fields.index("iowait")]
        start_ms = 1000 * (max(times("started")) - max(times("coming")))
        goodbye = re.search(r"all hosts have signed off ([\d.]+) s", read(log.name))
        assert goodbye, read(log.name)
        return Job(start_ms, cpu, share, float(goodbye[1]), 1 - idle / sum(passed))


def read(path: str) -> str:
    return Path(path).read_text()


class Light(Member):
    """A host of a job, whose ranks and data server are no processes."""

    async def train(self, rank: int) -> None:
        print(f"started={time.time()}", flush=True)
        await asyncio.sleep(TRAINING_SECONDS)
        self.report["running"].clear()
        self.say()

    async def serve(self) -> None:
        await asyncio.sleep(LIMIT_SECONDS)


async def be_all_but_the_leader(hosts: int, port: int) -> None:
    """Take part in a job for all of its hosts but the first; the last one comes later."""
    leader, *others = clusters(hosts, port)

    async def take_part(cluster: Cluster) -> None:
        await asyncio.sleep(HOLD_SECONDS if cluster is others[-1] else 0)
        print(f"coming={time.time()}", flush=True)
        ranks = int(cluster.group == "dnn")
        await Light(
            Plan(cluster, leader.host, [], ranks, [], [], [], False, 600, 60, 300)
        ).take_part()

    await asyncio.gather(*map(take_part, others))


if __name__ == "__main__":
    asyncio.run(be_all_but_the_leader(*map(int, sys.argv[1:])))
