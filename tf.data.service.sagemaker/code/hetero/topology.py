"""What a host is told: who it is, where the others are, and the job's hyperparameters."""

import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

BASE_DIR = Path(os.environ.get("SAGEMAKER_BASE_DIR", "/opt/ml"))
BASE_PORT = 7710  # the leader's
# Offsets from it: rank 0's MASTER_PORT, the data server's, and TensorFlow's first, one per rank.
MASTER_PORT, SERVER_PORT, WORKER_PORT = 1, 2, 10


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


def proxy_exceptions(cluster: Cluster) -> dict[str, str]:
    """What keeps libraries from asking a proxy for the job's hosts, as gRPC would for algo-2."""
    hosts = [*sum(cluster.groups.values(), []), *cluster.addresses.values()]
    names, values = ("no_proxy", "NO_PROXY", "no_grpc_proxy"), {}
    for name, other in zip(names, ("NO_PROXY", "no_proxy", "no_proxy"), strict=True):
        value = os.environ.get(name, os.environ.get(other, ""))
        if value != "*" or name == "no_grpc_proxy":  # "*" must stand alone; gRPC does not know it
            values[name] = ",".join([*hosts, value]).rstrip(",")
    return values
