"""Checks on all hosts of a job what a later job depends on, and prints one table. A file to copy.

    SourceCode(source_dir="code", command="exec python preflight.py")

Run it on the later job's image and instances, with HETERO_TOKEN, a random text, in the job's
environment. It needs Python only; what it says of GPUs comes from the image's PyTorch or
TensorFlow, and the all-reduce needs PyTorch.

All hosts go through the same checks together, and tell each other what they find. The first host of
the training group prints it. Each line below the table says what failed and what to change; the
first one is the job's FailureReason, and every host exits with status 1. Every wait has an end.
"""

import contextlib
import hmac
import importlib.util
import json
import os
import re
import secrets
import shutil
import signal
import socket
import socketserver
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections import defaultdict
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from http.client import HTTPConnection, HTTPException, HTTPResponse
from http.server import BaseHTTPRequestHandler
from pathlib import Path

TRAINING_GROUP = "dnn_group"  # in a job of several groups; else the only one
SHM_MIB = 64  # a container's default, with which the examples make do
JOIN_SECONDS = 600  # hosts load the image and their data, and not equally fast
RESOLVE_SECONDS, REACH_SECONDS, ANSWER_SECONDS = 120, 10, 5  # names; ports; a line from there
RUN_SECONDS, CHECK_SECONDS = 120, 240  # a process that imports the framework; a whole check
STREAM_SECONDS = 1
LIMIT_SECONDS, STOP_SECONDS = 1100, 60  # of all; after SIGTERM, which SIGKILL follows in 120 s
LONGEST = 1 << 20  # bytes that one host tells another
RESULT = "preflight found: "  # begins a process's result, among the lines that libraries print
COMPATIBILITY = Path("/usr/local/cuda/compat")  # CUDA's libraries for older drivers
BASE_DIR = Path(os.environ.get("SAGEMAKER_BASE_DIR", "/opt/ml"))
FAREWELL = f"host={os.environ.get('SM_CURRENT_HOST', '?')} ends"  # says that the log is complete
SECURITY_GROUP = "the job's security group must allow all traffic from itself"
stopped = threading.Event()  # by SIGTERM: another host has failed, or the job is being stopped


class Cluster:
    """What resourceconfig.json says of the hosts, which are named algo-1, algo-2, ..."""

    def __init__(self):
        config = json.loads((BASE_DIR / "input" / "config" / "resourceconfig.json").read_text())
        # The only trace of runs on one machine: loopback addresses, and ports for the job.
        local = json.loads(os.environ.get("LOCAL_SAGEMAKER", "{}"))
        self.addresses: dict[str, str] = local.get("addresses", {})
        base_port = local.get("base_port", 7710)  # as in hetero/topology.py
        # The launchers' leader; rank 0's store or Horovod's rendezvous; the data hosts.
        self.ports = [base_port, base_port + 1, base_port + 2]
        self.here, self.interface = config["current_host"], config["network_interface_name"]
        self.instance_type = config["current_instance_type"]
        groups = {each["instance_group_name"]: each["hosts"] for each in config["instance_groups"]}
        names = sorted(groups)
        self.groups = {  # host -> its group
            host: name for name in names for host in sorted(groups[name], key=lambda h: (len(h), h))
        }
        training = names[0] if len(names) == 1 else TRAINING_GROUP
        self.training = [host for host, group in self.groups.items() if group == training]
        if not self.training:
            fail(f"No instance group is named {training}, only {names}: set TRAINING_GROUP.")
        self.leader = self.training[0]

    def address(self, host: str) -> str:
        """Where `host` can be reached: on AWS its name resolves."""
        return self.addresses.get(host, host)

    def where(self, host: str) -> str:
        """`host` with its group, for messages."""
        return f"{host} ({self.groups[host]})"


def fail(sentence: str) -> None:
    """End this host, and with it the job, with `sentence` as the FailureReason."""
    (BASE_DIR / "output").mkdir(parents=True, exist_ok=True)
    (BASE_DIR / "output" / "failure").write_text(sentence[:1024])  # SageMaker shows no more
    print(f"preflight: {sentence}\n{FAREWELL}", flush=True)
    os._exit(1)  # at once, whatever other threads wait for


# -------------------------------------------------------------------- what a host finds by itself


