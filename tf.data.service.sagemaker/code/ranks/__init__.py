"""How the ranks of a training keep in step: copy this folder, and of collectives.py one class."""

from ranks.collectives import HorovodRanks, TensorFlowRanks, connect

__all__ = ["HorovodRanks", "TensorFlowRanks", "connect"]
