"""Training scripts as people have them train on the same samples with one more line.

Each script is a function here: see helpers/scripts.py. test_frameworks.py has those of frameworks.
"""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torch.utils.data import DataLoader, DistributedSampler, Sampler, Subset

from helpers.scripts import RANKS, Numbers, Wrap, main, new_model, run


def imagenet(wrap: Wrap) -> Any:
    """PyTorch's example for ImageNet."""
    model = torch.nn.parallel.DistributedDataParallel(new_model())
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    train_dataset, val_dataset = wrap(Numbers()), wrap(Numbers(13))
    train_sampler = DistributedSampler(train_dataset)
    val_sampler = DistributedSampler(val_dataset, shuffle=False, drop_last=True)
    train_loader = DataLoader(train_dataset, 4, sampler=train_sampler, num_workers=2)
    val_loader = DataLoader(val_dataset, 4, sampler=val_sampler, num_workers=2)
    trained_on, correct = [], []

    def validate(loader: DataLoader) -> None:
        for images, target in loader:
            correct.append((model(images).argmax(1) == target).sum().item())

    for epoch in range(2):
        train_sampler.set_epoch(epoch)
        for images, target in train_loader:
            trained_on.append(images)
            loss = torch.nn.functional.cross_entropy(model(images), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        validate(val_loader)
        done = len(val_loader.sampler) * RANKS
        validate(DataLoader(Subset(val_dataset, range(done, len(val_dataset))), 4, num_workers=1))
    return trained_on, correct, list(model.state_dict().values()), train_dataset.classes


class Detection(Numbers):
    """Like torchvision's CocoDetection: images, and dicts of boxes."""

    def __init__(self, transforms: Callable):
        super().__init__()
        self.transforms, self.coco = transforms, {"images": {i: i % 3 for i in range(45)}}
        self.ids = sorted(self.coco["images"])

    def __getitem__(self, index: int) -> tuple[Image.Image, dict]:
        numbers, label = super().__getitem__(index)
        image = Image.fromarray(np.full((20 + index, 30, 3), index, np.uint8))
        target = {"boxes": numbers[None].repeat(index % 3, 1), "labels": [label], "id": index}
        return self.transforms(image, target)


class Grouped(Sampler):
    """Batches of images of the same group."""

    def __init__(self, groups: list[int]):
        self.groups = groups

    def __iter__(self) -> Iterator[list[int]]:
        for index in torch.randperm(len(self.groups)).tolist():
            alike = [i for i, group in enumerate(self.groups) if group == self.groups[index]]
            yield [index, *alike[:3]]


def detection(wrap: Wrap) -> Any:
    """torchvision's example for detection."""
    dataset = wrap(Detection(lambda image, target: (image, {**target, "area": image.width * 2})))
    batches = Grouped([dataset.coco["images"][i] for i in dataset.ids])
    torch.manual_seed(0)
    loader = DataLoader(
        dataset,
        batch_sampler=batches,
        num_workers=2,
        collate_fn=lambda batch: (*zip(*batch, strict=True),),
    )
    evaluated = [dataset[i][1]["boxes"] for i in range(3)]
    return list(loader), list(loader), evaluated


class Mosaic(Numbers):
    """As in YOLO: images made of four, except in the last epoch, and in several sizes."""

    def __init__(self):
        super().__init__()
        self.epoch, self.mosaic = 0, True

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, key: tuple[int, int]) -> torch.Tensor:
        index, size = key
        others = [index, *((index * k + self.epoch) % 45 for k in (3, 5, 7))]
        parts = [super(Mosaic, self).__getitem__(i)[0] for i in others[: 4 if self.mosaic else 1]]
        return torch.cat(parts).repeat(size)


class Sizes(Sampler):
    """Yields pairs: which image, and how large."""

    def __iter__(self) -> Iterator[tuple[int, int]]:
        for number, index in enumerate(torch.randperm(45).tolist()):
            yield index, 1 + number // 6 % 3


def mosaic(wrap: Wrap) -> Any:
    dataset = wrap(Mosaic())
    torch.manual_seed(0)
    loader, batches = DataLoader(dataset, batch_size=6, sampler=Sizes(), num_workers=2), []
    for epoch in range(3):
        dataset.set_epoch(epoch)
        if epoch == 2:
            dataset.mosaic = False
        batches += loader
    return batches


class Telling(Numbers):
    """Samples that say which rank asked for them."""

    def __getitem__(self, index: int) -> tuple:
        super().__getitem__(index)
        names = os.environ["RANK"], os.environ["WORLD_SIZE"]
        return index, dist.is_initialized(), dist.get_rank(), dist.get_world_size(), *names


def rank(wrap: Wrap) -> Any:
    """A Dataset that depends on the rank, such as one that shards its data itself."""
    loader = DataLoader(wrap(Telling()), batch_size=9, num_workers=1)
    batches = [batch for batch in loader]
    assert batches[0][2].tolist() == [int(os.environ["RANK"])] * 9
    return batches


def beside(wrap: Wrap) -> Any:
    """Transforms from the script's own folder, and from one that it adds to sys.path."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "library"))
    import library_of_mine
    import tools_of_mine

    class Transformed(Numbers):
        def __getitem__(self, index: int) -> torch.Tensor:
            number, _ = super().__getitem__(index)
            return library_of_mine.double(tools_of_mine.double(number))

    return list(DataLoader(wrap(Transformed()), batch_size=9, num_workers=1))


SCRIPTS = ["imagenet", "detection", "mosaic", "rank", "beside"]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return run(__file__, tmp_path_factory.mktemp("scripts"), SCRIPTS)


@pytest.mark.parametrize("name", SCRIPTS)
def test_one_line_changes_nothing_but_where_samples_are_prepared(ended, name):
    assert ended[name] == ["", ""], "".join(ended[name])


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(globals())
