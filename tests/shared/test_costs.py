"""Costs: against hand calculations and against both tables that AWS published."""

import json
import subprocess
import sys

import boto3
import pytest
from moto import mock_aws
from moto.core import DEFAULT_ACCOUNT_ID
from moto.sagemaker.models import sagemaker_backends

from jobs import ROOT, request, start_kernel
from shared import costs, prices
from shared.costs import Run

HETEROGENEOUS = {
    "InstanceGroups": [
        {"InstanceGroupName": "data_group", "InstanceType": "ml.c5.9xlarge", "InstanceCount": 2},
        {"InstanceGroupName": "dnn_group", "InstanceType": "ml.p3.2xlarge", "InstanceCount": 1},
    ]
}
HOMOGENEOUS = {"InstanceType": "ml.p3.2xlarge", "InstanceCount": 1}


@pytest.fixture(autouse=True)
def no_refreshed_prices(tmp_path, monkeypatch):
    """Only the prices of prices.csv, whatever this user has got from AWS."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


# framework, price per hour, printed cost of 100 steps, printed speed-up and improvement
PUBLISHED = [
    ("TensorFlow", (37.688, 45.032), (0.201, 0.108), 2.2, 46),
    ("PyTorch", (3.825, 5.661), (0.127, 0.029), 6.5, 77),
]


@pytest.mark.parametrize("framework, per_hour, per_100_steps, speed_up, improvement", PUBLISHED)
def test_reproduces_the_published_tables(framework, per_hour, per_100_steps, speed_up, improvement):
    table = costs.compare_runs(costs.PUBLISHED[framework], as_of=costs.PUBLISHED_ON)
    assert list(table["USD per hour"]) == pytest.approx(per_hour)
    assert tuple((table["USD per 1,000 steps"] / 10).astype(float).round(3)) == per_100_steps
    assert round(table["speed-up"].iloc[1], 1) == speed_up
    assert round(table["price-performance improvement (%)"].iloc[1]) == improvement
    assert list(table["speed-up"])[0] == 1
    assert list(table["price-performance improvement (%)"])[0] == 0


def test_the_published_runs_at_todays_prices():
    table = costs.published("TensorFlow")
    then, today = table.loc["heterogeneous, 2022"], table.loc["heterogeneous, today"]
    assert round(then["price-performance improvement (%)"]) == 46
    assert today["USD per hour"] == pytest.approx(25.2513 + 2 * 3.672)
    assert today["prices as of"] == "2026-09-27"
    # 1,000 steps of 86 ms take 86 s
    assert today["USD per 1,000 steps"] == pytest.approx((25.2513 + 2 * 3.672) / 3600 * 86)
    assert today["price-performance improvement (%)"] == pytest.approx(
        100 * (1 - (25.2513 + 2 * 3.672) * 86 / (25.2513 * 192))
    )


def test_a_published_run_without_a_newer_price_says_so():
    table = costs.published("PyTorch")
    today = table.loc["heterogeneous, today"]
    assert today["prices as of"] == "no newer price of ml.p3.2xlarge"
    assert today[["USD per hour", "USD per 1,000 steps"]].isna().all()
    assert today["speed-up"] == pytest.approx(1193 / 184)
    with pytest.raises(ValueError, match=r"no published table of 'JAX', only \['TensorFlow', "):
        costs.published("JAX")


def test_prices_used_come_with_the_table():
    table = costs.compare_runs(costs.PUBLISHED["PyTorch"], as_of=costs.PUBLISHED_ON)
    used = [(price.instance_type, price.usd_per_hour) for price in table.attrs["prices"]]
    assert used == [("ml.p3.2xlarge", 3.825), ("ml.c5.9xlarge", 1.836)]


def test_managed_spot_saves_in_total_and_per_step_and_sample():
    on_demand = Run({"ml.p3.2xlarge": 2}, 100, samples_per_s=500, billable_s=600, training_s=600)
    spot = Run({"ml.p3.2xlarge": 2}, 100, 20, 500, billable_s=180, training_s=600, spot=True)
    table = costs.compare_runs({"on demand": on_demand, "spot": spot})
    assert table.loc["spot", "saved by spot (%)"] == pytest.approx(70)
    assert table["saved by spot (%)"].isna().to_list() == [True, False]
    assert list(table["USD per hour"]) == [7.65, 7.65]
    assert list(table["total USD"]) == pytest.approx([7.65 / 6, 7.65 / 6 * 0.3])
    assert list(table["USD per 1,000 steps"]) == pytest.approx([7.65 / 36, 7.65 / 36 * 0.3])
    # 1,000 samples take 2 s
    assert list(table["USD per 1,000 samples"]) == pytest.approx([7.65 / 1800, 7.65 / 1800 * 0.3])
    assert table.loc["spot", "price-performance improvement (%)"] == pytest.approx(70)
    small_print = " ".join(text.get_text() for text in costs.plot(table).texts)
    assert "as of 2022-10-27, less managed spot's saving" in small_print


@pytest.fixture
def aws(monkeypatch):
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    with mock_aws():
        boto3.client("logs").create_log_group(logGroupName="/aws/sagemaker/TrainingJobs")
        yield


def add_job(name: str, config: dict, lines: list[str], **record) -> None:
    """A training job that has ended and logged these lines; `record` changes moto's record."""
    resources = {**config, "VolumeSizeInGB": 30}
    boto3.client("sagemaker").create_training_job(**request(name, ResourceConfig=resources))
    # moto completes a job at once and knows no billable time: it is given here.
    job = sagemaker_backends[DEFAULT_ACCOUNT_ID]["us-east-1"].training_jobs[name]
    for key, value in record.items():
        setattr(job, key, value)
    logs = boto3.client("logs")
    stream = {
        "logGroupName": "/aws/sagemaker/TrainingJobs",
        "logStreamName": f"{name}/algo-1-1700000000",
    }
    logs.create_log_stream(**stream)
    now = int(job.creation_time.timestamp() * 1000)
    logs.put_log_events(**stream, logEvents=[{"timestamp": now, "message": line} for line in lines])


