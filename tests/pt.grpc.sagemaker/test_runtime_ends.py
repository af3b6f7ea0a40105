"""How jobs of `python -m hetero` begin and end, and the reasons that they give.

test_endings.py tests the table in job.md; test_intruders.py has strangers.
"""

import re
from dataclasses import dataclass, field

import psutil
import pytest

from helpers.endings import ANY, DATA, DNN
from helpers.jobs import Jobs
from helpers.running import (
    CLUSTER,
    CODE,
    GROUPS,
    LINGER,
    PAIR,
    SERVE,
    SLEEP,
    log_of,
    run_programs,
    start_programs,
)
from helpers.waiting import wait_until_gone

pytestmark = [pytest.mark.usefixtures("nothing_is_left"), pytest.mark.first]


@dataclass
class Failure:
    """A job of small programs that fails: its programs, and the reason that it must give."""

    reason: str  # a regular expression for the whole FailureReason without AWS's prefix and suffix
    train: str = SLEEP
    options: str = ""
    serve: str = SERVE
    launcher: str = ""  # follows CLUSTER in a launcher.py
    files: dict[str, str] = field(default_factory=dict)
    seconds: int = 100  # the longest time; hosts would wait 600 s for each other
    everywhere: bool = False  # whether each host says it
    groups: dict = field(default_factory=lambda: GROUPS)


def member(old: str, new: str) -> dict[str, str]:
    """Return the file of hetero/ that restarts servers, with a change."""
    text = (CODE / "hetero" / "member.py").read_text()
    assert text.count(old) == 1
    return {"hetero/member.py": text.replace(old, new)}


# Each run of a server is long enough to reset the count of restarts in a row.
RESETS = member("ALL_RESTARTS = 3, 60, 50", "ALL_RESTARTS = 3, 0, 2")
AT_ONCE = member("pause = 2 ** (failures - 1)", "pause = 0")  # helpers/endings.py has the pauses
FREEZES_EARLY = """
import signal, socket
if (cluster.group, cluster.node_rank) == ("dnn_group", 0):
    server = socket.create_server((cluster.bind_address, cluster.base_port))
    signal.signal(signal.SIGTERM, exit)
    time.sleep(100)
hetero.run([sys.executable, "train.py"], ["sleep", "100"], training_timeout=4)
"""
# The others are deaf to SIGTERM for three seconds, like the shell that starts them.
FAILS_FIRST = """
fails = (cluster.group, cluster.node_rank) == ("data_group", 0)
time.sleep(0 if fails else 3)
hetero.run([sys.executable, "train.py"], ["/no/such/python" if fails else "sleep", "100"])
"""
TOLD_FIRST = """
import asyncio, os, signal
from hetero.member import Member
join = Member.join
async def told_first(member):
    if (cluster.group, cluster.node_rank) == ({group!r}, 0):
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(2)
    return await join(member)
Member.join = told_first
hetero.main(["train.py"])
"""
OTHER_TOKEN = """
import hetero.member
if cluster.group == "data_group":
    hetero.member.TOKEN = "x"
hetero.main(["train.py"])
"""
LEADER_BUG = """
from hetero import leader
receive = leader.receive
{bug}
hetero.main(["train.py"])
"""
LATE_BUG = (
    "leader.receive = lambda reader, seconds: receive(reader, seconds) if seconds < 9 else 1/0"
)
BUG = rf"The leader on {DNN} failed: ZeroDivisionError: division by zero\."
NOT_STARTED = (
    rf"The job was stopped \(SIGTERM\)\. On {DNN}, training had not started\.( Not there .*)?"
)
# Healthy ranks lose a connection, print what torch prints, and exit before the failed one.
FAILS_SLOWLY = """
import os, sys, time
rank = int(os.environ["RANK"])
time.sleep(1)
if rank == 3:
    time.sleep({seconds})
    {failure}
if rank < {cut_off}:
    raise RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.1]:1234")
time.sleep(100)
"""
FIRST = "raise ValueError('first' + 'x' * 10_000)"  # a long error is cut
KILLED = "print('ValueError: handled', flush=True); os.kill(os.getpid(), 9)"
RANK_3 = rf"On {DNN}, rank 3 of train.py "


