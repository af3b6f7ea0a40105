"""Stop jobs of the PyTorch example, or kill or freeze a process, at random moments: `make soak`.

    python tests/soak.py 0 50       seeds 0 to 49

Each job must end within a bounded time, say why if it fails, and leave nothing behind.
"""

import random
import re
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import psutil

from helpers import endings, running
from helpers.jobs import Jobs
from shared import local_sagemaker

AT_ONCE = 4  # jobs that run at the same time: one with a host that hangs takes minutes
TIMEOUT = 60  # seconds that a rank waits for another; starting takes half of that here
SOONER = {
    "parallel.py": ("timedelta(minutes=15)", f"timedelta(seconds={TIMEOUT})"),
    "launcher.py": endings.SILENT_SOONER,
}
# Seconds to start and to notice the failure, until AWS kills a host, and a margin.
LONGEST = TIMEOUT + 60 + endings.AWS_KILLS + 30
ACTIONS = {
    "kill": psutil.Process.kill,
    "terminate": psutil.Process.terminate,
    "hang": psutil.Process.suspend,
}
# If another process hangs, such as a data worker, only MaxRuntimeInSeconds ends the job.
MAY_HANG = ("launcher", "rank", "data server")


@dataclass
class Attempt:
    """What has been done to a job, and when."""

    seed: int
    job: running.Running
    event_at: float  # seconds since 1970
    what: str
    host: str  # that the FailureReason must name; "" if it may name any
    launched: bool  # whether a launcher was there to say why the job fails


def begin(jobs: Jobs, seed: int) -> Attempt:
    """Start a job; after a random time, stop it, or kill, terminate or freeze a process."""
    chance = random.Random(seed)
    job = running.start(
        jobs,
        SOONER,
        hyperparameters={"max-steps": 24, "processes-per-host": 2},
        max_runtime_seconds=900,
    )
    assert job.environment  # read while it runs, since it is needed afterwards
    seconds = chance.uniform(0, 20)
    time.sleep(seconds)
    leading = {
        "launcher": job.launchers(),
        "rank": running.first_of(job.processes(has="RANK")),
        "data server": running.first_of(job.processes(has="HETERO_SERVE_AT")),
    }
    launched, trains = bool(leading["launcher"]), bool(leading["rank"])
    what, host = chance.choice(["stop", *ACTIONS]), ""
    victims = [(name, process) for name in MAY_HANG for process in leading[name]]
    if what != "hang":  # any process: data workers, what the SDK starts before the launcher, ...
        known = {process for _, process in victims}
        victims += [("another", process) for process in job.processes() if process not in known]
    if not victims:
        what = "nothing"
    elif what == "stop":
        job.stop()
    else:
        name, victim = chance.choice(victims)
        if trains and what == "kill" and name in ("launcher", "rank"):
            host = Path(victim.environ()["SAGEMAKER_BASE_DIR"]).parents[1].name
        ACTIONS[what](victim)
        what += f" {name}"
    what += f" after {seconds:.1f} s"
    print(f"{seed}: {what} ...", flush=True)
    return Attempt(seed, job, time.time(), what, host, launched)


def finish(attempt: Attempt) -> str:
    """Wait for the job's end; return a line that says how it ended."""
    job = attempt.job.jobs.wait(attempt.job.name, seconds=LONGEST)
    status, reason = job["TrainingJobStatus"], job.get("FailureReason") or ""
    seconds = running.seconds_to_end(job, attempt.event_at)
    line = f"{attempt.seed}: {attempt.what}: {status} {seconds:.0f} s later"
    assert status != "Stopped" or attempt.what.startswith("stop"), line
    if status == "Failed" and attempt.launched:
        named = rf"AlgorithmError: .*{attempt.host or 'algo-[0-9]'} \(\w+\)"
        trained = any("training finished" in line for line in attempt.job.log())
        if trained and attempt.what.startswith("kill launcher"):
            named += "|AlgorithmError: , exit code: 137$"  # no launcher may be left to say more
        assert re.match(named, reason), f"{line}. {reason}"
    running.assert_nothing_left(attempt.job)
    return f"{line}. {reason}"


def main() -> None:
    """Run the seeds from argv[1] up to, not including, argv[2]; fail if one breaks a promise."""
    broken = []
    seeds = range(int(sys.argv[1]), int(sys.argv[2]))
    with tempfile.TemporaryDirectory() as folder, local_sagemaker.start() as local:
        running.upload_images()
        jobs, begun = Jobs(local.role, Path(folder)), []
        for seed in seeds:
            begun.append(begin(jobs, seed))
            while len(begun) == AT_ONCE or (begun and seed == seeds[-1]):
                attempt = begun.pop(0)
                try:
                    print(finish(attempt), flush=True)
                except AssertionError as error:
                    broken.append(f"{attempt.seed}: {attempt.what}: {error}")
                    print(f"BROKEN {broken[-1]}", flush=True)
    if broken:
        sys.exit("\n".join(broken))
    print(f"{len(seeds)} seeds: all jobs ended as they should")


if __name__ == "__main__":
    main()
