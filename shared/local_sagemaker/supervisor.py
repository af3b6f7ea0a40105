"""Run the hosts of one training job as processes on this machine, and clean up afterwards.

As a separate process, it can end the job when the notebook kernel ends or crashes. Its argument is
the job's folder. It reads lines from standard input, which the kernel keeps open: the plan (JSON),
`stop` for StopTrainingJob, and `quit` when the kernel has collected the job's files. On `quit`, at
the end of the input, or when the kernel is gone, it kills every host and removes the folder. Its
events are lines of JSON in `<folder>/events.jsonl`, so that a busy kernel blocks no host's output.

It follows SageMaker's rules as they appear from inside a container:
- Only PID 1 of a container gets SIGTERM, and Linux drops the signal if PID 1 has no handler for it.
- PID 1 becomes the parent of orphaned processes in its container.
- When PID 1 exits, all other processes of its container are killed.
- A host that exits with a non-zero status fails the job, and the other hosts get SIGTERM.
- 120 seconds after SIGTERM, hosts that still run get SIGKILL (API reference of StopTrainingJob).
"""

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

import psutil

SECONDS_FROM_SIGTERM_TO_SIGKILL = 120
CPU_SAMPLE_SECONDS = 1.0
OTHERS = "other programs"  # the "host" that stands for the machine's other programs
SECONDS_TO_DRAIN = 2.0
LONGEST_LINE = 262_144 - 26  # bytes; a longer line becomes several events of CloudWatch
COMMAND_NOT_FOUND = 127  # the exit status that shells and container runtimes use for this
END = b"."  # marks the end of the data, so that `splitlines` shows an unfinished line
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


@dataclass
class RunningHost:
    """One running host: its plan, PID 1, unfinished line of output, CPU use and exit code."""

    plan: dict
    process: subprocess.Popen
    unfinished_line: bytes = b""
    output_open: bool = True
    exit_code: int | None = None
    drained_by: float = float("inf")
    cpu_seconds: float = 0.0
    cpu_sampled_at: float = field(default_factory=time.monotonic)


def next_line(kernel: int) -> bytes:
    """Wait for the kernel's next line and return it; return b"quit" if there will be none."""
    # A process that the kernel forked may keep the pipe open after the kernel's end.
    while os.getppid() == kernel:
        if select.select([sys.stdin], [], [], 0.2)[0]:
            return sys.stdin.buffer.raw.readline().strip() or b"quit"  # `select` sees every line
    return b"quit"


def write(file: TextIO, *events: dict) -> None:
    """Add events, with the time in seconds since 1970, to the file that the kernel follows."""
    file.write("".join(json.dumps({"time": time.time(), **event}) + "\n" for event in events))


