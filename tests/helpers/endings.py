"""Every way that a job of the PyTorch example can end: the table in pt.grpc.sagemaker/job.md.

Each `Ending` runs the example on two data hosts and two training hosts, with one rank per training
host, or two where a second rank matters. It causes one event, with real signals and API calls, and
says how the job must end.

Most endings depend only on launcher.py and hetero/. For these, programs of a few lines can replace
the scripts, because a job spends nine tenths of its time importing PyTorch.
"""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from helpers.jobs import Jobs
from helpers.running import ENOUGH, Running, after_steps, assert_nothing_left, seconds_to_end, start

HOST = r"algo-\d \({}_group\)"
DATA, DNN, ANY = HOST.format("data"), HOST.format("dnn"), HOST.format("(data|dnn)")


@dataclass
class Ending:
    """One way that a job can end.

    seconds: the longest time from the event to the last host's exit. slow: most of this time is
    waiting, so several such endings can run at once.
    """

    status: str
    reason: str  # a regular expression for the whole FailureReason without AWS's prefix and suffix
    seconds: float
    event: Callable[[Running], object]
    when: Callable[[Running], None] = after_steps
    settings: dict = field(default_factory=dict)
    logged: str = ""  # text that the log must have
    slow: bool = False


def steps(number: int) -> dict:
    """Return the settings of a job that ends by itself after this many steps."""
    return {"hyperparameters": {"max-steps": number}}


RAISE = (
    "            at.step += 1\n",
    "            at.step += 1\n            if (rank, at.step) == (1, 12):\n"
    "                raise ValueError('no number')\n",
)
UNTIL_ENOUGH = {"changes": {"train_dnn.py": ENOUGH}}
TWO_EACH = {"hyperparameters": {"processes-per-host": 2}}
TIMEOUT_SOONER = ("timedelta(minutes=15)", "timedelta(seconds=30)")
JOIN_SOONER = ("hetero.run(\n", "hetero.run(\n    join_timeout=20,\n")
SILENT_SOONER = ("hetero.run(\n", "hetero.run(\n    data_timeout=20,\n")
RUNTIME = 60  # seconds; on a slow machine, it takes half of this until training runs
AWS_KILLS = 120  # seconds after SIGTERM

