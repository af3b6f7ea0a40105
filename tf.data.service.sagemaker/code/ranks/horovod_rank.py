"""Run a training script as one of Horovod's ranks, without ssh or MPI.

    python ranks/horovod_rank.py train_dnn.py --batch-size 128

Start it once for each rank, with the environment that hetero/ sets (RANK, WORLD_SIZE, MASTER_ADDR,
...). The ranks find each other through a small server beside rank 0, and then talk over Gloo (NCCL
between GPUs).
"""

import importlib.util
import os
import socket
import sys
import time

try:
    from horovod.runner.common.util.hosts import HostInfo, get_host_assignments
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer
except ImportError as error:
    sys.exit(f"horovod_rank.py: error: {error}. Use an image with Horovod, or tf.distribute.")

START_SECONDS = 600  # hosts may load TensorFlow at very different speeds


def main() -> None:
    """Pass the environment on to Horovod, and turn into the training script."""
    values = {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    size, hosts = int(os.environ["WORLD_SIZE"]), int(os.environ["GROUP_WORLD_SIZE"])
    master, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if values["RANK"] == "0":
        slots = [HostInfo(f"host-{n}", size // hosts) for n in range(hosts)]
        server = RendezvousHTTPServer((master, port), RendezvousHandler, verbose=0)
        server.daemon_threads = True  # an open connection must not keep the process alive
        server.init(get_host_assignments(slots, size))
        if os.fork() == 0:  # a separate process, which the launcher kills when rank 0 ends
            server.serve_forever()
    wait_for(master, port)  # Horovod itself tries for only two seconds
    os.environ.update(
        HOROVOD_CONTROLLER="gloo",
        HOROVOD_CPU_OPERATIONS="gloo",
        HOROVOD_GLOO_RENDEZVOUS_ADDR=master,
        HOROVOD_GLOO_RENDEZVOUS_PORT=str(port),
        HOROVOD_GLOO_IFACE=os.environ.get("GLOO_SOCKET_IFNAME", ""),
        HOROVOD_GLOO_TIMEOUT_SECONDS=str(START_SECONDS),  # for other ranks to start
        HOROVOD_HOSTNAME=f"host-{os.environ['GROUP_RANK']}",
        HOROVOD_RANK=values["RANK"],
        HOROVOD_SIZE=str(size),
        HOROVOD_LOCAL_RANK=values["LOCAL_RANK"],
        HOROVOD_LOCAL_SIZE=values["LOCAL_WORLD_SIZE"],
        HOROVOD_CROSS_RANK=os.environ["GROUP_RANK"],
        HOROVOD_CROSS_SIZE=str(hosts),
        **own_hostname(),
    )
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])


def own_hostname() -> dict[str, str]:
    """Return variables with which Gloo finds this host's address, which it looks up by hostname.

    In AWS's training containers the hostname is "aws", which may not resolve. Their toolkit has a
    library for its own MPI runs that returns the name under which the other hosts know this one. It
    reads that name from the file below, and crashes if there is no such file.
    """
    library = importlib.util.find_spec("gethostname")
    if not library or not os.path.exists("/opt/ml/input/config/resourceconfig.json"):
        return {}
    return {"LD_PRELOAD": library.origin}


def wait_for(host: str, port: int) -> None:
    """Wait until a program listens there. Raise OSError if that takes over START_SECONDS."""
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
