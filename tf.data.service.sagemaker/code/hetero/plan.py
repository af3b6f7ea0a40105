"""Which host runs what."""

from collections.abc import Sequence
from dataclasses import dataclass

from hetero.messages import TOKEN
from hetero.topology import Cluster


@dataclass(frozen=True)
class Plan:
    """What the hosts of the job run, and how patient they are with each other."""

    cluster: Cluster
    leader: str  # the training group's first host
    train: list[str]  # a rank's command
    ranks: int  # on each training host
    serve: list[str]  # a data server's command
    data_hosts: list[str]
    needed: list[str]  # data hosts whose server the job cannot do without
    spare_cores: list[int]  # vCPUs of this training host for a data server beside its ranks
    join_seconds: float
    training_seconds: float
    data_seconds: float

    def patience(self, host: str) -> float:
        """After how many seconds without a sign of life a host is lost."""
        return self.data_seconds if host in self.data_hosts else self.training_seconds


def check_groups(
    cluster: Cluster, training_group: str, data_groups: Sequence[str], serve: Sequence[str]
) -> str:
    """Say why a job cannot run in these instance groups; "" if it can."""
    groups = sorted(cluster.groups)
    if training_group not in groups:
        return f"No instance group is named {training_group!r}, the one to train, among {groups}."
    if unknown := [g for g in groups if g not in (training_group, *data_groups)]:
        return (
            f"Instance groups {unknown} have nothing to do: {training_group!r} trains, and data is "
            f"served by {[*data_groups]}. Name them with --data-group, or run(data_groups=...)."
        )
    if len(groups) > 1 and training_group in data_groups:
        return f"Instance group {training_group!r} cannot both train and serve data."
    if len(groups) > 1 and not serve:
        return (
            "Data hosts have nothing to run: copy the folder feed/ to where the job starts, or "
            "name a server with --serve."
        )
    if not TOKEN and len(cluster.hosts) > 1:
        return "The job has no token: put HETERO_TOKEN, a random text, into the job's environment."
    return ""
