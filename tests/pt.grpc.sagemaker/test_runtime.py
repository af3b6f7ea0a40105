"""The runtime under toy scripts, as jobs of several hosts: how they begin and end together.

The rows of README's table of endings are test_endings.py's, but for a host that hangs when the
training has just ended, which is here, as is what has no row. Strangers: test_intruders.py.
"""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import boto3
import psutil
import pytest

from endings import Running
from jobs import Jobs, texts_in

pytestmark = pytest.mark.usefixtures("nothing_is_left")
CODE = Path(__file__).parents[2] / "pt.grpc.sagemaker" / "code"
RUNTIME = texts_in(CODE, "hetero")
GROUPS = {"data_group": ("ml.c5.xlarge", 2), "dnn_group": ("ml.m5.xlarge", 2)}
LAUNCHER = """
import sys
import hetero
cluster = hetero.read_cluster()
command = [sys.executable, "-u", f"{cluster.group}.py"]
hetero.run(cluster, "dnn_group", dict.fromkeys(["data_group", "dnn_group"], command))
"""
SERVE = "import time\nprint('serving', flush=True)\ntime.sleep(100)"


def changed(file: str, old: str, new: str) -> dict[str, str]:
    """The runtime with other constants."""
    assert old in RUNTIME[file]
    return {**RUNTIME, file: RUNTIME[file].replace(old, new)}


def lost_after(seconds: int) -> dict[str, str]:
    """The runtime with less patience for a host that does not answer."""
    return changed("hetero/messages.py", "LOST_SECONDS = 2, 20", f"LOST_SECONDS = 2, {seconds}")


def start(jobs: Jobs, token: str = "secret", runtime: dict = RUNTIME, **scripts: str) -> str:
    """Start a job of the runtime and the given scripts, by instance group; return its name."""
    files = {**runtime, "launcher.py": LAUNCHER}
    files.update({f"{name}.py": text for name, text in scripts.items()})
    environment = {"HETERO_TOKEN": token} if token else {}
    return jobs.create(files, "exec python launcher.py", GROUPS, environment=environment)


def run(jobs: Jobs, token: str = "secret", **scripts: str) -> dict:
    """Start such a job, and wait for its end."""
    return jobs.wait(start(jobs, token, **scripts))


def test_training_starts_when_all_are_there_and_its_end_ends_all(jobs: Jobs):
    job = run(jobs, data_group=SERVE, dnn_group="import time\nprint('ended at', time.time())")
    assert job["TrainingJobStatus"] == "Completed", job["FailureReason"]
    log = jobs.log(job["TrainingJobName"])
    trained = max(float(line.split()[2]) for line in log if line.startswith("ended at"))
    steps = {s["Status"]: s for s in job["SecondaryStatusTransitions"]}
    assert steps["Training"]["EndTime"].timestamp() - trained < 2  # when the last host had exited
    assert sum("hetero: all hosts have signed off" in line for line in log) == 1


def test_hosts_are_ranked_by_number_whatever_their_order(tmp_path: Path):
    (tmp_path / "input" / "config").mkdir(parents=True)
    groups = {"dnn_group": ["algo-10", "algo-2", "algo-9"], "data_group": ["algo-3", "algo-1"]}
    config = {
        "current_host": "algo-10",
        "current_group_name": "dnn_group",
        "current_instance_type": "ml.m5.xlarge",
        "network_interface_name": "eth0",
        "instance_groups": [{"instance_group_name": g, "hosts": groups[g]} for g in groups],
    }
    path = tmp_path / "input" / "config" / "resourceconfig.json"
    path.write_text(json.dumps(config))
    ask = (
        "import sys, pathlib, hetero\n"
        "cluster = hetero.read_cluster(pathlib.Path(sys.argv[1]))\n"
        "print(cluster.rank, *cluster.groups['dnn_group'], *cluster.groups['data_group'])"
    )
    printed = subprocess.check_output([sys.executable, "-c", ask, tmp_path], cwd=CODE, text=True)
    assert printed.split() == ["2", "algo-2", "algo-9", "algo-10", "algo-1", "algo-3"]


# In a session of its own, holding the script's stdout open.
LEAVE_A_PROCESS = """
import subprocess
subprocess.Popen(["sleep", "100"], start_new_session=True)
"""


