"""What a script has set around its Dataset: data hosts have it, too, or the Dataset is refused.

The script is helpers/inheriting.py. The reference is the plain DataLoader, whose forked workers
have everything that the script has set.
"""

import gc
import importlib
import itertools
import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from feed import compare, inherit, travel
from helpers import inheriting, settings
from helpers.data_hosts import CODE, PATHS, DataHost, environment_of, up
from helpers.inheriting import (
    INHERITED,
    NOT_CARRIED,
    NOT_REPEATABLE,
    RANDOM,
    REFUSED,
    a_host_that_fails,
)
from helpers.ordinary import ORDINARY, SILENT

pytestmark = pytest.mark.timeout(600)  # the script runs in the first test that asks for it


def run(folder: Path, wrap: str, count: int) -> dict[str, tuple[list, str]]:
    """Run all cases in a script of its own, with so many data hosts."""
    hosts = up(*[DataHost(2, environment={"PLACE": "there"}) for _ in range(count)])
    environment = environment_of(hosts) if hosts else os.environ | {"PYTHONPATH": PATHS}
    environment |= {"REMOVED": "no", "TMPDIR": str(folder)}
    command = [sys.executable, inheriting.__file__, folder / f"{wrap}-{count}", wrap]
    try:
        subprocess.run(command, env=environment, cwd=CODE, check=True)
    finally:
        for host in hosts:
            host.kill()
    return json.loads((folder / f"{wrap}-{count}").read_text())


class Ended(dict):
    """What the cases gave, by number of data hosts, or by one of RUNS; runs them when asked."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __missing__(self, key: Any) -> dict[str, tuple[list, str]]:
        self[key] = {}  # if it fails, it is not run again
        self[key] = run(self.folder, *RUNS.get(key, ("RemoteDataset", key)))
        return self[key]


RUNS = {"plain": ("plain", 0), "without variables": ("without variables", 1)}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return Ended(tmp_path_factory.mktemp("inherit"))


@pytest.mark.parametrize("hosts", [0, 1, 2])
@pytest.mark.parametrize("case", INHERITED)
def test_data_hosts_have_it(ended, case: Callable, hosts: int):
    assert ended[hosts][case.__name__][0] == ended["plain"][case.__name__][0]


@pytest.mark.parametrize(
    "name, hosts",
    [
        *itertools.product(REFUSED, [1, 2]),
        *itertools.product(NOT_CARRIED, ["without variables"]),
    ],
)
def test_what_they_lack_is_refused_with_both_values(ended, name: str, hosts: Any):
    [said] = ended[hosts][name][0]
    assert f"sample of Table than a worker of this script would: {NOT_CARRIED[name]}" in said
    assert "What data hosts have" in said


@pytest.mark.parametrize("hosts", [0, 1, 2])
@pytest.mark.parametrize("case", RANDOM)
def test_no_two_samples_get_the_same_random_numbers(ended, case: Callable, hosts: int):
    first, second = ended[hosts][case.__name__][0]
    assert len(first) == len(set(first)), len(set(first))
    assert case in NOT_REPEATABLE or first == second


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("case", ORDINARY)
def test_an_ordinary_dataset_is_not_refused(ended, case: Callable, hosts: int):
    gave, printed = ended[hosts][case.__name__]
    assert gave == ended["plain"][case.__name__][0]
    assert ("were not compared" in printed) == (case not in SILENT), printed


@pytest.mark.parametrize("hosts", [1, 2])
def test_an_error_says_that_it_works_here(ended, hosts: int):
    [said] = ended[hosts][a_host_that_fails.__name__][0]
    assert "OSError: image file is truncated" in said and "This host can prepare these" in said
    assert ended[0][a_host_that_fails.__name__] == ended["plain"][a_host_that_fails.__name__]


def test_nothing_is_set_where_nothing_differs(capsys):
    """The variables come back as other objects, as on a data host."""
    before = settings.nodes, settings.pair, settings.mode
    content, _ = inherit.variables(["helpers.settings", "helpers.settings_user"])
    inherit.set_variables(content)
    assert not capsys.readouterr().out
    after = settings.nodes, settings.pair, settings.mode
    assert all(one is other for one, other in zip(before, after, strict=True))


CONF = """
import dataclasses, threading
from collections import OrderedDict
from os import environ

@dataclasses.dataclass(slots=True)
class Slots:
    size: int = 8

class Config:
    def __init__(self, size): self.size = size

slots, order, key, local = Slots(), OrderedDict(a=1, b=2), object(), threading.local()
table, axes, nothing, local.x = {key: 0}, {"axes": 1}, (), 1
small, large = Config(1), Config(2)
current, size, pair, tracker = small, 8, None, None

