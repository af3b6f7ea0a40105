"""The cluster of one job: its hosts, their share of this machine, and each host's /opt/ml tree."""

import collections
import contextlib
import json
import os
import random
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from moto.utilities.utils import load_resource

# EC2's descriptions. moto's own module with this table takes almost a second to import.
INSTANCE_TYPES = load_resource("ec2/resources/instance_types.json")

FIRST_PORT, PORTS_PER_JOB, JOBS_AT_ONCE = 10_000, 50, 400  # below Linux's ephemeral ports (32768)
RANDOM = random.SystemRandom()  # what is in a random order on AWS does not depend on any seed here


@dataclass(frozen=True)
class Host:
    """One host of a job: its name as on AWS (algo-1...), loopback address and cores here."""

    name: str
    group: str
    instance_type: str
    address: str
    cores: tuple[int, ...]
    tree: Path

    @property
    def opt_ml(self) -> Path:
        """The folder that the container sees as /opt/ml."""
        return self.tree / "opt" / "ml"


def facts(instance_type: str) -> dict:
    """Return EC2's description of an ml. instance type; raise ValueError if there is none."""
    name = instance_type.removeprefix("ml.")
    if name not in INSTANCE_TYPES:
        raise ValueError(
            f"The local SageMaker does not know the instance type {instance_type!r}, which EC2 may "
            "have retired: is it spelled like ml.c5.xlarge?"
        )
    return INSTANCE_TYPES[name]


def vcpus(instance_type: str) -> int:
    """Return the vCPUs of an ml. instance type; raise ValueError if AWS does not have the type."""
    return facts(instance_type)["VCpuInfo"]["DefaultVCpus"]


def instance_groups(resource_config: dict) -> list[dict]:
    """Return a ResourceConfig's groups; a homogeneous job has one, with the name that AWS uses."""
    single = {"InstanceGroupName": "homogeneousCluster", **resource_config}
    return resource_config.get("InstanceGroups") or [single]


def total_vcpus(counts: Iterable[tuple[str, int]]) -> int:
    """Return the vCPUs of all instances, of which `counts` has each type and their number."""
    return sum(vcpus(instance_type) * count for instance_type, count in counts)


def lock_job_number() -> tuple[int, socket.socket]:
    """Reserve a number that no other local job here has; its addresses and ports follow from it.

    Returns the number, and the socket that holds it, by a name in Linux's abstract namespace: it
    leaves no file, and the end of the process frees it.
    """
    for number in range(JOBS_AT_ONCE):
        lock = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(OSError):
            lock.bind(f"\0local-sagemaker-job-{number}")
            first = FIRST_PORT + number * PORTS_PER_JOB
            for port in range(first, first + PORTS_PER_JOB):
                with socket.socket() as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(("", port))
            return number, lock
        lock.close()
    raise RuntimeError(f"All {JOBS_AT_ONCE} port ranges for local jobs are taken: stop some jobs.")


