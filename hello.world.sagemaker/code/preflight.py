"""Checks, on all hosts of a job, what a later job needs, and prints one table. A file to copy.

    SourceCode(source_dir="code", command="exec python preflight.py")

Run it with the later job's image and instances, and set HETERO_TOKEN in the job's environment to a
random string. It needs only Python. It checks the GPUs with the image's PyTorch or TensorFlow; the
all-reduce needs PyTorch.

All hosts run the same checks at the same time, and exchange their results. The first host of the
training group prints them. Each line below the table says what failed and what to change. If
anything failed, the first of these lines is the job's FailureReason, and every host exits with
status 1. Every wait has a time limit.
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

TRAINING_GROUP = "dnn_group"  # ignored if the job has only one group
SHM_MIB = 64  # a container's default, which is enough for the examples
JOIN_SECONDS = 600  # hosts take different times to load the image and their data
RESOLVE_SECONDS, REACH_SECONDS, ANSWER_SECONDS = 120, 10, 5  # for a name; a port; an answer
RUN_SECONDS, CHECK_SECONDS = 120, 240  # for a process that imports the framework; a whole check
STREAM_SECONDS = 1  # how long a data host sends bytes to measure the speed
LIMIT_SECONDS, STOP_SECONDS = 1100, 60  # for everything; after SIGTERM (SIGKILL follows at 120 s)
LONGEST = 1 << 20  # the most bytes of one request
RESULT = "preflight found: "  # marks a process's result among the lines that libraries print
COMPATIBILITY = Path("/usr/local/cuda/compat")  # CUDA libraries that work with older drivers
BASE_DIR = Path(os.environ.get("SAGEMAKER_BASE_DIR", "/opt/ml"))
FAREWELL = f"host={os.environ.get('SM_CURRENT_HOST', '?')} ends"  # shows that the log is complete
SECURITY_GROUP = "the job's security group must allow all traffic from itself"
stopped = threading.Event()  # set by SIGTERM: another host has failed, or the job is being stopped


class Cluster:
    """The job's hosts (algo-1, algo-2, ...), from resourceconfig.json."""

    def __init__(self):
        config = json.loads((BASE_DIR / "input" / "config" / "resourceconfig.json").read_text())
        # Set only when all hosts share a machine: their loopback addresses, and the base port.
        local = json.loads(os.environ.get("LOCAL_SAGEMAKER", "{}"))
        self.addresses: dict[str, str] = local.get("addresses", {})
        base_port = local.get("base_port", 7710)  # as in hetero/topology.py
        # Of the leader; of rank 0's store or Horovod's rendezvous; of the data servers.
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
        """The address at which `host` can be reached; on AWS, its name."""
        return self.addresses.get(host, host)

    def where(self, host: str) -> str:
        """`host` with its group, for messages."""
        return f"{host} ({self.groups[host]})"


def fail(sentence: str) -> None:
    """Exit with status 1, which fails the job, with `sentence` as the FailureReason."""
    (BASE_DIR / "output").mkdir(parents=True, exist_ok=True)
    (BASE_DIR / "output" / "failure").write_text(sentence[:1024])  # SageMaker shows at most this
    print(f"preflight: {sentence}\n{FAREWELL}", flush=True)
    os._exit(1)  # without waiting for other threads


# ------------------------------------------------------------------------- checks of a single host