def examine(cluster: Cluster, ports: list[int]) -> dict:
    """This host's part of the table, what failed here, and what other checks need to know."""
    ended_well, output = run([sys.executable, __file__, "framework"])
    seen = json.loads(output) if ended_well else {"name": "does not load", "gpus": 0, "cuda": None}
    names, driver = list_gpus()
    told = max(len(names), int(os.environ.get("SM_NUM_GPUS") or 0))
    kind = cluster.instance_type
    mib = shutil.disk_usage("/dev/shm").total >> 20 if os.path.isdir("/dev/shm") else 0
    interfaces = [name for _, name in socket.if_nameindex()]
    try:
        hostname = f"{socket.gethostname()}: {socket.gethostbyname(socket.gethostname())}"
    except OSError:
        hostname = f"{socket.gethostname()}, unresolved"  # not a failure: the examples do without

    cuda = f"CUDA {seen['cuda']}" if seen["cuda"] else "no CUDA"
    change = "take an image for GPUs"
    if seen["cuda"]:
        change = "take an image with an older CUDA, which this driver supports"
        if COMPATIBILITY.is_dir():  # as in AWS's images
            libraries = f"env LD_LIBRARY_PATH={COMPATIBILITY}:$LD_LIBRARY_PATH"
            change = f"put {libraries} before python in the job's command, or {change}"
    problems = {
        f"the framework does not load ({output}): take another image": not ended_well,
        f"{told} GPU(s), driver {driver or 'unknown'}, but {seen['name']} ({cuda}) sees "
        f"{seen['gpus']}: {change}": (ended_well and seen["name"] and told > seen["gpus"]),
        f"{kind} has GPUs, but nvidia-smi lists none: take an image for GPUs": (
            not told and re.match(r"ml\.[gp]\d", kind) and not cluster.addresses
        ),
        f"/dev/shm has {mib} MiB, and the examples need {SHM_MIB}: start fewer worker processes "
        "(hyperparameter workers), or make batches smaller": mib < SHM_MIB,
        f"no network interface is named {cluster.interface}, only {', '.join(interfaces)}: have "
        "the launcher set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to one of these": (
            cluster.interface not in interfaces
        ),
    }
    for port in cluster.ports:
        sentence = f"another program listens on port {port}: take an image that starts none"
        problems[f"{sentence}, or change BASE_PORT in hetero/topology.py"] = port not in ports
    rows = {
        "instance type": kind,
        "GPUs": f"{len(names)} x {names[0]}" if names else "none",
        "driver": driver or "-",
        "framework": seen["name"] or "neither torch nor TF",
        "sees": f"{seen['gpus']} GPUs, {cuda}",
        "vCPUs usable": f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}",
        "/dev/shm": f"{mib} MiB",
        "hostname": hostname,
        "network interface": cluster.interface,
    }
    failed = [sentence for sentence, is_so in problems.items() if is_so]
    return {"rows": rows, "failed": failed, "ports": ports, "framework": seen}


def list_gpus() -> tuple[list[str], str]:
    """The names of the GPUs that nvidia-smi lists, and the version of their driver."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=RUN_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return [], ""
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    gpus = [line.split(", ") for line in lines if line.count(", ") == 1]
    return [name for name, _ in gpus], gpus[0][1] if gpus else ""


def describe_framework() -> dict:
    """Name, CUDA and visible GPUs of PyTorch, or else of TensorFlow."""
    if importlib.util.find_spec("torch"):
        import torch

        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return {"name": f"PyTorch {torch.__version__}", "gpus": gpus, "cuda": torch.version.cuda}
    if importlib.util.find_spec("tensorflow"):
        import tensorflow as tf

        cuda = tf.sysconfig.get_build_info().get("cuda_version")
        gpus = len(tf.config.list_physical_devices("GPU"))
        return {"name": f"TensorFlow {tf.__version__}", "gpus": gpus, "cuda": cuda}
    return {"name": "", "gpus": 0, "cuda": None}


def run(command: list[str], **environment: str) -> tuple[bool, str]:
    """Run a command; whether it ended well, and the result or the error that it printed."""
    with tempfile.TemporaryFile("w+") as file:  # a pipe might be held open by what it has started
        streams = {"stdout": file, "stderr": subprocess.STDOUT, "timeout": RUN_SECONDS}
        try:
            status = subprocess.run(command, env=os.environ | environment, **streams).returncode
        except subprocess.TimeoutExpired:
            status = 1
            print(f"Error: no end within {RUN_SECONDS} s", file=file)
        file.seek(0)
        lines = [line.strip() for line in file if line.strip()] or ["no output"]
    results = [line for line in lines if line.startswith(RESULT)]
    if status == 0 and results:
        return True, results[-1].removeprefix(RESULT)
    print(*lines[-30:], sep="\n", flush=True)
    return False, ([line for line in lines if "Error: " in line] or lines)[-1][:300].rstrip(".")


# ------------------------------------------------------------------------ hosts talk to each other


def sign(*words: str) -> str:
    """Prove that the job's token is known to whom these words are from."""
    token = os.environ.get("HETERO_TOKEN", "").encode()
    return hmac.new(token, json.dumps(words).encode(), "sha256").hexdigest()


