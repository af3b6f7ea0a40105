"""The advice, and how it is shown: as text, in a notebook, and as a figure."""

import re
import textwrap
from dataclasses import dataclass
from html import escape
from math import isnan
from typing import TYPE_CHECKING, Any

import pandas as pd

from shared.advisor.prediction import (
    DATA_HOSTS,
    KNEE,
    KNEE_PERCENT,
    NEAR_PERCENT,
    Measured,
    with_data_hosts,
)

if TYPE_CHECKING:  # `plot` imports it: images for training lack it
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STAY, SCALE_UP, GO = "stay", "scale up", "go heterogeneous"
ELSEWHERE, ON_GPU = "look elsewhere", "preprocess on the GPU"
MOST_LABELS = 8  # in the figure
FORMULA = "step time = max(CPU work / (cores x speed), step without data, network, ranks)"


@dataclass(frozen=True, repr=False)
class Advice:
    """What to do, why, and the numbers behind it.

    Attributes:
        measured: The job in question.
        verdict: STAY, SCALE_UP, GO, ELSEWHERE or ON_GPU.
        recommended: The instances to try, or "".
        reasons: Sentences.
        inputs: The inputs of the formula by name, as text that shows how each was computed.
        data_hosts_only: Whether the step times are the upper bounds.
        types: From `prediction.instance_types`.
        candidates: From `prediction.predict`; more data hosts than these are not faster.
    """

    measured: Measured
    verdict: str
    recommended: str
    reasons: list[str]
    inputs: dict[str, str]
    data_hosts_only: bool
    types: pd.DataFrame
    candidates: pd.DataFrame

    def predict(self, data_type: str, count: int) -> dict[str, Any]:
        """Predict the measured cluster with these data hosts, even if they are no candidates.

        Returns a row like those of `candidates`, without the frontier.

        Raises:
            ValueError: the type is not among `types`.
        """
        if data_type not in self.types.index:
            raise ValueError(
                f"{data_type} is not among the types of this advice: choose one of "
                f"{', '.join(self.types.index)}."
            )
        return with_data_hosts(self.measured, self.types, data_type, count, self.data_hosts_only)

    def __repr__(self) -> str:
        """Text for a terminal: verdict, reasons, inputs, and any candidates worth a look."""
        lines = [f"Verdict: {_headline(self)}"]
        for reason in self.reasons:
            lines += textwrap.wrap(reason, 110, initial_indent="  - ", subsequent_indent="    ")
        lines += ["", FORMULA]
        for name, text in self.inputs.items():
            lines += textwrap.wrap(f"{name:18} {text}", 110, subsequent_indent=19 * " ")
        for table in _tables(self):
            lines += ["", *_columns(table)]
        notes = _notes(self)
        return "\n".join([*lines, "", *notes] if notes else lines)

    def _repr_html_(self) -> str:
        """HTML for a notebook: the verdict, with the rest folded below it."""
        reasons = "".join(f"<li>{escape(reason)}</li>" for reason in self.reasons)
        inputs = pd.DataFrame({"": list(self.inputs), FORMULA: list(self.inputs.values())})
        tables = [inputs, *map(_printed, _tables(self))]
        html = "\n".join(
            [
                f"<p><b>Verdict: {escape(_headline(self))}</b></p>",
                "<details><summary>Why, by which formula, and what else there is</summary>",
                f"<ul>{reasons}</ul>",
                *(table.to_html(index=False, border=0) for table in tables),
                *(f"{escape(note)}<br>" for note in _notes(self)),
                "</details>",
            ]
        )
        # Style each tag: JupyterLab removes style sheets and aligns tables to the right.
        return re.sub("<(th|td)>", r'<\1 style="text-align: left">', html)


def step_time(row: pd.Series) -> str:
    """Describe a candidate's step time, and at the knee how exact it is."""
    return f"{row['step time (ms)']:,.1f} ms a step" + f" ({row['knee']})" * bool(row["knee"])


def saving(row: pd.Series) -> str:
    """Describe how much cheaper or more expensive a candidate is than the measured cluster."""
    saved = row["improvement (%)"]
    return f"{abs(saved):.0f} % {'cheaper' if saved >= 0 else 'more expensive'}"


