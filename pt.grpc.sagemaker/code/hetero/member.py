"""Runs one host's ranks or data server, and reports to the leader."""

import asyncio
import contextlib
import os
import signal
import time
import traceback
from collections.abc import Coroutine

from hetero.messages import HELLO_SECONDS, LONGEST_LINE, TOKEN, Phase, receive, send
from hetero.plan import Plan
from hetero.process import Process
from hetero.spare_cores import run_when_idle, starting_on
from hetero.topology import rank_environment, server_environment

# For a data server: restarts in a row, the run time that resets this count, and restarts in the
# whole job, so that a server that dies every few minutes is not restarted for days.
RESTARTS, HEALTHY_SECONDS, ALL_RESTARTS = 3, 60, 50
KILL_SECONDS = 5  # from SIGTERM to SIGKILL, for processes that still run when the job has ended


class Member:
    """One host of the job: its processes, and its report to the leader.

    `take_part` is the main task, and owns the connection to the leader. It starts a task for each
    rank (`train`) and one for the data server (`serve`). All of these tasks update the report.
    """

    def __init__(self, plan: Plan):
        self.plan, self.cluster = plan, plan.cluster
        self.here = self.cluster.where(self.cluster.host)
        self.tasks: list[asyncio.Task] = []
        self.processes: list[Process] = []  # those that may be running
        self.without_sigterm: list[Process] = []  # ranks that have not been sent SIGTERM
        self.writer: asyncio.StreamWriter | None = None
        first = self.cluster.node_rank * plan.ranks
        self.waiting = [*range(first, first + plan.ranks)]  # ranks that have not been started
        self.report = {
            "token": TOKEN,
            "host": self.cluster.host,
            "sigterm": False,  # whether this host has received it
            "running": [*self.waiting],  # ranks that have not ended
            "failure": None,  # the likeliest cause on this host: [is consequence, when, sentence]
            "server_given_up": None,  # once the data server has been given up: [when, sentence]
            "ended": False,  # whether all processes here have been stopped
        }

    def say(self, **news) -> None:
        """Update the report, and send it to the leader if there is a connection yet."""
        self.report.update(news)
        if self.writer:
            send(self.writer, self.report)

    def say_failure(self, sentence: str, is_consequence: bool = False) -> None:
        """Report a failure, unless this host already has one that is more likely the cause.

        is_consequence: whether it follows from another one, such as a connection that is lost.
        """
        failure = [is_consequence, time.time(), sentence]
        self.say(failure=min(failure, self.report["failure"] or failure))

    async def take_part(self) -> list:
        """Do what the leader says; return [is completed, reason]."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, lambda: self.say(sigterm=True))
        loop.add_signal_handler(signal.SIGCHLD, self.reap)
        if not self.plan.ranks or self.plan.spare_cores:
            self.start(self.serve())
        orders = {"phase": Phase.JOINING, "end": None, "refused": ""}
        try:
            reader = await self.join()
            while orders["phase"] < Phase.EXITING:
                orders |= await receive(reader, self.plan.patience(self.cluster.host))
                if orders["refused"]:
                    raise ConnectionError(f"refused, {orders['refused']}")
                if orders["phase"] == Phase.STOPPING:  # data servers go on for the last steps
                    self.stop_ranks()
                while self.waiting and orders["phase"] == Phase.TRAINING:
                    self.start(self.train(self.waiting.pop(0)))
                await asyncio.sleep(0)  # these tasks start their ranks before the next orders
                if orders["phase"] >= Phase.ENDING:
                    await self.end_all()
                self.say(ended=orders["phase"] >= Phase.ENDING)
        except OSError as error:
            if not orders["end"] or orders["end"][0]:
                leader = self.cluster.where(self.plan.leader)
                orders["end"] = [False, f"{self.here} lost the leader, {leader}: {error}."]
        await self.end_all()
        if self.writer:
            self.writer.close()
        for number in (signal.SIGCHLD, signal.SIGTERM):  # asyncio, as it closes, would print errors
            loop.remove_signal_handler(number)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it comes too late to change the outcome
        return orders["end"]

    async def join(self) -> asyncio.StreamReader:
        """Connect to the leader, which may start later than this host, and send a first report."""
        address = self.cluster.address(self.plan.leader), self.cluster.base_port
        deadline = time.monotonic() + self.plan.join_timeout
        while not self.writer:
            try:
                connecting = asyncio.open_connection(*address, limit=LONGEST_LINE)
                reader, self.writer = await asyncio.wait_for(connecting, HELLO_SECONDS)
            except (OSError, asyncio.TimeoutError) as error:  # not up yet, or too busy
                if time.monotonic() > deadline or self.report["sigterm"]:
                    raise ConnectionError(f"cannot connect, {error or 'no answer'}") from None
                await asyncio.sleep(0.2)
        self.say()
        return reader

    def start(self, work: Coroutine) -> None:
        """Start a task; an error in it, such as a command that does not exist, fails the job."""

        async def guarded() -> None:
            try:
                await work
            except Exception as error:
                traceback.print_exc()
                what = f"{type(error).__name__}: {error}"[:800]  # see LONGEST_LINE
                self.say_failure(f"The launcher on {self.here} failed: {what}.")

        self.tasks.append(asyncio.ensure_future(guarded()))

    def reap(self) -> None:
        """Collect the exit status of children that have ended. PID 1 also inherits orphans."""
        with contextlib.suppress(ChildProcessError):  # there are no children
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                for process in self.processes:
                    if process.popen.pid == ended[0]:
                        process.popen.returncode = os.waitstatus_to_exitcode(ended[1])

    def stop_ranks(self) -> None:
        """Pass SIGTERM on. A rank that has not ended by then fails the job, whatever its status."""
        for rank in self.without_sigterm:
            rank.popen.terminate()  # does nothing if it has ended
            if rank.popen.returncode is None:  # its own failure will say more, and replace this
                self.say_failure(f"On {self.here}, {rank.name} had not ended.", is_consequence=True)
        if self.waiting:
            self.say_failure(f"On {self.here}, training had not started.", is_consequence=True)
            self.report["running"] = []
        self.without_sigterm, self.waiting = [], []

    async def end_all(self) -> None:
        """Send SIGTERM to all processes on this host, and SIGKILL after KILL_SECONDS."""
        for task in self.tasks:
            task.cancel()
        for process in self.processes:
            process.popen.terminate()
        await asyncio.gather(*(process.wait(KILL_SECONDS) for process in self.processes))

    async def train(self, rank: int) -> None:
        """Run a rank until it ends, and report how it ended."""
        environment = rank_environment(self.cluster, rank, self.plan.ranks)
        name = f"rank {rank}" if self.plan.ranks > 1 else ""
        process = Process(self.plan.train, environment, name)
        self.processes.append(process)
        self.without_sigterm.append(process)
        await process.wait()
        how, was_cut_off = process.describe_end()
        if process.popen.returncode:
            self.say_failure(f"On {self.here}, {how}.", was_cut_off)
        self.report["running"].remove(rank)
        self.say()

    async def serve(self) -> None:
        """Run the data server, and restart it when it ends, up to RESTARTS and ALL_RESTARTS."""
        environment = server_environment(self.cluster, self.plan.data_hosts)
        failures, in_all, how = 0, 0, ""
        while failures <= RESTARTS and in_all <= ALL_RESTARTS:
            if failures:
                pause = 2 ** (failures - 1)
                print(f"hetero: {how}; restart in {pause} s", flush=True)
                await asyncio.sleep(pause)
            began = time.monotonic()
            try:
                with starting_on(self.plan.spare_cores):
                    server = Process(self.plan.serve, environment)
            except OSError as error:
                if not self.plan.spare_cores:
                    raise
                print(f"hetero: no data server on the spare cores: {error}", flush=True)
                return
            self.processes.append(server)
            if self.plan.spare_cores:
                run_when_idle(server.popen.pid)
            await server.wait()
            self.processes.remove(server)
            how, _ = server.describe_end()
            failures = 1 if time.monotonic() - began > HEALTHY_SECONDS else failures + 1
            in_all += 1
        reason = f"On {self.here}, {how}, {in_all} times."
        print(f"hetero: {reason} It will not be restarted.", flush=True)
        self.say(server_given_up=[time.time(), reason])
        if self.cluster.host in self.plan.needed:
            self.say_failure(f"{reason} The job cannot do without it.")