def share_of_cores(instance_type: str, scale_vcpus: int) -> int:
    """Return how many cores an instance gets, at least one, if all stand for `scale_vcpus`."""
    return max(1, len(os.sched_getaffinity(0)) * vcpus(instance_type) // scale_vcpus)


def plan_hosts(groups: list[dict], scale_vcpus: int, number: int, folder: Path) -> list[Host]:
    """Name the hosts, and divide this machine's cores among them in proportion to their vCPUs.

    Every host gets at least one core, so hosts may have to share cores. Hosts are assigned to
    groups at random, as on AWS.
    """
    available = sorted(os.sched_getaffinity(0))
    load, hosts = dict.fromkeys(available, 0.0), {}
    places = [(g["InstanceType"], g) for g in groups for _ in range(g["InstanceCount"])]
    places.sort(key=lambda place: -vcpus(place[0]))  # the largest first
    order = RANDOM.sample(range(1, len(places) + 1), len(places))
    for host_number, (instance_type, group) in zip(order, places, strict=True):
        share = share_of_cores(instance_type, scale_vcpus)
        cores = sorted(sorted(available, key=lambda core: (load[core], core))[:share])
        for core in cores:
            load[core] += vcpus(instance_type) / len(cores)
        name, group_name = f"algo-{host_number}", group["InstanceGroupName"]
        address = f"127.{1 + number // 250}.{number % 250}.{host_number}"
        tree = folder / name
        hosts[host_number] = Host(name, group_name, instance_type, address, tuple(cores), tree)
    return [host for _, host in sorted(hosts.items())]


def describe_plan(job_name: str, hosts: list[Host]) -> str:
    """Format the plan as a table for the notebook."""
    rows = [("host", "group", "instance type", "core numbers", "address")]
    for h in hosts:
        has_gpu = {"GpuInfo", "NeuronInfo"} & {*facts(h.instance_type)}
        cores = ",".join(map(str, h.cores)) + " (also as GPU)" * bool(has_gpu)
        rows.append((h.name, h.group, h.instance_type, cores, h.address))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    types = collections.Counter(host.instance_type for host in hosts)
    needed = ", ".join(f"{count} {kind}" for kind, count in sorted(types.items()))
    plan = "\n  ".join([f"{job_name} on this machine:", *table])
    return f"{plan}\nOn AWS, it needs quotas for training job usage: {needed}"


def write_configuration(host: Host, hosts: list[Host], request: dict, python: Path) -> None:
    """Create the host's folders below /opt/ml, and write its input/config as SageMaker does.

    `python` is the folder of the interpreter that replaces the image's. The list of all hosts is
    "sorted lexicographically"; AWS promises no order of the groups and their hosts, so each host
    gets a random one here. Source:
    docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-training-algo-running-container.html
    """
    for folder in ("input/config", "input/data", "model", "output/data", "checkpoints"):
        (host.opt_ml / folder).mkdir(parents=True)
    (host.tree / "tmp").mkdir()
    # The interpreter's path may have spaces, and the SDK's start-up script does not quote it.
    (host.tree / "python").symlink_to(python.parent)
    groups = [
        {
            "instance_group_name": group["InstanceGroupName"],
            "instance_type": group["InstanceType"],
            "hosts": [h.name for h in hosts if h.group == group["InstanceGroupName"]],
        }
        for group in instance_groups(request["ResourceConfig"])
    ]
    for names in (groups, *(group["hosts"] for group in groups)):
        RANDOM.shuffle(names)
    resource_config = {
        "current_host": host.name,
        "current_instance_type": host.instance_type,
        "current_group_name": host.group,
        "hosts": sorted(h.name for h in hosts),
        "instance_groups": groups,
        "network_interface_name": "lo",  # eth0 on AWS; here the hosts have loopback addresses
    }
    told = {"S3DistributionType": "FullyReplicated", "RecordWrapperType": "None"}
    input_data_config = {}
    for channel in channels_of(host, request):
        kind = {"ContentType": channel["ContentType"]} if "ContentType" in channel else {}
        input_data_config[channel["ChannelName"]] = {"TrainingInputMode": "File", **told, **kind}
    for name, content in (
        ("resourceconfig", resource_config),
        ("hyperparameters", request.get("HyperParameters", {})),
        ("inputdataconfig", input_data_config),
    ):
        (host.opt_ml / "input" / "config" / f"{name}.json").write_text(json.dumps(content))


def channels_of(host: Host, request: dict) -> list[dict]:
    """Return the channels of the job that this host's instance group gets."""
    channels = request.get("InputDataConfig", [])
    groups = [c["DataSource"]["S3DataSource"].get("InstanceGroupNames") for c in channels]
    return [c for c, own in zip(channels, groups, strict=True) if not own or host.group in own]


def bucket_and_key(uri: str) -> tuple[str, str]:
    """Split an S3 URI; urllib would take what follows `#` or `?` for something else."""
    bucket, _, key = uri.partition("://")[2].partition("/")
    return bucket, key


def own_paths(text: str, host: Host, request: dict) -> str:
    """Replace the folders of a container, such as /opt/ml, with those in the host's own tree."""
    checkpoints = request.get("CheckpointConfig", {}).get("LocalPath", "").rstrip("/")
    folders = "|".join(["/opt/ml", *[re.escape(checkpoints)] * checkpoints.startswith("/")])
    # A folder of that name in a URL or below another folder stays: s3://bucket/opt/ml.
    before = r"(?<![\w.\-/}])|(?<=//)|(?<=\\[nrt])"
    return re.sub(rf"({before})({folders})(?![\w-])", rf"{host.tree}\2", text)


def environment(host: Host, hosts: list[Host], request: dict, number: int) -> dict[str, str]:
    """Return the environment of the host's PID 1: the job's variables, and none of the user's."""
    port = FIRST_PORT + number * PORTS_PER_JOB
    local = {"addresses": {h.name: h.address for h in hosts}, "base_port": port}
    return {
        "PATH": f"{host.tree}/python/bin:/usr/local/bin:/usr/bin:/bin",
        # As in AWS's images: a Python program's lines reach the log as soon as they are printed.
        "PYTHONUNBUFFERED": "1",
        "LANG": "C.UTF-8",
        "HOME": str(host.tree),
        "TMPDIR": str(host.tree / "tmp"),
        "AWS_EC2_METADATA_DISABLED": "true",  # boto3 must not use the machine's own credentials
        **request.get("Environment", {}),
        # In a job, pip may check its requirements, but not change the user's environment.
        "PIP_NO_INDEX": "1",
        "PIP_DRY_RUN": "1",  # for paths and URLs in requirements.txt, which need no index
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_ROOT_USER_ACTION": "ignore",
        "TRAINING_JOB_NAME": request["TrainingJobName"],
        "SAGEMAKER_BASE_DIR": str(host.opt_ml),
        # The hosts' addresses on this machine. Absent on AWS, where the hosts' names resolve.
        "LOCAL_SAGEMAKER": json.dumps(local),
    }
