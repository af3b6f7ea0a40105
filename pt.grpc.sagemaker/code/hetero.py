"""Runtime of a SageMaker training job over several instance groups: one file, standard library
only.

SageMaker starts the same entry point on every host and bills until the last host has exited. This
file gives the entry point (launcher.py) three things:

Topology: `read_cluster()` says which host this is, in which group, and where the others are.

Supervision: `run()` starts this host's processes, passes their output on, forwards SIGTERM to the
training, restarts a data server that ends by itself, and kills what is left.

Completion: all hosts end together. Each launcher keeps a connection to the leader's launcher, on
the first host of the training group. The leader has training started once every host is there,
and tells all hosts the outcome: completed when training has ended well on every training host;
failed, with a sentence that says what failed where, when it has not, when a training host is lost,
or when no data host is left. A host that loses the leader ends too. The sentence goes to
/opt/ml/output/failure, from where SageMaker takes the job's FailureReason.

A process that dies is noticed at once, a host that falls silent after LOST_SECONDS; hosts may come
up JOIN_SECONDS apart. Connections prove that they know the job's token (HMAC-SHA256 over fresh
nonces), which the notebook puts into the job's environment as HETERO_TOKEN.
"""

import hashlib
import hmac
import json
import os
import re
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

BASE_DIR = Path(os.environ.get("SAGEMAKER_BASE_DIR", "/opt/ml"))
BASE_PORT = 7710  # the leader listens here; launcher.py hands out the ports above it
JOIN_SECONDS = 600  # hosts load the image and their data, and not equally fast
BEAT_SECONDS, LOST_SECONDS = 2, 20
STOP_SECONDS = 5  # from SIGTERM to SIGKILL for what is left when the job ends
SIGTERM_SECONDS = 100  # SageMaker kills 120 s after SIGTERM
HANDSHAKE_SECONDS, MOST_STRANGERS = 5, 64
LONGEST_LINE, LONGEST_ERROR = 8192, 500  # a character can take 6 bytes in JSON
RESTARTS = 3  # of a data server, after pauses of 1, 2 and 4 s


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

    def address(self, host: str) -> str:
        """Where `host` can be reached."""
        return self.addresses.get(host, host)

    @property
    def bind_address(self) -> str:
        """Where servers on this host listen."""
        return self.addresses.get(self.host, "0.0.0.0")

    def where(self, host: str) -> str:
        """`host` with its group, for messages."""
        return f"{host} ({next(g for g, hosts in self.groups.items() if host in hosts)})"


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


def write_failure(sentence: str) -> None:
    """Print the sentence and leave it where SageMaker looks for it; it shows 1,024 characters."""
    print(f"hetero: {sentence}", flush=True)
    (BASE_DIR / "output").mkdir(parents=True, exist_ok=True)
    (BASE_DIR / "output" / "failure").write_text(sentence[:1024])


def fail(sentence: str) -> None:
    """End this host, and with it the job, with `sentence` as the FailureReason."""
    write_failure(sentence)
    sys.exit(1)


# ---------------------------------------------------------------------------------- supervision