class Answer(BaseHTTPRequestHandler):
    """Answers the job's hosts, over HTTP, and no strangers, who do not know the token."""

    timeout = ANSWER_SECONDS
    team: "Team"
    refused: set[str] = set()  # addresses

    def do_POST(self) -> None:
        team, here = self.team, self.team.cluster.here
        body = self.rfile.read(min(int(self.headers["Content-Length"]), LONGEST)).decode()
        if hmac.compare_digest(ascii(self.headers["Proof"]), ascii(sign("ask", here, body))):
            nonce, ask, host, number, part = json.loads(body)
            self.send_response(200)
            self.send_header("Proof", sign("answer", here, nonce))
            self.end_headers()
            if ask == "exchange":
                team.given[number][host] = part
                while len(team.exchanged) <= number:
                    time.sleep(0.02)
                self.wfile.write(json.dumps(team.exchanged[number]).encode())
                team.answered[number].add(host)
            zeros, end = bytes(1 << 20), time.monotonic() + STREAM_SECONDS
            while ask == "bytes" and time.monotonic() < end:
                self.wfile.write(zeros)
        else:
            self.send_error(403)

    def log_error(self, *_: object) -> None:
        address = self.client_address[0]
        if address not in self.refused:
            self.refused.add(address)
            print(f"preflight: {address} connected, but is not of this job", flush=True)

    def log_request(self, *_: object) -> None:
        """Say nothing."""


class Server(socketserver.ThreadingTCPServer):
    """Listens at a port."""

    allow_reuse_address, request_queue_size, daemon_threads = True, 128, True

    def handle_error(self, *_: object) -> None:
        """Say nothing of who hangs up: what is missing is said elsewhere."""


def ask(
    cluster: Cluster, host: str, port: int, what: str, seconds: float, *given: object
) -> HTTPResponse:
    """Return what a host answers at a port, if it does so within so many seconds.

    Raises ConnectionError, which says why it does not, and what to change.
    """
    start, nonce = time.monotonic(), secrets.token_hex(16)
    body = json.dumps([nonce, what, cluster.here, *(given or (0, {}))])
    while True:
        limit, change = seconds, SECURITY_GROUP
        connection = HTTPConnection(cluster.address(host), port, timeout=ANSWER_SECONDS)
        try:
            connection.connect()
            change, sock = "only this job's hosts may listen there", connection.sock
            connection.request("POST", "/", body, {"Proof": sign("ask", host, body)})
            answer = connection.getresponse()
            if answer.getheader("Proof") == sign("answer", host, nonce):
                sock.settimeout(LIMIT_SECONDS if given else ANSWER_SECONDS)
                return answer
            error = "another program answers, or one with another HETERO_TOKEN"
        except socket.gaierror:
            error = f"its name does not resolve within {RESOLVE_SECONDS} s"
            limit, change = RESOLVE_SECONDS, "enable DNS resolution and hostnames in the VPC"
        except (OSError, HTTPException) as reason:
            error = getattr(reason, "strerror", None) or str(reason)
        connection.close()
        if stopped.is_set() or time.monotonic() - start > limit:
            raise ConnectionError(f"{error}: {change}")
        time.sleep(1)