def _headline(advice: Advice) -> str:
    return ": ".join(filter(None, [advice.verdict, advice.recommended]))


def _tables(advice: Advice) -> tuple[pd.DataFrame, ...]:
    """Return a table of the clusters worth a look, after one of the instance types in it.

    There are none if the verdict is that other instances would not help.
    """
    if advice.verdict in (STAY, ELSEWHERE):
        return ()
    table = worth_a_look(advice)
    named = {name for cell in table["instances"] for name in cell.split() if "." in name}
    types = advice.types.loc[sorted(named)]
    shown = types[["cores", "ghz", "speed", "network_gbps", "usd_per_hour", "as_of"]].reset_index()
    clocks = [f"{row.ghz:.1f}" + " base" * (row.clock == "base") for row in types.itertuples()]
    shown["ghz"] = [clock.replace("nan", "-") for clock in clocks]
    shown.columns = ["type", "cores", "GHz", "speed", "Gbit/s", "USD per hour", "price as of"]
    measured = table["instances"].iloc[0]
    clusters = table.drop(columns=["kind", "data hosts"]).assign(
        instances=[name.replace(f"{measured} +", "  with") for name in table["instances"]]
    )
    return shown, clusters


def _notes(advice: Advice) -> list[str]:
    """Explain the tables, if there are any."""
    if advice.verdict in (STAY, ELSEWHERE):
        return []
    hidden = len(advice.candidates) - len(worth_a_look(advice))
    types = advice.types[advice.types["usd_per_hour"].isna()]
    hosts = types.index[types.index.str.match(DATA_HOSTS)]
    families = ", ".join(dict.fromkeys(name.split(".")[1] for name in hosts))
    lacks = (
        f"left out: {families}, whose prices are not known; "
        "python -m shared.costs --refresh REGION gets them."
    )
    return [
        "speed: ratio of clocks that can be compared; what newer cores do per cycle is left out.",
        "at least: the training hosts prepare data too; at most: the data hosts alone do.",
        f'frontier: none that is as fast is cheaper ("near": by {NEAR_PERCENT} % at most). '
        f"{hidden} of {len(advice.candidates)} are not shown.",
        f"knee: CPUs and another limit are within {KNEE_PERCENT} %: the step time is exact to "
        f"about {KNEE}; of five published runs, one was 18 % off.",
        *([lacks] if families else []),
    ]


def shortlist(advice: Advice) -> str:
    """Write the verdict and, if other clusters pay, three of them, the recommended one first."""
    lines, named = [f"advice        {_headline(advice)}"], advice.measured.instance_type
    if advice.types["retired"][named]:
        lines.append(advice.reasons[-1])
    elif advice.verdict in (SCALE_UP, GO):
        others = worth_a_look(advice).iloc[1:]  # without the measured cluster
        others = others[~(others["improvement (%)"] <= 0)]  # nan is unknown
        others = others.assign(other=others["instances"] != advice.recommended)
        by = ["other", "USD per 1,000 steps", "step time (ms)"]
        for _, row in others.sort_values(by).head(3).iterrows():
            cost = f"USD {row['USD per 1,000 steps']:,.4f} per 1,000 steps, {saving(row)}"
            if isnan(row["improvement (%)"]):
                cost = f"its cost is unknown without a price of {named}"
            lines.append(f"{row['instances']}: {step_time(row)}, {cost}")
        if isnan(advice.measured.floor_ms):
            lines.append("These times may be too low: measure a step without data first.")
    return "\n              ".join(lines)


def worth_a_look(advice: Advice) -> pd.DataFrame:
    """Choose the candidates to show: the measured cluster, the recommended one, and faster ones:
    scale-ups (without a floor, the next larger size), and those with data hosts on or near the
    frontier. Without a floor or price there is no frontier: then those with one data host for each
    training instance. Of candidates with equal step time and cost, it takes the fewest data hosts.
    """
    job, table = advice.measured, advice.candidates
    floor_known = not isnan(job.floor_ms)
    has_frontier = floor_known and not isnan(table["USD per hour"][0])
    chosen = table["frontier"] != "" if has_frontier else table["data hosts"] == job.count
    alike = table[["step time (ms)", "USD per 1,000 steps"]].round(6)
    fewest = ~alike.assign(n=table["data hosts"]).sort_values("n", kind="stable").duplicated(
        ["step time (ms)", "USD per 1,000 steps"]
    )
    step, scale_ups = table["step time (ms)"], table["kind"] == "scale up"
    next_size = step == step[scale_ups].max()
    with_hosts = (table["data hosts"] > 0) & chosen & fewest
    kept = (step < job.step_ms) & (with_hosts | (scale_ups & (floor_known | next_size)))
    kept |= table["instances"] == advice.recommended
    others = table[kept].sort_values("step time (ms)", ascending=False, kind="stable")
    return pd.concat([table.iloc[:1], others])