def size_of(config=small): return config.size
"""
SCRIPT = """
import pickle, sys
sys.path.insert(0, sys.argv[1])
import conf, os
from feed import inherit
os.environ["OWN"] = sys.argv[2]
if sys.argv[2] == "script":
    conf.slots.size, conf.size, conf.axes["axes"] = 32, 32, ()
    conf.order.move_to_end("a"), conf.order.update(c=3)
    conf.current, conf.pair = conf.large, (conf.large, [conf.large])
    import absent
    conf.tracker = absent.Tracker()
    open("variables", "wb").write(inherit.variables(["conf"])[0])
else:
    inherit.set_variables(open("variables", "rb").read())
print(conf.slots, conf.size, conf.axes, conf.nothing, [*conf.order.items()], conf.table[conf.key])
print(conf.local.x, conf.current is conf.large, conf.pair[1][0] is conf.large, conf.size_of())
print(conf.small.size, conf.large.size, os.environ["OWN"] == sys.argv[2])
"""


def test_variables_are_set_as_the_script_has_set_them_and_others_stay(tmp_path: Path):
    """Where a module cannot be imported, only what comes from it is left out."""
    said = []
    for place, absent in [
        ("script", "class Tracker: pass"),
        ("host", "raise SystemExit(2)"),
    ]:
        (tmp_path / place).mkdir()
        (tmp_path / place / "conf.py").write_text(CONF)
        (tmp_path / place / "absent.py").write_text(absent)
        command = [sys.executable, "-c", SCRIPT, tmp_path / place, place]
        environment = os.environ | {"PYTHONPATH": PATHS}
        options = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
        said.append(subprocess.run(command, check=True, **options).stdout)
    first, _, rest = said[1].partition("\n")
    assert rest == said[0]
    names = "axes, conf.current, conf.order, conf.pair, conf.size, conf.slots"
    assert first == f"feed: set as in the training script: conf.{names}"


def test_processes_pickle_the_same_variables_alike():
    """Also a class that cannot be found by its name, as a namedtuple in a class body."""
    found, module = [], importlib.import_module("helpers.looked_at")
    for _ in range(2):
        with multiprocessing.get_context("fork").Pool(1) as pool:
            found.append(pool.apply(inherit.variables, ([module.__name__],)))
    assert found[0] == found[1] and b"Pair" in found[0][0]


def test_modules_that_pip_has_installed_are_not_the_script_s(tmp_path: Path, monkeypatch):
    """Also in a folder of another name, as with `pip install --target`."""
    for name in ("installed", "written"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}_module.py").touch()
        monkeypatch.syspath_prepend(tmp_path / name)
        importlib.import_module(f"{name}_module")
    (tmp_path / "installed" / "installed-1.0.dist-info").mkdir()
    own = travel.own_modules()
    assert "written_module" in own and "installed_module" not in own


class Importing:
    """Garbage that imports a module when it is collected, and leaves garbage of its kind."""

    def __init__(self, left: int):
        self.me, self.left = self, left

    def __del__(self) -> None:
        sys.modules[f"imported-{self.left}"] = sys
        if self.left:
            Importing(self.left - 1)


def test_modules_may_be_imported_while_all_are_looked_at():
    """As by the garbage collector, which may run a destructor at any time."""
    before, threshold = {*sys.modules}, gc.get_threshold()
    Importing(1000)
    gc.set_threshold(1)
    try:
        while "imported-0" not in sys.modules:
            assert "helpers.settings" in travel.own_modules()
    finally:
        gc.set_threshold(*threshold)
        for name in {*sys.modules} - before:
            del sys.modules[name]


RESIZE = """
import sys
import numpy as np
import torch
size, images = int(sys.argv[1]), torch.Generator().manual_seed(0)
image = torch.rand(1, 3, 9, 9, generator=images)
image = torch.nn.functional.interpolate(image, (300, 400), mode="bicubic").clamp(0, 1)
image = (255 * image).to(torch.uint8)
small = torch.nn.functional.interpolate(image, (size, size), mode="bilinear", antialias=True)
normalized = (small.float() / 255 - 0.45) / 0.22
sound = torch.fft.irfft(torch.fft.rfft(torch.rand(999, generator=images)) ** 2).log_softmax(0)
np.savez(sys.argv[2], small=small, normalized=normalized, sound=sound)
"""


def test_other_cpus_may_round_differently(tmp_path: Path):
    """The same resized image, as this CPU and an older one compute it."""
    found = []
    for capability in ("default", "avx2"):
        path = tmp_path / f"{capability}.npz"
        environment = os.environ | {"ATEN_CPU_CAPABILITY": capability}
        command = [sys.executable, "-c", RESIZE, "224", path]
        subprocess.run(command, env=environment, check=True)
        found.append(dict(np.load(path)))
    assert not compare.difference(*found, ("there", "here"))
    found[1]["small"] = found[1]["small"] + np.uint8(1)  # no rounding changes all pixels
    assert "['small'] is " in compare.difference(*found, ("there", "here"))
