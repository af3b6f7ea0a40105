"""MNIST-format images, with an augmentation that is expensive enough for separate CPU hosts.

The files have the format of http://yann.lecun.com/exdb/mnist/, which Fashion-MNIST and others use
too: a big-endian header (magic number, one 32-bit size per dimension), then a byte per value.
Random numbers come from torch's global generator, which the loader seeds for every sample.
"""

import gzip
import itertools
import math
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import Dataset, default_collate

MEAN, STD = 0.1307, 0.3081  # of MNIST's training images, scaled to 0..1
SIDE = 28  # pixels
ELASTIC_SIGMA = 4.0  # smoothness of the elastic distortion, in pixels (Simard et al., 2003)
ELASTIC_RMS = 0.5  # its mean displacement along each axis, in pixels


class MnistDataset(Dataset):
    """Pairs of (image, label): a float32 tensor (1, 28, 28), normalized, and an int from 0 to 9.

    If `augment` is 0, the images stay as they are. Otherwise it is the supersampling factor of the
    augmentation, which is computed on a grid of (28 * augment)² points: CPU time grows with its
    square. Raises FileNotFoundError or ValueError if files in `folder` are missing or damaged.
    """

    def __init__(self, folder: str | Path, train: bool = True, augment: int = 0):
        if augment < 0:
            raise ValueError(
                f"augment is {augment}, but must be 0 (none) or a factor of 1 or more."
            )
        prefix = "train" if train else "t10k"
        self.images = read_idx(Path(folder), f"{prefix}-images-idx3-ubyte", dimensions=3)
        self.labels = read_idx(Path(folder), f"{prefix}-labels-idx1-ubyte", dimensions=1)
        if len(self.images) != len(self.labels):
            raise ValueError(
                f"{folder} holds {len(self.images)} {prefix} images but {len(self.labels)} labels: "
                "the two files do not belong together."
            )
        if self.images.shape[1:] != (SIDE, SIDE):
            height, width = self.images.shape[1:]
            raise ValueError(f"{folder} holds images of {height}x{width} pixels instead of 28x28.")
        self.augment = augment
        grid_side = SIDE * augment
        self.smoothing = gaussian_rows(grid_side, grid_side, ELASTIC_SIGMA * augment)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = self.images[index].unsqueeze(0) / 255
        if self.augment:
            image = distort(image, self.augment, self.smoothing)
        return (image - MEAN) / STD, int(self.labels[index])


def distort(image: torch.Tensor, factor: int, smoothing: torch.Tensor) -> torch.Tensor:
    """Return a randomly transformed, distorted and blurred copy of `image` (1, 28, 28).

    Resamples the image on a grid `factor` times finer, with a random affine map and a random smooth
    displacement, then blurs it down to 28x28. `smoothing` is gaussian_rows of the finer grid.
    """
    side = SIDE * factor
    angle, shear, x_scale, y_scale, x_shift, y_shift, blur = (2 * torch.rand(7) - 1).tolist()
    cos, sin = math.cos(0.15 * angle), math.sin(0.15 * angle)  # up to 9 degrees
    x_scale, y_scale = 1 + 0.1 * x_scale, 1 + 0.1 * y_scale
    affine = torch.tensor(
        [
            [x_scale * cos, 0.1 * shear - y_scale * sin, 0.07 * x_shift],  # 0.07: one pixel
            [x_scale * sin, y_scale * cos, 0.07 * y_shift],
        ]
    )
    grid = F.affine_grid(affine.unsqueeze(0), [1, 1, side, side], align_corners=False)

    # Smoothing divides the standard deviation of white noise by 2 sqrt(pi) sigma: undo that. Then
    # convert pixels to the units of grid_sample, in which the image spans -1 to 1.
    noise = smoothing @ torch.randn(2, side, side) @ smoothing.T
    displacement = noise * (2 * math.sqrt(math.pi) * ELASTIC_SIGMA * factor) * ELASTIC_RMS
    grid = grid + displacement.permute(1, 2, 0) * (2 / SIDE)

    fine = F.grid_sample(image.unsqueeze(0), grid, mode="bicubic", align_corners=False)[0]
    blurring = gaussian_rows(SIDE, side, (0.4 + 0.15 * blur) * factor)
    return (blurring @ fine @ blurring.T).clamp(0, 1)


def gaussian_rows(outputs: int, inputs: int, sigma: float) -> torch.Tensor:
    """Return a matrix (outputs, inputs) that blurs and resamples an axis when multiplied with it.

    Row i is a Gaussian with standard deviation `sigma` (in input pixels), centered at output pixel
    i, and sums to 1. For a blur this wide, a matrix product is cheaper than a convolution.
    """
    centres = (torch.arange(outputs) + 0.5) * inputs / outputs
    positions = torch.arange(inputs) + 0.5
    return torch.softmax(-0.5 * ((positions - centres[:, None]) / sigma) ** 2, dim=1)


def read_idx(folder: Path, name: str, dimensions: int) -> torch.Tensor:
    """Read the uint8 tensor from the IDX file `name` or `name`.gz in `folder`.

    Raises FileNotFoundError if neither exists, and ValueError if the file is damaged.
    """
    plain, packed = folder / name, folder / f"{name}.gz"
    path = plain if plain.is_file() else packed
    if not path.is_file():
        raise FileNotFoundError(f"Found neither {name} nor {name}.gz in the folder {folder}.")
    try:
        data = gzip.decompress(path.read_bytes()) if path == packed else path.read_bytes()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is not a complete gzip file: {error}.") from error

    header = [int.from_bytes(data[i : i + 4], "big") for i in range(0, 4 + 4 * dimensions, 4)]
    magic, shape = 0x0800 + dimensions, header[1:]  # 08: unsigned bytes
    if header[0] != magic:
        raise ValueError(f"{path} starts with {header[0]:#06x} instead of {magic:#06x}: not IDX.")
    values = len(data) - 4 * len(header)
    if values != math.prod(shape):
        raise ValueError(f"{path} holds {values} bytes of data, but its header says {shape}.")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)[4 * len(header) :].view(shape)


class SyntheticLoader:
    """Yields one random batch `length` times, to measure training without the cost of loading.

    Like a digit on paper, each image is uniform except in its middle: CPUs take longer to train on
    images that are noise everywhere.
    """

    def __init__(self, batch_size: int, length: int, pin_memory: bool = False):
        images = torch.full((batch_size, 1, SIDE, SIDE), -MEAN / STD)
        images[:, :, SIDE // 4 : -SIDE // 4, SIDE // 4 : -SIDE // 4].normal_()
        labels = torch.randint(10, (batch_size,))
        self.batch = (images.pin_memory(), labels.pin_memory()) if pin_memory else (images, labels)
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return itertools.repeat(self.batch, self.length)


def milliseconds_per_sample(dataset: Dataset, samples: int = 128) -> float:
    """Measure the CPU time per sample, in milliseconds on one core, with collation into a batch.

    CPU time excludes what other processes do on the core. Restores torch's random state and its
    number of threads afterwards.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):
        for size in (8, samples):  # the first batch is a warm-up
            start = time.thread_time()
            default_collate([dataset[i % len(dataset)] for i in range(size)])
            seconds = time.thread_time() - start
    torch.set_num_threads(threads)
    return 1000 * seconds / samples
