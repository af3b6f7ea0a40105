"""Notebooks without a kernel: their cells, run in a process that has the large packages already."""

import multiprocessing
import os
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

import nbformat

# Importing these takes a kernel ten seconds: here they are imported once, and each run is a fork.
FORKS = multiprocessing.get_context("forkserver")
PACKAGES = ["matplotlib.pyplot", "moto", "pandas", "sagemaker.train"]
PACKAGES += ["triton", "tensorflow", "torch"]  # in this order: docs/troubleshooting.md
FORKS.set_forkserver_preload(PACKAGES)


def cells_that_ask(notebook: Path) -> list[str]:
    """The notebook's code cells, but for those that need the results of its jobs."""
    return [
        cell.source
        for cell in nbformat.read(notebook, as_version=4).cells
        if cell.cell_type == "code" and "results" not in cell.metadata.get("tags", [])
    ]


def run_cells(folder: Path, cells: list[str]) -> object:
    """Run cells of Python in `folder`, with this process's environment, in another process.

    Returns:
        What the cells have left in the variable `result`.

    Raises:
        RuntimeError: a cell failed; the message is its traceback.
    """
    ours, theirs = FORKS.Pipe()
    process = FORKS.Process(target=_run, args=(folder, cells, dict(os.environ), theirs))
    process.start()
    theirs.close()
    try:
        failure, result = ours.recv()
    finally:
        process.join()
    if failure:
        raise RuntimeError(failure)
    return result


def _run(folder: Path, cells: list[str], environment: dict[str, str], end: Connection) -> None:
    os.environ.clear()
    os.environ.update(environment, MPLBACKEND="agg")
    os.chdir(folder)
    names = {"__name__": "__main__"}
    try:
        for number, cell in enumerate(cells):
            exec(compile(cell, f"cell {number}", "exec"), names)
        end.send((None, names.get("result")))
    except BaseException:
        end.send((traceback.format_exc(), None))
