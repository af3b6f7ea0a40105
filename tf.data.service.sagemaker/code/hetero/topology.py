"""What a host is told: who it is, where the others are, and the job's hyperparameters."""

import json
import os
import socket
from dataclasses import dataclass, field
from pathlib import Path

BASE_DIR = Path(os.environ.get("SAGEMAKER_BASE_DIR", "/opt/ml"))
ONLY_GROUP = "homogeneousCluster"  # what SageMaker calls the one group of a homogeneous job
BASE_PORT = 7710  # the leader's
# Offsets from it: rank 0's MASTER_PORT; the data servers'; a second port of each host's server,
# followed by TF_CONFIG's, one for each rank. Hosts that share a machine need ports of their own.
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
    def hosts(self) -> list[str]:
        """All hosts, by group."""
        return sum(self.groups.values(), [])

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

    def where(self, *hosts: str) -> str:
        """Hosts with their groups, for messages."""
        group_of = {host: group for group, members in self.groups.items() for host in members}
        return ", ".join(f"{host} ({group_of[host]})" for host in sorted(hosts))


def read_cluster(base_dir: Path = BASE_DIR) -> Cluster:
    """Read resourceconfig.json; one without instance groups, of SDK local mode, has one group."""
    config = json.loads((base_dir / "input" / "config" / "resourceconfig.json").read_text())
    default = [{"instance_group_name": ONLY_GROUP, "hosts": config.get("hosts", [])}]
    groups = config.get("instance_groups", default)
    by_number = {
        group["instance_group_name"]: sorted(group["hosts"], key=lambda host: (len(host), host))
        for group in groups
    }
    # The only trace of runs on one machine: loopback addresses and a range of ports for the job.
    local = json.loads(os.environ.get("LOCAL_SAGEMAKER", "{}"))
    return Cluster(
        config["current_host"],
        config.get("current_group_name", ONLY_GROUP),
        config.get("current_instance_type", "unknown"),
        config["network_interface_name"],
        by_number,
        **local,
    )


def hyperparameters() -> list[str]:
    """The job's hyperparameters, as SDK v3's own driver writes them: ["--batch-size", "128"]."""
    pairs = json.loads(os.environ.get("SM_HPS", "{}")).items()
    return [w for k, v in pairs for w in (f"--{k}", v if isinstance(v, str) else json.dumps(v))]


def accelerators() -> int:
    """How many GPUs or Neuron devices this host has, as SageMaker counts; 1 if none."""
    counts = [int(os.environ.get(name) or 0) for name in ("SM_NUM_GPUS", "SM_NUM_NEURONS")]
    return counts[0] or counts[1] or 1


def rank_environment(cluster: Cluster, rank: int, ranks: int) -> dict[str, str]:
    """What torchrun and TF_CONFIG would tell one of this host's `ranks` training processes."""
    hosts = cluster.groups[cluster.group]
    places = [cluster.address(host) for host in hosts for _ in range(ranks)]
    first_port = cluster.base_port + WORKER_PORT + len(cluster.hosts)
    workers = [f"{place}:{first_port + n}" for n, place in enumerate(places)]
    task = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}}
    values = {
        "RANK": rank,
        "LOCAL_RANK": rank % ranks,
        "GROUP_RANK": cluster.rank,
        "NODE_RANK": cluster.rank,
        "WORLD_SIZE": len(places),
        "LOCAL_WORLD_SIZE": ranks,
        "GROUP_WORLD_SIZE": len(hosts),
        "MASTER_ADDR": places[0],
        "MASTER_PORT": cluster.base_port + MASTER_PORT,
        "TORCHELASTIC_RUN_ID": "hetero",  # without it Lightning ignores RANK
        "TF_CONFIG": json.dumps(task),
    }
    defaults: dict[str, object] = {}  # what the job's environment has set stays
    if cluster.network_interface in [name for _, name in socket.if_nameindex()]:
        for library in ("GLOO", "NCCL", "TP"):  # they would guess
            defaults[f"{library}_SOCKET_IFNAME"] = cluster.network_interface
    if ranks > 1:
        defaults["OMP_NUM_THREADS"] = max(1, len(os.sched_getaffinity(0)) // ranks)
    values |= {name: value for name, value in defaults.items() if name not in os.environ}
    return {name: str(value) for name, value in values.items()}


def server_address(cluster: Cluster, host: str) -> str:
    """Where the data server of a host is reached, HOST:PORT."""
    return f"{cluster.address(host)}:{cluster.base_port + SERVER_PORT}"


def spare_address(cluster: Cluster) -> str:
    """Where only this training host's ranks reach a server on its spare cores: no network."""
    return f"unix-abstract:{cluster.host}:{cluster.base_port}"


def server_environment(cluster: Cluster, data_hosts: list[str]) -> dict[str, str]:
    """What this host's data server is told; README has the table."""
    worker_port = cluster.base_port + WORKER_PORT + sorted(cluster.hosts).index(cluster.host)
    values = {
        "HETERO_SERVE_AT": f"{cluster.bind_address}:{cluster.base_port + SERVER_PORT}",
        "HETERO_WORKER": f"{cluster.address(cluster.host)}:{worker_port}",
        "HETERO_FIRST": "1" if data_hosts[0] == cluster.host else "0",
        "HETERO_JOURNAL": str(BASE_DIR / "journal"),
    }
    if cluster.host not in data_hosts:  # on a training host: for its ranks, who have the GPUs
        values |= {"HETERO_SERVE_AT": spare_address(cluster), "CUDA_VISIBLE_DEVICES": "-1"}
    return values


def proxy_exceptions(cluster: Cluster) -> dict[str, str]:
    """What keeps libraries from asking a proxy for the job's hosts, as gRPC would for algo-2."""
    hosts = [*cluster.hosts, *cluster.addresses.values()]
    names, values = ("no_proxy", "NO_PROXY", "no_grpc_proxy"), {}
    for name, other in zip(names, ("NO_PROXY", "no_proxy", "no_proxy"), strict=True):
        value = os.environ.get(name, os.environ.get(other, ""))
        if value != "*" or name == "no_grpc_proxy":  # "*" must stand alone; gRPC does not know it
            values[name] = ",".join([*hosts, value]).rstrip(",")
    return values