def examine(cluster: Cluster, ports: list[int]) -> dict:
    """Check this host; return its rows of the table, its failures, and what later checks need."""
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
        hostname = f"{socket.gethostname()}, unresolved"  # not a failure: nothing needs it

    cuda = f"CUDA {seen['cuda']}" if seen["cuda"] else "no CUDA"
    change = "use an image for GPUs"
    if seen["cuda"]:
        change = "use an image with an older CUDA, which this driver supports"
        if COMPATIBILITY.is_dir():  # as in AWS's images
            libraries = f"env LD_LIBRARY_PATH={COMPATIBILITY}:$LD_LIBRARY_PATH"
            change = f"put {libraries} before python in the job's command, or {change}"
    problems = {
        f"the framework does not load ({output}): use another image": not ended_well,
        f"{told} GPU(s), driver {driver or 'unknown'}, but {seen['name']} ({cuda}) sees "
        f"{seen['gpus']}: {change}": (ended_well and seen["name"] and told > seen["gpus"]),
        f"{kind} has GPUs, but nvidia-smi lists none: use an image for GPUs": (
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
        sentence = f"another program listens on port {port}: use an image that does not start it"
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
    """Return the names of the GPUs that nvidia-smi lists, and the version of their driver."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=RUN_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return [], ""
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    gpus = [line.split(", ") for line in lines if line.count(", ") == 1]
    return [name for name, _ in gpus], gpus[0][1] if gpus else ""


def describe_framework() -> dict:
    """Return the name, CUDA version and number of GPUs of PyTorch, or else of TensorFlow."""
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
    """Run a command; return whether it succeeded, and the result or error that it printed."""
    with tempfile.TemporaryFile("w+") as file:  # its children might hold a pipe open
        streams = {"stdout": file, "stderr": subprocess.STDOUT, "timeout": RUN_SECONDS}
        try:
            status = subprocess.run(command, env=os.environ | environment, **streams).returncode
        except subprocess.TimeoutExpired:
            status = 1
            print(f"Error: still running after {RUN_SECONDS} s", file=file)
        file.seek(0)
        lines = [line.strip() for line in file if line.strip()] or ["no output"]
    results = [line for line in lines if line.startswith(RESULT)]
    if status == 0 and results:
        return True, results[-1].removeprefix(RESULT)
    print(*lines[-30:], sep="\n", flush=True)
    return False, ([line for line in lines if "Error: " in line] or lines)[-1][:300].rstrip(".")


# --------------------------------------------------------------------- communication between hosts


def sign(*words: str) -> str:
    """Return a signature of these words, which only hosts that know the job's token can make."""
    token = os.environ.get("HETERO_TOKEN", "").encode()
    return hmac.new(token, json.dumps(words).encode(), "sha256").hexdigest()


class Answer(BaseHTTPRequestHandler):
    """Answers HTTP requests that are signed with the job's token, and refuses all others."""

    timeout = ANSWER_SECONDS
    team: "Team"
    refused: set[str] = set()  # addresses that have been logged

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
            print(f"preflight: {address} connected, but is not a host of this job", flush=True)

    def log_request(self, *_: object) -> None:
        """Log nothing."""


class Server(socketserver.ThreadingTCPServer):
    """Listens on a port."""

    allow_reuse_address, request_queue_size, daemon_threads = True, 128, True

    def handle_error(self, *_: object) -> None:
        """Do not log lost connections: the checks report what they miss."""


def ask(
    cluster: Cluster, host: str, port: int, what: str, seconds: float, *given: object
) -> HTTPResponse:
    """Send a request to a port of a host, and return its answer; retry for up to `seconds`.

    Raises ConnectionError, which says why there is no answer and what to change.
    """
    start, nonce = time.monotonic(), secrets.token_hex(16)
    body = json.dumps([nonce, what, cluster.here, *(given or (0, {}))])
    while True:
        limit, change = seconds, SECURITY_GROUP
        connection = HTTPConnection(cluster.address(host), port, timeout=ANSWER_SECONDS)
        try:
            connection.connect()
            change, sock = "let only this job's hosts listen there", connection.sock
            connection.request("POST", "/", body, {"Proof": sign("ask", host, body)})
            answer = connection.getresponse()
            if answer.getheader("Proof") == sign("answer", host, nonce):
                sock.settimeout(LIMIT_SECONDS if given else ANSWER_SECONDS)
                return answer
            error = "another program answers, or a host with another HETERO_TOKEN"
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
    """The hosts that take part. They exchange their results through the leader."""

    def __init__(self, cluster: Cluster):
        self.cluster, self.hosts = cluster, {*cluster.groups}
        self.given: dict[int, dict[str, dict]] = defaultdict(dict)  # exchange -> host -> result
        self.answered: dict[int, set[str]] = defaultdict(set)  # exchange -> hosts
        self.exchanged: list[dict[str, dict]] = []  # for each exchange: host -> result
        self.open: dict[int, Server] = {}  # the examples' ports, and one that the system chooses
        for port in (*cluster.ports, 0):
            with contextlib.suppress(OSError):  # the port is in use: `examine` reports it
                address = cluster.addresses.get(cluster.here, "0.0.0.0"), port
                server = Server(address, type("", (Answer,), {"team": self}))
                self.open[server.server_address[1]] = server
                threading.Thread(target=server.serve_forever, args=[0.05], daemon=True).start()

    def close(self, port: int) -> None:
        """Stop listening on a port, so that another process can."""
        if server := self.open.get(port):
            server.shutdown()
            server.server_close()

    def wait(self, hosts: Collection[str], seconds: float) -> None:
        """Wait until `hosts` has all hosts but the leader; for at most 1 s once the job ends."""
        start = time.monotonic()
        while self.hosts - {self.cluster.leader} - {*hosts}:
            if time.monotonic() > start + (1 if stopped.is_set() else seconds):
                break
            time.sleep(0.02)

    def exchange(self, mine: dict, seconds: float = CHECK_SECONDS) -> dict[str, dict]:
        """Return all hosts' results, by host; hosts that report none in time are left out."""
        cluster, number = self.cluster, len(self.exchanged)
        given = self.given[number]
        if cluster.here == cluster.leader:
            given[cluster.here] = mine
            self.wait(given, seconds)
            self.hosts &= given.keys()
            whole = {host: given[host] for host in cluster.groups if host in self.hosts}
            self.exchanged.append(whole)
            self.wait(self.answered[number], ANSWER_SECONDS)  # this process may end after this
        else:
            here, leader = cluster.where(cluster.here), cluster.where(cluster.leader)
            try:
                to = cluster.leader, cluster.ports[0], "exchange"
                with ask(cluster, *to, JOIN_SECONDS, number, mine) as answer:
                    self.exchanged.append(json.loads(answer.read()))
            except (OSError, HTTPException) as error:
                fail(f"On {here}: {leader} cannot be reached, {error}.")
            except ValueError:  # the answer was cut off
                fail(f"On {here}: {leader} was lost: see its log.")
        return self.exchanged[number]


# ------------------------------------------------------------------------- checks of several hosts


def reach(cluster: Cluster, opened: dict[str, list[int]]) -> dict:
    """Check whether this host reaches all ports that the others have opened."""
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
    """Measure how many GB/s come from `source` over one connection, like the examples' loader."""
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
    """Check and time an all-reduce over all training hosts, with a process for each GPU."""
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
    change = SECURITY_GROUP if hosts > 1 else "use another image"
    sentence = f"the all-reduce ({backend}) failed, {output}: {change}"
    return {"rows": {"all-reduce": "FAILED"}, "failed": [sentence]}


def run_rank(backend: str) -> None:
    """Run one rank of the all-reduce, and print the speed."""
    import torch
    import torch.distributed as dist

    device = f"cuda:{os.environ['LOCAL_RANK']}" if backend == "nccl" else "cpu"
    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    ranks, tensor, seconds = dist.get_world_size(), torch.ones(4 << 20, device=device), []
    for _ in range(4):  # the first one also sets up the connections
        tensor.fill_(1)
        start = time.monotonic()
        dist.all_reduce(tensor)
        tensor[0].item()  # waits for the GPU
        seconds.append(time.monotonic() - start)
        if not (tensor == ranks).all():
            raise ArithmeticError(f"{ranks} ones add up to {tensor.min()} to {tensor.max()}")
    speed = f"{tensor.nbytes / min(seconds) / 1e9:.2f} GB/s"
    print(RESULT + backend + (f", {ranks} ranks, {speed}" if ranks > 1 else ", alone: works"))
    dist.destroy_process_group()


# ----------------------------------------------------------------------------------------- the job


def print_table(cluster: Cluster, rows: dict[str, dict[str, str]], width: int = 26) -> None:
    """Print a column for each host, three at a time; `rows`: label -> host -> cell."""
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
            "The job has no token: set HETERO_TOKEN in the job's environment to a random string, "
            "such as secrets.token_hex(16)."
        )
    print(f"host={cluster.here} group={cluster.groups[cluster.here]}", flush=True)

    team = Team(cluster)
    facts = team.exchange(examine(cluster, list(team.open)), JOIN_SECONDS)
    opened = {host: facts[host]["ports"] for host in facts}
    reached = team.exchange(reach(cluster, opened))
    team.close(cluster.ports[1])  # for the all-reduce
    for source in [host for host in reached if host not in cluster.training]:
        for host in cluster.training:
            # Use the port that the system chose, because tf.data.service sends from such ports.
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