class Team:
    """The hosts that are there. They exchange what they find, through the leader."""

    def __init__(self, cluster: Cluster):
        self.cluster, self.hosts = cluster, {*cluster.groups}
        self.given: dict[int, dict[str, dict]] = defaultdict(dict)  # exchange -> host -> its part
        self.answered: dict[int, set[str]] = defaultdict(set)  # exchange -> hosts
        self.exchanged: list[dict[str, dict]] = []  # the whole of each exchange
        self.open: dict[int, Server] = {}  # the examples' ports, and one that the system gives
        for port in (*cluster.ports, 0):
            with contextlib.suppress(OSError):  # `examine` says that it is taken
                address = cluster.addresses.get(cluster.here, "0.0.0.0"), port
                server = Server(address, type("", (Answer,), {"team": self}))
                self.open[server.server_address[1]] = server
                threading.Thread(target=server.serve_forever, args=[0.05], daemon=True).start()

    def close(self, port: int) -> None:
        """Leave a port to others."""
        if server := self.open.get(port):
            server.shutdown()
            server.server_close()

    def wait(self, hosts: Collection[str], seconds: float) -> None:
        """Wait until all hosts are among these; not for long when the job ends."""
        start = time.monotonic()
        while self.hosts - {self.cluster.leader} - {*hosts}:
            if time.monotonic() > start + (1 if stopped.is_set() else seconds):
                break
            time.sleep(0.02)

    def exchange(self, mine: dict, seconds: float = CHECK_SECONDS) -> dict[str, dict]:
        """What each host gives here, by host; a host that gives nothing in time is left out."""
        cluster, number = self.cluster, len(self.exchanged)
        given = self.given[number]
        if cluster.here == cluster.leader:
            given[cluster.here] = mine
            self.wait(given, seconds)
            self.hosts &= given.keys()
            whole = {host: given[host] for host in cluster.groups if host in self.hosts}
            self.exchanged.append(whole)
            self.wait(self.answered[number], ANSWER_SECONDS)  # as this process may end now
        else:
            here, leader = cluster.where(cluster.here), cluster.where(cluster.leader)
            try:
                to = cluster.leader, cluster.ports[0], "exchange"
                with ask(cluster, *to, JOIN_SECONDS, number, mine) as answer:
                    self.exchanged.append(json.loads(answer.read()))
            except (OSError, HTTPException) as error:
                fail(f"On {here}: {leader} cannot be reached, {error}.")
            except ValueError:  # of an answer without its end
                fail(f"On {here}: {leader} was lost: see its log.")
        return self.exchanged[number]


# ------------------------------------------------------------------- what takes more than one host


def reach(cluster: Cluster, opened: dict[str, list[int]]) -> dict:
    """Whether this host reaches all ports that the others have opened."""
    targets = [(host, port) for host in opened if host != cluster.here for port in opened[host]]

    def try_one(target: tuple[str, int]) -> str:
        host, port = target
        try:
            ask(cluster, host, port, "hello", REACH_SECONDS).close()
        except ConnectionError as error:
            return f"port {port} of {cluster.where(host)} cannot be reached, {error}"
        return ""

    with ThreadPoolExecutor(max_workers=32) as pool:
        failed = list(filter(None, pool.map(try_one, targets)))
    reached = f"{len(targets) - len(failed)} of {len(targets)}"
    return {"rows": {"ports reached": reached}, "failed": failed[:50]}


def pull(cluster: Cluster, source: str, port: int) -> dict:
    """GB/s that come from `source` through one connection, as the examples' loader has."""
    label, buffer, count, start = f"data from {source}", bytearray(1 << 20), 0, time.monotonic()
    try:
        with ask(cluster, source, port, "bytes", REACH_SECONDS) as answer:
            while received := answer.readinto(buffer):
                count += received
    except OSError as error:
        sentence = f"no data comes from {cluster.where(source)}, {error}"
        return {"rows": {label: "FAILED"}, "failed": [sentence]}
    return {"rows": {label: f"{count / (time.monotonic() - start) / 1e9:.2f} GB/s"}}


def all_reduce(cluster: Cluster, facts: dict[str, dict]) -> dict:
    """Sum a tensor over all training hosts, with a process for each GPU."""
    frameworks = [facts[host]["framework"] for host in cluster.training if host in facts]
    hosts = len(cluster.training)
    if cluster.here not in cluster.training or len(frameworks) < hosts:
        return {}
    if not all(framework["name"].startswith("PyTorch") for framework in frameworks):
        return {"rows": {"all-reduce": "not checked: no PyTorch"}}
    gpus = min(framework["gpus"] for framework in frameworks)
    backend, each = "nccl" if gpus else "gloo", gpus or 1
    interfaces = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    environment = dict.fromkeys(interfaces, cluster.interface)
    environment |= {"MASTER_ADDR": cluster.address(cluster.leader), "WORLD_SIZE": str(each * hosts)}
    environment |= {"MASTER_PORT": str(cluster.ports[1])}

    def rank(local: int) -> tuple[bool, str]:
        number = each * cluster.training.index(cluster.here) + local
        own = {"RANK": str(number), "LOCAL_RANK": str(local)}
        return run([sys.executable, __file__, "rank", backend], **environment, **own)

    with ThreadPoolExecutor(each) as pool:
        ended_well, output = min(pool.map(rank, range(each)))  # False is less than True
    if ended_well:
        return {"rows": {"all-reduce": output}}
    change = SECURITY_GROUP if hosts > 1 else "take another image"
    sentence = f"the all-reduce ({backend}) failed, {output}: {change}"
    return {"rows": {"all-reduce": "FAILED"}, "failed": [sentence]}