def step_lines(*times: tuple[float, float]) -> list[str]:
    return [
        f"step={i} epoch=1 loss=0.5 step_time_ms={step} data_wait_ms={wait} samples_per_s=9"
        for i, (step, wait) in enumerate(times)
    ]


@pytest.fixture
def two_jobs(aws):
    """Job "local" (ml.p3.2xlarge) and job "service" (and 2 x ml.c5.9xlarge), ended and logged."""
    lines = step_lines((900, 800), (100, 60), (110, 66))
    add_job("local", HOMOGENEOUS, lines, billable_time_in_seconds=120)
    lines = step_lines((40, 1), (44, 2), (42, 90))
    add_job(
        "service",
        HETEROGENEOUS,
        lines,
        billable_time_in_seconds=60,
        training_time_in_seconds=80,
        enable_managed_spot_training=True,
    )


def test_compares_jobs_by_the_medians_of_their_step_lines(two_jobs):
    table = costs.compare({"homogeneous": "local", "heterogeneous": "service"})
    assert list(table.index) == ["homogeneous", "heterogeneous"]
    assert list(table["instances"]) == [
        "1 x ml.p3.2xlarge",
        "1 x ml.p3.2xlarge + 2 x ml.c5.9xlarge",
    ]
    assert list(table["USD per instance-hour"]) == ["1 x 3.825", "1 x 3.825 + 2 x 1.836"]
    first, second = table.iloc[0], table.iloc[1]
    assert (first["step time (ms)"], first["data wait (ms)"]) == (110, 66)
    assert first["data wait (%)"] == pytest.approx(60)
    assert (second["step time (ms)"], second["data wait (ms)"]) == (42, 2)
    assert second["samples per s"] == 9
    assert (second["billable time (s)"], second["training time (s)"]) == (60, 80)
    assert second["saved by spot (%)"] == pytest.approx(25)
    assert second["total USD"] == pytest.approx(7.497 * 60 / 3600)
    # 1,000 steps of 42 ms take 42 s, of which managed spot training saves a quarter
    assert second["USD per 1,000 steps"] == pytest.approx(7.497 * 42 / 3600 * 0.75)
    assert second["USD per 1,000 samples"] == pytest.approx(7.497 / 3600 * (1000 / 9) * 0.75)
    assert second["speed-up"] == pytest.approx(110 / 42)
    assert second["price-performance improvement (%)"] == pytest.approx(
        100 * (1 - (7.497 * 42 * 0.75) / (3.825 * 110))
    )
    assert list(costs.compare(["service", "local"]).index) == ["service", "local"]
    old = costs.compare(["service"], as_of="2022-10-27")
    assert old["prices as of"].iloc[0] == "2022-10-27"


