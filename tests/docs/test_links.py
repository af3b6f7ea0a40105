"""Links of pages and notebooks have targets, their code words exist, and they are up to date."""

import json
import re
import runpy
from pathlib import Path

import pytest

from helpers.pages import NOTEBOOKS, ROOT

pytestmark = pytest.mark.quick
PAGES = [
    page
    for pattern in ("*.md", "docs/*.md", "*s/README.md", "*.sagemaker/*.md")
    for page in sorted(ROOT.glob(pattern))
] + NOTEBOOKS
# Where code words come from: folders with code, and the files beside them.
CODE = [ROOT / "requirements.txt", ROOT / "Makefile", ROOT / "pyproject.toml"]
CODE += [
    path
    for folder in ("shared", "*.sagemaker", "docs", "scripts", "benchmarks", "tests")
    for pattern in ("*.py", "*.sh", "*.csv", "*.json", "*.txt")
    for path in ROOT.glob(f"{folder}/**/{pattern}")
] + NOTEBOOKS
# Names of Hugging Face, gymnasium, the SageMaker SDK and API, and the reader's own code.
ELSEWHERE = re.findall(
    r"\w+",
    """
    ACCELERATE_USE_CPU get_train_dataloader keep_in_memory final_obs save_total_limit
    RemoteDebugConfig TrainingPlanArn enable_remote_debug with_remote_debug_config
    volume_size_in_gb enable_network_isolation s3_data_source security_group_ids input_mode
    enable_inter_container_traffic_encryption encrypt_inter_container_traffic
    JOB_algo MyStream my_module runtime_env use_gpu with_resources
    """,
)


def cells_of(notebook: Path, kind: str) -> str:
    """Return the sources of a notebook's cells of this kind."""
    cells = json.loads(notebook.read_text())["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == kind)


def text_of(page: Path) -> str:
    """Return the page's Markdown without its code blocks."""
    text = cells_of(page, "markdown") if page.suffix == ".ipynb" else page.read_text()
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


def test_names_in_the_text_are_in_the_code():
    """A name has an underscore or a capital letter in it. CHANGES.md may name what is gone."""
    texts = [cells_of(p, "code") if p.suffix == ".ipynb" else p.read_text() for p in CODE]
    code = {word for text in texts for word in re.findall(r"\w+", text)}
    code |= {path.stem for path in CODE} | {*ELSEWHERE}
    name = re.compile(r"\b[A-Za-z]\w*_\w+|\b[A-Za-z]+[a-z][A-Z]\w*")
    named = {
        (page.name, word)
        for page in PAGES
        if page.name != "CHANGES.md"
        for span in re.findall(r"`([^`]+)`", text_of(page))
        for word in name.findall(span)
    }
    assert not {(page, word) for page, word in named if word not in code}


@pytest.mark.parametrize(
    "code", ROOT.glob("*.sagemaker/code/*/__init__.py"), ids=lambda path: path.parent.name
)
def test_the_newest_entry_of_changes_is_that_of_the_folder_s_version(code: Path):
    [version] = re.findall(r'^__version__ = "(.*?)"', code.read_text(), re.M)
    changes = (ROOT / "CHANGES.md").read_text()
    entries = re.findall(rf"^## {code.parent.name} (.*)", changes, re.M)
    assert entries and entries == sorted(entries, reverse=True) and entries[0] == version


def test_moving_has_the_row_of_each_library_s_script(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    runner = runpy.run_path(str(ROOT / "benchmarks" / "libraries.py"))
    scripts = [path.read_text() for path in sorted(runner["FOLDER"].glob("*.py"))]
    rows = [runner["row"](source) for source in scripts if "# ///" in source]
    table = (ROOT / "docs" / "moving.md").read_text().partition("| Library |")[2]
    assert len(rows) == 13 and table.splitlines()[2 : 2 + len(rows)] == rows