def test_ranks_have_ended_whoever_holds_their_output(jobs: Jobs):
    """`nothing_is_left` sees that what they leave ends with the job."""
    job = run(
        jobs,
        launcher=LAUNCHER.replace("command))", "command), ranks=8)"),
        data_group=SERVE,
        dnn_group=LEAVE_A_PROCESS + "print('trained', end='')",
    )
    assert job["TrainingJobStatus"] == "Completed", job["FailureReason"]
    assert jobs.log(job["TrainingJobName"]).count("trained") == 16


def test_a_long_error_is_cut_and_still_the_reason(jobs: Jobs):
    script = LEAVE_A_PROCESS + "raise ValueError('x' * 10_000)"
    job = run(jobs, data_group=SERVE, dnn_group=script)
    assert "exited with status 1: ValueError: xxxx" in job["FailureReason"]
    assert len(job["FailureReason"]) <= 1024


def test_the_reason_is_no_error_that_ends_nothing(jobs: Jobs):
    """What a job says when its process's output has such an error last: test_reason.py has more."""
    script = (
        "import sys\nclass Loader:\n    def __del__(self):\n"
        "        raise AssertionError('can only test a child process')\n"
        "loader = Loader()\nsys.exit('no usable samples')"
    )
    job = run(jobs, data_group=SERVE, dnn_group=script)
    end = "dnn_group.py exited with status 1; its last line: no usable samples., exit code: 1"
    assert job["FailureReason"].endswith(end)


def test_a_command_that_is_not_there_is_the_reason_on_every_host(jobs: Jobs):
    files = {**RUNTIME, "launcher.py": LAUNCHER.replace("sys.executable", "'/no/such/python'")}
    job = jobs.run(files, "exec python launcher.py", GROUPS, environment={"HETERO_TOKEN": "secret"})
    assert job["TrainingJobStatus"] == "Failed"
    reason = r"\(\w+_group\) failed: \[Errno 2\] No such file or directory: '/no/such/python'\."
    assert re.search(reason, job["FailureReason"])


def test_a_leader_that_freezes_before_the_others_come_fails_the_job(jobs: Jobs):
    frozen = (
        "import hetero, signal, socket, time\ncluster = hetero.read_cluster()\n"
        "if (cluster.group, cluster.rank) == ('dnn_group', 0):\n"
        "    address = cluster.bind_address, cluster.base_port\n"
        "    server = socket.create_server(address)\n"
        "    signal.signal(signal.SIGTERM, exit)\n"
        "    time.sleep(100)\n"
    )
    files = {**lost_after(4), "launcher.py": frozen + LAUNCHER}
    job = jobs.run(files, "exec python launcher.py", GROUPS, environment={"HETERO_TOKEN": "secret"})
    assert job["TrainingJobStatus"] == "Failed"
    assert re.search(
        r"lost the leader, algo-\d \(dnn_group\): silent for 4 s", job["FailureReason"]
    )


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
def test_a_host_that_freezes_as_the_training_ends_fails_the_job(jobs: Jobs):
    """Else the job would go on, and be billed, until MaxRuntimeInSeconds. Four jobs at once."""
    stays = r"algo-\d \(data_group\) (did not end when the training had|is gone: silent for \d+ s)"
    lost = r"lost the leader, algo-\d \(dnn_group\): silent for 12 s"
    reasons = {}
    victims = {"data_group-0": stays, "data_group-1": stays, "dnn_group-0": lost}
    for victim, reason in victims.items():
        script = FREEZE_AT_THE_END.replace("VICTIM", victim)
        name = start(jobs, runtime=lost_after(12), data_group=script, dnn_group=script)
        reasons[name] = reason

    # Just before the end: noticed only when the leader waits for all to sign off.
    script = FREEZE_AT_THE_END.replace("VICTIM", "data_group-0")
    script = script.replace("signal.signal(signal.SIGTERM, freeze)", "freeze()")
    script = script.replace("time.sleep(2 if", "time.sleep(5 if")  # training lasts longer
    name = start(jobs, runtime=lost_after(6), data_group=script, dnn_group=script)
    reasons[name] = stays

    for name, reason in reasons.items():
        job = jobs.wait(name)
        assert job["TrainingJobStatus"] == "Failed"
        assert re.search(reason, job["FailureReason"]), (reason, job["FailureReason"])


