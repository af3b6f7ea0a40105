"""Keep the ranks of a training in step, with tf.distribute or Horovod. Copy this folder."""

from ranks.collectives import HorovodRanks, TensorFlowRanks, connect

__version__ = "2026-11-26"  # CHANGES.md says what else to change when you update your copy
__all__ = ["HorovodRanks", "TensorFlowRanks", "connect"]
