"""A node of Ray on each host: python -m hetero --spare-cores 0 --serve serve.py train.py.

Data hosts run this file. The training script imports it before ray, and calls join() or drive().
"""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time

import hetero

TRAIN_GROUP = "dnn_group"  # the same as --train-group
STORE_BYTES_PER_CORE = 256 << 20  # of memory for Ray's objects: two of Ray Data's largest blocks
WAIT_SECONDS = 120  # for the nodes of all hosts

if "ray" in sys.modules:
    sys.exit("Import serve before ray: ray reads its token when it is imported.")
if "HETERO_TOKEN" not in os.environ:
    sys.exit("Set HETERO_TOKEN in the job's environment to a random text: it is Ray's token.")
cluster = hetero.read_cluster()
if TRAIN_GROUP not in cluster.groups and len(cluster.groups) > 1:
    sys.exit(f"There is no instance group {TRAIN_GROUP}: change TRAIN_GROUP in serve.py.")


def address(host: str) -> str:
    """Return a host's IP address, as soon as its name resolves."""
    while True:
        try:
            return socket.gethostbyname(cluster.address(host))
        except OSError:
            time.sleep(0.5)


head = address(cluster.groups.get(TRAIN_GROUP, cluster.hosts)[0])
here = address(cluster.host)
port = cluster.base_port + 2  # of Ray's head; data servers have it on the data hosts
os.environ |= {
    "RAY_ADDRESS": f"{head}:{port}",  # for ray.init()
    "RAY_AUTH_MODE": "token",  # without it, whoever reaches one of Ray's ports can run code
    "RAY_AUTH_TOKEN": os.environ["HETERO_TOKEN"],
    "RAY_OBJECT_STORE_ALLOW_SLOW_STORAGE": "1",  # in /tmp if /dev/shm is too small
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # a data host ends when there is no training left
    "RAY_gcs_rpc_server_reconnect_timeout_s": "30",  # then all nodes end if the head is lost
    "RAY_USAGE_STATS_ENABLED": "0",
    # The log is a file: no colors, no bars, and not what Ray Train prints each second because the
    # dashboard is off.
    "RAY_COLOR_PREFIX": "0",
    "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
    "RAY_DEDUP_LOGS_SKIP_REGEX": "Failed to query Ray Train Controller actor state",
}


def command(*options: str) -> list[str]:
    """Return the command that starts this host's node."""
    cores = len(os.sched_getaffinity(0))
    # What asks for no GPU needs a CPU, so it runs on data hosts if there are any.
    is_idle = "RANK" in os.environ and os.environ["HETERO_DATA_HOSTS"]
    words = [sys.executable, "-m", "ray.scripts.scripts", "start"]
    # Ray Data needs two: it reads in one task while it prepares in another.
    words += ["--num-cpus", "0" if is_idle else str(max(cores, 2))]
    words += ["--resources", f'{{"{cluster.group}": 1}}']  # for what must run in this group
    words += ["--object-store-memory", str(cores * STORE_BYTES_PER_CORE)]
    words += ["--node-ip-address", here]
    # Locally, hosts share a machine: each needs a folder and ports of its own.
    words += ["--temp-dir", tempfile.gettempdir()]
    words += ["--min-worker-port", "0", "--max-worker-port", "0"]
    return [*words, *options]


def connect(port: int) -> socket.socket:
    """Connect to a port of the first training host, as soon as something listens there."""
    while True:
        try:
            return socket.create_connection((head, port), 5)
        except OSError:  # not yet; hetero ends the job if that host is lost
            time.sleep(0.5)


def start_node() -> None:
    """Start this host's node, which ends with the host; the first rank of each host calls it."""
    if os.environ["RANK"] == "0":
        options = ["--head", "--port", str(port), "--include-dashboard", "false"]
        options += ["--ray-client-server-port", str(port + 1)]
    else:
        connect(port).close()
        options = ["--address", os.environ["RAY_ADDRESS"]]
    if status := subprocess.call(command(*options), stdout=subprocess.DEVNULL):
        sys.exit(status)  # Ray has printed the reason


def join() -> None:
    """Call ray.init() in this rank, after the nodes of all hosts have started."""
    if os.environ["LOCAL_RANK"] == "0":
        start_node()
    connect(port).close()
    import ray

    # Ray would find the address itself, but not the right one if hosts share a machine.
    ray.init(_node_ip_address=here, log_to_driver=os.environ["RANK"] == "0")
    end, nodes = time.monotonic() + WAIT_SECONDS, 0
    while nodes < len(cluster.hosts) and time.monotonic() < end:
        time.sleep(0.5)
        nodes = sum(node["Alive"] for node in ray.nodes())
    if os.environ["RANK"] == "0":
        cores = ray.cluster_resources().get("CPU", 0)
        print(f"ray: {nodes} of {len(cluster.hosts)} nodes with {cores:.0f} cores", flush=True)


def drive() -> None:
    """Call join() in rank 0. All other ranks wait for its end, and do not return.

    For Ray Train, Tune and RLlib, which start processes on the training hosts themselves.
    """
    master_port = int(os.environ["MASTER_PORT"])  # which torch does not use then
    if os.environ["RANK"] == "0":
        join()
        socket.create_server((head, master_port)).detach()  # stays open as long as this process
        return
    if os.environ["LOCAL_RANK"] == "0":
        start_node()
    with connect(master_port) as rank0:
        rank0.settimeout(None)
        with contextlib.suppress(OSError):
            rank0.recv(1)  # returns, or fails, when rank 0 ends
    sys.exit()


if __name__ == "__main__":  # on a data host
    connect(port).close()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # a node's end prints hundreds of lines
    words = command("--address", os.environ["RAY_ADDRESS"], "--block")
    os.execv(words[0], words)
