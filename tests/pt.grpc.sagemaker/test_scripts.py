"""Training scripts as people have them, with one line more: trained on the same as without it.

Run as a program, this file is a rank that runs one or more of these scripts, each of which is a
function here: first as it was, then with RemoteDataset. It writes into a file how they ended.
"""

import json
import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    Subset,
    WeightedRandomSampler,
    get_worker_info,
)

from data_hosts import CODE, TESTS, TOKEN, DataHost, assert_same, free_port, up
from feed import RemoteDataset
from pages import TRAINER

RANKS = 2
RESULTS = Path("results")
Wrap = Callable[[Dataset], Dataset]  # the line
is_there = False  # whether samples are to be prepared on data hosts


class Numbers(Dataset):
    """Sample i has the number i, and says so if it is not prepared where it should be."""

    def __init__(self, length: int = 45):
        self.length, self.classes = length, ["even", "odd"]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if is_there:
            assert os.environ["PLACE"] == "a data host"
        generator = torch.Generator().manual_seed(index)
        return torch.rand(4, generator=generator) + index, index % 2


def new_model() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Linear(4, 2)


# The scripts, in small. Each returns what it has been trained on, and what it has learnt.


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
    """As torchvision's CocoDetection: images, and dicts of boxes."""

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
    """Batches of images that are alike."""

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


def weighted(wrap: Wrap) -> Any:
    """A script with all in one file."""

    class Tabular(Numbers):
        def __init__(self, transform: Callable):
            super().__init__()
            self.transform, self.labels = transform, [i % 5 == 0 for i in range(45)]

        def __getitem__(self, index: int) -> dict:
            features, label = super().__getitem__(index)
            return {"features": self.transform(features), "label": label, "id": f"row {index}"}

    dataset = wrap(Tabular(lambda features: features * 2 - 1))
    weights = [5.0 if label else 1.0 for label in dataset.labels]
    torch.manual_seed(0)
    loader = DataLoader(
        dataset, batch_size=8, sampler=WeightedRandomSampler(weights, 45), num_workers=1
    )
    return [*loader, *loader]


class Mosaic(Numbers):
    """As of YOLO: an image made of four, in one of several sizes, until the last epochs."""

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
    """Says which rank asks."""

    def __getitem__(self, index: int) -> tuple:
        super().__getitem__(index)
        names = os.environ["RANK"], os.environ["WORLD_SIZE"]
        return index, dist.is_initialized(), dist.get_rank(), dist.get_world_size(), *names


def rank(wrap: Wrap) -> Any:
    """A Dataset that depends on the rank, as of an own kind of shards."""
    loader = DataLoader(wrap(Telling()), batch_size=9, num_workers=1)
    batches = [batch for batch in loader]
    assert batches[0][2].tolist() == [int(os.environ["RANK"])] * 9
    return batches


def beside(wrap: Wrap) -> Any:
    """A transform from a folder beside the script, which the script has put into sys.path."""
    sys.path.insert(0, str(Path(__file__).parent / "library"))
    import transforms_of_mine

    class Transformed(Numbers):
        def __getitem__(self, index: int) -> torch.Tensor:
            return transforms_of_mine.double(super().__getitem__(index)[0])

    return list(DataLoader(wrap(Transformed()), batch_size=9, num_workers=1))


def accelerate(wrap: Wrap) -> Any:
    """Hugging Face's accelerate, with gradient accumulation and a scheduler for each step."""
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, dataset = new_model(), wrap(Numbers(44))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    accelerate.utils.set_seed(5)
    loader = DataLoader(dataset, batch_size=4, shuffle=True, num_workers=2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 20)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    trained_on, rates = [], []
    for _ in range(3):
        for features, label in loader:
            with accelerator.accumulate(model):
                trained_on.append(features)
                loss = torch.nn.functional.cross_entropy(model(features), label)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                rates.append(scheduler.get_last_lr())
    indices = accelerator.gather(torch.cat(trained_on[:6])).shape
    return trained_on, rates, indices, list(accelerator.unwrap_model(model).state_dict().values())


