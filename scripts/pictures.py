"""Draw the pictures of the examples' jobs, and of what came out, as SVG, into images/ folders.

    python scripts/pictures.py

They are to be read on a phone too: lengths are in pixels of a picture that is shown 360 pixels
wide, no text is smaller than 11 of them, and texts are drawn as shapes, so that they look the same
everywhere. A white card of its own carries each picture on dark pages. The same lines draw the same
bytes: a file does not say when it was drawn. The result is that of the notebooks' saved outputs:
draw again when they have been run again.
"""

import io
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from matplotlib.path import Path as Line

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # for the folder `shared`
from shared import costs  # noqa: E402
from shared.monitoring import COLOURS  # noqa: E402

BLUE, ORANGE, GREEN, _ = COLOURS  # training, preparing batches, sharing out files
PALE_BLUE, PALE_ORANGE, PALE_GREY = "#E3F0F8", "#FDF1DA", "#EEEEEE"
GREY, DARK, WHITE = "#8A8A8A", "#1A1A1A", "#FFFFFF"
WIDTH = 360  # pixels
POINTS = 1.2  # of matplotlib's, for one pixel: a picture is 6 inches wide where nothing limits it
FONTS = Path(matplotlib.get_data_path()) / "fonts" / "ttf"  # matplotlib's own, on every machine


# --------------------------------------------------------------------------------------- pieces


def card(height: float, title: str) -> Axes:
    """Begin a picture: a white card, `height` pixels high. y goes down, as in images."""
    figure = Figure(figsize=(WIDTH * POINTS / 72, height * POINTS / 72))
    figure.patch.set_visible(False)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(height, 0))
    axes.set_axis_off()
    box(axes, 1, 1, WIDTH - 2, height - 2, WHITE, edge="#D0D0D0", corner=12)
    text(axes, WIDTH / 2, 22, title, size=15, bold=True)
    return axes


def text(
    axes: Axes,
    x: float,
    y: float,
    words: str,
    size: float = 12,
    bold: bool = False,
    colour: str = DARK,
    align: str = "center",
) -> None:
    """Write a line whose middle is at height `y`."""
    font = FontProperties(fname=FONTS / ("DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"))
    font.set_size(size * POINTS)
    # zorder is that of boxes and arrows: then what is drawn later lies above.
    axes.text(x, y + 0.36 * size, words, color=colour, ha=align, font=font, zorder=1)


def box(
    axes: Axes,
    x: float,
    y: float,
    width: float,
    height: float,
    fill: str,
    words: str = "",
    edge: str = "none",
    corner: float = 5,
) -> None:
    """Draw a rounded box from its upper left corner, with lines of `words` in its middle.

    It covers what has been drawn there before.
    """
    shape = f"round,pad=0,rounding_size={corner}"
    patch = FancyBboxPatch((x, y), width, height, shape, facecolor=fill, edgecolor=edge)
    axes.add_patch(patch)
    lines = words.splitlines()
    for number, line in enumerate(lines):
        middle = y + height / 2 + 15 * (number - (len(lines) - 1) / 2)
        text(axes, x + width / 2, middle, line, colour=WHITE if fill in (BLUE, DARK) else DARK)


def group(
    axes: Axes, y: float, height: float, fill: str, name: str, hosts: str, name_y: float = 0
) -> None:
    """Draw the frame of an instance group, and say, at its top or `name_y`, what it is."""
    box(axes, 10, y, 340, height, fill, edge=GREY, corner=8)
    text(axes, 22, name_y or y + 15, name, size=13, bold=True, align="left")
    text(axes, 338, name_y or y + 15, hosts, align="right")


def arrow(
    axes: Axes, *points: tuple[float, float], colour: str = DARK, ends: str = "-|>", line: str = "-"
) -> None:
    """Draw an arrow along the points."""
    patch = FancyArrowPatch(
        path=Line(points), arrowstyle=ends, color=colour, linestyle=line, linewidth=1.8
    )
    patch.set_mutation_scale(9)
    axes.add_patch(patch)


# ------------------------------------------------------------------ why: what hosts do over time


