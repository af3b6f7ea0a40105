"""The settings module of a training script, which changes them: see test_inherit.py."""

import dataclasses
import enum
import logging
import threading
from collections import OrderedDict, namedtuple
from pathlib import Path

import numpy as np

SIZE = 8
TRAIN = {"IM_SIZE": 224}
rng = np.random.default_rng(0)


class Config:
    size = 8
    Pair = namedtuple("Pair", "one other")

    def area(self) -> int:
        return 8


def load(index: int) -> int:
    return 8


class Nodes(dict):
    frozen = False


nodes = Nodes(size=8)


def of_nodes(given: Nodes = nodes) -> int:
    return given["size"]


class Mode(enum.Enum):
    TRAIN = 1
    TEST = 2


mode, log, folder = Mode.TRAIN, logging.getLogger("train"), Path("train")
known, pair = {"a", "b", *map(str, range(9))}, (nodes, [nodes, Config])


@dataclasses.dataclass(slots=True)
class Slots:
    size: int = 8


small, large = Slots(1), Slots(2)
current, pair_of_configs, others = small, (small, [small]), {}
slots, order, key, local = Slots(), OrderedDict(a=1, b=2), object(), threading.local()
table, axes, nothing, local.x = {key: 0}, {"axes": 1}, (), 1


def size_of(given: Slots = small) -> int:
    return given.size
