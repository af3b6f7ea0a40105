"""Training scripts as people have them train on the same samples with one more line.

Each script is a function, which takes a function that wraps a Dataset, and returns the batches that
it has trained on. Run as a program, this file is a rank: see helpers/scripts.py.
"""

import functools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, get_worker_info

from feed import RemoteDataset
from helpers.datasets import assert_same
from helpers.pages import TRAINER
from helpers.scripts import main, run

RANKS = 2
Wrap = Callable[[Dataset], Dataset]  # either RemoteDataset, or a function that changes nothing


def place() -> str:
    """Return where samples must be prepared, which is told when a Dataset is created."""
    return os.environ.get("WHERE", "here")


class Numbers(Dataset):
    """Sample i has the number i, and the rank that it is for; it must be prepared where it should.

    As in YOLO, the script tells it the epoch, and what to do in the last one.
    """

    def __init__(self, length: int = 45, transform: Callable = lambda number: number):
        self.length, self.classes, self.place = length, ["even", "odd"], place()
        self.rank = os.environ.get("RANK")
        self.transform, self.epoch, self.is_last = transform, 0, False

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        assert os.environ.get("PLACE", "here") == self.place
        assert os.environ.get("RANK") == self.rank and dist.get_world_size() == RANKS
        generator = torch.Generator().manual_seed(index + 45 * self.epoch)
        number = torch.rand(4, generator=generator) + index
        return number if self.is_last else self.transform(number), dist.get_rank()


def new_model() -> torch.nn.Module:
    """Return a model with the same weights each time."""
    torch.manual_seed(3)
    return torch.nn.Linear(4, 2)


def imagenet(wrap: Wrap) -> Any:
    """PyTorch's example for ImageNet, with modules from its own folder and from another one."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "library"))
    import library_of_mine
    import tools_of_mine

    def transform(number: torch.Tensor) -> torch.Tensor:
        return library_of_mine.double(tools_of_mine.double(number))

    model = torch.nn.parallel.DistributedDataParallel(new_model())
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    train_dataset, val_dataset = wrap(Numbers(transform=transform)), wrap(Numbers(13))
    train_sampler = DistributedSampler(train_dataset)
    val_sampler = DistributedSampler(val_dataset, shuffle=False, drop_last=True)
    train_loader = DataLoader(train_dataset, 4, sampler=train_sampler, num_workers=2)
    val_loader = DataLoader(val_dataset, 4, sampler=val_sampler, num_workers=2)
    done = len(val_sampler) * RANKS
    rest = DataLoader(Subset(val_dataset, range(done, len(val_dataset))), 4, num_workers=1)
    trained_on, correct = [], []
    for epoch in range(2):
        train_sampler.set_epoch(epoch)
        train_dataset.set_epoch(epoch)
        train_dataset.is_last = epoch == 1
        for images, target in train_loader:
            assert target.tolist() == len(target) * [dist.get_rank()]
            trained_on.append(images)
            loss = torch.nn.functional.cross_entropy(model(images), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        for loader in (val_loader, rest):
            for images, target in loader:
                correct.append((model(images).argmax(1) == target).sum().item())
    return trained_on, correct, list(model.state_dict().values()), train_dataset.classes


# With frameworks, which take a stream after the Dataset


class Shares(torch.utils.data.IterableDataset):
    """A stream that splits its numbers among workers, and with `by_rank` among ranks, too.

    It writes each number that it prepares for a rank into a file of that rank.
    """

    def __init__(self, by_rank: bool = True):
        self.by_rank, self.numbers = by_rank, Numbers(40)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if self.by_rank else (0, 1)
        for index in range(rank * workers + worker, 40, ranks * workers):
            with open(f"prepared-{self.numbers.place}-{dist.get_rank()}", "a") as file:
                print(index, file=file)
            yield self.numbers[index]


def prepared(rank: int) -> list[int]:
    """Return the numbers that have been prepared for a rank since the last call."""
    dist.barrier()
    file = Path(f"prepared-{place()}-{rank}")
    numbers = [*map(int, file.read_text().split())] if file.exists() else []
    dist.barrier()
    file.unlink(missing_ok=True)
    dist.barrier()
    return sorted(numbers)


def everywhere(seen: list[torch.Tensor]) -> list[int]:
    """Return the numbers that all ranks have trained on, taken from the features."""
    all_of_them: list = [None] * RANKS
    dist.all_gather_object(
        all_of_them, [int(sample[0]) for features in seen for sample in features]
    )
    return sorted(sum(all_of_them, []))


def accelerate(wrap: Wrap) -> Any:
    """accelerate, with gradient accumulation, and its two ways to split a stream among ranks."""
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    accelerate.utils.set_seed(5)
    loader = DataLoader(wrap(Numbers(44)), batch_size=4, shuffle=True, num_workers=2)
    model, loader = accelerator.prepare(new_model(), loader)
    outcomes = []
    for _ in range(2):
        for features, label in loader:
            with accelerator.accumulate(model):
                outcomes.append((features, label, accelerator.sync_gradients))
    all_numbers = [*range(40)]
    for dispatches in (None, False):
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        ways = accelerate.DataLoaderConfiguration(dispatch_batches=dispatches)
        accelerator = accelerate.Accelerator(cpu=True, dataloader_config=ways)
        loader = DataLoader(wrap(Shares(by_rank=False)), batch_size=4, num_workers=2)
        batches = [*accelerator.prepare(loader)]
        # Some twice, since accelerate evens out the batches.
        assert {*everywhere([features for features, _ in batches])} == {*all_numbers}
        by_rank = [prepared(rank) for rank in range(RANKS)]  # by default only rank 0 reads
        assert by_rank[0] == all_numbers and (dispatches is None or by_rank[1] == all_numbers)
        outcomes += batches
    batches = [*DataLoader(wrap(Shares()), batch_size=4, num_workers=2)]
    assert everywhere([features for features, _ in batches]) == all_numbers
    assert sorted(prepared(0) + prepared(1)) == all_numbers
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    return outcomes, batches


def lightning(wrap: Wrap) -> Any:
    """Lightning, with a DataModule that has a validation set."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.seen = new_model(), {"training": [], "validation": []}

        def loss(self, kind: str, batch: list) -> torch.Tensor:
            features, label = batch
            self.seen[kind].append(features)
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

    off = ("enable_checkpointing", "logger", "enable_progress_bar", "enable_model_summary")
    quiet = {"accelerator": "cpu", "devices": RANKS, **dict.fromkeys(off, False)}
    lightning.seed_everything(5, workers=True)
    first, second = Module(), Module()
    lightning.Trainer(strategy="ddp", max_epochs=2, **quiet).fit(first, datamodule=Data())
    stream = DataLoader(wrap(Shares()), batch_size=4, num_workers=2)
    lightning.Trainer(strategy="ddp", max_epochs=1, **quiet).fit(second, stream)
    seen = everywhere(second.seen["training"])
    assert seen == sorted(prepared(0) + prepared(1)) == [*range(40)]
    return [(model.seen, list(model.model.state_dict().values())) for model in (first, second)]


