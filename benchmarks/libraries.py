"""Try the loader with the libraries in libraries/, and print the table of docs/moving.md.

    .venv/bin/python benchmarks/libraries.py [NAME ...]

Lines that end in `# added` are those of the move, and lines that end in `# plain` those that they
replace. A script runs without the former, and without the latter twice: without data hosts, and
with two. Their batches are compared: see `compare`. A line that ends in `# check` runs in the moved
script, too, but is not counted. uv installs what the scripts need, which are some GB.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from common import CODE, TOKEN, free_port

FOLDER = Path(__file__).with_suffix("")
UV = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
SECONDS = 300  # for one run


def main() -> None:
    """Run the scripts, print a row for each, and exit with 1 if the batches of one differ."""
    paths = [path for path in sorted(FOLDER.glob("*.py")) if "# ///" in path.read_text()]
    scripts = {path.stem: path for path in paths}
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("names", metavar="NAME", nargs="*", help=", ".join(scripts))
    names, failed = parser.parse_args().names or [*scripts], []
    if unknown := {*names} - {*scripts}:
        parser.error(f"there is no script named {', '.join(unknown)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that `running` ends the processes
    print("| Library | Lines | What to mind | Compared |\n|---|---|---|---|", flush=True)
    for name in names:
        started, source = time.monotonic(), scripts[name].read_text()
        with tempfile.TemporaryDirectory() as folder:
            problems = try_out(scripts[name], source, Path(folder))
        print(f"{name}: {time.monotonic() - started:.0f} s", *problems, sep="\n  ", file=sys.stderr)
        failed += problems
        if not problems:
            print(row(source), flush=True)
    sys.exit(bool(failed))


def try_out(script: Path, source: str, folder: Path) -> list[str]:
    """Run a script in three ways; return what is wrong."""
    subprocess.run([UV, "sync", "-q", "--script", script], check=True)
    found = subprocess.run([UV, "python", "find", "--script", script], stdout=subprocess.PIPE)
    python, moved = found.stdout.decode().strip(), without(source, "plain")
    plain, here, there = (folder / name for name in ("plain", "here", "there"))
    for place, text in ((plain, without(source, "added|check")), (here, moved), (there, moved)):
        shutil.copytree(CODE / "feed", place / "feed")
        for helper in ("batches.py", "host.py"):
            shutil.copy(FOLDER / helper, place)
        (place / "train.py").write_text(text)
    hosts = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    with contextlib.ExitStack() as stack:
        for host in hosts:
            stack.enter_context(running(there, python, "host.py", host, "--workers", "1"))
        for place, its in ((plain, ""), (here, ""), (there, ",".join(hosts))):
            with running(place, python, "train.py", HETERO_DATA_HOSTS=its) as process:
                if process.wait(SECONDS):
                    return [f"{place.name}: failed", *said(place)[-30:]]
    problems = compare(*(batches_of(place) for place in (plain, here, there)))
    problems += [line for line in said(there) if "not compared" in line]
    needed = len({(batch["epoch"], n) for batch in batches_of(there) for n in batch["numbers"]})
    by_host = [sum(map(int, (there / f"prepared-{host}").read_text().split())) for host in hosts]
    print(f"{script.stem}: {needed} samples, prepared by data hosts: {by_host}", file=sys.stderr)
    if not all(by_host) or sum(by_host) < needed:
        problems.append("not all samples were prepared by the two data hosts")
    return problems


@contextlib.contextmanager
def running(folder: Path, *command: str, **environment: str) -> Iterator[subprocess.Popen]:
    """Run a program in a folder, and kill it and its processes at the end."""
    ours = {"HETERO_TOKEN": TOKEN, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    ours |= {"HF_HOME": str(folder / "cache"), "YOLO_CONFIG_DIR": str(folder / "cache")}
    with open(folder / "said", "a") as file:
        process = subprocess.Popen(
            command, cwd=folder, env=os.environ | ours | environment,
            stdout=file, stderr=file, start_new_session=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def said(folder: Path) -> list[str]:
    return (folder / "said").read_text().splitlines()


def batches_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "batches").read_text().splitlines()]


def without(source: str, mark: str) -> str:
    """Return the script without the lines that end in this comment."""
    return re.sub(rf"^.*  # (?:{mark})$\n", "", source, flags=re.M)


def compare(plain: list[dict], here: list[dict], there: list[dict]) -> list[str]:
    """Return how the batches of the plain DataLoader, and without and with data hosts, differ.

    Samples, their order and what is fixed must be the same in all. Random values must be the same
    without and with data hosts, and new in each epoch.
    """
    problems = []
    for number, batch in enumerate(there):
        for name, other, what in [
            ("plain", plain, ("epoch", "numbers", "fixed")),
            ("without data hosts", here, ("epoch", "numbers", "fixed", "random")),
        ]:
            its = other[number] if number < len(other) else {}
            problems += [
                f"batch {number}: {key} is {batch[key]} with data hosts, {its.get(key)} {name}"
                for key in what
                if batch[key] != its.get(key)
            ]
    if not len(plain) == len(here) == len(there):
        problems.append(f"numbers of batches: {len(plain)}, {len(here)}, {len(there)}")
    if len({batch["epoch"] for batch in there}) < 2:
        problems.append("fewer than two epochs")
    pairs = (zip(b["numbers"], b["random"], strict=True) for b in there if b["random"])
    values = Counter(pair for batch in pairs for pair in batch)
    if sum(count > 1 for count in values.values()) > len(values) / 3:
        problems.append("random values are the same in several epochs")
    if not any(batch["fixed"] or batch["random"] for batch in there):
        problems.append("no values were compared")
    return problems[:10]


def row(source: str) -> str:
    """Return the script's row of the table, from its docstring and first dependency."""
    title = re.search(r'"""(\[.+)\n', source)[1]
    version = re.search(r'"[\w\[\],-]+==([\w.]+)"', source)[1]
    mind, compared = re.search(r"\nMind: (.+?)\nCompared: (.+?)\n+\"\"\"", source, re.S).groups()
    lines = len(re.findall(r"  # added$", source, re.M))
    title = re.sub(r"\)", f") {version}", title, count=1)
    cells = title, str(lines), " ".join(mind.split()), " ".join(compared.split())
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
