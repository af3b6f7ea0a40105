"""Every way that a job of the PyTorch example can end, as the example's README lists them.

Each `Ending` runs the example on two data hosts and two dnn hosts, with one rank each, or two where
a second rank on a host matters. It causes one event by real signals and API calls, and says what
must come of it.

Most endings depend on launcher.py and hetero/ alone. For these, test_endings.py runs programs of a
few lines in place of the scripts, since importing PyTorch is nine tenths of a job's time here;
test_feed_hosts.py has the loader's part. The other endings have `torch=True`. This command runs all
of them with the example as it is:

    python tests/endings.py 5 [NAME...]

runs each ending five times, or those named, and prints a table of the worst times. The names of
those that were not as they should be are then in build/failed-endings.txt.
"""

import contextlib
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))

import boto3
import numpy as np
import psutil
from sagemaker.core.training.configs import InputData

from jobs import Jobs, texts_in
from mnist import idx

CODE = Path(__file__).parent.parent / "pt.grpc.sagemaker" / "code"
GROUPS = {"data_group": ("ml.c5.xlarge", 2), "dnn_group": ("ml.m5.xlarge", 2)}
BUCKET, IMAGES = "endings", 640
FAILED = Path(__file__).parent.parent / "build" / "failed-endings.txt"  # .ci/retry.py reads it
HYPERPARAMETERS = {"model": "small", "batch-size": 16, "processes-per-host": 1, "log-every": 1,
                   "augment": 1, "workers": 1, "epochs": 1000, "checkpoint-every": 5}  # fmt: skip