def timeline(
    axes: Axes,
    y: float,
    colour: str,
    batches: Sequence[tuple[int, int, int]],
    waits: Sequence[tuple[int, int]] = (),
) -> None:
    """Draw what a host does in twelve units of time.

    batches: that it works on: start, end and the batch's number. waits: start and end.
    """
    left, unit = 22, 316 / 12
    box(axes, left, y, 316, 24, PALE_GREY)
    for start, end in waits:
        text(axes, left + unit * (start + end) / 2, y + 12, "waits")
    for start, end, number in batches:
        box(axes, left + unit * start + 1, y, unit * (end - start) - 2, 24, colour, f"{number}")


def time_axis(axes: Axes, y: float) -> None:
    """Show the direction of time below time lines."""
    text(axes, 22, y, "time", align="left")
    arrow(axes, (58, y), (338, y), colour=GREY)


def homogeneous_job() -> Axes:
    """The few vCPUs of a GPU instance prepare batches more slowly than its GPU trains on them."""
    axes = card(226, "Homogeneous: the GPU waits")
    group(axes, 42, 132, WHITE, "one instance", "few vCPUs, a GPU")
    text(axes, 22, 80, "its vCPUs prepare batches", align="left")
    timeline(axes, 91, ORANGE, [(t, t + 3, t // 3 + 1) for t in (0, 3, 6, 9)])
    text(axes, 22, 128, "its GPU trains on them", align="left")
    waits = [(0, 3), (4, 6), (7, 9), (10, 12)]
    timeline(axes, 139, BLUE, [(t, t + 1, t // 3) for t in (3, 6, 9)], waits)
    time_axis(axes, 187)
    text(axes, WIDTH / 2, 208, "You pay for the GPU while it waits.")
    return axes


def heterogeneous_job() -> Axes:
    """Two CPU instances prepare batches for a GPU instance, which trains without pause."""
    axes = card(320, "Heterogeneous: the GPU trains")
    group(axes, 42, 114, PALE_ORANGE, "data_group", "CPU instances")
    text(axes, 22, 80, "their many vCPUs prepare batches", align="left")
    timeline(axes, 91, ORANGE, [(t, t + 2, t + 1) for t in range(0, 12, 2)])
    timeline(axes, 121, ORANGE, [(t, t + 2, t + 2) for t in range(0, 12, 2)])
    arrow(axes, (110, 157), (110, 183), colour=ORANGE)
    text(axes, 122, 169, "batches over the network", align="left")
    group(axes, 184, 84, PALE_BLUE, "dnn_group", "GPU instance")
    text(axes, 22, 222, "its GPU trains on them", align="left")
    timeline(axes, 233, BLUE, [(t, t + 1, t - 1) for t in range(2, 12)], waits=[(0, 2)])
    time_axis(axes, 281)
    text(axes, WIDTH / 2, 302, "One job: all hosts are billed until the last ends.")
    return axes


# -------------------------------------------------------------------- how: what runs on the hosts

LEFT, RIGHT, HOST = 20, 194, 146  # two hosts side by side, and how wide they are
GUTTER = 180  # between them, where the launchers' connections go
CONNECTION = {"colour": GREY, "ends": "-", "line": ":"}


def launcher(axes: Axes, x: float, y: float) -> None:
    """Draw the launcher of the host at `x`, connected with the gutter."""
    arrow(axes, (x + HOST / 2, y + 11), (GUTTER, y + 11), **CONNECTION)
    box(axes, x + 8, y, HOST - 16, 22, "#D5D5D5", "launcher")


def leader(axes: Axes, y: float, others_y: float) -> None:
    """Draw the launcher that the other hosts', down from `others_y`, are connected with."""
    line = (GUTTER, others_y + 11), (GUTTER, y + 11), (LEFT + HOST / 2, y + 11)
    arrow(axes, *line, **CONNECTION)
    box(axes, LEFT + 8, y, HOST - 16, 22, DARK, "launcher: leader")


def footer(axes: Axes, y: float) -> None:
    """Say what launchers are for."""
    text(axes, WIDTH / 2, y, "A launcher on every host. The leader starts")
    text(axes, WIDTH / 2, y + 17, "the training, and ends the job on all of them.")


def pytorch_workflow() -> Axes:
    """Data hosts prepare samples in worker processes; the loaders of training hosts fetch them."""
    axes = card(488, "PyTorch: samples over gRPC")
    group(axes, 42, 152, PALE_ORANGE, "data_group", "CPU instances")
    group(axes, 252, 182, PALE_BLUE, "dnn_group", "GPU instances", name_y=418)
    for x in (LEFT, RIGHT):
        box(axes, x, 72, HOST, 114, WHITE, edge=GREY)
        box(axes, x, 262, HOST, 140, WHITE, edge=GREY)
    leader(axes, 372, others_y=80)
    launcher(axes, RIGHT, 372)
    box(axes, LEFT, 210, 320, 26, WHITE, "samples, asked for in signed calls", edge=ORANGE)
    for x in (LEFT, RIGHT):
        launcher(axes, x, 80)
        text(axes, x + HOST / 2, 114, "worker processes")
        for number in range(4):
            box(axes, x + 17 + 30 * number, 124, 22, 14, ORANGE, corner=3)
        arrow(axes, (x + HOST / 2, 138), (x + HOST / 2, 152), colour=ORANGE)
        box(axes, x + 8, 153, HOST - 16, 25, ORANGE, "gRPC server")
        arrow(axes, (x + HOST / 2, 178), (x + HOST / 2, 209), colour=ORANGE)
        for left in (x + 8, x + 77):
            arrow(axes, (left + 30, 237), (left + 30, 269), colour=ORANGE)
            box(axes, left, 270, 61, 24, WHITE, "loader", edge=ORANGE)
            arrow(axes, (left + 30, 294), (left + 30, 306), colour=ORANGE)
            box(axes, left, 307, 61, 24, BLUE, "GPU")
            arrow(axes, (left + 30, 331), (left + 30, 344), colour=BLUE, ends="<|-|>")
    box(axes, LEFT + 8, 344, 304, 20, PALE_BLUE, "gradients (NCCL)", edge=BLUE)
    footer(axes, 451)
    return axes


def tensorflow_workflow() -> Axes:
    """Workers on data hosts and on spare cores of the training host feed its ranks."""
    axes = card(480, "TensorFlow: tf.data.service")
    group(axes, 42, 160, PALE_ORANGE, "data_group", "CPU instances")
    group(axes, 260, 166, PALE_BLUE, "dnn_group", "GPU instance", name_y=410)
    for x in (LEFT, RIGHT):
        box(axes, x, 72, HOST, 122, WHITE, edge=GREY)
    box(axes, LEFT, 270, 320, 124, WHITE, edge=GREY)
    leader(axes, 364, others_y=80)
    box(axes, LEFT, 218, 320, 26, WHITE, "batches, each to one of the ranks", edge=ORANGE)
    for x in (LEFT, RIGHT):
        launcher(axes, x, 80)
        box(axes, x + 8, 148, HOST - 16, 38, ORANGE, "worker:\ntf.data pipeline")
        arrow(axes, (x + HOST / 2, 186), (x + HOST / 2, 217), colour=ORANGE)
    # The dispatcher, from which all workers have their files.
    arrow(axes, (LEFT + HOST / 2, 136), (LEFT + HOST / 2, 147), colour=GREEN)
    arrow(axes, (158, 124), (267, 124), (267, 147), colour=GREEN)
    arrow(axes, (28, 124), (15, 124), (15, 315), (27, 315), colour=GREEN)
    text(axes, 230, 135, "which files")
    box(axes, LEFT + 8, 112, HOST - 16, 24, GREEN, "dispatcher")

    box(axes, LEFT + 8, 278, HOST - 16, 74, ORANGE, "worker on\nspare cores")
    arrow(axes, (93, 278), (93, 245), colour=ORANGE)
    for x in (RIGHT + 8, RIGHT + 77):
        arrow(axes, (x + 30, 245), (x + 30, 277), colour=ORANGE)
        box(axes, x, 278, 61, 36, PALE_BLUE, "rank", edge=BLUE)
        arrow(axes, (x + 30, 314), (x + 30, 326), colour=BLUE)
        box(axes, x, 327, 61, 24, BLUE, "GPU")
        arrow(axes, (x + 30, 351), (x + 30, 364), colour=BLUE, ends="<|-|>")
    box(axes, RIGHT + 8, 364, 130, 22, PALE_BLUE, "gradients", edge=BLUE)
    footer(axes, 443)
    return axes


# ------------------------------------------------------------------------ result: what came out

NOTEBOOKS = {
    "PyTorch": "pt.grpc.sagemaker/hetero-pytorch-mnist.ipynb",
    "TensorFlow": "tf.data.service.sagemaker/hetero-tensorflow-restnet50.ipynb",
}
ROWS = ("step time (ms)", "USD per 1,000 steps")


def measured(notebook: str) -> list[tuple[float, float]]:
    """Read `ROWS` of the homogeneous and of the heterogeneous job in a notebook's saved outputs.

    They are in the table that the cell tagged `comparison` shows, as in `make demo`.
    """
    cells = json.loads((ROOT / notebook).read_text())["cells"]
    shown = [
        "".join(output.get("data", {}).get("text/plain", []))
        for cell in cells
        if "comparison" in cell["metadata"].get("tags", [])
        for output in cell["outputs"]
    ]
    lines = "\n".join(shown).splitlines()
    [times, prices] = [
        [float(number.replace(",", "")) for number in re.findall(r"[\d,.]+", line[len(row) :])]
        for row in ROWS
        for line in lines
        if line.startswith(row)
    ]
    return list(zip(times, prices, strict=True))


def published(framework: str) -> list[tuple[float, float]]:
    """Return the same of the jobs that AWS published in 2022, at that time's prices."""
    table = costs.compare_runs(costs.PUBLISHED[framework], as_of=costs.PUBLISHED_ON)
    return list(table[list(ROWS)].itertuples(index=False, name=None))


def results() -> dict[str, list[tuple[float, float]]]:
    """Return (ms for a step, USD for 1,000 steps), before and after, by framework and source."""
    here = {f"{name}, make demo": measured(path) for name, path in NOTEBOOKS.items()}
    return here | {f"{name}, AWS 2022": published(name) for name in NOTEBOOKS}


def result() -> Axes:
    """A training step on the GPU instance alone, and with CPU instances: its time and its cost."""
    axes = card(376, "A step, before and after")
    for number, (name, jobs) in enumerate(results().items()):
        y = 42 + 72 * number
        (before, before_usd), (after, after_usd) = jobs
        cheaper = 1 - after_usd / before_usd
        text(axes, 16, y + 9, name, bold=True, align="left")
        gain = f"{before / after:.1f}x as fast, {100 * cheaper:.0f} % cheaper"
        text(axes, 344, y + 9, gain, align="right")
        for row, (ms, usd, colour) in enumerate(
            [(before, before_usd, GREY), (after, after_usd, BLUE)]
        ):
            top = y + 20 + 22 * row
            box(axes, 16, top, 176 * ms / before, 18, colour, corner=3)
            words = f"{round(ms, 1):,g} ms, USD {usd:.2f}"
            text(axes, 22 + 176 * ms / before, top + 9, words, align="left")
    text(axes, WIDTH / 2, 344, "Grey: the GPU instance alone. Blue: with CPU instances.", size=11)
    text(axes, WIDTH / 2, 361, "USD for 1,000 steps. make demo: times of two CPU cores.", size=11)
    return axes


# ---------------------------------------------------------------------------------------- files

# Each example's folder is there to be copied by itself, so each has what its notebook shows.
PICTURES = {
    "docs/images/result.svg": result,
    "hello.world.sagemaker/images/basic-homogeneous-job.svg": homogeneous_job,
    "hello.world.sagemaker/images/basic-heterogeneous-job.svg": heterogeneous_job,
    "pt.grpc.sagemaker/images/basic-homogeneous-job.svg": homogeneous_job,
    "pt.grpc.sagemaker/images/basic-heterogeneous-job.svg": heterogeneous_job,
    "pt.grpc.sagemaker/images/pytorch-workflow.svg": pytorch_workflow,
    "tf.data.service.sagemaker/images/basic-homogeneous-job.svg": homogeneous_job,
    "tf.data.service.sagemaker/images/basic-heterogeneous-job.svg": heterogeneous_job,
    "tf.data.service.sagemaker/images/tf-data-service-workflow.svg": tensorflow_workflow,
}


def svg(draw: Callable[[], Axes]) -> bytes:
    """Return what `draw` draws as an SVG file, the same whenever and wherever it is drawn."""
    salted = {"svg.hashsalt": draw.__name__, "svg.fonttype": "path"}  # ids are random otherwise
    about = {"Title": draw.__doc__, "Creator": None, "Date": None}
    file = io.BytesIO()
    with matplotlib.style.context(["default", salted]):
        draw().figure.savefig(file, format="svg", metadata=about)
    return file.getvalue()


def main() -> None:
    """Write all pictures."""
    for name, draw in PICTURES.items():
        (ROOT / name).parent.mkdir(exist_ok=True)
        (ROOT / name).write_bytes(svg(draw))
        print(name)


if __name__ == "__main__":
    main()
