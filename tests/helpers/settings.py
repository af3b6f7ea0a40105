"""The settings module of a training script, which changes them: see inheriting.py."""

import enum
import logging
from pathlib import Path

import numpy as np

SIZE = 8
TRAIN = {"IM_SIZE": 224}
rng = np.random.default_rng(0)


class Config:
    size = 8

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