def test_hosts_that_come_up_after_a_failure_hear_of_it(jobs: Jobs):
    late = (
        "import time, hetero\n"
        "here = hetero.read_cluster()\n"
        "fails = (here.group, here.rank) == ('data_group', 0)\n"
        "time.sleep(0 if fails else 3)"  # deaf to SIGTERM, as the shell that starts the launcher is
    )
    launcher = LAUNCHER.replace("sys.executable", "'/no/such/python' if fails else sys.executable")
    files = {
        **RUNTIME,
        "launcher.py": late + launcher,
        "data_group.py": SERVE,
        "dnn_group.py": SERVE,
    }
    job = jobs.run(files, "exec python launcher.py", GROUPS, environment={"HETERO_TOKEN": "secret"})
    assert job["TrainingTimeInSeconds"] < 30
    said = r"hetero: The launcher on algo-\d \(data_group\) failed: \[Errno 2\] No such file"
    log = jobs.log(job["TrainingJobName"])
    assert sum(bool(re.match(said, line)) for line in log) == 4  # on every host


def test_a_data_server_that_the_job_needs_fails_it_alone(jobs: Jobs):
    launcher = LAUNCHER.replace("command))", "command), needed=[here.groups['data_group'][0]])")
    job = run(
        jobs,
        launcher="import hetero\nhere = hetero.read_cluster()\n" + launcher,
        data_group="import hetero, time\nif hetero.read_cluster().rank == 0:\n    1 / 0\n"
        "time.sleep(100)",
        dnn_group="import time\ntime.sleep(100)",
    )
    assert job["TrainingJobStatus"] == "Failed"
    assert "4 times. The job cannot do without it." in job["FailureReason"]


def test_a_data_server_that_dies_now_and_then_is_not_restarted_for_ever(jobs: Jobs):
    """Here each run is long enough for the restarts in a row to be counted anew."""
    known = "RESTARTS, HEALTHY_SECONDS, ALL_RESTARTS = 3, 60, 50"
    runtime = changed("hetero/host.py", known, known.replace("60, 50", "0, 2"))
    name = start(jobs, runtime=runtime, data_group="", dnn_group="import time\ntime.sleep(100)")
    job = jobs.wait(name)
    assert job["TrainingJobStatus"] == "Failed"
    reason = r"data_group.py exited with status 0, 3 times\. No host of data_group is left\."
    assert re.search(reason, job["FailureReason"])


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
    name = start(jobs, data_group=CRASH, dnn_group="import time\ntime.sleep(100)")
    jobs.wait_for_log(name, "restart in 2 s")
    launcher = Running(jobs, name).launcher("data_group", 0)
    deadline = time.monotonic() + 10
    while zombies := [p for p in launcher.children() if p.status() == psutil.STATUS_ZOMBIE]:
        assert time.monotonic() < deadline, zombies
        time.sleep(0.05)
    boto3.client("sagemaker").stop_training_job(TrainingJobName=name)
    jobs.wait(name)


def test_a_service_beside_the_training_may_end_and_never_outlives_it(jobs: Jobs):
    launcher = LAUNCHER.replace("command))", "command), beside=[sys.executable, 'beside.py'])")
    job = run(
        jobs,
        launcher=launcher,
        data_group=SERVE,
        dnn_group="import time\ntime.sleep(10)\nprint('trained')",
        # On one host it ends again and again, on the other it stays.
        beside="import hetero, time\nprint('beside', flush=True)\n"
        "time.sleep(100 * hetero.read_cluster().rank)",
    )
    assert job["TrainingJobStatus"] == "Completed", job["FailureReason"]
    log = jobs.log(job["TrainingJobName"])
    assert log.count("beside") == 5 and log.count("trained") == 2
    reason = (
        r"hetero: On .* \(dnn_group\), beside.py exited with status 0, 4 times\. It is left alone\."
    )
    assert sum(bool(re.match(reason, line)) for line in log) == 1


def test_a_job_of_several_groups_needs_a_token(jobs: Jobs):
    job = run(jobs, token="", data_group=SERVE, dnn_group="")
    assert job["TrainingJobStatus"] == "Failed"
    assert "put HETERO_TOKEN, a random text, into the job's environment" in job["FailureReason"]


