"""Costs: against hand calculations and against both tables that AWS published."""

import boto3
import pytest
from moto import mock_aws
from moto.core import DEFAULT_ACCOUNT_ID
from moto.sagemaker.models import sagemaker_backends

from shared import costs

HETEROGENEOUS = {
    "InstanceGroups": [
        {"InstanceGroupName": "data_group", "InstanceType": "ml.c5.9xlarge", "InstanceCount": 2},
        {"InstanceGroupName": "dnn_group", "InstanceType": "ml.p3.2xlarge", "InstanceCount": 1},
    ]
}
HOMOGENEOUS = {"InstanceType": "ml.p3.2xlarge", "InstanceCount": 1}


def description(**changes) -> dict:
    """The part of DescribeTrainingJob's response that costs depend on."""
    return {
        "TrainingJobName": "my-job",
        "TrainingJobArn": "arn:aws:sagemaker:us-east-1:123456789012:training-job/my-job",
        "TrainingJobStatus": "Completed",
        "ResourceConfig": HETEROGENEOUS,
        "BillableTimeInSeconds": 600,
        **changes,
    }


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


def test_newest_price_is_the_default_and_a_date_picks_an_older_one():
    assert costs.price_per_hour("ml.p4d.24xlarge") == 25.2512883
    assert costs.price_per_hour("ml.p4d.24xlarge", as_of="2026-04-20") == 37.688
    assert costs.price_per_hour("ml.p4d.24xlarge", as_of="2026-04-21") == 25.2512883