@pytest.mark.parametrize("job_names", ["local", []])
def test_no_list_of_jobs_is_a_clear_error(two_jobs, job_names):
    with pytest.raises(ValueError, match=r"Give training jobs as \[name, \.\.\.\]"):
        costs.compare(job_names)


def test_readable_table_has_a_column_per_job_and_rounded_numbers(two_jobs):
    table = costs.readable(costs.compare(["local", "service"]))
    assert table.loc["speed-up", "service"] == "2.6x"
    assert table.loc["USD per hour", "service"] == "7.4970"
    assert table.loc["data wait (%)", "local"] == "60 %"
    assert table.loc["saved by spot (%)", "local"] == "-"
    published = costs.readable(costs.compare_runs(costs.PUBLISHED["PyTorch"]))
    assert "total USD" not in published.index and "step time (ms)" in published.index


def test_figure_says_speed_saving_and_the_date_of_the_prices(two_jobs):
    figure = costs.plot(costs.compare(["local", "service"]), note="Measured here.")
    figure.canvas.draw()
    said = " ".join(text.get_text() for panel in figure.axes for text in panel.texts)
    assert "110.0 ms" in said and "2.6x as fast" in said and "44 % cheaper" in said
    assert "USD 0.118056 per 1,000 samples" in said  # 3.825 / 3600 * 1000 / 9
    small_print = " ".join(text.get_text() for text in figure.texts)
    assert "in us-east-1 as of 2022-10-27, 2026-09-27, less managed spot's" in small_print
    assert "\nMeasured here." in small_print


def test_with_the_job_without_data_it_is_known_what_data_costs(two_jobs):
    add_job("synthetic", HOMOGENEOUS, step_lines((33, 0), (34, 0)), billable_time_in_seconds=60)
    table = costs.compare(["local", "service"], synthetic_job="synthetic")
    assert list(table["step without data (ms)"]) == [33.5, 33.5]
    assert list(table["data costs (%)"]) == pytest.approx([100 * 76.5 / 110, 100 * 8.5 / 42])
    widths = [bar.get_width() for bar in costs.plot(table).axes[0].patches]
    assert widths == pytest.approx([33.5, 33.5, 76.5, 8.5])  # of both steps, then what data costs
    assert table.loc["local", "data wait (ms)"] == 66  # which is in the table, not in the figure


def test_the_command_prints_the_table_and_where_prices_are_from(two_jobs, capsys):
    assert costs.main(["local", "service"]) == 0
    said = capsys.readouterr().out
    assert costs.readable(costs.compare(["local", "service"])).to_string() in said
    price = prices.find("ml.p3.2xlarge")
    assert (
        f"ml.p3.2xlarge in us-east-1: USD 3.825 per hour as of 2022-10-27, {price.source}" in said
    )
    assert costs.main(["local", "--region", "ap-south-1"]) == 2
    assert "No price of ml.p3.2xlarge in region 'ap-south-1'" in capsys.readouterr().err
    assert costs.main(["service", "--as-of", "2022-10-27", "--json"]) == 0
    (job,) = json.loads(capsys.readouterr().out)["jobs"]
    assert (job["run"], job["prices as of"], job["USD per hour"]) == (
        "service",
        "2022-10-27",
        7.497,
    )
    assert job["saved by spot (%)"] == pytest.approx(25)


