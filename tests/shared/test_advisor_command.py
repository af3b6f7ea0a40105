"""The commands of shared/: how the advisor's reads jobs and logs, and what it refuses."""

import json
import math
import re
import shlex
import subprocess
import sys
from dataclasses import replace

import boto3
import pytest
from botocore.exceptions import ClientError

from helpers.jobs import ROOT, TWO_GROUPS
from shared import advisor, prices
from shared.measured import NOTICE

P4D = "--instance ml.p4d.24xlarge --step-ms 192 --without-data-ms 80"
NUMBERS = {"step_ms": 400.0, "without_data_ms": 100.0, "count": 1, "source": "Measured in one run"}
NUMBERS |= {"instance_type": "ml.p4d.24xlarge"}
LINE = json.dumps({"measured": NUMBERS})


def run(capsys, arguments: str) -> str:
    """Return what the command prints."""
    advisor.main(shlex.split(arguments))
    return capsys.readouterr().out


def refusal(capsys, arguments: str) -> str:
    """Return the one line on stderr with which the command ends."""
    with pytest.raises(SystemExit) as end:
        advisor.main(shlex.split(arguments))
    printed = capsys.readouterr()
    assert end.value.code == 2 and printed.out == "" and printed.err.count("\n") == 1
    return printed.err


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ("--instance ml.p4d.24xlarge --step-ms nan", "step_ms is nan, but must be a positive"),
        (P4D + " --without-data-ms -80", "without_data_ms is -80, but must be a positive number"),
        (P4D + " --without-data-ms 200", r"without_data_ms \(200\) is above step_ms \(192\)"),
        (P4D + " --cpu-percent 9600", "cpu_percent is 9600, but must be from 0 to 100"),
        (P4D + " --mb-per-step 0", "mb_per_step is 0, but must be a positive number"),
        (P4D + " --rank-gb-per-s 0", "rank_gb_per_s is 0, but must be a positive number"),
        (P4D + " --kept-busy-percent 0", "kept_busy_percent is 0, but must be a positive number"),
        (P4D + " --count 0", "count is 0, but must be a positive number"),
        (P4D + " --region eu-west-9", "No prices of data hosts in eu-west-9 .*refresh eu-w"),
        (P4D + " --region=", "The region is empty"),
        (P4D + " --figure any.jpg", "any.jpg must end in .png, .svg or .pdf"),
        (P4D + " --figure /nowhere/at-all.png", "No such file or directory"),
        (
            "--instance ml.p5en.48xlarge --step-ms 192 --figure any.png",
            "No price of ml.p5en.48xlarge is known here, so there are no costs to draw",
        ),
        ("--instance g5.xlarge --step-ms 9", r"did you mean ml.g5.xlarge\?"),
        ("--instance ml.x9.large --step-ms 9", "No price of 'ml.x9.large' is known"),
        ("--instance ml.c5.9xlarge --step-ms 9", "ml.c5.9xlarge has no GPU"),
        (P4D + " --synthetic-job any", "--step-ms cannot be combined with --synthetic-job"),
        (P4D + " --job any", "--job cannot be combined with --instance, --step-ms"),
        ("--job any --without-data-ms 80", "--job cannot be combined with --without-data-ms"),
        ("--step-ms 192", "--instance TYPE with --step-ms"),
        ("--instance ml.p4d.24xlarge", "--instance TYPE with --step-ms"),
        ("", "Give --job NAME, --log FILE, or --instance TYPE"),
    ],
)
def test_wrong_input_is_one_clear_sentence(capsys, arguments, sentence):
    assert re.search(sentence, refusal(capsys, arguments))


