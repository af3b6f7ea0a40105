"""workshop.md and docs/teaching.md quote the numbers of the notebooks' saved runs."""

import json
import re
from pathlib import Path

import pytest

from helpers.pages import PYTORCH_NOTEBOOK, ROOT, TENSORFLOW_NOTEBOOK

pytestmark = pytest.mark.quick
PRINTED = {
    "core_ms": r"on data only +(\d+) core-ms",
    "floor": r"step without data +([\d.]+) ms",
    "before, after": r"step time \(ms\) +([\d.]+) +([\d.]+)",
    "wait": r"data wait \(ms\) +([\d.]+)",
    "percent": r"data wait \(%\) +(\d+) %",
    "usd_before, usd_after": r"USD per 1,000 steps +([\d.]+) +([\d.]+)",
    "work": r"([\d.]+) ms, the data's CPU work: \d+ core-ms / 1 cores",
    "predicted, measured": r"price performance: predicted \+(\d+) %, measured \+(\d+) %",
}


def numbers_of(notebook: Path) -> dict[str, str]:
    """Return the numbers of PRINTED, as the notebook's saved outputs have them."""
    outputs = [
        output.get("text") or output.get("data", {}).get("text/plain", "")
        for cell in json.loads(notebook.read_text())["cells"]
        for output in cell.get("outputs", [])
    ]
    text = "\n".join("".join(output) for output in outputs)
    found = {}
    for names, pattern in PRINTED.items():
        found |= dict(zip(names.split(", "), re.search(pattern, text).groups(), strict=True))
    return found


def assert_said(page: str, sentences: list[str]) -> None:
    text = " ".join((ROOT / page).read_text().split())
    assert not [sentence for sentence in sentences if sentence not in text]


def test_teaching_expects_what_the_pytorch_notebook_shows():
    run = numbers_of(PYTORCH_NOTEBOOK)
    before, wait, floor = (float(run[name]) for name in ("before", "wait", "floor"))
    speed_up, work = before / float(run["after"]), 4 * float(run["work"])  # of lab 2's exercise
    assert_said(
        "docs/teaching.md",
        [
            f"about {floor:.0f} ms without data, and {before:.0f} ms with it",
            f"Of the {before:.0f} ms, it waits for data for {wait:.0f} ms",
            f"{wait:.0f} / {before:.0f} = {run['percent']} %, held up by",
            f"| 1 | {wait:.0f}, the milliseconds |",
            f"such as {100 - int(run['percent'])} % |",
            f"the work on data is {run['core_ms']} core-ms a step",
            f"The step without data takes {floor} ms",
            f"The job took {run['after']} ms",
            f"costs {before - floor:.0f} of the {before:.0f} ms",
            f"takes about {work / 512:.3f} ms for a sample",
            f"4 x 128 x {work / 512:.3f} = {work:.0f} core-ms a step | with one host {work:.0f} ms",
            f"({work:.0f} + {floor:.0f}) / 2 = {(work + floor) / 2:.0f} ms",
            f"({work:.0f} / 4 = {work / 4:.0f} ms)",
            f"({work:.0f} / 2 = {work / 2:.0f} ms)",
            f"{before} ms became {run['after']} ms, a speed-up of {speed_up:.1f}",
            f"USD {run['usd_before']} per 1,000 steps became USD {run['usd_after']}",
            f"Predicted: {run['predicted']} % better price performance",
            f"measured: {run['measured']} % |",
        ],
    )


def test_the_workshop_solves_its_tensorflow_labs_with_that_notebooks_numbers():
    run = numbers_of(TENSORFLOW_NOTEBOOK)
    before, floor = float(run["before"]), float(run["floor"])
    assert_said(
        "workshop.md",
        [
            f"A step takes {before} ms, and {floor} ms without data",
            f"(1 - {floor} / {before}) = {100 * (1 - floor / before):.0f} % of a step",
            f"waits for only {run['wait']} ms of it",
            f"{run['core_ms']} core-ms / 1 core = {run['core_ms']} ms",
            f"The job took {run['after']} ms a step",
        ],
    )
