"""A module that data hosts cannot import."""

import os

if os.environ.get("PLACE") == "there":
    raise SystemExit(2)


class Tracker:
    pass