def test_what_price_lists_and_aws_do_not_say_is_a_clear_sentence(monkeypatch, capsys):
    unknown = replace(prices.price_of("ml.p4d.24xlarge"), instance_type="ml.p9.2xlarge", vcpus=0)
    monkeypatch.setattr(prices, "load", lambda: [unknown])
    said = refusal(capsys, "--instance ml.p9.2xlarge --step-ms 100")
    assert "does not say how many vCPUs ml.p9.2xlarge has" in said

    def refuse(*_):
        answer = {"Error": {"Code": "AccessDeniedException", "Message": "not authorized"}}
        raise ClientError(answer, "DescribeLogStreams")

    monkeypatch.setattr("shared.advisor.command.read_job", refuse)
    assert "DescribeLogStreams operation: not authorized" in refusal(capsys, "--job any")


@pytest.mark.quick
def test_head_may_end_before_the_command():
    """It ends quietly, even if nothing reads its output."""
    command = f"set -o pipefail; '{sys.executable}' -m shared.advisor {P4D} | head -n 0"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.fixture
def log(tmp_path):
    """Write a script's log that contains a given line, and return the option for it."""

    def write(line: str = LINE) -> str:
        (tmp_path / "train.log").write_text(f"step 1\n{NOTICE}\n{line}\nbye\n")
        return f"--log {tmp_path / 'train.log'}"

    return write


def test_reads_what_measured_has_printed_from_a_log(log, capsys):
    text = run(capsys, log())
    assert "Without data a step takes 100.0 ms instead of 400.0: data costs 75 % of it." in text
    assert "Measured in one run." in text and "1 x ml.p4d.24xlarge" in text
    corrected = f"{log()} --instance ml.g5.xlarge --count 2"
    assert "2 x ml.g5.xlarge, 400.0 ms" in run(capsys, corrected)
    # A container may use more than its limit for a moment; older copies of measured.py say so.
    busy = json.dumps({"measured": NUMBERS | {"cpu_percent": 101.2, "training_cpu_percent": 100.4}})
    assert "the CPUs are 100 % busy" in run(capsys, log(busy))
    # They also call the step time without data accelerator_ms.
    older = LINE.replace("without_data_ms", "accelerator_ms")
    assert older != LINE and run(capsys, log(older)) == text


@pytest.mark.parametrize("short", [[], ["--short"]])
def test_it_needs_no_packages_that_images_for_training_lack(short):
    code = "import sys; from shared import advisor; advisor.main(sys.argv[1:]); print(*sys.modules)"
    command = [sys.executable, "-c", code, "--log", "-", *short]
    done = subprocess.run(command, input=LINE, cwd=ROOT, capture_output=True, text=True)
    *answer, modules = done.stdout.splitlines()
    assert "go heterogeneous" in " ".join(answer)
    assert not {"sagemaker", "IPython", "matplotlib"} & set(modules.split())


def test_of_a_log_from_stdin_it_can_tell_the_verdict_and_three_clusters_alone():
    command = [sys.executable, "-m", "shared.advisor", "--log", "-", "--short"]
    done = subprocess.run(command, input=LINE, cwd=ROOT, capture_output=True, text=True)
    verdict, *clusters = done.stdout.splitlines()
    assert verdict.startswith("advice        go heterogeneous: 1 x ml.p4d.24xlarge + ")
    assert clusters[0].strip().startswith(verdict.partition(": ")[2] + ": ")
    assert len(clusters) == 3 and all("USD" in cluster for cluster in clusters)


@pytest.mark.parametrize(
    "old, new, sentence",
    [
        ('{"measured": ', "", "has no line of numbers"),
        (', "instance_type": "ml.p4d.24xlarge"', "", "does not say on which instance type it ran"),
        ('"count": 1, ', "\n", "The line of numbers is incomplete"),
        ('"step_ms"', '"step"', "measured.py does not print such numbers"),
    ],
)
def test_a_log_that_cannot_tell_is_one_clear_sentence(log, capsys, old, new, sentence):
    assert old in LINE and sentence in refusal(capsys, log(LINE.replace(old, new)))


