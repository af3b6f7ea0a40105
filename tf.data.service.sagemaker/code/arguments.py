"""The job's hyperparameters, which launcher.py, train_data.py and train_dnn.py read.

This file uses only the standard library, because the launcher imports it.
"""

import argparse
from collections.abc import Callable


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return a function that reads a whole number and checks its limits."""

    def read(text: str) -> int:
        number = int(text) if text.lstrip("-").isdecimal() else None
        if number is None or number < least or (most is not None and number > most):
            limits = f"{least} or more" if most is None else f"from {least} to {most}"
            raise argparse.ArgumentTypeError(f"must be {limits}, not {text}")
        return number

    return read


def parser(fail: Callable[[str], None]) -> argparse.ArgumentParser:
    """Return the hyperparameters' parser. For a wrong value it calls `fail` with a message."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.error = fail
    add = parser.add_argument
    add("--data-mode", choices=["local", "service", "synthetic"], help="where samples come from")
    add("--processes-per-host", type=whole(1), help="ranks on each dnn host; default: one per GPU")
    ways = ["tf.distribute", "horovod"]
    add("--distribution", choices=ways, default=ways[0], help="what keeps the ranks in step")
    add("--model", default="resnet50", help="resnet50; small: for CPUs")
    add("--files", default="training/*", help="channel and names of the TFRecord files")
    add("--augment", type=whole(0), default=1, help="fineness of the augmentation; 0: none")
    add("--batch-size", type=whole(1), default=128, help="samples per rank and step")
    add("--max-steps", type=whole(1), default=100)
    add("--lr", type=float, default=0.001, help="learning rate of Adam for one rank's batch")
    add("--warmup-steps", type=whole(0), default=20, help="steps until --lr is reached")
    add("--seed", type=whole(0, 2**32 - 1), default=0)
    add("--log-every", type=whole(1), default=10, help="steps between two log lines")
    add("--checkpoint-every", type=whole(1), default=100, help="steps between two checkpoints")
    return parser
