"""hello world's preflight.py: what it finds on healthy hosts and on hosts with faults."""

import re
from pathlib import Path

import boto3
import pytest
import torch

from helpers.jobs import READ_CONFIG, Jobs
from shared import monitoring

pytestmark = pytest.mark.usefixtures("nothing_is_left")
CODE = Path(__file__).parents[2] / "hello.world.sagemaker" / "code"
PREFLIGHT = (CODE / "preflight.py").read_text()
GROUPS = {"data_group": ("ml.c6i.8xlarge", 1), "dnn_group": ("ml.g5.xlarge", 1)}
SECURITY_GROUP = "the job's security group must allow all traffic from itself."


def changed(text: str = PREFLIGHT, **values: object) -> str:
    """Return preflight.py with other values of its constants."""
    for name, value in values.items():
        text, count = re.subn(
            rf"^([A-Z_, ]*\b{name}\b[A-Z_, ]* = .*)$",
            rf"\1\n{name} = {value!r}".replace("PosixPath", "Path"),
            text,
            flags=re.M,
        )
        assert count == 1, name
    return text


def without(text: str, *frameworks: str) -> str:
    """Return preflight.py as it runs in an image without these frameworks."""
    for name in frameworks:
        find = f'importlib.util.find_spec("{name}")'
        assert find in text
        text = text.replace(find, "None")
    return text


def start(
    jobs: Jobs, text: str = PREFLIGHT, groups: dict | None = GROUPS, before: str = "", **settings
) -> str:
    """Start a preflight on hosts that run the Python lines `before` first; return its name."""
    files = {"preflight.py": text, "before.py": f"{READ_CONFIG}\n{before}"}
    settings.setdefault("environment", {"HETERO_TOKEN": "secret"})
    command = "python before.py; exec python preflight.py"
    return jobs.create(files, settings.pop("command", command), groups, **settings)


def replace(old: str, new: str, group: str) -> str:
    """Return lines for `before` that change `old` to `new` in preflight.py on hosts of `group`."""
    assert PREFLIGHT.count(old) == 1, old
    return (
        f"path = pathlib.Path('preflight.py')\nif group == {group!r}:\n"
        f"    path.write_text(path.read_text().replace({old!r}, {new!r}))\n"
    )


def said(job: dict) -> list[str]:
    """Return what the leader printed: the table and the failures. (Others print less.)"""
    lines = monitoring.logs(job["TrainingJobName"])
    table = [line for line in lines if re.match(r"ports reached  ", line.text)]
    texts = [line.text for line in lines if line.host == table[0].host]
    return texts[next(i for i, text in enumerate(texts) if text.startswith("host=")) :]


def failures(job: dict) -> list[str]:
    """Return the failures below the table, unwrapped."""
    text = "\n".join(said(job)).split("\npreflight: ")[0]
    found = re.findall(r"^FAILED  (.*(?:\n {8}.*)*)", text, re.MULTILINE)
    return [re.sub(r"\s+", " ", sentence) for sentence in found]


def row(job: dict, label: str) -> list[str]:
    """Return the cells of one row of the table."""
    line = next(line for line in said(job) if line.startswith(f"{label}  "))
    return re.split(r"\s{2,}", line)[1:]


def test_healthy_hosts(jobs: Jobs):
    groups = {"data_group": ("ml.c6i.8xlarge", 1), "dnn_group": ("ml.g5.xlarge", 2)}
    warn = "import atexit; atexit.register(print, 'a warning, as from torchrun')"
    text = PREFLIGHT.replace("import torch\n", f"import torch; {warn}\n")  # printed last
    job = jobs.wait(start(jobs, text, groups))
    assert job["TrainingJobStatus"] == "Completed", job["FailureReason"]
    assert row(job, "instance type") == ["ml.c6i.8xlarge", "ml.g5.xlarge", "ml.g5.xlarge"]
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    assert row(job, "sees") == [f"0 GPUs, {cuda}"] * 3
    assert all(cell.startswith("PyTorch 2.") for cell in row(job, "framework"))
    assert row(job, "ports reached") == ["8 of 8"] * 3
    data_host = row(job, "host")[0]
    speeds = row(job, f"data from {data_host}")
    assert speeds[0] == "-" and all(re.fullmatch(r"\d+\.\d\d GB/s", cell) for cell in speeds[1:])
    sums = row(job, "all-reduce")
    assert sums[0] == "-" and all(re.match(r"gloo, 2 ranks, \d", cell) for cell in sums[1:])
    assert said(job)[-2] == "All checks passed."
    assert sum("ends" in line for line in jobs.log(job["TrainingJobName"])) == 3  # log.py waits
    assert max(map(len, said(job))) <= 105


@pytest.mark.thorough
def test_one_host_without_instance_groups(jobs: Jobs):
    job = jobs.wait(start(jobs, groups=None, environment={}))
    assert job["TrainingJobStatus"] == "Completed", job["FailureReason"]
    assert row(job, "all-reduce") == ["gloo, alone: works"]


