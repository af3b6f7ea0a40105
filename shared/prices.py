"""What SageMaker training instances cost per hour and have: cores, GPUs, memory, network.

prices.csv is a snapshot of on-demand prices of SageMaker *training*, without storage, data transfer
and taxes. Each row has the date on which its price was seen and its source. `refresh_prices` gets
today's from AWS and keeps them for this user; `find` takes the newest one that it knows.

What an instance has is in the same rows, as AWS states it for the EC2 instance of the same name
(DescribeInstanceTypes, as recorded in moto 5.2.5, moto/ec2/resources/instance_types.json.gz; p3,
which is not in there, from the AWS News Blog's post on P3, infoq.cn/article/j629I8X512fg8tuKd6ke).
A network of "Up to 10 Gigabit" is 10 here. Rows at the end, of types whose price we have not found,
have that alone: their price is nan, and `find` does not know them.
"""

import csv
import functools
import json
import os
import re
from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields, replace
from datetime import date, datetime, timezone
from math import isnan
from pathlib import Path
from typing import Any

import boto3

SNAPSHOT = Path(__file__).with_name("prices.csv")


@dataclass(frozen=True)
class Price:
    """A row of prices.csv: what one training instance costs in a region, and what it has.

    Attributes:
        instance_type: Such as "ml.g5.xlarge".
        region: AWS region; "" without a price.
        usd_per_hour: On-demand price of training in US dollars; nan if not known.
        vcpus: Number of vCPUs; 0 if not known.
        gpus: Number of GPUs, or of other accelerators.
        gpu: Name of the GPU; empty if there is none.
        memory_gib: Main memory; nan if not known, like the following.
        network_gbps: Network bandwidth in Gbit/s that AWS states.
        as_of: ISO date on which the price was seen; "" without one.
        source: Who says so.
    """

    instance_type: str
    region: str
    usd_per_hour: float
    vcpus: int
    gpus: int
    gpu: str
    memory_gib: float
    network_gbps: float
    as_of: str
    source: str


COLUMNS = [field.name for field in fields(Price)]


def load() -> list[Price]:
    """Read all prices that are known: those of prices.csv, then those from AWS (`refresh_prices`).

    Raises:
        ValueError: a file of prices cannot be read.
    """
    files = [SNAPSHOT, *sorted(_cache_folder().glob("prices-*.csv"))]
    return [price for file in files for price in _read(file, file.stat().st_mtime_ns)]


@functools.cache
def _read(file: Path, modified_ns: int) -> tuple[Price, ...]:
    """Read a file of prices again when it has been modified."""
    try:
        with file.open(newline="", encoding="utf-8") as text:
            rows = list(csv.DictReader(text, strict=True))
        return tuple(
            Price(**{field.name: field.type(row[field.name]) for field in fields(Price)})
            for row in rows
        )
    except (KeyError, OSError, TypeError, ValueError, csv.Error) as error:
        raise ValueError(f"{file} is not a file of prices ({error}): delete it.") from None


def find(instance_type: str, region: str = "us-east-1", as_of: str | None = None) -> Price:
    """Look up the newest price of one training instance.

    Args:
        instance_type: Such as "ml.g5.xlarge".
        region: AWS region.
        as_of: ISO date: the price known on that day instead of the newest one.

    Raises:
        ValueError: there is none; says what is known.
    """
    try:
        until = date.fromisoformat(as_of).isoformat() if as_of else date.max.isoformat()
    except ValueError:
        raise ValueError(f"as_of is {as_of!r}, but must be a date such as 2022-10-27.") from None
    prices = [price for price in load() if not isnan(price.usd_per_hour)]
    more = (
        f"shared.costs.refresh_prices({region!r}), or python -m shared.costs --refresh {region}, "
        "gets what AWS has"
    )
    of_type = [price for price in prices if price.instance_type == instance_type]
    if not of_type:
        raise ValueError(
            f"No price of {instance_type!r} is known, only of {_known(instance_type, prices)}: "
            f"{more}."
        )
    in_region = [price for price in of_type if price.region == region]
    if not in_region:
        regions = ", ".join(sorted({price.region for price in of_type}))
        raise ValueError(
            f"No price of {instance_type} in region {region!r} is known, only in {regions}: {more}."
        )
    dated = [price for price in in_region if price.as_of <= until]
    if not dated:
        first = min(price.as_of for price in in_region)
        raise ValueError(
            f"No price of {instance_type} in {region} as of {as_of} is known; the first: {first}."
        )
    # Of two of the same day the later in the list, which is AWS's own.
    return max(enumerate(dated), key=lambda item: (item[1].as_of, item[0]))[1]


def _known(instance_type: str, prices: Iterable[Price]) -> str:
    """List the types of the same family, or else the families."""
    family = instance_type.rpartition(".")[0]
    vcpus = {price.instance_type: price.vcpus for price in prices}
    siblings = [name for name in vcpus if name.rpartition(".")[0] == family]
    if siblings:
        return ", ".join(sorted(siblings, key=lambda name: (vcpus[name], name)))
    return "the families " + ", ".join(sorted({name.rpartition(".")[0] for name in vcpus}))


