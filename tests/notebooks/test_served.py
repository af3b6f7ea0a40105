"""AWS offers the images, instance types and regions that the notebooks use, at the stated prices.

The tests compare docs/aws.md with the stored requests and with data that is available offline.
"""

import json
import re
from datetime import date

import boto3
import nbformat
import pandas as pd
import pytest
from moto.ec2.models.instance_types import INSTANCE_TYPE_OFFERINGS
from sagemaker.core import image_uris

from helpers.pages import HELLO_NOTEBOOK, PYTORCH_NOTEBOOK, ROOT, TENSORFLOW_NOTEBOOK
from shared import advisor, costs, prices
from shared.monitoring.describe import instances_of

pytestmark = pytest.mark.quick
SECTION = (ROOT / "docs" / "aws.md").read_text()
AS_FOUND_ON = re.search(r"As found on (\S+),", SECTION)[1]
REGIONS = sorted(set(re.findall(r"\b[a-z]{2}-[a-z]+-\d\b", SECTION.split("**Regions:**")[1])))
NOTEBOOKS = {
    "hello world": HELLO_NOTEBOOK,
    "its preflight": HELLO_NOTEBOOK,
    "PyTorch": PYTORCH_NOTEBOOK,
    "TensorFlow": TENSORFLOW_NOTEBOOK,
}
TARGETS = [(name, "both") for name in ("hello world", "its preflight", "PyTorch")]
TARGETS += [("TensorFlow", "aws"), ("TensorFlow", "aws-small")]

RETIRED = {*pd.read_csv(ROOT / "shared" / "advisor" / "retired.csv")["family"]}


@pytest.fixture(autouse=True)
def snapshot_only(monkeypatch, tmp_path):
    """Use the prices in prices.csv, not those that this user has refreshed from AWS."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def requests(name: str, target: str) -> list[dict]:
    """Return the notebook's stored requests, which test_requests.py checks against the notebook."""
    suffix = target.replace("both", "aws")
    path = ROOT / "tests" / "notebooks" / "requests" / f"{NOTEBOOKS[name].stem}.{suffix}.json"
    asked = json.loads(path.read_text())
    checks = [request for request in asked if request["TrainingJobName"].startswith("preflight")]
    return checks if name == "its preflight" else [r for r in asked if r not in checks]


def instances(request: dict) -> dict[str, int]:
    """Return {instance type: count}, with the instances that train first."""
    return dict(reversed(instances_of(request["ResourceConfig"]).items()))


def table() -> dict[tuple[str, str], list[str]]:
    """Read the page's table: the other cells by the first two; "the same" is the cell above."""
    found, above = {}, []
    for line in re.findall(r"^\| (\w.*) \|$", SECTION, re.M):
        cells = [cell.strip() for cell in line.split("|")]
        above = [above[i] if cell == "the same" else cell for i, cell in enumerate(cells)]
        found[above[0], above[1].strip("`")] = above[2:]
    return found


@pytest.mark.parametrize("name, target", TARGETS)
def test_page_says_what_a_run_asks_for(name: str, target: str):
    image, types, usd, run, quotas = table()[name, target]
    asked = requests(name, target)
    (uri,) = {request["AlgorithmSpecification"]["TrainingImage"] for request in asked}
    name, _, until = image.partition(", ")
    assert name == f"`{uri.partition('/')[2]}`"
    assert date.fromisoformat(until) > date.fromisoformat(AS_FOUND_ON)  # it is patched
    largest = instances(asked[-1])
    assert types == " + ".join(f"{count} x {kind}" for kind, count in largest.items())
    assert quotas == ", ".join(f"{count} {kind}" for kind, count in largest.items())
    dated = dict(re.findall(r"\((\w)\)\s+of\s+(\d{4}-\d\d-\d\d)", SECTION))
    for part, (kind, count) in zip(usd.split(" + "), largest.items(), strict=True):
        number, letter = re.fullmatch(r"(?:\d x )?([\d.]+) \((\w)\)", part).groups()
        price = prices.price_of(kind)
        assert part.startswith(f"{count} x ") or count == 1
        assert (float(number), dated[letter]) == (round(price.usd_per_hour, 3), price.as_of)
    model = boto3.client("sagemaker", region_name="us-east-1").meta.service_model
    for kind in {kind for request in asked for kind in instances(request)}:
        assert kind in model.shape_for("TrainingInstanceType").enum
        assert kind.split(".")[1] not in RETIRED
    hourly = [costs.price_per_hour(k) * n for r in asked for k, n in instances(r).items()]
    assert run == f"USD {sum(hourly) / 6:.2f}, {15 * len(asked)} minutes"


