"""Draw the pictures of the examples' jobs and of their results as SVG, into images/ folders.

    python scripts/pictures.py

The results are read from the notebooks' saved outputs: run this again after running the notebooks.
"""

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # for the folders `shared` and `scripts`
from scripts.drawing import (  # noqa: E402
    BLUE,
    DARK,
    GREY,
    ORANGE,
    PALE_BLUE,
    PALE_GREY,
    PALE_ORANGE,
    SKY,
    WHITE,
    WIDTH,
    Picture,
    arrow,
    box,
    card,
    group,
    line,
    text,
)
from shared import costs, monitoring  # noqa: E402

# ---------------------------------------------------------------------- why: a host's time line


def timeline(
    picture: Picture,
    y: float,
    colour: str,
    batches: Sequence[tuple[int, int, int]],
    waits: Sequence[tuple[int, int]] = (),
) -> None:
    """Draw what a host does in twelve units of time.

    batches: the batches that it works on: start, end and number. waits: start and end.
    """
    left, unit = 22, 316 / 12
    box(picture, left, y, 316, 24, PALE_GREY)
    for start, end in waits:
        text(picture, left + unit * (start + end) / 2, y + 12, "waits")
    for start, end, number in batches:
        box(picture, left + unit * start + 1, y, unit * (end - start) - 2, 24, colour, f"{number}")


def time_axis(picture: Picture, y: float) -> None:
    """Draw an arrow for the direction of time."""
    text(picture, 22, y, "time", align="start")
    arrow(picture, (58, y), (338, y), colour=GREY)


