"""A host's part of the job: it runs its ranks or data server, and reports to the leader."""

import asyncio
import contextlib
import os
import signal
import time

from hetero.messages import (
    HELLO_SECONDS,
    JOIN_SECONDS,
    LONGEST_LINE,
    LOST_SECONDS,
    TOKEN,
    receive,
    send,
)
from hetero.process import Process
from hetero.topology import Cluster, rank_environment

# Of a data server: restarts in a row, the run after which they are counted anew, and restarts in
# the whole job: one that dies every few minutes may not go on for days.
RESTARTS, HEALTHY_SECONDS, ALL_RESTARTS = 3, 60, 50
STOP_SECONDS = 5  # from SIGTERM to SIGKILL for what still runs when the job has ended


class Host:
    """This host's part of the job: its processes, and what it reports of them to the leader."""

    def __init__(self, cluster: Cluster, leader: str, ranks: int, is_needed: bool):
        self.cluster, self.here, self.leader = cluster, cluster.where(cluster.host), leader
        self.ranks, self.is_needed = ranks, is_needed
        self.tasks: list[asyncio.Future] = []
        self.processes: list[Process] = []  # that may be running
        self.until_sigterm: list[Process] = []  # the ranks among them that have not got it
        self.writer: asyncio.StreamWriter | None = None
        self.report = {"token": TOKEN, "host": cluster.host, "sigterm": False, "stopped": False}
        running = [*range(cluster.rank * ranks, (cluster.rank + 1) * ranks)]
        self.report |= {
            "running": running,  # ranks that have not ended
            "failure": None,  # the first one here: was it cut off, when, a sentence
            "server": None,  # the data server, once it is not restarted: when, a sentence
        }

    def say(self, **news) -> None:
        """Report to the leader, if there is a connection yet."""
        self.report.update(news)
        if self.writer:
            send(self.writer, self.report)

    def say_failure(self, sentence: str, was_cut_off: bool = False) -> None:
        """Report what has gone wrong here, unless something else had before."""
        failure = [was_cut_off, time.time(), sentence]
        self.say(failure=min(failure, self.report["failure"] or failure))

    async def take_part(self, command: list[str], server: list[str] | None) -> list:
        """Do what the leader says; return whether the job is completed, and the reason."""
        loop, waiting = asyncio.get_running_loop(), [*range(self.ranks)]
        loop.add_signal_handler(signal.SIGTERM, lambda: self.say(sigterm=True))
        loop.add_signal_handler(signal.SIGCHLD, self.reap)
        if server:
            self.tasks.append(loop.create_task(self.serve(server)))
        word = {"end": None, "exit": False, "refused": ""}
        try:
            reader = await self.join()
            while not word["exit"]:
                word |= await receive(reader, LOST_SECONDS)
                if word["refused"]:
                    raise ConnectionError(f"refused, {word['refused']}")
                while waiting and word["start"] and not word["stop"]:
                    self.tasks.append(loop.create_task(self.train(command, waiting.pop(0))))
                while self.until_sigterm and word["stop"]:  # data servers stay for the last steps
                    self.until_sigterm.pop().popen.terminate()
                for task in self.tasks:  # has it failed? Such as by a command that is not there
                    if task.done() and not task.cancelled() and (error := task.exception()):
                        self.say_failure(f"The launcher on {self.here} failed: {error}.")
                if word["end"]:
                    await self.stop_all()
                self.say(stopped=bool(word["end"]))
        except OSError as error:
            if not word["end"] or word["end"][0]:
                leader = self.cluster.where(self.leader)
                word["end"] = [False, f"{self.here} lost the leader, {leader}: {error}."]
        await self.stop_all()
        if self.writer:
            self.writer.close()
        return word["end"]

    def reap(self) -> None:
        """Take the status of each child that has ended: PID 1 has those that others left, too."""
        with contextlib.suppress(ChildProcessError):  # it has no child
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                for process in self.processes:
                    if process.popen.pid == ended[0]:
                        process.popen.returncode = os.waitstatus_to_exitcode(ended[1])

    async def join(self) -> asyncio.StreamReader:
        """Connect with the leader, which may come up later than this host, and say hello."""
        address = self.cluster.address(self.leader), self.cluster.base_port
        deadline = time.monotonic() + JOIN_SECONDS
        while not self.writer:
            try:
                connecting = asyncio.open_connection(*address, limit=LONGEST_LINE)
                reader, self.writer = await asyncio.wait_for(connecting, HELLO_SECONDS)
            except (OSError, asyncio.TimeoutError) as error:  # not there yet, or too busy
                if time.monotonic() > deadline or self.report["sigterm"]:
                    raise ConnectionError(f"not there, {error}") from None
                await asyncio.sleep(0.2)
        self.say()
        return reader

    async def stop_all(self) -> None:
        """SIGTERM for all that runs here, and SIGKILL after STOP_SECONDS."""
        for task in self.tasks:
            task.cancel()
        for process in self.processes:
            process.popen.terminate()
        await asyncio.gather(*(process.ended(STOP_SECONDS) for process in self.processes))

    async def train(self, command: list[str], local_rank: int) -> None:
        """Run a rank to its end."""
        environment = rank_environment(self.cluster, local_rank, self.ranks)
        name = f"rank {environment['RANK']}" if self.ranks > 1 else ""
        process = Process(command, environment, name)
        self.processes.append(process)
        self.until_sigterm.append(process)
        await process.ended()
        how, was_cut_off = process.describe_end()
        if process.popen.returncode:
            self.say_failure(f"On {self.here}, {how}.", was_cut_off)
        self.report["running"].remove(int(environment["RANK"]))
        self.say()

    async def serve(self, command: list[str]) -> None:
        """Keep a data server running: start it again when it ends, but not too often."""
        failures, in_all, how = 0, 0, ""
        while failures <= RESTARTS and in_all <= ALL_RESTARTS:
            if failures:
                pause = 2 ** (failures - 1)
                print(f"hetero: {how}; restart in {pause} s", flush=True)
                await asyncio.sleep(pause)
            began, server = time.monotonic(), Process(command, {})
            self.processes.append(server)
            await server.ended()
            self.processes.remove(server)
            how, _ = server.describe_end()
            failures = 1 if time.monotonic() - began > HEALTHY_SECONDS else failures + 1
            in_all += 1
        reason = f"On {self.here}, {how}, {in_all} times."
        print(f"hetero: {reason} It is left alone.", flush=True)
        self.say(server=[time.time(), reason])
        if self.is_needed:
            self.say_failure(f"{reason} The job cannot do without it.")
