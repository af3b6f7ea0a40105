"""What measured.py prints: the machine, how busy its CPUs were, and the advisor's clusters."""

import http.server
import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from helpers.jobs import ROOT
from helpers.simulated import SimulatedLoader, numbers, train
from shared import measured as module
from shared.measured import measured

pytestmark = pytest.mark.usefixtures("alone")
P4D = {"instance_type": "ml.p4d.24xlarge"}


def test_prints_what_follows_and_three_clusters(clock, capsys, monkeypatch):
    monkeypatch.setattr(module, "_sample", lambda _: (clock.now, 0, 0))  # as on other systems
    loader = SimulatedLoader(clock, 0, seconds=0.3)
    seen = train(clock, measured(loader, 72, **P4D), 0.1)
    assert len(seen) == 400  # steps; the last batches are unchanged, after some repeated ones
    assert seen[132:] == list(range(seen[132], seen[132] + 268)) and seen[132] < 132
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == lines[-2] == module.NOTICE
    assert lines[1:4] == [
        "step time     400.0 ms (400.0 to 400.0 ms)",
        "without data  100.0 ms (100.0 to 100.0 ms)",
        "data costs    75 % of a step",
    ]
    assert re.match(r"CPUs busy     not known, on \d+ vCPUs", lines[4])
    assert lines[5] == "verdict       CPU-bound: more vCPUs for each GPU make it faster"
    assert lines[6].startswith("advice        go heterogeneous: 1 x ml.p4d.24xlarge + ")
    assert len(lines) == 12 and all("USD" in line for line in lines[7:10])


@pytest.mark.parametrize(
    "data, busy, printed",
    [
        # Rounding does not contradict the verdict.
        (0.011, 79.9, "data costs    10 % of a step\nCPUs busy     80 %"),
        # A container may use more than its limit for a moment.
        (0.3, 101, "data costs    75 % of a step\nCPUs busy     100 %, without data 100 %"),
    ],
)
def test_percentages_are_rounded(clock, capsys, monkeypatch, data, busy, printed):
    monkeypatch.setattr(module, "_sample", lambda _: (clock.now, busy * clock.now, 100 * clock.now))
    train(clock, measured(SimulatedLoader(clock, 0, seconds=data), 72), 0.1)
    said = capsys.readouterr().out
    assert printed in said and "verdict       CPU-bound" in said


PROGRAM = """
from measured import measured
for _ in measured(range(150), buffer=0, instance_type="ml.p4d.24xlarge"): pass
"""


@pytest.mark.parametrize("path", [None, ROOT], ids=["as a copy", "with this repository"])
def test_prints_when_the_program_ends(path: Path | None, tmp_path: Path):
    (tmp_path / "measured.py").write_text((ROOT / "shared" / "measured.py").read_text())
    environment = os.environ | {"PYTHONPATH": str(path or "")}
    command = [sys.executable, "-c", PROGRAM]
    said = subprocess.check_output(command, cwd=tmp_path, env=environment, text=True)
    assert numbers(said)["step_ms"] > 0
    assert ("\nadvice        " in said) == (path is not None)
    assert ("\nclusters      run python -m shared.advisor --log FILE" in said) == (path is None)


@pytest.mark.parametrize(
    "advisor, said",
    [
        ("import nothing_of_that_name", "run python -m shared.advisor --log FILE, with this"),
        ("import time; time.sleep(60)", "run python -m shared.advisor --log FILE, with this"),
        ("raise SystemExit('error: No price.')", "No price."),
    ],
    ids=["cannot start", "hangs", "refuses"],
)
def test_an_advisor_that_does_not_answer_holds_nobody_up(
    clock, capsys, monkeypatch, tmp_path, advisor, said
):
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "advisor.py").write_text(advisor)
    spec = type("Spec", (), {"submodule_search_locations": [str(tmp_path / "shared")]})
    monkeypatch.setattr(module, "find_spec", lambda name: spec)
    monkeypatch.setattr(module, "ADVICE_SECONDS", 1)
    started = time.monotonic()
    train(clock, measured(SimulatedLoader(clock, 0, seconds=0.3), 72, **P4D), 0.1)
    assert f"\nclusters      {said}" in capsys.readouterr().out
    assert time.monotonic() - started < 20


def test_one_of_the_ranks_speaks(tmp_path):
    """No environment variable has the rank, as with torch.multiprocessing.spawn."""
    program = (
        "import sys, torch.distributed as dist, measured\n"
        "store, rank = f'file://{sys.argv[1]}', int(sys.argv[2])\n"
        "dist.init_process_group('gloo', init_method=store, rank=rank, world_size=2)\n"
        "for _ in measured.measured(range(9), buffer=0): pass\n"
        "for _ in measured.measured(range(150), buffer=0): pass\n"
        "dist.destroy_process_group()"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "store")]
    ranks = [
        subprocess.Popen(
            [*command, str(rank)], cwd=ROOT / "shared", stdout=-1, stderr=-1, text=True
        )
        for rank in range(2)
    ]
    (first, errors), (second, _) = [rank.communicate(timeout=100) for rank in ranks]
    assert ranks[0].wait() == 0, errors
    assert not second and first.startswith(f"{module.NOTICE}\nmeasured: epochs of 9 ")
    assert numbers(first)["step_ms"] >= 0


