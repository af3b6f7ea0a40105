"""How the ranks of a training keep in step, by tf.distribute or by Horovod: copy this folder."""

from ranks.collectives import HorovodRanks, TensorFlowRanks, connect

__all__ = ["HorovodRanks", "TensorFlowRanks", "connect"]
