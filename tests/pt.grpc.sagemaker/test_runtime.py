"""`python -m hetero` with programs of a few lines: what runs where, and what ranks are told.

test_runtime_ends.py tests how such jobs end.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.jobs import Jobs, texts_in
from helpers.pages import EXAMPLE, TENSORFLOW
from helpers.running import CLUSTER, CODE, GROUPS, LINGER, SLEEP, log_of, reason_of, start_programs

pytestmark = [pytest.mark.usefixtures("nothing_is_left"), pytest.mark.first]


TELL = """
import json, os, sys
names = [name for name in os.environ if name.startswith(("HETERO_", "SM_CHANNEL", "SM_CURRENT"))]
names += ["RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES"]
told = {name: os.environ.get(name, "") for name in names}
told |= {"argv": sys.argv, "group": json.load(open(os.environ["SM_INPUT_CONFIG_DIR"]
         + "/resourceconfig.json"))["current_group_name"]}
told |= {"cores": len(os.sched_getaffinity(0)), "policy": os.sched_getscheduler(0)}
print("told", json.dumps(told), flush=True)
"""
THREE = {**GROUPS, "more": ("ml.m5.large", 1)}


def told(log: list[str]) -> tuple[list[dict], list[dict]]:
    """Return what TELL printed on the ranks, in their order, and in the servers."""
    found = [json.loads(line.removeprefix("told ")) for line in log if line.startswith("told ")]
    ranks = sorted((t for t in found if t["RANK"]), key=lambda t: int(t["RANK"]))
    return ranks, [t for t in found if not t["RANK"]]


def test_two_data_groups_several_ranks_and_the_servers_that_they_find(jobs: Jobs):
    options = "--data-group data_group --data-group=more --ranks 2 --spare-cores 1"
    log = log_of(jobs, TELL + LINGER, options, serve=TELL + SLEEP, groups=THREE)
    ranks, servers = told(log)
    assert [(t["RANK"], t["WORLD_SIZE"]) for t in ranks] == [(f"{rank}", "4") for rank in range(4)]
    data_hosts = [t for t in servers if t["group"] != "dnn_group"]
    assert sorted(t["group"] for t in data_hosts) == ["data_group", "data_group", "more"]
    addresses = data_hosts[0]["HETERO_DATA_HOSTS"].split(",")
    assert sorted(addresses) == sorted(t["HETERO_SERVE_AT"] for t in data_hosts)
    # The first server may have another task, such as TensorFlow's dispatcher.
    [first] = [t for t in servers if t["HETERO_FIRST"] == "1"]
    assert first["HETERO_SERVE_AT"] == addresses[0] and first["group"] == "data_group"
    assert len({t["HETERO_WORKER"] for t in servers}) == len(servers) == 5
    # Servers beside the ranks use a spare core, only when it is idle, and no GPUs.
    beside = [t for t in servers if t["group"] == "dnn_group"]
    assert {(t["cores"], t["policy"], t["CUDA_VISIBLE_DEVICES"]) for t in beside} == {
        (1, os.SCHED_IDLE, "-1")
    }
    for rank in ranks:
        *others, own = rank["HETERO_DATA_HOSTS"].split(",")
        assert others == addresses
        assert own in [t["HETERO_SERVE_AT"] for t in beside] and own.startswith("unix-abstract:")


def test_arguments_come_first_and_hyperparameters_win(jobs: Jobs):
    """In the format of SDK v3's own driver. The same command runs without data hosts."""
    files = {"pack/__init__.py": "", "pack/train.py": TELL}
    files["train.py"] = "raise SystemExit('not this one')"
    options = "--spare-cores auto -m pack.train --lr 0.5 --list 1 2 -- 'a b' --ranks 7"
    given = {"lr": 0.1, "amp": True, "sizes": [1, 2], "name": "a  b", "ranks": 3, "note": "é"}
    log = log_of(jobs, "", options, files=files, groups=None, environment={}, hyperparameters=given)
    [rank], servers = told(log)
    assert not servers and rank["HETERO_DATA_HOSTS"] == ""
    expected = ["--lr", "0.5", "--list", "1", "2", "--", "a b", "--ranks", "7", "train.py"]
    expected += ["--lr", "0.1", "--amp", "true", "--sizes", "[1, 2]", "--name", "a  b"]
    assert rank["argv"][1:] == [*expected, "--ranks", "3", "--note", "é"]


