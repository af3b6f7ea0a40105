"""The advisor's command: how it reads jobs and logs, and what it refuses."""

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

P4D = "--instance ml.p4d.24xlarge --step-ms 192 --accelerator-ms 80"
NUMBERS = {"step_ms": 400.0, "accelerator_ms": 100.0, "count": 1, "source": "Measured in one run"}
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
        ("--instance ml.p4d.24xlarge --step-ms -192", "step_ms is -192, but must be a positive"),
        ("--instance ml.p4d.24xlarge --step-ms nan", "step_ms is nan, but must be a positive"),
        (P4D + " --accelerator-ms -80", "accelerator_ms is -80, but must be a positive number"),
        (P4D + " --accelerator-ms 200", r"accelerator_ms \(200\) is above step_ms \(192\)"),
        (P4D + " --cpu-percent 9600", "cpu_percent is 9600, but must be from 0 to 100"),
        (P4D + " --mb-per-step 0", "mb_per_step is 0, but must be a positive number"),
        (P4D + " --rank-gb-per-s 0", "rank_gb_per_s is 0, but must be a positive number"),
        (P4D + " --kept-busy-percent 0", "kept_busy_percent is 0, but must be a positive number"),
        (P4D + " --kept-busy-percent 800", "kept_busy_percent is 800, but must be from 0 to 100"),
        (
            "--instance ml.p5en.48xlarge --step-ms 192 --figure any.png",
            "No price of ml.p5en.48xlarge is known here, so there are no costs to draw",
        ),
        (P4D + " --count 0", "count is 0, but must be a positive number"),
        (
            P4D + " --region eu-west-9",
            "No prices of data hosts in eu-west-9 are known: .*refresh eu-w",
        ),
        (P4D + " --region=", "The region is empty"),
        (P4D + " --figure any.jpg", "any.jpg must end in .png, .svg or .pdf"),
        ("--instance g5.xlarge --step-ms 9", r"did you mean ml.g5.xlarge\?"),
        (P4D + " --synthetic-job any", "--step-ms cannot be combined with --synthetic-job"),
        (P4D + " --job any", "--job cannot be combined with --accelerator-ms, --instance"),
        ("--job any --accelerator-ms 80", "--job cannot be combined with --accelerator-ms"),
        ("--step-ms 192", "--instance TYPE with --step-ms"),
        (P4D + " --figure /nowhere/at-all.png", "No such file or directory"),
        ("--instance ml.x9.large --step-ms 9", "No price of 'ml.x9.large' is known"),
        ("--instance ml.c5.9xlarge --step-ms 9", "ml.c5.9xlarge has no GPU"),
        ("--instance ml.p4d.24xlarge", "--instance TYPE with --step-ms"),
        ("", "Give --job NAME, --log FILE, or --instance TYPE"),
    ],
)
def test_wrong_input_is_one_clear_sentence(capsys, arguments, sentence):
    assert re.search(sentence, refusal(capsys, arguments))


def test_what_the_price_list_does_not_say_is_a_clear_sentence(monkeypatch, capsys):
    unknown = replace(prices.find("ml.p4d.24xlarge"), instance_type="ml.p9.2xlarge", vcpus=0)
    monkeypatch.setattr(prices, "load", lambda: [unknown])
    said = refusal(capsys, "--instance ml.p9.2xlarge --step-ms 100")
    assert "does not say how many vCPUs ml.p9.2xlarge has" in said


