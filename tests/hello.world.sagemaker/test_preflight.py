"""hello world's preflight.py: what it finds on healthy hosts and on hosts with faults."""

import re
from dataclasses import dataclass, field
from pathlib import Path

import boto3
import pytest
import torch

from helpers.jobs import READ_CONFIG, Jobs
from shared import monitoring

pytestmark = pytest.mark.usefixtures("nothing_is_left")
PREFLIGHT = Path(__file__).parents[2] / "hello.world.sagemaker" / "code" / "preflight.py"
GROUPS = {"data_group": ("ml.c6i.8xlarge", 1), "dnn_group": ("ml.g5.xlarge", 1)}
DATA, DNN = (rf"On algo-\d \({group}\): " for group in GROUPS)


@dataclass
class Preflight:
    """A job of preflight.py, what is changed in it, and what it must find.

    Jobs that only test connections find no `frameworks`, and so save the seconds to import them.
    """

    reason: str = ""  # a regular expression for a part of the FailureReason; "" if it completes
    lines: list[str] | None = None  # regular expressions for all failures below the table
    rows: dict[str, list[str]] = field(default_factory=dict)  # some of the table's
    constants: dict[str, object] = field(default_factory=dict)
    changes: list[tuple[str, str, str]] = field(default_factory=list)  # (group, old, new)
    frameworks: tuple[str, ...] = ()
    before: str = ""  # lines of Python that hosts run first
    groups: dict | None = field(default_factory=lambda: GROUPS)
    token: str = "secret"
    command: str = "exec python preflight.py"
    seconds: float | None = None  # the longest time until the first failure, or the end

    def start(self, jobs: Jobs) -> str:
        """Start the job, and return its name."""
        text = PREFLIGHT.read_text()
        for name in {"torch", "tensorflow"} - {*self.frameworks}:
            find = f'importlib.util.find_spec("{name}")'
            assert find in text
            text = text.replace(find, "None")
        for name, value in self.constants.items():
            line = rf"^([A-Z_, ]*\b{name}\b[A-Z_, ]* = .*)$"
            text, count = re.subn(line, rf"\1\n{name} = {value}", text, flags=re.M)
            assert count == 1, name
        before = f"{READ_CONFIG}{self.before}\npath = pathlib.Path('preflight.py')\n"
        for group, old, new in self.changes:
            assert text.count(old) == 1, old
            before += f"if group == {group!r}:\n"
            before += f"    path.write_text(path.read_text().replace({old!r}, {new!r}))\n"
        files = {"preflight.py": text, "before.py": before}
        environment = {"HETERO_TOKEN": self.token} if self.token else {}
        command = f"python before.py; {self.command}"
        return jobs.create(files, command, self.groups, environment=environment)


@dataclass
class Found:
    """What the leader of a preflight that has ended printed. (Others print less.)"""

    job: dict

    def lines(self) -> list[str]:
        """Return the lines from the first one of preflight.py, the table, and what is below."""
        lines = monitoring.logs(self.job["TrainingJobName"])
        table = [line for line in lines if re.match(r"ports reached  ", line.text)]
        texts = [line.text for line in lines if line.host == table[0].host]
        return texts[next(i for i, text in enumerate(texts) if text.startswith("host=")) :]

    def failures(self) -> list[str]:
        """Return the failures below the table, unwrapped."""
        text = "\n".join(self.lines()).split("\npreflight: ")[0]
        found = re.findall(r"^FAILED  (.*(?:\n {8}.*)*)", text, re.MULTILINE)
        return [re.sub(r"\s+", " ", sentence) for sentence in found]

    def row(self, label: str) -> list[str]:
        """Return the cells of one row of the table."""
        line = next(line for line in self.lines() if line.startswith(f"{label}  "))
        return re.split(r"\s{2,}", line)[1:]


def test_healthy_hosts(jobs: Jobs):
    groups = {"data_group": ("ml.c6i.8xlarge", 1), "dnn_group": ("ml.g5.xlarge", 2)}
    # A line that is printed last, as torchrun prints some.
    warn = "import torch; import atexit; atexit.register(print, 'a warning')\n"
    changes = [(group, "import torch\n\n", warn) for group in groups]
    job = jobs.wait(Preflight(groups=groups, changes=changes, frameworks=("torch",)).start(jobs))
    assert job["TrainingJobStatus"] == "Completed", job["FailureReason"]
    row, said = Found(job).row, Found(job).lines()
    assert row("instance type") == ["ml.c6i.8xlarge", "ml.g5.xlarge", "ml.g5.xlarge"]
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    assert row("sees") == [f"0 GPUs, {cuda}"] * 3
    assert all(cell.startswith("PyTorch 2.") for cell in row("framework"))
    assert row("ports reached") == ["8 of 8"] * 3
    speeds = row(f"data from {row('host')[0]}")
    assert speeds[0] == "-" and all(re.fullmatch(r"\d+\.\d\d GB/s", cell) for cell in speeds[1:])
    sums = row("all-reduce")
    assert sums[0] == "-" and all(re.match(r"gloo, 2 ranks, \d", cell) for cell in sums[1:])
    assert said[-2] == "All checks passed."
    assert sum("ends" in line for line in jobs.log(job["TrainingJobName"])) == 3  # log.py waits
    assert max(map(len, said)) <= 105


