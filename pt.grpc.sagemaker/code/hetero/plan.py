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
    ranks: int  # on this host; 0 on a data host
    serve: list[str]  # a data server's command
    data_hosts: list[str]
    spare_cores: list[int]  # vCPUs of this training host for a data server beside its ranks
    needed: list[str]  # data hosts that the job cannot do without
    join_seconds: float
    training_seconds: float
    data_seconds: float

    def patience(self, host: str) -> float:
        """How many seconds this host waits for a sign of life of `host`, or `host` for the leader.

        A data host that the training can do without has more of them.
        """
        is_patient = host in self.data_hosts and host not in self.needed
        return self.data_seconds if is_patient else self.training_seconds


def check_groups(
    cluster: Cluster, train_group: str, data_groups: Sequence[str], serve: Sequence[str]
) -> str:
    """Say why a job cannot run in these instance groups; "" if it can."""
    groups = sorted(cluster.groups)
    if train_group not in groups:
        return (
            f"No instance group is named {train_group!r}, the one to train, among {groups}. Name "
            "yours with --train-group, or run(train_group=...)."
        )
    if unknown := [g for g in groups if g not in (train_group, *data_groups)]:
        return (
            f"Instance groups {unknown} have nothing to do: {train_group!r} trains, and data is "
            f"served by {[*data_groups]}. Name them with --data-group, or run(data_groups=...)."
        )
    if len(groups) > 1 and train_group in data_groups:
        return f"Instance group {train_group!r} cannot both train and serve data."
    if len(groups) > 1 and not serve:
        return (
            "Data hosts have nothing to run: copy the folder feed/ to where the job starts, or "
            "name a server with --serve, or run(serve=...)."
        )
    if not TOKEN and len(cluster.hosts) > 1:
        return (
            "The job has no token: put HETERO_TOKEN, a random text such as secrets.token_hex(16), "
            "into the job's environment."
        )
    return ""
