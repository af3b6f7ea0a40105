"""Train on images that Ray Data reads and prepares on the data hosts."""

import serve  # before ray  # isort: skip

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import ray
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import hetero

FOLDER = Path(os.environ["SM_CHANNEL_TRAINING"])  # a folder of images for each class
CLASSES = sorted(path.name for path in FOLDER.iterdir())
SIZE, BATCH_SIZE, EPOCHS = 64, 32, 2


def prepare(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Augment and label a batch of images; data hosts call it.

    Images of shape (n, SIZE, SIZE, 3), uint8, become (n, 3, SIZE, SIZE), float32 from 0 to 1.
    """
    images = batch["image"].astype(np.float32) / 255
    flips = np.random.random(len(images)) < 0.5
    images[flips] = images[flips, :, ::-1]
    labels = [CLASSES.index(Path(path).parent.name) for path in batch["path"]]
    return {"image": images.transpose(0, 3, 1, 2), "label": np.array(labels)}


cuda = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
if cuda:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if cuda else "gloo")
serve.join()
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(True))  # after join(): Ray sets a handler too

# Only rank 0 makes the Dataset. Each rank gets as many images of every epoch as the others.
parts, part = None, [None]
if dist.get_rank() == 0:
    dataset = ray.data.read_images(
        str(FOLDER), size=(SIZE, SIZE), mode="RGB", include_paths=True, shuffle="files"
    )
    dataset = dataset.map_batches(prepare, batch_size=BATCH_SIZE)
    parts = dataset.streaming_split(dist.get_world_size(), equal=True)
dist.scatter_object_list(part, parts)

torch.manual_seed(0)
layers = [torch.nn.Conv2d(3, 16, 7, 4), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(4)]
layers += [torch.nn.Flatten(), torch.nn.Linear(16 * 4 * 4, len(CLASSES))]
model = DistributedDataParallel(torch.nn.Sequential(*layers).to(device))
optimizer = torch.optim.Adam(model.parameters())
checkpoint = hetero.BASE_DIR / "checkpoints" / "last.pt"
saved = torch.load(checkpoint, map_location="cpu") if checkpoint.exists() else {"epoch": 0}
if checkpoint.exists():
    model.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])


def save(path: Path, **state: object) -> None:
    """Write a file at once, so that it is complete whenever the process is killed."""
    if dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"model": model.module.state_dict(), **state}, path.with_suffix(".part"))
        os.replace(path.with_suffix(".part"), path)


step = 0
for epoch in range(saved["epoch"], EPOCHS):
    samples, begin = 0, time.perf_counter()
    for batch in part[0].iter_torch_batches(batch_size=BATCH_SIZE, device=device):
        waited = time.perf_counter() - begin
        loss = cross_entropy(model(batch["image"]), batch["label"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        samples, step = samples + len(batch["label"]), step + 1
        votes = torch.tensor(len(told), device=device)
        dist.all_reduce(votes)  # all ranks stop after the same step
        if votes:
            save(checkpoint, epoch=epoch, optimizer=optimizer.state_dict())
            sys.exit("stopped by SIGTERM")
        if dist.get_rank() == 0:
            times = f"step_time_ms={1000 * (time.perf_counter() - begin):.1f} "
            times += f"data_wait_ms={1000 * waited:.1f}"
            print(f"step={step} {times} loss={loss:.3f}", flush=True)
        begin = time.perf_counter()
    print(f"epoch={epoch} rank={dist.get_rank()} samples={samples}", flush=True)
    save(checkpoint, epoch=epoch + 1, optimizer=optimizer.state_dict())
save(Path(os.environ["SM_MODEL_DIR"], "model.pt"))
