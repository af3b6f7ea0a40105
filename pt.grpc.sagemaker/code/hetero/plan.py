"""Which host runs what."""

from collections.abc import Sequence
from dataclasses import dataclass

from hetero.messages import TOKEN
from hetero.topology import Cluster


@dataclass(frozen=True)
class Plan:
    """What the hosts of the job run, and how long they wait for each other."""

    cluster: Cluster
    leader: str  # the training group's first host
    train: list[str]  # a rank's command
    ranks: int  # on this host; 0 on a data host
    serve: list[str]  # a data server's command
    data_hosts: list[str]
    spare_cores: list[int]  # vCPUs of this training host that run a data server
    needed: list[str]  # data hosts whose server the job needs
    join_timeout: float
    training_timeout: float
    data_timeout: float

    def patience(self, host: str) -> float:
        """Return how many seconds `host` may be silent, and how many it waits for the leader.

        A data host that the training can do without gets `data_timeout`, all others get
        `training_timeout`.
        """
        is_patient = host in self.data_hosts and host not in self.needed
        return self.data_timeout if is_patient else self.training_timeout


def check_groups(
    cluster: Cluster, train_group: str, data_groups: Sequence[str], serve: Sequence[str]
) -> str:
    """Return why the job cannot run on these instance groups, or "" if it can."""
    groups = sorted(cluster.groups)
    if train_group not in groups:
        return (
            f"The job has no training group {train_group!r}, only {groups}. Name your training "
            "group with --train-group, or run(train_group=...)."
        )
    if unknown := [g for g in groups if g not in (train_group, *data_groups)]:
        return (
            f"Instance groups {unknown} have nothing to do: {train_group!r} trains, and "
            f"{[*data_groups]} serve data. Name them with --data-group, or run(data_groups=...)."
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
            "The job has no token: set HETERO_TOKEN in the job's environment to a random string, "
            "such as secrets.token_hex(16)."
        )
    return ""