HOST = r"algo-\d \({}_group\)"
# Steps without a pause would take the cores from whatever is to happen meanwhile.
STEP = "            optimizer.zero_grad()\n"
LEISURELY = (STEP, f"            time.sleep(0.3)\n{STEP}")
# What an ending sees of the scripts: what they print, and how training reacts to SIGTERM.
SERVE = """
import time
print("serving at", flush=True)
time.sleep(1000)
"""
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
DATA, DNN, ANY = HOST.format("data"), HOST.format("dnn"), HOST.format("(data|dnn)")


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
        deadline = time.monotonic() + 60
        while len(found := first_of(self.processes(**where))) != 1:
            assert time.monotonic() < deadline, (where, found)
            time.sleep(0.2)
        return found[0]

    def environment(self) -> dict[str, str]:
        """The environment of one of its hosts, as soon as there is one."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            for process in self.processes():
                with contextlib.suppress(psutil.Error):  # it has ended meanwhile
                    return process.environ()
            time.sleep(0.1)
        raise AssertionError(f"{self.name} has no process")

    def host(self, group: str, number: int) -> str:
        """The name of a group's host, by its rank there, in the order of the hosts' numbers."""
        folder = Path(self.environment()["SAGEMAKER_BASE_DIR"], "input", "config")
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
    serve: str = SERVE,
    files: dict | None = None,
    **settings,
) -> Running:
    """Start a job of the runtime alone, and of programs in place of the scripts.

    options: of `python -m hetero`; files: more files, or others, such as a launcher.py, which is
    then started instead.
    """
    code = {**texts_in(CODE, "hetero"), "train.py": train, "feed/server.py": serve, **(files or {})}
    command = "launcher.py" if "launcher.py" in code else f"-m hetero {options} train.py"
    settings = {"groups": GROUPS, "environment": {"HETERO_TOKEN": "a secret"}, **settings}
    return Running(jobs, jobs.create(code, f"exec python {command}", **settings))


def after_steps(job: Running) -> None:
    """Wait until the training is well under way."""
    job.jobs.wait_for_log(job.name, "step=8 ")


@dataclass
class Ending:
    """One way that a job can end.

    seconds: from the event to the last host's exit, at most. With `slow` most of it is waiting, so
    that several can be waited for together. torch: whether it is up to the training script, too.
    """

    status: str
    reason: str  # a regular expression for the whole FailureReason without AWS's prefix and suffix
    seconds: float
    event: Callable[[Running], object]
    when: Callable[[Running], None] = after_steps
    settings: dict = field(default_factory=dict)
    logged: str = ""  # what the log must have
    slow: bool = False
    torch: bool = False


def steps(number: int) -> dict:
    """Settings of a job that ends by itself after so many steps."""
    return {"hyperparameters": {"max-steps": number}}


RAISE = (
    "            at.step += 1\n",
    "            at.step += 1\n            if (rank, at.step) == (1, 12):\n"
    "                raise ValueError('no number')\n",
)
# Not after so many steps: nobody knows how many a machine takes until a data server is back.
ENOUGH = (
    "            stopping = parallel.any_rank(",
    "            enough = Path(os.environ['SAGEMAKER_BASE_DIR'], 'enough')\n"
    "            if parallel.any_rank(enough.exists(), control):\n"
    "                last_step = at.step\n"
    "            stopping = parallel.any_rank(",
)
TWO_EACH = {"hyperparameters": {"processes-per-host": 2}}
TIMEOUT_SOONER = ("timedelta(minutes=15)", "timedelta(seconds=30)")
JOIN_SOONER = ("hetero.run(\n", "hetero.run(\n    join_seconds=20,\n")
SILENT_SOONER = ("hetero.run(\n", "hetero.run(\n    data_seconds=20,\n")
RUNTIME = 60  # seconds; a slow machine needs half of it until training is under way
AWS_KILLS = 120  # seconds after SIGTERM

ENDINGS = {
    "training succeeds": Ending(
        "Completed", "", 15, lambda job: job.jobs.wait_for_log(job.name, "training finished"),
        settings=steps(12), logged="all hosts have signed off",
    ),
    "training script raises": Ending(
        "Failed", rf"On {DNN}, train_dnn.py exited with status 1: ValueError: no number\.", 15,
        lambda job: job.jobs.wait_for_log(job.name, "ValueError"),
        settings={"changes": {"train_dnn.py": RAISE}}, torch=True,
    ),
    "a rank is killed": Ending(
        "Failed", rf"On {DNN}, rank 3 of train_dnn.py was killed by signal 9\.", 15,
        lambda job: job.rank(3).kill(), settings=TWO_EACH,
    ),
    "a rank hangs": Ending(
        "Failed", rf"On {DNN}, train_dnn.py exited with status 1: RuntimeError: .*"
        rf" Still running: rank 1 on {DNN}\.", 60,
        lambda job: job.rank(1).suspend(), slow=True, torch=True,
        settings={"changes": {"parallel.py": TIMEOUT_SOONER}},
    ),
    "a data server crashes once": Ending(
        "Completed", "", 15, lambda job: (
            job.kill_data_servers([0], times=1),
            job.finish_training(after="serving at", times=3),  # two hosts, one twice
        ),
        settings={"max_runtime_seconds": 600, "changes": {"train_dnn.py": ENOUGH}},
        logged="feed.server was killed by signal 9; restart in 1 s", torch=True,
    ),
    "a data server crashes again and again": Ending(
        "Completed", "", 15, lambda job: (
            job.kill_data_servers([0], times=4),
            job.finish_training(after="4 times. It is left alone."),
        ),
        settings={"max_runtime_seconds": 600, "changes": {"train_dnn.py": ENOUGH}},
    ),
    "all data servers crash again and again": Ending(
        "Failed",
        rf"On {DATA}, feed.server was killed by signal 9, 4 times\. "
        r"No data host is left\.",
        15, lambda job: job.kill_data_servers([0, 1], times=4),
    ),
    "launcher killed on a data host": Ending(
        "Failed", rf"The launcher on {DATA} is gone: connection closed\.", 15,
        lambda job: job.launcher("data_group", 1).kill(),
    ),
    "launcher killed on a dnn host": Ending(
        "Failed", rf"The launcher on {DNN} is gone: connection closed\.", 15,
        lambda job: job.launcher("dnn_group", 1).kill(),
    ),
    "launcher killed on the leader": Ending(
        "Failed", rf"{ANY} lost the leader, {DNN}: connection closed\.", 15,
        lambda job: job.launcher("dnn_group", 0).kill(),
    ),
    "the leader's host falls silent": Ending(
        "Failed", rf"{ANY} lost the leader, {DNN}: silent for 60 s\.",
        75 + AWS_KILLS, lambda job: job.freeze("dnn_group", 0), slow=True,
        settings={"max_runtime_seconds": 600},
    ),
    "a training host falls silent": Ending(
        "Failed", rf"The launcher on {DNN} is gone: silent for 60 s\.",
        75 + AWS_KILLS, lambda job: job.freeze("dnn_group", 1), slow=True,
        settings={"max_runtime_seconds": 600},
    ),
    "a data host falls silent for a while": Ending(
        "Completed", "", 15, lambda job: (
            job.freeze_for("data_group", 0, seconds=70),  # longer than a training host may
            job.finish_training(after="serving at", times=2),
        ),
        settings={"max_runtime_seconds": 600, "changes": {"train_dnn.py": ENOUGH}},
    ),
    "a data host falls silent for good": Ending(
        "Failed", rf"The launcher on {DATA} is gone: silent for 20 s\.",
        35 + AWS_KILLS, lambda job: job.freeze("data_group", 0), slow=True,
        settings={"changes": {"launcher.py": SILENT_SOONER}, "max_runtime_seconds": 600},
    ),
    "a host hangs when the training ends": Ending(
        "Failed", rf"{DATA} did not end when the training had ended\.", 100 + AWS_KILLS,
        lambda job: (
            job.freeze("data_group", 0),
            job.finish_training(after="step=8 "),
        ),
        settings={"max_runtime_seconds": 600, "changes": {"train_dnn.py": ENOUGH}}, slow=True,
    ),
    "StopTrainingJob": Ending(
        "Stopped", "", 15, Running.stop, logged="stopped by SIGTERM after step",
    ),
    "MaxRuntimeInSeconds": Ending(
        "Stopped", "", 15, lambda job: time.sleep(job.started_at() + RUNTIME - time.time()),
        settings={"max_runtime_seconds": RUNTIME},
        logged="stopped by SIGTERM after step",
    ),
    "a host starts 60 s later": Ending(
        "Completed", "", 240, lambda job: None, when=lambda job: None,
        settings={"late": 60, "max_runtime_seconds": 600, **steps(12)}, slow=True,
    ),
    "a host never comes": Ending(
        "Failed", rf"{DATA} did not come up within 20 s\.", 50 + AWS_KILLS,
        lambda job: None, when=lambda job: None, slow=True,
        settings={"late": 3600, "changes": {"launcher.py": JOIN_SOONER}},
    ),
}  # fmt: skip


@dataclass
class Begun:
    """An ending whose event has happened."""

    name: str
    job: Running
    event_at: float  # seconds since 1970
    port: int  # the job's first
    folder: Path  # where its hosts' files are

    @classmethod
    def of(cls, name: str, job: Running, environment: dict[str, str]) -> "Begun":
        """An event that has happened right now; environment: of one of the job's hosts."""
        port = json.loads(environment["LOCAL_SAGEMAKER"])["base_port"]
        folder = Path(environment["SAGEMAKER_BASE_DIR"]).parents[2]
        return cls(name, job, time.time(), port, folder)


