"""Something happens to a job of the PyTorch example at a random moment: `make soak`.

    python tests/soak.py 0 50       seeds 0 to 49

Whatever it is, the job ends within a bounded time, says why if it fails, and leaves nothing.
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

import endings
from jobs import Jobs
from shared import local_sagemaker

AT_ONCE = 4  # jobs that wait for the end of a host that hangs
TIMEOUT = 60  # seconds that a rank waits for another one; starting takes half of it here
SOONER = {
    "parallel.py": ("timedelta(minutes=15)", f"timedelta(seconds={TIMEOUT})"),
    "launcher.py": endings.SILENT_SOONER,
}
# Seconds: started and noticed, killed, and this machine is busy.
LONGEST = TIMEOUT + 60 + endings.AWS_KILLS + 30
ACTIONS = {
    "kill": psutil.Process.kill,
    "terminate": psutil.Process.terminate,
    "hang": psutil.Process.suspend,
}
# Of what else hangs, such as a data worker, nobody takes notice before MaxRuntimeInSeconds.
MAY_HANG = ("launcher", "rank", "data server")


@dataclass
class Attempt:
    """What has been done to a job."""

    begun: endings.Begun
    what: str
    host: str  # to be named by the FailureReason, if it is clear which one that is
    launched: bool  # whether there was a launcher to say why the job fails


def begin(jobs: Jobs, seed: int) -> Attempt:
    """Start a job and let something happen."""
    chance = random.Random(seed)
    job = endings.start(
        jobs,
        SOONER,
        hyperparameters={"max-steps": 24, "processes-per-host": 2},
        max_runtime_seconds=900,
    )
    environment = job.environment()
    seconds = chance.uniform(0, 20)
    time.sleep(seconds)
    leading = {
        "launcher": job.launchers(),
        "rank": endings.first_of(job.processes(has="RANK")),
        "data server": endings.first_of(job.processes(has="HETERO_SERVE_AT")),
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
    return Attempt(endings.Begun.of(str(seed), job, environment), what, host, launched)


def finish(attempt: Attempt) -> str:
    """Wait for the job's end; return a line that says how it ended."""
    begun = attempt.begun
    job = begun.job.jobs.wait(begun.job.name, seconds=LONGEST)
    status, reason = job["TrainingJobStatus"], job.get("FailureReason") or ""
    seconds = endings.seconds_to_end(job, begun.event_at)
    line = f"{begun.name}: {attempt.what}: {status} {seconds:.0f} s later"
    assert status != "Stopped" or attempt.what.startswith("stop"), line
    if status == "Failed" and attempt.launched:
        named = rf"AlgorithmError: .*{attempt.host or 'algo-[0-9]'} \(\w+\)"
        trained = any("training finished" in line for line in begun.job.log())
        if trained and attempt.what.startswith("kill launcher"):
            named += "|AlgorithmError: , exit code: 137$"  # there may be nobody left to say more
        assert re.match(named, reason), f"{line}. {reason}"
    endings.assert_nothing_left(begun)
    return f"{line}. {reason}"


def main() -> None:
    """Run the seeds from argv[1] to argv[2]; fail if one breaks a promise."""
    broken = []
    seeds = range(int(sys.argv[1]), int(sys.argv[2]))
    with tempfile.TemporaryDirectory() as folder, local_sagemaker.start() as local:
        endings.upload_images()
        jobs, begun = Jobs(local.role, Path(folder)), []
        for seed in seeds:
            begun.append(begin(jobs, seed))
            while len(begun) == AT_ONCE or (begun and seed == seeds[-1]):
                attempt = begun.pop(0)
                try:
                    print(finish(attempt), flush=True)
                except AssertionError as error:
                    broken.append(f"{attempt.begun.name}: {attempt.what}: {error}")
                    print(f"BROKEN {broken[-1]}", flush=True)
    if broken:
        sys.exit("\n".join(broken))
    print(f"{len(seeds)} seeds, all as promised")


if __name__ == "__main__":
    main()
