"""The command line: python -m hetero [options] SCRIPT [arguments]."""

import argparse
import os
import sys
from collections.abc import Callable

from hetero.job import fail, run
from hetero.topology import hyperparameters

USAGE = "python -m hetero [options] SCRIPT [arguments]; SCRIPT is a .py file, or -m MODULE"


def main(words: list[str] | None = None) -> None:
    """Run this host's part of the job; exit with status 1 if the job fails or an option is wrong.

    words: options, SCRIPT and arguments; by default those of the command line. The job's
        hyperparameters are appended as `--name value`, so they override the arguments.
    """
    words = sys.argv[1:] if words is None else words
    options = {
        "--train-group": {"default": "dnn_group", "help": "the training group (dnn_group)"},
        "--data-group": {"action": "append", "help": "a group of data hosts (data_group)"},
        "--serve": {"metavar": "SCRIPT.py", "help": "what data hosts run (-m feed.server)"},
        "--needed": {"choices": ["first"], "help": "fail without the first data host's server"},
        "--ranks": {"type": number(1), "help": "per training host (one for each GPU)"},
        "--spare-cores": {"type": number(0, auto=None), "help": "vCPUs of training hosts for data"},
    }
    parser = argparse.ArgumentParser(prog="hetero", usage=USAGE, allow_abbrev=False)
    parser.error = lambda sentence: fail(f"python -m hetero: {sentence}.")
    for name, settings in options.items():
        parser.add_argument(name, **settings)
    end = 0  # of our options; arguments after SCRIPT are the script's
    while end < len(words) and words[end].partition("=")[0] in options:
        end += 1 if "=" in words[end] else 2
    end += words[end : end + 1] in (["-h"], ["--help"])
    given = parser.parse_args(words[:end])

    serve = command(["-m", "feed.server"]) if os.path.isdir("feed") else []
    run(
        train=[*command(words[end:]), *hyperparameters()],
        serve=serve if given.serve is None else command([given.serve]),
        train_group=given.train_group,
        data_groups=given.data_group or ["data_group"],
        ranks=given.ranks,
        spare_cores=given.spare_cores,
        needed=given.needed or "",
    )


def number(least: int, **words: int | None) -> Callable[[str], int | None]:
    """Return an argparse type: an integer of at least `least`, or one of `words`."""

    def read(text: str) -> int | None:
        if text not in words and not (text.isdecimal() and int(text) >= least):
            these = " or ".join([f"a whole number >= {least}", *words])
            raise argparse.ArgumentTypeError(f"must be {these}, not {text!r}")
        return words[text] if text in words else int(text)

    return read


def command(script: list[str]) -> list[str]:
    """Return the command that runs a script or module with its arguments; refuse anything else."""
    if not script:
        fail(f"No script is given: {USAGE}.")
    name, *arguments = script
    if name.startswith("--"):
        fail(f"{name!r} is not an option: {USAGE}.")
    if name != "-m" and not name.endswith(".py"):
        fail(f"{name!r} is not a script that can be run: {USAGE}.")
    if name == "-m" and not arguments:
        fail(f"No module is given: {USAGE}.")
    if name != "-m" and not os.path.isfile(name):
        fail(f"There is no {name} in the folder that the job starts in.")
    return [sys.executable, *script]
