"""`python -m hetero` with programs of a few lines, as jobs of several hosts.

How such jobs end is in test_endings.py, as README's table has it; here is what has no row.
Strangers: test_intruders.py.
"""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import endings
from endings import CODE, GROUPS
from jobs import Jobs, texts_in
from pages import EXAMPLE, TENSORFLOW

pytestmark = pytest.mark.usefixtures("nothing_is_left")
SLEEP = "import time\ntime.sleep(100)"
# Before a launcher.py's last line, which is main's or run's.
CLUSTER = "import hetero, sys, time\ncluster = hetero.read_cluster()\n"
MAIN = "hetero.main(['train.py'])"


def run(jobs: Jobs, train: str, *args, **settings) -> tuple[dict, list[str]]:
    """Run such a job; return DescribeTrainingJob's answer, and the log."""
    job = endings.start_programs(jobs, train, *args, **settings)
    return jobs.wait(job.name), job.log()


def run_well(jobs: Jobs, train: str, *args, **settings) -> list[str]:
    """Run such a job, which must be Completed; return the log."""
    job, log = run(jobs, train, *args, **settings)
    assert job["TrainingJobStatus"] == "Completed", job["FailureReason"]
    return log


def reason(jobs: Jobs, train: str, *args, **settings) -> str:
    """Run such a job, which must fail; return its FailureReason."""
    job, _ = run(jobs, train, *args, **settings)
    assert job["TrainingJobStatus"] == "Failed"
    return job["FailureReason"]


# ---- what runs where

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
LINGER = "import time\ntime.sleep(4)\n"  # until all servers have told, busy as the machine may be
THREE = {**GROUPS, "more": ("ml.m5.large", 1)}


def told(log: list[str]) -> tuple[list[dict], list[dict]]:
    """What ranks, in their order, and servers have said with TELL."""
    found = [json.loads(line.removeprefix("told ")) for line in log if line.startswith("told ")]
    ranks = sorted((t for t in found if t["RANK"]), key=lambda t: int(t["RANK"]))
    return ranks, [t for t in found if not t["RANK"]]


def test_two_data_groups_several_ranks_and_the_servers_that_they_find(jobs: Jobs):
    options = "--data-group data_group --data-group=more --ranks 2 --spare-cores 1"
    log = run_well(jobs, TELL + LINGER, options, serve=TELL + SLEEP, groups=THREE)
    ranks, servers = told(log)
    assert [(t["RANK"], t["WORLD_SIZE"]) for t in ranks] == [(f"{rank}", "4") for rank in range(4)]
    data_hosts = [t for t in servers if t["group"] != "dnn_group"]
    assert sorted(t["group"] for t in data_hosts) == ["data_group", "data_group", "more"]
    addresses = data_hosts[0]["HETERO_DATA_HOSTS"].split(",")
    assert sorted(addresses) == sorted(t["HETERO_SERVE_AT"] for t in data_hosts)
    # The first of all has more to do, such as TensorFlow's dispatcher.
    [first] = [t for t in servers if t["HETERO_FIRST"] == "1"]
    assert first["HETERO_SERVE_AT"] == addresses[0] and first["group"] == "data_group"
    assert len({t["HETERO_WORKER"] for t in servers}) == len(servers) == 5
    # Beside the ranks, on their spare core, when nobody else needs it, and without their GPUs.
    beside = [t for t in servers if t["group"] == "dnn_group"]
    assert {(t["cores"], t["policy"], t["CUDA_VISIBLE_DEVICES"]) for t in beside} == {
        (1, os.SCHED_IDLE, "-1")
    }
    for rank in ranks:
        *others, own = rank["HETERO_DATA_HOSTS"].split(",")
        assert others == addresses
        assert own in [t["HETERO_SERVE_AT"] for t in beside] and own.startswith("unix-abstract:")