@pytest.mark.parametrize("text", ["raise ImportError('no libcudart.so.13')", "print('{}')[0]"])
def test_a_framework_that_does_not_load(jobs: Jobs, text: str):
    broken = f'pathlib.Path("torch.py").write_text({text!r})'
    job = jobs.wait(start(jobs, groups=None, environment={}, before=broken))
    assert job["TrainingJobStatus"] == "Failed"
    [sentence] = failures(job)
    assert re.search(r"the framework does not load \(.*Error: .*\): use another image\.", sentence)


NVIDIA_SMI = """
#!/bin/sh
[ "$1" = --list-gpus ] && echo "GPU 0: NVIDIA A10G (UUID: GPU-1)" || echo "NVIDIA A10G, 470.1.2"
"""
TAKE_PORT = """
import subprocess, sys
local = json.loads(os.environ["LOCAL_SAGEMAKER"])
address = local["addresses"][config["current_host"]], local["base_port"] + 2
taken = f"import socket, time; s = socket.create_server({address}); print(1); time.sleep(100)"
if group == "data_group":
    child = subprocess.Popen([sys.executable, "-u", "-c", taken], stdout=subprocess.PIPE)
    child.stdout.readline()
"""


def test_what_is_wrong_with_a_host_itself(jobs: Jobs):
    """Several faults at once; the all-reduce fails for lack of its network interface, too.

    The driver is too old for the CUDA of the data host's PyTorch; the other's PyTorch has no CUDA.
    """
    wrong_interface = replace('config["network_interface_name"]', '"eth7"', "dnn_group")
    smi = f"""
pathlib.Path("nvidia-smi").write_text({NVIDIA_SMI.lstrip()!r})
os.chmod("nvidia-smi", 0o755)
"""
    cuda = replace("torch.version.cuda", "'13.0'", "data_group")
    cuda += replace("torch.version.cuda", "None", "dnn_group")
    command = "python before.py; PATH=$PWD:$PATH exec python preflight.py"
    text = changed(SHM_MIB=1 << 30, COMPATIBILITY=Path("/proc"))
    name = start(jobs, text, before=smi + cuda + wrong_interface + TAKE_PORT, command=command)
    job = jobs.wait(name)
    assert job["TrainingJobStatus"] == "Failed"
    found = "\n".join(failures(job))
    data, dnn = (rf"On algo-\d \({group}\): " for group in GROUPS)
    for sentence in (
        data + r"1 GPU\(s\), driver 470\.1\.2, but PyTorch 2\.\S+ \(CUDA 13\.0\) sees 0: put env "
        r"LD_LIBRARY_PATH=/proc:\$LD_LIBRARY_PATH before python in the job's command, or use an "
        r"image with an older CUDA, which this driver supports\.",
        data + r"/dev/shm has \d+ MiB, and the examples need 1073741824: start fewer worker",
        data + r"another program listens on port \d+2: use an image that does not start it, or",
        dnn + r"1 GPU\(s\), driver 470\.1\.2, but PyTorch 2\.\S+ \(no CUDA\) sees 0: use an image "
        r"for GPUs\.",
        dnn + r"/dev/shm has",
        dnn + r"no network interface is named eth7, only lo.*: have the launcher set GLOO_SOCKET_",
        dnn + r"the all-reduce \(gloo\) failed, .*eth7.*: use another image\.",
    ):
        assert re.search(sentence, found), (sentence, found)
    assert row(job, "GPUs") == ["1 x NVIDIA A10G"] * 2
    assert row(job, "driver") == ["470.1.2"] * 2
    assert row(job, "all-reduce") == ["-", "FAILED"]
    first = failures(job)[0]
    assert job["FailureReason"].startswith(f"AlgorithmError: {first}")
    assert len(failures(job)) == 7  # no host tries the port that is taken


# The jobs below test connections, and save the seconds that importing PyTorch takes.
FAST = without(PREFLIGHT, "torch", "tensorflow")
ADDRESS = "return self.addresses.get(host, host)"


def test_a_host_that_another_does_not_reach(jobs: Jobs):
    """The data host reaches the leader, but not vice versa, as with one-sided network rules."""
    elsewhere = 'return "127.255.255.1" if host != self.here else self.addresses[host]'
    text = changed(FAST, REACH_SECONDS=2)
    job = jobs.wait(start(jobs, text, before=replace(ADDRESS, elsewhere, "dnn_group")))
    found = failures(job)
    assert len(found) == 4 + 1  # its ports, and its data
    for sentence in found:
        assert re.match(r"On algo-\d \(dnn_group\): ", sentence)
        assert sentence.endswith(f", Connection refused: {SECURITY_GROUP}")
    assert re.search(r"port \d+ of algo-\d \(data_group\) cannot be reached", found[0])
    assert "no data comes from" in found[-1]
    assert row(job, "ports reached") == ["4 of 4", "0 of 4"]
    assert row(job, "all-reduce") == ["-", "not checked: no PyTorch"]


