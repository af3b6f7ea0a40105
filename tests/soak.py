"""Something happens to a job of the PyTorch example at a random moment: `make soak`.

    python tests/soak.py 0 50       seeds 0 to 49

Whatever it is, the job ends within a bounded time, says why if it fails, and leaves nothing.
"""

import random
import re
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import psutil

import endings
from jobs import Jobs
from shared import local_sagemaker

AT_ONCE = 4  # jobs that wait for the end of a host that hangs
LONGEST = 30 + endings.AWS_KILLS + 30  # seconds: noticed, killed, and this machine is busy
ACTIONS = {
    "kill": psutil.Process.kill,
    "terminate": psutil.Process.terminate,
    "hang": psutil.Process.suspend,
}


def begin(jobs: Jobs, seed: int) -> tuple[endings.Begun, str, bool]:
    """Start a job and let something happen; return what, and whether a launcher was up."""
    chance = random.Random(seed)
    job = endings.start(jobs, hyperparameters={"max-steps": 60})
    environment = job.environment()
    seconds = chance.uniform(0, 20)
    time.sleep(seconds)
    launched = bool(job.processes("launcher.py"))
    what = chance.choice(["stop", *ACTIONS])
    processes = job.processes()
    if what == "stop":
        if processes:
            job.stop()
    elif processes:
        victim = chance.choice(processes)
        words = victim.cmdline()
        ACTIONS[what](victim)
        what += " " + next((Path(w).name for w in words if w.endswith((".py", ".sh"))), words[-1])
    what = f"after {seconds:.1f} s: {what}"
    return endings.Begun.of(str(seed), job, environment), what, launched


def finish(begun: endings.Begun, what: str, launched: bool) -> str:
    """Wait for the job's end; return a line that says how it ended."""
    job = begun.job.jobs.wait(begun.job.name, seconds=LONGEST)
    reason = job.get("FailureReason") or ""
    if job["TrainingJobStatus"] == "Failed" and launched:
        assert re.match(r"AlgorithmError: .*algo-\d \(\w+\)", reason), reason
    deadline = time.monotonic() + 5
    while left := endings.left_behind(begun):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
    seconds = endings.seconds_to_end(begun, job)
    return f"{begun.name}: {what}: {job['TrainingJobStatus']} {seconds:.0f} s later. {reason}"


def main() -> None:
    """Run the seeds from argv[1] to argv[2]; fail at the first that breaks a promise."""
    seeds = range(int(sys.argv[1]), int(sys.argv[2]))
    with tempfile.TemporaryDirectory() as folder, local_sagemaker.start() as local:
        endings.upload_images()
        jobs, begun = Jobs(local.role, Path(folder)), []
        for seed in seeds:
            begun.append(begin(jobs, seed))
            while len(begun) == AT_ONCE or (begun and seed == seeds[-1]):
                print(finish(*begun.pop(0)), flush=True)
    print(f"{len(seeds)} seeds, all as promised")


if __name__ == "__main__":
    main()