def test_the_pytorch_notebook_s_data_hosts_cost_less_than_a_larger_instance():
    """By the page's estimate of a step."""
    samples, each = re.search(r"([\d,]+) samples x\s+([\d.]+) ms on two cores", SECTION).groups()
    step_ms = int(samples.replace(",", "")) * float(each) / 2
    # The floor is a guess; both clusters take longer.
    advice = advisor.advise(advisor.Measured("ml.g5.xlarge", step_ms, without_data_ms=20))
    usd = advice.candidates.set_index("instances")["USD per 1,000 steps"]
    larger = usd[usd.index.str.startswith("1 x ml.g5.") & ~usd.index.str.contains(r"\+")].min()
    assert larger == usd["1 x ml.g5.16xlarge"]
    kinds = instances(requests("PyTorch", "aws")[-1])
    ours = " + ".join(f"{count} x {kind}" for kind, count in kinds.items())
    assert advice.verdict.startswith("go") and usd[ours] < 0.95 * larger


@pytest.mark.parametrize("name", costs.PUBLISHED)
def test_page_has_the_published_pair_as_history(name: str):
    _, types, usd, *_ = table()[name, "published 2022"]
    published = costs.PUBLISHED[name]["heterogeneous"].instances
    assert types == " + ".join(f"{count} x {kind}" for kind, count in published.items())
    numbers = [float(number) for number in re.findall(r"([\d.]+) \(b\)", usd)]
    assert numbers == [costs.price_per_hour(k, as_of=costs.PUBLISHED_ON) for k in published]


@pytest.mark.parametrize("region", REGIONS)
def test_region_has_images_and_instances(region: str):
    """Check the SDK's table of accounts, and moto's copy of EC2's offerings (of 2026)."""
    assert region in boto3.Session().get_available_regions("sagemaker")
    asked = [request for target in TARGETS for request in requests(*target)]
    accounts = {r["AlgorithmSpecification"]["TrainingImage"].partition(".")[0] for r in asked}
    # The newest versions that the SDK knows.
    for framework, version in (("pytorch", "2.10"), ("tensorflow", "2.12")):
        uri = image_uris.retrieve(
            framework, region, version, instance_type="ml.g5.xlarge", image_scope="training"
        )
        assert {uri.partition(".")[0]} == accounts
        assert uri.partition("/")[0].endswith(f".dkr.ecr.{region}.amazonaws.com")
    offered = {f"ml.{offer['InstanceType']}" for offer in INSTANCE_TYPE_OFFERINGS["region"][region]}
    assert {kind for request in asked for kind in instances(request)} <= offered


@pytest.mark.parametrize("region, own", [("us-east-1", False), ("eu-west-1", True)])
def test_data_is_in_the_region_of_the_job(region: str, own: bool):
    cells = nbformat.read(NOTEBOOKS["PyTorch"], as_version=4).cells
    (source,) = [cell.source for cell in cells if "SIZES = {" in cell.source]
    names = {"region": region, "bucket": "mine", "TARGET": "aws-small", "costs": costs}
    exec(source, names)
    public = "s3://sagemaker-example-files-prod-us-east-1/datasets/image/MNIST"
    expected = "s3://mine/digits" if own else public
    assert {names["SIZES"][target]["data"] for target in ("aws", "aws-small")} == {expected}
