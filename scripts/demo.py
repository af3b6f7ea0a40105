"""Run every example notebook from top to bottom on this machine, as `make demo` does.

Each notebook runs in its own folder with a kernel of its own. The executed copy goes to build/, as
a notebook and as a web page; what the cells tagged `comparison` show is printed at the end.
"""

import importlib.util
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nbformat
import psutil
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError
from nbconvert import HTMLExporter

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
KERNEL_LOG = BUILD / "kernel.log"
SIGN_OF_LIFE_SECONDS = 15
QUIET_PERCENT = 5  # our choice: of the CPU time, taken by others
NEEDED = {  # beside what all of them need
    "pt.grpc.sagemaker": ["torch", "grpc"],
    "tf.data.service.sagemaker": ["tensorflow"],
}


def execute(notebook: nbformat.NotebookNode, folder: Path) -> None:
    """Run all cells with `folder` as the working directory; the outputs go into `notebook`.

    Prints each heading, with the seconds since the start, when its turn comes. The kernel is shut
    down in any case, and what it writes besides the cells' outputs goes to build/kernel.log.

    Raises:
        CellExecutionError: a cell failed.
        DeadKernelError: the kernel ended by itself.
    """
    started = time.monotonic()
    resources = {"metadata": {"path": str(folder)}}
    client = NotebookClient(notebook, timeout=None, record_timing=False, resources=resources)
    with KERNEL_LOG.open("w") as log, client.setup_kernel(stderr=log):
        for index, cell in enumerate(notebook.cells):
            if cell.cell_type == "markdown":
                for heading in re.findall(r"^#+ (.+)", cell.source, re.MULTILINE):
                    print(f"{time.monotonic() - started:6.0f} s  {heading}", flush=True)
            with signs_of_life(f"cell {index + 1} of {len(notebook.cells)} runs", started):
                client.execute_cell(cell, index)
        client.set_widgets_metadata()
    print(f"{time.monotonic() - started:6.0f} s  done", flush=True)


@contextmanager
def signs_of_life(what: str, started: float) -> Iterator[None]:
    """Say now and then, with the seconds since `started`, that a long block still runs."""
    over = threading.Event()

    def say() -> None:
        while not over.wait(SIGN_OF_LIFE_SECONDS):
            print(f"{time.monotonic() - started:6.0f} s  ({what})", flush=True)

    thread = threading.Thread(target=say, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def save(notebook: nbformat.NotebookNode, path: Path) -> Path:
    """Write the executed notebook to build/ as .ipynb and .html; return the web page's path.

    Images of the notebook's folder become part of the page, which can be passed on by itself.
    """
    nbformat.write(notebook, BUILD / path.name)
    resources = {"metadata": {"name": path.stem, "path": str(path.parent)}}
    html, _ = HTMLExporter(embed_images=True).from_notebook_node(notebook, resources)
    page = (BUILD / path.name).with_suffix(".html")
    page.write_text(html, encoding="utf-8")
    return page


def reason(error: BaseException) -> str:
    """Say in a few lines why `execute` has raised this."""
    if isinstance(error, DeadKernelError):
        return f"its kernel died, see {KERNEL_LOG}"
    if isinstance(error, CellExecutionError):
        return f"{error.ename}: " + "\n".join(error.evalue.splitlines()[:5])
    return f"{type(error).__name__}: {error}"


def comparison(notebook: nbformat.NotebookNode) -> Iterator[str]:
    """The text that cells tagged `comparison` printed or displayed; figures are left out."""
    for cell in notebook.cells:
        if "comparison" in cell.metadata.get("tags", []):
            for output in cell.outputs:
                data = output.get("data", {})  # an exception has none
                if output.output_type == "stream":
                    yield output.text
                elif data and "image/png" not in data:
                    yield data["text/plain"]


def taken_by_others() -> tuple[float, float]:
    """CPU seconds so far that others took, in this machine or from it, and that there were."""
    times = psutil.cpu_times()  # of all cores; steal is what other virtual machines took
    there = sum(times[:8])  # user, nice, system, idle, iowait, irq, softirq, steal
    own = sum(os.times()[:4])  # with all processes that have ended and been waited for
    return there - times.idle - times.iowait - own, there


def main() -> int:
    """Run the notebooks one after the other; stop at the first that fails, with exit status 1."""
    os.environ["SAGEMAKER_TARGET"] = "local"  # whatever the shell says: a demo costs nothing
    BUILD.mkdir(exist_ok=True)
    taken_before, there_before = taken_by_others()
    executed = {}
    for path in sorted(ROOT.glob("*.sagemaker/*.ipynb")):
        print(f"\n{path.relative_to(ROOT)}", flush=True)
        needed = NEEDED.get(path.parent.name, [])
        if absent := [name for name in needed if not importlib.util.find_spec(name)]:
            print(
                f"left out: {' and '.join(absent)} not installed, see build/setup.log", flush=True
            )
            continue
        notebook = nbformat.read(path, as_version=4)
        try:
            execute(notebook, path.parent)
        except (CellExecutionError, DeadKernelError) as error:
            print(f"\n{path.name} failed: {reason(error)}", file=sys.stderr)
            print(f"The notebook up to there: {save(notebook, path)}", file=sys.stderr)
            return 1
        executed[save(notebook, path)] = notebook

    for page, notebook in executed.items():
        if text := "\n".join(comparison(notebook)):
            print(f"\n{page.stem}: comparison\n\n{text}")
    taken, there = taken_by_others()
    percent = 100 * (taken - taken_before) / (there - there_before)
    if percent > QUIET_PERCENT:
        print(
            f"\nThe machine had other things to do: they took {percent:.0f} % of its CPU time. The "
            "times above are longer for it, and not all alike: run it again on a quiet machine."
        )
    print("\nThe executed notebooks, with figures:")
    for page in executed:
        print(f"  {page}")
    return 0


if __name__ == "__main__":
    # As Ctrl-C does, `kill` shall unwind the stack, so that the kernel and its jobs end too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("\nInterrupted; the kernel has been shut down.")