def test_a_script_in_a_subfolder_finds_what_is_beside_that(jobs: Jobs):
    files = {"src/run.py": "import hetero\n" + TELL}
    [rank], _ = told(log_of(jobs, "", "src/run.py", files=files, groups=None, environment={}))
    assert rank["argv"] == ["src/run.py", "train.py"]


def test_a_server_that_cannot_be_started_on_spare_cores_is_left_out(jobs: Jobs):
    launcher = CLUSTER + (
        "serve = ['sleep', '100'] if cluster.group == 'data_group' else ['no-such-program']\n"
        "hetero.run([sys.executable, 'train.py'], serve, spare_cores=1)"
    )
    log = log_of(jobs, LINGER, files={"launcher.py": launcher})
    assert sum("no data server on the spare cores: [Errno 2]" in line for line in log) == 2


def test_a_server_script_of_one_s_own(jobs: Jobs):
    """What it stores at HETERO_JOURNAL is kept when it is restarted."""
    serve = TELL + (
        "from pathlib import Path\nkept = Path(os.environ['HETERO_JOURNAL'])\n"
        "if os.environ['HETERO_FIRST'] == '1':\n"
        "    if kept.exists():\n        print('found', kept.read_text(), flush=True)\n"
        "    else:\n        kept.write_text('it')\n        sys.exit(1)\n"
    )
    train = "import time\ntime.sleep(4)\n"
    job = start_programs(
        jobs, train, "--serve own.py --needed first", files={"own.py": serve + SLEEP}
    )
    assert jobs.wait(job.name)["TrainingJobStatus"] == "Completed"
    assert job.log().count("found it") == 1


@pytest.mark.thorough
def test_groups_of_other_names(jobs: Jobs):
    groups = {"cpus": ("ml.c5.xlarge", 1), "gpus": ("ml.m5.xlarge", 1)}
    options = "--train-group gpus --data-group cpus --spare-cores 0"
    ranks, servers = told(log_of(jobs, TELL + LINGER, options, serve=TELL + SLEEP, groups=groups))
    assert [t["group"] for t in ranks] == ["gpus"]
    assert [t["group"] for t in servers] == ["cpus"]
    # The same script in a homogeneous job, whose group has yet another name.
    [rank], servers = told(log_of(jobs, TELL, options, groups=None))
    assert rank["group"] == "homogeneousCluster" and not servers


OTHERS = {"gpu": ("ml.m5.xlarge", 1), "x": ("ml.m5.large", 1)}


@pytest.mark.parametrize(
    "command, groups, words",
    [
        ("train.py", OTHERS, "The job has no training group 'dnn_group', only ['gpu', 'x']. Name "
         "your training group with --train-group, or run(train_group=...)."),
        ("--train-group gpu train.py", OTHERS, "Instance groups ['x'] have nothing to do: 'gpu' "
         "trains, and ['data_group'] serve data."),
        ("--data-group dnn_group --data-group data_group train.py", GROUPS,
         "Instance group 'dnn_group' cannot both train and serve data."),
        ("train.py", GROUPS, "Data hosts have nothing to run: copy the folder feed/"),
        ("", None, "No script is given: python -m hetero [options] SCRIPT"),
        ("train.sh", None, "'train.sh' is not a script that can be run: python -m hetero"),
        ("bash train.sh", None, "'bash' is not a script that can be run"),
        ("other.py", None, "There is no other.py in the folder that the job starts in."),
        ("-m", None, "No module is given"),
        ("--serve serve train.py", None, "'serve' is not a script that can be run"),
        ("--ranks 0 train.py", None, "argument --ranks: must be a whole number >= 1, not '0'."),
        ("--ranks=two train.py", None, "argument --ranks: must be a whole number >= 1, not 'two'."),
        ("--spare-cores some train.py", None,
         "argument --spare-cores: must be a whole number >= 0 or auto, not 'some'."),
        ("--needed all train.py", None, "argument --needed: invalid choice: 'all'"),
        ("--rank 2 train.py", None, "'--rank' is not an option: python -m hetero [options] SCRIPT"),
    ],
)  # fmt: skip
def test_what_cannot_be_run_is_refused(jobs: Jobs, command: str, groups, words: str):
    files = {**texts_in(CODE, "hetero"), "train.py": "", "train.sh": ""}
    environment = {"HETERO_TOKEN": "a secret"}
    name = jobs.create(files, f"exec python -m hetero {command}", groups, environment=environment)
    assert words in jobs.wait(name)["FailureReason"]


