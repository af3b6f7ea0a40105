"""CHANGES.md describes the current version of each folder."""

import re

import pytest

from helpers.pages import ROOT

pytestmark = pytest.mark.quick
FOLDERS = [path.parent for path in ROOT.glob("*.sagemaker/code/*/__init__.py")]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_the_newest_entry_is_that_of_the_folder_s_version(folder):
    [version] = re.findall(r'^__version__ = "(.*?)"', (folder / "__init__.py").read_text(), re.M)
    entries = re.findall(rf"^## {folder.name} (.*)", (ROOT / "CHANGES.md").read_text(), re.M)
    assert entries and entries == sorted(entries, reverse=True) and entries[0] == version