def test_it_needs_no_packages_that_images_for_training_lack():
    code = "import sys; from shared import advisor; advisor.main(sys.argv[1:]); print(*sys.modules)"
    command = [sys.executable, "-c", code, *P4D.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "Verdict: go heterogeneous" in done.stdout
    assert not {"sagemaker", "IPython", "matplotlib"} & set(done.stdout.split())


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


def test_reads_what_measured_has_printed_from_a_job(jobs, capsys):
    """The instances are the job's, whatever instance_type the script gave."""
    command, one = "python a.py", {"dnn_group": ("ml.g5.xlarge", 1)}
    texts = [f"{NOTICE}\n{line}" for line in (LINE, "lost")]
    names = [jobs.create({"a.py": f"print({text!r})"}, command, one) for text in texts]
    for name in names:
        jobs.wait(name)
    capsys.readouterr()
    text = run(capsys, f"--job {names[0]}")
    assert f"Job {names[0]}: Measured in one run" in text and "1 x ml.g5.xlarge, 400.0 ms" in text
    assert "its log has no result" in refusal(capsys, f"--job {names[1]}")
    both = f"--job {names[0]} --synthetic-job {names[1]}"
    assert "has measured both step times" in refusal(capsys, both)


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


@pytest.fixture(scope="module")
def trained(jobs) -> dict[str, str]:
    """A homogeneous job, the same without data, a heterogeneous, a silent, and a failed one."""
    one = {"dnn_group": ("ml.g5.2xlarge", 1)}
    names = {
        "homogeneous": jobs.create({"a.py": STEPS}, "python -u a.py 120", one),
        "synthetic": jobs.create({"a.py": STEPS}, "python -u a.py 60", one),
        "heterogeneous": jobs.create({"a.py": STEPS}, "python -u a.py 60", TWO_GROUPS),
        "silent": jobs.create({"a.py": ""}, "python a.py", one),
        "failed": jobs.create({"a.py": "raise SystemExit(3)"}, "python a.py", one),
    }
    for name in names.values():
        jobs.wait(name)
    return names


def test_reads_its_numbers_from_jobs(trained, capsys):
    measured = advisor.measure(trained["homogeneous"], trained["synthetic"])
    assert (measured.instance_type, measured.count) == ("ml.g5.2xlarge", 1)
    assert (measured.step_ms, measured.accelerator_ms) == (120, 60)
    assert math.isnan(measured.gpu_percent)  # there is none here
    assert 0 < measured.cpu_percent <= 100 and 0 < measured.training_cpu_percent <= 100
    names = f"--job {trained['homogeneous']} --synthetic-job {trained['synthetic']}"
    text = run(capsys, f"{names} --data-hosts-only")
    share = min(1, 60 * measured.training_cpu_percent / (120 * measured.cpu_percent))
    assert f"on data only       {960 * (1 - share):,.0f} core-ms = 960 core-ms x (1 - 60.0" in text
    assert f"Job {trained['homogeneous']}; without data, job {trained['synthetic']}." in text
    assert "CPU work           960 core-ms = 120.0 ms x 1 x 8 cores" in text


@pytest.mark.parametrize(
    "job, sentence",
    [
        ("silent", "has no step lines"),
        ("failed", "is Failed: give a Completed or Stopped job"),
        ("heterogeneous", r"is already heterogeneous \(ml.c5.9xlarge, ml.g5.2xlarge\)"),
    ],
)
def test_a_job_that_cannot_tell_is_a_clear_sentence(trained, capsys, job, sentence):
    assert re.search(sentence, refusal(capsys, f"--job {trained[job]}"))


def test_what_aws_refuses_is_a_clear_sentence(monkeypatch, capsys):
    def refuse(*_):
        answer = {"Error": {"Code": "AccessDeniedException", "Message": "not authorized"}}
        raise ClientError(answer, "DescribeLogStreams")

    monkeypatch.setattr("shared.advisor.command.measure", refuse)
    assert "DescribeLogStreams operation: not authorized" in refusal(capsys, "--job any")


def test_a_job_that_is_slower_without_data_does_not_wait_for_data(trained):
    """Otherwise a notebook would stop if its machine was busy with other things."""
    measured = advisor.measure(trained["synthetic"], trained["homogeneous"])
    assert (measured.step_ms, measured.accelerator_ms) == (60, 60)
    said = " ".join(repr(advisor.advise(measured)).split())
    assert "were longer, 120 ms, and count as equally long" in said and "are swapped." in said


def test_unknown_and_running_jobs_are_clear_sentences(jobs, capsys):
    said = refusal(capsys, "--job no-such-job")
    assert "No training job 'no-such-job' found" in said and "use %run -m there" in said
    name = jobs.create({"a.py": ""}, "sleep 60", {"dnn_group": ("ml.g5.2xlarge", 1)})
    capsys.readouterr()  # discard where its hosts are
    assert f"{name!r} is InProgress" in refusal(capsys, f"--job {name}")
    boto3.client("sagemaker").stop_training_job(TrainingJobName=name)
    jobs.wait(name)
