# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = [
#   "transformers==5.23.0", "accelerate==1.15.0", "datasets==5.2.0", "torch==2.14.1",
#   "grpcio==1.85.1", "cloudpickle==3.1.2",
# ]
# ///
"""[Hugging Face Trainer](https://github.com/huggingface/transformers)

Mind: `map` and `with_transform` return new Datasets: call them first. Load files with
`keep_in_memory=True`.
Compared: order, labels; at random: images
"""

import datasets
import numpy as np
import torch
from transformers import Trainer, TrainingArguments, ViTConfig
from transformers import ViTForImageClassification as ViT

from batches import seen
from feed import RemoteDataset  # added

images = np.random.default_rng(1).integers(0, 255, (24, 3, 16, 16), np.uint8)
dataset = datasets.Dataset.from_dict({"image": list(images), "label": range(24)})


def augment(examples):
    pixels = [torch.tensor(image, dtype=torch.float32) / 255 for image in examples["image"]]
    pixels = [image.roll(np.random.randint(16), 2) + 0.1 * torch.rand(1) for image in pixels]
    return {"pixel_values": pixels, "labels": examples["label"]}


dataset.set_transform(augment)
dataset = RemoteDataset(dataset)  # added


class MyTrainer(Trainer):
    def training_step(self, model, inputs, *args):
        seen(int(self.state.epoch), inputs["labels"], random=inputs["pixel_values"])
        return super().training_step(model, inputs, *args)


config = ViTConfig(
    hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
    image_size=16, patch_size=8, num_labels=24,
)  # fmt: skip
arguments = TrainingArguments(
    "output",
    num_train_epochs=2,
    per_device_train_batch_size=4,
    dataloader_num_workers=2,
    remove_unused_columns=False,
    use_cpu=True,
    report_to=[],
    save_strategy="no",
    seed=1,
)
MyTrainer(ViT(config), arguments, train_dataset=dataset).train()
