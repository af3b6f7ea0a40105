"""How jobs of `python -m hetero` begin and end, and the reasons that they give.

test_endings.py tests the table in job.md; test_intruders.py has strangers.
"""

import re
import time

import psutil
import pytest

from helpers.jobs import Jobs
from helpers.running import (
    CLUSTER,
    CODE,
    LINGER,
    SLEEP,
    log_of,
    reason_of,
    run_programs,
    start_programs,
)
from helpers.waiting import wait_until_gone

pytestmark = [pytest.mark.usefixtures("nothing_is_left"), pytest.mark.first]
MAIN = "hetero.main(['train.py'])"


@pytest.mark.thorough
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
    said = reason_of(jobs, "", files={"launcher.py": launcher})
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


@pytest.mark.thorough
def test_a_data_host_may_be_silent_for_a_while_when_the_training_ends(jobs: Jobs):
    """The training hosts, whose time limit is shorter, hear from the leader meanwhile."""
    launcher = CLUSTER + (
        "hetero.run([sys.executable, 'train.py'], [sys.executable, 'feed/server.py'],"
        " spare_cores=0, training_seconds=4)"
    )
    log_of(jobs, LINGER, serve=SILENT_FOR_A_WHILE, files={"launcher.py": launcher})


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
if me == "VICTIM":  # SageMaker would do so 120 s after SIGTERM
    kill = f"sleep 25; kill -KILL {os.getppid()}"
    subprocess.Popen(["/bin/sh", "-c", kill], start_new_session=True)
if me == "data_group-0":
    signal.signal(signal.SIGTERM, freeze)
time.sleep(2 if cluster.group == "dnn_group" else 100)
"""


@pytest.mark.thorough
def test_a_host_that_freezes_when_the_others_have_signed_off_fails_the_job(jobs: Jobs):
    """Otherwise the job would run, and be billed, until MaxRuntimeInSeconds."""
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
        job = start_programs(jobs, script, files={"launcher.py": launcher})
        names[job.name] = expected
    for name, expected in names.items():
        job = jobs.wait(name)
        assert job["TrainingJobStatus"] == "Failed"
        assert re.search(expected, job["FailureReason"]), (expected, job["FailureReason"])


@pytest.mark.thorough
def test_hosts_that_come_up_after_a_failure_hear_of_it(jobs: Jobs):
    launcher = CLUSTER + (
        "fails = (cluster.group, cluster.rank) == ('data_group', 0)\n"
        "time.sleep(0 if fails else 3)\n"  # deaf to SIGTERM, like the shell that starts it
        "hetero.run([sys.executable, 'train.py'], ['/no/such/python' if fails else 'sleep', '100'])"
    )
    job, log = run_programs(jobs, SLEEP, files={"launcher.py": launcher})
    assert job["TrainingTimeInSeconds"] < 30
    said = r"hetero: The launcher on algo-\d \(data_group\) failed: FileNotFoundError: .* No such f"
    assert sum(bool(re.match(said, line)) for line in log) == 4  # on every host


@pytest.mark.thorough
def test_a_stop_that_one_host_hears_first_gives_the_others_their_time(jobs: Jobs):
    """A host may write the last checkpoint before it gets its own SIGTERM."""
    train = (
        "import os, signal, sys, time\n"
        "def told(*_):\n    time.sleep(10)\n    print('saved', flush=True)\n    sys.exit(1)\n"
        "signal.signal(signal.SIGTERM, told)\nprint('ready', flush=True)\ntime.sleep(100)"
    )
    job = start_programs(jobs, train)
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
    said = reason_of(jobs, SLEEP, "--needed first", serve)
    assert "4 times. The job cannot do without it." in said


def test_a_data_server_that_dies_now_and_then_is_not_restarted_for_ever(jobs: Jobs):
    """Here each run is long enough to reset the count of restarts in a row."""
    known = "RESTARTS, HEALTHY_SECONDS, ALL_RESTARTS = 3, 60, 50"
    member = (CODE / "hetero" / "member.py").read_text()
    assert known in member
    changed = {"hetero/member.py": member.replace(known, known.replace("60, 50", "0, 2"))}
    said = reason_of(jobs, SLEEP, serve="", files=changed)
    assert "feed.server exited with status 0, 3 times. No data host is left." in said


CRASH = """
import subprocess, sys, time
import hetero
time.sleep(100 * hetero.read_cluster().rank)
for number in range(8):
    subprocess.Popen(["sleep", str(number)], start_new_session=number < 2)
sys.exit(1)
"""


@pytest.mark.thorough
def test_the_launcher_reaps_what_its_processes_leave(jobs: Jobs):
    """As PID 1 it inherits a crashed server's workers, also those in sessions of their own."""
    job = start_programs(jobs, SLEEP, "--spare-cores 0", CRASH)
    jobs.wait_for_log(job.name, "restart in 2 s")
    launcher = job.launcher("data_group", 0)
    wait_until_gone(
        lambda: [p for p in launcher.children() if p.status() == psutil.STATUS_ZOMBIE], seconds=10
    )
    job.stop()
    jobs.wait(job.name)


