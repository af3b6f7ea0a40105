"""Small MNIST files for tests of the PyTorch example."""

import struct

import numpy as np


def idx(array: np.ndarray) -> bytes:
    """An array as uint8 in the format of MNIST's files (http://yann.lecun.com/exdb/mnist)."""
    header = struct.pack(f">I{array.ndim}I", 0x0800 + array.ndim, *array.shape)
    return header + array.astype(np.uint8).tobytes()
