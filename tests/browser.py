"""Run the notebooks as a person would: in JupyterLab, in a browser, with Run All Cells.

    apt install chromium
    .venv/bin/python -m pip install playwright==1.65.2
    .venv/bin/python tests/browser.py

It uses a copy of the repository. It checks that the tables, figures and pictures are on the page,
that there is no error, and that no output is wider than its cell, and saves a screenshot of each
page, for each window width, to build/browser/. `make test` does not run it: it needs a browser.

    .venv/bin/python tests/browser.py --saved

runs no cells, and checks the outputs that are saved in the notebooks.
"""

import argparse
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from helpers.pages import ROOT, copy_repository

PICTURES = ROOT / "build" / "browser"
# How many pandas tables and matplotlib figures must be on the page, at least.
NOTEBOOKS = {
    "hello.world.sagemaker/helloworld-example.ipynb": (0, 0),
    "pt.grpc.sagemaker/hetero-pytorch-mnist.ipynb": (6, 7),
    "tf.data.service.sagemaker/hetero-tensorflow-restnet50.ipynb": (5, 6),
}
WIDTHS = (1200, 1440)  # of the window, in pixels
MINUTES = 10  # for one notebook
TRACKER = "@jupyterlab/notebook-extension/tracker.jupyterlab-settings"


