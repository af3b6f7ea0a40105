"""Every command and every piece of Python in README files, docs/ and workshop.md is tested.

Commands that need neither an account nor much time run here; the others are marked `# needs AWS`,
or named below with the reason. Python is run by test_readme.py and test_workshop.py.
"""

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.pages import MARK, NOTEBOOKS, PYTHON, ROOT
from shared import measured
from shared.advisor import prediction, verdict

pytestmark = pytest.mark.quick
PATTERNS = "**/README.md", "*.sagemaker/*.md", "docs/*.md", "workshop.md"
PAGES = sorted({page for pattern in PATTERNS for page in ROOT.glob(pattern)})
PAGES = [
    page
    for page in PAGES
    if not re.search(r"(^|/)(\.|build/)", str(page.relative_to(ROOT)))  # .venv, and what make makes
]
WHEN = (ROOT / "docs" / "when.md").read_text()
NO_CODE = ("text", "diff", "mermaid")
FIGURE = re.search(r"\.venv/bin/python .* --figure \S*images/\S*png", WHEN)[0]
NAMED = {
    FIGURE: "overwrites a figure; tests/shared/test_advisor.py compares what it draws",
    "make demo": "runs the notebooks, which these tests run too (PyTorch's on less data)",
    "make test": "runs these tests",
    "make bench": "takes long; benchmarks/README.md says what it checks itself",
    ".venv/bin/python benchmarks/gpu.py": "takes long; tests/benchmarks/test_gpu.py runs it",
    "HETERO_TOKEN=secret python -m feed.server 127.0.0.1:7712": "runs until it is stopped; "
    "helpers/data_hosts.py starts it in this way",
    "UV_NO_CACHE=1 scripts/setup.sh": "makes the environment that these tests run in",
    "pip download --only-binary=:all: --platform manylinux2014_x86_64 --python-version 3.12 "
    "-d code -r code/requirements.txt": "needs a package index; test_readme.py has such a wheel",
}
# Messages of AWS, pip, Python, torch and SDK v2 in the table of docs/troubleshooting.md.
OTHERS_WORDS = [
    "CapacityError",
    "It is possible that dataloader's workers are out of shared memory.",
    "ResourceLimitExceeded",
    "You must specify a region.",
    "No matching distribution found for",
    "No space left on device",
    "terminate called without an active exception",
    "Could not find callback with key=",
    "'>' not supported between instances of 'NoneType' and 'int'",
]


def blocks(page: Path) -> list[tuple[str, str]]:
    """Return a page's code blocks, fenced or indented, each with its language or ""."""
    text = page.read_text()
    fence = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.M | re.S)
    fenced = [(language, code) for _, language, code in fence.findall(text)]
    indented = re.findall(r"(?<=\n\n)((?: {4}\S.*\n|\n(?= {4}))+)", fence.sub("", text))
    return fenced + [("", code) for code in indented]


def commands() -> list[str]:
    """Return all lines that are for a terminal."""
    return [
        " ".join(line.split())
        for page in PAGES
        for language, code in blocks(page)
        if language not in ("python", *NO_CODE)
        for line in re.sub(r"\\\n\s*", "", code).splitlines()
        if line.strip()
    ]


def test_python_is_run_by_a_test_or_needs_aws():
    found = {code for page in PAGES for language, code in blocks(page) if language == "python"}
    assert found >= PYTHON and len(found) > 8
    assert not [code for code in found - PYTHON if MARK not in code]


@pytest.mark.parametrize("command", sorted({*commands()}))
def test_command_runs_or_needs_aws_or_is_named(command: str, tmp_path: Path):
    python, *arguments = shlex.split(command, comments=True)
    if MARK not in command and command not in NAMED:
        assert python == ".venv/bin/python", "make it run here, or add it to NAMED with the reason"
        elsewhere = {**os.environ, "JUPYTER_DATA_DIR": str(tmp_path)}  # where kernels are installed
        subprocess.run(
            [sys.executable, *arguments], cwd=ROOT, env=elsewhere, check=True, timeout=60
        )
    elif python == "make":
        assert re.search(rf"^{arguments[0]}:.*## ", (ROOT / "Makefile").read_text(), re.M)


def test_named_commands_are_in_use():
    assert {*NAMED} <= {*commands()}


def test_flowchart_says_the_same_as_the_advisor():
    [chart] = [
        code for language, code in blocks(ROOT / "docs" / "when.md") if language == "mermaid"
    ]
    numbers = [int(number) for number in re.findall(r"(\d+) %", chart)]
    expected = [measured.WORTH_PERCENT, measured.BUSY_PERCENT, *2 * [prediction.NEAR_PERCENT]]
    assert numbers == expected
    edges = re.findall(r"(\w)(?:\[.*?\])? -->\|(yes|no)\| (\w)(?:\[(.*?)\])?", chart)
    asked = {start for start, *_ in edges}
    verdicts = {re.split("[:,]", text)[0] for _, _, end, text in edges if end not in asked}
    assert verdicts == {
        verdict.STAY, verdict.SCALE_UP, verdict.GO, verdict.ELSEWHERE, verdict.ON_GPU
    }  # fmt: skip


def texts_of_the_code() -> str:
    """Return all strings in the code, with ... for the values in f-strings."""
    texts = [path.read_text() for path in (ROOT / "scripts" / "setup.sh", *NOTEBOOKS)]
    for folder in ("shared", "pt.grpc.sagemaker/code", "tf.data.service.sagemaker/code"):
        for path in (ROOT / folder).glob("**/*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    texts.append("".join(getattr(part, "value", "...") if
                                         isinstance(part, ast.Constant) else "..."
                                         for part in node.values))  # fmt: skip
                elif isinstance(node, ast.Constant):
                    texts.append(str(node.value))
    return "\n".join(texts)


def test_messages_in_the_table_of_troubles_are_those_of_the_code():
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    messages = re.findall(r"^\| `(.+?)`", page, re.M)
    assert len(messages) > 10
    printed = texts_of_the_code() + "\n".join(OTHERS_WORDS)
    for message in messages:
        for piece in re.split(r"\.\.\.|\d+|[()]", message):  # the code may insert values here
            assert piece.strip() in printed, message