@pytest.mark.parametrize(
    "groups, hyperparameters, words",
    [
        (
            {"data_group": ("ml.c5.xlarge", 1), "gpu": ("ml.m5.xlarge", 1)},
            {},
            "No instance group is named 'dnn_group', the one to train, among "
            "['data_group', 'gpu'].",
        ),
        (
            {
                "data_group": ("ml.c5.xlarge", 1),
                "gpu": ("ml.m5.xlarge", 1),
                "x": ("ml.m5.large", 1),
            },
            {"dnn-group": "gpu"},
            "launcher.py has commands for ['data_group', 'gpu'], but none for ['x'] among "
            "['data_group', 'gpu', 'x'].",
        ),
        (None, {"data-mode": "service"}, "data-mode 'service' needs a data group"),
        (
            None,
            {"processes-per-host": 0},
            "argument --processes-per-host: must be 1 or more, not 0",
        ),
        (None, {"data-mode": "fast"}, "argument --data-mode: invalid choice: 'fast'"),
        (None, {"batch-size": 0}, "argument --batch-size: must be 1 or more, not 0"),
        (None, {"batchsize": 3}, "unrecognized arguments: --batchsize 3"),
        (None, {"batch": 3}, "unrecognized arguments: --batch 3"),
        (None, {"train-dir": "x"}, "unrecognized arguments: --train-dir x"),
    ],
)
def test_launcher_refuses_what_it_does_not_know(jobs: Jobs, groups, hyperparameters, words):
    job = jobs.run(
        {
            **RUNTIME,
            # All that it imports: neither torch nor gRPC, which take seconds and memory.
            **{name: (CODE / name).read_text() for name in ("arguments.py", "launcher.py")},
            **{name: (CODE / name).read_text() for name in ("feed/__init__.py", "feed/spare.py")},
        },
        "exec python launcher.py",
        groups,
        hyperparameters=hyperparameters,
        environment={"HETERO_TOKEN": "secret"},
    )
    assert job["TrainingJobStatus"] == "Failed"
    assert words in job["FailureReason"]


def test_a_third_group_runs_what_the_launcher_says_for_it(jobs: Jobs):
    launcher = LAUNCHER.replace('"dnn_group"], command', '"dnn_group", "more"], command')
    assert launcher != LAUNCHER
    files = {**RUNTIME, "launcher.py": launcher, "data_group.py": SERVE, "more.py": SERVE}
    files["dnn_group.py"] = "print('training')"
    groups = {**GROUPS, "more": ("ml.m5.large", 1)}
    environment = {"HETERO_TOKEN": "secret"}
    job = jobs.run(files, "exec python launcher.py", groups, environment=environment)
    assert job["TrainingJobStatus"] == "Completed", job["FailureReason"]
    log = jobs.log(job["TrainingJobName"])
    assert (log.count("serving"), log.count("training")) == (3, 2)


def test_a_stop_that_one_host_hears_first_gives_the_others_their_time(jobs: Jobs):
    """The last checkpoint may be written on a host that has not got its own SIGTERM yet."""
    files = {**RUNTIME, "launcher.py": LAUNCHER, "data_group.py": SERVE}
    files["dnn_group.py"] = (
        "import os, signal, sys, time\n"
        "def told(*_):\n    time.sleep(10)\n    print('saved', flush=True)\n    sys.exit(1)\n"
        "signal.signal(signal.SIGTERM, told)\nprint('ready', flush=True)\ntime.sleep(100)"
    )
    environment = {"HETERO_TOKEN": "secret"}
    name = jobs.create(files, "exec python launcher.py", GROUPS, environment=environment)
    jobs.wait_for_log(name, "ready")
    time.sleep(2)
    launchers = Running(jobs, name).processes("launcher.py")
    assert len(launchers) == 4
    launchers[0].terminate()
    job = jobs.wait(name)
    assert job["TrainingJobStatus"] == "Failed"
    reason = r"The job was stopped \(SIGTERM\)\. On algo-\d \(dnn_group\), dnn_group.py exited with"
    assert re.search(reason, job["FailureReason"])
    assert jobs.log(name).count("saved") == 2


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
    name = start(jobs, data_group=SERVE, dnn_group=WORKER)
    jobs.wait_for_log(name, "ready", times=2)
    boto3.client("sagemaker").stop_training_job(TrainingJobName=name)
    assert jobs.wait(name)["TrainingJobStatus"] == "Stopped"
    assert jobs.log(name).count("worker ran: True") == 2


