"""Running jobs of the PyTorch example: start them, find their processes, kill or freeze these."""

import contextlib
import functools
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

import boto3
import numpy as np
import psutil
from sagemaker.core.training.configs import InputData

from helpers.jobs import Jobs, texts_in
from helpers.mnist import idx
from helpers.pages import EXAMPLE
from helpers.waiting import wait_until, wait_until_gone

CODE = EXAMPLE / "code"
GROUPS = {"data_group": ("ml.c5.xlarge", 2), "dnn_group": ("ml.m5.xlarge", 2)}
PAIR = {"data_group": ("ml.c5.xlarge", 1), "dnn_group": ("ml.m5.xlarge", 1)}
BUCKET, IMAGES = "endings", 640
HYPERPARAMETERS = {"model": "small", "batch-size": 16, "processes-per-host": 1, "log-every": 1,
                   "augment": 1, "workers": 1, "epochs": 1000, "checkpoint-every": 5}  # fmt: skip
# Without a pause, the steps would take the cores from everything else that happens in the test.
STEP = "            optimizer.zero_grad()\n"
LEISURELY = (STEP, f"            time.sleep(0.3)\n{STEP}")
# Small programs that replace a job's scripts. They print the same lines, and the training script
# reacts to SIGTERM in the same way.
SERVE = """
import time
print("serving at", flush=True)
time.sleep(1000)
"""
SLEEP = "import time\ntime.sleep(100)"
LINGER = "import time\ntime.sleep(4)\n"  # all servers have printed by then, even on a busy machine
CLUSTER = "import hetero, sys, time\ncluster = hetero.read_cluster()\n"  # starts a launcher.py
STAND_INS = {
    "feed/server.py": SERVE,
    "train_dnn.py": """
import os, signal, sys, time
from pathlib import Path

job, last_step, stopped = Path(os.environ["SAGEMAKER_BASE_DIR"]).parents[2], 1000, []
if "--max-steps" in sys.argv:
    last_step = int(sys.argv[sys.argv.index("--max-steps") + 1])
signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
for step in range(1, last_step + 1):
    time.sleep(0.3)
    if os.environ["RANK"] == "0":
        print(f"step={step} epoch=1", flush=True)
    if stopped:
        sys.exit(f"training stopped by SIGTERM after step {step}")
    if [*job.glob("*/opt/ml/enough")]:
        break
print("training finished", flush=True)
""",
}
# Ends the training when a file appears. A number of steps would not do, because nobody knows how
# many steps a machine takes until a data server has restarted.
ENOUGH = (
    "            stopping = parallel.any_rank(",
    "            enough = Path(os.environ['SAGEMAKER_BASE_DIR'], 'enough')\n"
    "            if parallel.any_rank(enough.exists(), control):\n"
    "                last_step = at.step\n"
    "            stopping = parallel.any_rank(",
)


def upload_images(bucket: str = BUCKET, count: int = IMAGES) -> str:
    """Put images of noise in MNIST's format into a bucket; return their URI."""
    s3, random = boto3.client("s3"), np.random.default_rng(0)
    s3.create_bucket(Bucket=bucket)
    images, labels = random.integers(0, 256, (count, 28, 28)), random.integers(0, 10, count)
    for name, array in (("images-idx3", images), ("labels-idx1", labels)):
        s3.put_object(Bucket=bucket, Key=f"mnist/train-{name}-ubyte", Body=idx(array))
    return f"s3://{bucket}/mnist"


