"""How many environment steps per second does the example in docs/environments make?

    .venv/bin/python benchmarks/environments.py

The benchmark runs it as jobs on the local SageMaker, with one environment host and with two. Each
host gets one core of this machine. The training shares one of these cores, because it waits while
the environments step. A step of CartPole takes 0.01 ms. A step of the other environment takes 2 ms:
it is gymnasium's Acrobot, integrated in 50 steps instead of one.
"""

import re
import sys
import tempfile
from pathlib import Path
from statistics import median

from common import CODE, ROOT, table, write_results

sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from helpers.jobs import Jobs, texts_in  # noqa: E402
from shared import local_sagemaker  # noqa: E402

ACROBOT = """
import gymnasium
from gymnasium.envs.classic_control import AcrobotEnv

class FineAcrobot(AcrobotEnv):
    dt = AcrobotEnv.dt / 50

    def step(self, action):
        for _ in range(49):
            super().step(action)
        return super().step(action)

gymnasium.register("FineAcrobot-v0", FineAcrobot, max_episode_steps=500)
"""


def measure(jobs: Jobs, environment: str, hosts: int) -> list[float]:
    """Run a job; return the environment steps per second that the training prints."""
    files = {**texts_in(CODE, "hetero"), **texts_in(ROOT / "docs" / "environments")}
    files["fine.py"] = ACROBOT
    files["serve.py"] = files["serve.py"].replace("CartPole-v1", environment)
    job = jobs.run(
        files,
        "exec python -m hetero --serve serve.py train.py",
        {"data_group": ("ml.c5.xlarge", hosts), "dnn_group": ("ml.g5.xlarge", 1)},
        environment={"HETERO_TOKEN": "a secret"},
        max_runtime_seconds=600,
    )
    assert job["TrainingJobStatus"] == "Completed", job["FailureReason"]
    log = "\n".join(jobs.log(job["TrainingJobName"]))
    return [float(number) for number in re.findall(r"env_steps_per_s=(\d+)", log)]


def main() -> None:
    """Measure; print the median of each job's lines, and the ratio of two hosts to one."""
    found, rows = {}, []
    with (
        local_sagemaker.start({"ml.c5.xlarge": 2, "ml.g5.xlarge": 1}) as local,
        tempfile.TemporaryDirectory() as folder,
    ):
        jobs = Jobs(local.role, Path(folder))
        for environment in ("CartPole-v1", "fine:FineAcrobot-v0"):
            found[environment] = [measure(jobs, environment, hosts) for hosts in (1, 2)]
            one, two = map(median, found[environment])
            shown = [f"{median(n):.0f} ({min(n):.0f} to {max(n):.0f})" for n in found[environment]]
            rows.append([environment, *shown, f"{two / one:.2f}"])
    table("environment | steps/s, 1 host | 2 hosts | ratio", rows)
    write_results("environments", found)


if __name__ == "__main__":
    main()