def test_arguments_come_first_and_hyperparameters_win(jobs: Jobs):
    """As SDK v3's own driver writes them. The same command runs without data hosts."""
    files = {"pack/__init__.py": "", "pack/train.py": TELL}
    files["train.py"] = "raise SystemExit('not this one')"
    options = "--spare-cores auto -m pack.train --lr 0.5 --list 1 2 -- 'a b' --ranks 7"
    given = {"lr": 0.1, "amp": True, "sizes": [1, 2], "name": "a  b", "ranks": 3, "note": "é"}
    log = run_well(
        jobs, "", options, files=files, groups=None, environment={}, hyperparameters=given
    )
    [rank], servers = told(log)
    assert not servers and rank["HETERO_DATA_HOSTS"] == ""
    expected = ["--lr", "0.5", "--list", "1", "2", "--", "a b", "--ranks", "7", "train.py"]
    expected += ["--lr", "0.1", "--amp", "true", "--sizes", "[1, 2]", "--name", "a  b"]
    assert rank["argv"][1:] == [*expected, "--ranks", "3", "--note", "é"]


def test_a_script_in_a_subfolder_finds_what_is_beside_that(jobs: Jobs):
    files = {"src/run.py": "import hetero\n" + TELL}
    [rank], _ = told(run_well(jobs, "", "src/run.py", files=files, groups=None, environment={}))
    assert rank["argv"] == ["src/run.py", "train.py"]


def test_a_server_that_cannot_be_started_on_spare_cores_is_left_out(jobs: Jobs):
    launcher = CLUSTER + (
        "serve = ['sleep', '100'] if cluster.group == 'data_group' else ['no-such-program']\n"
        "hetero.run([sys.executable, 'train.py'], serve, spare_cores=1)"
    )
    log = run_well(jobs, LINGER, files={"launcher.py": launcher})
    assert sum("no data server on the spare cores: [Errno 2]" in line for line in log) == 2


def test_a_server_of_one_s_own(jobs: Jobs):
    """Which is told a folder that it keeps when it is started again."""
    serve = TELL + (
        "from pathlib import Path\nkept = Path(os.environ['HETERO_JOURNAL'])\n"
        "if os.environ['HETERO_FIRST'] == '1':\n"
        "    if kept.exists():\n        print('found', kept.read_text(), flush=True)\n"
        "    else:\n        kept.write_text('it')\n        sys.exit(1)\n"
    )
    train = "import time\ntime.sleep(4)\n"
    job = endings.start_programs(
        jobs, train, "--serve own.py --needed first", files={"own.py": serve + SLEEP}
    )
    assert jobs.wait(job.name)["TrainingJobStatus"] == "Completed"
    assert job.log().count("found it") == 1


def test_groups_of_other_names(jobs: Jobs):
    groups = {"cpus": ("ml.c5.xlarge", 1), "gpus": ("ml.m5.xlarge", 1)}
    options = "--train-group gpus --data-group cpus --spare-cores 0"
    ranks, servers = told(run_well(jobs, TELL + LINGER, options, serve=TELL + SLEEP, groups=groups))
    assert [t["group"] for t in ranks] == ["gpus"]
    assert [t["group"] for t in servers] == ["cpus"]
    # And as a homogeneous job, whose group has another name again.
    [rank], servers = told(run_well(jobs, TELL, options, groups=None))
    assert rank["group"] == "homogeneousCluster" and not servers


OTHERS = {"gpu": ("ml.m5.xlarge", 1), "x": ("ml.m5.large", 1)}