class Noting(torch.nn.Module):
    """A model for the Trainer that records the features that it is trained on."""

    def __init__(self, seen: list):
        super().__init__()
        self.model, self.seen = new_model(), seen

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict:
        self.seen.append(x)
        logits = self.model(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def trainer(wrap: Wrap) -> Any:
    """Hugging Face's Trainer, which evaluates, and resumes from a checkpoint in mid-epoch."""
    import transformers

    trained_on, after_checkpoint, of_stream, told = [], [], [], []

    class Tokens(Numbers):
        def __getitem__(self, index: int) -> transformers.BatchEncoding:
            features, label = super().__getitem__(index)
            return transformers.BatchEncoding({"x": features, "labels": label})

    class Named(Shares):
        def set_epoch(self, epoch: int) -> None:
            told.append(epoch)

        def __iter__(self) -> Iterator[dict]:
            for features, label in super().__iter__():
                yield {"x": features, "labels": label}

    def arguments(**more: Any) -> transformers.TrainingArguments:
        quiet = {"use_cpu": True, "report_to": [], "disable_tqdm": True}
        batches = {"per_device_train_batch_size": 4}
        return transformers.TrainingArguments(f"output-{place()}", **batches, **quiet, **more)

    for seen, checkpoint in ((trained_on, None), (after_checkpoint, "checkpoint-8")):
        options = {"num_train_epochs": 2, "eval_strategy": "epoch", "save_steps": 8, "seed": 5}
        sets = {"train_dataset": wrap(Tokens()), "eval_dataset": wrap(Tokens(9))}
        model = Noting(seen)
        made = transformers.Trainer(model, arguments(dataloader_num_workers=2, **options), **sets)
        made.train(checkpoint and f"output-{place()}/{checkpoint}")
    names = {"transformers": transformers, "DataLoader": DataLoader}
    exec(TRAINER, names)
    stream = wrap(Named())
    given = arguments(max_steps=16, save_strategy="no")
    names["MyTrainer"](Noting(of_stream), given, train_dataset=stream).train()
    assert everywhere(of_stream) == sorted(prepared(0) + prepared(1)) == [*range(40)]
    assert told == [0]
    return trained_on, after_checkpoint, list(model.state_dict().values()), of_stream


SCRIPTS = [imagenet, accelerate, lightning, trainer]


@pytest.mark.parametrize(
    "name",
    ["imagenet", *(pytest.param(f.__name__, marks=pytest.mark.thorough) for f in SCRIPTS[1:])],
)
def test_one_line_changes_nothing_but_where_samples_are_prepared(tmp_path, name):
    [traceback] = run(__file__, tmp_path, [name], RANKS).values()
    assert not traceback, traceback


def compare(script: Callable[[Wrap], Any]) -> None:
    """Run a script unchanged, and with one more line."""
    if script is imagenet:
        dist.init_process_group("gloo")
    os.environ["WHERE"] = "here"
    expected = script(lambda dataset: dataset)
    os.environ["WHERE"] = "there"
    assert_same(script(RemoteDataset), expected)


if __name__ == "__main__":
    main({each.__name__: functools.partial(compare, each) for each in SCRIPTS})
