"""Prices: the snapshot, the lookup, and the refresh from products shaped like AWS's price list."""

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path

import boto3
import pytest
from botocore.stub import Stubber

from shared import costs, prices
from shared.local_sagemaker.cluster import INSTANCE_TYPES

pytestmark = pytest.mark.quick


@pytest.fixture
def cache(tmp_path) -> Path:
    """The folder of this user's prices; here a temporary one, empty at first."""
    return tmp_path / "sagemaker-heterogeneous-clusters"


def test_every_price_of_the_snapshot_is_complete_and_appears_once():
    rows = prices.load()
    assert len({(row.instance_type, row.region, row.as_of) for row in rows}) == len(rows) > 100
    nothing = {"region": "", "usd_per_hour": 0.0, "as_of": "", "source": ""}
    hardware = {replace(row, **nothing) for row in rows}  # the same in all rows of a type
    assert len(hardware) == len({row.instance_type for row in rows})
    for row in rows:
        assert row.vcpus > 0 and row.memory_gib > 0
        assert row.network_gbps >= 10 and bool(row.gpus) == bool(row.gpu)
        assert len(row.source) > 20
        if math.isnan(row.usd_per_hour):
            assert (row.region, row.as_of) == ("", "") and "no price found" in row.source
        else:
            assert row.usd_per_hour > 0
            assert date.fromisoformat(row.as_of) >= date(2022, 10, 27)


def test_types_without_a_price_are_not_found():
    rows = [row for row in prices.load() if math.isnan(row.usd_per_hour)]
    assert {row.instance_type.split(".")[1] for row in rows} == {
        *("g7", "g7e", "p5e", "p5en", "p6-b200", "p6-b300", "trn2", "c5n", "c8i", "m8i", "r8i")
    }
    for row in rows:
        with pytest.raises(ValueError, match=f"No price of '{row.instance_type}' is known"):
            prices.price_of(row.instance_type)


def test_types_have_what_ec2_says_of_them():
    rows = {row.instance_type.removeprefix("ml."): row for row in prices.load()}
    assert {name.split(".")[0] for name in rows.keys() - INSTANCE_TYPES.keys()} == {"p3"}
    for name in rows.keys() & INSTANCE_TYPES.keys():
        row, facts = rows[name], INSTANCE_TYPES[name]
        neuron = facts.get("NeuronInfo") or {}
        neuron = neuron.get("NeuronDevices") or neuron.get("Accelerators")
        accelerators = (facts.get("GpuInfo") or {}).get("Gpus") or neuron or []
        assert row.gpus == sum(device["Count"] for device in accelerators), name
        assert row.vcpus == facts["VCpuInfo"]["DefaultVCpus"]
        assert row.memory_gib == facts["MemoryInfo"]["SizeInMiB"] / 1024
        assert row.network_gbps == prices._number(facts["NetworkInfo"]["NetworkPerformance"])
    p3 = rows["p3.2xlarge"]  # EC2 no longer describes it: see prices.py for the source
    assert (p3.vcpus, p3.gpus, p3.gpu, p3.memory_gib, p3.network_gbps) == (8, 1, "V100", 61, 10)


def test_sagemaker_trains_on_no_graviton_and_on_none_of_amds_cpu_instances():
    """As docs/limits.md says; the names of such families end in g or a, for the processor."""
    model = boto3.client("sagemaker", region_name="us-east-1").meta.service_model
    allowed = set(model.shape_for("TrainingInstanceType").enum)
    assert {row.instance_type for row in prices.load()} <= allowed
    families = {name.split(".")[1] for name in allowed}
    assert {"c6i", "c8i", "m7i-flex"} <= families
    assert not [name for name in families if re.match(r"[cmr]\d[ag]", name)]


