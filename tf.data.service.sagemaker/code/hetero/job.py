"""Runs this host's part of the job, from the first line of its log to the last."""

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
from hetero.spare_cores import find_spare_cores
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
    join_timeout: float = 600,
    training_timeout: float = 60,
    data_timeout: float = 300,
) -> None:
    """Run this host's part of the job, and exit with status 1 if the job fails.

    train: command of each rank. Ranks start when all hosts have connected to the leader. The job
        ends when all ranks have ended.
    serve: command of each data server. A server that ends early is restarted a few times and then
        given up. The job fails when no data host has a server left.
    train_group: name of the training group. If the job has only one group, that group trains.
    data_groups: names of the groups whose hosts serve data. The job need not have all of them.
    ranks: number of ranks on each training host; by default one for each GPU.
    spare_cores: number of vCPUs of each training host that run one more data server, which the job
        can do without; 0 for none. By default all vCPUs except one physical core for each rank, or
        for each GPU if there are more GPUs.
    needed: "first" if the job must fail when it loses the first data host's server.
    join_timeout: how many seconds hosts wait for all others to connect.
    training_timeout, data_timeout: how many seconds a training or data host may be silent; after
        that it counts as lost and the job fails. A data host that is needed gets training_timeout.
        Each host gives up on a silent leader after its own timeout.
    """
    try:
        cluster = read_cluster()
    except FileNotFoundError as error:
        sys.exit(f"hetero: this is not a host of a SageMaker training job: {error}.")
    who = f"host={cluster.host} group={cluster.group} instance_type={cluster.instance_type}"
    print(who, flush=True)
    # The last line of the log, even after a failure: it shows readers that the log is complete.
    atexit.register(print, f"host={cluster.host} ends", flush=True)
    if len(cluster.groups) == 1:
        [train_group], data_groups = cluster.groups, ()
    if problem := check_groups(cluster, train_group, data_groups, serve):
        fail(problem)
    try:
        trains, gpus = cluster.group == train_group, accelerators()
        ranks = ranks or gpus
        data_hosts = [host for group in data_groups for host in cluster.groups.get(group, [])]
        servers, spare = [server_address(cluster, host) for host in data_hosts], []
        if trains and data_hosts:
            # Count GPUs too: a single rank may start a process for each GPU itself.
            spare = find_spare_cores(max(ranks, gpus), spare_cores)
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
            join_timeout=join_timeout,
            training_timeout=training_timeout,
            data_timeout=data_timeout,
        )
        # Lets a script in a subfolder import modules from this folder.
        folders = [os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ.update(proxy_exceptions(cluster), PYTHONPATH=os.pathsep.join(folders))
        os.environ["HETERO_DATA_HOSTS"] = ",".join(servers)
        completed, reason = asyncio.run(take_part(plan))
    except Exception as error:  # for example, the port is in use
        traceback.print_exc()
        where, what = cluster.where(cluster.host), f"{type(error).__name__}: {error}"
        completed, reason = False, f"The launcher on {where} failed: {what}."
    if not completed:
        fail(reason)


async def take_part(plan: Plan) -> list:
    """Run this host's part, and the leader if it is here; return [is completed, reason]."""
    cluster, member = plan.cluster, Member(plan)
    if cluster.host != plan.leader:
        return await member.take_part()
    leader = Leader(plan)
    address = cluster.bind_address, cluster.base_port
    await asyncio.start_server(leader.meet, *address, backlog=512, limit=LONGEST_LINE)
    leading = asyncio.ensure_future(leader.lead())
    try:
        leader.decide(*await member.take_part())  # usually what the leader has already decided
    except Exception as error:
        leader.end_by_error(error)
    return await leading


def fail(sentence: str) -> None:
    """Exit with status 1, which fails the job, with `sentence` as the FailureReason."""
    with contextlib.suppress(OSError):  # not in a training job, or disk full: the log has it
        (BASE_DIR / "output").mkdir(exist_ok=True)
        text = sentence[:1024]  # SageMaker shows at most this much
        (BASE_DIR / "output" / "failure").write_text(text, encoding="utf-8", errors="replace")
    sys.exit(f"hetero: {sentence}")