# Faults of the host itself. Its driver is too old for the CUDA of the data host's PyTorch, and the
# other's PyTorch has no CUDA; for lack of its network interface, the all-reduce fails, too.
FAULTS = """
import subprocess, sys
smi = pathlib.Path("nvidia-smi")
smi.write_text('''#!/bin/sh
[ "$1" = --list-gpus ] && echo "GPU 0: NVIDIA A10G (UUID: GPU-1)" || echo "NVIDIA A10G, 470.1.2"
''')
smi.chmod(0o755)
local = json.loads(os.environ["LOCAL_SAGEMAKER"])
address = local["addresses"][config["current_host"]], local["base_port"] + 2
taken = f"import socket, time; s = socket.create_server({address}); print(1); time.sleep(100)"
if group == "data_group":
    child = subprocess.Popen([sys.executable, "-u", "-c", taken], stdout=subprocess.PIPE)
    child.stdout.readline()
"""
STRANGERS = """
import subprocess, sys
local = json.loads(os.environ["LOCAL_SAGEMAKER"])
groups = {g["instance_group_name"]: g["hosts"] for g in config["instance_groups"]}
address = local["addresses"][groups["dnn_group"][0]], local["base_port"]
strangers = f'''
import json, socket, time
forged = json.dumps(dict(ask="join", host="algo-1", proof="0" * 64)).encode() + b"\\\\n"
sockets = []
while len(sockets) < 500:
    for text in (b"x", b"GET / HTTP/1.0\\\\r\\\\n", b"[" * 900 + b"\\\\n", forged):
        try:
            sockets.append(socket.create_connection({address}, 1))
            sockets[-1].sendall(text)
        except OSError:
            pass
    time.sleep(0.02)
print("there", flush=True)
time.sleep(100)
'''
if group == "data_group":
    child = subprocess.Popen([sys.executable, "-c", strangers], stdout=subprocess.PIPE)
    child.stdout.readline()
"""
ALONE = {"groups": None, "token": "", "frameworks": ("torch", "tensorflow")}
ADDRESS, EXCHANGE = "return self.addresses.get(host, host)", 'if ask == "exchange":'
# The data host reaches the leader, but not vice versa, as with one-sided network rules.
ELSEWHERE = 'return "127.255.255.1" if host != self.here else self.addresses[host]'
REFUSED = r", Connection refused: the job's security group must allow all traffic from itself\.$"
UNREACHED = rf"{DNN}port \d+ of algo-\d \(data_group\) cannot be reached{REFUSED}"
ABSENT = r"algo-\d \(data_group\) did not report, or has ended: see its log; the job's security g"
# A host is lost when it should send data. One that hangs is killed, as SageMaker would do later.
DIES, HANGS = ([("data_group", EXCHANGE, f'if ask == "bytes": {end}\n            {EXCHANGE}')]
    for end in ("os._exit(3)", 'subprocess.Popen(["/bin/sh", "-c", f"sleep 20; kill -KILL '
                '{os.getpid()}"], start_new_session=True), os.kill(os.getpid(), signal.SIGSTOP)')
)  # fmt: skip
BOTH = {"instance type": ["ml.c6i.8xlarge", "ml.g5.xlarge"], "ports reached": ["4 of 4"] * 2}
SOON = {"CHECK_SECONDS": 4, "REACH_SECONDS": 1, "ANSWER_SECONDS": 2}
THOROUGH = {
    "one host without instance groups": Preflight(
        lines=[], rows={"all-reduce": ["gloo, alone: works"]}, **ALONE
    ),
    "a host that does not come": Preflight(
        "did not report", [ABSENT], {"instance type": ["-", "ml.g5.xlarge"]}, {"JOIN_SECONDS": 2},
        before="import time\nif group == 'data_group': time.sleep(6)",
    ),
    "a host that dies": Preflight("did not report", [ABSENT], BOTH, SOON, DIES, seconds=16),
    "a host that hangs": Preflight(
        "did not report", [ABSENT, f"{DNN}no data comes from "], BOTH, SOON, HANGS, seconds=16
    ),
    # As with an image for CPUs; without the map of addresses, as on AWS.
    "a GPU instance without GPU": Preflight(
        DNN + "ml.g5.xlarge has GPUs, but nvidia-smi lists none: use an image for GPUs.", None,
        {"all-reduce": ["not checked: no PyTorch"]}, frameworks=("tensorflow",),
        groups={"dnn_group": ("ml.g5.xlarge", 1)},
        command="unset LOCAL_SAGEMAKER; exec python preflight.py",
    ),
}  # fmt: skip
OFTEN = {
    "a framework that prints a line and does not load": Preflight(
        r"the framework does not load \(.*TypeError: .*\): use another image\.", [""],
        **ALONE,
        before="pathlib.Path('torch.py').write_text(\"print('{}')[0]\")",
    ),
    "hosts with faults": Preflight(
        rf"AlgorithmError: {DATA}1 GPU\(s\), driver 470",
        [
            DATA + r"1 GPU\(s\), driver 470\.1\.2, but PyTorch 2\.\S+ \(CUDA 13\.0\) sees 0: "
            r"put env LD_LIBRARY_PATH=/proc:\$LD_LIBRARY_PATH before python in the job's command, "
            r"or use an image with an older CUDA, which this driver supports\.",
            DATA + r"/dev/shm has \d+ MiB, and the examples need 1073741824: start fewer worker",
            DATA + r"another program listens on port \d+2: use an image that does not start it, or",
            DNN + r"1 GPU\(s\), driver 470\.1\.2, but PyTorch 2\.\S+ \(no CUDA\) sees 0: use an "
            r"image for GPUs\.",
            DNN + r"/dev/shm has",
            DNN + r"no network interface is named eth7, only lo.*: have the launcher set GLOO_",
            DNN + r"the all-reduce \(gloo\) failed, .*eth7.*: use another image\.",
        ],  # no host tries the port that is taken
        {"GPUs": ["1 x NVIDIA A10G"] * 2, "driver": ["470.1.2"] * 2, "all-reduce": ["-", "FAILED"]},
        {"SHM_MIB": 1 << 30, "COMPATIBILITY": "Path('/proc')"},
        [("data_group", "torch.version.cuda", "'13.0'"),
         ("dnn_group", "torch.version.cuda", "None"),
         ("dnn_group", 'config["network_interface_name"]', '"eth7"')],
        ("torch",), FAULTS, command="PATH=$PWD:$PATH exec python preflight.py",
    ),
    "a host that another does not reach": Preflight(
        UNREACHED[:-1], [*[UNREACHED] * 4, rf"{DNN}no data comes from .*{REFUSED}"],
        {"ports reached": ["4 of 4", "0 of 4"], "all-reduce": ["-", "not checked: no PyTorch"]},
        {"REACH_SECONDS": 2}, [("dnn_group", ADDRESS, ELSEWHERE)],
    ),
    # SageMaker tells the leader that a host has ended, so it stops waiting.
    "a name that does not resolve": Preflight(
        DATA + r"algo-\d \(dnn_group\) cannot be reached, its name does not resolve within 2 s: "
        r"enable DNS resolution and hostnames in the VPC\.", [ABSENT], {}, {"RESOLVE_SECONDS": 2},
        [("data_group", ADDRESS, 'return "nowhere.invalid"')], seconds=30,
    ),
    # Before the data host connects, more strangers do than the leader serves at a time.
    "strangers at a port": Preflight(lines=[], before=STRANGERS, seconds=40),
    "several hosts without a token": Preflight("set HETERO_TOKEN in the job's env", token=""),
    "groups of other names": Preflight(
        r"only \['a', 'b'\]: set TRAINING_GROUP\.",
        groups={"a": ("ml.c6i.8xlarge", 1), "b": ("ml.g5.xlarge", 1)},
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [*OFTEN, *(pytest.param(name, marks=pytest.mark.thorough) for name in THOROUGH)]
)
def test_what_it_finds(jobs: Jobs, name: str):
    preflight = {**OFTEN, **THOROUGH}[name]
    job = jobs.wait(preflight.start(jobs))
    found = Found(job)
    reason = job.get("FailureReason") or ""
    assert (job["TrainingJobStatus"] == "Failed") == bool(preflight.reason), reason
    assert re.search(preflight.reason, reason), reason
    log = monitoring.logs(job["TrainingJobName"])
    if preflight.seconds:
        shown = [line.time for line in log if "FAILED" in line.text]
        end = [*shown, job["TrainingEndTime"]][0]
        assert (end - job["TrainingStartTime"]).total_seconds() < preflight.seconds
    if preflight.lines is not None:
        for pattern, failure in zip(preflight.lines, found.failures(), strict=True):
            assert re.match(pattern, failure), failure
    for label, cells in preflight.rows.items():
        assert found.row(label) == cells
    strangers = "connected, but is not a host of this job"
    assert sum(strangers in line.text for line in log) == (name == "strangers at a port")


def test_a_job_that_is_stopped_ends_soon(jobs: Jobs):
    """Even while the leader waits for a host that does nothing, which may take ten minutes."""
    old = "team = Team(cluster)"
    idle = [("data_group", old, f"time.sleep(100)\n    {old}")]
    name = Preflight(constants={"STOP_SECONDS": 2}, changes=idle).start(jobs)
    jobs.wait_for_log(name, "host=algo-", times=2)
    boto3.client("sagemaker").stop_training_job(TrainingJobName=name)
    job = jobs.wait(name)
    assert job["TrainingJobStatus"] == "Stopped"
    assert job["TrainingTimeInSeconds"] < 30
    assert Found(job).row("vCPUs usable")[0] == "-"