def start_host(plan: dict) -> RunningHost:
    """Start the host's entry point on its cores, with only the job's environment variables.

    Raises OSError if the command does not exist or cannot be executed.
    """
    os.sched_setaffinity(0, plan["cores"])  # children inherit it
    libc = ctypes.CDLL(None)

    def become_pid_1() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1)

    process = subprocess.Popen(
        plan["command"],
        env=plan["environment"],
        cwd=plan["tree"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        # Python code between fork and exec is safe here: this process has only one thread.
        preexec_fn=become_pid_1,
    )
    return RunningHost(plan, process)


def read_output(host: RunningHost, events: TextIO) -> None:
    """Write one event for each line that the host has printed; notice when its output ends."""
    data = os.read(host.process.stdout.fileno(), 1 << 16)
    host.output_open = bool(data)
    # This also splits at \r, which progress bars, such as tqdm's, print at each update.
    *lines, rest = (host.unfinished_line + data + END).splitlines()
    if rest != END and (not data or len(rest) > LONGEST_LINE):
        lines, rest = [*lines, rest.removesuffix(END)], END
    host.unfinished_line = rest.removesuffix(END)
    cuts = [(line, i) for line in lines for i in range(0, max(1, len(line)), LONGEST_LINE)]
    texts = [line[i : i + LONGEST_LINE].decode("utf-8", "replace") for line, i in cuts]
    write(events, *({"host": host.plan["name"], "log": text} for text in texts))


def kill_host(base_dir: str) -> None:
    """SIGKILL every process whose environment names this host's /opt/ml, in any session."""
    for process in psutil.process_iter(["environ"]):
        environment = process.info["environ"] or {}  # None: it belongs to another user
        if environment.get("SAGEMAKER_BASE_DIR") == base_dir and process.pid != os.getpid():
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
                process.kill()


def kill_descendants() -> None:
    """SIGKILL all remaining descendants, such as a daemon that cleared its environment."""
    while children := psutil.Process().children(recursive=True):
        for child in children:
            if child.is_running():
                child.kill()
        psutil.wait_procs(children, timeout=1)


def send_sigterm(host: RunningHost) -> None:
    """Send SIGTERM to PID 1 if it has a handler; in a container, Linux drops it otherwise."""
    status = Path("/proc", str(host.process.pid), "status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    if int(caught.split()[1], 16) & (1 << (signal.SIGTERM - 1)):
        host.process.send_signal(signal.SIGTERM)


def sample_cpu(host: RunningHost, events: TextIO) -> None:
    """Write the CPU use since the last sample, on CloudWatch's scale: 100 % for each vCPU."""
    seconds = 0.0
    try:
        root = psutil.Process(host.process.pid)
        for process in [root, *root.children(recursive=True)]:
            seconds += sum(process.cpu_times()[:4])  # user, system, and those of ended children
    except psutil.NoSuchProcess:
        return  # a process has just ended: the next sample covers this time
    now = time.monotonic()
    period = now - host.cpu_sampled_at
    share = (seconds - host.cpu_seconds) / (period * len(host.plan["cores"]))
    percent = 100 * host.plan["vcpus"] * max(0.0, min(1.0, share))
    host.cpu_seconds, host.cpu_sampled_at = seconds, now
    event = {"cpu_utilization": percent, "since": time.time() - period}
    write(events, {"host": host.plan["name"], **event})


def other_programs(hosts: list[RunningHost], own: list[psutil.Process]) -> tuple[float, ...]:
    """Return the time, and the CPU seconds so far: of programs that are not ours, and of all."""
    times = psutil.cpu_times()  # of all cores; steal is the time that other VMs took
    total = sum(times[:8])  # user, nice, system, idle, iowait, irq, softirq, steal
    ours = sum(sum(each.cpu_times()[:2]) for each in own) + sum(h.cpu_seconds for h in hosts)
    return time.time(), total - times.idle - times.iowait - ours, total


def run(plan: dict, folder: Path, kernel: int) -> bool:
    """Run the job to its end, and return True; return False if the kernel says quit or is gone."""
    events = open(folder / "events.jsonl", "a", buffering=1)  # noqa: SIM115 (stays open)
    deadline = time.monotonic() + plan["max_runtime_seconds"]
    kill_at, cause, failed = None, "completed", (None, None)
    own_cores, hosts = os.sched_getaffinity(0), []
    for host_plan in plan["hosts"]:
        try:
            hosts.append(start_host(host_plan))
        except OSError as error:
            name, why = host_plan["name"], f"The entry point cannot be run: {error}"
            end = {"end": "failed", "failed_host": name, "exit_code": COMMAND_NOT_FOUND}
            write(events, {"host": name, "log": why}, end)
            return True
    os.sched_setaffinity(0, own_cores)
    own = [psutil.Process(kernel), psutil.Process()]
    last = other_programs(hosts, own)
    next_sample = time.monotonic() + CPU_SAMPLE_SECONDS

    while any(host.exit_code is None or host.output_open for host in hosts):
        end_now, now = None, time.monotonic()
        outputs = {host.process.stdout: host for host in hosts if host.output_open}
        for ready in select.select([sys.stdin, *outputs], [], [], 0.05)[0]:
            if ready in outputs:
                read_output(outputs[ready], events)
            elif next_line(kernel) == b"stop":
                end_now = "stopped"
            else:
                return False
        if os.getppid() != kernel:
            return False
        for host in hosts:
            if host.exit_code is None and host.process.poll() is not None:
                code = host.process.returncode
                host.exit_code = code if code >= 0 else 128 - code  # as containers report signals
                host.drained_by = now + SECONDS_TO_DRAIN
                kill_host(host.plan["base_dir"])
                if host.exit_code != 0 and kill_at is None:
                    end_now, failed = "failed", (host.plan["name"], host.exit_code)
            if now > host.drained_by:
                host.output_open = False  # a daemon holds it; kill_descendants kills that
        running = [host for host in hosts if host.exit_code is None]
        if now >= deadline and kill_at is None:
            end_now = "max_runtime_exceeded"
        if end_now and kill_at is None:
            cause, kill_at = end_now, now + SECONDS_FROM_SIGTERM_TO_SIGKILL
            for host in running:
                send_sigterm(host)
        if kill_at is not None and now >= kill_at:
            for host in running:
                kill_host(host.plan["base_dir"])
        if now >= next_sample:
            next_sample = now + CPU_SAMPLE_SECONDS
            for host in running:
                sample_cpu(host, events)
            before, last = last, other_programs(hosts, own)
            if last[2] > before[2]:
                percent = 100 * (last[1] - before[1]) / (last[2] - before[2])
                write(events, {"host": OTHERS, "cpu_utilization": percent, "since": before[0]})
    write(events, {"end": cause, "failed_host": failed[0], "exit_code": failed[1]})
    return True


def main() -> None:
    """Run the job; in the end, always kill all of its processes and remove its folder."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the kernel
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # so that kill_descendants finds orphans
    kernel, plan = os.getppid(), {"hosts": []}
    folder = Path(sys.argv[1])
    try:
        if (line := next_line(kernel)) != b"quit":
            plan = json.loads(line)
            ended = run(plan, folder, kernel)
            while ended and next_line(kernel) != b"quit":
                continue  # the kernel is collecting the job's files
    finally:
        for host in plan["hosts"]:
            kill_host(host["base_dir"])
        kill_descendants()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
