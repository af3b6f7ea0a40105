"""The leader decides, from the hosts' reports, when training starts and how the job ends."""

import asyncio
import hmac
import time
import traceback

from hetero.messages import BEAT_SECONDS, HELLO_SECONDS, TOKEN, Phase, receive, send
from hetero.plan import Plan
from hetero.process import TICK_SECONDS

# The rank that caused a failure may exit after the ranks that lost their connection to it. So wait
# for further failures, after a rank has failed by itself, or after ranks only lost connections.
SETTLE_SECONDS, AWAIT_CAUSE_SECONDS = 1, 10
SIGTERM_SECONDS = 100  # for the ranks to end when the job is stopped; SageMaker kills after 120 s
# At the end of the job: for hosts to stop their processes; for hosts to exit, or to appear.
ENDING_SECONDS, EXITING_SECONDS = 60, 10


class Leader:
    """Decides, from the hosts' reports, when training starts and how the job ends.

    `lead` runs in one task. `meet` runs in a task for each connection, and updates that host's
    entries in `members` and `reports`. Both call `decide` to set how the job ends.
    """

    def __init__(self, plan: Plan):
        self.plan, self.cluster = plan, plan.cluster
        self.members: dict[str, asyncio.StreamWriter] = {}  # the hosts that are connected
        self.reports: dict[str, dict] = {}  # each host's last report: see Member
        self.orders = {"phase": Phase.JOINING, "end": None}  # sent to all hosts
        self.told_at = 0.0
        self.first_seen: dict[str, float] = {"begin": time.monotonic()}  # event -> time
        self.refused: set[tuple[str, str]] = set()  # (address, reason), if already logged

    def absent(self) -> set[str]:
        """Hosts that have not connected yet."""
        return {*self.cluster.hosts} - {*self.reports}

    def unfinished(self) -> set[str]:
        """Hosts whose processes may be running, including hosts that may still connect."""
        return self.absent() | {h for h in self.members if not self.reports[h]["ended"]}

    def advance(self, phase: Phase) -> None:
        """Move on to this phase, unless the job is further, and tell all hosts."""
        self.orders["phase"] = max(phase, self.orders["phase"])
        self.tell()

    def tell(self) -> None:
        """Send the orders to all hosts, which is also a heartbeat that all of them answer."""
        self.told_at = time.monotonic()
        for writer in self.members.values():
            send(writer, self.orders)

    def decide(self, completed: bool, reason: str) -> None:
        """Set how the job ends; a later call can only turn a success into a failure."""
        if not self.orders["end"] or (self.orders["end"][0] and not completed):
            self.orders["end"] = [completed, reason[:1000]]
            self.advance(Phase.ENDING)

    def note(self, event: str) -> None:
        """Remember when an event was first seen."""
        self.first_seen.setdefault(event, time.monotonic())

    def seconds_since(self, event: str) -> float:
        """How long ago an event was first seen."""
        return time.monotonic() - self.first_seen[event]

    def end_by_error(self, error: Exception) -> None:
        """End the job because of an error in the leader's own code."""
        traceback.print_exc()
        what = f"{type(error).__name__}: {error}"
        self.decide(False, f"The leader on {self.cluster.where(self.plan.leader)} failed: {what}.")

    async def lead(self) -> list:
        """Lead the job until it ends on all hosts; return [is completed, reason]."""
        try:
            while not self.orders["end"]:
                self.judge()
                if time.monotonic() > self.told_at + BEAT_SECONDS:
                    self.tell()
                await asyncio.sleep(TICK_SECONDS)
        except Exception as error:
            self.end_by_error(error)
        # Unless a job has failed, SageMaker waits for all of its hosts, and bills a host that hangs
        # until MaxRuntimeInSeconds. So all hosts first stop their processes, and then all exit.
        decided_at = time.monotonic()
        for phase in (Phase.ENDING, Phase.EXITING):
            self.advance(phase)
            phase_began, exits = time.monotonic(), phase is Phase.EXITING
            while late := {*self.members} if exits else self.unfinished():
                seconds = EXITING_SECONDS if exits or late <= self.absent() else ENDING_SECONDS
                if time.monotonic() > phase_began + seconds:
                    where = self.cluster.where(*late)
                    self.decide(False, f"{where} did not end when the training had ended.")
                    break
                if time.monotonic() > self.told_at + BEAT_SECONDS:
                    self.tell()
                await asyncio.sleep(TICK_SECONDS)
        who = f"all hosts but {', '.join(sorted(late))}" if late else "all hosts"
        seconds = time.monotonic() - decided_at
        print(f"hetero: {who} have signed off {seconds:.2f} s after the job's end", flush=True)
        return self.orders["end"]

    def judge(self) -> None:
        """Decide whether the ranks start or stop, and whether and how the job ends."""
        absent, reports = self.absent(), [*self.reports.values()]
        stop = any(report["sigterm"] for report in reports)
        phase = Phase.STOPPING if stop else Phase.JOINING if absent else Phase.TRAINING
        if phase > self.orders["phase"]:
            self.advance(phase)
        failures = [report["failure"] for report in reports if report["failure"]]
        of_data_hosts = [self.reports.get(host, {}) for host in self.plan.data_hosts]
        given_up = [report.get("server_given_up") for report in of_data_hosts]
        if given_up and all(given_up):
            when, sentence = max(given_up)
            failures.append([False, when, f"{sentence} No data host is left."])
        where = {rank: report["host"] for report in reports for rank in report["running"]}
        running = [f"rank {rank} on {self.cluster.where(where[rank])}" for rank in sorted(where)]
        # The first rank that failed by itself, or else the first that lost a connection.
        is_consequence, _, reason = min(failures, default=[True, 0, ""])
        if stop:  # ranks may be writing their checkpoints
            self.note("stop")
            is_time = absent or self.seconds_since("stop") > SIGTERM_SECONDS
            reason = f"The job was stopped (SIGTERM). {reason}".strip()
        elif failures:
            event = "only consequences" if is_consequence else "cause known"
            self.note(event)
            patience = AWAIT_CAUSE_SECONDS if is_consequence else SETTLE_SECONDS
            is_time = self.seconds_since(event) > patience
        else:
            seconds = self.plan.join_timeout
            is_time = absent and self.seconds_since("begin") > seconds
            reason = f"{self.cluster.where(*absent)} did not come up within {seconds} s."
        if absent and stop:
            reason += f" Not there yet: {self.cluster.where(*absent)}."
        elif is_consequence and running and not absent:
            reason += f" Still running: {', '.join(running)}."
        if is_time or not (absent or running):
            self.decide(not (absent or failures or running), reason)

    async def meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Receive a host's reports until it disconnects; refuse connections from others."""
        try:
            report, why = await receive(reader, HELLO_SECONDS), ""
            if not hmac.compare_digest(ascii(report.get("token")), ascii(TOKEN)):
                why = "wrong token"
            elif report.get("host") not in [*self.absent()]:  # not a set: it may be unhashable
                why = "unknown host, or already connected"
        # ascii() of deeply nested JSON raises RecursionError. Tasks are cancelled at the job's end.
        except (OSError, RecursionError, asyncio.CancelledError) as error:
            why = str(error) or "the job has ended"
        if why:
            self.refuse(writer, why)
            return
        host = report["host"]
        self.members[host] = writer
        send(writer, self.orders)
        try:
            while True:
                self.reports[host] = report
                report = await receive(reader, self.plan.patience(host))
        except (OSError, asyncio.CancelledError) as error:  # cancelled if it hangs at the end
            if isinstance(error, TimeoutError) or self.orders["phase"] < Phase.EXITING:
                self.decide(False, f"The launcher on {self.cluster.where(host)} is gone: {error}.")
        except Exception as error:
            self.end_by_error(error)
        finally:
            del self.members[host]
            writer.close()

    def refuse(self, writer: asyncio.StreamWriter, why: str) -> None:
        """Refuse a connection, and log this once for each address and reason."""
        send(writer, {"refused": why})
        writer.close()
        address = (writer.get_extra_info("peername") or ["?"])[0]
        if (address, why) not in self.refused:
            self.refused.add((address, why))
            print(f"hetero: refused a connection from {address}: {why}", flush=True)
