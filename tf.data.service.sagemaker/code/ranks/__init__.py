"""How the ranks of a training keep in step, by tf.distribute or by Horovod: copy this folder."""

from ranks.collectives import HorovodRanks, TensorFlowRanks, connect

__version__ = "2026-11-25"  # CHANGES.md says what to change beside a new copy
__all__ = ["HorovodRanks", "TensorFlowRanks", "connect"]