def start_lab(folder: Path, settings: Path) -> tuple[subprocess.Popen, str]:
    """Start JupyterLab in `folder`; return its process and address, with {} for a path."""
    (settings / TRACKER).parent.mkdir(parents=True)
    # Put all cells on the page, not only those in sight.
    (settings / TRACKER).write_text(json.dumps({"windowingMode": "none"}))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    token = secrets.token_hex(16)
    lab = subprocess.Popen(
        [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={port}"],
        cwd=folder,
        env={
            **os.environ,
            "JUPYTER_TOKEN": token,
            "JUPYTERLAB_SETTINGS_DIR": str(settings),
            "SAGEMAKER_TARGET": "local",
        },
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    address = f"http://127.0.0.1:{port}/{{}}?token={token}"
    for _ in range(300):
        try:
            urllib.request.urlopen(address.format("api/status")).close()
            return lab, address
        except urllib.error.URLError:
            time.sleep(0.2)
    lab.kill()
    sys.exit("JupyterLab did not start within a minute: `make lab` shows why.")


def open_notebook(page, address: str) -> None:
    """Open a notebook, and wait until its kernel is ready."""
    page.goto(address)
    page.get_by_text("Kernel status: Idle").first.wait_for(state="attached", timeout=60_000)
    page.wait_for_timeout(3_000)


def run_all(page) -> None:
    """Run all cells, and wait for the end."""
    prompts = "[...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')]"
    for _ in range(5):  # JupyterLab does nothing while the kernel is not connected
        page.wait_for_timeout(3_000)
        page.locator(".lm-MenuBar-itemLabel", has_text="Run").first.click()
        page.get_by_text("Run All Cells", exact=True).click()
        page.wait_for_timeout(3_000)
        if page.evaluate(f"{prompts}.some(prompt => /[*\\d]/.test(prompt.innerText))"):
            break
    page.wait_for_function(
        f"""() => {prompts}.every(prompt => /\\[\\d+\\]/.test(prompt.innerText))
            || document.querySelector('[data-mime-type="application/vnd.jupyter.error"]')""",
        timeout=MINUTES * 60_000,
        polling=500,
    )
    page.wait_for_timeout(2_000)  # for the last figures to be drawn


def count(page) -> dict[str, int]:
    """Count what is on the page."""
    return page.evaluate(
        """() => {
            const count = selector => document.querySelectorAll(selector).length;
            const images = [...document.querySelectorAll('.jp-Notebook img')];
            return {
                errors: count('[data-mime-type="application/vnd.jupyter.error"]'),
                tables: count('.jp-OutputArea table'),
                figures: count('.jp-OutputArea .jp-RenderedImage img'),
                missing: images.filter(image => !image.complete || !image.naturalWidth).length,
            };
        }"""
    )


def too_wide(page) -> list[str]:
    """Return the outputs wider than their cells: their width, the cell's width, and a line of each.

    Text is measured before the page wraps it. Warnings of libraries are prose, and may be wrapped.
    """
    return page.evaluate(
        """() => [...document.querySelectorAll('.jp-OutputArea-output')]
            .filter(output => output.dataset.mimeType !== 'application/vnd.jupyter.stderr')
            .flatMap(output => [...output.querySelectorAll('pre, table')].map(shown => {
                const isText = shown.parentElement === output;
                const before = shown.style.whiteSpace;
                if (isText) shown.style.whiteSpace = 'pre';
                const width = shown.scrollWidth;
                shown.style.whiteSpace = before;
                const room = output.clientWidth;
                const line = shown.innerText.split('\\n').reduce(
                    (a, b) => isText && b.length > a.length ? b : a);
                return width > room ? `${width} of ${room} px: ${line}` : '';
            })).filter(text => text)"""
    )


def take_picture(page, width: int, path: Path) -> None:
    """Make the window as high as the notebook, and take a picture of it."""
    height = page.evaluate(
        "Math.max(...[...document.querySelectorAll('.jp-WindowedPanel-outer')]"
        ".map(panel => panel.scrollHeight))"
    )
    page.set_viewport_size({"width": width, "height": min(height + 200, 16_000)})
    page.wait_for_timeout(1_000)
    page.evaluate(
        "document.querySelectorAll('.jp-WindowedPanel-outer').forEach(p => p.scrollTo(0, 0))"
    )
    page.wait_for_timeout(1_000)
    page.screenshot(path=path)


def main() -> None:
    """Run the notebooks; fail if something is missing on their pages, or is too wide."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--saved", action="store_true", help="check the saved outputs")
    saved = parser.parse_args().saved
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        sys.exit("Install playwright: .venv/bin/python -m pip install playwright==1.65.2")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if not chromium:
        sys.exit("Install chromium (Debian, Ubuntu: apt install chromium).")
    PICTURES.mkdir(parents=True, exist_ok=True)
    failed = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that JupyterLab ends, too
    with tempfile.TemporaryDirectory() as copy, tempfile.TemporaryDirectory() as settings:
        copy_repository(Path(copy))  # JupyterLab writes into the notebooks that it has open
        if not saved:
            forget = [sys.executable, "-m", "nbconvert", "--clear-output", "--inplace", *NOTEBOOKS]
            subprocess.run(forget, cwd=copy, check=True)
        lab, address = start_lab(Path(copy), Path(settings))
        try:
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(
                    executable_path=chromium, args=["--no-sandbox"]
                )
                for notebook, (tables, figures) in NOTEBOOKS.items():
                    page_name = Path(notebook).stem  # each notebook has its own workspace
                    page = browser.new_page(viewport={"width": WIDTHS[0], "height": 1000})
                    open_notebook(
                        page, address.format(f"lab/workspaces/{page_name}/tree/{notebook}")
                    )
                    if not saved:
                        run_all(page)
                    found, wide = count(page), []
                    print(f"{notebook}: {found}")
                    for width in WIDTHS:
                        page.set_viewport_size({"width": width, "height": 1000})
                        page.wait_for_timeout(1_000)
                        for line in too_wide(page):
                            wide.append(line)
                            print(f"  too wide in a window of {width} px: {line}")
                        picture = PICTURES / f"{page_name}-{width}.png"
                        take_picture(page, width, picture)
                        print(f"  {picture.relative_to(ROOT)}")
                    page.close()
                    few = found["tables"] < tables or found["figures"] < figures
                    if found["errors"] or found["missing"] or few or wide:
                        failed.append(notebook)
                browser.close()
        finally:
            lab.send_signal(signal.SIGTERM)  # ends its kernels, and so their jobs
            lab.wait(30)
    if failed:
        sys.exit(f"Wrong outputs in {failed}: see above, and {PICTURES.relative_to(ROOT)}/")


if __name__ == "__main__":
    main()
