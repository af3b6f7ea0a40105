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
from helpers.running import (
    CLUSTER,
    GROUPS,
    LINGER,
    PAIR,
    SLEEP,
    a_host,
    log_of,
    start_programs,
)

pytestmark = [pytest.mark.usefixtures("nothing_is_left"), pytest.mark.first]


TELL = """
import json, os, sys
config = json.load(open(os.environ["SM_INPUT_CONFIG_DIR"] + "/resourceconfig.json"))
told = {**os.environ, "argv": sys.argv, "group": config["current_group_name"]}
told |= {"cores": len(os.sched_getaffinity(0)), "policy": os.sched_getscheduler(0)}
print("told", json.dumps(told), flush=True)
"""
# Ranks meet, and tell. Each leaves a process in a session of its own, which holds its stdout open.
MEET_AND_LEAVE = """
import os, socket, subprocess, time

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
subprocess.Popen(["sleep", "100"], start_new_session=True)
"""


def told(log: list[str]) -> tuple[list[dict], list[dict]]:
    """Return what TELL printed on the ranks, in their order, and in the servers."""
    found = [json.loads(line.removeprefix("told ")) for line in log if line.startswith("told ")]
    ranks = sorted((t for t in found if "RANK" in t), key=lambda t: int(t["RANK"]))
    return ranks, [t for t in found if "RANK" not in t]


@pytest.fixture(scope="module")
def log(jobs: Jobs) -> list[str]:
    """The log of a job with two data groups, and two ranks on each of two training hosts."""
    train = f"{TELL}{MEET_AND_LEAVE}{LINGER}print('trained', end='')"
    return log_of(
        jobs, train, "--data-group data_group --data-group=more --ranks 2 --spare-cores 1",
        serve=TELL + SLEEP, groups={**GROUPS, "more": ("ml.m5.large", 1)},
        environment={"HETERO_TOKEN": "a", "NCCL_SOCKET_IFNAME": "^lo", "OMP_NUM_THREADS": "3"},
    )  # fmt: skip


def test_two_data_groups_several_ranks_and_the_servers_that_they_find(log: list[str]):
    ranks, servers = told(log)
    places = [(t["RANK"], t["LOCAL_RANK"], t["GROUP_RANK"], t["WORLD_SIZE"]) for t in ranks]
    assert places == [(f"{rank}", f"{rank % 2}", f"{rank // 2}", "4") for rank in range(4)]
    assert all(t["TORCHELASTIC_RUN_ID"] for t in ranks)  # without it Lightning ignores RANK
    # Only the user knows which interface is fast.
    names = ("NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME")
    assert {tuple(rank[name] for name in names) for rank in ranks} == {("^lo", "3", "lo")}
    # Other processes hold their output; `nothing_is_left` checks that these end with the job.
    assert log.count("trained") == 4
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


@pytest.mark.thorough
def test_lightning_reads_the_ranks_environment_as_under_torchrun(log: list[str], tmp_path: Path):
    """(test_tensorflow.py's ranks read TF_CONFIG.)"""
    ranks, _ = told(log)
    environments = [{k: v for k, v in rank.items() if isinstance(v, str)} for rank in ranks]
    found = subprocess.check_output(
        [sys.executable, "-c", READ_AS_LIGHTNING],
        input=json.dumps(environments),
        env={**os.environ, "TMPDIR": str(tmp_path)},  # torch leaves a folder there
        text=True,
    )
    assert sorted(found.splitlines()) == ["0 0 0 4", "1 1 0 4", "2 0 1 4", "3 1 1 4"]


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


@pytest.mark.parametrize("folder", [EXAMPLE, TENSORFLOW], ids=lambda folder: folder.name)
def test_launchers_take_values_with_spaces_whole(jobs: Jobs, folder: Path):
    """SDK v2's toolkit splits such values when it makes arguments of them."""
    code = folder / "code"
    files = {name: (code / name).read_text() for name in ("arguments.py", "launcher.py")}
    files |= texts_in(code, "hetero") | {"train_dnn.py": TELL}
    command = "exec python launcher.py --model my net"
    job = jobs.run(files, command, hyperparameters={"model": "my net"})
    assert job["TrainingJobStatus"] == "Completed", job["FailureReason"]
    [rank], _ = told(jobs.log(job["TrainingJobName"]))
    assert rank["argv"][1:3] == ["--model", "my net"]


def test_a_server_that_cannot_be_started_on_spare_cores_is_left_out(jobs: Jobs):
    launcher = CLUSTER + (
        "serve = ['sleep', '100'] if cluster.group == 'data_group' else ['no-such-program']\n"
        "hetero.run([sys.executable, 'train.py'], serve, spare_cores=1)"
    )
    log = log_of(jobs, LINGER, files={"launcher.py": launcher}, groups=PAIR)
    assert sum("no data server on the spare cores: [Errno 2]" in line for line in log) == 1


def test_a_server_of_one_s_own_and_a_script_in_a_subfolder(jobs: Jobs):
    """The script imports what is beside its folder; the server finds what it stored earlier."""
    serve = (
        "import os, sys\nfrom pathlib import Path\nkept = Path(os.environ['HETERO_JOURNAL'])\n"
        "if os.environ['HETERO_FIRST'] == '1':\n"
        "    if kept.exists():\n        print('found', kept.read_text(), flush=True)\n"
        "    else:\n        kept.write_text('it')\n        sys.exit(1)\n"
    )
    files = {"own.py": serve + SLEEP, "src/run.py": f"import hetero\n{TELL}{LINGER}"}
    log = log_of(jobs, "", "--serve own.py --needed first src/run.py", files=files, groups=PAIR)
    assert log.count("found it") == 1
    assert [rank["argv"] for rank in told(log)[0]] == [["src/run.py", "train.py"]]


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


