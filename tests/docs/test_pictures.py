"""The pictures in images/ are what scripts/pictures.py draws, and can be read."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.patches import FancyBboxPatch
from matplotlib.transforms import Bbox

from pages import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
import pictures  # noqa: E402

DRAWN = list(dict.fromkeys(pictures.PICTURES.values()))


def test_checked_in_pictures_are_those_that_the_script_draws(tmp_path: Path):
    """Drawn elsewhere, and by somebody who has made matplotlib look different."""
    for name in ("scripts", "shared"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in pictures.PICTURES:
        (tmp_path / name).parent.parent.mkdir(exist_ok=True)
    for name in pictures.NOTEBOOKS.values():
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "matplotlibrc").write_text("lines.linewidth: 9\nsavefig.bbox: tight\n")
    subprocess.run([sys.executable, "scripts/pictures.py"], cwd=tmp_path, check=True, timeout=120)
    drawn = sorted(tmp_path.glob("*/images/*.svg"))
    for root, found in ((tmp_path, drawn), (ROOT, sorted(ROOT.glob("*/images/*.svg")))):
        assert [str(path.relative_to(root)) for path in found] == sorted(pictures.PICTURES)
    for path in drawn:
        name = path.relative_to(tmp_path)
        same = path.read_bytes() == (ROOT / name).read_bytes()
        assert same, f"{name} is not what the script draws: run python scripts/pictures.py"


@pytest.mark.parametrize("draw", DRAWN, ids=lambda draw: draw.__name__)
def test_texts_can_be_read(draw: Callable[[], Axes]):
    """On a phone, 360 pixels wide, and by eyes that see contrast less well."""
    axes = draw()
    canvas = FigureCanvasAgg(axes.figure)
    canvas.draw()
    boxes = [patch for patch in axes.patches if isinstance(patch, FancyBboxPatch)]
    for text in axes.texts:
        words, extent = text.get_text(), text.get_window_extent()
        assert text.get_fontsize() >= 11 * pictures.POINTS, words
        for other in axes.texts:
            assert other is text or not other.get_window_extent().overlaps(extent), words
        around = [box for box in boxes if is_inside(extent, box.get_window_extent())]
        assert around, f"{words!r} leaves the card"
        background = around[-1]
        for box in boxes[boxes.index(background) + 1 :]:  # it covers what has been drawn before
            assert not box.get_window_extent().overlaps(extent), f"an edge goes through {words!r}"
        assert contrast(text.get_color(), background.get_facecolor()) >= 4.5, words


def is_inside(inner: Bbox, outer: Bbox) -> bool:
    return bool(np.all(inner.min >= outer.min) and np.all(inner.max <= outer.max))


def contrast(*colours: str | tuple[float, ...]) -> float:
    """From 1 to 21; Web Content Accessibility Guidelines 2.2, which ask for 4.5 (1.4.3)."""
    parts = np.array([to_rgb(colour) for colour in colours])
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    dark, bright = sorted(linear @ (0.2126, 0.7152, 0.0722))
    return (bright + 0.05) / (dark + 0.05)


def test_readme_says_in_words_what_its_picture_shows():
    """For those who cannot see it; and in the notebooks' figures, when they have been run again."""
    words = re.search(r"!\[(.*?)\]\(docs/images/result\.svg\)", (ROOT / "README.md").read_text())[1]
    for name, ((before, before_usd), (after, after_usd)) in pictures.results().items():
        said = f"{name}: from {before:,g} to {after:,g} ms, "
        said += f"from USD {before_usd:.2f} to {after_usd:.2f}"
        assert said in words, f"README says otherwise than its picture: {said}"
