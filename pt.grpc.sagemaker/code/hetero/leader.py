"""The leader: by what all hosts report, it decides when training starts and how the job ends."""

import asyncio
import hmac
import time
import traceback

from hetero.messages import BEAT_SECONDS, HELLO_SECONDS, TOKEN, receive, send
from hetero.plan import Plan
from hetero.process import TICK_SECONDS

# The rank that caused a failure may exit after those that lost it. Seconds to wait for that rank
# if one has failed by itself, and if all so far were cut off from another.
SETTLE_SECONDS, CAUSE_SECONDS = 1, 10
SIGTERM_SECONDS = 100  # for the ranks to end when the job is stopped: SageMaker kills at 120
# At the end: for all to stop their processes; for them to exit, and for those that have not come.
STOP_SECONDS, EXIT_SECONDS = 60, 10


class Leader:
    """Decides, by what all hosts report, when training starts and how the job ends.

    `lead` is one task. `meet` is one for each connection, and keeps that host's entries of
    `members` and `reports`. Whatever happens in either, `decide` has the last word.
    """

    def __init__(self, plan: Plan):
        self.plan, self.cluster = plan, plan.cluster
        self.members: dict[str, asyncio.StreamWriter] = {}  # hosts that have come, and not left
        self.reports: dict[str, dict] = {}  # the last one of each that has come: see Member
        self.word = {"start": False, "stop": False, "end": None, "exit": False}  # for all hosts
        self.told_at = 0.0
        self.first_seen: dict[str, float] = {"begin": time.monotonic()}  # by event
        self.refused: set[tuple[str, str]] = set()  # addresses and reasons that the log has

    def absent(self) -> set[str]:
        """Hosts that have not come."""
        return {*self.cluster.hosts} - {*self.reports}

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

    def note(self, event: str) -> None:
        """Remember when an event was first seen."""
        self.first_seen.setdefault(event, time.monotonic())

    def seconds_since(self, event: str) -> float:
        """How long ago it was first seen."""
        return time.monotonic() - self.first_seen[event]

    def fail(self, error: Exception) -> None:
        """End the job for an error in the leader's own code."""
        traceback.print_exc()
        what = f"{type(error).__name__}: {error}"
        self.decide(False, f"The leader on {self.cluster.where(self.plan.leader)} failed: {what}.")

    async def lead(self) -> list:
        """Lead the hosts to the job's end; return whether it is completed, and the reason."""
        try:
            while not self.word["end"]:
                self.judge()
                if time.monotonic() > self.told_at + BEAT_SECONDS:
                    self.tell()  # a sign of life, which all hosts answer
                await asyncio.sleep(TICK_SECONDS)
        except Exception as error:
            self.fail(error)
        # SageMaker waits for all hosts of a job that has not failed, and one that hangs now would
        # be billed until MaxRuntimeInSeconds. So first all stop their processes, then all leave.
        began = time.monotonic()
        for exit in (False, True):
            self.tell(exit=exit)
            begun = time.monotonic()
            while late := {*self.members} if exit else self.unfinished():
                seconds = EXIT_SECONDS if exit or late <= self.absent() else STOP_SECONDS
                if time.monotonic() > begun + seconds:
                    where = self.cluster.where(*late)
                    self.decide(False, f"{where} did not end when the training had ended.")
                    break
                if time.monotonic() > self.told_at + BEAT_SECONDS:
                    self.tell()
                await asyncio.sleep(TICK_SECONDS)
        who = f"all hosts but {', '.join(sorted(late))}" if late else "all hosts"
        seconds = time.monotonic() - began
        print(f"hetero: {who} have signed off {seconds:.2f} s after the job's end", flush=True)
        return self.word["end"]

    def judge(self) -> None:
        """Apply the rules by which the training starts and stops, and the job ends."""
        absent, reports = self.absent(), [*self.reports.values()]
        start, stop = not absent, any(report["sigterm"] for report in reports)
        if start > self.word["start"] or stop > self.word["stop"]:
            self.tell(start=start, stop=stop)  # some may not have got their SIGTERM yet
        failures = [report["failure"] for report in reports if report["failure"]]
        lost = [self.reports.get(host, {}).get("server") for host in self.plan.data_hosts]
        if lost and all(lost):
            when, sentence = max(lost)
            failures.append([False, when, f"{sentence} No data host is left."])
        where = {rank: report["host"] for report in reports for rank in report["running"]}
        running = [f"rank {rank} on {self.cluster.where(where[rank])}" for rank in sorted(where)]
        # The first that has failed by itself, or else the first that was cut off from another.
        was_cut_off, _, reason = min(failures, default=[True, 0, ""])
        if stop:  # ranks may be writing their checkpoints
            self.note("stop")
            is_time = absent or self.seconds_since("stop") > SIGTERM_SECONDS
            reason = f"The job was stopped (SIGTERM). {reason}".strip()
        elif failures:
            event = "cut off" if was_cut_off else "failure"
            self.note(event)
            patience = CAUSE_SECONDS if was_cut_off else SETTLE_SECONDS
            is_time = self.seconds_since(event) > patience
        else:
            seconds = self.plan.join_seconds
            is_time = absent and self.seconds_since("begin") > seconds
            reason = f"{self.cluster.where(*absent)} did not come up within {seconds} s."
        if absent and stop:
            reason += f" Not there yet: {self.cluster.where(*absent)}."
        elif start and was_cut_off and running:
            reason += f" Still running: {', '.join(running)}."
        if is_time or not (absent or running):
            self.decide(start and not failures and not running, reason)

    async def meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Hear a host as long as it is there; refuse a stranger."""
        try:
            report, why = await receive(reader, HELLO_SECONDS), ""
            if not hmac.compare_digest(ascii(report.get("token")), ascii(TOKEN)):
                why = "wrong token"
            elif report.get("host") not in [*self.absent()]:  # not a set: it may be unhashable
                why = "a host that is not awaited"
        except (OSError, RecursionError, asyncio.CancelledError) as error:  # deep; the job's end
            why = str(error) or "the job has ended"
        if why:
            self.refuse(writer, why)
            return
        host = report["host"]
        self.members[host] = writer
        send(writer, self.word)
        try:
            while True:
                self.reports[host] = report
                report = await receive(reader, self.plan.patience(host))
        except (OSError, asyncio.CancelledError) as error:  # the latter at the end, if it hangs
            if isinstance(error, TimeoutError) or not self.word["exit"]:
                self.decide(False, f"The launcher on {self.cluster.where(host)} is gone: {error}.")
        except Exception as error:
            self.fail(error)
        finally:
            del self.members[host]
            writer.close()

    def refuse(self, writer: asyncio.StreamWriter, why: str) -> None:
        """Tell a stranger why, and the log, once for each address and reason."""
        send(writer, {"refused": why})
        writer.close()
        address = (writer.get_extra_info("peername") or ["?"])[0]
        if (address, why) not in self.refused:
            self.refused.add((address, why))
            print(f"hetero: refused a connection from {address}: {why}", flush=True)
