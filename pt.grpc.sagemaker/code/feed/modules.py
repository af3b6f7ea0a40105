"""Which modules are the script's own, and where they are: those that are not installed."""

import contextlib
import functools
import os
import sys
import sysconfig
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from feed.wire import MAIN

INSTALLED = *map(sysconfig.get_path, ("stdlib", "platstdlib")), "/site-packages/", "/dist-packages/"
APART = *MAIN, "feed", "hetero", "ranks", "service"  # left out of these; the script itself is added
globals_there: dict[str, Any] = {"__name__": "__main__"}  # the script's, in a data host's process


def own_modules() -> dict[str, dict[str, Any]]:
    """Return the variables of the script, and of each loaded module that is not installed."""
    own = {"__main__": vars(sys.modules["__main__"]) | globals_there}
    for name, module in sys.modules.copy().items():
        if isinstance(module, ModuleType) and name.partition(".")[0] not in APART:
            file = str(vars(module).get("__file__"))
            if file.endswith(".py") and not is_installed(name, file):
                own[name] = vars(module)
    return own


def imported_in(function: FunctionType) -> set[str]:
    """Return the loaded modules that a function may import when it is called."""
    names = function.__code__.co_names
    first = [name for name in names if name in sys.modules]
    return {*first, *(f"{of}.{name}" for of in first for name in names)} & sys.modules.keys()


def is_installed(name: str, file: str) -> bool:
    """Return whether a module's file is where packages have been installed."""
    if any(part in file for part in INSTALLED):
        return True
    parents, levels = Path(file).parents, name.count(".") + file.endswith("__init__.py")
    return has_packages(str(parents[min(levels, len(parents) - 1)]))


@functools.cache
def has_packages(folder: str) -> bool:
    """Return whether pip has installed packages into a folder that is not of the script."""
    with contextlib.suppress(OSError):
        is_its = any(os.path.samefile(folder, its) for its in {os.getcwd(), *folders_of_script()})
        return not is_its and any(name.endswith(".dist-info") for name in os.listdir(folder))
    return False


def folders_of_script() -> list[Path]:
    """Return the folder that the script was started in, as far as that is known, and its own."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    if not script:
        return []
    script = Path(script).resolve()
    given = Path(sys.argv[0])  # such as tools/train.py, which python -m hetero has passed on
    is_given = not given.is_absolute() and script.parts[-len(given.parts) :] == given.parts
    return [script.parents[len(given.parts) - 1 if is_given else 0], script.parent]


def paths_of_script() -> list[str]:
    """Return the entries of sys.path without installed packages, relative to where it starts."""
    if not (folders := folders_of_script()):
        return []
    entries = [Path(entry).resolve() for entry in sys.path if entry and os.path.isdir(entry)]
    own = [e for e in entries if not any(part in f"{e}/" for part in INSTALLED)]
    return [os.path.relpath(entry, folders[0]) for entry in own if entry != folders[0]]
