"""Modules have no circular imports, and tests/README.md lists each test file."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from helpers.pages import ROOT

pytestmark = pytest.mark.quick
# Where first-party modules are imported from.
TOPS = [
    ROOT,
    *ROOT.glob("*.sagemaker/code"),
    ROOT / "docs/environments",
    ROOT / "docs/ray",
    ROOT / "benchmarks",
]
FOLDERS = ("shared", "*.sagemaker", "docs", "scripts", "benchmarks", "tests", ".ci")
FILES = [path for folder in FOLDERS for path in sorted(ROOT.glob(f"{folder}/**/*.py"))]


def imported(path: Path, modules: dict[str, Path], name: str) -> set[str]:
    """Return which of `modules` the module `name` imports at its top level."""
    parents, found = name.split("."), set()
    if path.stem == "__init__":
        parents.append("")
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            start = [*parents[: -node.level], node.module] if node.level else [node.module]
            package = ".".join(filter(None, start))
            within = {f"{package}.{alias.name}" for alias in node.names}
            found |= within & modules.keys() or {package}
    return found & modules.keys()


@pytest.mark.parametrize("top", TOPS, ids=lambda path: str(path.relative_to(ROOT)))
def test_there_are_no_circular_imports(top: Path):
    modules = {
        ".".join(path.relative_to(top).with_suffix("").parts).removesuffix(".__init__"): path
        for path in FILES
        if path.is_relative_to(top)
    }
    graph = {name: imported(path, modules, name) for name, path in modules.items()}
    assert [*TopologicalSorter(graph).static_order()]  # CycleError names the cycle


def test_the_table_of_promises_has_every_file_and_says_where_it_runs():
    rows = re.findall(r"^\| .+ \| (.+) \| (.+) \|$", (ROOT / "tests/README.md").read_text(), re.M)
    held = [(re.findall(r"\]\((\S+?\.py)\)", files), commands) for files, commands in rows]
    named = [ROOT / "tests" / file for files, _ in held for file in files]
    assert {*named} >= {*ROOT.glob("tests/*/test_*.py")} and all(map(Path.exists, named))
    for files, commands in held:
        texts = [(ROOT / "tests" / file).read_text() for file in files]
        is_thorough = any(re.search(r"mark\.thorough|`make\sthorough`", text) for text in texts)
        assert ("thorough" in commands) == is_thorough, files
