"""Should this training job go heterogeneous, and with what?

    python -m shared.advisor --instance ml.p4d.24xlarge --step-ms 192 --accelerator-ms 80
    python -m shared.advisor --instance ml.p4d.24xlarge --vcpus-per-gpu 20
    python -m shared.advisor --job NAME --synthetic-job NAME
    python -m shared.advisor --log FILE

FILE is the output of a script that was run with measured.py; if the job NAME was, it says all.
In a notebook: %run -m shared.advisor --job NAME. Jobs of the local SageMaker are known only there.

The numbers come from prediction.py's formula. The verdict follows the flowchart that AWS published
with the first edition of these examples: if the CPUs are not the limit, leave it; else take an
instance of the same family with more vCPUs per GPU, if there is one; else add CPU instances; and
think of preprocessing on the GPU (NVIDIA DALI).
"""

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from html import escape
from math import isnan, nan
from typing import TYPE_CHECKING, Any

import pandas as pd
from botocore.exceptions import BotoCoreError, ClientError

from shared.commands import reader_may_leave
from shared.measured import CPU_BOUND_PERCENT, WORTH_PERCENT
from shared.prediction import (
    NEAR_PERCENT,
    Measured,
    from_numbers,
    instance_types,
    measure,
    needing,
    numbers_in,
    predict,
    with_data_hosts,
)

if TYPE_CHECKING:  # imported where they are used: the command shall start quickly
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_LABELS = 8  # in the figure

STAY, SCALE_UP, GO = "stay", "scale up", "go heterogeneous"
ELSEWHERE, ON_GPU = "look elsewhere", "preprocess on the GPU"


@dataclass(frozen=True)
class Advice:
    """What to do, why, and the numbers behind it.

    Attributes:
        measured: The job in question.
        verdict: STAY, SCALE_UP, GO, ELSEWHERE or ON_GPU.
        recommended: The instances to try, or "".
        reasons: Sentences.
        inputs: What the formula was given, by name, each with how it came about.
        data_hosts_only: Whether the step times are the upper bounds.
        types: From `prediction.instance_types`.
        candidates: From `prediction.predict`, which leaves out what no further data host improves.
    """

    measured: Measured
    verdict: str
    recommended: str
    reasons: list[str]
    inputs: dict[str, str]
    data_hosts_only: bool
    types: pd.DataFrame = field(repr=False)
    candidates: pd.DataFrame = field(repr=False)

    def predict(self, data_type: str, count: int) -> dict[str, Any]:
        """Predict the measured cluster with these data hosts, be they among `candidates` or not.

        Returns a row as `candidates` has them, without the frontier.

        Raises:
            ValueError: the type is not among `types`.
        """
        if data_type not in self.types.index:
            raise ValueError(
                f"{data_type} is not among the types of this advice, whose prices (and, locally, "
                f"cores) are known: {', '.join(self.types.index)}."
            )
        return with_data_hosts(self.measured, self.types, data_type, count, self.data_hosts_only)

    def _repr_html_(self) -> str:
        """What a notebook shows of it."""
        return _html(self)


def advise(
    measured: Measured,
    region: str = "us-east-1",
    as_of: str | None = None,
    data_hosts_only: bool = False,
    cores: Mapping[str, int] | None = None,
) -> Advice:
    """Give a verdict on a measured job, and predict step time and cost of what could replace it.

    Args:
        measured: The homogeneous job.
        region: Of the prices.
        as_of: ISO date of the prices, instead of the newest ones.
        data_hosts_only: Predict the upper bound, for loaders that prepare on data hosts alone.
        cores: {instance type: cores here}, for jobs of the local SageMaker; see
            `prediction.instance_types`.

    Raises:
        ValueError: the price of the instance is not known, or it has no GPU.
    """
    types = instance_types(measured.instance_type, region, as_of, cores)
    table = predict(measured, types, data_hosts_only)
    inputs = _inputs(measured, types.loc[measured.instance_type])
    inputs["prices"] = f"SageMaker training on demand in {region}"
    verdict, recommended, reasons = _judge(measured, table)
    if retired := types["retired"][measured.instance_type]:
        recommended = ""
        reasons.append(
            f"AWS retired {measured.instance_type} on {retired} (shared/retired.csv), so none of "
            "this can be had: measure the job on a type that AWS offers."
        )
    return Advice(measured, verdict, recommended, reasons, inputs, data_hosts_only, types, table)