def lightning(wrap: Wrap) -> Any:
    """Lightning, with a DataModule that has a validation set."""
    import lightning

    seen: dict[str, list] = {"training": [], "validation": []}

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = new_model()

        def loss(self, kind: str, batch: list) -> torch.Tensor:
            features, label = batch
            seen[kind].append(features)
            return torch.nn.functional.cross_entropy(self.model(features), label)

        def training_step(self, batch: list) -> torch.Tensor:
            return self.loss("training", batch)

        def validation_step(self, batch: list) -> None:
            self.log("loss", self.loss("validation", batch), sync_dist=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.01)

    class Data(lightning.LightningDataModule):
        def setup(self, stage: str) -> None:
            self.train, self.val = wrap(Numbers()), wrap(Numbers(9))

        def train_dataloader(self) -> DataLoader:
            return DataLoader(self.train, batch_size=4, shuffle=True, num_workers=2)

        def val_dataloader(self) -> DataLoader:
            return DataLoader(self.val, batch_size=4, num_workers=1, persistent_workers=True)

    lightning.seed_everything(5, workers=True)
    module = Module()
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy="ddp",
        max_epochs=2,
        enable_checkpointing=False,
        **quiet,
    )
    trainer.fit(module, datamodule=Data())
    return seen, list(module.model.state_dict().values())


def trainer(wrap: Wrap) -> Any:
    """Hugging Face's Trainer, which evaluates, and goes on from a checkpoint in mid-epoch."""
    import transformers

    trained_on = []

    class Tokens(Numbers):
        def __getitem__(self, index: int) -> transformers.BatchEncoding:
            features, label = super().__getitem__(index)
            return transformers.BatchEncoding({"x": features, "labels": label})

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = new_model()

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict:
            trained_on.append(x)
            logits = self.model(x)
            return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}

    def new_trainer() -> transformers.Trainer:
        arguments = transformers.TrainingArguments(
            f"output-{is_there}",
            num_train_epochs=2,
            per_device_train_batch_size=4,
            dataloader_num_workers=2,
            eval_strategy="epoch",
            save_steps=8,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            seed=5,
        )
        sets = {"train_dataset": wrap(Tokens()), "eval_dataset": wrap(Tokens(9))}
        return transformers.Trainer(Model(), arguments, **sets)

    new_trainer().train()
    whole = [*trained_on]
    trained_on.clear()
    again = new_trainer()
    again.train(f"output-{is_there}/checkpoint-8")
    return whole, trained_on, list(again.model.state_dict().values())


# Scripts with streams


class Shares(IterableDataset):
    """A stream that shares its numbers out among workers, and among ranks if it is told to.

    A file has a line for each that is prepared, by the rank that asks.
    """

    def __init__(self, by_rank: bool):
        self.by_rank = by_rank

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        info, numbers = get_worker_info(), Numbers(40)
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if self.by_rank else (0, 1)
        start, step = rank * info.num_workers + info.id, ranks * info.num_workers
        for index in range(start, 40, step):
            with open(f"prepared-{'there' if is_there else 'here'}-{dist.get_rank()}", "a") as file:
                print(index, file=file)
            yield numbers[index]


def prepared(rank: int) -> list[int]:
    """What has been prepared for a rank since this was asked last."""
    dist.barrier()
    file = Path(f"prepared-{'there' if is_there else 'here'}-{rank}")
    numbers = [*map(int, file.read_text().split())] if file.exists() else []
    dist.barrier()
    file.unlink(missing_ok=True)
    dist.barrier()
    return sorted(numbers)


def everywhere(batches: list) -> list[int]:
    """The numbers that all ranks have been trained on."""
    mine = sorted(int(sample[0]) for features, _ in batches for sample in features)
    all_of_them: list = [None] * dist.get_world_size()
    dist.all_gather_object(all_of_them, mine)
    return sorted(number for numbers in all_of_them for number in numbers)


def accelerate_stream(wrap: Wrap) -> Any:
    """accelerate's own ways with streams, and the one that has each rank prepare its own share."""
    import accelerate

    outcomes, all_numbers = [], [*range(40)]
    for dispatches in (None, False):
        ways = accelerate.DataLoaderConfiguration(dispatch_batches=dispatches)
        accelerator = accelerate.Accelerator(cpu=True, dataloader_config=ways)
        loader = DataLoader(wrap(Shares(by_rank=False)), batch_size=4, num_workers=2)
        outcomes.append([*accelerator.prepare(loader)])
        # Some twice, as it evens out the batches.
        assert {*everywhere(outcomes[-1])} == {*all_numbers}
        by_rank = [prepared(rank) for rank in range(RANKS)]  # by default rank 1 asks in vain
        assert by_rank[0] == all_numbers and (dispatches is None or by_rank[1] == all_numbers)
    outcomes.append([*DataLoader(wrap(Shares(by_rank=True)), batch_size=4, num_workers=2)])
    assert everywhere(outcomes[-1]) == all_numbers
    assert sorted(prepared(0) + prepared(1)) == all_numbers
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    return outcomes


