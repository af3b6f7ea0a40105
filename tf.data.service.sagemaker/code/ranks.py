"""Start this host's Horovod ranks: for Horovod what torchrun is for PyTorch, without ssh and MPI.

    python ranks.py --hosts algo-2,algo-3 --host-rank 0 --processes-per-host 8 \
        --port 7711 --interface eth0 train_dnn.py --batch-size 128

Run on every host, each with its own --host-rank. The ranks find each other through a small server
on the first host, which this program runs there, and then talk over Gloo (NCCL between GPUs).
"""

import argparse
import importlib.util
import os
import socket
import subprocess
import sys
import threading
import time

from horovod.runner.common.util.hosts import HostInfo, get_host_assignments
from horovod.runner.gloo_run import create_slot_env_vars
from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

START_SECONDS = 600  # hosts may load TensorFlow at very different speeds


def main() -> None:
    """Run the ranks; exit with status 1, and the others stopped, as soon as one fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--hosts", required=True, help="addresses of all hosts with ranks, comma-separated")
    add("--host-rank", type=int, required=True, help="this host's place among them, from 0")
    add("--processes-per-host", type=int, default=1)
    add("--port", type=int, required=True, help="of the server on the first host")
    add("--interface", required=True, help="the network interface to use")
    add("command", nargs=argparse.REMAINDER, help="the training script and its arguments")
    args = parser.parse_args()

    hosts = args.hosts.split(",")
    slots = [HostInfo(host, args.processes_per_host) for host in hosts]
    plan = get_host_assignments(slots, len(hosts) * args.processes_per_host)
    if args.host_rank == 0:
        server = RendezvousHTTPServer((hosts[0], args.port), RendezvousHandler, verbose=0)
        server.daemon_threads = True  # a stranger's open connection must not keep us here
        server.init(plan)
        threading.Thread(target=server.serve_forever, daemon=True).start()
    else:
        wait_for(hosts[0], args.port)  # the ranks themselves try for two seconds only

    environment = {
        **os.environ,
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": hosts[0],
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(args.port),
        "HOROVOD_GLOO_IFACE": args.interface,
        # For the others to come up. A rank that dies or hangs later, the launcher notices.
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(START_SECONDS),
    }
    environment.update(own_hostname())
    ranks = [
        subprocess.Popen(
            [sys.executable, *args.command], env={**environment, **create_slot_env_vars(slot)}
        )
        for slot in plan
        if slot.hostname == hosts[args.host_rank]
    ]
    while any(rank.poll() is None for rank in ranks):
        if any(rank.poll() for rank in ranks):
            for rank in ranks:
                rank.terminate()
        time.sleep(0.1)
    sys.exit(any(rank.returncode for rank in ranks))


def own_hostname() -> dict[str, str]:
    """Variables that let Gloo find this host's address, which it looks up by the host's name.

    In AWS's training containers the name is "aws" and need not resolve. Their toolkit has a library
    for its own MPI runs, which answers with the name that the other hosts know. It reads that in
    the file below, and crashes where there is none.
    """
    library = importlib.util.find_spec("gethostname")
    if not library or not os.path.exists("/opt/ml/input/config/resourceconfig.json"):
        return {}
    return {"LD_PRELOAD": library.origin}


def wait_for(host: str, port: int) -> None:
    """Wait until somebody listens there; raise OSError if that takes too long."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            return socket.create_connection((host, port), timeout=5).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.2)


if __name__ == "__main__":
    main()
