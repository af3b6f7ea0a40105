"""The pictures in images/ are those that scripts/pictures.py draws, and are easy to read."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.transforms import Bbox
from PIL import ImageFont

from helpers.pages import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
import pictures  # noqa: E402

pytestmark = pytest.mark.quick
DRAWN = list(dict.fromkeys(pictures.PICTURES.values()))
FONTS = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
ANCHORS = {"start": "ls", "middle": "ms", "end": "rs"}  # SVG's names, and PIL's


def test_checked_in_pictures_are_those_that_the_script_draws():
    found = [str(path.relative_to(ROOT)) for path in ROOT.glob("*/images/*.svg")]
    assert sorted(found) == sorted(pictures.PICTURES)
    for name, draw in pictures.PICTURES.items():
        same = (ROOT / name).read_bytes() == pictures.svg(draw).encode()
        assert same, f"{name} is not what the script draws: run python scripts/pictures.py"


@pytest.mark.parametrize("draw", DRAWN, ids=lambda draw: draw.__name__)
def test_texts_can_be_read(draw: Callable[[], pictures.Picture]):
    """On a phone 360 pixels wide, in other fonts, and for people who see contrast less well."""
    svg = ElementTree.fromstring(pictures.svg(draw))
    assert svg.get("viewBox").startswith("0 0 360 ")
    texts, shapes = [], []  # each with its place in the file: later ones cover earlier ones
    for place, element in enumerate(svg):
        kind, look = element.tag.split("}")[1], svg.attrib | element.attrib
        if kind == "text":
            texts.append((place, element.text, look, extent_of(element.text, look)))
        elif kind == "rect":
            corner = float(look["x"]), float(look["y"])
            box = Bbox.from_bounds(*corner, float(look["width"]), float(look["height"]))
            shapes.append((place, look["fill"], box))
        elif kind == "polyline":
            points = np.array([point.split(",") for point in look["points"].split()], float)
            shapes += [
                (place, "none", Bbox(ends)) for ends in zip(points, points[1:], strict=False)
            ]
    assert texts and svg[0].tag.endswith("title") and svg[0].text
    for place, words, look, extent in texts:
        assert float(look["font-size"]) >= 11, words
        for other_place, _, _, other in texts:
            assert other_place == place or not other.overlaps(extent), f"a text overlaps {words!r}"
        below = [shape for shape in shapes if shape[0] < place and is_inside(extent, shape[2])]
        assert below, f"{words!r} leaves the card"
        background = below[-1]
        for shape in shapes[shapes.index(background) + 1 :]:
            assert not shape[2].overlaps(extent), f"an edge goes through {words!r}"
        assert contrast(look["fill"], background[1]) >= 4.5, words


def extent_of(words: str, look: dict[str, str]) -> Bbox:
    """Return the extent of a text in a font that is 4 % wider than DejaVu Sans."""
    bold = "-Bold" if look["font-weight"] == "bold" else ""
    font = ImageFont.truetype(FONTS / f"DejaVuSans{bold}.ttf", 10 * float(look["font-size"]))
    box = np.reshape(font.getbbox(words, anchor=ANCHORS[look["text-anchor"]]), (2, 2)) / 10
    return Bbox((float(look["x"]), float(look["y"])) + box * (1.04, 1))


def is_inside(inner: Bbox, outer: Bbox) -> bool:
    return bool(np.all(inner.min >= outer.min) and np.all(inner.max <= outer.max))


def contrast(*colours: str) -> float:
    """Return the contrast, 1 to 21. WCAG 2.2 asks for at least 4.5 (success criterion 1.4.3)."""
    parts = np.array([to_rgb(colour) for colour in colours])
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    dark, bright = sorted(linear @ (0.2126, 0.7152, 0.0722))
    return (bright + 0.05) / (dark + 0.05)


def alternative(page: str, picture: str) -> str:
    """Return a picture's alternative text on a page."""
    return re.search(rf"!\[(.*?)\]\({re.escape(picture)}\)", (ROOT / page).read_text())[1]


def test_readme_says_in_words_what_its_picture_shows():
    """With the numbers of the notebooks' latest saved run."""
    words = alternative("README.md", "docs/images/result.svg")
    for name, ((before, before_usd), (after, after_usd)) in pictures.results().items():
        said = f"{name}: from {before:,g} to {after:,g} ms, "
        said += f"from USD {before_usd:.3g} to {after_usd:.3g}"
        assert said in words, f"README's picture shows, but its text does not say: {said}"


def test_when_says_in_words_what_its_picture_shows():
    words = alternative("docs/when.md", "images/cloudwatch.svg")
    said = [
        f"{name} {percent:.0f} %, {pictures.in_cloudwatch(percent, units)}"
        for use in pictures.USE.values()
        for name, percent, units in use
    ]
    assert re.findall(r"\w+ [CG]PU \d+ %, [\d,]+ of [\d,]+ %", words) == said
