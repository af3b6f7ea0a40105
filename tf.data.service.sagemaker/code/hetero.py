"""Runtime of a SageMaker training job over several instance groups. Standard library only.

SageMaker starts launcher.py on every host, and bills until the last has exited. `read_cluster()`
tells it which host this is, and where the others are. `run()` starts the host's training processes
(ranks), in an environment by which they find each other, or its data server. All hosts are
connected with the leader, on the training group's first host, which decides when the job ends and
how: what failed where is written to /opt/ml/output/failure on each, as SageMaker's FailureReason.

The PyTorch example's README lists every way that a job can end.
"""

import asyncio
import atexit
import contextlib
import hmac
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

BASE_DIR = Path(os.environ.get("SAGEMAKER_BASE_DIR", "/opt/ml"))
TOKEN = os.environ.get("HETERO_TOKEN", "")  # by which the job's hosts know each other
BASE_PORT = 7710  # the leader's; rank 0's, data servers' and TensorFlow workers' are above it
MASTER_PORT, SERVER_PORT, WORKER_PORT = 1, 2, 10
JOIN_SECONDS = 600  # hosts load the image and their data, and not equally fast
HELLO_SECONDS = 5  # for a connection to say who it is
TICK_SECONDS, BEAT_SECONDS, LOST_SECONDS = 0.05, 2, 20  # a host without signs of life is lost
RESTARTS, HEALTHY_SECONDS = 3, 60  # of a data server in a row, and when it counts as well again
# A rank that fails may exit long after others that miss it, and is the better reason. So long is
# one waited for when a rank has failed by itself, and when it was cut off from another.
SETTLE_SECONDS, CAUSE_SECONDS = 1, 10
SIGTERM_SECONDS = 100  # for the ranks to end when the job is stopped: SageMaker kills at 120
STOP_SECONDS = 5  # from SIGTERM to SIGKILL for what still runs when the job has ended
GOODBYE_SECONDS = 10  # for all hosts to stop their processes then, and again for all to exit
LONGEST_LINE = 16384  # bytes; of a reason's characters, 1000 at most, each can take 6 in JSON
# What Python, argparse or C++ says last; torchrun's own ChildFailedError comes after that.
ERROR = re.compile(
    r"(?:\[rank\d+\]: *)?"
    r"((?!\S*ChildFailed)[\w.]*(?:Error|Exception)\b.*|\S+\.py: error: .*| +what\(\): .*)"
)
# How torch, Horovod and TensorFlow say that another rank is gone, or does not answer.
CUT_OFF = re.compile(
    r"(RuntimeError|[\w.]*Dist\w*Error|what\(\)):.*"
    r"(connection|peer|broken pipe|timed? ?out|timeout|watchdog|remote process|shut ?down)"
    r"|[\w.]*(HorovodInternal|errors_impl\.(Unknown|Aborted|Unavailable))Error",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Cluster:
    """What /opt/ml/input/config/resourceconfig.json says of the hosts, named algo-1, algo-2, ..."""

    host: str
    group: str
    instance_type: str
    network_interface: str
    groups: dict[str, list[str]]  # group -> its hosts, by number
    addresses: dict[str, str] = field(default_factory=dict)  # empty on AWS, where names resolve
    base_port: int = BASE_PORT

    @property
    def rank(self) -> int:
        """This host's place in its group, from 0."""
        return self.groups[self.group].index(self.host)

    @property
    def bind_address(self) -> str:
        """Where servers on this host listen."""
        return self.addresses.get(self.host, "0.0.0.0")

    @property
    def server(self) -> str:
        """Where this host's data server is to listen, HOST:PORT."""
        return f"{self.bind_address}:{self.base_port + SERVER_PORT}"

    def address(self, host: str) -> str:
        """Where `host` can be reached."""
        return self.addresses.get(host, host)

    def servers(self, group: str) -> list[str]:
        """Where the data servers of a group are reached, each HOST:PORT."""
        port = self.base_port + SERVER_PORT
        return [f"{self.address(host)}:{port}" for host in self.groups.get(group, [])]

    def where(self, *hosts: str) -> str:
        """Hosts with their groups, for messages."""
        group_of = {host: group for group, members in self.groups.items() for host in members}
        return ", ".join(f"{host} ({group_of[host]})" for host in sorted(hosts))


def read_cluster(base_dir: Path = BASE_DIR) -> Cluster:
    """Read resourceconfig.json; a homogeneous job has one group, named homogeneousCluster."""
    config = json.loads((base_dir / "input" / "config" / "resourceconfig.json").read_text())
    groups = {group["instance_group_name"]: group["hosts"] for group in config["instance_groups"]}
    # The only trace of runs on one machine: loopback addresses and a range of ports for the job.
    local = json.loads(os.environ.get("LOCAL_SAGEMAKER", "{}"))
    groups = {name: sorted(groups[name], key=lambda h: (len(h), h)) for name in groups}
    names = "current_host", "current_group_name", "current_instance_type", "network_interface_name"
    return Cluster(*(config[name] for name in names), groups, **local)


def hyperparameters() -> list[str]:
    """The job's hyperparameters as command-line arguments, `["--batch-size", "128", ...]`."""
    pairs = json.loads(os.environ.get("SM_HPS", "{}")).items()  # SDK v3; v2 has sys.argv
    words = [w for k, v in pairs for w in (f"--{k}", v if isinstance(v, str) else json.dumps(v))]
    return sys.argv[1:] or words


def fail(sentence: str) -> None:
    """End this host, and with it the job, with `sentence` as the FailureReason."""
    (BASE_DIR / "output").mkdir(parents=True, exist_ok=True)
    (BASE_DIR / "output" / "failure").write_text(sentence[:1024])  # SageMaker shows no more
    sys.exit(f"hetero: {sentence}")


def rank_environment(cluster: Cluster, local_rank: int, ranks: int) -> dict[str, str]:
    """What torchrun and TF_CONFIG would tell one of this host's `ranks` training processes."""
    hosts, rank = cluster.groups[cluster.group], cluster.rank * ranks + local_rank
    places = [cluster.address(host) for host in hosts for _ in range(ranks)]
    workers = [f"{p}:{cluster.base_port + WORKER_PORT + n}" for n, p in enumerate(places)]
    task = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}}
    values = {"RANK": rank, "LOCAL_RANK": local_rank, "GROUP_RANK": cluster.rank}
    values |= {"WORLD_SIZE": len(places), "LOCAL_WORLD_SIZE": ranks, "GROUP_WORLD_SIZE": len(hosts)}
    values |= {"MASTER_ADDR": places[0], "MASTER_PORT": cluster.base_port + MASTER_PORT}
    values |= {"NODE_RANK": cluster.rank, "TORCHELASTIC_RUN_ID": "hetero"}  # Lightning's conditions
    values |= {"TF_CONFIG": json.dumps(task)}
    for library in ("GLOO", "NCCL", "TP"):  # they would guess
        values[f"{library}_SOCKET_IFNAME"] = cluster.network_interface
    if ranks > 1 and "OMP_NUM_THREADS" not in os.environ:
        values["OMP_NUM_THREADS"] = max(1, len(os.sched_getaffinity(0)) // ranks)
    return {name: str(value) for name, value in values.items()}


class Process:
    """A process that this host has started, in a session of its own."""

    def __init__(self, command: list[str], environment: dict[str, str], name: str = ""):
        script = next((word for word in reversed(command) if word.endswith(".py")), command[0])
        self.name = f"{name} of {script}" if name else script
        self.last_error = ""  # set in the thread below alone, and read when that has ended
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        environment = {**os.environ, **environment}
        self.popen = subprocess.Popen(command, env=environment, start_new_session=True, **pipes)
        self.reader = threading.Thread(target=self._pass_output_on, daemon=True)
        self.reader.start()

    def _pass_output_on(self) -> None:
        while line := self.popen.stdout.readline(1 << 16):  # whole, as others print there too
            sys.stdout.buffer.write(line)
            sys.stdout.flush()
            if error := ERROR.match(line.decode("utf-8", "replace")):
                self.last_error = error[1].strip()[:500].rstrip(" .")

    async def ended(self, seconds: float = 1e9) -> None:
        """Wait until it has ended, for some seconds at most, and kill what it has left running."""
        deadline = time.monotonic() + seconds
        while self.popen.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(TICK_SECONDS)
        with contextlib.suppress(ProcessLookupError):  # nobody is left
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.reader.join(timeout=1)  # no longer, as what has left the session may hold it open

    def describe_end(self) -> tuple[str, bool]:
        """How it ended, with its last error; and whether it was cut off from another rank."""
        status = self.popen.returncode
        is_error = status > 0 or status == -signal.SIGABRT  # by which C++ ends a process
        error = f": {self.last_error}" if is_error and self.last_error else ""
        how = f"exited with status {status}" if status >= 0 else f"was killed by signal {-status}"
        return f"{self.name} {how}{error}", is_error and bool(CUT_OFF.match(self.last_error))


def send(writer: asyncio.StreamWriter, message: dict) -> None:
    """Send a JSON object on a line."""
    writer.write(json.dumps(message).encode() + b"\n")


async def receive(reader: asyncio.StreamReader, seconds: float) -> dict:
    """Return the next message; raise TimeoutError or ConnectionError, with the reason, if none."""
    try:
        if line := await asyncio.wait_for(reader.readline(), seconds):
            return dict(json.loads(line))
    except asyncio.TimeoutError:
        raise TimeoutError(f"silent for {seconds} s") from None
    except (ValueError, TypeError, RecursionError):  # too long, or not an object
        raise ConnectionError("not a launcher's message") from None
    raise ConnectionError("connection closed")


class Leader:
    """Decides, by what all hosts report, when training starts and how the job ends."""

    def __init__(self, cluster: Cluster):
        self.cluster = cluster  # whose group, on the leader's host, is the training's
        self.members: dict[str, asyncio.StreamWriter] = {}  # hosts that have come, and not left
        self.reports: dict[str, dict] = {}  # the last one of each that has come: see Host
        self.since: dict[str, float] = {}  # when `lasts` was first asked of something
        self.word = {"start": False, "stop": False, "end": None, "exit": False}  # for all hosts
        self.told_at = 0.0

    def absent(self) -> set[str]:
        """Hosts that have not come."""
        return {*sum(self.cluster.groups.values(), [])} - {*self.reports}

    def unfinished(self) -> set[str]:
        """Hosts whose processes may be running, those that may come yet among them."""
        return self.absent() | {h for h in self.members if not self.reports[h]["stopped"]}

    def tell(self, **news) -> None:
        """Tell all hosts what to do; `end`: whether the job is completed, and the reason."""
        self.word.update(news)
        self.told_at = time.monotonic()
        for writer in self.members.values():
            send(writer, self.word)

    def decide(self, completed: bool, reason: str) -> None:
        """Settle how the job ends; what comes later can only turn a success into a failure."""
        if not self.word["end"] or (self.word["end"][0] and not completed):
            self.tell(end=[completed, reason[:1000]])

    def lasts(self, what: str, seconds: float) -> bool:
        """Whether something that is so now has been so for some seconds."""
        return time.monotonic() - self.since.setdefault(what, time.monotonic()) > seconds

    async def lead(self) -> list:
        """Lead the hosts to the job's end; return whether it is completed, and the reason."""
        while not self.word["end"]:
            self.judge()
            if time.monotonic() > self.told_at + BEAT_SECONDS:
                self.tell()  # a sign of life, which all hosts answer
            await asyncio.sleep(TICK_SECONDS)
        # SageMaker waits for all hosts of a job that has not failed, and one that hangs now would
        # be billed until MaxRuntimeInSeconds. So first all stop their processes, then all leave.
        began = time.monotonic()
        for exit in (False, True):
            self.tell(exit=exit)
            deadline = time.monotonic() + GOODBYE_SECONDS
            while late := {*self.members} if exit else self.unfinished():
                if time.monotonic() > deadline:
                    where = self.cluster.where(*late)
                    self.decide(False, f"{where} did not end when the training had ended.")
                    break
                await asyncio.sleep(TICK_SECONDS)
        who = f"all hosts but {', '.join(sorted(late))}" if late else "all hosts"
        seconds = time.monotonic() - began
        print(f"hetero: {who} have signed off {seconds:.2f} s after the job's end", flush=True)
        return self.word["end"]

    def judge(self) -> None:
        """Apply the rules by which the training starts and stops, and the job ends."""
        absent, reports = self.cluster.where(*self.absent()), [*self.reports.values()]
        start, stop = not absent, any(report["sigterm"] for report in reports)
        if start > self.word["start"] or stop > self.word["stop"]:
            self.tell(start=start, stop=stop)  # some may not have got their SIGTERM yet
        failures = [report["failure"] for report in reports if report["failure"]]
        for group, hosts in self.cluster.groups.items():
            lost = [self.reports.get(host, {}).get("server") for host in hosts]
            if group != self.cluster.group and all(lost):
                failures.append([False, *lost[0]])
                failures[-1][2] += f" No host of {group} is left."
        where = {rank: report["host"] for report in reports for rank in report["running"]}
        running = [f"rank {rank} on {self.cluster.where(where[rank])}" for rank in sorted(where)]
        # The first that has failed by itself, or else the first that was cut off from another.
        was_cut_off, _, reason = min(failures, default=[True, 0, ""])
        if stop:  # ranks may be writing their checkpoints
            is_time = absent or self.lasts("stop", SIGTERM_SECONDS)
            reason = f"The job was stopped (SIGTERM). {reason}".strip()
        elif failures:
            patience = CAUSE_SECONDS if was_cut_off else SETTLE_SECONDS
            is_time = self.lasts(f"failure {was_cut_off}", patience)
        else:
            is_time = absent and self.lasts("absent", JOIN_SECONDS)
            reason = f"{absent} did not come up within {JOIN_SECONDS} s."
        if absent and stop:
            reason += f" Not there yet: {absent}."
        elif start and was_cut_off and running:
            reason += f" Still running: {', '.join(running)}."
        if is_time or not (absent or running):
            self.decide(start and not failures and not running, reason)

    async def meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Hear a host as long as it is there; refuse a stranger, and print why once in 10 s."""
        try:
            report, why = await receive(reader, HELLO_SECONDS), ""
            if not hmac.compare_digest(ascii(report.get("token")), ascii(TOKEN)):
                why = "wrong token"
            elif report.get("host") not in [*self.absent()]:  # which nothing sent can break
                why = "a host that is not awaited"
        except (OSError, RecursionError, asyncio.CancelledError) as error:  # nested; the end
            why = str(error) or "the job has ended"
        if why:
            send(writer, {"refused": why})
            writer.close()
            if why not in self.since or self.lasts(why, 10):
                self.since[why] = time.monotonic()
                address = (writer.get_extra_info("peername") or ["?"])[0]
                print(f"hetero: refused a connection from {address}: {why}", flush=True)
            return
        host = report["host"]
        self.members[host] = writer
        send(writer, self.word)
        try:
            while True:
                self.reports[host] = report
                report = await receive(reader, LOST_SECONDS)
        except (OSError, asyncio.CancelledError) as error:  # the latter at the end, if it hangs
            del self.members[host]
            writer.close()
            if isinstance(error, TimeoutError) or not self.word["exit"]:
                self.decide(False, f"The launcher on {self.cluster.where(host)} is gone: {error}.")


class Host:
    """This host's part of the job: its processes, and what it reports of them to the leader."""

    def __init__(self, cluster: Cluster, leader: str, ranks: int, is_needed: bool):
        self.cluster, self.here, self.leader = cluster, cluster.where(cluster.host), leader
        self.ranks, self.is_needed = ranks, is_needed
        self.tasks: list[asyncio.Future] = []
        self.processes: list[Process] = []  # that may be running
        self.until_sigterm: list[Process] = []  # the ranks among them that have not got it
        self.writer: asyncio.StreamWriter | None = None
        self.report = {"token": TOKEN, "host": cluster.host, "sigterm": False, "stopped": False}
        # Ranks that have not ended. The first failure here: whether a rank was cut off, when, and a
        # sentence. The data server that is left alone: when, and a sentence.
        running = [*range(cluster.rank * ranks, (cluster.rank + 1) * ranks)]
        self.report |= {"running": running, "failure": None, "server": None}

    def say(self, **news) -> None:
        """Report to the leader, if there is a connection yet."""
        self.report.update(news)
        if self.writer:
            send(self.writer, self.report)

    def say_failure(self, sentence: str, was_cut_off: bool = False) -> None:
        """Report what has gone wrong here, unless something else had before."""
        failure = [was_cut_off, time.time(), sentence]
        self.say(failure=min(failure, self.report["failure"] or failure))

    async def take_part(self, command: list[str], server: list[str] | None) -> list:
        """Do what the leader says; return whether the job is completed, and the reason."""
        loop, waiting = asyncio.get_running_loop(), [*range(self.ranks)]
        loop.add_signal_handler(signal.SIGTERM, lambda: self.say(sigterm=True))
        if server:
            self.tasks.append(loop.create_task(self.serve(server)))
        word = {"end": None, "exit": False, "refused": ""}
        try:
            reader = await self.join()
            while not word["exit"]:
                word |= await receive(reader, LOST_SECONDS)
                if word["refused"]:
                    raise ConnectionError(f"refused, {word['refused']}")
                while waiting and word["start"] and not word["stop"]:
                    self.tasks.append(loop.create_task(self.train(command, waiting.pop(0))))
                while self.until_sigterm and word["stop"]:  # data servers stay for the last steps
                    self.until_sigterm.pop().popen.terminate()
                for task in self.tasks:  # has it failed? Such as by a command that is not there
                    if task.done() and not task.cancelled() and (error := task.exception()):
                        self.say_failure(f"The launcher on {self.here} failed: {error}.")
                if word["end"]:
                    await self.stop_all()
                self.say(stopped=bool(word["end"]))
        except OSError as error:
            if not word["end"] or word["end"][0]:
                leader = self.cluster.where(self.leader)
                word["end"] = [False, f"{self.here} lost the leader, {leader}: {error}."]
        await self.stop_all()
        if self.writer:
            self.writer.close()
        return word["end"]

    async def join(self) -> asyncio.StreamReader:
        """Connect with the leader, which may come up later than this host, and say hello."""
        address = self.cluster.address(self.leader), self.cluster.base_port
        deadline = time.monotonic() + JOIN_SECONDS
        while not self.writer:
            try:
                connecting = asyncio.open_connection(*address, limit=LONGEST_LINE)
                reader, self.writer = await asyncio.wait_for(connecting, HELLO_SECONDS)
            except (OSError, asyncio.TimeoutError) as error:  # not there yet, or too busy
                if time.monotonic() > deadline or self.report["sigterm"]:
                    raise ConnectionError(f"not there, {error}") from None
                await asyncio.sleep(0.2)
        self.say()
        return reader

    async def stop_all(self) -> None:
        """SIGTERM for all that runs here, and SIGKILL after STOP_SECONDS."""
        for task in self.tasks:
            task.cancel()
        for process in self.processes:
            process.popen.terminate()
        await asyncio.gather(*(process.ended(STOP_SECONDS) for process in self.processes))

    async def train(self, command: list[str], local_rank: int) -> None:
        """Run a rank to its end."""
        environment = rank_environment(self.cluster, local_rank, self.ranks)
        name = f"rank {environment['RANK']}" if self.ranks > 1 else ""
        process = Process(command, environment, name)
        self.processes.append(process)
        self.until_sigterm.append(process)
        await process.ended()
        how, was_cut_off = process.describe_end()
        if process.popen.returncode:
            self.say_failure(f"On {self.here}, {how}.", was_cut_off)
        self.report["running"].remove(int(environment["RANK"]))
        self.say()

    async def serve(self, command: list[str]) -> None:
        """Keep a data server running: start it again when it ends, but not too often."""
        failures, how = 0, ""
        while failures <= RESTARTS:
            if failures:
                pause = 2 ** (failures - 1)
                print(f"hetero: {how}; restart in {pause} s", flush=True)
                await asyncio.sleep(pause)
            began, server = time.monotonic(), Process(command, {})
            self.processes.append(server)
            await server.ended()
            self.processes.remove(server)
            how, _ = server.describe_end()
            failures = 1 if time.monotonic() - began > HEALTHY_SECONDS else failures + 1
        reason = f"On {self.here}, {how}, {failures} times."
        print(f"hetero: {reason} It is left alone.", flush=True)
        self.say(server=[time.time(), reason])
        if self.is_needed:
            self.say_failure(f"{reason} The job cannot do without it.")


def run(
    cluster: Cluster,
    training_group: str,
    commands: dict[str, list[str]],
    ranks: int = 1,
    beside: list[str] | None = None,
    needed: Collection[str] = (),
) -> None:
    """Run this host's part of the job, and exit with status 1 if the job fails.

    commands: what the hosts of each group run. That of `training_group`, `ranks` times on each,
    starts when all hosts are there, and its end is the job's. The others serve until then. A server
    that ends is started again, and at last left alone, unless it was the last of its group, or on a
    host that is `needed`. beside: a server that the training hosts run, too.
    """
    who = f"host={cluster.host} group={cluster.group} instance_type={cluster.instance_type}"
    print(who, flush=True)
    # The log's last line, after a failure's sentence: readers of the log see that it is complete.
    atexit.register(print, f"host={cluster.host} ends", flush=True)
    groups, known = sorted(cluster.groups), sorted(commands)
    if training_group not in groups:
        fail(f"No instance group is named {training_group!r}, the one to train, among {groups}.")
    if unknown := [group for group in groups if group not in commands]:
        fail(f"launcher.py has commands for {known}, but none for {unknown} among {groups}.")
    if not TOKEN and sum(map(len, cluster.groups.values())) > 1:
        fail("The job has no token: put HETERO_TOKEN, a random text, into the job's environment.")
    trains, leader_host = cluster.group == training_group, cluster.groups[training_group][0]
    command = commands[cluster.group]
    server = beside if trains else command

    async def take_part() -> list:
        host = Host(cluster, leader_host, ranks if trains else 0, cluster.host in needed)
        if cluster.host != leader_host:
            return await host.take_part(command, server)
        leader, address = Leader(cluster), (cluster.bind_address, cluster.base_port)
        await asyncio.start_server(leader.meet, *address, backlog=512, limit=LONGEST_LINE)
        leading = asyncio.ensure_future(leader.lead())
        leader.decide(*await host.take_part(command, server))  # as it has decided, in most cases
        return await leading

    try:
        completed, reason = asyncio.run(take_part())
    except OSError as error:  # such as a port that is taken
        completed, reason = False, f"The launcher on {cluster.where(cluster.host)} failed: {error}."
    if not completed:
        fail(reason)