def fails_slowly(reason: str, seconds: int, failure: str, cut_off: int) -> Failure:
    script = FAILS_SLOWLY.format(seconds=seconds, failure=failure, cut_off=cut_off)
    return Failure(reason, script, "--ranks 2")


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
    if rank in {writers}:
        with open(os.environ["SM_OUTPUT_FAILURE"], "w") as file:
            file.write(f"Rank {{rank}} gives up: {{error}}\\n{{traceback.format_exc()}}")
    traceback.print_exc()
    os._exit(255)
"""
# What was written before the ranks started is not the reason.
WRITTEN_BEFORE = """
import os
open(os.environ["SM_OUTPUT_FAILURE"], "w").write("an old reason")
hetero.main(["--ranks", "2", "train.py"])
"""


def writes(writers: list[int], reason: str) -> Failure:
    reason = rf"{RANK_3}exited with status 255: {reason}"
    script = WRITES.format(writers=writers)
    return Failure(reason, script, launcher=WRITTEN_BEFORE, everywhere=True)


# Otherwise the job would run, and be billed, until MaxRuntimeInSeconds.
FREEZE_AT_THE_END = """
import os, signal, subprocess, sys, time
from pathlib import Path
import hetero

cluster = hetero.read_cluster()
pids = Path(os.environ["SAGEMAKER_BASE_DIR"]).parents[2]  # all hosts' folder

def freeze(*_):
    time.sleep(2)  # by now the others have signed off
    os.kill(int((pids / "{victim}").read_text()), signal.SIGSTOP)
    time.sleep(1)
    sys.exit()

me = f"{{cluster.group}}-{{cluster.node_rank}}"
(pids / me).write_text(str(os.getppid()))
if me == "{victim}":  # SageMaker would do so 120 s after SIGTERM
    kill = f"sleep 25; kill -KILL {{os.getppid()}}"
    subprocess.Popen(["/bin/sh", "-c", kill], start_new_session=True)
if me == "data_group-0":
    signal.signal(signal.SIGTERM, freeze)