def _printed(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table with its numbers formatted as text."""
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
    """Lay out a table as text: wrapped headers, text aligned left, numbers aligned right."""
    columns, lines = [], max(len(textwrap.wrap(name, 12)) for name in table)
    for name, cells in _printed(table).items():
        header = textwrap.wrap(name, 12)
        cells = [*[""] * (lines - len(header)), *header, *cells]
        width, text = max(map(len, cells)), _is_text(table[name])
        columns.append([c.ljust(width) if text else c.rjust(width) for c in cells])
    return ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]


def plot(advice: Advice, note: str = "", runs: dict[str, Any] | None = None) -> "Figure":
    """Draw cost against step time: the candidates, the frontier, and a step without data.

    Args:
        advice: From `advise`.
        note: Added to the small print, for instance "Measured on this machine.".
        runs: The cluster to try next, from `Advice.predict`; it gets a ring and a label.

    Raises:
        ValueError: the price of the training instance is unknown.
    """
    import matplotlib.pyplot as plt

    from shared.monitoring import HETEROGENEOUS, HOMOGENEOUS

    if isnan(advice.candidates["USD per hour"][0]):
        raise ValueError(
            f"No price of {advice.measured.instance_type} is known here, so there are no costs to "
            "draw: python -m shared.costs --refresh REGION gets it from AWS."
        )
    x, y = "step time (ms)", "USD per 1,000 steps"
    table = advice.candidates
    table = table[table[x] <= advice.measured.step_ms]  # slower clusters are no use
    fig, axes = plt.subplots(figsize=(11, 5.2), layout="constrained")
    best = table[table["frontier"] == "yes"].sort_values(x)
    axes.plot(best[x], best[y], color=HETEROGENEOUS, lw=12, alpha=0.3, label="frontier")
    axes.scatter(best[x], best[y], s=250, color=HETEROGENEOUS, alpha=0.3, lw=0)
    if not isnan(advice.measured.floor_ms):
        axes.axvline(advice.measured.floor_ms, color="0.35", ls="--", label="a step without data")
    looks = {"measured": ("s", 70, HOMOGENEOUS, 3), "scale up": ("^", 90, HOMOGENEOUS, 4)}
    for kind, points in table.groupby("kind", sort=False):
        marker, size, colour, layer = looks.get(kind, ("o", 25, HETEROGENEOUS, 3))
        look = {"s": size, "c": colour, "marker": marker, "zorder": layer}
        axes.scatter(points[x], points[y], label=kind, **look)
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
    fig.suptitle(f"Advice: {advice.verdict}", fontsize=14)
    plt.close(fig)  # otherwise a notebook would draw it twice
    return fig


def _label(axes: "Axes", advice: Advice, runs: dict[str, Any] | None) -> None:
    """Label the points that matter, in a column beside the axes with lines to the points."""
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
        # Beside its point, but below the previous label and with room for the next ones.
        height = max(min(point[1] / top, height - room), room * (left + 0.5))
        saved = "" if row["kind"] == "measured" else f", {saving(row)}"
        axes.annotate(
            row["instances"].replace(f"{measured} +", "with")
            + " (runs below)" * (row["instances"] == next_one)
            + f"\n{point[0]:,.0f} ms, USD {point[1]:,.3f}{saved}",
            point,
            xytext=(1.03, height),
            textcoords="axes fraction",
            va="center",
            fontsize=11,
            fontweight="bold" if row["instances"] == advice.recommended else "normal",
            arrowprops={"arrowstyle": "-", "color": "0.6", "lw": 0.8, "relpos": (0, 0.5)},
        )
