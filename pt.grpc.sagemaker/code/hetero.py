"""Runtime of a SageMaker training job over several instance groups. Standard library only.

SageMaker starts the same entry point on every host, and bills until the last host has exited. This
file gives the entry point, launcher.py, three things:

Topology: `read_cluster()` says which host this is, in which group, and where the others are.

Supervision: `run()` starts this host's process, passes its output on, forwards SIGTERM to the
training, restarts a data server that ends by itself, and kills what is left.

Completion: all hosts end together. Each launcher has a connection to the leader, on the training
group's first host, which has training started once all are there, and tells them how the job ends.
The sentence that says what failed where goes to /opt/ml/output/failure on every host: SageMaker's
FailureReason. Connections prove that they know the job's token, the environment's HETERO_TOKEN.

The PyTorch example's README lists every way that a job can end.
"""

import asyncio
import atexit
import contextlib
import hashlib
import hmac
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Awaitable, Collection
from dataclasses import dataclass, field
from pathlib import Path

import pulse

BASE_DIR = Path(os.environ.get("SAGEMAKER_BASE_DIR", "/opt/ml"))
BASE_PORT = 7710  # the leader listens here; launcher.py hands out the ports above it
JOIN_SECONDS = 600  # hosts load the image and their data, and not equally fast
BEAT_SECONDS, LOST_SECONDS = 2, 20  # between signs of life; a launcher without any is lost
STOP_SECONDS = 5  # from SIGTERM to SIGKILL for what still runs when the job has ended
SIGTERM_SECONDS = 100  # for the training to end when the job is stopped: SageMaker kills at 120
RESTARTS, HEALTHY_SECONDS = 3, 60  # of a data server in a row, and when it counts as well again
SETTLE_SECONDS = 1  # for several hosts to say what they know of a failure
HANDSHAKE_SECONDS, MOST_STRANGERS = 5, 64
LONGEST_LINE = 8192  # bytes; of the 1000 characters of a reason each can take 6 in JSON
# What Python or argparse says last; torchrun's own ChildFailedError comes after that.
ERROR_LINE = re.compile(
    r"^(?:\[rank\d+\]: *)?((?!\S*ChildFailed)[\w.]*(?:Error|Exception)\b.*|\S+\.py: error: .*)$",
    re.MULTILINE,
)


# ------------------------------------------------------------------------------------- topology


@dataclass(frozen=True)
class Cluster:
    """What /opt/ml/input/config/resourceconfig.json says of the hosts, named algo-1, algo-2, ..."""

    host: str
    group: str
    instance_type: str
    groups: dict[str, list[str]]  # group -> its hosts, by number
    network_interface: str
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

    def address(self, host: str) -> str:
        """Where `host` can be reached."""
        return self.addresses.get(host, host)

    def group_of(self, host: str) -> str:
        """The instance group of `host`."""
        return next(group for group, hosts in self.groups.items() if host in hosts)

    def where(self, host: str) -> str:
        """`host` with its group, for messages."""
        return f"{host} ({self.group_of(host)})"


def read_cluster(base_dir: Path = BASE_DIR) -> Cluster:
    """Read resourceconfig.json; a homogeneous job has one group, named homogeneousCluster."""
    config = json.loads((base_dir / "input" / "config" / "resourceconfig.json").read_text())
    # The only trace of runs on one machine: loopback addresses and a range of ports for the job.
    local = json.loads(os.environ.get("LOCAL_SAGEMAKER", "{}"))
    return Cluster(
        host=config["current_host"],
        group=config["current_group_name"],
        instance_type=config["current_instance_type"],
        groups={
            group["instance_group_name"]: sorted(group["hosts"], key=lambda h: (len(h), h))
            for group in config["instance_groups"]
        },
        network_interface=config["network_interface_name"],
        **local,
    )