@dataclass
class Running:
    """A running job of the example."""

    jobs: Jobs
    name: str

    def processes(self, host: str = "", has: str = "", **variables: str) -> list[psutil.Process]:
        """Return the job's processes, on one host or on all, whose environment matches.

        `has` is a variable that the environment must have. hetero/ sets RANK for ranks, and
        HETERO_SERVE_AT for data servers.
        """
        variables["TRAINING_JOB_NAME"] = self.name
        found = []
        for process in psutil.process_iter():
            try:
                environment = process.environ()
            except psutil.Error:
                continue
            is_here = f"/{host}" in environment.get("SAGEMAKER_BASE_DIR", "")
            if (
                is_here
                and variables.items() <= environment.items()
                and (not has or has in environment)
            ):
                found.append(process)
        return found

    def process(self, **where: str) -> psutil.Process:
        """Wait for the one process that matches, and return it; ignore its descendants."""
        [process] = wait_until(
            lambda: len(found := first_of(self.processes(**where))) == 1 and found, seconds=60
        )
        return process

    @functools.cached_property
    def environment(self) -> dict[str, str]:
        """Wait for one of the job's hosts, and return its environment, which is cached."""

        def ask() -> dict[str, str]:
            for process in self.processes():
                with contextlib.suppress(psutil.Error):  # the process has just ended
                    return process.environ()
            return {}

        return wait_until(ask, seconds=120)

    def first_port(self) -> int:
        """Return the first of the ports that this machine has reserved for the job."""
        return json.loads(self.environment["LOCAL_SAGEMAKER"])["base_port"]

    def host(self, group: str, number: int) -> str:
        """Return the name of a group's host, by its number in the sorted list of hosts."""
        folder = Path(self.environment["SAGEMAKER_BASE_DIR"], "input", "config")
        groups = json.loads((folder / "resourceconfig.json").read_text())["instance_groups"]
        hosts = next(g["hosts"] for g in groups if g["instance_group_name"] == group)
        return sorted(hosts)[number]  # there are fewer than ten

    def started_at(self) -> float:
        """Return when the job's hosts were started, in seconds since 1970."""
        job = boto3.client("sagemaker").describe_training_job(TrainingJobName=self.name)
        phases = {phase["Status"]: phase for phase in job["SecondaryStatusTransitions"]}
        return phases["Training"]["StartTime"].timestamp()

    def rank(self, number: int) -> psutil.Process:
        """Return a rank's process; with two ranks per host, 2 and 3 are on the second dnn host."""
        return self.process(RANK=str(number))

    def server(self, host: str) -> psutil.Process:
        """Return a host's data server."""
        return self.process(host=host, has="HETERO_SERVE_AT")

    def launchers(self) -> list[psutil.Process]:
        """Return the first process of each host, its PID 1, if it has become the launcher."""
        return [p for p in first_of(self.processes()) if "python" in p.name()]

    def launcher(self, group: str, number: int) -> psutil.Process:
        """Return a host's PID 1."""
        return self.process(host=self.host(group, number))

    def freeze(self, group: str, number: int) -> list[psutil.Process]:
        """Suspend all processes of a host, its launcher first; its connections stay open."""
        launcher = self.launcher(group, number)
        frozen = [launcher, *launcher.children(recursive=True)]
        for process in frozen:
            with contextlib.suppress(psutil.NoSuchProcess):  # a DataLoader worker after its epoch
                process.suspend()
        return frozen

    def freeze_for(self, group: str, number: int, seconds: float) -> None:
        """Suspend all processes of a host for some seconds."""
        frozen = self.freeze(group, number)
        time.sleep(seconds)
        for process in frozen:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()

    def kill_data_servers(self, numbers: list[int], times: int) -> None:
        """Kill the data servers of some data hosts this many times, each time they are back."""
        for _ in range(times):
            for number in numbers:
                server = self.server(self.host("data_group", number))
                family = [server, *server.children(recursive=True)]
                server.kill()
                _, alive = psutil.wait_procs(family, 10)
                assert not alive

    def finish_training(self, after: str, times: int = 1) -> None:
        """End the training once `times` lines of the log have `after`; this needs ENOUGH."""
        self.jobs.wait_for_log(self.name, after, times=times)
        environment = self.launcher("dnn_group", 0).environ()
        Path(environment["SAGEMAKER_BASE_DIR"], "enough").touch()

    def stop(self) -> None:
        """Call StopTrainingJob."""
        boto3.client("sagemaker").stop_training_job(TrainingJobName=self.name)

    def log(self) -> list[str]:
        """Return all lines of all hosts so far."""
        return self.jobs.log(self.name)