GREET = """
from concurrent import futures
import grpc, hetero

class Greeter(grpc.GenericRpcHandler):
    def service(self, call):
        return grpc.unary_unary_rpc_method_handler(lambda request, context: b"hello")

server = grpc.server(futures.ThreadPoolExecutor(1), [Greeter()], options=[("grpc.so_reuseport", 0)])
server.add_insecure_port(hetero.read_cluster().server)
server.start()
server.wait_for_termination()
"""
ASK = """
import os
import grpc, hetero

cluster = hetero.read_cluster()
for name, other in [("no_grpc_proxy", "a.org"), ("no_proxy", "b.org"), ("NO_PROXY", "c.org")]:
    for server in cluster.servers("data_group"):
        with grpc.insecure_channel(server) as channel:
            print(channel.unary_unary("/any/method")(b"", timeout=20, wait_for_ready=True).decode())
    assert {"algo-1", "algo-4", other} <= {*os.environ[name].split(",")}, os.environ[name]
    os.environ.pop("no_grpc_proxy", None)  # without which gRPC looks at no_proxy
"""


def test_hosts_reach_each_other_although_there_is_a_proxy(jobs: Jobs):
    """One that knows nothing of them: here it is not even there."""
    environment = {"HETERO_TOKEN": "secret", "http_proxy": "http://127.0.0.1:9"}
    environment |= {"no_grpc_proxy": "a.org", "no_proxy": "b.org", "NO_PROXY": "c.org"}
    files = {**RUNTIME, "launcher.py": LAUNCHER, "data_group.py": GREET, "dnn_group.py": ASK}
    job = jobs.run(files, "exec python launcher.py", GROUPS, environment=environment)
    assert job["TrainingJobStatus"] == "Completed", job["FailureReason"]
    assert jobs.log(job["TrainingJobName"]).count("hello") == 2 * 3 * 2


# ---- several ranks on a host

TWO_RANKS = LAUNCHER.replace("command))", "command), ranks=2)")
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
    """And as Lightning reads their environment. (test_tensorflow.py's ranks read TF_CONFIG.)"""
    job = run(jobs, launcher=TWO_RANKS, data_group=SERVE, dnn_group=MEET_AND_TELL)
    assert job["TrainingJobStatus"] == "Completed", job["FailureReason"]
    log = jobs.log(job["TrainingJobName"])
    told = [line.removeprefix("rank ") for line in log if line.startswith("rank {")]
    found = subprocess.check_output(
        [sys.executable, "-c", READ_AS_LIGHTNING],
        input=f"[{','.join(told)}]",
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
    """As tqdm's and Keras's progress bars print them."""
    name = start(jobs, launcher=TWO_RANKS, data_group=SERVE, dnn_group=PROGRESS)
    jobs.wait_for_log(name, "looks back", times=4)
    boto3.client("sagemaker").stop_training_job(TrainingJobName=name)
    jobs.wait(name)
    expected = [f"rank {rank}, step {step}" for rank in range(4) for step in range(50)]
    lines = [line for line in jobs.log(name) if "step" in line or "looks" in line]
    assert sorted(lines) == sorted([*expected, *["looks back"] * 4])


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
    "seconds, failure, cut_off, reason",
    [
        (3, "raise ValueError('first')", 3, "rank 3 of .* with status 1: ValueError: first"),
        (
            3,
            "print('ValueError: handled', flush=True); os.kill(os.getpid(), 9)",
            3,
            r"rank 3 of dnn_group.py was killed by signal 9\.",
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
    jobs: Jobs, seconds: int, failure: str, cut_off: int, reason: str
):
    script = FAILS_SLOWLY.replace("SECONDS", str(seconds)).replace("FAILURE", failure)
    script = script.replace("RANKS", str(cut_off))
    job = run(jobs, launcher=TWO_RANKS, data_group=SERVE, dnn_group=script)
    assert job["TrainingJobStatus"] == "Failed"
    assert re.search(rf"On algo-\d \(dnn_group\), {reason}", job["FailureReason"])


def test_a_host_with_another_token_says_so_at_once(jobs: Jobs):
    other = (
        "import hetero.host\nif hetero.read_cluster().group == 'data_group':\n"
        "    hetero.host.TOKEN = 'x'\n"
    )
    started = time.monotonic()
    job = run(jobs, launcher=other + LAUNCHER, data_group=SERVE, dnn_group=SERVE)
    assert job["TrainingJobStatus"] == "Failed"
    assert "refused, wrong token" in job["FailureReason"]
    assert time.monotonic() - started < 25