def test_newest_price_is_the_default_and_a_date_picks_an_older_one():
    assert costs.price_per_hour("ml.p4d.24xlarge") == 25.2513
    assert costs.price_per_hour("ml.p4d.24xlarge", as_of="2026-09-26") == 37.688
    assert costs.price_per_hour("ml.p4d.24xlarge", as_of="2026-09-27") == 25.2513
    assert costs.price_per_hour("ml.p4d.24xlarge", "ap-south-1") == 30.29606


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (
            ("ml.x9.large",),
            r"No price of 'ml\.x9\.large' is known, only of the families ml\.c5, .*ml\.trn1: "
            r"shared\.costs\.refresh_prices\('us-east-1'\), or python -m shared\.costs --refresh",
        ),
        (("ml.g5.3xlarge",), r"'ml\.g5\.3xlarge' is known, only of ml\.g5\.xlarge, .*48xlarge: "),
        (("ml.p3.2xlarge", "eu-west-9"), r"in region 'eu-west-9' is known, only in us-east-1: "),
        (("ml.p3.2xlarge", "us-east-1", "2020-01-01"), r"as of 2020-01-01 .* first is of 2022"),
        (("ml.p3.2xlarge", "us-east-1", "last year"), r"as_of is 'last year', but must be a date"),
    ],
)
def test_a_price_that_is_not_known_is_a_clear_error(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        costs.price_per_hour(*arguments)


USUAL = {"component": "Training", "vCpu": "16", "gpu": "N/A", "physicalGpu": "N/A"}
USUAL |= {"memory": "32 GiB", "networkPerformance": "Up to 10 Gigabit"}


def product(usage_type: str, usd: str | None, unit: str = "Hrs", **attributes: str) -> str:
    """Return a product as GetProducts does: JSON in a string.

    Attributes, usage types and terms are as in the API reference, and as public programs read them
    from AmazonSageMaker's price list (for example sagemaker.py of vantage-sh/ec2instances.info).
    """
    attributes = USUAL | {"usagetype": usage_type} | attributes
    dimension = {"unit": unit, "pricePerUnit": {"USD": usd}}
    term = {"priceDimensions": {"SKU.JRTCKXETXF.6YS6EN2CT7": dimension}}
    terms = {"OnDemand": {"SKU.JRTCKXETXF": term}} if usd else {}
    described = {"productFamily": "ML Instance", "attributes": attributes}
    return json.dumps({"product": described, "terms": terms})


@pytest.fixture
def pricing(monkeypatch) -> Iterator[Stubber]:
    """AWS's price list, whose answers the test adds; only few regions have this API."""
    client = boto3.client("pricing", "us-east-1", aws_access_key_id="a", aws_secret_access_key="b")
    clients = {("pricing", "us-east-1"): client}
    monkeypatch.setattr(boto3, "client", lambda service, region_name: clients[service, region_name])
    with Stubber(client) as aws:
        yield aws


@pytest.fixture
def refresh(pricing: Stubber) -> Callable[..., list[prices.Price]]:
    """Call `refresh_prices` while AWS answers with the given pages of products."""

    def call(*pages: list[str], region: str = "eu-west-1") -> list[prices.Price]:
        wanted = {"regionCode": region, "component": "Training"}
        filters = [{"Type": "TERM_MATCH", "Field": k, "Value": v} for k, v in wanted.items()]
        request = {"ServiceCode": "AmazonSageMaker", "Filters": filters}
        for i, page in enumerate(pages):
            more = {"NextToken": f"page {i + 1}"} if i + 1 < len(pages) else {}
            token = {"NextToken": f"page {i}"} if i else {}
            pricing.add_response("get_products", {"PriceList": page, **more}, {**request, **token})
        found = costs.refresh_prices(region)
        pricing.assert_no_pending_responses()
        return found

    return call


B200 = {"vCpu": "192", "gpu": "8", "physicalGpu": "B200", "memory": "2,048 GiB"}
B200 |= {"networkPerformance": "8x 400 Gigabit"}
UNKNOWN = {"vCpu": "N/A", "memory": "N/A", "networkPerformance": "High"}


def test_refresh_reads_all_pages_and_passes_over_what_is_no_price_of_training(cache, refresh):
    found = refresh(
        [
            product("EU-Train:ml.c5.4xlarge", "0.9220000000"),
            product("EU-TrSpt:ml.c5.9xlarge", "0.5000000000"),
            product("EU-Host:ml.c5.9xlarge", "2.0740000000", component="Hosting"),
        ],
        [
            product("EU-TrainingPlanUpfrontFee:ml.p4d.24xlarge", "13.57", unit="Quantity"),
            product("EU-Train:ml.c5.18xlarge", None),
            product("EU-Train:ml.c5.2xlarge", "7", unit="Quantity"),
            product("EU-Train:ml.m.xlarge-TrainingParent", "0.0000000000"),
        ],
        [
            product("EU-Train:ml.new2.48xlarge", "150.5", **B200),
            product("EU-Train:ml.g5.xlarge", "1.575", **UNKNOWN),
            product("EU-Train:ml.new1.large", "1", **UNKNOWN),
        ],
    )
    kept = {price.instance_type: price for price in prices.load() if price.region == "eu-west-1"}
    assert str([*kept.values()]) == str(found)  # as text, since nan differs from nan
    names = ["ml.c5.4xlarge", "ml.new2.48xlarge", "ml.g5.xlarge", "ml.new1.large"]
    assert list(kept) == names
    new = kept["ml.new2.48xlarge"]
    assert (new.usd_per_hour, new.vcpus, new.gpus, new.gpu) == (150.5, 192, 8, "B200")
    assert (new.memory_gib, new.network_gbps) == (2048, 3200)
    assert new.source == "AWS Price List API" and len(new.as_of) == len("2026-11-21")
    known = kept["ml.g5.xlarge"]  # prices.csv knows its hardware better
    assert (known.vcpus, known.gpus, known.gpu, known.network_gbps) == (4, 1, "A10G", 10)
    for unknown in (kept["ml.new1.large"], prices.price_of("ml.new1.large", "eu-west-1")):
        assert (unknown.vcpus, unknown.gpus, unknown.gpu) == (0, 0, "")
        assert math.isnan(unknown.memory_gib) and math.isnan(unknown.network_gbps)
    assert costs.price_per_hour("ml.c5.4xlarge", "eu-west-1") == 0.922
    assert [path.name for path in cache.iterdir()] == ["prices-eu-west-1.csv"]
    header = (cache / "prices-eu-west-1.csv").read_text().splitlines()[0]
    assert header == prices.SNAPSHOT.read_text().splitlines()[0]


def test_a_refreshed_price_is_preferred_and_an_older_one_still_known(cache, refresh):
    assert costs.price_per_hour("ml.g5.xlarge") == 1.41
    refresh([product("USE1-Train:ml.g5.xlarge", "1.3")], region="us-east-1")
    assert costs.price_per_hour("ml.g5.xlarge") == 1.3
    assert costs.price_per_hour("ml.g5.xlarge", as_of="2026-09-27") == 1.41
    (price,) = refresh([product("USE1-Train:ml.g5.xlarge", "1.2")], region="us-east-1")
    assert costs.price_per_hour("ml.g5.xlarge") == 1.2
    # Of two prices of the same day, the refreshed one counts.
    file = cache / "prices-us-east-1.csv"
    file.write_text(file.read_text().replace(price.as_of, "2026-09-27"))
    assert costs.price_per_hour("ml.g5.xlarge") == 1.2
    file.write_text(file.read_text().replace("2026-09-27", "2026-09-26"))
    assert costs.price_per_hour("ml.g5.xlarge") == 1.41


C5 = product("EU-Train:ml.c5.4xlarge", "1")


@pytest.mark.parametrize(
    "products, sentence",
    [
        ([json.dumps({"products": 1})], r"cannot be read \(KeyError: 'product'\)"),
        (["{no JSON"], r"has a product that cannot be read .*so nothing was kept: \{no JSON"),
        ([product("EU-Train:ml.c5.4xlarge", "free")], r"cannot be read \(ValueError: .*'free'\)"),
        (
            [C5, product("EU-Train:ml.c5.4xlarge", "2")],
            r"has two prices of ml\.c5\.4xlarge, 1\.0 and 2\.0 USD per hour, so nothing was kept",
        ),
        ([], r"has no training prices of region 'eu-west-1': give the name"),
    ],
)
def test_an_answer_of_no_use_is_a_clear_error_and_keeps_what_there_was(
    cache, refresh, products, sentence
):
    refresh([product("EU-Train:ml.c5.4xlarge", "0.5")])
    with pytest.raises(ValueError, match=sentence):
        refresh([product("EU-Train:ml.c5.9xlarge", "0.9"), *products] if products else [])
    assert costs.price_per_hour("ml.c5.4xlarge", "eu-west-1") == 0.5
    assert [path.name for path in cache.iterdir()] == ["prices-eu-west-1.csv"]


def test_a_spoilt_file_of_prices_is_a_clear_error(cache, refresh):
    refresh([C5])
    file = cache / "prices-eu-west-1.csv"
    file.write_text(file.read_text().replace("1.0", "a lot"))
    with pytest.raises(ValueError, match=r"is not a valid file of prices .*delete"):
        prices.load()
    file.unlink()
    file.mkdir()
    with pytest.raises(ValueError, match=r"is not a valid file of prices .*Is a directory"):
        prices.load()


def test_the_command_refreshes_and_says_where_the_prices_are(cache, pricing, monkeypatch, capsys):
    pricing.add_response("get_products", {"PriceList": [C5]})
    assert costs.main(["--refresh", "eu-west-1"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "asking AWS for its training prices of eu-west-1 ...",
        f"1 training prices of eu-west-1 are now in {cache}/prices-eu-west-1.csv.",
    ]
    pricing.add_client_error("get_products", "AccessDeniedException", "not authorized")
    assert costs.main(["--refresh", "eu-west-1"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("AWS: ") and "not authorized" in said

    pricing.add_response("get_products", {"PriceList": [C5]})
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    assert costs.main(["--refresh", "eu-west-1"]) == 2
    assert "Not a directory: '/dev/null" in capsys.readouterr().err