def lightning_stream(wrap: Wrap) -> Any:
    import lightning

    seen = []

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = new_model()

        def training_step(self, batch: list) -> torch.Tensor:
            seen.append(batch)
            return torch.nn.functional.cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.01)

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        accelerator="cpu", devices=RANKS, max_epochs=1, enable_checkpointing=False, **quiet
    )
    module = Module()
    loader = DataLoader(wrap(Shares(by_rank=True)), batch_size=4, num_workers=2)
    trainer.fit(module, loader)
    assert everywhere(seen) == sorted(prepared(0) + prepared(1)) == [*range(40)]
    return seen, list(module.model.state_dict().values())


def trainer_stream(wrap: Wrap) -> Any:
    import transformers

    seen, told = [], []

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = new_model()

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict:
            seen.append((x, labels))
            return {"loss": torch.nn.functional.cross_entropy(self.model(x), labels)}

    class Named(Shares):
        def set_epoch(self, epoch: int) -> None:
            told.append(epoch)

        def __iter__(self) -> Iterator[dict]:
            for features, label in super().__iter__():
                yield {"x": features, "labels": label}

    arguments = transformers.TrainingArguments(
        f"output-{is_there}",
        max_steps=16,
        per_device_train_batch_size=4,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    names = {"transformers": transformers, "DataLoader": DataLoader}
    exec(TRAINER, names)
    names["MyTrainer"](Model(), arguments, train_dataset=wrap(Named(by_rank=True))).train()
    assert everywhere(seen) == sorted(prepared(0) + prepared(1)) == [*range(40)]
    assert told == [0]
    return seen


# A rank


def main(names: list[str]) -> None:
    global is_there
    outcomes = {}
    if set(names) & set(PLAIN):
        dist.init_process_group("gloo")
    for name in names:
        try:
            is_there = False
            expected = globals()[name](lambda dataset: dataset)
            is_there = True
            assert_same(globals()[name](RemoteDataset), expected)
            outcomes[name] = ""
        except BaseException:
            outcomes[name] = traceback.format_exc()
    Path(f"{RESULTS}-{os.environ['RANK']}").write_text(json.dumps(outcomes))


# The tests

PLAIN = ["imagenet", "detection", "weighted", "mosaic", "rank", "beside"]
FRAMEWORKS = ["accelerate", "lightning", "trainer"]
FRAMEWORKS += ["accelerate_stream", "lightning_stream", "trainer_stream"]
LIBRARY = "def double(value):\n    return value * 2\n"


def run(folder: Path, names: list[str]) -> list[dict[str, str]]:
    """Run scripts on two ranks beside two data hosts; return how they ended in each rank."""
    (folder / "library").mkdir()
    (folder / "library" / "transforms_of_mine.py").write_text(LIBRARY)
    script = shutil.copy(__file__, folder)
    place, ranks = {"PLACE": "a data host"}, []
    hosts = [DataHost(workers, environment=place, folder=folder) for workers in (1, 2)]
    try:
        environment = {
            **os.environ,
            "HETERO_DATA_HOSTS": ",".join(host.address for host in up(*hosts)),
            "HETERO_TOKEN": TOKEN,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(RANKS),
            "LOCAL_WORLD_SIZE": str(RANKS),
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": f"{CODE}:{TESTS}",
        }
        for number in range(RANKS):
            local = {"RANK": str(number), "LOCAL_RANK": str(number), "NODE_RANK": "0"}
            command = [sys.executable, script, *names]
            ranks.append(subprocess.Popen(command, cwd=folder, env={**environment, **local}))
        assert [rank.wait(timeout=280) for rank in ranks] == [0] * RANKS
        files = [folder / f"{RESULTS}-{number}" for number in range(RANKS)]
        return [json.loads(file.read_text()) for file in files]
    finally:
        for rank in ranks:
            rank.kill()
        for host in hosts:
            host.kill()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return run(tmp_path_factory.mktemp("scripts"), PLAIN)


@pytest.mark.parametrize("name", PLAIN)
def test_one_line_changes_nothing_but_where_samples_are_prepared(outcomes, name):
    for rank in range(RANKS):
        assert not outcomes[rank][name], outcomes[rank][name]


@pytest.mark.thorough
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_nor_does_it_with_frameworks(tmp_path, name):
    for outcome in run(tmp_path, [name]):
        assert not outcome[name], outcome[name]


if __name__ == "__main__":
    main(sys.argv[1:])
