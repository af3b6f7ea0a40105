"""Small MNIST files for tests of the PyTorch example."""

import gzip
import struct
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont


def idx(array: np.ndarray) -> bytes:
    """Encode an array as uint8 in MNIST's file format (http://yann.lecun.com/exdb/mnist)."""
    header = struct.pack(f">I{array.ndim}I", 0x0800 + array.ndim, *array.shape)
    return header + array.astype(np.uint8).tobytes()


def write_digits(folder: Path, train_images: int) -> Path:
    """Fill a folder with printed digits, shifted at random: plain training, gzipped test files."""
    random = np.random.default_rng(0)
    font = ImageFont.load_default(size=24)
    for prefix, count in (("train", train_images), ("t10k", 100)):
        labels = random.integers(0, 10, count)
        images = np.empty((count, 28, 28))
        for image, label in zip(images, labels, strict=True):
            canvas = Image.new("L", (28, 28))
            place = 14 + random.integers(-3, 4, 2)
            ImageDraw.Draw(canvas).text(tuple(place), str(label), fill=255, font=font, anchor="mm")
            image[:] = np.asarray(canvas)
        for name, array in (("images-idx3", images), ("labels-idx1", labels)):
            path, data = folder / f"{prefix}-{name}-ubyte", idx(array)
            if prefix == "train":
                path.write_bytes(data)
            else:
                path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(data))
    return folder