class Child:
    """A process in a session of its own, whose output passes through ours."""

    def __init__(self, command: list[str], environment: dict[str, str]):
        self.command, self.environment = command, {**os.environ, **environment}
        self.restarts, self.restart_at = 0, 0.0
        self.reported = self.told_to_stop = False
        self.start()

    def start(self) -> None:
        self.error = ""
        # By way of a shell, so that a command that is not there is a process that fails.
        self.process = subprocess.Popen(
            ["/bin/sh", "-c", 'exec "$@"', "sh", *self.command],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.reader = threading.Thread(target=self._pass_output_on, daemon=True)
        self.reader.start()

    def _pass_output_on(self) -> None:
        for line in self.process.stdout:
            sys.stdout.buffer.write(line)
            sys.stdout.flush()
            # Kept for the FailureReason: the last "SomeError: text" or "script.py: error: text",
            # torchrun's own report aside.
            text = re.sub(r"^\[rank\d+\]:\s*", "", line.decode("utf-8", "replace")).strip()
            error = re.match(r"([\w.]*(Error|Exception)\b|\S+\.py: error: )", text)
            if error and "ChildFailedError" not in text:
                self.error = text[:LONGEST_ERROR].rstrip(".")

    def describe_exit(self) -> str:
        """How the process ended, with the last error that it printed."""
        self.reader.join(timeout=1)
        code = self.process.returncode
        how = f"was killed by signal {-code}" if code < 0 else f"exited with status {code}"
        if code in (126, 127):
            return f"{self.command[0]} could not be run ({how})"
        script = next((word for word in self.command if word.endswith(".py")), self.command[0])
        return f"{script} {how}" + (f": {self.error}" if self.error else "")

    def restart(self) -> bool:
        """Start a service that has ended again, after a pause; False: it has ended too often."""
        if self.restarts == RESTARTS:
            return False
        now, pause = time.monotonic(), 2**self.restarts
        if not self.restart_at:
            self.restart_at = now + pause
            self.kill(signal.SIGKILL)  # what it has started, which may still hold its port
            print(f"hetero: {self.describe_exit()}; restart in {pause} s", flush=True)
        elif now >= self.restart_at:
            self.restarts, self.restart_at = self.restarts + 1, 0.0
            self.start()
        return True

    def kill(self, number: int) -> None:
        """Send a signal to the process and those that it started in its session's group."""
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            return  # nobody left


def stop_all(children: list[Child]) -> None:
    """SIGTERM, and SIGKILL after STOP_SECONDS for what is left."""
    for child in children:
        child.kill(signal.SIGTERM)
    deadline = time.monotonic() + STOP_SECONDS
    while time.monotonic() < deadline and any(c.process.poll() is None for c in children):
        time.sleep(0.02)
    for child in children:
        child.kill(signal.SIGKILL)
        child.process.wait()
        child.reader.join(timeout=1)


# ----------------------------------------------------------------------------------- completion


class Link:
    """JSON objects, one a line, over a socket: of bounded length, with deadlines."""

    def __init__(self, connection: socket.socket):
        self.socket, self.received, self.lock = connection, b"", threading.Lock()

    def send(self, **message) -> None:
        with self.lock:
            self.socket.settimeout(LOST_SECONDS)
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, seconds: float) -> dict:
        """The next message. TimeoutError: none in time. ConnectionError: gone, or not one of us."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self.received:
            if not select.select([self.socket], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError(f"no message for {seconds:.0f} s")
            data = self.socket.recv(4096)
            if not data:
                raise ConnectionError("connection closed")
            self.received += data
            if len(self.received) > LONGEST_LINE:
                raise ConnectionError("a line that is too long")
        line, self.received = self.received.split(b"\n", 1)
        try:
            return dict(json.loads(line))
        except (ValueError, TypeError, RecursionError):
            raise ConnectionError("a line that is not a JSON object") from None


def sign(token: str, *words: str) -> str:
    text = json.dumps(words)  # ASCII, whatever a stranger sends, and without ambiguity
    return hmac.new(token.encode(), text.encode(), hashlib.sha256).hexdigest()


class Leader:
    """Hears from every host's launcher and decides how the job ends. A thread per connection."""

    def __init__(self, cluster: Cluster, training_hosts: list[str], token: str):
        self.cluster, self.training_hosts, self.token = cluster, set(training_hosts), token
        self.hosts = {host for hosts in cluster.groups.values() for host in hosts}
        self.awaited, self.lost, self.finished = set(self.hosts), set(), set()
        self.links: dict[str, Link] = {}
        self.outcome: dict = {}
        self.strangers, self.refused_at = 0, 0.0
        self.lock = threading.RLock()
        self.join_deadline = time.monotonic() + JOIN_SECONDS
        address = (cluster.bind_address, cluster.base_port)
        self.socket = socket.create_server(address, backlog=512)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            connection, peer = self.socket.accept()
            with self.lock:
                self.strangers += 1
                crowded = self.strangers > MOST_STRANGERS
            if crowded:  # a host of ours that is turned away comes again
                self._refuse(connection, peer, "too many at once")
            else:
                threading.Thread(target=self._serve, args=(connection, peer), daemon=True).start()

    def _refuse(self, connection: socket.socket, peer: tuple, why: str) -> None:
        connection.close()
        with self.lock:
            self.strangers -= 1
            if time.monotonic() - self.refused_at > 10:
                self.refused_at = time.monotonic()
                print(f"hetero: refused a connection from {peer[0]}: {why}", flush=True)

    def _serve(self, connection: socket.socket, peer: tuple) -> None:
        link, nonce = Link(connection), secrets.token_hex(16)
        try:
            link.send(nonce=nonce)
            hello = link.receive(HANDSHAKE_SECONDS)
            host, theirs = str(hello.get("host")), str(hello.get("nonce"))
            expected = sign(self.token, "join", host, nonce, theirs)
            if not hmac.compare_digest(expected, ascii(hello.get("mac")).strip("'")):
                raise ConnectionError("wrong token")
            link.send(mac=sign(self.token, "welcome", host, nonce, theirs))
        except OSError as error:
            return self._refuse(connection, peer, str(error))
        with self.lock:
            if host not in self.awaited:
                return self._refuse(connection, peer, f"{host} is not awaited")
            self.strangers -= 1
            self.awaited.discard(host)
            self.links[host] = link
            if self.outcome:
                self._broadcast(**self.outcome)
            elif not self.awaited:
                self._broadcast(start=True)
        try:
            while True:
                self._hear(host, link.receive(LOST_SECONDS))
        except OSError as error:
            with self.lock:
                del self.links[host]
                self._lose(host, f"The launcher on {self.cluster.where(host)} is gone: {error}.")
        connection.close()

    def _hear(self, host: str, message: dict) -> None:
        with self.lock:
            if "failed" in message:
                self._lose(host, f"On {self.cluster.where(host)}, {message['failed']}.")
            elif "finished" in message:
                self.finished.add(host)
                if self.finished >= self.training_hosts:
                    self.decide(completed=True, reason="Training has ended on every host.")

    def _lose(self, host: str, reason: str) -> None:
        """The job fails with a training host, or with the last of the others."""
        self.lost.add(host)
        if host in self.training_hosts:
            self.decide(completed=False, reason=reason)
        elif self.hosts - self.training_hosts <= self.lost:
            self.decide(completed=False, reason=f"{reason} No data host is left.")
        elif not self.outcome:
            print(f"hetero: {reason} The job goes on with the other data hosts.", flush=True)

    def decide(self, completed: bool, reason: str) -> None:
        """Settle how the job ends, unless that is settled already, and tell all hosts."""
        with self.lock:
            if not self.outcome:
                self.outcome = {"completed": completed, "reason": reason[:1000]}
                self._broadcast(**self.outcome)

    def _broadcast(self, **message) -> None:
        for link in list(self.links.values()):
            try:
                link.send(**message)
            except OSError:
                continue  # the thread that reads from this link notices too, and acts

    def beat(self) -> None:
        """Called from the main loop every BEAT_SECONDS: a launcher that hangs must fall silent."""
        with self.lock:
            self._broadcast(beat=True)
            if self.awaited and time.monotonic() > self.join_deadline:
                absent, self.awaited = sorted(self.awaited), set()
                for host in absent:
                    where = self.cluster.where(host)
                    self._lose(host, f"{where} did not come up within {JOIN_SECONDS} s.")
                self._broadcast(start=True)

    def wait_for_goodbyes(self) -> list[str]:
        """Wait until the other hosts have stopped their processes and closed their connections.

        Returns the hosts that have not, after a little longer than that should take.
        """
        deadline = time.monotonic() + STOP_SECONDS + 2
        while (left := self.links.keys() - {self.cluster.host}) and time.monotonic() < deadline:
            time.sleep(0.01)
        return sorted(left)