def test_a_job_of_several_groups_needs_a_token(jobs: Jobs):
    said = reason_of(jobs, "", environment={})
    assert "set HETERO_TOKEN in the job's environment to a random string, such as secrets." in said


@pytest.mark.parametrize("folder", [EXAMPLE, TENSORFLOW], ids=lambda folder: folder.name)
def test_launchers_take_values_with_spaces_whole(jobs: Jobs, folder: Path):
    """SDK v2's toolkit splits such values when it makes arguments of them."""
    code = folder / "code"
    files = texts_in(code, "hetero") | {"train_dnn.py": TELL}
    files |= {name: (code / name).read_text() for name in ("arguments.py", "launcher.py")}
    command = "exec python launcher.py --model my net"
    job = jobs.run(files, command, hyperparameters={"model": "my net"})
    assert job["TrainingJobStatus"] == "Completed", job["FailureReason"]
    [rank], _ = told(jobs.log(job["TrainingJobName"]))
    assert rank["argv"][1:3] == ["--model", "my net"]


def read(config: dict, folder: Path, ask: str) -> str:
    """Return the output of code about `cluster`, read from this resourceconfig.json."""
    path = folder / "input" / "config" / "resourceconfig.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(config))
    text = f"import pathlib, hetero\ncluster = hetero.read_cluster(pathlib.Path({str(folder)!r}))\n"
    return subprocess.check_output([sys.executable, "-c", text + ask], cwd=CODE, text=True)


def test_hosts_are_ranked_by_number_whatever_their_order(tmp_path: Path):
    groups = {"dnn_group": ["algo-10", "algo-2", "algo-9"], "data_group": ["algo-3", "algo-1"]}
    config = {
        "current_host": "algo-10",
        "current_group_name": "dnn_group",
        "current_instance_type": "ml.m5.xlarge",
        "network_interface_name": "eth0",
        "instance_groups": [{"instance_group_name": g, "hosts": groups[g]} for g in groups],
    }
    printed = read(config, tmp_path, "print(cluster.rank, *cluster.hosts)")
    assert printed.split() == ["2", "algo-2", "algo-9", "algo-10", "algo-1", "algo-3"]


def test_without_instance_groups_there_is_one(tmp_path: Path):
    """The SDK's local mode writes such a file, and names an interface that does not exist."""
    config = {"current_host": "algo-2", "hosts": ["algo-1", "algo-2"]}
    config |= {"network_interface_name": "ethwe", "current_instance_type": "local"}
    ask = (
        "from hetero.topology import rank_environment\n"
        "told = rank_environment(cluster, cluster.rank, 1)\n"
        "print(cluster.group, told['RANK'], told['WORLD_SIZE'], 'GLOO_SOCKET_IFNAME' in told)"
    )
    assert read(config, tmp_path, ask).split() == ["homogeneousCluster", "1", "2", "False"]


# ---- ranks

