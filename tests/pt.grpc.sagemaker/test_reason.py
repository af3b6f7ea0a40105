"""What the runtime says about a failed process: the scripts in failing/, and what is said of each.

There, "..." stands for any text. Those in scripts.txt run each time. The others take seconds each,
so only the thorough test runs them; another test reads their output from printed/. Those in
more.txt need packages that nothing else here needs, so they run in an environment of their own, and
those in lost.txt have not failed by themselves, but lost another rank. To store the output again:

    PYTHONPATH=tests:pt.grpc.sagemaker/code python tests/pt.grpc.sagemaker/test_reason.py
"""

import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import pytest

from hetero.process import ENVIRONMENT, LINE_END, REMEMBERED, shortened
from hetero.reason import reason

MORE = ["hydra-core==1.3.8", "loguru==0.7.3", "wandb==0.31.0"]


def sections(name: str) -> dict[str, tuple[str, str]]:
    """Read a file in failing/: the script and the sentence, by the title."""
    text = (Path(__file__).parent / "failing" / f"{name}.txt").read_text()
    found = re.findall(r"^=== (.*)\n((?:.*\n)*?)--- (.*)\n", text, re.M)
    return {title: (script, sentence) for title, script, sentence in found}


INCLUDED = sections("included")
SCRIPTS, FRAMEWORKS, MORE_SCRIPTS, LOST = map(sections, ("scripts", "frameworks", "more", "lost"))
SLOW = {**FRAMEWORKS, **MORE_SCRIPTS, **LOST}


def stored(name: str) -> Path:
    """Return the file with a slow script's output."""
    return Path(__file__).parent / "printed" / (re.sub(r"[^\w.]+", "-", name) + ".txt")


def python_with_more(folder: Path) -> str:
    """Make an environment with this one's packages and MORE; return its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python, packages = folder / "bin" / "python", sysconfig.get_path("purelib")
    [site] = folder.glob("lib/python*/site-packages")
    (site / "these.pth").write_text(packages)
    install = [sys.executable, "-m", "pip", "--python", python, "install", "-q", *MORE]
    subprocess.run(install, check=True)
    return str(python)


def printed(script: str, folder: Path, python: str = sys.executable) -> str:
    """Run a script as train.py; return its output, and its exit status as the last line."""
    script = re.sub(r"#include (\w+)\n", lambda line: INCLUDED[line[1]][0], script)
    (folder / "train.py").write_text(script)
    # PYTHONUNBUFFERED as in AWS's images, the others as the runtime starts each process.
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **ENVIRONMENT}
    command, pipes = [python, "train.py"], {"stdout": -1, "stderr": subprocess.STDOUT}
    done = subprocess.run(command, cwd=folder, env=environment, **pipes, timeout=120)
    return f"{done.stdout.decode()}\n{done.returncode}\n"


def check(name: str, output: str) -> None:
    """Check what the runtime says about this output."""
    *lines, status = LINE_END.split(output.strip().encode())
    lines = [shortened(line).decode() for line in lines if line][-REMEMBERED:]
    why, was_cut_off = reason(lines)
    _, sentence = {**SCRIPTS, **SLOW}[name]
    pattern = re.escape(sentence).replace(re.escape("..."), ".*")
    assert re.fullmatch(pattern, f"{status.decode()}{why}"), why
    assert was_cut_off == (name in LOST)


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_reason_is_what_has_ended_the_process(name: str, tmp_path: Path):
    check(name, printed(SCRIPTS[name][0], tmp_path))


@pytest.mark.parametrize("name", SLOW)
def test_the_reason_is_found_in_the_stored_output_of_frameworks(name: str):
    check(name, stored(name).read_text())


@pytest.fixture(scope="module")
def more(tmp_path_factory: pytest.TempPathFactory) -> str:
    return python_with_more(tmp_path_factory.mktemp("more"))


@pytest.mark.thorough
@pytest.mark.parametrize("name", SLOW)
def test_frameworks_still_print_what_is_stored(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
):
    python = request.getfixturevalue("more") if name in MORE_SCRIPTS else sys.executable
    check(name, printed(SLOW[name][0], tmp_path, python))


PEER = "Traceback (most recent call last):\nRuntimeError: Connection closed by peer"
AWS = "Exception during training: no number\nTraceback (most recent call last):\n"
AWS += '  File "train.py", line 3, in <module>\n    main()\nValueError: no number\n'


@pytest.mark.parametrize(
    "output, written, expected, was_cut_off",
    [
        ("step=1", "No usable samples.\n", ": No usable samples", False),
        ("", AWS, ": Exception during training: no number | Traceback (most recent call last): "
         "ValueError: no number", False),  # as AWS's examples write it
        (PEER, "Rank 1 is gone.", ": Rank 1 is gone", True),
        ("", PEER, ": Traceback (most recent call last): RuntimeError: ...", True),
        # Another rank of this host has lost this one, and then written over what this one wrote.
        (AWS, PEER, ": ValueError: no number", False),
        (AWS, " \n--\n", ": ValueError: no number", False),
        ("", "x" * 9999, ": " + "x" * 800, False),
    ],
)  # fmt: skip
def test_what_the_script_itself_has_written_is_the_reason(
    output: str, written: str, expected: str, was_cut_off: bool
):
    why, cut_off = reason(output.splitlines(), written)
    pattern = re.escape(expected).replace(re.escape("..."), ".*")
    assert re.fullmatch(pattern, why) and cut_off == was_cut_off


def main() -> None:
    """Store the slow scripts' output, or of those named, without this machine's folders."""
    with tempfile.TemporaryDirectory() as environment:
        more = python_with_more(Path(environment))
        for name in sys.argv[1:] or SLOW:
            python = more if name in MORE_SCRIPTS else sys.executable
            with tempfile.TemporaryDirectory() as folder:
                output = printed(SLOW[name][0], Path(folder), python).replace(
                    folder, "/opt/ml/code"
                )
            output = re.sub(r"[\w/.]+/site-packages/", "/site-packages/", output)
            output = re.sub(r"[\w/.]+(/lib/python3\.\d+/|/bin/python)", r"/usr\1", output)
            stored(name).write_text(output)


if __name__ == "__main__":
    main()