def connect(cluster: Cluster, leader: str, token: str) -> Link | None:
    """Connect to the leader's launcher; None when it is not there yet or turns us away."""
    nonce = secrets.token_hex(16)
    address = (cluster.address(leader), cluster.base_port)
    try:
        link = Link(socket.create_connection(address, HANDSHAKE_SECONDS))
    except OSError:
        return None
    try:
        theirs = str(link.receive(HANDSHAKE_SECONDS).get("nonce"))
        join = sign(token, "join", cluster.host, theirs, nonce)
        link.send(host=cluster.host, nonce=nonce, mac=join)
        answer = link.receive(HANDSHAKE_SECONDS).get("mac")
        known = answer == sign(token, "welcome", cluster.host, theirs, nonce)
    except OSError:
        known = False
    if not known:
        link.socket.close()
    return link if known else None


def run(
    cluster: Cluster,
    training_group: str,
    training: list[str] | None = None,
    service: list[str] | None = None,
    environment: dict[str, str] | None = None,
) -> int:
    """Run this host's part of the job; return the launcher's exit status, 0 or 1.

    training: command for a host of `training_group`. It starts when all hosts are there, and its
        end is the job's. service: command that serves the training until then, and is restarted
        when it ends by itself. environment: variables for both, besides this process's.
    """
    here, leader = cluster.where(cluster.host), cluster.groups[training_group][0]
    who = f"host={cluster.host} group={cluster.group} instance_type={cluster.instance_type}"
    print(who, flush=True)
    token = os.environ.get("HETERO_TOKEN", "")
    if not token and sum(map(len, cluster.groups.values())) > 1:
        fail("The job has no token: put HETERO_TOKEN, a random text, into the job's environment.")
    sigterm_at: list[float] = []
    signal.signal(signal.SIGTERM, lambda *_: sigterm_at.append(time.monotonic()))

    trainer = server = lead = link = None
    outcome, failed = {}, ""
    started, next_beat, ended = time.monotonic(), 0.0, None
    try:
        if cluster.host == leader:
            lead = Leader(cluster, cluster.groups[training_group], token)
        if service:
            server = Child(service, environment or {})

        while not outcome and not failed:
            now = time.monotonic()

            # 1. The connection to the leader, and heartbeats both ways.
            if link is None:
                link, heard_at = connect(cluster, leader, token), time.monotonic()
                if link is None and now - started > JOIN_SECONDS:
                    failed = f"{here} could not reach the leader, {cluster.where(leader)}."
            if now >= next_beat:
                next_beat = now + BEAT_SECONDS
                if lead:
                    lead.beat()
                if link:
                    link.send(beat=True)

            # 2. What the leader says. This wait paces the loop.
            message = {}
            try:
                if link is None:
                    time.sleep(0.2)
                else:
                    message, heard_at = link.receive(0.05), now
            except TimeoutError:
                if now - heard_at > LOST_SECONDS:
                    raise ConnectionError(f"no word for {LOST_SECONDS} s") from None
            if "completed" in message:
                outcome = message
            elif "start" in message and training and not trainer:
                trainer = Child(training, environment or {})

            # 3. How our processes do.
            if trainer and not trainer.reported and trainer.process.poll() is not None:
                trainer.reported, ended = True, now
                if trainer.process.returncode == 0:
                    link.send(finished=True)
                else:
                    link.send(failed=trainer.describe_exit())
            if server and link and not server.reported and server.process.poll() is not None:
                server.reported = not server.restart()
                if server.reported:
                    link.send(failed=f"{server.describe_exit()}, {RESTARTS + 1} times")

            # 4. SIGTERM: the job is being stopped, or its spot instances interrupted. The training
            #    hears of it and may write a checkpoint; data servers stay, so that it can.
            if sigterm_at and trainer and not trainer.told_to_stop:
                trainer.told_to_stop = True
                trainer.process.send_signal(signal.SIGTERM)
            elif sigterm_at and (link is None or (training and not trainer)):
                failed = f"{here} was stopped (SIGTERM) before training began."
            elif sigterm_at and now - sigterm_at[0] > SIGTERM_SECONDS:
                failed = f"{here} was stopped (SIGTERM), and the training did not end."
    except (ConnectionError, TimeoutError) as error:
        failed = f"{here} lost the leader, {cluster.where(leader)}: {error}."
    except OSError as error:  # such as a port that is taken
        failed = f"The launcher on {here} failed: {error}."
    finally:
        if failed and lead:
            lead.decide(completed=False, reason=failed)  # so that all hosts say the same
        stop_all([child for child in (trainer, server) if child])
        if link:
            link.socket.close()

    if lead:
        silent = lead.wait_for_goodbyes()
        who = f"all hosts but {', '.join(silent)}" if silent else "all hosts"
        if ended:
            seconds = time.monotonic() - ended
            print(f"hetero: {who} have signed off {seconds:.2f} s after training", flush=True)
    if not outcome.get("completed"):
        write_failure(failed or outcome["reason"])
        return 1
    return 0
