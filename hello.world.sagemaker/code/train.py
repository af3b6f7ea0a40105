"""Print what this host knows about its heterogeneous cluster, read in two ways that must agree.

SageMaker starts this script on every host of every instance group. The first way is the
`sagemaker_training` toolkit in AWS's framework containers. The second reads the same facts from
/opt/ml/input/config/resourceconfig.json. It needs only Python, so it works in any container.
"""

import json
import multiprocessing
import os
import shutil
import subprocess
from pathlib import Path

try:
    from sagemaker_training import environment as toolkit
except ImportError:  # an image of your own may not have it
    toolkit = None

DISTRIBUTED = (  # the kinds of distributed training that SDK v2's hyperparameters can enable
    "mpi",
    "parameter_server",
    "distributed_dataparallel",
    "pytorch_ddp",
    "pytorch_xla_multi_worker",
    "multi_worker_mirrored_strategy",
    "torch_distributed",
)
CONFIG = Path(os.environ.get("SAGEMAKER_BASE_DIR", "/opt/ml")) / "input" / "config"


def read_by_hand() -> dict:
    """Return all that the toolkit says about the cluster, under the toolkit's names.

    Source: "How Amazon SageMaker AI Provides Training Information", SageMaker developer guide.
    """
    config = json.loads((CONFIG / "resourceconfig.json").read_text())
    hyperparameters = json.loads((CONFIG / "hyperparameters.json").read_text())

    hosts, host = config["hosts"], config["current_host"]
    groups = {group["instance_group_name"]: group for group in config["instance_groups"]}
    group = config["current_group_name"]

    # SDK v2's `distribution=` sets these hyperparameters; without it they are absent.
    distributed = any(hyperparameters.get(f"sagemaker_{n}_enabled") == "true" for n in DISTRIBUTED)
    chosen = hyperparameters.get("sagemaker_distribution_instance_groups")
    distribution_groups = json.loads(chosen) if chosen else [group] if distributed else []
    members = [g["hosts"] for name, g in groups.items() if name in distribution_groups]
    distribution_hosts = [host for hosts in members for host in hosts]
    master = distribution_hosts[0] if distribution_hosts else hosts[0]

    return {
        "current_host": host,
        "current_instance_type": config["current_instance_type"],
        "current_instance_group": group,
        "current_instance_group_hosts": groups[group]["hosts"],
        "hosts": hosts,
        "instance_groups": list(groups),
        "instance_groups_dict": groups,
        "is_hetero": len(groups) > 1,
        "distribution_instance_groups": distribution_groups,
        "distribution_hosts": distribution_hosts,
        "master_hostname": master,
        "is_master": host == master,
        "network_interface_name": config["network_interface_name"],
        "topology": config.get("topology", []),
        "num_cpus": multiprocessing.cpu_count(),
        "num_gpus": count_gpus(),
        "num_neurons": count_neurons(config["current_instance_type"]),
    }


def count_gpus() -> int:
    """Return how many GPUs nvidia-smi lists; 0 if there is no nvidia-smi."""
    if not shutil.which("nvidia-smi"):
        return 0
    listing = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True)
    lines = listing.stdout.splitlines() if listing.returncode == 0 else []
    return sum(line.startswith("GPU ") for line in lines)


def count_neurons(instance_type: str) -> int:
    """Return how many Neuron cores (AWS Trainium) neuron-ls lists; 0 if there is no neuron-ls."""
    if "trn2.48xlarge" in instance_type:
        return 64
    if not shutil.which("neuron-ls"):
        return 0
    listing = subprocess.run(["neuron-ls", "-j"], capture_output=True, text=True)
    devices = json.loads(listing.stdout) if listing.returncode == 0 else []
    return sum(device.get("nc_count", 0) for device in devices)


def main() -> None:
    """Print what this host knows, and fail if the two ways differ."""
    by_hand = read_by_hand()
    host, group = by_hand["current_host"], by_hand["current_instance_group"]
    print(f"Hello! host={host} group={group} instance_type={by_hand['current_instance_type']}")

    if toolkit is None:
        print("No sagemaker_training toolkit in this image: read by hand only.")
    else:
        env = toolkit.Environment()
        by_toolkit = {name: getattr(env, name) for name in by_hand if hasattr(env, name)}
        differ = [name for name in by_toolkit if by_toolkit[name] != by_hand[name]]
        if differ:
            raise SystemExit(f"The toolkit and resourceconfig.json differ in {differ}.")
        print(f"Read by the toolkit and by hand: {len(by_toolkit)} facts, all equal.")
        # Older images have older toolkits: `topology`, for example, was added in 5.1.0.
        if unknown := [name for name in by_hand if name not in by_toolkit]:
            print(f"This image's toolkit does not know: {', '.join(unknown)}.")

    for name, value in by_hand.items():
        if name == "instance_groups_dict":
            for member in value.values():
                count, kind = len(member["hosts"]), member["instance_type"]
                print(f"group {member['instance_group_name']}: {count} x {kind}")
        elif name not in ("num_cpus", "topology"):
            print(f"{name}: {value}")
    print(f"host={host} ends")  # shows that the log is complete


if __name__ == "__main__":
    main()
