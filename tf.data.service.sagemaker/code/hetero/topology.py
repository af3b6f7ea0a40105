"""What SageMaker tells a host: its name, the other hosts, and the job's hyperparameters."""

import contextlib
import json
import os
import re
import socket
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import getoutput

BASE_DIR = Path(os.environ.get("SAGEMAKER_BASE_DIR", "/opt/ml"))
ONLY_GROUP = "homogeneousCluster"  # SageMaker's name for the only group of a homogeneous job
BASE_PORT = 7710  # the leader listens here
# Offsets from BASE_PORT: rank 0's MASTER_PORT, the data servers' port, and the start of a range: a
# second port for each host's server, then a TF_CONFIG port for each rank. Within the range every
# port is used once, since hosts may share a machine.
MASTER_PORT, SERVER_PORT, WORKER_PORT = 1, 2, 10
# Instance types with EFA, AWS's fast network for NCCL, as in the lists of the SDK's own driver.
RDMA = ("p4d.24xlarge", "p4de.24xlarge", "p5.48xlarge", "p5e.48xlarge", "trn1.32xlarge")
EFA = (*RDMA, "g4dn.8xlarge", "g4dn.12xlarge", "g5.48xlarge", "p3dn.24xlarge")


@dataclass(frozen=True)
class Cluster:
    """The job's hosts (algo-1, algo-2, ...), from /opt/ml/input/config/resourceconfig.json."""

    host: str
    group: str
    instance_type: str
    network_interface: str
    groups: dict[str, list[str]]  # group -> its hosts, sorted by number
    addresses: dict[str, str] = field(default_factory=dict)  # empty on AWS: host names resolve
    base_port: int = BASE_PORT

    @property
    def hosts(self) -> list[str]:
        """All hosts, group by group."""
        return sum(self.groups.values(), [])

    @property
    def node_rank(self) -> int:
        """This host's index in its group, from 0."""
        return self.groups[self.group].index(self.host)

    @property
    def bind_address(self) -> str:
        """The address that servers on this host listen on."""
        return self.addresses.get(self.host, "0.0.0.0")

    def address(self, host: str) -> str:
        """The address or name at which `host` can be reached."""
        return self.addresses.get(host, host)

    def where(self, *hosts: str) -> str:
        """The hosts with their groups, for messages: "algo-1 (data_group), algo-2 (...)"."""
        group_of = {host: group for group, members in self.groups.items() for host in members}
        return ", ".join(f"{host} ({group_of[host]})" for host in sorted(hosts))


def read_cluster(base_dir: Path = BASE_DIR) -> Cluster:
    """Read resourceconfig.json. Without instance groups (SDK local mode), all hosts are a group."""
    config = json.loads((base_dir / "input" / "config" / "resourceconfig.json").read_text())
    default = [{"instance_group_name": ONLY_GROUP, "hosts": config.get("hosts", [])}]
    groups = config.get("instance_groups", default)
    by_number = {
        group["instance_group_name"]: sorted(group["hosts"], key=lambda host: (len(host), host))
        for group in groups
    }
    # Set only when all hosts share a machine: their loopback addresses, and the job's base port.
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
    """Return the job's hyperparameters, formatted as by SDK v3: ["--batch-size", "128"]."""
    told, words = os.environ.get("SM_HPS"), []  # the SDK sets it, plain boto3 does not
    path = BASE_DIR / "input" / "config" / "hyperparameters.json"
    text = told or (path.read_text("utf-8") if path.exists() else "{}")
    for name, value in json.loads(text).items():
        with contextlib.suppress(TypeError, ValueError):  # in the file every value is a text
            value = value if told else json.loads(value)
        if not name.startswith(("sagemaker_", "_tuning_objective_metric")):  # SageMaker's own
            words += [f"--{name}", value if isinstance(value, str) else json.dumps(value)]
    return words


def accelerators() -> int:
    """Return how many GPUs, or else NeuronCores, this host has; 1 if none."""
    gpus, cores = os.environ.get("SM_NUM_GPUS"), os.environ.get("SM_NUM_NEURONS")
    # Plain boto3 sets neither of them, so count as the SDK does.
    gpus = gpus or len(re.findall("(?m)^GPU ", getoutput("nvidia-smi --list-gpus")))
    cores = cores or sum(map(int, re.findall(r'"nc_count": *(\d+)', getoutput("neuron-ls -j"))))
    return int(gpus) or int(cores) or 1


