"""Scripts of accelerate, Lightning and the Trainer train on the same samples with one more line.

Each script is a function here: see helpers/scripts.py. Scripts without a framework are in
test_scripts.py.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from helpers.pages import TRAINER
from helpers.scripts import RANKS, Numbers, Wrap, is_there, main, new_model, run

SCRIPTS = ["accelerate", "lightning", "trainer"]
SCRIPTS += [f"{name}_stream" for name in SCRIPTS]


@pytest.mark.thorough
@pytest.mark.parametrize("name", SCRIPTS)
def test_one_line_changes_nothing_but_where_samples_are_prepared(tmp_path, name):
    ended = run(__file__, tmp_path, [name])[name]
    assert ended == ["", ""], "".join(ended)


def accelerate(wrap: Wrap) -> Any:
    """Hugging Face's accelerate, with gradient accumulation and a scheduler."""
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


def lightning_module(seen: dict[str, list]) -> Any:
    """Return a model that records the features that it is trained and validated on."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = new_model()

        def loss(self, kind: str, batch: list) -> torch.Tensor:
            features, label = batch
            seen.setdefault(kind, []).append(features)
            return torch.nn.functional.cross_entropy(self.model(features), label)

        def training_step(self, batch: list) -> torch.Tensor:
            return self.loss("training", batch)

        def validation_step(self, batch: list) -> None:
            self.log("loss", self.loss("validation", batch), sync_dist=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.01)

    return Module()


QUIET = {
    "accelerator": "cpu",
    "devices": RANKS,
    "enable_checkpointing": False,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def lightning(wrap: Wrap) -> Any:
    """Lightning, with a DataModule that has a validation set."""
    import lightning

    class Data(lightning.LightningDataModule):
        def setup(self, stage: str) -> None:
            self.train, self.val = wrap(Numbers()), wrap(Numbers(9))

        def train_dataloader(self) -> DataLoader:
            return DataLoader(self.train, batch_size=4, shuffle=True, num_workers=2)

        def val_dataloader(self) -> DataLoader:
            return DataLoader(self.val, batch_size=4, num_workers=1, persistent_workers=True)

    lightning.seed_everything(5, workers=True)
    seen: dict[str, list] = {}
    module = lightning_module(seen)
    lightning.Trainer(strategy="ddp", max_epochs=2, **QUIET).fit(module, datamodule=Data())
    return seen, list(module.model.state_dict().values())


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

    trained_on = []

    class Tokens(Numbers):
        def __getitem__(self, index: int) -> transformers.BatchEncoding:
            features, label = super().__getitem__(index)
            return transformers.BatchEncoding({"x": features, "labels": label})

    def new_trainer() -> transformers.Trainer:
        arguments = transformers.TrainingArguments(
            f"output-{is_there()}",
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
        return transformers.Trainer(Noting(trained_on), arguments, **sets)

    new_trainer().train()
    whole = [*trained_on]
    trained_on.clear()
    again = new_trainer()
    again.train(f"output-{is_there()}/checkpoint-8")
    return whole, trained_on, list(again.model.state_dict().values())


# Scripts with streams


class Shares(IterableDataset):
    """A stream that splits its numbers among workers, and with `by_rank` among ranks, too.

    It writes each number that it prepares for a rank into a file of that rank.
    """

    def __init__(self, by_rank: bool):
        self.by_rank, self.is_there = by_rank, is_there()

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        info, numbers = get_worker_info(), Numbers(40)
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if self.by_rank else (0, 1)
        start, step = rank * info.num_workers + info.id, ranks * info.num_workers
        for index in range(start, 40, step):
            with open(
                f"prepared-{'there' if self.is_there else 'here'}-{dist.get_rank()}", "a"
            ) as file:
                print(index, file=file)
            yield numbers[index]


def prepared(rank: int) -> list[int]:
    """Return the numbers that have been prepared for a rank since the last call."""
    dist.barrier()
    file = Path(f"prepared-{'there' if is_there() else 'here'}-{rank}")
    numbers = [*map(int, file.read_text().split())] if file.exists() else []
    dist.barrier()
    file.unlink(missing_ok=True)
    dist.barrier()
    return sorted(numbers)


def everywhere(seen: list[torch.Tensor]) -> list[int]:
    """Return the numbers that all ranks have trained on, taken from the features."""
    mine = sorted(int(sample[0]) for features in seen for sample in features)
    all_of_them: list = [None] * dist.get_world_size()
    dist.all_gather_object(all_of_them, mine)
    return sorted(number for numbers in all_of_them for number in numbers)


def accelerate_stream(wrap: Wrap) -> Any:
    """accelerate's two ways to split a stream among ranks, and a stream that splits itself."""
    import accelerate

    outcomes, all_numbers = [], [*range(40)]
    for dispatches in (None, False):
        ways = accelerate.DataLoaderConfiguration(dispatch_batches=dispatches)
        accelerator = accelerate.Accelerator(cpu=True, dataloader_config=ways)
        loader = DataLoader(wrap(Shares(by_rank=False)), batch_size=4, num_workers=2)
        outcomes.append([*accelerator.prepare(loader)])
        # Some twice, since accelerate evens out the batches.
        assert {*everywhere([features for features, _ in outcomes[-1]])} == {*all_numbers}
        by_rank = [prepared(rank) for rank in range(RANKS)]  # by default only rank 0 reads
        assert by_rank[0] == all_numbers and (dispatches is None or by_rank[1] == all_numbers)
    outcomes.append([*DataLoader(wrap(Shares(by_rank=True)), batch_size=4, num_workers=2)])
    assert everywhere([features for features, _ in outcomes[-1]]) == all_numbers
    assert sorted(prepared(0) + prepared(1)) == all_numbers
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    return outcomes


def lightning_stream(wrap: Wrap) -> Any:
    import lightning

    seen: dict[str, list] = {}
    module = lightning_module(seen)
    loader = DataLoader(wrap(Shares(by_rank=True)), batch_size=4, num_workers=2)
    lightning.Trainer(max_epochs=1, **QUIET).fit(module, loader)
    assert everywhere(seen["training"]) == sorted(prepared(0) + prepared(1)) == [*range(40)]
    return seen, list(module.model.state_dict().values())


def trainer_stream(wrap: Wrap) -> Any:
    import transformers

    seen, told = [], []

    class Named(Shares):
        def set_epoch(self, epoch: int) -> None:
            told.append(epoch)

        def __iter__(self) -> Iterator[dict]:
            for features, label in super().__iter__():
                yield {"x": features, "labels": label}

    arguments = transformers.TrainingArguments(
        f"output-{is_there()}",
        max_steps=16,
        per_device_train_batch_size=4,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    names = {"transformers": transformers, "DataLoader": DataLoader}
    exec(TRAINER, names)
    names["MyTrainer"](Noting(seen), arguments, train_dataset=wrap(Named(by_rank=True))).train()
    assert everywhere(seen) == sorted(prepared(0) + prepared(1)) == [*range(40)]
    assert told == [0]
    return seen


if __name__ == "__main__":
    main(globals())