def _judge(measured: Measured, table: pd.DataFrame) -> tuple[str, str, list[str]]:
    """Go through the flowchart; return the verdict, what is recommended, and the reasons."""
    floor, reasons = measured.floor_ms, [f"{measured.source}."] if measured.source else []
    costs = 100 * (1 - floor / measured.step_ms)
    if isnan(floor):
        reasons.append(
            "How long the accelerators need for a step is not known, so the step times below are "
            "too low from some number of data hosts on: measure it with --data-mode synthetic."
        )
    else:
        reasons.append(
            f"Without data a step takes {floor:,.1f} ms instead of {measured.step_ms:,.1f}: data "
            f"costs {costs:.0f} % of it."
        )
    if costs < WORTH_PERCENT:
        return STAY, "", [*reasons, "Not CPU-bound: there is little to gain."]
    if measured.cpu_percent < CPU_BOUND_PERCENT:
        reasons.append(
            f"The CPUs are only {measured.cpu_percent:.0f} % busy, so they are not the limit: look "
            "at the number of data workers, at storage and network, before you add any."
        )
        return ELSEWHERE, "", reasons
    known = "supposedly: the use of the CPUs is not known"
    if not isnan(measured.cpu_percent):
        known = f"the CPUs are {measured.cpu_percent:.0f} % busy"
    reasons.append(f"CPU-bound ({known}): more vCPUs for each GPU make it faster.")

    scale_ups = table[table["kind"] == "scale up"]
    with_data_hosts = table[table["kind"] == "heterogeneous"]
    pays = with_data_hosts["improvement (%)"].max() > 0  # False if there are none
    if scale_ups.empty:
        family = measured.instance_type.split(".")[1]
        reasons.append(f"No {family} in prices.csv has as many GPUs and more vCPUs.")
    else:
        best = scale_ups.loc[scale_ups["USD per 1,000 steps"].idxmin()]
        if best["improvement (%)"] > 0:
            reasons.append(f"A larger instance of the family does it: {_effect(best, measured)}.")
            if pays:
                other = _effect(_simplest(with_data_hosts), measured)
                reasons.append(f"Data hosts are the alternative, with more to set up: {other}.")
            return SCALE_UP, best["instances"], reasons
        reasons.append(f"A larger instance does not pay: {_effect(best, measured)}.")
    if not pays:
        reasons.append(
            "No data hosts make it cheaper. Preprocessing on the GPU (NVIDIA DALI) needs no other "
            "instances: it is the better way, if it has your operations."
        )
        return ON_GPU, "", reasons
    if isnan(floor):
        return GO, "", [*reasons, "Data hosts pay, but how many cannot be said without the floor."]
    best, now = _simplest(with_data_hosts), table["USD per hour"][0]
    reasons.append(f"Data hosts pay: {_effect(best, measured)}.")
    break_even = best["USD per hour"] / now * best["step time (ms)"] - floor
    reasons.append(
        "Preprocessing on the GPU (NVIDIA DALI) would be cheaper still if it took less than "
        f"{break_even:,.1f} ms of GPU time a step (= {best['USD per hour']:.4f} / {now:.4f} x "
        f"{best['step time (ms)']:,.1f} ms - {floor:,.1f} ms)."
    )
    return GO, best["instances"], reasons


def _simplest(candidates: pd.DataFrame) -> pd.Series:
    """Pick the fewest hosts among those that are about as cheap as the cheapest."""
    cost = candidates["USD per 1,000 steps"]
    cheap = candidates[cost <= cost.min() * (1 + NEAR_PERCENT / 100)]
    return cheap.sort_values(["data hosts", "USD per 1,000 steps"]).iloc[0]


def _effect(row: pd.Series, measured: Measured) -> str:
    """Describe a candidate in one clause."""
    return (
        f"{row['instances']}, {row['step time (ms)']:,.1f} ms a step, "
        f"{measured.step_ms / row['step time (ms)']:.1f}x as fast, {_saving(row)}"
    )


def _saving(row: pd.Series) -> str:
    saved = row["improvement (%)"]
    return f"{abs(saved):.0f} % {'cheaper' if saved >= 0 else 'more expensive'}"


