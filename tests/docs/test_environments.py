"""docs/environments: reinforcement learning on environments that data hosts step."""

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import gymnasium
import numpy as np
import psutil
import pytest

from helpers.jobs import Jobs, texts_in
from helpers.pages import ROOT
from helpers.running import CODE, Running

pytestmark = pytest.mark.usefixtures("nothing_is_left")
FOLDER = ROOT / "docs" / "environments"
HOSTS = {"HETERO_DATA_HOSTS": "algo-1:7712"}
# A user's own environment, which prints the host that steps it.
MINE = """
import os
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv

class Telling(CartPoleEnv):
    steps = 0

    def step(self, action):
        Telling.steps += 1
        if Telling.steps == 1000:
            print("stepped on", os.environ["SM_CURRENT_HOST"], flush=True)
        return super().step(action)

gymnasium.register("Telling-v0", Telling, max_episode_steps=500)
"""


def start(jobs: Jobs, hosts: int, options: str = "", mine: str = MINE, **changes: str) -> Running:
    """Start the example with this number of data hosts, and the module `mine` beside it.

    changes: other values of its constants.
    """
    files = {**texts_in(CODE, "hetero"), **texts_in(FOLDER), "mine.py": mine}
    del files["requirements.txt"]  # checking them takes longer than everything else
    for constant, value in changes.items():
        [file] = [name for name in ("serve.py", "train.py") if f"\n{constant}" in files[name]]
        files[file] = re.sub(rf"(?m)^({constant}.*?) = [^\s,]+", rf"\1 = {value}", files[file])
    [command] = re.findall(r'command="exec (.*)"', FOLDER.with_suffix(".md").read_text())
    command = command.replace("hetero", f"hetero {options}", 1)
    groups = {"data_group": ("ml.c5.xlarge", hosts), "dnn_group": ("ml.m5.xlarge", 1)}
    token = {"HETERO_TOKEN": "a secret"}
    return Running(jobs, jobs.create(files, f"exec {command}", groups, environment=token))


def finish(jobs: Jobs, job: Running) -> list[str]:
    """Wait for the job, which must complete; return its log."""
    end = jobs.wait(job.name)
    assert end["TrainingJobStatus"] == "Completed", end["FailureReason"]
    return job.log()


def assert_learnt(log: list[str]) -> None:
    """Check that the mean return has become much better."""
    [last] = [line for line in log if line.startswith("mean return: ")]
    first, last = map(float, re.findall(r"\d+\.\d", last))
    assert last > 2.5 * first


def steps(log: list[str], name: str) -> list[float]:
    """Return the values of `name` in the training's step lines."""
    return [float(re.search(rf" {name}=(\S+)", x)[1]) for x in log if x.startswith("step=")]


@pytest.mark.thorough
def test_it_learns_an_environment_of_one_s_own_on_two_hosts(jobs: Jobs):
    log = finish(jobs, start(jobs, 2, ENVIRONMENT='"mine:Telling-v0"'))
    assert_learnt(log)
    assert steps(log, "environments")[-1] == 16  # eight per core, and a host has one here
    for step, wait in zip(steps(log, "step_time_ms"), steps(log, "data_wait_ms"), strict=True):
        assert 0 < wait < step
    text = "\n".join(log)
    data_hosts = re.findall(r"host=(\S+) group=data_group", text)
    assert sorted(re.findall(r"stepped on (\S+)", text)) == sorted(data_hosts)


@pytest.mark.thorough
def test_the_only_server_is_killed(jobs: Jobs):
    """The training waits for it, and continues."""
    job = start(jobs, 1)
    jobs.wait_for_log(job.name, "step=10 ")
    job.server(job.host("data_group", 0)).kill()
    log = finish(jobs, job)
    assert sum("is lost: UNAVAILABLE" in line for line in log) == 1
    assert "hetero: serve.py was killed by signal 9; restart in 1 s" in log
    assert len(steps(log, "environments")) == 8
    assert_learnt(log)


