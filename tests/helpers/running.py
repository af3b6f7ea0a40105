"""Jobs of the PyTorch example that run: they are started, found by their processes, and harmed."""

import contextlib
import functools
import json
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
BUCKET, IMAGES = "endings", 640
HYPERPARAMETERS = {"model": "small", "batch-size": 16, "processes-per-host": 1, "log-every": 1,
                   "augment": 1, "workers": 1, "epochs": 1000, "checkpoint-every": 5}  # fmt: skip
# Steps without a pause would take the cores from whatever is to happen meanwhile.
STEP = "            optimizer.zero_grad()\n"
LEISURELY = (STEP, f"            time.sleep(0.3)\n{STEP}")
# What an ending sees of the scripts: what they print, and how training reacts to SIGTERM.
SERVE = """
import time
print("serving at", flush=True)
time.sleep(1000)
"""
# Programs of a few lines, and the beginning of a launcher.py.
SLEEP = "import time\ntime.sleep(100)"
LINGER = "import time\ntime.sleep(4)\n"  # until all servers have told, busy as the machine may be
CLUSTER = "import hetero, sys, time\ncluster = hetero.read_cluster()\n"
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
# Not after so many steps: nobody knows how many a machine takes until a data server is back.
ENOUGH = (
    "            stopping = parallel.any_rank(",
    "            enough = Path(os.environ['SAGEMAKER_BASE_DIR'], 'enough')\n"
    "            if parallel.any_rank(enough.exists(), control):\n"
    "                last_step = at.step\n"
    "            stopping = parallel.any_rank(",
)


def upload_images(bucket: str = BUCKET, count: int = IMAGES) -> str:
    """Put images of noise in MNIST's format into a bucket; return where."""
    s3, random = boto3.client("s3"), np.random.default_rng(0)
    s3.create_bucket(Bucket=bucket)
    images, labels = random.integers(0, 256, (count, 28, 28)), random.integers(0, 10, count)
    for name, array in (("images-idx3", images), ("labels-idx1", labels)):
        s3.put_object(Bucket=bucket, Key=f"mnist/train-{name}-ubyte", Body=idx(array))
    return f"s3://{bucket}/mnist"


@dataclass
class Running:
    """A job of the example that runs."""

    jobs: Jobs
    name: str

    def processes(self, host: str = "", has: str = "", **variables: str) -> list[psutil.Process]:
        """The job's processes, of a host or of all, by what is in their environment.

        hetero/ gives ranks a RANK, and data servers HETERO_SERVE_AT.
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
        """The one process that fits, as soon as it is there; what it has started fits, too."""
        [process] = wait_until(
            lambda: len(found := first_of(self.processes(**where))) == 1 and found, seconds=60
        )
        return process

    @functools.cached_property
    def environment(self) -> dict[str, str]:
        """The environment of one of its hosts, as soon as there is one; it is remembered."""

        def ask() -> dict[str, str]:
            for process in self.processes():
                with contextlib.suppress(psutil.Error):  # it has ended meanwhile
                    return process.environ()
            return {}

        return wait_until(ask)

    def first_port(self) -> int:
        """The first of the ports that are its own on this machine."""
        return json.loads(self.environment["LOCAL_SAGEMAKER"])["base_port"]

    def host(self, group: str, number: int) -> str:
        """The name of a group's host, by its rank there, in the order of the hosts' numbers."""
        folder = Path(self.environment["SAGEMAKER_BASE_DIR"], "input", "config")
        groups = json.loads((folder / "resourceconfig.json").read_text())["instance_groups"]
        hosts = next(g["hosts"] for g in groups if g["instance_group_name"] == group)
        return sorted(hosts)[number]  # fewer than ten

    def started_at(self) -> float:
        """When its hosts were started, in seconds since 1970."""
        job = boto3.client("sagemaker").describe_training_job(TrainingJobName=self.name)
        phases = {phase["Status"]: phase for phase in job["SecondaryStatusTransitions"]}
        return phases["Training"]["StartTime"].timestamp()

    def rank(self, number: int) -> psutil.Process:
        """A rank's process; with two a host, 2 and 3 are on the second dnn host."""
        return self.process(RANK=str(number))

    def server(self, host: str) -> psutil.Process:
        """A host's data server."""
        return self.process(host=host, has="HETERO_SERVE_AT")

    def launchers(self) -> list[psutil.Process]:
        """The first process of each host, its PID 1, if it has become the launcher."""
        return [p for p in first_of(self.processes()) if "python" in p.name()]

    def launcher(self, group: str, number: int) -> psutil.Process:
        """A host's PID 1."""
        return self.process(host=self.host(group, number))

    def freeze(self, group: str, number: int) -> list[psutil.Process]:
        """Stop all processes of a host, its launcher first: it keeps its connections, silent."""
        launcher = self.launcher(group, number)
        frozen = [launcher, *launcher.children(recursive=True)]
        for process in frozen:
            with contextlib.suppress(psutil.NoSuchProcess):  # a DataLoader's, whose epoch is over
                process.suspend()
        return frozen

    def freeze_for(self, group: str, number: int, seconds: float) -> None:
        """Stop all processes of a host for so long."""
        frozen = self.freeze(group, number)
        time.sleep(seconds)
        for process in frozen:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()

    def kill_data_servers(self, numbers: list[int], times: int) -> None:
        """Kill the data servers of some data hosts, again each time they are back."""
        for _ in range(times):
            for number in numbers:
                server = self.server(self.host("data_group", number))
                family = [server, *server.children(recursive=True)]
                server.kill()
                _, alive = psutil.wait_procs(family, 10)
                assert not alive

    def finish_training(self, after: str, times: int = 1) -> None:
        """Have the training end once the log has `after` so many times: with the change ENOUGH."""
        self.jobs.wait_for_log(self.name, after, times=times)
        environment = self.launcher("dnn_group", 0).environ()
        Path(environment["SAGEMAKER_BASE_DIR"], "enough").touch()

    def stop(self) -> None:
        """StopTrainingJob."""
        boto3.client("sagemaker").stop_training_job(TrainingJobName=self.name)

    def log(self) -> list[str]:
        """All lines of all hosts so far."""
        return self.jobs.log(self.name)


