"""Should this training job go heterogeneous? The flowchart, and the reasons for its answer.

AWS published it with the first edition of these examples: if the CPUs are not the bottleneck,
change nothing; otherwise take an instance of the same family with more vCPUs per GPU, if there is
one; otherwise add CPU instances; and consider preprocessing on the GPU (NVIDIA DALI). We added two
questions. Are CPU instances more than NEAR_PERCENT cheaper than the larger instance, even if only
they prepare data? Then the answer is CPU instances. Does receiving the data cost more CPU time than
preparing it? Then it is not. CPU instances need set-up, so they pay if they save more than
NEAR_PERCENT. The numbers come from prediction.py.
"""

from collections.abc import Mapping
from math import isnan

import pandas as pd

from shared.advisor.prediction import (
    NEAR_PERCENT,
    RANK_GB_PER_S,
    RECEIVE_MS_PER_BATCH,
    RECEIVE_MS_PER_MB,
    Measured,
    instance_types,
    predict,
)
from shared.advisor.report import (
    ELSEWHERE,
    GO,
    ON_GPU,
    SCALE_UP,
    STAY,
    Advice,
    saving,
    step_time,
)
from shared.measured import BUSY_PERCENT, WORTH_PERCENT, data_percent

HOW_MANY = "How many data hosts you need is known once a step without data is measured."
NEXT_SIZE = (
    "It is the next larger size: whether a still larger one would help is known once a "
    "step without data is measured."
)


def advise(
    measured: Measured,
    region: str = "us-east-1",
    data_hosts_only: bool = False,
    cores: Mapping[str, int] | None = None,
) -> Advice:
    """Give a verdict on a measured job, and predict step time and cost of the alternatives.

    Args:
        measured: The homogeneous job.
        region: Region of the prices.
        data_hosts_only: Predict the upper bound, for loaders that prepare data only on data hosts.
        cores: {instance type: cores here}, for jobs of the local SageMaker; see
            `prediction.instance_types`.

    Raises:
        ValueError: the instance type is unknown, or it has no GPU or no known number of vCPUs, or
            no prices of data hosts are known in the region.
    """
    types = instance_types(measured.instance_type, region, cores)
    table = predict(measured, types, data_hosts_only)
    inputs = _inputs(measured, types.loc[measured.instance_type])
    inputs["prices"] = f"SageMaker training on demand in {region}"
    verdict, recommended, reasons = _decide(measured, types, table, region)
    if retired := types["retired"][measured.instance_type]:
        recommended = ""
        reasons.append(
            f"AWS retired {measured.instance_type} on {retired} (shared/advisor/retired.csv), so "
            "none of this is available: measure the job on a type that AWS offers."
        )
    return Advice(measured, verdict, recommended, reasons, inputs, data_hosts_only, types, table)