def test_the_command_prints_the_published_tables(capsys):
    assert costs.main(["--published"]) == 0
    said = capsys.readouterr().out
    assert "46 %" in said and "77 %" in said and "no newer price of ml.p3.2xlarge" in said
    assert "cost of 100 steps" in said and said.endswith(" --refresh us-east-1\n")
    assert costs.main(["--published", "--json"]) == 0
    tables = json.loads(capsys.readouterr().out)
    first, _, today, _ = tables["PyTorch"]
    assert first["run"] == "homogeneous, 2022"
    assert first["USD per 1,000 steps"] == pytest.approx(3.825 / 3600 * 1193)
    assert today["USD per 1,000 steps"] is None


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ([], "Name training jobs, or give --published, or --refresh REGION.\n"),
        (["job", "--published"], "Name training jobs, or give --published, or --refresh REGION.\n"),
        (["--published", "--as-of", "2022-10-27"], "--as-of is for training jobs.\n"),
    ],
)
def test_the_command_says_what_it_takes(arguments, sentence, capsys):
    assert costs.main(arguments) == 2
    assert capsys.readouterr().err == sentence


def test_the_command_exits_with_2_after_a_wrong_call():
    command = [sys.executable, "-m", "shared.costs", "--published", "--region", "eu-west-9"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("No price of ml.p4d.24xlarge in region 'eu-west-9' is known, ")


JOBS_WITHOUT_COSTS = {
    "running": (
        {"training_job_status": "InProgress"},
        "Training job 'running' is InProgress: its cost is known once it has ended.",
    ),
    "unbilled": (
        {"training_job_status": "Stopped", "billable_time_in_seconds": None},
        "Training job 'unbilled' (Stopped) has no billable time: nothing to cost.",
    ),
    "silent": ({}, "The log of training job 'silent' has no step lines"),
    "unpriced": ({}, "No price of 'ml.r5.large' is known, only of the families ml.c5, "),
}


@pytest.mark.parametrize("name", JOBS_WITHOUT_COSTS)
def test_a_job_without_costs_is_a_clear_sentence(aws, capsys, name):
    record, sentence = JOBS_WITHOUT_COSTS[name]
    config = {"InstanceType": "ml.r5.large", "InstanceCount": 1} if name == "unpriced" else None
    lines = ["no steps"] if name == "silent" else step_lines((1, 0))
    add_job(name, config or HOMOGENEOUS, lines, **{"billable_time_in_seconds": 60, **record})
    assert costs.main([name]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith(sentence)
    assert said.err.count("\n") == 1 and "Traceback" not in said.err


def test_an_unknown_job_is_a_clear_sentence(aws, capsys):
    assert costs.main(["no-such-job"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("No training job 'no-such-job' to be seen from here")
    assert said.endswith("in the notebook that started it: use %run -m there.\n")


def test_without_an_account_the_command_says_how_to_reach_local_jobs(monkeypatch, capsys, tmp_path):
    for name in ("AWS_DEFAULT_REGION", "AWS_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    assert costs.main(["job"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(
        "No training job 'job' to be seen from here (You must specify a region.)"
    )
    assert said.count("\n") == 1 and "use %run -m there" in said


LOCAL_JOBS = """
line = "step=1 epoch=1 loss=0.5 step_time_ms=250 data_wait_ms=50 samples_per_s=128"
two = {"data_group": ("ml.c5.9xlarge", 1), "dnn_group": ("ml.g5.2xlarge", 1)}
names = [
    jobs.run({"train.py": f"print('{line}')"}, "exec python train.py", groups)["TrainingJobName"]
    for groups in ({"gpu": ("ml.g5.2xlarge", 1)}, two)
]
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_line_magic("run", "-m shared.costs " + " ".join(names))
shell.run_line_magic("run", f"-m shared.costs {names[0]} --json")
shell.run_line_magic("run", "-m shared.costs no-such-job")
shell.run_line_magic("run", "-m shared.costs -- --refresh us-east-1")
"""


@pytest.mark.thorough
def test_the_command_in_a_notebook_knows_its_local_jobs(tmp_path):
    kernel = start_kernel(LOCAL_JOBS, tmp_path, IPYTHONDIR=str(tmp_path / "ipython"))
    said = kernel.communicate(timeout=120)[0]
    rows = {line.split("  ")[0]: line.split() for line in said.splitlines()}
    assert rows["USD per hour"][-2:] == ["1.5200", "3.3560"], said
    assert rows["USD per 1,000 steps"][-2:] == ["0.1056", "0.2331"]  # 250 s of them
    assert '"USD per 1,000 steps": 0.10555' in said
    assert "No training job 'no-such-job' to be seen from here" in said
    assert "(the local SageMaker has no prices: ask in a terminal)" in said
    assert "Traceback" not in said
