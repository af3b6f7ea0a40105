"""docs/moving.md has the rows that benchmarks/libraries.py prints for its scripts."""

import runpy

import pytest

from helpers.pages import ROOT

pytestmark = pytest.mark.quick


def test_the_page_has_each_script_s_row(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    runner = runpy.run_path(str(ROOT / "benchmarks" / "libraries.py"))
    scripts = [path.read_text() for path in sorted(runner["FOLDER"].glob("*.py"))]
    rows = [runner["row"](source) for source in scripts if "# ///" in source]
    table = (ROOT / "docs" / "moving.md").read_text().partition("| Library |")[2]
    assert len(rows) == 13 and table.splitlines()[2 : 2 + len(rows)] == rows