def homogeneous_job() -> Picture:
    """The few vCPUs of a GPU instance prepare batches more slowly than its GPU trains on them."""
    picture = card(226, "Homogeneous: the GPU waits")
    group(picture, 42, 132, WHITE, "one instance", "few vCPUs, a GPU")
    text(picture, 22, 80, "its vCPUs prepare batches", align="start")
    timeline(picture, 91, ORANGE, [(t, t + 3, t // 3 + 1) for t in (0, 3, 6, 9)])
    text(picture, 22, 128, "its GPU trains on them", align="start")
    waits = [(0, 3), (4, 6), (7, 9), (10, 12)]
    timeline(picture, 139, BLUE, [(t, t + 1, t // 3) for t in (3, 6, 9)], waits)
    time_axis(picture, 187)
    text(picture, WIDTH / 2, 208, "You pay for the GPU while it waits.")
    return picture


def heterogeneous_job() -> Picture:
    """Two CPU instances prepare batches for a GPU instance, which trains without pause."""
    picture = card(320, "Heterogeneous: the GPU trains")
    group(picture, 42, 114, PALE_ORANGE, "data_group", "CPU instances")
    text(picture, 22, 80, "their many vCPUs prepare batches", align="start")
    timeline(picture, 91, ORANGE, [(t, t + 2, t + 1) for t in range(0, 12, 2)])
    timeline(picture, 121, ORANGE, [(t, t + 2, t + 2) for t in range(0, 12, 2)])
    arrow(picture, (110, 157), (110, 183), colour=ORANGE)
    text(picture, 122, 169, "batches over the network", align="start")
    group(picture, 184, 84, PALE_BLUE, "dnn_group", "GPU instance")
    text(picture, 22, 222, "its GPU trains on them", align="start")
    timeline(picture, 233, BLUE, [(t, t + 1, t - 1) for t in range(2, 12)], waits=[(0, 2)])
    time_axis(picture, 281)
    text(picture, WIDTH / 2, 302, "One job: all hosts are billed until the last ends.")
    return picture


# -------------------------------------------------------------------- how: what runs on the hosts

LEFT, RIGHT, HOST = 20, 194, 146  # x of two hosts side by side, and their width
GUTTER = 180  # x of the gap between them, where the launchers' connections run
CONNECTION = {"colour": GREY, "stroke_dasharray": "2 1.5"}


def launcher(picture: Picture, x: float, y: float) -> None:
    """Draw the launcher of the host at `x`, connected to the gutter."""
    line(picture, (x + HOST / 2, y + 11), (GUTTER, y + 11), **CONNECTION)
    box(picture, x + 8, y, HOST - 16, 22, "#D5D5D5", "launcher")


def leader(picture: Picture, y: float, others_y: float) -> None:
    """Draw the leader, connected to the other launchers, the first of which are at `others_y`."""
    to = LEFT + HOST / 2, y + 11
    line(picture, (GUTTER, others_y + 11), (GUTTER, y + 11), to, **CONNECTION)
    box(picture, LEFT + 8, y, HOST - 16, 22, DARK, "launcher: leader")


def footer(picture: Picture, y: float) -> None:
    """Say what launchers are for."""
    text(picture, WIDTH / 2, y, "A launcher on every host. The leader starts")
    text(picture, WIDTH / 2, y + 17, "the training, and ends the job on all of them.")


def pytorch_workflow() -> Picture:
    """Data hosts prepare samples in worker processes; the loaders of training hosts fetch them."""
    picture = card(488, "PyTorch: samples over gRPC")
    group(picture, 42, 152, PALE_ORANGE, "data_group", "CPU instances")
    group(picture, 252, 182, PALE_BLUE, "dnn_group", "GPU instances", name_y=418)
    for x in (LEFT, RIGHT):
        box(picture, x, 72, HOST, 114, WHITE, edge=GREY)
        box(picture, x, 262, HOST, 140, WHITE, edge=GREY)
    leader(picture, 372, others_y=80)
    launcher(picture, RIGHT, 372)
    box(picture, LEFT, 210, 320, 26, WHITE, "samples, asked for in signed calls", edge=ORANGE)
    for x in (LEFT, RIGHT):
        launcher(picture, x, 80)
        text(picture, x + HOST / 2, 114, "worker processes")
        for number in range(4):
            box(picture, x + 17 + 30 * number, 124, 22, 14, ORANGE, corner=3)
        arrow(picture, (x + HOST / 2, 138), (x + HOST / 2, 152), colour=ORANGE)
        box(picture, x + 8, 153, HOST - 16, 25, ORANGE, "gRPC server")
        arrow(picture, (x + HOST / 2, 178), (x + HOST / 2, 209), colour=ORANGE)
        for left in (x + 8, x + 77):
            arrow(picture, (left + 30, 237), (left + 30, 269), colour=ORANGE)
            box(picture, left, 270, 61, 24, WHITE, "loader", edge=ORANGE)
            arrow(picture, (left + 30, 294), (left + 30, 306), colour=ORANGE)
            box(picture, left, 307, 61, 24, BLUE, "GPU")
            arrow(picture, (left + 30, 331), (left + 30, 344), colour=BLUE, both_ends=True)
    box(picture, LEFT + 8, 344, 304, 20, PALE_BLUE, "gradients (NCCL)", edge=BLUE)
    footer(picture, 451)
    return picture


def tensorflow_workflow() -> Picture:
    """Workers on data hosts and on spare cores of the training host feed its ranks."""
    picture = card(480, "TensorFlow: tf.data.service")
    group(picture, 42, 160, PALE_ORANGE, "data_group", "CPU instances")
    group(picture, 260, 166, PALE_BLUE, "dnn_group", "GPU instance", name_y=410)
    for x in (LEFT, RIGHT):
        box(picture, x, 72, HOST, 122, WHITE, edge=GREY)
    box(picture, LEFT, 270, 320, 124, WHITE, edge=GREY)
    leader(picture, 364, others_y=80)
    box(picture, LEFT, 218, 320, 26, WHITE, "batches, each to one of the ranks", edge=ORANGE)
    for x in (LEFT, RIGHT):
        launcher(picture, x, 80)
        box(picture, x + 8, 148, HOST - 16, 38, ORANGE, "worker:\ntf.data pipeline")
        arrow(picture, (x + HOST / 2, 186), (x + HOST / 2, 217), colour=ORANGE)
    # The dispatcher, which gives all workers their files.
    arrow(picture, (LEFT + HOST / 2, 136), (LEFT + HOST / 2, 147), colour=SKY)
    arrow(picture, (158, 124), (267, 124), (267, 147), colour=SKY)
    arrow(picture, (28, 124), (15, 124), (15, 315), (27, 315), colour=SKY)
    text(picture, 230, 135, "which files")
    box(picture, LEFT + 8, 112, HOST - 16, 24, SKY, "dispatcher")

    box(picture, LEFT + 8, 278, HOST - 16, 74, ORANGE, "worker on\nspare cores")
    arrow(picture, (93, 278), (93, 245), colour=ORANGE)
    for x in (RIGHT + 8, RIGHT + 77):
        arrow(picture, (x + 30, 245), (x + 30, 277), colour=ORANGE)
        box(picture, x, 278, 61, 36, PALE_BLUE, "rank", edge=BLUE)
        arrow(picture, (x + 30, 314), (x + 30, 326), colour=BLUE)
        box(picture, x, 327, 61, 24, BLUE, "GPU")
        arrow(picture, (x + 30, 351), (x + 30, 364), colour=BLUE, both_ends=True)
    box(picture, RIGHT + 8, 364, 130, 22, PALE_BLUE, "gradients", edge=BLUE)
    footer(picture, 443)
    return picture


# ------------------------------------------------------------------ result: step time and price

NOTEBOOKS = {
    "PyTorch": "pt.grpc.sagemaker/hetero-pytorch-mnist.ipynb",
    "TensorFlow": "tf.data.service.sagemaker/hetero-tensorflow-restnet50.ipynb",
}
ROWS = ("step time (ms)", "USD per 1,000 steps")


def measured(notebook: str) -> list[tuple[float, float]]:
    """Read `ROWS` of the homogeneous and the heterogeneous job from a notebook's saved outputs.

    They are in the table of the cell tagged `comparison`, which `make demo` prints too.
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
    """Return the same for the jobs that AWS published in 2022, at the prices of that time."""
    table = costs.compare_runs(costs.PUBLISHED[framework], as_of=costs.PUBLISHED_ON)
    return list(table[list(ROWS)].itertuples(index=False, name=None))


def results() -> dict[str, list[tuple[float, float]]]:
    """Return (ms for a step, USD for 1,000 steps), before and after, by framework and source."""
    aws = {f"{name}, AWS 2022": published(name) for name in NOTEBOOKS}
    return aws | {f"{name}, make demo": measured(path) for name, path in NOTEBOOKS.items()}


def result() -> Picture:
    """A training step on the GPU instance alone, and with CPU instances: its time and its cost."""
    picture = card(392, "A step, before and after")
    for number, (name, jobs) in enumerate(results().items()):
        y = 42 + 72 * number
        (before, before_usd), (after, after_usd) = jobs
        text(picture, 16, y + 9, name, bold=True, align="start")
        gain = f"{before / after:.1f}x as fast"
        if "AWS" in name:  # a machine of two cores cannot tell what GPU instances would save
            gain += f", {100 * (1 - after_usd / before_usd):.0f} % cheaper"
        text(picture, 344, y + 9, gain, size=11, align="end")
        for row, (ms, usd) in enumerate([(before, before_usd), (after, after_usd)]):
            colour = (monitoring.HOMOGENEOUS, monitoring.HETEROGENEOUS)[row]
            top = y + 20 + 22 * row
            box(picture, 16, top, 176 * ms / before, 18, colour, corner=3)
            words = f"{round(ms, 1):,g} ms, USD {usd:.3g}"
            text(picture, 22 + 176 * ms / before, top + 9, words, align="start")
    for row, words in enumerate(
        [
            "Pink: the GPU instance alone. Green: with CPU instances.",
            "Each pair of bars has its own scale.",
            "USD for 1,000 steps. make demo: times of two CPU cores.",
        ]
    ):
        text(picture, WIDTH / 2, 342 + 17 * row, words, size=11)
    return picture


# ------------------------------------------------------- cloudwatch: how to recognize the problem

# For the hosts of AWS's TensorFlow jobs: use in percent, and number of vCPUs or GPUs.
USE = {
    "ml.p4d.24xlarge alone": [("p4d CPU", 91.3365625, 96), ("p4d GPU", 45.25, 8)],
    "with 2 ml.c5.18xlarge": [
        ("p4d CPU", 78.7053125, 96),
        ("p4d GPU", 73.875, 8),
        ("c5 CPU", 77.9426388889, 72),
        ("c5 CPU", 78.6570833333, 72),
    ],
}


def in_cloudwatch(percent: float, units: int) -> str:
    """Return what CloudWatch shows, where 100 % is one vCPU or GPU, and the maximum."""
    return f"{percent * units:,.0f} of {100 * units:,} %"


def cloudwatch() -> Picture:
    """What CloudWatch shows of a GPU instance that waits for its CPUs, and with CPU instances.

    The percentages are from AWS's examples (github.com/aws/amazon-sagemaker-examples, commit
    18fa6ea, training/heterogeneous-clusters/tf.data.service.sagemaker). Two screenshots of
    CloudWatch there show them, as percent of the instance, for the minute at the cursor:
    "images/metrics homogeneous cpu and gpu usage.png", 21:51 on 2022-09-21, and
    "images/metrics Heterogeneous cpu and gpu usage.png.png", 21:55 on 2022-09-22. CloudWatch's
    metrics are these percentages times the number of vCPUs or GPUs, by the formulas in
    cloudwatch-metric-definitions/ in the same folder.
    """
    picture = card(304, "What CloudWatch shows")
    y = 52
    for (hosts, use), run in zip(USE.items(), costs.PUBLISHED["TensorFlow"].values(), strict=True):
        text(picture, 16, y, hosts, bold=True, align="start")
        text(picture, 344, y, f"{run.step_time_ms:.0f} ms a step", align="end")
        for name, percent, units in use:
            y += 24
            colour = BLUE if name.endswith("GPU") else ORANGE
            text(picture, 16, y, name, align="start")
            box(picture, 82, y - 9, 140, 18, PALE_GREY, corner=3)
            box(picture, 82, y - 9, 1.4 * percent, 18, colour, f"{percent:.0f} %", corner=3)
            text(picture, 230, y, in_cloudwatch(percent, units), align="start")
        y += 32
    text(picture, WIDTH / 2, y, "Bars: percent of the instance. Right: CloudWatch's", size=11)
    text(picture, WIDTH / 2, y + 17, "numbers, where 100 % is one vCPU or one GPU.", size=11)
    return picture


# ---------------------------------------------------------------------------------------- files

# You can copy an example's folder by itself, so each folder has its own copies of the pictures.
PICTURES = {
    "docs/images/cloudwatch.svg": cloudwatch,
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


def svg(draw: Callable[[], Picture]) -> str:
    """Return what `draw` draws as an SVG file, with the first line of its docstring as title."""
    begin, *elements = draw()
    title = f"<title>{draw.__doc__.splitlines()[0]}</title>"
    return "\n".join([begin, title, *elements, "</svg>", ""])


def main() -> None:
    """Write all pictures."""
    for name, draw in PICTURES.items():
        (ROOT / name).write_text(svg(draw))
        print(name)


if __name__ == "__main__":
    main()