@pytest.mark.parametrize(
    "command, groups, words",
    [
        ("train.py", OTHERS, "No instance group is named 'dnn_group', the one to train, among "
         "['gpu', 'x']. Name yours with --train-group, or run(train_group=...)."),
        ("--train-group gpu train.py", OTHERS, "Instance groups ['x'] have nothing to do: 'gpu' "
         "trains, and data is served by ['data_group']."),
        ("--data-group dnn_group --data-group data_group train.py", GROUPS,
         "Instance group 'dnn_group' cannot both train and serve data."),
        ("train.py", GROUPS, "Data hosts have nothing to run: copy the folder feed/"),
        ("", None, "No script is given: python -m hetero [options] SCRIPT"),
        ("train.sh", None, "'train.sh' is not a script that can be run: python -m hetero"),
        ("bash train.sh", None, "'bash' is not a script that can be run"),
        ("other.py", None, "There is no other.py in the folder that the job starts in."),
        ("-m", None, "No module is given"),
        ("--serve serve train.py", None, "'serve' is not a script that can be run"),
        ("--ranks 0 train.py", None, "argument --ranks: must be a number from 1 on, not '0'."),
        ("--ranks=two train.py", None, "argument --ranks: must be a number from 1 on, not 'two'."),
        ("--spare-cores some train.py", None,
         "argument --spare-cores: must be a number from 0 on or auto, not 'some'."),
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
    said = reason(jobs, "", environment={})
    assert "put HETERO_TOKEN, a random text such as secrets.token_hex(16), into the job's" in said


@pytest.mark.parametrize("folder", [EXAMPLE, TENSORFLOW], ids=lambda folder: folder.name)
def test_launchers_take_values_with_spaces_whole(jobs: Jobs, folder: Path):
    """Which the toolkit of SDK v2 splits where it makes arguments of them."""
    code = folder / "code"
    files = texts_in(code, "hetero") | {"train_dnn.py": TELL}
    files |= {name: (code / name).read_text() for name in ("arguments.py", "launcher.py")}
    command = "exec python launcher.py --model my net"
    job = jobs.run(files, command, hyperparameters={"model": "my net"})
    assert job["TrainingJobStatus"] == "Completed", job["FailureReason"]
    [rank], _ = told(jobs.log(job["TrainingJobName"]))
    assert rank["argv"][1:3] == ["--model", "my net"]


@pytest.mark.parametrize(
    "hyperparameters, words",
    [
        ({"processes-per-host": 0}, "argument --processes-per-host: must be 1 or more, not 0"),
        ({"data-mode": "fast"}, "argument --data-mode: invalid choice: 'fast'"),
        ({"batch-size": 0}, "argument --batch-size: must be 1 or more, not 0"),
        ({"batchsize": 3}, "unrecognized arguments: --batchsize 3"),
        ({"batch": 3}, "unrecognized arguments: --batch 3"),
        ({"train-dir": "x"}, "unrecognized arguments: --train-dir x"),
    ],
)
def test_the_example_s_launcher_refuses_wrong_hyperparameters(
    jobs: Jobs, hyperparameters: dict, words: str
):
    files = texts_in(CODE, "hetero")  # with all that it imports: neither torch nor gRPC
    files |= {name: (CODE / name).read_text() for name in ("arguments.py", "launcher.py")}
    job = jobs.run(files, "exec python launcher.py", hyperparameters=hyperparameters)
    assert job["TrainingJobStatus"] == "Failed"
    assert words in job["FailureReason"]


def read(config: dict, folder: Path, ask: str) -> str:
    """What a program prints of `cluster`, read from such a resourceconfig.json."""
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
    """As the SDK's local mode writes it, with the name of an interface that is not there."""
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
        except OSError:  # rank 0 is not there yet
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
    """And as Lightning reads their environment. (test_tensorflow.py's ranks read TF_CONFIG.)

    What the user has set stays: only he knows which interface is a fast one.
    """
    environment = {"HETERO_TOKEN": "a secret", "NCCL_SOCKET_IFNAME": "^lo", "OMP_NUM_THREADS": "3"}
    log = run_well(jobs, MEET_AND_TELL, "--ranks 2", environment=environment)
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


@pytest.mark.parametrize(
    "gpus, neurons, ranks", [("0", "0", 1), ("3", "0", 3), ("", "2", 2), ("2", "8", 2)]
)
def test_there_is_a_rank_for_each_accelerator(gpus: str, neurons: str, ranks: int):
    counted = subprocess.check_output(
        [sys.executable, "-c", "from hetero.topology import accelerators; print(accelerators())"],
        cwd=CODE,
        env={**os.environ, "SM_NUM_GPUS": gpus, "SM_NUM_NEURONS": neurons},
        text=True,
    )
    assert int(counted) == ranks


PROGRESS = """
import os, time
for step in range(50):
    print(f"\\rrank {os.environ['RANK']}, step {step}", end="", flush=True)
    time.sleep(0.01)
print("\\rlooks back", end="\\r", flush=True)
time.sleep(100)
"""


def test_lines_that_end_in_a_carriage_return_are_neither_held_back_nor_mixed(jobs: Jobs):
    """As tqdm's and Keras's progress bars print them."""
    job = endings.start_programs(jobs, PROGRESS, "--ranks 2")
    jobs.wait_for_log(job.name, "looks back", times=4)
    job.stop()
    jobs.wait(job.name)
    expected = [f"rank {rank}, step {step}" for rank in range(4) for step in range(50)]
    lines = [line for line in job.log() if "step" in line or "looks" in line]
    assert sorted(lines) == sorted([*expected, *["looks back"] * 4])


# In a session of its own, holding the script's stdout open.
LEAVE_A_PROCESS = """
import subprocess
subprocess.Popen(["sleep", "100"], start_new_session=True)
"""


def test_ranks_have_ended_whoever_holds_their_output(jobs: Jobs):
    """`nothing_is_left` sees that what they leave ends with the job."""
    log = run_well(jobs, LEAVE_A_PROCESS + "print('trained', end='')", "--ranks 8")
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
    """Its data workers do not hear of SIGTERM; `nothing_is_left` sees that they end."""
    job = endings.start_programs(jobs, WORKER)
    jobs.wait_for_log(job.name, "ready", times=2)
    job.stop()
    assert jobs.wait(job.name)["TrainingJobStatus"] == "Stopped"
    assert job.log().count("worker ran: True") == 2


# ---- beginning and end


def test_training_starts_when_all_are_there_and_its_end_ends_all(jobs: Jobs):
    job, log = run(jobs, "import time\nprint('ended at', time.time())")
    assert job["TrainingJobStatus"] == "Completed", job["FailureReason"]
    trained = max(float(line.split()[2]) for line in log if line.startswith("ended at"))
    steps = {s["Status"]: s for s in job["SecondaryStatusTransitions"]}
    assert steps["Training"]["EndTime"].timestamp() - trained < 2  # when the last host had exited
    assert sum("hetero: all hosts have signed off" in line for line in log) == 1


def test_a_leader_that_freezes_before_the_others_come_fails_the_job(jobs: Jobs):
    launcher = CLUSTER + (
        "import signal, socket\n"
        "if (cluster.group, cluster.rank) == ('dnn_group', 0):\n"
        "    address = cluster.bind_address, cluster.base_port\n"
        "    server = socket.create_server(address)\n"
        "    signal.signal(signal.SIGTERM, exit)\n"
        "    time.sleep(100)\n"
        "hetero.run([sys.executable, 'train.py'], ['sleep', '100'], training_seconds=4)"
    )
    said = reason(jobs, "", files={"launcher.py": launcher})
    assert re.search(r"lost the leader, algo-\d \(dnn_group\): silent for 4 s", said)


SILENT_FOR_A_WHILE = """
import os, signal, subprocess, sys, time

def freeze(*_):
    pause = f"kill -STOP {os.getppid()}; sleep 8; kill -CONT {os.getppid()}"
    subprocess.Popen(["/bin/sh", "-c", pause], start_new_session=True)
    time.sleep(100)

signal.signal(signal.SIGTERM, freeze)
time.sleep(100)
"""


def test_a_data_host_may_be_silent_for_a_while_when_the_training_ends(jobs: Jobs):
    """The training hosts, which are less patient, hear of the leader meanwhile."""
    launcher = CLUSTER + (
        "hetero.run([sys.executable, 'train.py'], [sys.executable, 'feed/server.py'],"
        " spare_cores=0, training_seconds=4)"
    )
    run_well(jobs, LINGER, serve=SILENT_FOR_A_WHILE, files={"launcher.py": launcher})


FREEZE_AT_THE_END = """
import os, signal, subprocess, sys, time
from pathlib import Path
import hetero

cluster = hetero.read_cluster()
pids = Path(os.environ["SAGEMAKER_BASE_DIR"]).parents[2]  # all hosts' folder

def freeze(*_):
    time.sleep(2)  # by now the others have signed off
    os.kill(int((pids / "VICTIM").read_text()), signal.SIGSTOP)
    time.sleep(1)
    sys.exit()

me = f"{cluster.group}-{cluster.rank}"
(pids / me).write_text(str(os.getppid()))
if me == "VICTIM":  # SageMaker would kill it 120 s after its SIGTERM
    kill = f"sleep 25; kill -KILL {os.getppid()}"
    subprocess.Popen(["/bin/sh", "-c", kill], start_new_session=True)
if me == "data_group-0":
    signal.signal(signal.SIGTERM, freeze)
time.sleep(2 if cluster.group == "dnn_group" else 100)
"""


@pytest.mark.thorough
def test_a_host_that_freezes_when_the_others_have_signed_off_fails_the_job(jobs: Jobs):
    """Else the job would go on, and be billed, until MaxRuntimeInSeconds. Three jobs at once."""
    stays = r"algo-\d \(data_group\) (did not end when the training had|is gone: silent for \d+ s)"
    lost = r"lost the leader, algo-\d \(dnn_group\): silent for 12 s"
    launcher = CLUSTER + (
        "hetero.run([sys.executable, 'train.py'], [sys.executable, 'train.py'], spare_cores=0,"
        " training_seconds=12, data_seconds=12)"
    )
    names = {}
    victims = {"data_group-0": stays, "data_group-1": stays, "dnn_group-0": lost}
    for victim, expected in victims.items():
        script = FREEZE_AT_THE_END.replace("VICTIM", victim)
        job = endings.start_programs(jobs, script, files={"launcher.py": launcher})
        names[job.name] = expected
    for name, expected in names.items():
        job = jobs.wait(name)
        assert job["TrainingJobStatus"] == "Failed"
        assert re.search(expected, job["FailureReason"]), (expected, job["FailureReason"])


def test_hosts_that_come_up_after_a_failure_hear_of_it(jobs: Jobs):
    launcher = CLUSTER + (
        "fails = (cluster.group, cluster.rank) == ('data_group', 0)\n"
        "time.sleep(0 if fails else 3)\n"  # deaf to SIGTERM, as the shell that starts it is
        "hetero.run([sys.executable, 'train.py'], ['/no/such/python' if fails else 'sleep', '100'])"
    )
    job, log = run(jobs, SLEEP, files={"launcher.py": launcher})
    assert job["TrainingTimeInSeconds"] < 30
    said = r"hetero: The launcher on algo-\d \(data_group\) failed: FileNotFoundError: .* No such f"
    assert sum(bool(re.match(said, line)) for line in log) == 4  # on every host


def test_a_stop_that_one_host_hears_first_gives_the_others_their_time(jobs: Jobs):
    """The last checkpoint may be written on a host that has not got its own SIGTERM yet."""
    train = (
        "import os, signal, sys, time\n"
        "def told(*_):\n    time.sleep(10)\n    print('saved', flush=True)\n    sys.exit(1)\n"
        "signal.signal(signal.SIGTERM, told)\nprint('ready', flush=True)\ntime.sleep(100)"
    )
    job = endings.start_programs(jobs, train)
    jobs.wait_for_log(job.name, "ready")
    time.sleep(2)
    launchers = job.launchers()
    assert len(launchers) == 4
    launchers[0].terminate()
    ended = jobs.wait(job.name)
    assert ended["TrainingJobStatus"] == "Failed"
    said = r"The job was stopped \(SIGTERM\)\. On algo-\d \(dnn_group\), train.py exited with"
    assert re.search(said, ended["FailureReason"])
    assert job.log().count("saved") == 2


# ---- data servers


def test_a_data_server_that_the_job_needs_fails_it_alone(jobs: Jobs):
    serve = "import os, time\nif os.environ['HETERO_FIRST'] == '1':\n    1 / 0\ntime.sleep(100)"
    said = reason(jobs, SLEEP, "--needed first", serve)
    assert "4 times. The job cannot do without it." in said


def test_a_data_server_that_dies_now_and_then_is_not_restarted_for_ever(jobs: Jobs):
    """Here each run is long enough for the restarts in a row to be counted anew."""
    known = "RESTARTS, HEALTHY_SECONDS, ALL_RESTARTS = 3, 60, 50"
    member = (CODE / "hetero" / "member.py").read_text()
    assert known in member
    changed = {"hetero/member.py": member.replace(known, known.replace("60, 50", "0, 2"))}
    said = reason(jobs, SLEEP, serve="", files=changed)
    assert "feed.server exited with status 0, 3 times. No data host is left." in said


CRASH = """
import subprocess, sys, time
import hetero
time.sleep(100 * hetero.read_cluster().rank)
for number in range(8):
    subprocess.Popen(["sleep", str(number)], start_new_session=number < 2)
sys.exit(1)
"""


def test_the_launcher_reaps_what_its_processes_leave(jobs: Jobs):
    """As PID 1 it is the parent of a crashed server's workers, and of those that left the group."""
    job = endings.start_programs(jobs, SLEEP, "--spare-cores 0", CRASH)
    jobs.wait_for_log(job.name, "restart in 2 s")
    launcher = job.launcher("data_group", 0)
    deadline = time.monotonic() + 10
    while zombies := [p for p in launcher.children() if p.status() == psutil.STATUS_ZOMBIE]:
        assert time.monotonic() < deadline, zombies
        time.sleep(0.05)
    job.stop()
    jobs.wait(job.name)


def test_a_server_beside_the_training_may_end_and_never_outlives_it(jobs: Jobs):
    """On one training host it ends again and again, as where its channel is missing."""
    serve = (
        "import hetero, time\ncluster = hetero.read_cluster()\nprint(cluster.group, flush=True)\n"
        "time.sleep(0 if (cluster.group, cluster.rank) == ('dnn_group', 0) else 100)"
    )
    train = "import time\ntime.sleep(10)\nprint('trained')"
    log = run_well(jobs, train, "--spare-cores 1", serve)
    assert log.count("dnn_group") == 5 and log.count("trained") == 2
    said = r"hetero: On .* \(dnn_group\), feed.server exited with status 0, 4 times\. It is left al"
    assert sum(bool(re.match(said, line)) for line in log) == 1


# ---- reasons


def test_a_long_error_is_cut_and_still_the_reason(jobs: Jobs):
    said = reason(jobs, LEAVE_A_PROCESS + "raise ValueError('x' * 10_000)")
    assert "exited with status 1: ValueError: xxxx" in said and len(said) <= 1024


def test_the_reason_is_no_error_that_ends_nothing(jobs: Jobs):
    """What a job says when its process's output has such an error last: test_reason.py has more."""
    script = (
        "import sys\nclass Loader:\n    def __del__(self):\n"
        "        raise AssertionError('can only test a child process')\n"
        "loader = Loader()\nsys.exit('no usable samples')"
    )
    end = "train.py exited with status 1; its last line: no usable samples., exit code: 1"
    assert reason(jobs, script).endswith(end)


@pytest.mark.parametrize(
    "bug",
    [
        "leader.Leader.judge = lambda leader: 1 / 0",
        "leader.receive = lambda reader, seconds: receive(reader, seconds) if seconds < 9 else 1/0",
    ],
)  # in each of its tasks; in the second one after the hosts have said hello
def test_an_error_in_the_leader_s_own_code_is_the_reason(jobs: Jobs, bug: str):
    launcher = f"{CLUSTER}from hetero import leader\nreceive = leader.receive\n{bug}\n{MAIN}"
    job, _ = run(jobs, "", files={"launcher.py": launcher})
    said = r"The leader on algo-\d \(dnn_group\) failed: ZeroDivisionError: division by zero\."
    assert re.search(said, job["FailureReason"])
    assert job["TrainingTimeInSeconds"] < 30


# Healthy ranks are cut off, and exit before the one that has failed: what torch prints, and when.
FAILS_SLOWLY = """
import os, sys, time
rank = int(os.environ["RANK"])
time.sleep(1)
if rank == 3:
    time.sleep(SECONDS)
    FAILURE
if rank < RANKS:
    raise RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.1]:1234")
time.sleep(100)
"""


@pytest.mark.parametrize(
    "seconds, failure, cut_off, expected",
    [
        (3, "raise ValueError('first')", 3, "rank 3 of .* with status 1: ValueError: first"),
        (
            3,
            "print('ValueError: handled', flush=True); os.kill(os.getpid(), 9)",
            3,
            r"rank 3 of train.py was killed by signal 9\.",
        ),
        (0, "raise ValueError('first')", 1, "rank 3 of .* with status 1: ValueError: first"),
        (
            100,
            "pass",
            2,
            r"rank [01] of .*Connection closed.* Still running: rank 2 on (algo-\d \(dnn_group\)), "
            r"rank 3 on \1\.",
        ),
    ],
)
def test_the_reason_is_the_first_failure_that_is_no_consequence(
    jobs: Jobs, seconds: int, failure: str, cut_off: int, expected: str
):
    script = FAILS_SLOWLY.replace("SECONDS", str(seconds)).replace("FAILURE", failure)
    said = reason(jobs, script.replace("RANKS", str(cut_off)), "--ranks 2")
    assert re.search(rf"On algo-\d \(dnn_group\), {expected}", said)


def test_a_host_with_another_token_says_so_at_once(jobs: Jobs):
    launcher = CLUSTER + (
        "import hetero.member\nif cluster.group == 'data_group':\n    hetero.member.TOKEN = 'x'\n"
    )
    started = time.monotonic()
    said = reason(jobs, SLEEP, files={"launcher.py": launcher + MAIN})
    assert "refused, wrong token" in said
    assert time.monotonic() - started < 25


GREET = """
import os
from concurrent import futures
import grpc

class Greeter(grpc.GenericRpcHandler):
    def service(self, call):
        return grpc.unary_unary_rpc_method_handler(lambda request, context: b"hello")

server = grpc.server(futures.ThreadPoolExecutor(1), [Greeter()], options=[("grpc.so_reuseport", 0)])
server.add_insecure_port(os.environ["HETERO_SERVE_AT"])
server.start()
server.wait_for_termination()
"""
ASK = """
import os
import grpc

for name, other in [("no_grpc_proxy", "a.org"), ("no_proxy", "b.org"), ("NO_PROXY", "c.org")]:
    for server in os.environ["HETERO_DATA_HOSTS"].split(","):
        with grpc.insecure_channel(server) as channel:
            print(channel.unary_unary("/any/method")(b"", timeout=20, wait_for_ready=True).decode())
    assert {"algo-1", "algo-4", other} <= {*os.environ[name].split(",")}, os.environ[name]
    os.environ.pop("no_grpc_proxy", None)  # without which gRPC looks at no_proxy
"""


def test_hosts_reach_each_other_although_there_is_a_proxy(jobs: Jobs):
    """One that knows nothing of them: here it is not even there."""
    environment = {"HETERO_TOKEN": "a secret", "http_proxy": "http://127.0.0.1:9"}
    environment |= {"no_grpc_proxy": "a.org", "no_proxy": "b.org", "NO_PROXY": "c.org"}
    log = run_well(jobs, ASK, "--spare-cores 0", GREET, environment=environment)
    assert log.count("hello") == 2 * 3 * 2
