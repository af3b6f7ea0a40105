"""A module that has imported a variable from another one, before a script changes it."""

from helpers.settings import nodes


def size() -> int:
    return nodes["size"]