@pytest.mark.thorough
def test_one_server_is_killed_and_then_the_other_one_hangs(jobs: Jobs):
    """The first one is used again, and the training continues without the second."""
    job = start(jobs, 2, SECONDS="4", UPDATES="1000")
    jobs.wait_for_log(job.name, "environments=16 ")
    job.server(job.host("data_group", 0)).kill()
    jobs.wait_for_log(job.name, "is lost: UNAVAILABLE")
    before = steps(job.log(), "environments").count(16)
    jobs.wait_for_log(job.name, "environments=16 ", times=before + 1)
    job.server(job.host("data_group", 1)).suspend()
    jobs.wait_for_log(job.name, "is lost: DEADLINE_EXCEEDED")
    before = steps(job.log(), "environments").count(8)
    jobs.wait_for_log(job.name, "environments=8 ", times=before + 1)
    job.stop()
    assert jobs.wait(job.name)["TrainingJobStatus"] == "Stopped"


@pytest.mark.thorough
def test_the_only_server_hangs(jobs: Jobs):
    job = start(jobs, 1, SECONDS="3")
    jobs.wait_for_log(job.name, "step=10 ")
    job.server(job.host("data_group", 0)).suspend()
    end = jobs.wait(job.name)
    assert end["TrainingJobStatus"] == "Failed"
    assert re.search(r"train.py: error: no environments on 127.\S+:\d+\.", end["FailureReason"])


@pytest.mark.thorough
def test_spare_cores_of_the_training_host_step_environments_too(jobs: Jobs):
    log = finish(jobs, start(jobs, 1, "--spare-cores 1", UPDATES="20"))
    assert steps(log, "environments") == [16, 16]


@pytest.mark.thorough
def test_a_module_that_data_hosts_lack(jobs: Jobs):
    """Their servers fail again and again, and the reason says why."""
    lacking = MINE + "if 'RANK' not in os.environ:\n    import no_such_module\n"
    job = start(jobs, 1, mine=lacking, ENVIRONMENT='"mine:Telling-v0"')
    end = jobs.wait(job.name)
    assert end["TrainingJobStatus"] == "Failed"
    assert "No module named 'no_such_module'" in end["FailureReason"]


@pytest.mark.parametrize(
    "environment, variables, sentence",
    [
        ("Nope-v0", HOSTS, "Environment `Nope` doesn't exist"),
        ("Pendulum-v1", HOSTS, "needs Box observations and Discrete actions, not Box.*, Box"),
        ("CartPole-v1", {}, "use a data_group and a single rank"),
        ("CartPole-v1", HOSTS | {"WORLD_SIZE": "2"}, "use a data_group and a single rank"),
    ],
)
def test_what_train_refuses(
    monkeypatch: pytest.MonkeyPatch, environment: str, variables: dict[str, str], sentence: str
):
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setattr("serve.ENVIRONMENT", environment)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises((SystemExit, gymnasium.error.Error), match=sentence):
        runpy.run_path(str(FOLDER / "train.py"))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[subprocess.Popen, grpc.UnaryUnaryMultiCallable]]:
    """A server without a job, and a function that calls it."""
    address = f"unix:{tmp_path}/socket"
    variables = {"HETERO_SERVE_AT": address, "HETERO_TOKEN": "a secret"}
    command = [sys.executable, "serve.py"]
    with subprocess.Popen(command, cwd=FOLDER, env=os.environ | variables) as server:
        yield server, grpc.insecure_channel(address).unary_unary("/environments/step")
        server.kill()


def test_a_server_wants_the_token_and_ends_with_an_environment(server: tuple):
    process, step = server
    for metadata in ([], [("token", "another")]):
        with pytest.raises(grpc.RpcError, match="wrong or missing HETERO_TOKEN"):
            step(b"", 30, metadata, wait_for_ready=True)
    token, count = [("token", "a secret")], 8 * len(os.sched_getaffinity(0))
    to_the_right = np.ones(count, np.int64).tobytes()
    life = step(b"", 30, token)[:8]
    before, same, after = (
        np.frombuffer(step(request, 30, token), np.float32, offset=8).reshape(count, 3 + 4)
        for request in (b"", b"", life + to_the_right)
    )
    with pytest.raises(grpc.RpcError, match="this server has been restarted"):
        step(b"another." + to_the_right, 30, token)  # actions from before the restart
    assert (before == same).all() and not before[:, :3].any()
    assert len({*before[:, 3]}) == count  # each has a seed of its own
    assert (after[:, :3] == [1, 1, 0]).all()  # reward, return, done
    assert (after[:, 4] > before[:, 4]).all()  # the cart's velocity
    children = psutil.Process(process.pid).children()
    next(child for child in children if "spawn_main" in " ".join(child.cmdline())).kill()
    with pytest.raises(grpc.RpcError):
        step(life + to_the_right, 30, token)
    assert process.wait(10) == 1