def test_a_server_beside_the_training_may_end_and_never_outlives_it(jobs: Jobs):
    """On one training host it ends again and again, as it would without its channel."""
    serve = (
        "import hetero, time\ncluster = hetero.read_cluster()\nprint(cluster.group, flush=True)\n"
        "time.sleep(0 if (cluster.group, cluster.rank) == ('dnn_group', 0) else 100)"
    )
    train = "import time\ntime.sleep(20)\nprint('trained')"
    log = log_of(jobs, train, "--spare-cores 1", serve)
    assert log.count("dnn_group") == 5 and log.count("trained") == 2
    said = r"hetero: On .* \(dnn_group\), feed.server exited with status 0, 4 times\. It will not"
    assert sum(bool(re.match(said, line)) for line in log) == 1


# ---- reasons


def test_a_long_error_is_cut_and_still_the_reason(jobs: Jobs):
    said = reason_of(jobs, "raise ValueError('x' * 10_000)")
    assert "exited with status 1: ValueError: xxxx" in said and len(said) <= 1024


@pytest.mark.parametrize(
    "bug",
    [
        "leader.Leader.judge = lambda leader: 1 / 0",
        "leader.receive = lambda reader, seconds: receive(reader, seconds) if seconds < 9 else 1/0",
    ],
)  # one in each of its tasks; the second strikes after the hosts have said hello
def test_an_error_in_the_leader_s_own_code_is_the_reason(jobs: Jobs, bug: str):
    launcher = f"{CLUSTER}from hetero import leader\nreceive = leader.receive\n{bug}\n{MAIN}"
    job, _ = run_programs(jobs, "", files={"launcher.py": launcher})
    said = r"The leader on algo-\d \(dnn_group\) failed: ZeroDivisionError: division by zero\."
    assert re.search(said, job["FailureReason"])
    assert job["TrainingTimeInSeconds"] < 100  # hosts would wait 600 s for each other


# Healthy ranks lose a connection, print what torch prints, and exit before the failed one.
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
        pytest.param(
            100,
            "pass",
            2,
            r"rank [01] of .*Connection closed.* Still running: rank 2 on (algo-\d \(dnn_group\)), "
            r"rank 3 on \1\.",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_the_reason_is_the_first_failure_that_is_no_consequence(
    jobs: Jobs, seconds: int, failure: str, cut_off: int, expected: str
):
    script = FAILS_SLOWLY.replace("SECONDS", str(seconds)).replace("FAILURE", failure)
    said = reason_of(jobs, script.replace("RANKS", str(cut_off)), "--ranks 2")
    assert re.search(rf"On algo-\d \(dnn_group\), {expected}", said)


# Like AWS's examples, each rank writes its error itself. Rank 2 loses rank 3, its host's other one,
# and writes over what rank 3 has written.
WRITES = """
import os, sys, time, traceback
rank = int(os.environ["RANK"])
try:
    if rank == 2:
        os.mkfifo("peer")
        open("peer").read()
        raise RuntimeError("Connection closed by peer")
    while not os.path.exists("peer"):
        time.sleep(0.1 if rank == 3 else 100)
    peer = open("peer", "w")
    raise ValueError("no number")
except Exception as error:
    if rank in WRITERS:
        with open(os.environ["SM_OUTPUT_FAILURE"], "w") as file:
            file.write(f"Rank {rank} gives up: {error}\\n{traceback.format_exc()}")
    traceback.print_exc()
    os._exit(255)
"""


@pytest.mark.parametrize(
    "writers, expected",
    [
        ("[3]", r"Rank 3 gives up: no number \| Traceback \(.*\): ValueError: no number\."),
        ("[2, 3]", r"(Rank 3 gives up: .*)?ValueError: no number\."),
        ("[]", r"ValueError: no number\."),
    ],
)
def test_what_a_script_itself_writes_is_the_reason_on_every_host(
    jobs: Jobs, writers: str, expected: str
):
    """But not what was written before the ranks started."""
    old = "import os\nopen(os.environ['SM_OUTPUT_FAILURE'], 'w').write('an old reason')\n"
    launcher = f"{CLUSTER}{old}hetero.main(['--ranks', '2', 'train.py'])"
    script = WRITES.replace("WRITERS", writers)
    job, log = run_programs(jobs, script, files={"launcher.py": launcher})
    said = rf"On algo-\d \(dnn_group\), rank 3 of train.py exited with status 255: {expected}"
    assert re.fullmatch(f"AlgorithmError: {said}.*", job["FailureReason"]), job["FailureReason"]
    assert sum(bool(re.fullmatch(f"hetero: {said}", line)) for line in log) == 4  # on every host


def test_a_host_with_another_token_says_so_at_once(jobs: Jobs):
    launcher = CLUSTER + (
        "import hetero.member\nif cluster.group == 'data_group':\n    hetero.member.TOKEN = 'x'\n"
    )
    started = time.monotonic()
    said = reason_of(jobs, SLEEP, files={"launcher.py": launcher + MAIN})
    assert "refused, wrong token" in said
    assert time.monotonic() - started < 100  # instead of JOIN_SECONDS, 600


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
    os.environ.pop("no_grpc_proxy", None)  # without it gRPC reads no_proxy
"""


def test_hosts_reach_each_other_although_there_is_a_proxy(jobs: Jobs):
    """The proxy cannot reach them; here it does not even exist."""
    environment = {"HETERO_TOKEN": "a secret", "http_proxy": "http://127.0.0.1:9"}
    environment |= {"no_grpc_proxy": "a.org", "no_proxy": "b.org", "NO_PROXY": "c.org"}
    log = log_of(jobs, ASK, "--spare-cores 0", GREET, environment=environment)
    assert log.count("hello") == 2 * 3 * 2