def first_of(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that none of the others has started."""
    parents = {}
    for process in processes:
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            parents[process] = process.ppid()
    pids = {process.pid for process in parents}
    return [process for process, parent in parents.items() if parent not in pids]


def start(
    jobs: Jobs, changes: dict | None = None, late: int = 0, torch: bool = True, **settings
) -> Running:
    """Start the example; changes: (old, new) texts by file; late: seconds, of one data host.

    Without torch, the STAND_INS run instead of the scripts, and these are not changed.
    """
    files = texts_in(CODE)
    del files["requirements.txt"]  # checking them takes longer than everything else
    for file, (old, new) in [("train_dnn.py", LEISURELY), *(changes or {}).items()]:
        assert files[file].count(old) == 1, (file, old)
        files[file] = files[file].replace(old, new)
    if not torch:
        files |= STAND_INS
    command = "exec python launcher.py"
    if late:
        files["late.py"] = (
            "import hetero, time\ncluster = hetero.read_cluster()\n"
            f"if (cluster.group, cluster.rank) == ('data_group', 1):\n    time.sleep({late})\n"
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
    """Start a job of the runtime alone, and of programs in place of the scripts.

    options: of `python -m hetero`; serve: in place of feed/, or None for feed/ itself; files: more
    files, or others, such as a launcher.py, which is then started instead.
    """
    code = {"feed/server.py": serve} if serve is not None else texts_in(CODE, "feed")
    code |= {**texts_in(CODE, "hetero"), "train.py": train, **(files or {})}
    command = "launcher.py" if "launcher.py" in code else f"-m hetero {options} train.py"
    settings = {"groups": GROUPS, "environment": {"HETERO_TOKEN": "a secret"}, **settings}
    return Running(jobs, jobs.create(code, f"exec python {command}", **settings))


def run_programs(jobs: Jobs, train: str, *args, **settings) -> tuple[dict, list[str]]:
    """`start_programs`, to the job's end; return DescribeTrainingJob's answer, and the log."""
    job = start_programs(jobs, train, *args, **settings)
    return jobs.wait(job.name), job.log()


def log_of(jobs: Jobs, train: str, *args, **settings) -> list[str]:
    """`run_programs`, which must be Completed; return the log."""
    job, log = run_programs(jobs, train, *args, **settings)
    assert job["TrainingJobStatus"] == "Completed", job["FailureReason"]
    return log


def reason_of(jobs: Jobs, train: str, *args, **settings) -> str:
    """`run_programs`, which must fail; return the FailureReason."""
    job, _ = run_programs(jobs, train, *args, **settings)
    assert job["TrainingJobStatus"] == "Failed"
    return job["FailureReason"]


def after_steps(job: Running) -> None:
    """Wait until the training is well under way."""
    job.jobs.wait_for_log(job.name, "step=8 ")


def seconds_to_end(job: dict, since: float) -> float:
    """From an event to the last host's exit."""
    phases = {phase["Status"]: phase for phase in job["SecondaryStatusTransitions"]}
    last = phases.get("Stopping", phases["Training"])  # until then some host was running
    return last["EndTime"].timestamp() - since


def is_of_a_job(pid: int) -> bool:
    """Whether a process belongs to some job, or has ended."""
    try:
        return "TRAINING_JOB_NAME" in psutil.Process(pid).environ()
    except psutil.Error:
        return True


def left_behind(job: Running) -> list:
    """What is there of a job that has ended: processes, files of theirs, ports in use."""
    ports = range(job.first_port(), job.first_port() + 50)
    folder = Path(job.environment["SAGEMAKER_BASE_DIR"]).parents[2]
    listening = [
        connection.laddr
        for connection in psutil.net_connections("tcp")
        if connection.laddr.port in ports
        and connection.status == psutil.CONN_LISTEN
        # A job that has begun meanwhile may have got the same ports.
        and not is_of_a_job(connection.pid)
    ]
    return [*job.processes(), *filter(Path.exists, [folder]), *listening]


def assert_nothing_left(job: Running) -> None:
    """Wait until nothing is there of a job that has ended, which takes SageMaker a moment."""
    wait_until_gone(lambda: left_behind(job))
