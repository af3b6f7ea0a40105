"""Costs, checked by hand and against both tables that AWS published."""

import os
import subprocess
import sys

import pytest

from helpers.ended_jobs import put_job, put_log, step_lines
from helpers.jobs import ROOT, start_kernel
from shared import costs, prices
from shared.costs import Run

HETEROGENEOUS = {"data_group": ("ml.c5.9xlarge", 2), "dnn_group": ("ml.p3.2xlarge", 1)}


@pytest.mark.parametrize(
    "framework, per_hour, per_100_steps, speed_up, improvement",
    [
        ("TensorFlow", (37.688, 45.032), (0.201, 0.108), 2.2, 46),
        ("PyTorch", (3.825, 5.661), (0.127, 0.029), 6.5, 77),
    ],
)
def test_reproduces_the_published_tables(framework, per_hour, per_100_steps, speed_up, improvement):
    table = costs.compare_runs(costs.PUBLISHED[framework], as_of=costs.PUBLISHED_ON)
    assert list(table["USD per hour"]) == pytest.approx(per_hour)
    assert tuple((table["USD per 1,000 steps"] / 10).astype(float).round(3)) == per_100_steps
    assert round(table["speed-up"].iloc[1], 1) == speed_up
    assert round(table["price-performance improvement (%)"].iloc[1]) == improvement
    assert list(table["speed-up"])[0] == 1
    assert list(table["price-performance improvement (%)"])[0] == 0


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


@pytest.fixture
def two_jobs(aws) -> dict[str, str]:
    """Ended jobs with logs: "local" (ml.p3.2xlarge) and "service" (with 2 x ml.c5.9xlarge too)."""
    put_job("local", billable_time_in_seconds=120)
    put_log("local", "algo-1", step_lines((900, 800), (100, 60), (110, 66)))
    spot = {"training_time_in_seconds": 80, "enable_managed_spot_training": True}
    put_job("service", HETEROGENEOUS, billable_time_in_seconds=60, **spot)
    put_log("service", "algo-1", step_lines((40, 1), (44, 2), (42, 90)))
    return {"homogeneous": "local", "heterogeneous": "service"}


def test_compares_jobs_by_the_medians_of_their_step_lines(two_jobs):
    table = costs.compare(two_jobs)
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
    # 1,000 steps of 42 ms take 42 s; managed spot training saves a quarter of the cost
    assert second["USD per 1,000 steps"] == pytest.approx(7.497 * 42 / 3600 * 0.75)
    assert second["USD per 1,000 samples"] == pytest.approx(7.497 / 3600 * (1000 / 9) * 0.75)
    assert second["speed-up"] == pytest.approx(110 / 42)
    assert second["price-performance improvement (%)"] == pytest.approx(
        100 * (1 - (7.497 * 42 * 0.75) / (3.825 * 110))
    )
    readable = costs.readable(table)
    assert readable.loc["speed-up", "heterogeneous"] == "2.6x"
    assert readable.loc["USD per hour", "heterogeneous"] == "7.4970"
    assert readable.loc["data wait (%)", "homogeneous"] == "60 %"
    assert readable.loc["saved by spot (%)", "homogeneous"] == "-"
    published = costs.readable(costs.compare_runs(costs.PUBLISHED["PyTorch"]))
    assert "total USD" not in published.index and "step time (ms)" in published.index


def test_figure_says_speed_saving_and_the_date_of_the_prices(two_jobs):
    figure = costs.plot(costs.compare(two_jobs), "Title", "Measured here.")
    figure.canvas.draw()
    said = " ".join(text.get_text() for panel in figure.axes for text in panel.texts)
    assert "110.0 ms" in said and "2.6x as fast" in said and "44 % cheaper" in said
    assert "USD 0.118056 per 1,000 samples" in said  # 3.825 / 3600 * 1000 / 9
    small_print = " ".join(text.get_text() for text in figure.texts)
    assert "in us-east-1 as of 2022-10-27, 2026-09-27, less managed spot's" in small_print
    assert "\nMeasured here." in small_print


def test_with_the_job_without_data_it_is_known_what_data_costs(two_jobs):
    put_log("synthetic", "algo-1", step_lines((33, 0), (34, 0)))
    table = costs.compare(two_jobs, synthetic_job="synthetic")
    assert list(table["data costs (%)"]) == pytest.approx([100 * 76.5 / 110, 100 * 8.5 / 42])
    widths = [bar.get_width() for bar in costs.plot(table, "").axes[0].patches]
    assert widths == pytest.approx([33.5, 33.5, 76.5, 8.5])  # without data; data
    assert table.loc["homogeneous", "data wait (ms)"] == 66  # shown in the table only


