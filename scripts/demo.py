"""Run every example notebook from top to bottom on this machine, as `make demo` does.

Each notebook runs in its own folder with its own kernel. The executed copy is written next to it,
also as a web page, so its links and pictures work, and it can be run again. The output of cells
tagged `comparison` is printed at the end.
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
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError
from nbconvert import HTMLExporter

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
KERNEL_LOG = BUILD / "kernel.log"
EXECUTED = "executed-"  # begins the names of the executed copies; git ignores these files
SIGN_OF_LIFE_SECONDS = 15
NEEDED = {  # packages that only the notebooks in these folders need
    "pt.grpc.sagemaker": ["torch", "grpc"],
    "tf.data.service.sagemaker": ["tensorflow"],
}


def notebooks() -> list[Path]:
    """Return the paths of the notebooks, without those of executed copies."""
    found = sorted(ROOT.glob("*.sagemaker/*.ipynb"))
    return [path for path in found if not path.name.startswith(EXECUTED)]


def execute(notebook: nbformat.NotebookNode, folder: Path) -> None:
    """Run all cells with `folder` as the working directory, and store the outputs in `notebook`.

    Prints each heading when it is reached, with the seconds since the start. Always shuts the
    kernel down. The kernel's other output goes to build/kernel.log.

    Raises:
        CellExecutionError: a cell failed.
        DeadKernelError: the kernel died.
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
    """Print `what` and the seconds since `started` every SIGN_OF_LIFE_SECONDS, within the block."""
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
    """Write an executed copy of the notebook at `path`, as .ipynb and .html, next to it.

    The web page contains the images, so you can share it as a single file.

    Returns:
        The path of the executed notebook, relative to the repository.
    """
    copy = path.with_name(EXECUTED + path.name)
    nbformat.write(notebook, copy)
    resources = {"metadata": {"name": path.stem, "path": str(path.parent)}}
    html, _ = HTMLExporter(embed_images=True).from_notebook_node(notebook, resources)
    copy.with_suffix(".html").write_text(html, encoding="utf-8")
    return copy.relative_to(ROOT)


def reason(error: BaseException) -> str:
    """Describe in a few lines an error that `execute` raised."""
    if isinstance(error, DeadKernelError):
        return f"its kernel died; see {KERNEL_LOG}"
    if isinstance(error, CellExecutionError):
        return f"{error.ename}: " + "\n".join(error.evalue.splitlines()[:5])
    return f"{type(error).__name__}: {error}"


def comparison(notebook: nbformat.NotebookNode) -> Iterator[str]:
    """Yield the text that cells tagged `comparison` printed or displayed, without figures."""
    for cell in notebook.cells:
        if "comparison" in cell.metadata.get("tags", []):
            for output in cell.outputs:
                data = output.get("data", {})  # the output of an exception has no data
                if output.output_type == "stream":
                    yield output.text
                elif data and "image/png" not in data:
                    yield data["text/plain"]


def main() -> int:
    """Run the notebooks one after another; return 1 as soon as one fails."""
    os.environ["SAGEMAKER_TARGET"] = "local"  # overrides the shell's value: a demo costs nothing
    BUILD.mkdir(exist_ok=True)
    executed = {}
    for path in notebooks():
        print(f"\n{path.relative_to(ROOT)}", flush=True)
        needed = NEEDED.get(path.parent.name, [])
        if absent := [name for name in needed if not importlib.util.find_spec(name)]:
            print(f"skipped: {' and '.join(absent)} not installed; see build/setup.log", flush=True)
            continue
        notebook = nbformat.read(path, as_version=4)
        try:
            execute(notebook, path.parent)
        except (CellExecutionError, DeadKernelError) as error:
            print(f"\n{path.name} failed: {reason(error)}", file=sys.stderr)
            print(f"The notebook up to this error: {save(notebook, path)}", file=sys.stderr)
            return 1
        executed[save(notebook, path)] = notebook

    for copy, notebook in executed.items():
        if text := "\n".join(comparison(notebook)):
            print(f"\n{copy.stem.removeprefix(EXECUTED)}: comparison\n\n{text}")
    print("\nThe executed notebooks. You can open them with `make lab`, and run them again there:")
    for copy in executed:
        print(f"  {copy}")
    print("Next to each is a web page with the same content (.html).")
    return 0


if __name__ == "__main__":
    # Let `kill` unwind the stack like Ctrl-C, so that the kernel and its jobs end too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("\nInterrupted; the kernel has been shut down.")