# A job that acts like training: its step lines say how long the steps allegedly took.
STEPS = """
import sys, time
print("host=any group=any")
for step in range(10):  # 5 s, with a value of CPU use for every second
    print(f"step={step} epoch=1 loss=0.5 step_time_ms={sys.argv[1]} data_wait_ms=1 x=1", flush=True)
    end = time.monotonic() + 0.05
    while time.monotonic() < end:
        pass
    time.sleep(0.45)
"""
UNTIL_STOPPED = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit())
time.sleep(100)
"""


@pytest.fixture(scope="module")
def trained(jobs) -> dict[str, str]:
    """The names of ended jobs, and of one that runs; they start at the same time."""
    one = {"dnn_group": ("ml.g5.2xlarge", 1)}
    scripts = {
        "homogeneous": (STEPS, "python -u a.py 120"),
        "synthetic": (STEPS, "python -u a.py 60"),
        "heterogeneous": ("", "python a.py"),
        "silent": ("", "python a.py"),
        "failed": ("raise SystemExit(3)", "python a.py"),
        "measured": (f"print({NOTICE!r}, {LINE!r}, sep=chr(10))", "python a.py"),
        "lost": (f"print({NOTICE!r}, 'lost', sep=chr(10))", "python a.py"),
        "running": (UNTIL_STOPPED, "exec python a.py"),
    }
    names = {
        name: jobs.create({"a.py": script}, command, TWO_GROUPS if name == "heterogeneous" else one)
        for name, (script, command) in scripts.items()
    }
    for name in [*names][:-1]:
        jobs.wait(names[name])
    yield names
    boto3.client("sagemaker").stop_training_job(TrainingJobName=names["running"])
    jobs.wait(names["running"])


def test_reads_its_numbers_from_jobs(trained, capsys):
    measured = advisor.read_job(trained["homogeneous"], trained["synthetic"])
    assert (measured.instance_type, measured.count) == ("ml.g5.2xlarge", 1)
    assert (measured.step_ms, measured.without_data_ms) == (120, 60)
    assert math.isnan(measured.gpu_percent)  # there is none here
    assert 0 < measured.cpu_percent <= 100 and 0 < measured.training_cpu_percent <= 100
    names = f"--job {trained['homogeneous']} --synthetic-job {trained['synthetic']}"
    text = run(capsys, f"{names} --data-hosts-only")
    share = min(1, 60 * measured.training_cpu_percent / (120 * measured.cpu_percent))
    assert f"on data only       {960 * (1 - share):,.0f} core-ms = 960 core-ms x (1 - 60.0" in text
    assert f"Job {trained['homogeneous']}; without data, job {trained['synthetic']}." in text
    assert "CPU work           960 core-ms = 120.0 ms x 1 x 8 cores" in text
    # The instances are the job's, whatever instance_type the script gave to `measured`.
    text = run(capsys, f"--job {trained['measured']}")
    assert f"Job {trained['measured']}: Measured in one run" in text
    assert "1 x ml.g5.2xlarge, 400.0 ms" in text


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ("--job {silent}", "has no step lines"),
        ("--job {failed}", "is Failed: give a Completed or Stopped job"),
        ("--job {heterogeneous}", "is already heterogeneous (ml.c5.9xlarge, ml.g5.2xlarge)"),
        ("--job {running}", "is InProgress"),
        ("--job {lost}", "its log has no result"),
        ("--job {measured} --synthetic-job {lost}", "has measured both step times"),
        ("--job no-such-job", "use %run -m there"),
    ],
)
def test_a_job_that_cannot_tell_is_a_clear_sentence(trained, capsys, arguments, sentence):
    capsys.readouterr()  # what the jobs' start has printed
    assert sentence in refusal(capsys, arguments.format(**trained))


def test_a_job_that_is_slower_without_data_does_not_wait_for_data(trained):
    """Otherwise a notebook would stop if its machine was busy with other things."""
    measured = advisor.read_job(trained["synthetic"], trained["homogeneous"])
    assert (measured.step_ms, measured.without_data_ms) == (60, 60)
    said = " ".join(repr(advisor.advise(measured)).split())
    assert "were longer, 120 ms, and count as equally long" in said and "are swapped." in said