def test_a_name_that_does_not_resolve(jobs: Jobs):
    before = replace(ADDRESS, 'return "nowhere.invalid"', "data_group")
    job = jobs.wait(start(jobs, changed(FAST, RESOLVE_SECONDS=2), before=before))
    assert re.search(
        r"On algo-\d \(data_group\): algo-\d \(dnn_group\) cannot be reached, its name does not "
        r"resolve within 2 s: enable DNS resolution and hostnames in the VPC\.",
        job["FailureReason"],
    )
    # SageMaker tells the leader that a host has ended, so it stops waiting.
    assert re.match(r"algo-\d \(data_group\) did not report, or has ended", failures(job)[0])
    assert job["TrainingTimeInSeconds"] < 30


@pytest.mark.thorough
def test_a_host_that_does_not_come(jobs: Jobs):
    before = "import time\nif group == 'data_group': time.sleep(6)"
    job = jobs.wait(start(jobs, changed(FAST, JOIN_SECONDS=2), before=before))
    assert re.search(r"algo-\d \(data_group\) did not report", job["FailureReason"])
    assert failures(job)[0].endswith(f"see its log; {SECURITY_GROUP}")
    assert row(job, "vCPUs usable")[0] == "-"  # the data host's


DIES = "os._exit(3)"
HANGS = (  # until it is killed, as SageMaker would do after two minutes
    'subprocess.Popen(["/bin/sh", "-c", f"sleep 20; kill -KILL {os.getpid()}"], '
    "start_new_session=True), os.kill(os.getpid(), signal.SIGSTOP)"
)


@pytest.mark.parametrize("ends", [DIES, HANGS], ids=["dies", "hangs"])
@pytest.mark.thorough
def test_a_host_that_is_lost_on_the_way(ends: str, jobs: Jobs):
    """It is lost when it should send data. The leader soon shows what it has found so far."""
    old = 'if ask == "exchange":'
    new = f'if ask == "bytes": {ends}\n            {old}'
    text = changed(FAST, CHECK_SECONDS=4, REACH_SECONDS=1, ANSWER_SECONDS=2)
    job = jobs.wait(start(jobs, text, before=replace(old, new, "data_group")))
    shown = [line.time for line in monitoring.logs(job["TrainingJobName"]) if "FAILED" in line.text]
    assert (shown[0] - job["TrainingStartTime"]).total_seconds() < 16
    assert "-" not in row(job, "vCPUs usable") + row(job, "ports reached")
    assert re.match(r"algo-\d \(data_group\) did not report, or has ended", failures(job)[0])


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


def test_strangers_at_a_port(jobs: Jobs):
    """Before the data host connects, more strangers do than the leader serves at a time."""
    job = jobs.wait(start(jobs, FAST, before=STRANGERS))
    assert job["TrainingJobStatus"] == "Completed", job["FailureReason"]
    assert job["TrainingTimeInSeconds"] < 40  # each is cut off after five seconds
    assert sum("connected, but is not a host of this job" in line for line in said(job)) == 1


def test_a_job_that_is_stopped_ends_soon(jobs: Jobs):
    """Even while the leader waits for a host that does nothing, which may take ten minutes."""
    old = "team = Team(cluster)"
    before = replace(old, f"time.sleep(100)\n    {old}", "data_group")
    name = start(jobs, changed(FAST, STOP_SECONDS=2), before=before)
    jobs.wait_for_log(name, "host=algo-", times=2)
    boto3.client("sagemaker").stop_training_job(TrainingJobName=name)
    job = jobs.wait(name)
    assert job["TrainingJobStatus"] == "Stopped"
    assert job["TrainingTimeInSeconds"] < 30
    assert row(job, "vCPUs usable")[0] == "-"


@pytest.mark.thorough
def test_a_gpu_instance_without_gpu_on_aws(jobs: Jobs):
    """As with an image for CPUs. Without PyTorch, the preflight checks TensorFlow."""
    # Without the map of addresses, as on AWS; a single host does not need it.
    command = "unset LOCAL_SAGEMAKER; exec python preflight.py"
    groups = {"dnn_group": ("ml.g5.xlarge", 1)}
    job = jobs.wait(start(jobs, without(PREFLIGHT, "torch"), groups, command=command))
    reason = r"ml\.g5\.xlarge has GPUs, but nvidia-smi lists none: use an image for GPUs\."
    assert re.search(reason, job["FailureReason"])
    assert row(job, "framework")[0].startswith("TensorFlow 2.")
    assert row(job, "all-reduce") == ["not checked: no PyTorch"]


def test_several_hosts_need_a_token(jobs: Jobs):
    job = jobs.wait(start(jobs, FAST, environment={}))
    assert "set HETERO_TOKEN in the job's environment" in job["FailureReason"]


def test_groups_of_other_names_need_to_say_which_of_them_trains(jobs: Jobs):
    groups = {"a": ("ml.c6i.8xlarge", 1), "b": ("ml.g5.xlarge", 1)}
    job = jobs.wait(start(jobs, FAST, groups))
    assert "only ['a', 'b']: set TRAINING_GROUP." in job["FailureReason"]
