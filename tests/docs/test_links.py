"""Links within the repository, in Markdown files and notebooks, have targets that exist."""

import json
import re
from pathlib import Path

import pytest

from helpers.pages import ROOT

pytestmark = pytest.mark.quick
PAGES = [
    page
    for pattern in ("*.md", "docs/*.md", "*s/README.md", "*.sagemaker/*.md", "*.sagemaker/*.ipynb")
    for page in sorted(ROOT.glob(pattern))
]


def text_of(page: Path) -> str:
    """Return the page's Markdown without its code blocks."""
    text = page.read_text()
    if page.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    return re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)


def anchors_of(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.+)$", text_of(page), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_something(page: Path):
    links = re.findall(r"\]\(([^)\s]+)\)", text_of(page))
    assert links or page != ROOT / "README.md"
    for link in links:
        path, _, anchor = link.partition("#")
        if re.match(r"\w+:", link):
            continue
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors_of(target), link


def test_readme_is_short_and_leads_to_every_page():
    """It links to docs/, to the examples and to all other pages."""
    readme = ROOT / "README.md"
    assert len(readme.read_text().splitlines()) <= 150
    links = {link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text_of(readme))}
    assert {str(page.relative_to(ROOT)) for page in PAGES if page != readme} <= links
