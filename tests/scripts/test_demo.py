"""`make demo`, apart from its notebooks: two runs at once, a second run, Ctrl-C, a failure."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from subprocess import PIPE

import nbformat
import psutil
import pytest
from nbclient import NotebookClient

from helpers.pages import HELLO_NOTEBOOK, NOTEBOOKS, ROOT, copy_repository, start_in_a_terminal

SAY_AND_WAIT = """
import os, time
open("kernel.pid", "w").write(str(os.getpid()))
time.sleep(100)
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Create a repository with the script, and a folder for a notebook."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "demo.py", tmp_path / "scripts")
    (tmp_path / "any.sagemaker").mkdir()
    return tmp_path


def start(repository: Path, *cells: str) -> subprocess.Popen:
    """Run the demo with a notebook of these cells; the last one is tagged `comparison`."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# A heading")])
    notebook.cells += [nbformat.v4.new_code_cell(cell) for cell in cells]
    notebook.cells[-1].metadata.tags = ["comparison"]
    nbformat.write(notebook, repository / "any.sagemaker" / "any.ipynb")
    return start_in_a_terminal([sys.executable, "scripts/demo.py"], repository)


@pytest.mark.thorough
def test_two_at_once_and_one_more(repository: Path):
    for count in (2, 1):
        for demo in [start(repository, "a = 6", "print(a * 7)") for _ in range(count)]:
            output = demo.communicate(timeout=100)[0]
            assert demo.returncode == 0, output
            assert "any: comparison\n\n42\n" in output
            assert "  any.sagemaker/executed-any.ipynb\n" in output
    assert "42" in (repository / "any.sagemaker" / "executed-any.html").read_text()


def test_ctrl_c_ends_the_kernel_too(repository: Path):
    demo, told = start(repository, SAY_AND_WAIT), repository / "any.sagemaker" / "kernel.pid"
    while not (told.exists() and told.read_text()):
        assert demo.poll() is None, demo.communicate()[0]
        time.sleep(0.1)
    kernel = psutil.Process(int(told.read_text()))
    os.killpg(demo.pid, signal.SIGINT)
    output = demo.communicate(timeout=30)[0]
    assert demo.returncode == 1 and "Interrupted; the kernel has been shut down." in output
    assert not kernel.is_running()


def test_a_notebook_that_fails_says_why_and_is_kept(repository: Path):
    demo = start(repository, "print('so far')", "1 / 0")
    output = demo.communicate(timeout=100)[0]
    assert demo.returncode == 1
    assert "any.ipynb failed: ZeroDivisionError: division by zero" in output
    assert "The notebook up to this error: any.sagemaker/executed-any.ipynb" in output
    assert "so far" in (repository / "any.sagemaker" / "executed-any.html").read_text()


@pytest.mark.thorough
@pytest.mark.timeout(900)  # it runs hello world twice
def test_what_it_says_to_open_has_its_links_and_pictures_and_runs_again(tmp_path: Path):
    """Hello world, in a copy of the repository. Run again, it is still hello world."""
    copy_repository(tmp_path)
    for path in NOTEBOOKS:
        if path != HELLO_NOTEBOOK:
            nbformat.write(nbformat.v4.new_notebook(), tmp_path / path.relative_to(ROOT))
    demo = subprocess.run([sys.executable, "scripts/demo.py"], cwd=tmp_path, stdout=PIPE, text=True)
    [hello] = [tmp_path / name for name in re.findall(r"^  (\S*hello\S*)$", demo.stdout, re.M)]
    notebook = nbformat.read(hello, as_version=4)
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    links = re.findall(r"\]\(([^)\s#]+)", text)
    links += re.findall(
        r'<(?:a|img)\b[^>]* (?:href|src)="([^"#]+)', hello.with_suffix(".html").read_text()
    )
    assert len(links) > 10
    assert not [link for link in links if ":" not in link and not (hello.parent / link).exists()]
    # As JupyterLab does, in the notebook's folder.
    resources = {"metadata": {"path": str(hello.parent)}}
    NotebookClient(notebook, timeout=300, resources=resources).execute()
    assert demo.returncode == 0
