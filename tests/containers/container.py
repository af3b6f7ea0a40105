"""Run a command as PID 1 in a container that looks like one of SageMaker's hosts.

    python container.py COMMAND...

The local SageMaker runs each host's entry point with this program (`start(container=[...])`), as
root. The environment says which host it is. The host gets

- a network of its own: `eth0` with an address, on a bridge that only the job's hosts can reach,
- the others' names in its own /etc/hosts, and no name server,
- the hostname `aws`, which does not resolve,
- its files at /opt/ml, and no environment variables that AWS does not set,
- processes of its own, 64 MiB of /dev/shm, and no way out of the machine.

With CONTAINER_NAMES_AFTER=30 in the job's environment, the others' names resolve only after 30 s.
With CONTAINER_LOCALHOST=aws, the hostname resolves to 127.0.0.1. Run this only in namespaces that
end with the process that made them: see run.sh.
"""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWPID, CLONE_NEWNET = (
    0x00020000, 0x04000000, 0x20000000, 0x40000000,
)  # fmt: skip
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None, use_errno=True)
BRIDGE = "hosts"  # run.sh makes it


def unshare(namespaces: int) -> None:
    """Move this process into new namespaces; a new PID namespace is for its children."""
    if LIBC.unshare(namespaces):
        raise OSError(ctypes.get_errno(), "cannot make namespaces: run this as root")


def ip(*words: str) -> None:
    """Run iproute2's `ip`."""
    subprocess.run(["ip", *words], check=True)


def address(name: str, addresses: dict[str, str]) -> str:
    """Return a host's address in its job's network: the local one, with 10. in place of 127."""
    return addresses[name].replace("127.", "10.", 1)


def connect(host: str, addresses: dict[str, str]) -> None:
    """Give this process's new network namespace an eth0, connected to the bridge outside."""
    own = address(host, addresses)
    outside, plug = os.getppid(), "v" + own.removeprefix("10.")  # at most 12 characters
    ip("link", "add", "eth0", "type", "veth", "peer", "name", plug, "netns", str(outside))
    outer = ["nsenter", f"--net=/proc/{outside}/ns/net", "ip", "link", "set", plug]
    subprocess.run([*outer, "master", BRIDGE, "up"], check=True)
    ip("address", "add", f"{own}/24", "dev", "eth0")  # a job's hosts differ in the last byte
    ip("link", "set", "eth0", "up")
    ip("link", "set", "lo", "up")


def mount(*words: str) -> None:
    """Run util-linux's `mount`."""
    subprocess.run(["mount", *words], check=True)


def show(
    tree: Path, host: str, addresses: dict[str, str], names_after: float, localhost: str
) -> None:
    """Mount the host's own files in this process's new mount namespace."""
    mount("--make-rprivate", "/")
    mount("-t", "tmpfs", "-o", "size=64m", "shm", "/dev/shm")
    mount("--bind", str(tree / "opt" / "ml"), "/opt/ml")
    hosts, resolv = tree / "hosts", tree / "resolv.conf"
    own = f"127.0.0.1 localhost {localhost}\n{address(host, addresses)} {host}\n"
    others = "".join(f"{address(name, addresses)} {name}\n" for name in addresses if name != host)
    hosts.write_text(own if names_after else own + others)
    resolv.write_text("")
    mount("--bind", str(hosts), "/etc/hosts")
    mount("--bind", str(resolv), "/etc/resolv.conf")
    if names_after:
        # Write in place: this very file is mounted at /etc/hosts.
        threading.Timer(names_after, lambda: hosts.write_text(own + others)).start()


def main() -> None:
    """Make the host, run the command in it, and exit with its status."""
    environment = dict(os.environ)
    addresses = json.loads(environment.pop("LOCAL_SAGEMAKER"))["addresses"]
    tree = Path(environment.pop("SAGEMAKER_BASE_DIR")).parents[1]
    config = tree / "opt" / "ml" / "input" / "config" / "resourceconfig.json"
    facts = json.loads(config.read_text())
    config.write_text(json.dumps({**facts, "network_interface_name": "eth0"}))
    names_after = float(environment.pop("CONTAINER_NAMES_AFTER", 0))
    localhost = environment.pop("CONTAINER_LOCALHOST", "")

    unshare(CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWNET)
    connect(facts["current_host"], addresses)
    show(tree, facts["current_host"], addresses, names_after, localhost)
    socket.sethostname("aws")

    unshare(CLONE_NEWPID)  # last: the first child is its PID 1, and it ends with that child
    child = os.fork()
    if child == 0:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        mount("-t", "proc", "proc", "/proc")
        os.execvpe(sys.argv[1], sys.argv[1:], environment)
    # If PID 1 has no handler for SIGTERM, Linux drops the signal, as on SageMaker's hosts.
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGTERM))
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os._exit(status if status >= 0 else 128 - status)  # without waiting for the names' timer


if __name__ == "__main__":
    main()