def test_only_vcpus_that_the_process_may_use_count(monkeypatch):
    own = os.sched_getaffinity(0)
    *_, ticks = module._sample(None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {min(own)})
    *_, ticks_of_one = module._sample(None)
    assert ticks_of_one == pytest.approx(ticks / len(own), rel=0.05)


def version_1(quota: int, used: str) -> dict[str, str]:
    quotas = {"cpu/cpu.cfs_quota_us": f"{quota}\n", "cpu/cpu.cfs_period_us": "100000\n"}
    return {**quotas, "cpuacct/cpuacct.usage": f"{used}\n"}


def version_2(quota: str, used: str, folder: str = "") -> dict[str, str]:
    use = f"usage_usec {used}\nuser_usec 1\n"
    return {f"{folder}cpu.max": f"{quota} 100000\n", f"{folder}cpu.stat": use}


# How `docker run --cpus 1.5`, Kubernetes and systemd set it up: the process's cgroups, their files
# (USED is replaced), and how many units of CPU time they count per second.
ON_HOST = "5:memory:/docker/0a1b\n4:cpu,cpuacct:/docker/0a1b\n1:name=systemd:/docker/0a1b\n0::/\n"
ABOVE = version_2("150000", "USED", "a.slice/") | version_2("max", "5", "a.slice/b.scope/")
LIMITS = {
    "version 2, in a container": ("0::/\n", version_2("150000", "USED"), 1e6),
    "version 2, of a cgroup above": ("0::/a.slice/b.scope\n", ABOVE, 1e6),
    "version 1, knowing its path on the host": (ON_HOST, version_1(150000, "USED"), 1e9),
}
NO_LIMITS = {
    "version 2": ("0::/\n", version_2("max", "7"), 1),
    "as many as there are vCPUs": ("0::/\n", version_2("1600000", "7"), 1),
    "version 1": ("4:cpu,cpuacct:/\n", version_1(-1, "7"), 1),
}


@pytest.mark.parametrize("case", [*LIMITS, *NO_LIMITS])
def test_a_container_at_its_limit_is_busy(clock, capsys, monkeypatch, tmp_path, case):
    """It may use 1.5 of 16 cores, which is 9 %, and does so for 98 % of the time."""
    own, files, per_second = (LIMITS | NO_LIMITS)[case]
    (tmp_path / "own").write_text(own)

    def perf_counter() -> float:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            used = str(int(per_second * 1.5 * 0.98 * clock.now))
            (tmp_path / name).write_text(text.replace("USED", used))
        return clock.now

    clock.perf_counter = perf_counter
    monkeypatch.setattr(module, "CGROUPS", tmp_path)
    monkeypatch.setattr(module, "OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(module, "_machine", lambda: ("ml.g5.4xlarge", 1, "16 vCPUs"))
    monkeypatch.setattr(module, "find_spec", lambda _: None)  # no advisor, which takes a second
    train(clock, measured(SimulatedLoader(clock, 0, seconds=0.3), 72), 0.1)
    said = capsys.readouterr().out
    if case in LIMITS:
        assert (
            "CPUs busy     98 %, without data 98 %, on 1.5 cores (the container's limit) of 16 vC"
        ) in said
        assert "verdict       CPU-bound" in said and "the instance type is unknown" in said
    else:
        assert ", on 16 vCPUs" in said and numbers(said)["instance_type"] == "ml.g5.4xlarge"


def test_sagemaker_says_the_instances_of_a_homogeneous_job(monkeypatch, tmp_path):
    config = {"current_instance_type": "ml.g5.xlarge", "hosts": ["algo-1", "algo-2"]}
    monkeypatch.setenv("SM_INPUT_CONFIG_DIR", str(tmp_path))
    for groups, expected in ((1, ("ml.g5.xlarge", 2)), (2, ("", 1))):
        config["instance_groups"] = [{}] * groups
        (tmp_path / "resourceconfig.json").write_text(json.dumps(config))
        assert module._machine()[:2] == expected
    for local in ({"current_instance_type": "local_gpu"}, {}):  # the SDK's local mode
        (tmp_path / "resourceconfig.json").write_text(json.dumps({"hosts": ["algo-1"], **local}))
        assert module._machine()[:2] == ("", 1)


def test_ec2_says_the_instance_type(monkeypatch):
    class Metadata(http.server.BaseHTTPRequestHandler):
        def answer(self, text: str) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def do_PUT(self) -> None:
            self.answer("a token" * (self.path == "/latest/api/token"))

        def do_GET(self) -> None:
            allowed = self.headers["X-aws-ec2-metadata-token"] == "a token"
            self.answer("g5.xlarge" * allowed)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with http.server.HTTPServer(("127.0.0.1", 0), Metadata) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        place = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", place)
        assert module._machine()[:2] == ("ml.g5.xlarge", 1)
        monkeypatch.setenv("WORLD_SIZE", "32")  # as torchrun sets it on each of four hosts
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
        assert module._machine()[:2] == ("ml.g5.xlarge", 4)
        server.shutdown()
