"""Two classifiers for 28x28 images: that of PyTorch's MNIST example, and a smaller one for CPUs."""

import torch
import torch.nn.functional as F
from torch import nn


class MnistNet(nn.Module):
    """The model of PyTorch's MNIST example (github.com/pytorch/examples, mnist/main.py).

    Returns logits instead of log-probabilities, for use with cross_entropy.
    """

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map images (N, 1, 28, 28) to logits (N, 10)."""
        x = F.relu(self.conv1(images))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = torch.flatten(self.dropout1(x), 1)
        x = self.dropout2(F.relu(self.fc1(x)))
        return self.fc2(x)


class SmallNet(nn.Module):
    """A similar model that pools earlier, so that a step takes less time on a CPU.

    With these widths, a core takes somewhat longer to train on a sample than another core takes to
    prepare it with `--augment 4`. So on two machines with one core each, training is the limit.
    """

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 56, 3)
        self.conv2 = nn.Conv2d(56, 112, 3)
        self.fc = nn.Linear(2800, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map images (N, 1, 28, 28) to logits (N, 10)."""
        x = F.max_pool2d(F.relu(self.conv1(images)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc(torch.flatten(x, 1))


MODELS = {"mnist": MnistNet, "small": SmallNet}


def build(name: str) -> nn.Module:
    """Return a new model with that name. Raises ValueError if there is no such model."""
    if name not in MODELS:
        raise ValueError(f"There is no model {name!r}: choose one of {', '.join(MODELS)}.")
    return MODELS[name]()