ENDINGS = {
    "training succeeds": Ending(
        "Completed", "", 15, lambda job: job.jobs.wait_for_log(job.name, "training finished"),
        settings=steps(12), logged="all hosts have signed off",
    ),
    "training script raises": Ending(
        "Failed", rf"On {DNN}, train_dnn.py exited with status 1: ValueError: no number\.", 15,
        lambda job: job.jobs.wait_for_log(job.name, "ValueError"),
        settings={"changes": {"train_dnn.py": RAISE}},
    ),
    "a rank is killed": Ending(
        "Failed", rf"On {DNN}, rank 3 of train_dnn.py was killed by signal 9\.", 15,
        lambda job: job.rank(3).kill(), settings=TWO_EACH,
    ),
    "a rank hangs": Ending(
        "Failed", rf"On {DNN}, train_dnn.py exited with status 1: RuntimeError: .*"
        rf" Still running: rank 1 on {DNN}\.", 60,
        lambda job: job.rank(1).suspend(), slow=True,
        settings={"changes": {"parallel.py": TIMEOUT_SOONER}},
    ),
    "a data server crashes once": Ending(
        "Completed", "", 15, lambda job: (
            job.kill_data_servers([0], times=1),
            job.finish_training(after="serving at", times=3),  # two hosts, one twice
        ),
        settings=UNTIL_ENOUGH,
        logged="feed.server was killed by signal 9; restart in 1 s",
    ),
    "a data server crashes again and again": Ending(
        "Completed", "", 15, lambda job: (
            job.kill_data_servers([0], times=4),
            job.finish_training(after="4 times. It will not be restarted."),
        ),
        settings=UNTIL_ENOUGH,
    ),
    "all data servers crash again and again": Ending(
        "Failed",
        rf"On {DATA}, feed.server was killed by signal 9, 4 times\. "
        r"No data host is left\.",
        15, lambda job: job.kill_data_servers([0, 1], times=4),
    ),
    "launcher killed on a data host": Ending(
        "Failed", rf"The launcher on {DATA} is gone: connection closed\.", 15,
        lambda job: job.launcher("data_group", 1).kill(),
    ),
    "launcher killed on a dnn host": Ending(
        "Failed", rf"The launcher on {DNN} is gone: connection closed\.", 15,
        lambda job: job.launcher("dnn_group", 1).kill(),
    ),
    "launcher killed on the leader": Ending(
        "Failed", rf"{ANY} lost the leader, {DNN}: connection closed\.", 15,
        lambda job: job.launcher("dnn_group", 0).kill(),
    ),
    "the leader's host falls silent": Ending(
        "Failed", rf"{ANY} lost the leader, {DNN}: silent for 60 s\.",
        75 + AWS_KILLS, lambda job: job.freeze("dnn_group", 0), slow=True,
    ),
    "a training host falls silent": Ending(
        "Failed", rf"The launcher on {DNN} is gone: silent for 60 s\.",
        75 + AWS_KILLS, lambda job: job.freeze("dnn_group", 1), slow=True,
    ),
    "a data host falls silent for a while": Ending(
        "Completed", "", 15, lambda job: (
            job.freeze_for("data_group", 0, seconds=70),  # longer than is allowed to training hosts
            job.finish_training(after="serving at", times=2),
        ),
        settings=UNTIL_ENOUGH,
    ),
    "a data host falls silent for good": Ending(
        "Failed", rf"The launcher on {DATA} is gone: silent for 20 s\.",
        35 + AWS_KILLS, lambda job: job.freeze("data_group", 0), slow=True,
        settings={"changes": {"launcher.py": SILENT_SOONER}},
    ),
    "a host hangs when the training ends": Ending(
        "Failed", rf"{DATA} did not end when the training had ended\.", 100 + AWS_KILLS,
        lambda job: (
            job.freeze("data_group", 0),
            job.finish_training(after="step=8 "),
        ),
        settings=UNTIL_ENOUGH, slow=True,
    ),
    "StopTrainingJob": Ending(
        "Stopped", "", 15, Running.stop, logged="stopped by SIGTERM after step",
    ),
    "SIGTERM to one host alone": Ending(
        "Failed", rf"The job was stopped \(SIGTERM\)\. On {DNN}, train_dnn.py exited with status 1;"
        r" its last line: training stopped by SIGTERM after step \d+\.", 15,
        lambda job: job.launcher("data_group", 1).terminate(),
    ),
    "MaxRuntimeInSeconds": Ending(
        "Stopped", "", 15, lambda job: time.sleep(job.started_at() + RUNTIME - time.time()),
        settings={"max_runtime_seconds": RUNTIME},
        logged="stopped by SIGTERM after step",
    ),
    "a host starts 60 s later": Ending(
        "Completed", "", 240, lambda job: None, when=lambda job: None,
        settings={"late": 60, **steps(12)}, slow=True,
    ),
    "a host never comes": Ending(
        "Failed", rf"{DATA} did not come up within 20 s\.", 50 + AWS_KILLS,
        lambda job: None, when=lambda job: None, slow=True,
        settings={"late": 3600, "changes": {"launcher.py": JOIN_SOONER}},
    ),
}  # fmt: skip


@dataclass
class Begun:
    """An ending whose event has happened."""

    name: str
    job: Running
    event_at: float  # seconds since 1970


def begin(jobs: Jobs, name: str, torch: bool) -> Begun:
    """Start the job, with PyTorch or with the STAND_INS, and cause the event."""
    ending = ENDINGS[name]
    job = start(jobs, torch=torch, **{"max_runtime_seconds": 600, **ending.settings})
    ending.when(job)
    assert job.environment  # caches it, for use after the job has ended
    ending.event(job)
    return Begun(name, job, time.time())


def finish(begun: Begun) -> float:
    """Wait for the job's end, and check it; return how many seconds after the event it came."""
    ending = ENDINGS[begun.name]
    answer = begun.job.jobs.wait(begun.job.name, seconds=ending.seconds + 60)
    reason = answer.get("FailureReason") or ""
    assert answer["TrainingJobStatus"] == ending.status, reason
    if ending.status == "Failed":
        assert re.fullmatch(rf"AlgorithmError: {ending.reason}, exit code: \d+", reason), reason
    log = begun.job.log()
    if ending.logged:
        assert any(ending.logged in line for line in log), ending.logged
    if ending.status == "Completed":
        # Earlier, a killed data server's child processes may have printed tracebacks.
        end = next(i for i, line in enumerate(log) if "training finished" in line)
        assert not any("Traceback" in line for line in log[end:]), log[end:]
    seconds = seconds_to_end(answer, since=begun.event_at)
    assert seconds < ending.seconds, f"{seconds:.1f} s instead of {ending.seconds} s"
    assert_nothing_left(begun.job)
    return seconds