def test_every_price_has_a_source_and_a_date_and_appears_once():
    prices = costs._prices()
    assert prices["source"].str.len().min() > 20
    assert prices["as_of"].str.fullmatch(r"20\d\d-\d\d-\d\d").all()
    assert not prices.duplicated(["instance_type", "region", "as_of"]).any()
    assert (prices["usd_per_hour"] > 0).all()


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (("ml.x9.large",), r"no price of 'ml\.x9\.large'; it knows .*ml\.c5\.9xlarge"),
        (("ml.p3.2xlarge", "eu-west-9"), r"in region 'eu-west-9', only in us-east-1"),
        (("ml.p3.2xlarge", "us-east-1", "2020-01-01"), r"as of 2020-01-01; .* of 2022-10-27"),
        (("ml.p3.2xlarge", "us-east-1", "last year"), r"as_of is 'last year', but must be a date"),
    ],
)
def test_a_price_that_is_not_known_is_a_clear_error(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        costs.price_per_hour(*arguments)


def test_cost_of_a_job_is_all_instances_times_billable_time():
    assert costs.cluster_price_per_hour(HETEROGENEOUS) == pytest.approx(3.825 + 2 * 1.836)
    assert costs.job_cost(description()) == pytest.approx((3.825 + 2 * 1.836) * 600 / 3600)
    assert costs.job_cost(description(ResourceConfig=HOMOGENEOUS)) == pytest.approx(0.6375)


def test_managed_spot_is_billed_for_its_billable_seconds():
    spot = description(TrainingTimeInSeconds=600, BillableTimeInSeconds=180)
    assert costs.job_cost(spot) == pytest.approx(costs.job_cost(description()) * 0.3)


def test_a_job_without_a_final_cost_is_a_clear_error():
    with pytest.raises(ValueError, match="'my-job' is InProgress: its cost is known once it has"):
        costs.job_cost(description(TrainingJobStatus="InProgress"))
    unbilled = description(TrainingJobStatus="Stopped")
    del unbilled["BillableTimeInSeconds"]
    with pytest.raises(ValueError, match=r"'my-job' \(Stopped\) has no billable time"):
        costs.job_cost(unbilled)


@pytest.fixture
def two_jobs(monkeypatch):
    """Job "local" (ml.p3.2xlarge) and job "service" (and 2 x ml.c5.9xlarge), ended and logged."""
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    with mock_aws():
        logs = boto3.client("logs")
        logs.create_log_group(logGroupName="/aws/sagemaker/TrainingJobs")
        for name, config, billable, times in [
            ("local", HOMOGENEOUS, 120, [(900, 800), (100, 60), (110, 66)]),
            ("service", HETEROGENEOUS, 60, [(40, 1), (44, 2), (42, 90)]),
        ]:
            boto3.client("sagemaker").create_training_job(
                TrainingJobName=name,
                AlgorithmSpecification={"TrainingInputMode": "File", "TrainingImage": "image"},
                RoleArn="arn:aws:iam::123456789012:role/training-role",
                OutputDataConfig={"S3OutputPath": "s3://bucket/"},
                ResourceConfig={**config, "VolumeSizeInGB": 30},
                StoppingCondition={"MaxRuntimeInSeconds": 3600},
            )
            # moto completes a job at once and knows no billable time: it is given here.
            backend = sagemaker_backends[DEFAULT_ACCOUNT_ID]["us-east-1"]
            backend.training_jobs[name].billable_time_in_seconds = billable
            stream = {
                "logGroupName": "/aws/sagemaker/TrainingJobs",
                "logStreamName": f"{name}/algo-1-1700000000",
            }
            logs.create_log_stream(**stream)
            now = int(backend.training_jobs[name].creation_time.timestamp() * 1000)
            lines = [
                f"step={i} epoch=1 loss=0.5 step_time_ms={step} data_wait_ms={wait} samples_per_s=9"
                for i, (step, wait) in enumerate(times)
            ]
            events = [{"timestamp": now, "message": line} for line in lines]
            logs.put_log_events(**stream, logEvents=events)
        yield


def test_compares_jobs_by_the_medians_of_their_step_lines(two_jobs):
    table = costs.compare({"homogeneous": "local", "heterogeneous": "service"})
    assert list(table.index) == ["homogeneous", "heterogeneous"]
    assert list(table["instances"]) == [
        "1 x ml.p3.2xlarge",
        "1 x ml.p3.2xlarge + 2 x ml.c5.9xlarge",
    ]
    first, second = table.iloc[0], table.iloc[1]
    assert (first["step time (ms)"], first["data wait (ms)"]) == (110, 66)
    assert first["data wait (%)"] == pytest.approx(60)
    assert (second["step time (ms)"], second["data wait (ms)"]) == (42, 2)
    assert second["samples per s"] == 9
    assert second["billable time (s)"] == 60
    assert second["total USD"] == pytest.approx(7.497 * 60 / 3600)
    # 1,000 steps of 42 ms take 42 s
    assert second["USD per 1,000 steps"] == pytest.approx(7.497 * 42 / 3600)
    assert second["speed-up"] == pytest.approx(110 / 42)
    assert second["price-performance improvement (%)"] == pytest.approx(
        100 * (1 - (7.497 * 42) / (3.825 * 110))
    )
    assert list(costs.compare(["service", "local"]).index) == ["service", "local"]


@pytest.mark.parametrize("job_names", ["local", []])
def test_no_list_of_jobs_is_a_clear_error(two_jobs, job_names):
    with pytest.raises(ValueError, match=r"Give training jobs as \[name, \.\.\.\]"):
        costs.compare(job_names)


def test_readable_table_has_a_column_per_job_and_rounded_numbers(two_jobs):
    table = costs.readable(costs.compare(["local", "service"]))
    assert table.loc["speed-up", "service"] == "2.6x"
    assert table.loc["USD per hour", "service"] == "7.4970"
    assert table.loc["data wait (%)", "local"] == "60 %"
    published = costs.readable(costs.compare_runs(costs.PUBLISHED["PyTorch"]))
    assert published.loc["total USD", "homogeneous"] == "-"


def test_figure_says_speed_saving_and_the_date_of_the_prices(two_jobs):
    figure = costs.plot(costs.compare(["local", "service"]), note="Measured here.")
    figure.canvas.draw()
    said = " ".join(text.get_text() for panel in figure.axes for text in panel.texts)
    assert "110.0 ms" in said and "2.6x as fast" in said and "25 % cheaper" in said
    small_print = " ".join(text.get_text() for text in figure.texts)
    assert "in us-east-1 as of 2022-10-27, 2026-09-25.\nMeasured here." in small_print