def _decide(
    measured: Measured, types: pd.DataFrame, table: pd.DataFrame, region: str
) -> tuple[str, str, list[str]]:
    """Go through the flowchart; return the verdict, the recommended instances, and the reasons."""
    floor, reasons = measured.floor_ms, [f"{measured.source}."] if measured.source else []
    # What is compared is what is printed: rounded.
    percent = round(data_percent(measured.step_ms, floor), 0)
    busy = round(measured.cpu_percent, 0)
    if isnan(floor):
        reasons.append(
            "How long the accelerators need for a step is not known, so predicted step times may "
            "be too low: measure a step without data first, with --data-mode synthetic."
        )
    else:
        reasons.append(
            f"Without data a step takes {floor:,.1f} ms instead of {measured.step_ms:,.1f}: data "
            f"costs {percent:.0f} % of it."
        )
    if percent < WORTH_PERCENT:
        return STAY, "", [*reasons, "Not CPU-bound: there is little to gain."]
    if busy < BUSY_PERCENT:
        reasons.append(
            f"The CPUs are only {busy:.0f} % busy, so they are not the bottleneck: check the "
            "number of data workers, the storage and the network before you add CPUs."
        )
        return ELSEWHERE, "", reasons
    known = "assumed, because CPU use is not known"
    if not isnan(busy):
        known = f"the CPUs are {busy:.0f} % busy"
    reasons.append(f"CPU-bound ({known}): more vCPUs for each GPU make it faster.")

    scale_ups = table[table["kind"] == "scale up"]
    heterogeneous = table[table["kind"] == "heterogeneous"]
    trainer = types.loc[measured.instance_type]
    preparing = measured.preparing_ms(trainer["cores"])
    receiving = measured.receiving_ms(trainer["gpus"])
    if receiving < preparing and isnan(trainer["usd_per_hour"]):
        verdict, best, more = _without_price(measured, types, scale_ups, heterogeneous, region)
        return verdict, best, [*reasons, *more]
    saved = heterogeneous["improvement (%)"]
    paying = heterogeneous[(saved > NEAR_PERCENT) & (receiving < preparing)]
    if scale_ups.empty:
        family = measured.instance_type.split(".")[1]
        reasons.append(
            f"None of the types compared is a {family} with as many GPUs and more vCPUs."
        )
    else:
        by = "USD per hour" if isnan(floor) else "USD per 1,000 steps"  # the next larger size first
        larger = scale_ups.sort_values(by).iloc[0]
        works = larger["improvement (%)"] > 0
        cheaper = _cheaper(paying, larger, floor)
        if works and cheaper.empty:
            reasons.append(f"A larger instance of the family pays: {_effect(larger, measured)}.")
            if isnan(floor):
                reasons.append(NEXT_SIZE)
            elif not paying.empty:
                other = _simplest(paying)
                reasons.append(
                    "Data hosts are the alternative, but need more set-up: "
                    f"{_effect(other, measured)}; at most {other['at most (ms)']:,.1f} ms a step."
                )
            return SCALE_UP, larger["instances"], reasons
        if_known = "might pay" if isnan(larger["improvement (%)"]) else "does not pay"
        if works:
            paying, if_known = cheaper, "pays, but less than data hosts"
        reasons.append(f"A larger instance {if_known}: {_effect(larger, measured)}.")
    if receiving >= preparing:
        reasons.append(
            f"Data hosts make it slower: receiving the data of a step takes {receiving:,.1f} ms "
            f"of the training hosts' CPU time ({RECEIVE_MS_PER_MB} ms for each MB and "
            f"{RECEIVE_MS_PER_BATCH} ms for each rank's batch: benchmarks/README.md), while "
            f"preparing it takes {preparing:,.1f} ms."
        )
        return STAY, "", reasons
    if paying.empty:
        reasons += _intake(measured, trainer["gpus"], heterogeneous["step time (ms)"].min())
        why = "No data hosts make it cheaper."
        if saved.max() > 0:
            why = (
                f"Data hosts would save at most {saved.max():.1f} %, which is not worth their "
                "set-up."
            )
        reasons.append(
            f"{why} Preprocess on the GPU (NVIDIA DALI) instead, if it has your operations: that "
            "needs no other instances."
        )
        return ON_GPU, "", reasons
    if isnan(floor):
        return GO, "", [*reasons, f"Data hosts pay. {HOW_MANY}"]
    best, now = _simplest(paying), table["USD per hour"][0]
    reasons.append(f"Data hosts pay: {_effect(best, measured)}.")
    reasons += _intake(measured, trainer["gpus"], best["step time (ms)"])
    break_even = best["USD per hour"] / now * best["step time (ms)"] - floor
    reasons.append(
        "Preprocessing on the GPU (NVIDIA DALI) would be cheaper still if it took less than "
        f"{break_even:,.1f} ms of GPU time a step (= {best['USD per hour']:.4f} / {now:.4f} x "
        f"{best['step time (ms)']:,.1f} ms - {floor:,.1f} ms)."
    )
    return GO, best["instances"], reasons


def _without_price(
    measured: Measured,
    types: pd.DataFrame,
    scale_ups: pd.DataFrame,
    heterogeneous: pd.DataFrame,
    region: str,
) -> tuple[str, str, list[str]]:
    """Say above which price of the training instance data hosts pay, when its price is unknown."""
    lacks = (
        f"No price of {measured.instance_type} in {region} is known, so the costs are not known "
        f"either: python -m shared.costs --refresh {region} gets the price from AWS."
    )
    if not scale_ups.empty:
        larger = ", ".join(scale_ups["instances"])
        lacks += f" If its price allows, try a larger instance of the family first: {larger}."
    if isnan(measured.floor_ms):
        return GO, "", [lacks, HOW_MANY]
    step = heterogeneous["step time (ms)"]
    fastest = heterogeneous[step <= step.min() * (1 + NEAR_PERCENT / 100)]
    names = fastest["instances"].str.split(" x ").str[-1]
    hosts = fastest["data hosts"] * types["usd_per_hour"].loc[names].to_numpy()
    best = _simplest(fastest.assign(**{"USD per 1,000 steps": hosts}))
    hint = _intake(measured, types["gpus"][measured.instance_type], best["step time (ms)"])
    saved = measured.step_ms / best["step time (ms)"] - 1
    if saved <= 0:
        return ON_GPU, "", [lacks, *hint, "No data hosts make it faster."]
    enough = hosts[best.name] / saved / measured.count
    pays = (
        f"{_effect(best, measured)}, pays if one {measured.instance_type} costs more than USD "
        f"{enough:,.2f} an hour."
    )
    return GO, best["instances"], [lacks, pays, *hint]


