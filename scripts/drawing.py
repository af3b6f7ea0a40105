"""Draws the elements of our pictures as SVG: a card, text, boxes, lines and arrows.

Pictures must be readable on a phone: lengths are in pixels of a picture that is 360 pixels wide,
and no text is smaller than 11 pixels. The reader's machine chooses the font. The fonts that we name
are among the widest, so that text also fits in other fonts. Each picture is drawn on a white card,
so that it can be read on dark pages.
"""

from shared.monitoring import DATA, TRAINING

BLUE, ORANGE, SKY = TRAINING, DATA, "#56B4E9"  # training, preparing batches, distributing files
PALE_BLUE, PALE_ORANGE, PALE_GREY = "#E3F0F8", "#FDF1DA", "#EEEEEE"
GREY, DARK, WHITE = "#8A8A8A", "#1A1A1A", "#FFFFFF"
WIDTH = 360  # pixels
INHERITED = {  # attributes of the whole picture, which elements inherit
    "font_family": "DejaVu Sans, Verdana, sans-serif",
    "font_size": 12,
    "font_weight": "normal",
    "text_anchor": "middle",
    "fill": DARK,
    "stroke": "none",
}

Picture = list[str]  # the lines of an SVG file: one element each; later ones cover earlier ones


def attributes(**values: str | float) -> str:
    """Return the attributes of an element as text."""
    words = {key: x if isinstance(x, str) else f"{round(x, 1):g}" for key, x in values.items()}
    return "".join(f' {key.replace("_", "-")}="{word}"' for key, word in words.items())


def add(picture: Picture, tag: str, content: str = "", **values: str | float) -> None:
    """Add an element, without the attributes that it inherits."""
    own = {name: value for name, value in values.items() if INHERITED.get(name) != value}
    picture.append(f"<{tag}{attributes(**own)}" + (f">{content}</{tag}>" if content else "/>"))


def card(height: float, title: str) -> Picture:
    """Start a picture: a white card, `height` pixels high, with a title. The y axis points down."""
    shown = {"width": 1.6 * WIDTH, "height": 1.6 * height}  # if the page sets no size
    view = attributes(viewBox=f"0 0 {WIDTH} {height}", **shown, **INHERITED)
    picture = [f'<svg xmlns="http://www.w3.org/2000/svg"{view}>']
    box(picture, 1, 1, WIDTH - 2, height - 2, WHITE, edge="#D0D0D0", corner=12)
    text(picture, WIDTH / 2, 22, title, size=15, bold=True)
    return picture


def text(
    picture: Picture,
    x: float,
    y: float,
    words: str,
    size: float = 12,
    bold: bool = False,
    colour: str = DARK,
    align: str = "middle",
) -> None:
    """Write a line of text, centered vertically at `y`; `align` says which part of it is at `x`."""
    weight = "bold" if bold else "normal"
    look = {"font_size": size, "font_weight": weight, "text_anchor": align, "fill": colour}
    add(picture, "text", words, x=x, y=y + 0.36 * size, **look)


def box(
    picture: Picture,
    x: float,
    y: float,
    width: float,
    height: float,
    fill: str,
    words: str = "",
    edge: str = "none",
    corner: float = 5,
) -> None:
    """Draw a rounded box with its upper left corner at (x, y) and lines of text in its center.

    It covers whatever has been drawn there before.
    """
    place = {"x": x, "y": y, "width": width, "height": height, "rx": corner}
    add(picture, "rect", **place, fill=fill, stroke=edge)
    lines = words.splitlines()
    for number, line in enumerate(lines):
        middle = y + height / 2 + 15 * (number - (len(lines) - 1) / 2)
        text(picture, x + width / 2, middle, line, colour=WHITE if fill in (BLUE, DARK) else DARK)


def group(
    picture: Picture, y: float, height: float, fill: str, name: str, hosts: str, name_y: float = 0
) -> None:
    """Draw the frame of an instance group, with its name and hosts at the top or at `name_y`."""
    box(picture, 10, y, 340, height, fill, edge=GREY, corner=8)
    text(picture, 22, name_y or y + 15, name, size=13, bold=True, align="start")
    text(picture, 338, name_y or y + 15, hosts, align="end")


def line(picture: Picture, *points: tuple[float, float], colour: str, **look: str) -> None:
    """Draw a line along the points."""
    along = " ".join(f"{x:g},{y:g}" for x, y in points)
    add(picture, "polyline", points=along, fill="none", stroke=colour, stroke_width=1.5, **look)


def arrow(
    picture: Picture, *points: tuple[float, float], colour: str, both_ends: bool = False
) -> None:
    """Draw an arrow along the points."""
    name = f"head-{colour[1:]}"
    look = attributes(viewBox="0 0 8 8", refX=7, refY=4)
    head = f'<marker id="{name}"{look} orient="auto-start-reverse">'
    head += f'<path d="M0,0 8,4 0,8" fill="{colour}"/></marker>'
    if head not in picture:  # arrows of the same color share it
        picture.append(head)
    ends = ("marker_start", "marker_end") if both_ends else ("marker_end",)
    line(picture, *points, colour=colour, **dict.fromkeys(ends, f"url(#{name})"))