def rank_environment(cluster: Cluster, rank: int, ranks: int) -> dict[str, str]:
    """Return a rank's variables: torchrun's and TF_CONFIG. `ranks`: how many this host has."""
    hosts = cluster.groups[cluster.group]
    places = [cluster.address(host) for host in hosts for _ in range(ranks)]
    first_port = cluster.base_port + WORKER_PORT + len(cluster.hosts)
    workers = [f"{place}:{first_port + n}" for n, place in enumerate(places)]
    task = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}}
    values = {
        "RANK": rank,
        "LOCAL_RANK": rank % ranks,
        "GROUP_RANK": cluster.node_rank,
        "NODE_RANK": cluster.node_rank,
        "WORLD_SIZE": len(places),
        "LOCAL_WORLD_SIZE": ranks,
        "GROUP_WORLD_SIZE": len(hosts),
        "MASTER_ADDR": places[0],
        "MASTER_PORT": cluster.base_port + MASTER_PORT,
        "TORCHELASTIC_RUN_ID": "hetero",  # without it Lightning ignores RANK
        "TF_CONFIG": json.dumps(task),
    }
    defaults: dict[str, object] = {}  # used unless the job's environment sets them
    if cluster.network_interface in [name for _, name in socket.if_nameindex()]:
        for library in ("GLOO", "NCCL", "TP"):  # otherwise they guess the interface
            defaults[f"{library}_SOCKET_IFNAME"] = cluster.network_interface
    kind = cluster.instance_type.removeprefix("ml.")
    if kind in EFA:
        defaults["FI_PROVIDER"] = "efa"
    if kind in RDMA:
        defaults |= {"FI_EFA_USE_DEVICE_RDMA": 1, "RDMAV_FORK_SAFE": 1}
    # Without it, aws-ofi-nccl up to 1.5, as in AWS's image of TensorFlow 2.12, may give wrong sums.
    # Newer versions, which p5 needs, choose the protocol themselves, and often a faster one.
    if kind in EFA and not kind.startswith("p5"):
        defaults["NCCL_PROTO"] = "simple"
    if ranks > 1:
        defaults["OMP_NUM_THREADS"] = max(1, len(os.sched_getaffinity(0)) // ranks)
    values |= {name: value for name, value in defaults.items() if name not in os.environ}
    return {name: str(value) for name, value in values.items()}


def server_address(cluster: Cluster, host: str) -> str:
    """Return the address of a host's data server, HOST:PORT."""
    return f"{cluster.address(host)}:{cluster.base_port + SERVER_PORT}"


def spare_address(cluster: Cluster) -> str:
    """Return the address of the server on spare cores: a Unix socket that only this host has."""
    return f"unix-abstract:{cluster.host}:{cluster.base_port}"


def server_environment(cluster: Cluster, data_hosts: list[str]) -> dict[str, str]:
    """Return the data server's variables; the table in job.md describes them."""
    worker_port = cluster.base_port + WORKER_PORT + sorted(cluster.hosts).index(cluster.host)
    values = {
        "HETERO_SERVE_AT": f"{cluster.bind_address}:{cluster.base_port + SERVER_PORT}",
        "HETERO_WORKER": f"{cluster.address(cluster.host)}:{worker_port}",
        "HETERO_FIRST": "1" if data_hosts[0] == cluster.host else "0",
        "HETERO_JOURNAL": str(BASE_DIR / "journal"),
    }
    if cluster.host not in data_hosts:  # on a training host: leave the GPUs to its ranks
        values |= {"HETERO_SERVE_AT": spare_address(cluster), "CUDA_VISIBLE_DEVICES": "-1"}
    return values


def proxy_exceptions(cluster: Cluster) -> dict[str, str]:
    """Return variables that keep libraries like gRPC from using a proxy for the job's hosts."""
    hosts = [*cluster.hosts, *cluster.addresses.values()]
    names, values = ("no_proxy", "NO_PROXY", "no_grpc_proxy"), {}
    for name, other in zip(names, ("NO_PROXY", "no_proxy", "no_proxy"), strict=True):
        value = os.environ.get(name, os.environ.get(other, ""))
        if value != "*" or name == "no_grpc_proxy":  # "*" must stand alone; gRPC ignores it
            values[name] = ",".join([*hosts, value]).rstrip(",")
    return values