def arguments() -> list[str]:
    """The job's hyperparameters as command-line arguments, `["--batch-size", "128", ...]`.

    SDK v2 passes them as arguments, SDK v3 with SourceCode(command=...) as JSON in SM_HPS.
    """
    if sys.argv[1:]:
        return sys.argv[1:]
    pairs = json.loads(os.environ.get("SM_HPS", "{}")).items()
    return [w for k, v in pairs for w in (f"--{k}", v if isinstance(v, str) else json.dumps(v))]


def fail(sentence: str) -> None:
    """End this host, and with it the job, with `sentence` as the FailureReason."""
    (BASE_DIR / "output").mkdir(parents=True, exist_ok=True)
    (BASE_DIR / "output" / "failure").write_text(sentence[:1024])  # SageMaker shows no more
    sys.exit(f"hetero: {sentence}")


# ---------------------------------------------------------------------------------- supervision


class Child:
    """This host's process, in a session of its own; its output passes through ours."""

    def __init__(self, command: list[str], pulses: Path):
        self.name = next((word for word in command if word.endswith(".py")), command[0])
        self.printed = b""  # the end of it
        self.process = subprocess.Popen(
            command,
            env={**os.environ, "HETERO_PULSES": str(pulses)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.reader = threading.Thread(target=self._pass_output_on, daemon=True)
        self.reader.start()

    def _pass_output_on(self) -> None:
        while data := self.process.stdout.read1():
            sys.stdout.buffer.write(data)
            sys.stdout.flush()
            self.printed = (self.printed + data)[-20_000:]

    def is_running(self) -> bool:
        return self.process.poll() is None

    def describe_exit(self) -> str:
        """How it ended, with the last error that it printed."""
        self.reader.join(timeout=1)
        if self.process.returncode < 0:
            return f"{self.name} was killed by signal {-self.process.returncode}"
        errors = ERROR_LINE.findall(self.printed.decode("utf-8", "replace"))
        last_error = f": {errors[-1][:500].rstrip(' .')}" if errors else ""
        return f"{self.name} exited with status {self.process.returncode}{last_error}"

    def kill(self, number: int) -> None:
        """Send a signal to the process and those that it started, unless in another session."""
        with contextlib.suppress(ProcessLookupError):  # nobody left
            os.killpg(self.process.pid, number)

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL after STOP_SECONDS for what is left."""
        deadline = time.monotonic() + STOP_SECONDS
        self.kill(signal.SIGTERM)
        while self.is_running() and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        self.kill(signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel
            self.process.wait(timeout=1)
        self.reader.join(timeout=1)


# ----------------------------------------------------------------------------------- completion


class Ended(Exception):
    """The job has ended: whether it is completed, and a sentence that says why."""


class Silence(ConnectionError):
    """Nothing has come for longer than it takes any launcher that runs."""


def send(writer: asyncio.StreamWriter, **message) -> None:
    """Send a JSON object on a line."""
    writer.write(json.dumps(message).encode() + b"\n")


async def receive(reader: asyncio.StreamReader, seconds: float) -> dict:
    """Return the next message; raise ConnectionError, with the reason, if none comes in time."""
    try:
        line = await asyncio.wait_for(reader.readline(), seconds)
        if not line:
            raise ConnectionError("connection closed")
        return dict(json.loads(line))
    except asyncio.TimeoutError:
        raise Silence(f"silent for {seconds} s") from None
    except (ValueError, TypeError, RecursionError):  # too long, or not an object
        raise ConnectionError("not a launcher's message") from None


def sign(*words: object) -> str:
    """Prove, to the sender of a nonce among the words, that this host knows the job's token."""
    token = os.environ.get("HETERO_TOKEN", "").encode()
    return hmac.new(token, ascii(words).encode(), hashlib.sha256).hexdigest()


class Leader:
    """Hears from the launchers of all hosts, and decides when training starts and the job ends."""

    def __init__(self, cluster: Cluster, training_group: str, needed: Collection[str]):
        self.cluster, self.training_group, self.needed = cluster, training_group, needed
        self.awaited = {host for hosts in cluster.groups.values() for host in hosts}
        self.members: dict[str, asyncio.StreamWriter] = {}
        self.strangers: list[asyncio.StreamWriter] = []  # the oldest first
        self.refused_at: dict[str, float] = {}
        self.trained: dict[str, str] = {}  # host -> "", or why it ended before its time
        self.without_service: set[str] = set()
        self.failures: dict[str, tuple[float, str]] = {}  # host -> the first one there: when, what
        self.outcome: dict = {}
        self.decided_at = 0.0
        self.stopped: set[str] = set()  # hosts that have no process left, and wait for the others
        self.silent: set[str] = set()  # hosts that hang

    async def lead(self) -> None:
        """Listen, and give a sign of life every BEAT_SECONDS."""

        async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            # Cancelled when the launcher ends, which Python before 3.12 would print as an error.
            with contextlib.suppress(asyncio.CancelledError):
                await self._meet(reader, writer)

        address = self.cluster.bind_address, self.cluster.base_port
        await asyncio.start_server(meet, *address, backlog=512, limit=LONGEST_LINE)
        deadline = time.monotonic() + JOIN_SECONDS
        while True:
            if self.awaited and time.monotonic() > deadline:
                absent = ", ".join(map(self.cluster.where, sorted(self.awaited)))
                self.decide(False, f"{absent} did not come up within {JOIN_SECONDS} s.")
            self._tell_all(beat=True)
            await asyncio.sleep(BEAT_SECONDS)

    def decide(self, completed: bool, reason: str) -> None:
        """Settle how the job ends, unless that is settled already, and tell all hosts."""
        if not self.outcome:
            self.outcome = {"completed": completed, "reason": reason[:1000]}
            self.decided_at = time.monotonic()
            self._tell_all(**self.outcome)

    async def wait_for_goodbyes(self) -> list[str]:
        """Wait until all hosts have stopped their processes, a little longer than that may take.

        Lets those that have exit, waits until they do, and returns the others.
        """
        deadline = self.decided_at + STOP_SECONDS + 5
        while left := {*self.members, *self.awaited} - self.stopped:
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(0.02)
        self._tell_all(exit=True)
        deadline = time.monotonic() + LOST_SECONDS
        while staying := self.members.keys() - left - {self.cluster.host}:
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(0.02)
        # Our own launcher, which waits for this, has nothing to say meanwhile.
        left = sorted(left | staying | self.silent - {self.cluster.host})
        who = f"all hosts but {', '.join(left)}" if left else "all hosts"
        seconds = time.monotonic() - self.decided_at
        print(f"hetero: {who} have signed off {seconds:.2f} s after the job's end", flush=True)
        return left

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Let a connection prove whose it is, and hear it until it ends."""
        self.strangers.append(writer)
        if len(self.strangers) > MOST_STRANGERS:  # a host of ours comes again
            self.strangers.pop(0).transport.abort()
        try:
            nonce = secrets.token_hex(16)
            send(writer, nonce=nonce)
            hello = await receive(reader, HANDSHAKE_SECONDS)
            host, proof = hello.get("host"), ascii(hello.get("proof")).strip("'")
            if not hmac.compare_digest(proof, sign("join", nonce, host)):
                raise ConnectionError("wrong token")
            if host not in self.awaited:
                raise ConnectionError("a host that is not awaited")
        except (OSError, RecursionError) as error:  # the latter is nesting's, in JSON or in `sign`
            if time.monotonic() - self.refused_at.get(str(error), -10) > 10:
                self.refused_at[str(error)] = time.monotonic()
                address = (writer.get_extra_info("peername") or ["?"])[0]
                print(f"hetero: refused a connection from {address}: {error}", flush=True)
            return writer.transport.abort()
        finally:
            if writer in self.strangers:
                self.strangers.remove(writer)
        self.awaited.remove(host)
        self.members[host] = writer
        send(writer, welcome=sign("welcome", hello.get("nonce")))
        if self.outcome:
            send(writer, **self.outcome)
        elif not self.awaited:
            self._tell_all(start=True)
        try:
            while True:
                self._hear(host, await receive(reader, LOST_SECONDS))
        except OSError as error:
            del self.members[host]
            writer.transport.abort()
            if isinstance(error, Silence):
                self.silent.add(host)
            if host not in self.failures:  # it has not said why it ends
                self.decide(False, f"The launcher on {self.cluster.where(host)} is gone: {error}.")

    def _hear(self, host: str, message: dict) -> None:
        group = self.cluster.group_of(host)
        hosts = set(self.cluster.groups[group])
        if "stopped" in message:
            self.stopped.add(host)
        elif "stop" in message:
            self._tell_all(stop=True)  # some may not have got their SIGTERM yet
        elif "over" in message:
            # A process that fails takes those down that are connected with it, on any host: of
            # what is said within a second, the first to have happened is the cause. 0 is first.
            failure = (message["at"], message["over"])
            self.failures[host] = min(failure, self.failures.get(host, failure))
            later = asyncio.get_running_loop().call_later
            later(SETTLE_SECONDS, lambda: self.decide(False, min(self.failures.values())[1]))
        elif "unserved" in message:
            reason = message["unserved"]
            self.without_service.add(host)
            if host in self.needed:
                self.decide(False, f"{reason} The job cannot do without it.")
            elif self.without_service >= hosts and self.training_group != group:
                self.decide(False, f"{reason} No host of {group} is left.")
            else:
                print(f"hetero: {reason} The job goes on without it.", flush=True)
        elif "trained" in message:
            self.trained[host] = message["trained"]
            if self.trained.keys() >= hosts:
                reasons = [reason for reason in self.trained.values() if reason]
                self.decide(not reasons, reasons[0] if reasons else "Training has ended.")

    def _tell_all(self, **message) -> None:
        for writer in self.members.values():
            send(writer, **message)


class Launcher:
    """One host's part of the job: its processes, and its connection to the leader."""

    def __init__(self, cluster: Cluster, training_group: str, pulses: Path):
        self.cluster, self.pulses = cluster, pulses
        self.here, self.leader = cluster.where(cluster.host), cluster.groups[training_group][0]
        self.trains = cluster.group == training_group
        self.training: Child | None = None
        self.children: list[Child] = []
        self.reader: asyncio.StreamReader | None = None
        self.writer: asyncio.StreamWriter | None = None
        self.start, self.sigterm = asyncio.Event(), asyncio.Event()

    async def run(
        self, lead: Leader | None, command: list[str], beside: list[str] | None
    ) -> tuple[bool, str]:
        """Take part until the job has ended; return whether it is completed, and the reason."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.sigterm.set)
        parts = [lead.lead()] if lead else []
        parts += [self.follow_leader(), self.mind_sigterm()]
        parts += [self.report(self.train(command) if self.trains else self.serve(command))]
        parts += [self.report(self.serve(beside))] if self.trains and beside else []
        tasks = [asyncio.ensure_future(part) for part in parts]
        try:
            await asyncio.gather(*tasks)
        except Ended as end:
            completed, reason = end.args
        except Exception as error:  # such as a port that is taken
            traceback.print_exc()
            completed, reason = False, f"The launcher on {self.here} failed: {error}."
        for task in tasks:
            task.cancel()
        if lead:
            if lead.awaited and not lead.outcome:
                reason += f" Not there yet: {', '.join(map(self.cluster.where, lead.awaited))}."
            lead.decide(completed, reason)  # if that was not the leader's own word
        elif self.writer and not completed:
            send(self.writer, over=reason, at=0.0)
        await asyncio.gather(*(child.stop() for child in self.children))
        if self.writer:
            send(self.writer, stopped=True)
        # SageMaker waits for every host of a job that has not failed. So nobody leaves until all
        # can: a host that hangs now would be billed until MaxRuntimeInSeconds.
        if lead:
            left = ", ".join(map(self.cluster.where, await lead.wait_for_goodbyes()))
            if left and completed:
                completed, reason = False, f"{left} did not end when the training had ended."
        elif completed:
            completed, reason = await self.wait_for_exit(reason)
        if self.writer:
            self.writer.close()
            with contextlib.suppress(OSError):  # it is closed at the other end
                await self.writer.wait_closed()
        return completed, reason

    async def wait_for_exit(self, reason: str) -> tuple[bool, str]:
        """Wait for the leader's word that all hosts may exit; return whether it came, and why."""
        try:
            while "exit" not in await receive(self.reader, LOST_SECONDS):
                continue
            return True, reason
        except OSError as error:
            leader = self.cluster.where(self.leader)
            return False, f"{self.here} lost the leader, {leader}: {error}."

    async def follow_leader(self) -> None:
        """Connect to the leader, do as it says, and end with it."""
        try:
            self.reader, self.writer = await self.join()
            while True:
                message = await receive(self.reader, LOST_SECONDS)
                send(self.writer, beat=True)
                if "start" in message:
                    self.start.set()
                if "stop" in message:
                    self.sigterm.set()
                if "completed" in message:
                    raise Ended(message["completed"], message["reason"])
        except OSError as error:
            leader = self.cluster.where(self.leader)
            raise Ended(False, f"{self.here} lost the leader, {leader}: {error}.") from None

    async def join(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to the leader, which may come up later than this host."""
        address = self.cluster.address(self.leader), self.cluster.base_port
        deadline = time.monotonic() + JOIN_SECONDS
        while True:
            try:
                connecting = asyncio.open_connection(*address, limit=LONGEST_LINE)
                reader, writer = await asyncio.wait_for(connecting, HANDSHAKE_SECONDS)
                theirs = (await receive(reader, LOST_SECONDS)).get("nonce")
                nonce, host = secrets.token_hex(16), self.cluster.host
                send(writer, host=host, nonce=nonce, proof=sign("join", theirs, host))
                if (await receive(reader, LOST_SECONDS)).get("welcome") == sign("welcome", nonce):
                    return reader, writer
                raise ConnectionError("not the leader of this job")
            except Silence:  # it is there, since it has accepted the connection, but frozen
                raise
            except (OSError, asyncio.TimeoutError) as error:  # not there yet, or too busy
                if time.monotonic() > deadline:
                    raise ConnectionError(f"{error} for {JOIN_SECONDS} s") from None
            await asyncio.sleep(0.2)

    async def report(self, part: Awaitable[None]) -> None:
        """Run a part; tell the leader if it fails, when there is a connection, and live on.

        If this host just ended, SageMaker would stop those that are still coming up, which may not
        notice, and whose FailureReason would not say why.
        """
        try:
            await part
        except Exception as error:  # such as a command that is not there
            traceback.print_exc()
            while not self.writer:
                await asyncio.sleep(0.05)
            send(self.writer, over=f"The launcher on {self.here} failed: {error}.", at=0.0)

    def begin(self, command: list[str]) -> Child:
        """Start a process, to be stopped at the job's end at the latest."""
        child = Child(command, self.pulses)
        self.children.append(child)
        return child

    async def serve(self, command: list[str]) -> None:
        """Keep a service running: start it again when it ends, unless that happens too often."""
        failures = 0
        while True:
            began, child = time.monotonic(), self.begin(command)
            while child.is_running():
                await asyncio.sleep(0.05)
            child.kill(signal.SIGKILL)  # what it has started, which may hold its port
            self.children.remove(child)
            failures = 1 if time.monotonic() - began > HEALTHY_SECONDS else failures + 1
            if failures > RESTARTS:
                break
            pause = 2 ** (failures - 1)
            print(f"hetero: {child.describe_exit()}; restart in {pause} s", flush=True)
            await asyncio.sleep(pause)
        await self.start.wait()  # and so for the connection
        reason = f"On {self.here}, {child.describe_exit()}, {failures} times."
        send(self.writer, unserved=reason)

    async def train(self, command: list[str]) -> None:
        """Run the training once all hosts are there, and say how it ends."""
        await self.start.wait()
        self.training = child = self.begin(command)
        told: set[tuple[float, str]] = set()
        runs = True
        while runs:
            await asyncio.sleep(0.05)
            runs = child.is_running()
            if not self.sigterm.is_set():
                for when, what in sorted(pulse.failures(self.pulses) - told):
                    reason = f"On {self.here}, in {child.name}, {what}."
                    # A death after another failure, or with torchrun's, is likely its consequence.
                    is_first = runs and not told
                    send(self.writer, over=reason, at=when or (0.0 if is_first else time.time()))
                    told.add((when, what))
        if child.process.returncode == 0:
            send(self.writer, trained="")
        elif self.sigterm.is_set():  # other hosts may still be writing their checkpoints
            reason = f"On {self.here}, stopped by SIGTERM, {child.describe_exit()}."
            send(self.writer, trained=reason)
        else:
            reason = f"On {self.here}, {child.describe_exit()}."
            send(self.writer, over=reason, at=time.time())

    async def mind_sigterm(self) -> None:
        """Let the training hear that the job is being stopped; the data servers stay for it."""
        await self.sigterm.wait()
        if not self.start.is_set() or (self.trains and not self.training):
            raise Ended(False, f"{self.here} was stopped (SIGTERM) before training began.")
        send(self.writer, stop=True)
        if self.trains:
            # Straight to the ranks: torchrun may give them less time than SageMaker does.
            for pid in pulse.processes(self.pulses) or [self.training.process.pid]:
                with contextlib.suppress(ProcessLookupError):  # it has ended
                    os.kill(pid, signal.SIGTERM)
        await asyncio.sleep(SIGTERM_SECONDS)
        late = f"and the training did not end within {SIGTERM_SECONDS} s"
        raise Ended(False, f"{self.here} was stopped (SIGTERM), {late}.")


def run(
    cluster: Cluster,
    training_group: str,
    commands: dict[str, list[str]],
    beside: list[str] | None = None,
    needed: Collection[str] = (),
) -> None:
    """Run this host's part of the job, and exit with status 1 if the job fails.

    commands: what the hosts of each instance group run. That of `training_group` starts when all
    hosts are there, and its end is the job's. The others serve it until then, and are restarted
    when they end by themselves; left alone at last, when a service ends again and again, unless
    its group has no other, or its host is `needed`.
    beside: a service that the hosts of `training_group` run beside the training, if any.
    """
    who = f"host={cluster.host} group={cluster.group} instance_type={cluster.instance_type}"
    print(who, flush=True)
    # The log's last line, after a failure's sentence: readers of the log see that it is complete.
    atexit.register(print, f"host={cluster.host} ends", flush=True)
    groups = sorted(cluster.groups)
    if training_group not in groups:
        fail(
            f"No instance group is named {training_group!r}, the one to train: there are {groups}."
        )
    if unknown := [group for group in groups if group not in commands]:
        fail(
            f"launcher.py has commands for {sorted(commands)}, but none for {unknown} among the "
            f"instance groups {groups}: name the groups so, or add a command."
        )
    if not os.environ.get("HETERO_TOKEN") and sum(map(len, cluster.groups.values())) > 1:
        fail("The job has no token: put HETERO_TOKEN, a random text, into the job's environment.")
    leads = cluster.host == cluster.groups[training_group][0]
    with tempfile.TemporaryDirectory() as pulses:
        launcher = Launcher(cluster, training_group, Path(pulses))
        lead = Leader(cluster, training_group, needed) if leads else None
        completed, reason = asyncio.run(launcher.run(lead, commands[cluster.group], beside))
    if not completed:
        fail(reason)
