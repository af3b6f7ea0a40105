"""The job on this host, from its first line in the log to its last."""

import asyncio
import atexit
import os
import sys
from collections.abc import Collection

from hetero.host import Host
from hetero.leader import Leader
from hetero.messages import LONGEST_LINE, TOKEN
from hetero.topology import BASE_DIR, Cluster, proxy_exceptions


def run(
    cluster: Cluster,
    training_group: str,
    commands: dict[str, list[str]],
    ranks: int = 1,
    beside: list[str] | None = None,
    needed: Collection[str] = (),
) -> None:
    """Run this host's part of the job, and exit with status 1 if the job fails.

    commands: what the hosts of each group run. The command of `training_group` starts when all
    hosts are there, `ranks` times on each of its hosts; when all ranks have ended, the job ends.
    The other commands are servers, and run until then. One that ends is started again, a few times,
    and then left alone; the job fails if it was the last of its group, or on a host that is
    `needed`.
    beside: the command of a server that the training hosts run, too.
    """
    who = f"host={cluster.host} group={cluster.group} instance_type={cluster.instance_type}"
    print(who, flush=True)
    # The log's last line, after a failure's sentence: readers of the log see that it is complete.
    atexit.register(print, f"host={cluster.host} ends", flush=True)
    groups, known = sorted(cluster.groups), sorted(commands)
    if training_group not in groups:
        fail(f"No instance group is named {training_group!r}, the one to train, among {groups}.")
    if unknown := [group for group in groups if group not in commands]:
        fail(f"launcher.py has commands for {known}, but none for {unknown} among {groups}.")
    if not TOKEN and sum(map(len, cluster.groups.values())) > 1:
        fail("The job has no token: put HETERO_TOKEN, a random text, into the job's environment.")
    os.environ.update(proxy_exceptions(cluster))  # for all that this host starts
    trains, leader_host = cluster.group == training_group, cluster.groups[training_group][0]
    command = commands[cluster.group]
    server = beside if trains else command

    async def take_part() -> list:
        host = Host(cluster, leader_host, ranks if trains else 0, cluster.host in needed)
        if cluster.host != leader_host:
            return await host.take_part(command, server)
        leader, address = Leader(cluster), (cluster.bind_address, cluster.base_port)
        await asyncio.start_server(leader.meet, *address, backlog=512, limit=LONGEST_LINE)
        leading = asyncio.ensure_future(leader.lead())
        leader.decide(*await host.take_part(command, server))  # as it has decided, in most cases
        return await leading

    try:
        completed, reason = asyncio.run(take_part())
    except OSError as error:  # such as a port that is taken
        completed, reason = False, f"The launcher on {cluster.where(cluster.host)} failed: {error}."
    if not completed:
        fail(reason)


def fail(sentence: str) -> None:
    """End this host, and with it the job, with `sentence` as the FailureReason."""
    (BASE_DIR / "output").mkdir(parents=True, exist_ok=True)
    (BASE_DIR / "output" / "failure").write_text(sentence[:1024])  # SageMaker shows no more
    sys.exit(f"hetero: {sentence}")