def run_rank(backend: str) -> None:
    """One of the all-reduce's processes: print how fast it was."""
    import torch
    import torch.distributed as dist

    device = f"cuda:{os.environ['LOCAL_RANK']}" if backend == "nccl" else "cpu"
    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    ranks, tensor, seconds = dist.get_world_size(), torch.ones(4 << 20, device=device), []
    for _ in range(4):  # the first one sets up what the others use
        tensor.fill_(1)
        start = time.monotonic()
        dist.all_reduce(tensor)
        tensor[0].item()  # waits for the GPU
        seconds.append(time.monotonic() - start)
        if not (tensor == ranks).all():
            raise ArithmeticError(f"{ranks} ones make {tensor.min()} to {tensor.max()}")
    speed = f"{tensor.nbytes / min(seconds) / 1e9:.2f} GB/s"
    print(RESULT + backend + (f", {ranks} ranks, {speed}" if ranks > 1 else ", alone: works"))
    dist.destroy_process_group()


# ----------------------------------------------------------------------------------------- the job


def print_table(cluster: Cluster, rows: dict[str, dict[str, str]], width: int = 26) -> None:
    """A column for each host, by group, three columns at a time; `rows`: label -> host -> cell."""
    hosts = list(cluster.groups)
    rows = {"": cluster.groups, "host": dict(zip(hosts, hosts, strict=True)), **rows}
    for some in (hosts[n : n + 3] for n in range(0, len(hosts), 3)):
        print()
        for label, cells in rows.items():
            shown = (textwrap.shorten(cells.get(h, "-"), width, placeholder="...") for h in some)
            print(f"{label:18}  {'  '.join(cell.ljust(width) for cell in shown)}".rstrip())
    print(flush=True)


def main() -> None:
    """Run all checks with the other hosts; exit with status 1 if anything failed."""
    signal.signal(signal.SIGTERM, lambda *_: (stopped.set(), signal.alarm(STOP_SECONDS)))
    signal.signal(signal.SIGALRM, lambda *_: fail("The checks did not end in time: see the log."))
    signal.alarm(LIMIT_SECONDS)
    cluster = Cluster()
    if len(cluster.groups) > 1 and not os.environ.get("HETERO_TOKEN"):
        fail(
            "The job has no token: put HETERO_TOKEN, a random text such as secrets.token_hex(16), "
            "into the job's environment."
        )
    print(f"host={cluster.here} group={cluster.groups[cluster.here]}", flush=True)

    team = Team(cluster)
    facts = team.exchange(examine(cluster, list(team.open)), JOIN_SECONDS)
    opened = {host: facts[host]["ports"] for host in facts}
    reached = team.exchange(reach(cluster, opened))
    team.close(cluster.ports[1])  # for the all-reduce
    for source in [host for host in reached if host not in cluster.training]:
        for host in cluster.training:
            # From the port that the system gave, as tf.data.service's batches come from such ones.
            is_here = cluster.here == host
            team.exchange(pull(cluster, source, opened[source][-1]) if is_here else {})
    last = team.exchange(all_reduce(cluster, facts))

    rows: dict[str, dict[str, str]] = {}
    failed = [
        f"{cluster.where(host)} did not report, or has ended: see its log; {SECURITY_GROUP}"
        for host in cluster.groups
        if host not in last
    ]
    for host, result in (item for check in team.exchanged for item in check.items()):
        for label, cell in result.get("rows", {}).items():
            rows.setdefault(label, {})[host] = cell
        failed += [f"On {cluster.where(host)}: {what}" for what in result.get("failed", [])]
    if cluster.here == cluster.leader:
        print_table(cluster, rows)
        for sentence in failed or ["All checks passed"]:
            mark = "FAILED  " if failed else ""
            print(textwrap.fill(f"{mark}{sentence}.", 100, subsequent_indent=" " * len(mark)))
    if failed:
        fail(f"{failed[0]}.")
    print(FAREWELL)


if __name__ == "__main__":
    if sys.argv[1:] == ["framework"]:
        print(RESULT + json.dumps(describe_framework()))
    elif sys.argv[1:2] == ["rank"]:
        run_rank(sys.argv[2])
    else:
        main()
