"""The job on this host, from its first line in the log to its last."""

import asyncio
import atexit
import contextlib
import os
import sys
import traceback
from collections.abc import Sequence

from hetero.leader import Leader
from hetero.member import Member
from hetero.messages import LONGEST_LINE
from hetero.plan import Plan, check_groups
from hetero.spare import find_spare_cores
from hetero.topology import (
    BASE_DIR,
    accelerators,
    proxy_exceptions,
    read_cluster,
    server_address,
    spare_address,
)


def run(
    train: list[str],
    serve: Sequence[str] = (),
    *,
    train_group: str = "dnn_group",
    data_groups: Sequence[str] = ("data_group",),
    ranks: int | None = None,
    spare_cores: int | None = None,
    needed: str = "",
    join_seconds: float = 600,
    training_seconds: float = 60,
    data_seconds: float = 300,
) -> None:
    """Run this host's part of the job, and exit with status 1 if the job fails.

    train: the ranks' command. They start when all hosts are there; when all have ended, the job
        ends.
    serve: the command of the data servers, which run until then. One that ends is started again, a
        few times, and then left alone; the job fails if it was the last one.
    train_group: the group that trains. If there is one group only, that one does.
    data_groups: those whose hosts serve data. The job may lack them.
    ranks: on each training host; by default one for each GPU.
    spare_cores: vCPUs of each training host for one more data server, which the job can do without;
        by default all but a physical core for each rank, 0 for none.
    needed: "first" if the job cannot do without the server of the first data host.
    join_seconds: how long all hosts wait for the last one to come.
    training_seconds, data_seconds: after how long without a sign of life a training or data host is
        lost, and the job fails; also how long such a host waits for one of the leader.
    """
    try:
        cluster = read_cluster()
    except FileNotFoundError as error:
        sys.exit(f"hetero: this is not a host of a SageMaker training job: {error}.")
    who = f"host={cluster.host} group={cluster.group} instance_type={cluster.instance_type}"
    print(who, flush=True)
    # The log's last line, after a failure's sentence: readers of the log see that it is complete.
    atexit.register(print, f"host={cluster.host} ends", flush=True)
    if len(cluster.groups) == 1:
        [train_group], data_groups = cluster.groups, ()
    if problem := check_groups(cluster, train_group, data_groups, serve):
        fail(problem)
    try:
        trains, ranks = cluster.group == train_group, ranks or accelerators()
        data_hosts = [host for group in data_groups for host in cluster.groups.get(group, [])]
        servers, spare = [server_address(cluster, host) for host in data_hosts], []
        if trains and data_hosts:
            # A rank may start a process for each GPU itself.
            spare = find_spare_cores(max(ranks, accelerators()), spare_cores)
            servers += [spare_address(cluster)] if spare else []
            print(f"spare_cores={len(spare)}", flush=True)
        plan = Plan(
            cluster=cluster,
            leader=cluster.groups[train_group][0],
            train=train,
            ranks=ranks if trains else 0,
            serve=[*serve],
            data_hosts=data_hosts,
            spare_cores=spare,
            needed=data_hosts[:1] if needed == "first" else [],
            join_seconds=join_seconds,
            training_seconds=training_seconds,
            data_seconds=data_seconds,
        )
        # For all that this host starts: a script in a subfolder finds what is beside that, too.
        folders = [os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ.update(proxy_exceptions(cluster), PYTHONPATH=os.pathsep.join(folders))
        os.environ["HETERO_DATA_HOSTS"] = ",".join(servers)
        completed, reason = asyncio.run(take_part(plan))
    except Exception as error:  # such as a port that is taken
        traceback.print_exc()
        where, what = cluster.where(cluster.host), f"{type(error).__name__}: {error}"
        completed, reason = False, f"The launcher on {where} failed: {what}."
    if not completed:
        fail(reason)


async def take_part(plan: Plan) -> list:
    """Do this host's part, and lead the others from the leader's host; return how the job ends."""
    cluster, member = plan.cluster, Member(plan)
    if cluster.host != plan.leader:
        return await member.take_part()
    leader = Leader(plan)
    address = cluster.bind_address, cluster.base_port
    await asyncio.start_server(leader.meet, *address, backlog=512, limit=LONGEST_LINE)
    leading = asyncio.ensure_future(leader.lead())
    try:
        leader.decide(*await member.take_part())  # as it has decided, in most cases
    except Exception as error:
        leader.fail(error)
    return await leading


def fail(sentence: str) -> None:
    """End this host, and with it the job, with `sentence` as the FailureReason."""
    with contextlib.suppress(OSError):  # no training job, or no space: then the log has it
        (BASE_DIR / "output").mkdir(exist_ok=True)
        text = sentence[:1024]  # SageMaker shows no more
        (BASE_DIR / "output" / "failure").write_text(text, encoding="utf-8", errors="replace")
    sys.exit(f"hetero: {sentence}")