MEET_AND_TELL = """
import json, os, socket, time

meeting = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if os.environ["RANK"] == "0":
    with socket.create_server(meeting) as server:
        others = [server.accept() for _ in range(3)]
else:
    while True:
        try:
            others = socket.create_connection(meeting)
            break
        except OSError:  # rank 0 does not listen yet
            time.sleep(0.1)
print("rank", json.dumps(dict(os.environ)))
"""
READ_AS_LIGHTNING = """
import json, os, sys
from lightning.fabric.plugins.environments import TorchElasticEnvironment

for environment in json.load(sys.stdin):
    os.environ.clear()
    os.environ.update(environment)
    assert TorchElasticEnvironment.detect()
    it = TorchElasticEnvironment()
    it.validate_settings(num_devices=2, num_nodes=2)
    place = it.global_rank(), it.local_rank(), it.node_rank(), it.world_size()
    print(*place)
"""


def test_ranks_find_each_other_as_under_torchrun(jobs: Jobs, tmp_path: Path):
    """Lightning, too, can read their environment. (test_tensorflow.py's ranks read TF_CONFIG.)

    Variables that the user has set stay: only the user knows which interface is fast.
    """
    environment = {"HETERO_TOKEN": "a secret", "NCCL_SOCKET_IFNAME": "^lo", "OMP_NUM_THREADS": "3"}
    log = log_of(jobs, MEET_AND_TELL, "--ranks 2", environment=environment)
    told = [json.loads(line.removeprefix("rank ")) for line in log if line.startswith("rank {")]
    names = ("NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME")
    assert {tuple(rank[name] for name in names) for rank in told} == {("^lo", "3", "lo")}
    found = subprocess.check_output(
        [sys.executable, "-c", READ_AS_LIGHTNING],
        input=json.dumps(told),
        env={**os.environ, "TMPDIR": str(tmp_path)},  # torch leaves a folder there
        text=True,
    )
    assert sorted(found.splitlines()) == ["0 0 0 4", "1 1 0 4", "2 0 1 4", "3 1 1 4"]


PROGRESS = """
import os, time
for step in range(50):
    print(f"\\rrank {os.environ['RANK']}, step {step}", end="", flush=True)
    time.sleep(0.01)
print("\\rlooks back", end="\\r", flush=True)
time.sleep(100)
"""


def test_lines_that_end_in_a_carriage_return_are_neither_held_back_nor_mixed(jobs: Jobs):
    """tqdm's and Keras's progress bars print such lines."""
    job = start_programs(jobs, PROGRESS, "--ranks 2")
    jobs.wait_for_log(job.name, "looks back", times=4)
    job.stop()
    jobs.wait(job.name)
    expected = [f"rank {rank}, step {step}" for rank in range(4) for step in range(50)]
    lines = [line for line in job.log() if "step" in line or "looks" in line]
    assert sorted(lines) == sorted([*expected, *["looks back"] * 4])


# The process has its own session, and holds the script's stdout open.
LEAVE_A_PROCESS = """
import subprocess
subprocess.Popen(["sleep", "100"], start_new_session=True)
"""


def test_ranks_have_ended_even_if_other_processes_hold_their_output(jobs: Jobs):
    """`nothing_is_left` checks that these processes end with the job."""
    log = log_of(jobs, LEAVE_A_PROCESS + "print('trained', end='')", "--ranks 8")
    assert log.count("trained") == 16


WORKER = """
import signal, subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
def save(*_):
    time.sleep(2)
    print("worker ran:", worker.poll() is None, flush=True)
    sys.exit(1)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(100)
"""


def test_a_rank_s_own_processes_live_until_it_has_ended(jobs: Jobs):
    """They, such as data workers, do not get SIGTERM; `nothing_is_left` checks that they end."""
    job = start_programs(jobs, WORKER)
    jobs.wait_for_log(job.name, "ready", times=2)
    job.stop()
    assert jobs.wait(job.name)["TrainingJobStatus"] == "Stopped"
    assert job.log().count("worker ran: True") == 2