def _cheaper(paying: pd.DataFrame, larger: pd.Series, floor: float) -> pd.DataFrame:
    """Choose those enough cheaper than a larger instance, even if only data hosts prepare data.

    Without `floor`, only the most that they could save is known: that is no reason.
    """
    cost = paying["USD per hour"] / 3600 * paying["at most (ms)"]
    enough = cost < larger["USD per 1,000 steps"] * (1 - NEAR_PERCENT / 100)
    return paying[enough & (not isnan(floor))]


def _simplest(candidates: pd.DataFrame) -> pd.Series:
    """Pick the candidate with the fewest data hosts among those about as cheap as the cheapest."""
    cost = candidates["USD per 1,000 steps"]
    cheap = candidates[cost <= cost.min() * (1 + NEAR_PERCENT / 100)]
    return cheap.sort_values(["data hosts", cost.name]).iloc[0]


def _intake(measured: Measured, gpus: int, step_ms: float) -> list[str]:
    """Say what to do if how much the ranks can receive is what limits a predicted step time."""
    taking_in = measured.taking_in_ms(gpus)
    if taking_in <= measured.known_floor_ms or step_ms > taking_in * (1 + NEAR_PERCENT / 100):
        return []
    return [
        "The limit is how much data the ranks can receive: use more workers for each DataLoader, "
        "or uint8 instead of float32. If yours receive more than "
        f"{measured.rank_gb_per_s:g} GB/s, give --rank-gb-per-s."
    ]


def _effect(row: pd.Series, measured: Measured) -> str:
    """Describe a candidate in one clause."""
    text = f"{row['instances']}, {step_time(row)}, "
    text += f"{measured.step_ms / row['step time (ms)']:.1f}x as fast"
    return text if isnan(row["improvement (%)"]) else f"{text}, {saving(row)}"


def _inputs(measured: Measured, trainer: pd.Series) -> dict[str, str]:
    """Show the inputs of the formula, so that the table can be recomputed by hand."""
    hosts = f"{measured.count} x {trainer['cores']} cores"
    work, data_work = measured.cpu_work(trainer["cores"])
    floor = "not known, taken as 0"
    if not isnan(measured.without_data_ms):
        floor = f"{measured.floor_ms:,.1f} ms"
    elif not isnan(measured.gpu_percent):
        floor = (
            f"{measured.floor_ms:,.1f} ms = {measured.step_ms:,.1f} ms x {measured.gpu_percent:g} %"
            " GPU utilisation, which counts any moment with work on the GPU"
        )
    inputs = {
        "measured": f"{measured.count} x {measured.instance_type}, {measured.step_ms:,.1f} ms",
        "CPU work": f"{work:,.0f} core-ms = {measured.step_ms:,.1f} ms x {hosts}",
        "on data only": f"{data_work:,.0f} core-ms, the same: the training's share is not known",
        "step without data": floor,
        "network": "not known, taken as no limit",
    }
    cpu = measured.busy_percent
    if not isnan(measured.kept_busy_percent):
        inputs["with data hosts"] = (
            f"CPU work x {cpu:g} % / {measured.kept_busy_percent:g} %, how busy the CPUs were "
            "without and with data hosts"
        )
    if measured.training_share:
        inputs["on data only"] = (
            f"{data_work:,.0f} core-ms = {work:,.0f} core-ms x (1 - {measured.floor_ms:,.1f} ms x "
            f"{measured.training_cpu_percent:.1f} % / ({measured.step_ms:,.1f} ms x {cpu:.1f} "
            "%)), by the use of the CPUs without data and with it"
        )
    if not isnan(measured.mb_per_step):
        inputs["network"] = f"{measured.mb_per_step:g} MB x 8 / Gbit/s of the side that has less"
        ranks, each = measured.count * trainer["gpus"], measured.rank_gb_per_s
        inputs["ranks"] = (
            f"{measured.taking_in_ms(trainer['gpus']):,.1f} ms = {measured.mb_per_step:g} MB / "
            f"({ranks} ranks x {each:g} GB/s), which one rank can receive"
        )
        if each == RANK_GB_PER_S:
            inputs["ranks"] += (
                " with its DataLoader's workers on one core (benchmarks/README.md); with more "
                "cores, give a higher --rank-gb-per-s"
            )
    return inputs