def _inputs(measured: Measured, trainer: pd.Series) -> dict[str, str]:
    """Name what the formula was given, so that the table can be computed by hand."""
    hosts = f"{measured.count} x {trainer['cores']} cores"
    work, data_work = measured.cpu_work(trainer["cores"])
    floor = "not known, taken as 0"
    if not isnan(measured.accelerator_ms):
        floor = f"{measured.floor_ms:,.1f} ms, the step time without data"
    elif not isnan(measured.gpu_percent):
        floor = (
            f"{measured.floor_ms:,.1f} ms = {measured.step_ms:,.1f} ms x {measured.gpu_percent:g} %"
            " GPU utilisation, which counts any moment with work on the GPU"
        )
    inputs = {
        "measured": f"{measured.count} x {measured.instance_type}, {measured.step_ms:,.1f} ms",
        "CPU work": f"{work:,.0f} core-ms = {measured.step_ms:,.1f} ms x {hosts}",
        "on data only": f"{data_work:,.0f} core-ms, the same: the training's own is not known",
        "accelerator floor": floor,
        "network": "not known, taken as no limit",
    }
    if measured.training_share:
        cpu = 100 if isnan(measured.cpu_percent) else measured.cpu_percent
        inputs["on data only"] = (
            f"{data_work:,.0f} core-ms = {work:,.0f} core-ms x (1 - {measured.accelerator_ms:,.1f} "
            f"ms x {measured.training_cpu_percent:.1f} % / ({measured.step_ms:,.1f} ms x {cpu:.1f} "
            "%)), by the use of the CPUs without data and with it"
        )
    if not isnan(measured.mb_per_step):
        inputs["network"] = f"{measured.mb_per_step:g} MB x 8 / Gbit/s, of whichever side has less"
    return inputs


FORMULA = "step time = max(CPU work / (cores x speed), accelerator floor, network)"


def as_text(advice: Advice) -> str:
    """Write the advice as text: verdict, reasons, inputs, and the candidates worth a look."""
    lines = [_headline(advice)]
    for reason in advice.reasons:
        lines += textwrap.wrap(reason, 110, initial_indent="  - ", subsequent_indent="    ")
    lines += ["", FORMULA]
    for name, text in advice.inputs.items():
        lines += textwrap.wrap(f"{name:18} {text}", 110, subsequent_indent=19 * " ")
    for table in _tables(advice):
        lines += ["", *_columns(table)]
    return "\n".join([*lines, "", *_notes(advice)])


def _html(advice: Advice) -> str:
    """Write the same for a notebook, whose tables are as wide as its window."""
    reasons = "".join(f"<li>{escape(reason)}</li>" for reason in advice.reasons)
    inputs = pd.DataFrame({"": list(advice.inputs), FORMULA: list(advice.inputs.values())})
    tables = [inputs, *map(_printed, _tables(advice))]
    html = "\n".join(
        [
            f"<p><b>{escape(_headline(advice))}</b></p><ul>{reasons}</ul>",
            *(table.to_html(index=False, border=0) for table in tables),
            *(f"{escape(note)}<br>" for note in _notes(advice)),
        ]
    )
    # In the tags themselves, since JupyterLab leaves out style sheets and sets tables to the right.
    return re.sub("<(th|td)>", r'<\1 style="text-align: left">', html)


def _headline(advice: Advice) -> str:
    return f"Verdict: {advice.verdict}" + f": {advice.recommended}" * bool(advice.recommended)


