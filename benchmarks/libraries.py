"""Try the loader with the libraries in libraries/, and print the table of docs/moving.md.

    .venv/bin/python benchmarks/libraries.py [NAME ...]

Each script there runs as it is without the lines that end in `# added` (plain), and with them but
without those that end in `# plain`: once without data hosts, and once with two. The batches of the
three runs are compared: see `compare`. uv installs what a script's first lines name: some GB.
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
# A data host that notes how many samples it has prepared.
HOST = """
import os, feed.server, feed.worker, feed.iterate
def noting(function, count):
    def noted(*arguments):
        result = function(*arguments)
        os.write(noted_in, b"%d\\n" % count(arguments, result))
        return result
    return noted
noted_in = os.open("prepared-PORT", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
os.set_inheritable(noted_in, True)
feed.worker.prepare = noting(feed.worker.prepare, lambda given, _: len(given[2].indices))
feed.iterate.gather = noting(feed.iterate.gather, lambda _, made: len(made[0]))
feed.server.main()
"""


def main() -> None:
    """Run the scripts, print a row for each, and exit with 1 if the batches of one differ."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    scripts = {
        path.stem: path for path in sorted(FOLDER.glob("*.py")) if "# ///" in path.read_text()
    }
    parser.add_argument("names", metavar="NAME", nargs="*", help=f"default: {' '.join(scripts)}")
    failed = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that `running` ends the processes
    print("| Library | Lines | What to mind | Compared |\n|---|---|---|---|", flush=True)
    for name in parser.parse_args().names or scripts:
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
    for place, text in ((plain, without(source, "added")), (here, moved), (there, moved)):
        shutil.copytree(CODE / "feed", place / "feed")
        shutil.copy(FOLDER / "batches.py", place)
        (place / "train.py").write_text(text)
    ports = [free_port(), free_port()]
    addresses = [f"127.0.0.1:{port}" for port in ports]
    with contextlib.ExitStack() as stack:
        runs = [(plain, ""), (here, ""), (there, ",".join(addresses))]
        for port, address in zip(ports, addresses, strict=True):
            code = HOST.replace("PORT", str(port))
            stack.enter_context(running(there, python, "-c", code, address, "--workers", "1"))
        for place, hosts in runs:
            with running(place, python, "train.py", HETERO_DATA_HOSTS=hosts) as process:
                if process.wait(SECONDS):
                    return [f"{place.name}: failed", *said(place)[-30:]]
    problems = compare(*(batches_of(place) for place in (plain, here, there)))
    problems += [f"{line}" for line in said(there) if "not compared" in line]
    needed = len({(batch["epoch"], n) for batch in batches_of(there) for n in batch["numbers"]})
    by_host = [sum(map(int, (there / f"prepared-{port}").read_text().split())) for port in ports]
    print(f"{script.stem}: {needed} samples, prepared by data hosts: {by_host}", file=sys.stderr)
    if not all(by_host) or sum(by_host) < needed:
        problems.append("not all samples were prepared by the two data hosts")
    return problems


@contextlib.contextmanager
def running(folder: Path, *command: str, **environment: str) -> Iterator[subprocess.Popen]:
    """Run a program in a folder, and kill it and its processes at the end."""
    quiet = {"HETERO_TOKEN": TOKEN, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    with open(folder / "said", "a") as file:
        process = subprocess.Popen(
            command, cwd=folder, env=os.environ | quiet | environment,
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
    return re.sub(rf"^.*  # {mark}$\n", "", source, flags=re.M)


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
    if sum(count > 1 for count in values.values()) > len(values) / 4:
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