def price_per_hour(
    instance_type: str, region: str = "us-east-1", as_of: str | None = None
) -> float:
    """Look up what one training instance costs, in US dollars per hour; as `find` does."""
    return find(instance_type, region, as_of).usd_per_hour


def refresh_prices(region: str) -> list[Price]:
    """Get the current training prices of a region from the AWS Price List API, and keep them.

    They are kept in `cache_file(region)`. What is not an hourly on-demand price of a training
    instance in US dollars is passed over: spot training, fees, free trials, products without a
    price. What an instance has is taken from prices.csv where that knows the type, for AWS's price
    list is incomplete there.

    It needs AWS credentials that may `pricing:GetProducts`, and costs nothing. It does not work in
    a process in which the local SageMaker runs: that lets nothing through to AWS.

    Raises:
        ValueError: AWS has no training prices of the region, or an answer that cannot be read.
    """
    client = boto3.client("pricing", region_name="us-east-1")  # the API is in few regions only
    filters = {"regionCode": region, "component": "Training"}
    pages = client.get_paginator("get_products").paginate(
        ServiceCode="AmazonSageMaker",
        Filters=[{"Type": "TERM_MATCH", "Field": k, "Value": v} for k, v in filters.items()],
    )
    has = {price.instance_type: price for price in _read(SNAPSHOT, SNAPSHOT.stat().st_mtime_ns)}
    today = datetime.now(timezone.utc).date().isoformat()
    prices: dict[str, Price] = {}
    for text in (text for page in pages for text in page["PriceList"]):
        try:
            price = _training_price(json.loads(text), has, region, today)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"AWS's price list of {region} has a product that cannot be read "
                f"({type(error).__name__}: {error}), so nothing was kept: {text[:300]}"
            ) from None
        if price is None:
            continue
        other = prices.setdefault(price.instance_type, price)
        if other.usd_per_hour != price.usd_per_hour:
            raise ValueError(
                f"AWS's price list of {region} has two prices of {price.instance_type}, "
                f"{other.usd_per_hour} and {price.usd_per_hour} USD per hour, so nothing was kept."
            )
    if not prices:
        raise ValueError(
            f"AWS's price list has no training prices of region {region!r}: "
            "is it a region, such as us-east-1?"
        )
    _write(cache_file(region), prices.values())
    return list(prices.values())


def cache_file(region: str) -> Path:
    """Say where the prices of a region are kept, once they have been got from AWS."""
    return _cache_folder() / f"prices-{region}.csv"


def _cache_folder() -> Path:
    """The user's own folder, by the XDG Base Directory Specification."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "sagemaker-heterogeneous-clusters"


def _training_price(
    item: dict[str, Any], has: dict[str, Price], region: str, today: str
) -> Price | None:
    """Read one product of the price list; None if it is no training instance with a price.

    Usage types are such as USE1-Train:ml.g5.xlarge; spot training's are ...-TrSpt:..., those of
    other uses ...-Host:..., ...-Notebk:..., and of reservations ...-TrainingPlanUpfrontFee:...
    """
    attributes = item["product"]["attributes"]
    usage_type = attributes.get("usagetype", "")
    match = re.search(r"(?:^|-)Train:(ml\.\S+)$", usage_type)
    usd_per_hour = [
        float(dimension["pricePerUnit"]["USD"])
        for term in item.get("terms", {}).get("OnDemand", {}).values()
        for dimension in term["priceDimensions"].values()
        if dimension["unit"] == "Hrs" and "USD" in dimension["pricePerUnit"]
    ]
    if not match or not any(usd_per_hour):
        return None
    price = {
        "region": region,
        "usd_per_hour": max(usd_per_hour),
        "as_of": today,
        "source": "AWS Price List API",
    }
    if match[1] in has:
        return replace(has[match[1]], **price)
    return Price(
        instance_type=match[1],
        vcpus=int(_number(attributes.get("vCpu"), 0)),
        gpus=int(_number(attributes.get("gpu"), 0)),
        gpu=attributes.get("physicalGpu", "").replace("N/A", ""),
        memory_gib=_number(attributes.get("memory")),
        network_gbps=_number(attributes.get("networkPerformance")),
        **price,
    )


def _number(text: str | None, otherwise: float = float("nan")) -> float:
    """Read the numbers in texts such as "16 GiB", "Up to 10 Gigabit", "4x 100 Gigabit", "N/A"."""
    match = re.search(r"(?:(\d+)x )?(\d+(?:\.\d+)?)", (text or "").replace(",", ""))
    return float(match[2]) * int(match[1] or 1) if match else otherwise


def _write(file: Path, prices: Iterable[Price]) -> None:
    """Write a file of prices as a whole: who reads it meanwhile sees the old or the new one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(f".{os.getpid()}.part")
    try:
        with part.open("w", newline="", encoding="utf-8") as text:
            writer = csv.writer(text, lineterminator="\n")
            writer.writerow(COLUMNS)
            writer.writerows(astuple(price) for price in prices)
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)
