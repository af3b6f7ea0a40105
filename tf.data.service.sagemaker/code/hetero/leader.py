"""The leader: by what all hosts report, it decides when training starts and how the job ends."""

import asyncio
import hmac
import time

from hetero.messages import (
    BEAT_SECONDS,
    HELLO_SECONDS,
    JOIN_SECONDS,
    LOST_SECONDS,
    TOKEN,
    receive,
    send,
)
from hetero.process import TICK_SECONDS
from hetero.topology import Cluster

# The rank that caused a failure may exit after those that lost it. Seconds to wait for that rank
# if one has failed by itself, and if all so far were cut off from another.
SETTLE_SECONDS, CAUSE_SECONDS = 1, 10
SIGTERM_SECONDS = 100  # for the ranks to end when the job is stopped: SageMaker kills at 120
GOODBYE_SECONDS = 10  # for all hosts to stop their processes at the end, and again for all to exit


class Leader:
    """Decides, by what all hosts report, when training starts and how the job ends."""

    def __init__(self, cluster: Cluster):
        self.cluster = cluster  # the leader's own group is the training group
        self.members: dict[str, asyncio.StreamWriter] = {}  # hosts that have come, and not left
        self.reports: dict[str, dict] = {}  # the last one of each that has come: see Host
        self.since: dict[str, float] = {}  # when `lasts` was first asked of something
        self.word = {"start": False, "stop": False, "end": None, "exit": False}  # for all hosts
        self.told_at = 0.0

    def absent(self) -> set[str]:
        """Hosts that have not come."""
        return {*sum(self.cluster.groups.values(), [])} - {*self.reports}

    def unfinished(self) -> set[str]:
        """Hosts whose processes may be running, those that may come yet among them."""
        return self.absent() | {h for h in self.members if not self.reports[h]["stopped"]}

    def tell(self, **news) -> None:
        """Tell all hosts what to do; `end`: whether the job is completed, and the reason."""
        self.word.update(news)
        self.told_at = time.monotonic()
        for writer in self.members.values():
            send(writer, self.word)

    def decide(self, completed: bool, reason: str) -> None:
        """Settle how the job ends; what comes later can only turn a success into a failure."""
        if not self.word["end"] or (self.word["end"][0] and not completed):
            self.tell(end=[completed, reason[:1000]])

    def lasts(self, what: str, seconds: float) -> bool:
        """Whether something that is so now has been so for some seconds."""
        return time.monotonic() - self.since.setdefault(what, time.monotonic()) > seconds

    async def lead(self) -> list:
        """Lead the hosts to the job's end; return whether it is completed, and the reason."""
        while not self.word["end"]:
            self.judge()
            if time.monotonic() > self.told_at + BEAT_SECONDS:
                self.tell()  # a sign of life, which all hosts answer
            await asyncio.sleep(TICK_SECONDS)
        # SageMaker waits for all hosts of a job that has not failed, and one that hangs now would
        # be billed until MaxRuntimeInSeconds. So first all stop their processes, then all leave.
        began = time.monotonic()
        for exit in (False, True):
            self.tell(exit=exit)
            deadline = time.monotonic() + GOODBYE_SECONDS
            while late := {*self.members} if exit else self.unfinished():
                if time.monotonic() > deadline:
                    where = self.cluster.where(*late)
                    self.decide(False, f"{where} did not end when the training had ended.")
                    break
                await asyncio.sleep(TICK_SECONDS)
        who = f"all hosts but {', '.join(sorted(late))}" if late else "all hosts"
        seconds = time.monotonic() - began
        print(f"hetero: {who} have signed off {seconds:.2f} s after the job's end", flush=True)
        return self.word["end"]

    def judge(self) -> None:
        """Apply the rules by which the training starts and stops, and the job ends."""
        absent, reports = self.cluster.where(*self.absent()), [*self.reports.values()]
        start, stop = not absent, any(report["sigterm"] for report in reports)
        if start > self.word["start"] or stop > self.word["stop"]:
            self.tell(start=start, stop=stop)  # some may not have got their SIGTERM yet
        failures = [report["failure"] for report in reports if report["failure"]]
        for group, hosts in self.cluster.groups.items():
            lost = [self.reports.get(host, {}).get("server") for host in hosts]
            if group != self.cluster.group and all(lost):
                failures.append([False, *lost[0]])
                failures[-1][2] += f" No host of {group} is left."
        where = {rank: report["host"] for report in reports for rank in report["running"]}
        running = [f"rank {rank} on {self.cluster.where(where[rank])}" for rank in sorted(where)]
        # The first that has failed by itself, or else the first that was cut off from another.
        was_cut_off, _, reason = min(failures, default=[True, 0, ""])
        if stop:  # ranks may be writing their checkpoints
            is_time = absent or self.lasts("stop", SIGTERM_SECONDS)
            reason = f"The job was stopped (SIGTERM). {reason}".strip()
        elif failures:
            patience = CAUSE_SECONDS if was_cut_off else SETTLE_SECONDS
            is_time = self.lasts(f"failure {was_cut_off}", patience)
        else:
            is_time = absent and self.lasts("absent", JOIN_SECONDS)
            reason = f"{absent} did not come up within {JOIN_SECONDS} s."
        if absent and stop:
            reason += f" Not there yet: {absent}."
        elif start and was_cut_off and running:
            reason += f" Still running: {', '.join(running)}."
        if is_time or not (absent or running):
            self.decide(start and not failures and not running, reason)

    async def meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Hear a host as long as it is there; refuse a stranger, and print why once in 10 s."""
        try:
            report, why = await receive(reader, HELLO_SECONDS), ""
            if not hmac.compare_digest(ascii(report.get("token")), ascii(TOKEN)):
                why = "wrong token"
            elif report.get("host") not in [*self.absent()]:  # which nothing sent can break
                why = "a host that is not awaited"
        except (OSError, RecursionError, asyncio.CancelledError) as error:  # nested; the end
            why = str(error) or "the job has ended"
        if why:
            send(writer, {"refused": why})
            writer.close()
            if why not in self.since or self.lasts(why, 10):
                self.since[why] = time.monotonic()
                address = (writer.get_extra_info("peername") or ["?"])[0]
                print(f"hetero: refused a connection from {address}: {why}", flush=True)
            return
        host = report["host"]
        self.members[host] = writer
        send(writer, self.word)
        try:
            while True:
                self.reports[host] = report
                report = await receive(reader, LOST_SECONDS)
        except (OSError, asyncio.CancelledError) as error:  # the latter at the end, if it hangs
            del self.members[host]
            writer.close()
            if isinstance(error, TimeoutError) or not self.word["exit"]:
                self.decide(False, f"The launcher on {self.cluster.where(host)} is gone: {error}.")