def _tables(advice: Advice) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The instance types that are named, and the clusters worth a look."""
    table = worth_a_look(advice)
    named = {name for cell in table["instances"] for name in cell.split() if "." in name}
    types = advice.types.loc[sorted(named)]
    shown = types[["cores", "ghz", "speed", "network_gbps", "usd_per_hour", "as_of"]].reset_index()
    shown.columns = ["type", "cores", "GHz", "speed", "Gbit/s", "USD per hour", "price as of"]
    measured = table["instances"].iloc[0]
    clusters = table.drop(columns=["kind", "data hosts"]).assign(
        instances=[name.replace(f"{measured} +", "  with") for name in table["instances"]]
    )
    return shown, clusters


def _notes(advice: Advice) -> list[str]:
    hidden = len(advice.candidates) - len(worth_a_look(advice))
    return [
        "speed: ratio of sustained clocks; what newer cores do more per cycle is left out.",
        "at least: the training hosts prepare data too; at most: the data hosts alone do.",
        f'frontier: none that is as fast is cheaper ("near": by {NEAR_PERCENT} % at most). '
        f"{hidden} of {len(advice.candidates)} are not shown.",
    ]


def shortlist(advice: Advice) -> str:
    """Write the verdict; for a job that is CPU-bound also three clusters, the recommended first."""
    lines = [
        f"advice        {advice.verdict}" + f": {advice.recommended}" * bool(advice.recommended)
    ]
    if advice.verdict not in (STAY, ELSEWHERE):
        others = worth_a_look(advice).iloc[1:].copy()  # without the measured cluster
        others["other"] = others["instances"] != advice.recommended
        for _, row in others.sort_values(["other", "USD per 1,000 steps"]).head(3).iterrows():
            cost = f"USD {row['USD per 1,000 steps']:,.4f} per 1,000 steps, {_saving(row)}"
            lines.append(f"{row['instances']}: {row['step time (ms)']:,.1f} ms a step, {cost}")
    return "\n              ".join(lines)


def worth_a_look(advice: Advice) -> pd.DataFrame:
    """Choose candidates to show: the measured cluster, scale-ups, and those with data hosts that
    are on or near the frontier; where no floor makes a frontier, those with one data host.

    Of candidates as fast and as dear as each other, it is the one with the fewest data hosts.
    """
    table, floor_known = advice.candidates, not isnan(advice.measured.floor_ms)
    chosen = table["frontier"] != "" if floor_known else table["data hosts"] == 1
    alike = table[["step time (ms)", "USD per 1,000 steps"]].round(6)
    fewest = ~alike.assign(n=table["data hosts"]).sort_values("n", kind="stable").duplicated(
        ["step time (ms)", "USD per 1,000 steps"]
    )
    kept = table[(table["kind"] != "heterogeneous") | (chosen & fewest)]
    others = kept.iloc[1:].sort_values("step time (ms)", ascending=False, kind="stable")
    return pd.concat([kept.iloc[:1], others])


def _printed(table: pd.DataFrame) -> pd.DataFrame:
    """The table with its numbers as they are printed."""
    styles = {"(ms)": "{:,.1f}", "(%)": "{:.1f}", "USD": "{:,.4f}", "speed": "{:.3f}"}
    printed = table.astype(object)
    for name in table:
        style = next((s for key, s in styles.items() if key in name), "{}")
        if not _is_text(table[name]):
            printed[name] = [style.format(v).replace("nan", "-") for v in table[name]]
    return printed


def _is_text(column: pd.Series) -> bool:
    return column.map(lambda value: isinstance(value, str)).all()


def _columns(table: pd.DataFrame) -> list[str]:
    """Lay out a table as text: headers in two lines, text to the left, numbers to the right."""
    columns, lines = [], max(len(textwrap.wrap(name, 12)) for name in table)
    for name, cells in _printed(table).items():
        header = textwrap.wrap(name, 12)
        cells = [*[""] * (lines - len(header)), *header, *cells]
        width, text = max(map(len, cells)), _is_text(table[name])
        columns.append([c.ljust(width) if text else c.rjust(width) for c in cells])
    return ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]


def plot(
    advice: Advice, title: str = "", note: str = "", runs: dict[str, Any] | None = None
) -> "Figure":
    """Draw cost against step time: the candidates, the frontier, and the accelerator floor.

    Args:
        advice: From `advise`.
        title: Above the figure.
        runs: The cluster that is tried next, from `Advice.predict`: it gets a ring and a label.
        note: Added to the small print, for instance "Measured on this machine.".
    """
    import matplotlib.pyplot as plt

    from shared.monitoring import COLOURS

    x, y = "step time (ms)", "USD per 1,000 steps"
    table = advice.candidates[advice.candidates[x] <= advice.measured.step_ms]  # no use if slower
    fig, axes = plt.subplots(figsize=(11, 5.2), layout="constrained")
    best = table[table["frontier"] == "yes"].sort_values(x)
    axes.plot(best[x], best[y], color=COLOURS[2], lw=12, alpha=0.3, label="frontier")
    axes.scatter(best[x], best[y], s=250, color=COLOURS[2], alpha=0.3, lw=0)
    if not isnan(advice.measured.floor_ms):
        axes.axvline(advice.measured.floor_ms, color="0.35", ls="--", label="accelerator floor")
    looks = {"measured": ("s", 70, COLOURS[1]), "scale up": ("^", 90, COLOURS[3])}
    for kind, points in table.groupby("kind", sort=False):
        marker, size, colour = looks.get(kind, ("o", 25, COLOURS[0]))
        axes.scatter(points[x], points[y], s=size, c=colour, marker=marker, label=kind, zorder=3)
    if runs:
        looks = {"s": 180, "facecolors": "none", "edgecolors": "0.2", "lw": 1.5, "zorder": 4}
        axes.scatter(runs[x], runs[y], label="runs below", **looks)
    axes.set_xlim(0, 1.06 * table[x].max())
    axes.set_ylim(0, 1.12 * table[y].max())
    _label(axes, advice, runs)
    axes.set_xlabel("step time (ms), predicted but for the measured one", fontsize=12)
    axes.set_ylabel("cost per 1,000 steps (USD)", fontsize=12)
    axes.tick_params(labelsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=5, fontsize=11, frameon=False)
    used = {name for cell in table["instances"] for name in cell.split() if "." in name}
    dates = ", ".join(sorted(set(advice.types.loc[sorted(used), "as_of"])))
    small_print = f"{advice.inputs['prices']}, prices as of {dates}.\n{note}".strip()
    fig.supxlabel(small_print, fontsize=10, color="0.35")
    fig.suptitle(title or f"Advice: {advice.verdict}", fontsize=14)
    plt.close(fig)  # the notebook draws the returned figure; left open, it would be drawn twice
    return fig


def _label(axes: "Axes", advice: Advice, runs: dict[str, Any] | None) -> None:
    """Name the points that matter in a column beside the axes, with lines to them."""
    table, next_one = worth_a_look(advice), runs["instances"] if runs else ""
    if runs and next_one not in set(table["instances"]):
        table = pd.concat([table, pd.DataFrame([runs])])
    table = table.sort_values("USD per 1,000 steps", ascending=False)
    asked_for = table["instances"].isin([advice.recommended, next_one])
    named = table[(table["kind"] != "heterogeneous") | (table["frontier"] == "yes") | asked_for]
    if len(named) > MOST_LABELS:
        named = pd.concat([named.iloc[: MOST_LABELS // 2], named.iloc[-(MOST_LABELS // 2) :]])
    measured = advice.candidates["instances"][0]
    top, height, room = axes.get_ylim()[1], 1.0, 1 / MOST_LABELS
    for left, (_, row) in zip(range(len(named))[::-1], named.iterrows(), strict=True):
        point = row["step time (ms)"], row["USD per 1,000 steps"]
        # Beside its point, but below the label before and with room for those that follow.
        height = max(min(point[1] / top, height - room), room * (left + 0.5))
        saving = "" if row["kind"] == "measured" else f", {_saving(row)}"
        axes.annotate(
            row["instances"].replace(f"{measured} +", "with")
            + " (runs below)" * (row["instances"] == next_one)
            + f"\n{point[0]:,.0f} ms, USD {point[1]:,.3f}{saving}",
            point,
            xytext=(1.03, height),
            textcoords="axes fraction",
            va="center",
            fontsize=11,
            fontweight="bold" if row["instances"] == advice.recommended else "normal",
            arrowprops={"arrowstyle": "-", "color": "0.6", "lw": 0.8, "relpos": (0, 0.5)},
        )


def main(arguments: list[str] | None = None) -> None:
    """Advise on the job that the command line describes; end with status 2 if that cannot be."""
    parser = argparse.ArgumentParser("python -m shared.advisor", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--job", help="a homogeneous training job: its numbers are looked up")
    add("--synthetic-job", help="the same job with --data-mode synthetic")
    add("--log", metavar="FILE", help="output of a script that was run with measured.py")
    add("--instance", help="instance type that trains, such as ml.p4d.24xlarge")
    add("--count", type=int, help="number of these instances; default: 1")
    add("--step-ms", type=float, help="time of a step, waiting for data included")
    add("--vcpus-per-gpu", type=float, help="instead: vCPUs that keep one GPU busy")
    add("--accelerator-ms", type=float, help="time of a step without data")
    add("--cpu-percent", type=float, help="use of the CPUs, all together 100")
    add("--gpu-percent", type=float, help="use of the GPUs, all together 100")
    add("--mb-per-step", type=float, default=nan, help="prepared data of a step, in megabytes")
    add("--data-hosts-only", action="store_true", help="with them, training hosts prepare no data")
    add("--cores", nargs="+", metavar="TYPE=N", help="for local jobs: cores of an instance here")
    add("--region", default="us-east-1", help="of the prices")
    add("--as-of", help="date of the prices, such as 2022-10-27; default: the newest")
    add("--figure", metavar="FILE", help="draw the candidates to a .png or .svg")
    add("--json", action="store_true", help="print JSON, with all candidates")
    args = parser.parse_args(arguments)
    try:
        cores = dict(map(_cores, args.cores)) if args.cores else None
        advice = advise(_measured(args), args.region, args.as_of, args.data_hosts_only, cores)
        if args.figure:
            plot(advice).savefig(args.figure, dpi=120)
    except (ValueError, OSError, BotoCoreError, ClientError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    with reader_may_leave():
        if args.json:
            tables = {"types": advice.types.reset_index(), "candidates": advice.candidates}
            rows = {
                key: json.loads(table.to_json(orient="records")) for key, table in tables.items()
            }
            known = {key: value for key, value in vars(advice.measured).items() if value == value}
            print(json.dumps({**vars(advice), "measured": known, **rows}, indent=2))
        else:
            print(as_text(advice))


def _measured(args: argparse.Namespace) -> Measured:
    """Take the job's numbers from one of four sources, of which each has options of its own."""
    sources = {
        "job": {"synthetic_job"},
        "log": {"instance", "count"},
        "step_ms": {"instance", "count", "accelerator_ms", "cpu_percent", "gpu_percent"},
        "vcpus_per_gpu": {"instance", "count", "accelerator_ms"},
    }
    options = {*sources, *set.union(*sources.values())}
    given = {name: getattr(args, name) for name in options if getattr(args, name) is not None}
    source = next((name for name in sources if name in given), None)
    if source is None or (source not in ("job", "log") and not args.instance):
        raise ValueError(
            "Give --job NAME, --log FILE, or --instance TYPE with either --step-ms or "
            "--vcpus-per-gpu."
        )
    if others := sorted(given.keys() - {source} - sources[source]):
        names = ", ".join(f"--{name.replace('_', '-')}" for name in others)
        raise ValueError(f"--{source.replace('_', '-')} cannot be combined with {names}.")
    instance_type = given.pop("instance", None)
    if source == "job":
        measured = measure(args.job, args.synthetic_job)
    elif source == "log":
        measured = _read_log(args.log, instance_type, args.count)
    elif source == "step_ms":
        measured = Measured(instance_type, **given)
    else:
        measured = needing(instance_type, **given, region=args.region, as_of=args.as_of)
    return replace(measured, mb_per_step=args.mb_per_step)


def _read_log(path: str, instance_type: str | None, count: int | None) -> Measured:
    """Take the numbers that measured.py has printed; the command line may correct the instances."""
    with open(path, errors="replace") as file:
        numbers = numbers_in(file)
    if not numbers:
        raise ValueError(
            f'{path} has no line of numbers ({{"measured": ...}}): measured.py prints it last.'
        )
    given = {"instance_type": instance_type, "count": count}
    numbers |= {name: value for name, value in given.items() if value is not None}
    if "instance_type" not in numbers:
        raise ValueError(f"{path} does not say on which instance type it ran: add --instance TYPE.")
    return from_numbers(numbers)


def _cores(text: str) -> tuple[str, int]:
    """Read TYPE=N."""
    name, _, number = text.partition("=")
    if not (number.isdigit() and int(number) > 0):
        raise ValueError(f"--cores has {text!r}, but needs pairs such as ml.c5.9xlarge=1.")
    return name, int(number)


if __name__ == "__main__":
    main()