def test_step_times_are_those_that_measured_has_found(two_jobs):
    """Some of the step lines of such a job are of repeated batches."""
    per_ms = costs.compare(two_jobs)[["samples per s", "step time (ms)"]].prod(axis=1)
    put_log("local", "algo-1", ['{"measured": {"step_ms": 120, "without_data_ms": 30}}'], at_s=1)
    table = costs.compare(two_jobs)
    # A step still has as many samples.
    assert list(table[["samples per s", "step time (ms)"]].prod(axis=1)) == pytest.approx([*per_ms])
    assert list(table["step time (ms)"]) == [120, 42]
    assert table.loc["homogeneous", "step without data (ms)"] == 30
    put_log("synthetic", "algo-1", step_lines((33, 0), (34, 0)))
    table = costs.compare(two_jobs, synthetic_job="synthetic")
    assert list(table["step time (ms)"]) == [120, 42]
    assert list(table["step without data (ms)"]) == [33.5, 33.5]


def test_the_command_prints_the_table_and_where_prices_are_from(two_jobs, capsys):
    assert costs.main(["local", "service"]) == 0
    said = capsys.readouterr().out
    table = costs.compare({"local": "local", "service": "service"})
    assert costs.readable(table).to_string() in said
    for kind in ("ml.p3.2xlarge", "ml.c5.9xlarge"):
        known = prices.price_of(kind)
        price = f"USD {known.usd_per_hour} per hour as of {known.as_of}, {known.source}"
        assert f"{kind} in us-east-1: {price}" in said


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ([], "Name training jobs, or give --refresh REGION.\n"),
        (["local", "--refresh", "us-east-1"], "Name training jobs, or give --refresh REGION.\n"),
        (["local", "--region", "ap-south-1"], "No price of ml.p3.2xlarge in region 'ap-south-1'"),
        (["running"], "Training job 'running' is InProgress: its cost is known once it has ended."),
        (["unbilled"], "Training job 'unbilled' (Stopped) has no billable time, so no cost."),
        (["silent"], "The log of training job 'silent' has no step lines"),
        (["unpriced"], "No price of 'ml.r5.large' is known, only of the families ml.c5, "),
        (["no-such-job"], "No training job 'no-such-job' found"),
    ],
)
def test_what_has_no_costs_is_a_clear_sentence(two_jobs, capsys, arguments, sentence):
    put_job("running", training_job_status="InProgress")
    put_job("unbilled", training_job_status="Stopped")
    put_job("silent", billable_time_in_seconds=60)
    put_log("silent", "algo-1", ["no steps"])
    put_job("unpriced", {"": ("ml.r5.large", 1)}, billable_time_in_seconds=60)
    put_log("unpriced", "algo-1", step_lines((1, 0)))
    assert costs.main(arguments) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith(sentence) and said.err.count("\n") == 1


def test_without_an_account_the_command_says_how_to_reach_local_jobs(tmp_path):
    environment = {name: os.environ[name] for name in os.environ if not name.startswith("AWS_")}
    ended = subprocess.run(
        [sys.executable, "-m", "shared.costs", "job"],
        env={**environment, "AWS_CONFIG_FILE": str(tmp_path / "none")},
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    said = ended.stderr
    assert (ended.returncode, ended.stdout) == (2, "")
    assert said.startswith("No training job 'job' found (You must specify a region.)")
    assert said.count("\n") == 1 and said.endswith("started it: use %run -m there.\n")


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
shell.run_line_magic("run", "-m shared.costs no-such-job")
shell.run_line_magic("run", "-m shared.costs -- --refresh us-east-1")
"""


@pytest.mark.thorough
def test_the_command_in_a_notebook_knows_its_local_jobs(tmp_path):
    kernel = start_kernel(LOCAL_JOBS, tmp_path, IPYTHONDIR=str(tmp_path / "ipython"))
    said = kernel.communicate(timeout=120)[0]
    rows = {line.split("  ")[0]: line.split() for line in said.splitlines()}
    assert rows["USD per hour"][-2:] == ["1.5200", "3.3560"], said
    assert rows["USD per 1,000 steps"][-2:] == ["0.1056", "0.2331"]  # 1,000 steps take 250 s
    assert "No training job 'no-such-job' found" in said
    assert "(the local SageMaker has no prices: use a terminal)" in said
    assert "Traceback" not in said