def first_of(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Return the processes whose parent is not among them."""
    parents = {}
    for process in processes:
        with contextlib.suppress(psutil.Error):  # the process has just ended
            parents[process] = process.ppid()
    pids = {process.pid for process in parents}
    return [process for process, parent in parents.items() if parent not in pids]


def start(
    jobs: Jobs, changes: dict | None = None, late: int = 0, torch: bool = True, **settings
) -> Running:
    """Start the example.

    changes: (old, new) texts to replace, by file. late: seconds by which one data host is late.
    Without torch, the STAND_INS run instead of the scripts, and without changes.
    """
    files = texts_in(CODE)
    del files["requirements.txt"]  # checking the requirements takes longer than everything else
    for file, (old, new) in [("train_dnn.py", LEISURELY), *(changes or {}).items()]:
        assert files[file].count(old) == 1, (file, old)
        files[file] = files[file].replace(old, new)
    if not torch:
        files |= STAND_INS
    command = "exec python launcher.py"
    if late:
        files["late.py"] = (
            "import hetero, time\ncluster = hetero.read_cluster()\n"
            f"if (cluster.group, cluster.node_rank) == ('data_group', 1):\n    time.sleep({late})\n"
        )
        command = f"python late.py && {command}"
    hyperparameters = {**HYPERPARAMETERS, **settings.pop("hyperparameters", {})}
    name = jobs.create(
        files,
        command,
        settings.pop("groups", GROUPS),
        hyperparameters=hyperparameters,
        environment={"HETERO_TOKEN": "a secret"},
        input_data_config=[InputData(channel_name="training", data_source=f"s3://{BUCKET}/mnist")],
        **settings,
    )
    return Running(jobs, name)


def start_programs(
    jobs: Jobs,
    train: str,
    options: str = "",
    serve: str | None = SERVE,
    files: dict | None = None,
    **settings,
) -> Running:
    """Start a job that has only the runtime, hetero/, and small programs instead of the scripts.

    options: for `python -m hetero`. serve: replaces feed/server.py; None keeps feed/. files: files
    to add or replace. If there is a launcher.py among them, it runs instead of `python -m hetero`.
    """
    code = {"feed/server.py": serve} if serve is not None else texts_in(CODE, "feed")
    code |= {**texts_in(CODE, "hetero"), "train.py": train, **(files or {})}
    command = "launcher.py" if "launcher.py" in code else f"-m hetero {options} train.py"
    settings = {"groups": GROUPS, "environment": {"HETERO_TOKEN": "a secret"}, **settings}
    return Running(jobs, jobs.create(code, f"exec python {command}", **settings))


def run_programs(jobs: Jobs, train: str, *args, **settings) -> tuple[dict, list[str]]:
    """Call `start_programs`, and wait; return DescribeTrainingJob's response and the log."""
    job = start_programs(jobs, train, *args, **settings)
    return jobs.wait(job.name), job.log()


def log_of(jobs: Jobs, train: str, *args, **settings) -> list[str]:
    """Call `run_programs`; the job must be Completed. Return its log."""
    job, log = run_programs(jobs, train, *args, **settings)
    assert job["TrainingJobStatus"] == "Completed", job["FailureReason"]
    return log


def a_host(folder: Path, groups: dict[str, list[str]], **config) -> dict[str, str]:
    """Make this machine a host whose files are in `folder`; return its launcher's environment."""
    given = {"current_host": "algo-1", "hosts": ["algo-1"], "network_interface_name": "lo"}
    if groups:  # the first is the host's own
        given["current_group_name"] = own = next(iter(groups))
        given["current_host"] = groups[own][0]
        given["instance_groups"] = [
            {"instance_group_name": name, "hosts": hosts} for name, hosts in groups.items()
        ]
    path = folder / "input" / "config" / "resourceconfig.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({**given, **config}))
    return {**os.environ, "SAGEMAKER_BASE_DIR": str(folder), "PYTHONPATH": str(CODE)}


def after_steps(job: Running) -> None:
    """Wait until the training is well under way."""
    job.jobs.wait_for_log(job.name, "step=8 ")


def seconds_to_end(job: dict, since: float) -> float:
    """Return the seconds from an event to the last host's exit."""
    phases = {phase["Status"]: phase for phase in job["SecondaryStatusTransitions"]}
    last = phases.get("Stopping", phases["Training"])  # ends when the last host exits
    return last["EndTime"].timestamp() - since


def is_of_a_job(pid: int) -> bool:
    """Whether a process belongs to some job, or has ended."""
    try:
        return "TRAINING_JOB_NAME" in psutil.Process(pid).environ()
    except psutil.Error:
        return True


def assert_nothing_left(job: Running) -> None:
    """Wait until nothing is left of a job that has ended: processes, its folder, ports in use."""
    ports = range(job.first_port(), job.first_port() + 50)
    folder = Path(job.environment["SAGEMAKER_BASE_DIR"]).parents[2]

    def left() -> list:
        listening = [
            connection.laddr
            for connection in psutil.net_connections("tcp")
            if connection.laddr.port in ports
            and connection.status == psutil.CONN_LISTEN
            # A job that has started in the meantime may have the same ports.
            and not is_of_a_job(connection.pid)
        ]
        return [*job.processes(), *filter(Path.exists, [folder]), *listening]

    wait_until_gone(left)