time.sleep(2 if cluster.group == "dnn_group" else 100)
"""
TWELVE_SECONDS = (
    "hetero.run([sys.executable, 'train.py'], [sys.executable, 'train.py'], spare_cores=0,"
    " training_timeout=12, data_timeout=12)"
)
STAYS = rf"{DATA} did not end when the training had ended\.|.*{DATA} is gone: silent for \d+ s\."


def freezes_late(victim: str, reason: str) -> Failure:
    return Failure(reason, FREEZE_AT_THE_END.format(victim=victim), launcher=TWELVE_SECONDS)


THOROUGH = {
    "a data host freezes when the others have signed off": freezes_late("data_group-1", STAYS),
    "the last data host freezes": freezes_late("data_group-0", STAYS),
    "the leader freezes when the others have signed off": freezes_late(
        "dnn_group-0", rf"{ANY} lost the leader, {DNN}: silent for 12 s\."
    ),
    "the leader freezes before the others come": Failure(
        rf"{ANY} lost the leader, {DNN}: silent for 4 s\.", launcher=FREEZES_EARLY
    ),
    "hosts come up after a failure, and hear of it": Failure(
        rf"The launcher on {DATA} failed: FileNotFoundError: .* No such file.*",
        launcher=FAILS_FIRST, seconds=30, everywhere=True,
    ),
    "healthy ranks only lost a connection": fails_slowly(
        rf"On {DNN}, rank [01] of train.py .*Connection closed.* Still running: rank 2 on ({DNN}), "
        r"rank 3 on \2\.", 100, "pass", 2,
    ),
}  # fmt: skip
FAILURES = {
    "a data server that the job needs": Failure(
        rf"On {DATA}, .*, 4 times\. The job cannot do without it\.", options="--needed first",
        files=AT_ONCE,
        serve="import os, time\nif os.environ['HETERO_FIRST'] == '1':\n    1 / 0\ntime.sleep(100)",
    ),
    "data servers that die now and then are not restarted for ever": Failure(
        rf"On {DATA}, feed.server exited with status 0, 3 times\. No data host is left\.",
        serve="", files=RESETS,
    ),
    "an error in the leader's own code": Failure(
        BUG, launcher=LEADER_BUG.format(bug="leader.Leader.judge = lambda leader: 1 / 0"),
        groups=PAIR,
    ),
    "an error in it after the hosts have said hello": Failure(
        BUG, launcher=LEADER_BUG.format(bug=LATE_BUG), groups=PAIR
    ),
    # Healthy ranks exit before the failed one.
    "a rank fails after the others": fails_slowly(
        RANK_3 + "exited with status 1: ValueError: first.*", 3, FIRST, 3
    ),
    "a rank is killed after the others": fails_slowly(
        RANK_3 + r"was killed by signal 9\.", 3, KILLED, 3
    ),
    "a rank fails before the others": fails_slowly(
        RANK_3 + "exited with status 1: ValueError: first.*", 0, FIRST, 1
    ),
    "what the script writes": writes(
        [3], r"Rank 3 gives up: no number \| Traceback \(.*\): ValueError: no number\."
    ),
    "what two ranks of a host write": writes(
        [2, 3], r"(Rank 3 gives up: .*)?ValueError: no number\."
    ),
    "what the script does not write": writes([], r"ValueError: no number\."),
    "a host has another token": Failure(
        ".*refused, wrong token.*", launcher=OTHER_TOKEN, groups=PAIR
    ),
    "a data host is stopped before it trains": Failure(
        NOT_STARTED, launcher=TOLD_FIRST.format(group="data_group"), groups=PAIR
    ),
    "the leader is stopped before it trains": Failure(
        NOT_STARTED, launcher=TOLD_FIRST.format(group="dnn_group"), groups=PAIR
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [*FAILURES, *(pytest.param(name, marks=pytest.mark.thorough) for name in THOROUGH)]
)
def test_a_job_that_fails_says_why(jobs: Jobs, name: str):
    failure = {**FAILURES, **THOROUGH}[name]
    files = {"launcher.py": CLUSTER + failure.launcher} if failure.launcher else {}
    given = failure.train, failure.options, failure.serve, {**failure.files, **files}
    job, log = run_programs(jobs, *given, groups=failure.groups)
    assert job["TrainingJobStatus"] == "Failed"
    reason = job["FailureReason"]
    assert re.fullmatch(rf"AlgorithmError: ({failure.reason}), exit code: \d+", reason), reason
    assert len(reason) <= 1024
    assert job["TrainingTimeInSeconds"] < failure.seconds
    if failure.everywhere:
        assert sum(bool(re.fullmatch(f"hetero: {failure.reason}", line)) for line in log) == 4


# ---- jobs that do not fail

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
        " spare_cores=0, training_timeout=4)"
    )
    log_of(jobs, LINGER, serve=SILENT_FOR_A_WHILE, files={"launcher.py": launcher})


CRASH = """
import subprocess, sys, time
import hetero
time.sleep(100 * hetero.read_cluster().node_rank)
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
        "time.sleep(0 if (cluster.group, cluster.node_rank) == ('dnn_group', 0) else 100)"
    )
    train = "import time\ntime.sleep(12)\nprint('trained')"
    log = log_of(jobs, train, "--spare-cores 1", serve, AT_ONCE)
    assert log.count("dnn_group") == 5 and log.count("trained") == 2
    said = r"hetero: On .* \(dnn_group\), feed.server exited with status 0, 4 times\. It will not"
    assert sum(bool(re.match(said, line)) for line in log) == 1


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
    assert {"algo-1", "algo-2", other} <= {*os.environ[name].split(",")}, os.environ[name]
    os.environ.pop("no_grpc_proxy", None)  # without it gRPC reads no_proxy
"""


def test_hosts_reach_each_other_although_there_is_a_proxy(jobs: Jobs):
    """The proxy cannot reach them; here it does not even exist."""
    environment = {"HETERO_TOKEN": "a secret", "http_proxy": "http://127.0.0.1:9"}
    environment |= {"no_grpc_proxy": "a.org", "no_proxy": "b.org", "NO_PROXY": "c.org"}
    log = log_of(jobs, ASK, "--spare-cores 0", GREET, environment=environment, groups=PAIR)
    assert log.count("hello") == 3