# Ranks with lines that end in a carriage return, as those of tqdm's and Keras's progress bars.
# Their own processes, such as data workers, do not get SIGTERM.
PROGRESS = """
import os, signal, subprocess, sys, time
for step in range(50):
    print(f"\\rrank {os.environ['RANK']}, step {step}", end="", flush=True)
    time.sleep(0.01)
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
def save(*_):
    time.sleep(2)
    print("worker ran:", worker.poll() is None, flush=True)
    sys.exit(1)
signal.signal(signal.SIGTERM, save)
print("\\rlooks back", end="\\r", flush=True)
time.sleep(100)
"""


def test_progress_is_neither_held_back_nor_mixed_and_workers_live_until_their_rank_ends(jobs: Jobs):
    """`nothing_is_left` checks that the workers end, too."""
    job = start_programs(jobs, PROGRESS, "--ranks 2")
    jobs.wait_for_log(job.name, "looks back", times=4)
    job.stop()
    assert jobs.wait(job.name)["TrainingJobStatus"] == "Stopped"
    expected = [f"rank {rank}, step {step}" for rank in range(4) for step in range(50)]
    lines = [line for line in job.log() if "step" in line or "looks" in line]
    assert sorted(lines) == sorted([*expected, *["looks back"] * 4])
    assert job.log().count("worker ran: True") == 4


OTHERS, OURS = ["gpu", "x"], ["data_group", "dnn_group"]


@pytest.mark.parametrize(
    "command, groups, words",
    [
        ("train.py", OTHERS, "The job has no training group 'dnn_group', only ['gpu', 'x']. Name "
         "your training group with --train-group, or run(train_group=...)."),
        ("--train-group gpu train.py", OTHERS, "Instance groups ['x'] have nothing to do: 'gpu' "
         "trains, and ['data_group'] serve data."),
        ("--data-group dnn_group --data-group data_group train.py", OURS,
         "Instance group 'dnn_group' cannot both train and serve data."),
        ("train.py", OURS, "Data hosts have nothing to run: copy the folder feed/"),
        ("--serve train.py train.py", OURS,
         "set HETERO_TOKEN in the job's environment to a random string, such as secrets."),
        ("", [], "No script is given: python -m hetero [options] SCRIPT"),
        ("train.sh", [], "'train.sh' is not a script that can be run: python -m hetero"),
        ("bash train.sh", [], "'bash' is not a script that can be run"),
        ("other.py", [], "There is no other.py in the folder that the job starts in."),
        ("-m", [], "No module is given"),
        ("--serve serve train.py", [], "'serve' is not a script that can be run"),
        ("--ranks 0 train.py", [], "argument --ranks: must be a whole number >= 1, not '0'."),
        ("--ranks=two train.py", [], "argument --ranks: must be a whole number >= 1, not 'two'."),
        ("--spare-cores some train.py", [],
         "argument --spare-cores: must be a whole number >= 0 or auto, not 'some'."),
        ("--needed all train.py", [], "argument --needed: invalid choice: 'all'"),
        ("--rank 2 train.py", [], "'--rank' is not an option: python -m hetero [options] SCRIPT"),
    ],
)  # fmt: skip
def test_what_cannot_be_run_is_refused(tmp_path: Path, command: str, groups: list, words: str):
    environment = a_host(tmp_path, {group: [f"algo-{group}"] for group in groups})
    (tmp_path / "train.py").touch()
    (tmp_path / "train.sh").touch()
    done = subprocess.run(
        [sys.executable, "-m", "hetero", *command.split()],
        cwd=tmp_path,
        env={**environment, "HETERO_TOKEN": "" if "HETERO_TOKEN" in words else "a secret"},
        timeout=60,
    )
    assert done.returncode == 1
    assert words in (tmp_path / "output" / "failure").read_text()  # it becomes the FailureReason


RANKED = """
import hetero
from hetero.topology import rank_environment
cluster = hetero.read_cluster()
told = rank_environment(cluster, cluster.node_rank, 1)
print(cluster.group, told["RANK"], told["WORLD_SIZE"], "GLOO_SOCKET_IFNAME" in told, *cluster.hosts)
"""


@pytest.mark.parametrize(
    "groups, config, expected",
    [
        (
            {"dnn_group": ["algo-10", "algo-2", "algo-9"], "data_group": ["algo-3", "algo-1"]},
            {},
            "dnn_group 2 3 True algo-2 algo-9 algo-10 algo-1 algo-3",
        ),
        # The SDK's local mode writes such a file, and names an interface that does not exist.
        (
            {},
            {"hosts": ["algo-10", "algo-2"], "network_interface_name": "ethwe"},
            "homogeneousCluster 1 2 False algo-2 algo-10",
        ),
    ],
)
def test_hosts_are_ranked_by_number_whatever_their_order(
    tmp_path: Path, groups: dict, config: dict, expected: str
):
    environment = a_host(tmp_path, groups, current_host="algo-10", **config)
    command = [sys.executable, "-c", RANKED]
    assert subprocess.check_output(command, env=environment, text=True).strip() == expected
