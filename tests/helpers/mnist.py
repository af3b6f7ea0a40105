"""Small MNIST files for tests of the PyTorch example."""

import struct

import numpy as np


def idx(array: np.ndarray) -> bytes:
    """Encode an array as uint8 in MNIST's file format (http://yann.lecun.com/exdb/mnist)."""
    header = struct.pack(f">I{array.ndim}I", 0x0800 + array.ndim, *array.shape)
    return header + array.astype(np.uint8).tobytes()
