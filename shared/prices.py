"""Prices and hardware of SageMaker training instances: cores, GPUs, memory, network.

prices.csv is a snapshot of on-demand prices of SageMaker *training*, without storage, data transfer
and taxes. Each row has the source of its price and the date on which it was seen.
`refresh_prices` gets today's prices from AWS and keeps them for this user; `price_of` returns
the newest known price.

The same rows describe the hardware, as AWS states it for the EC2 instance of the same name
(DescribeInstanceTypes, as recorded in moto 5.2.5, moto/ec2/resources/instance_types.json.gz; p3,
which is missing there, is from the AWS News Blog's post on P3,
infoq.cn/article/j629I8X512fg8tuKd6ke). A network of "Up to 10 Gigabit" is 10 here. The last rows
are types whose price we have not found: their price is nan, and `price_of` does not find them.
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
    """A row of prices.csv: the price of a training instance in a region, and its hardware.

    Attributes:
        instance_type: Such as "ml.g5.xlarge".
        region: AWS region; "" without a price.
        usd_per_hour: On-demand price of training in US dollars; nan if unknown.
        vcpus: Number of vCPUs; 0 if unknown.
        gpus: Number of GPUs or other accelerators.
        gpu: Name of the GPU; "" if there is none.
        memory_gib: Main memory; nan if unknown.
        network_gbps: Network bandwidth in Gbit/s that AWS states; nan if unknown.
        as_of: ISO date on which the price was seen; "" without a price.
        source: Source of the row.
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
    """Read all known prices: those of prices.csv, then those from AWS (`refresh_prices`).

    Raises:
        ValueError: a file of prices cannot be read.
    """
    files = [SNAPSHOT, *sorted(_cache_folder().glob("prices-*.csv"))]
    return [price for file in files for price in _read(file, file.stat().st_mtime_ns)]


@functools.cache
def _read(file: Path, modified_ns: int) -> tuple[Price, ...]:
    """Read a file of prices; cached until the file is modified."""
    try:
        with file.open(newline="", encoding="utf-8") as text:
            rows = list(csv.DictReader(text, strict=True))
        return tuple(
            Price(**{field.name: field.type(row[field.name]) for field in fields(Price)})
            for row in rows
        )
    except (KeyError, OSError, TypeError, ValueError, csv.Error) as error:
        raise ValueError(f"{file} is not a valid file of prices ({error}): delete it.") from None


def price_of(instance_type: str, region: str = "us-east-1", as_of: str | None = None) -> Price:
    """Look up the newest price of one training instance.

    Args:
        instance_type: Such as "ml.g5.xlarge".
        region: AWS region.
        as_of: ISO date; look up the price known on that day instead of the newest one.

    Raises:
        ValueError: there is no such price; the message says which prices are known.
    """
    try:
        until = date.fromisoformat(as_of).isoformat() if as_of else date.max.isoformat()
    except ValueError:
        raise ValueError(f"as_of is {as_of!r}, but must be a date such as 2022-10-27.") from None
    prices = [price for price in load() if not isnan(price.usd_per_hour)]
    more = (
        f"shared.costs.refresh_prices({region!r}), or python -m shared.costs --refresh {region}, "
        "gets prices from AWS"
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
            f"No price of {instance_type} in {region} as of {as_of} is known; the first is of "
            f"{first}."
        )
    # Of two prices of the same day, take the later in the list, which AWS itself has given.
    return max(enumerate(dated), key=lambda item: (item[1].as_of, item[0]))[1]


def _known(instance_type: str, prices: Iterable[Price]) -> str:
    """List the known types of the same family, or all families if there is none."""
    family = instance_type.rpartition(".")[0]
    vcpus = {price.instance_type: price.vcpus for price in prices}
    siblings = [name for name in vcpus if name.rpartition(".")[0] == family]
    if siblings:
        return ", ".join(sorted(siblings, key=lambda name: (vcpus[name], name)))
    return "the families " + ", ".join(sorted({name.rpartition(".")[0] for name in vcpus}))


def price_per_hour(
    instance_type: str, region: str = "us-east-1", as_of: str | None = None
) -> float:
    """Like `price_of`, but return only the price, in US dollars per hour."""
    return price_of(instance_type, region, as_of).usd_per_hour


def refresh_prices(region: str) -> list[Price]:
    """Get the current training prices of a region from the AWS Price List API, and keep them.

    The prices are kept in `cache_file(region)`. Only hourly on-demand prices of training instances
    in US dollars are kept, not spot training, fees, free trials, or products without a price. For
    types that prices.csv knows, the hardware is taken from there, because AWS's price list is
    incomplete.

    This needs AWS credentials that allow `pricing:GetProducts`, and costs nothing. It does not work
    in a process that runs the local SageMaker, which lets no request through to AWS.

    Raises:
        ValueError: AWS has no training prices for the region, or its answer cannot be read.
    """
    client = boto3.client("pricing", region_name="us-east-1")  # only few regions have this API
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
            "give the name of a region, such as us-east-1."
        )
    _write(cache_file(region), prices.values())
    return list(prices.values())


def cache_file(region: str) -> Path:
    """Return the file that keeps a region's prices after `refresh_prices`."""
    return _cache_folder() / f"prices-{region}.csv"


def _cache_folder() -> Path:
    """Return the user's cache folder, as the XDG Base Directory Specification defines it."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "sagemaker-heterogeneous-clusters"


def _training_price(
    item: dict[str, Any], has: dict[str, Price], region: str, today: str
) -> Price | None:
    """Read one product of the price list; None if it is not a training instance with a price.

    A usage type looks like USE1-Train:ml.g5.xlarge. Spot training has ...-TrSpt:..., other uses
    ...-Host:... or ...-Notebk:..., and reservations ...-TrainingPlanUpfrontFee:...
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
    """Read the number in "16 GiB", "Up to 10 Gigabit", "4x 100 Gigabit" (400), or "N/A" (none)."""
    match = re.search(r"(?:(\d+)x )?(\d+(?:\.\d+)?)", (text or "").replace(",", ""))
    return float(match[2]) * int(match[1] or 1) if match else otherwise


def _write(file: Path, prices: Iterable[Price]) -> None:
    """Write a file of prices atomically: another process reads either the old or the new one."""
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