def begin(jobs: Jobs, name: str, torch: bool) -> Begun:
    """Start the job, with PyTorch or with the STAND_INS, and bring the event about."""
    ending = ENDINGS[name]
    job = start(jobs, torch=torch, **ending.settings)
    ending.when(job)
    environment = job.environment()
    ending.event(job)
    return Begun.of(name, job, environment)


def finish(begun: Begun) -> float:
    """Wait for the job's end, check what the ending says; return the seconds that it took."""
    ending, name = ENDINGS[begun.name], begun.job.name
    answer = begun.job.jobs.wait(name, seconds=ending.seconds + 60)
    reason = answer.get("FailureReason") or ""
    assert answer["TrainingJobStatus"] == ending.status, reason
    if ending.status == "Failed":
        assert re.fullmatch(rf"AlgorithmError: {ending.reason}, exit code: \d+", reason), reason
    log = begun.job.log()
    if ending.logged:
        assert any(ending.logged in line for line in log), ending.logged
    if ending.status == "Completed":
        # Before, a killed data server's own processes may have had time to complain.
        end = next(i for i, line in enumerate(log) if "training finished" in line)
        assert not any("Traceback" in line for line in log[end:]), log[end:]
    seconds = seconds_to_end(answer, since=begun.event_at)
    assert seconds < ending.seconds, f"{seconds:.1f} s instead of {ending.seconds} s"
    assert_nothing_left(begun)
    return seconds


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


def left_behind(begun: Begun) -> list:
    """What is there of a job that has ended: processes, files of theirs, ports in use."""
    ports = range(begun.port, begun.port + 50)
    listening = [
        connection.laddr
        for connection in psutil.net_connections("tcp")
        if connection.laddr.port in ports
        and connection.status == psutil.CONN_LISTEN
        # A job that has begun meanwhile may have got the same ports.
        and not is_of_a_job(connection.pid)
    ]
    return [*begun.job.processes(), *filter(Path.exists, [begun.folder]), *listening]


def assert_nothing_left(begun: Begun) -> None:
    """Wait until nothing is there of a job that has ended, which takes SageMaker a moment."""
    deadline = time.monotonic() + 5
    while left := left_behind(begun):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def main() -> None:
    """Run all endings, or those named, some times; print the worst time of each."""
    from shared import local_sagemaker

    names = sys.argv[2:] or list(ENDINGS)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    broken: dict[str, AssertionError] = {}

    @contextlib.contextmanager
    def noting(name: str) -> Iterator[None]:
        try:
            yield
        except AssertionError as error:
            broken[name] = error

    with tempfile.TemporaryDirectory() as folder, local_sagemaker.start() as local:
        upload_images()
        jobs = Jobs(local.role, Path(folder))
        for _ in range(int(sys.argv[1])):
            waiting = []
            for name in names:
                if ENDINGS[name].slow:
                    with noting(name):
                        waiting.append(begin(jobs, name, torch=True))
            for name in names:
                if not ENDINGS[name].slow:
                    with noting(name):
                        seconds[name].append(finish(begin(jobs, name, torch=True)))
            for begun in waiting:
                with noting(begun.name):
                    seconds[begun.name].append(finish(begun))
    for name, measured in seconds.items():
        print(f"| {name} | {max(measured, default=float('nan')):.1f} s |")
    FAILED.parent.mkdir(exist_ok=True)
    FAILED.write_text("".join(f"{name}\n" for name in broken))
    if broken:
        sys.exit("\n".join(f"{name}: {error}" for name, error in broken.items()))


if __name__ == "__main__":
    main()
