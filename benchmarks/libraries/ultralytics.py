# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = [
#   "ultralytics==8.4.190", "torch==2.14.1", "torchvision==0.29.1", "grpcio==1.85.1",
#   "cloudpickle==3.1.2",
# ]
# ///
"""[ultralytics](https://github.com/ultralytics/ultralytics)

Mind: The line goes into a trainer of yours. Mosaics take images that their process has loaded
lately; that is repeatable only with `cache="ram"`.
Compared: order, boxes and images of the last epoch, which has no mosaics; at random: mosaics
"""

from pathlib import Path

import numpy as np
from PIL import Image
from ultralytics.models.yolo.detect import DetectionTrainer

from batches import seen
from feed import RemoteDataset  # added

for number in range(24):
    images, labels = (Path("data", split, "train") for split in ("images", "labels"))
    images.mkdir(parents=True, exist_ok=True), labels.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(number).integers(0, 255, (64, 64, 3), np.uint8)
    Image.fromarray(pixels).save(images / f"{number:02}.png")
    (labels / f"{number:02}.txt").write_text("0 0.5 0.5 0.4 0.4")
Path("data.yaml").write_text(
    f"path: {Path('data').resolve()}\ntrain: images/train\nval: images/train\nnames: [square]"
)


class Trainer(DetectionTrainer):
    def preprocess_batch(self, batch):
        numbers = [Path(file).stem for file in batch["im_file"]]
        boxes = [batch["bboxes"][batch["batch_idx"] == at] for at in range(len(numbers))]
        kind = "random" if self.epoch < 2 else "fixed"  # the last epoch has no mosaics
        seen(self.epoch, numbers, **{kind: zip(batch["img"], boxes, strict=True)})
        return super().preprocess_batch(batch)


class MyTrainer(Trainer):  # added
    def build_dataset(self, *args, **kwargs):  # added
        return RemoteDataset(super().build_dataset(*args, **kwargs))  # added


no_other = {"hsv_h": 0, "hsv_s": 0, "hsv_v": 0, "translate": 0, "scale": 0, "fliplr": 0}
overrides = {"model": "yolo26n.yaml", "data": "data.yaml", "imgsz": 64, "batch": 4, "plots": False}
overrides |= {
    "epochs": 3,
    "close_mosaic": 1,
    "cache": "ram",
    "val": False,
    "device": "cpu",
    "project": "runs",
}
trainer = Trainer(overrides=overrides | no_other)  # plain
trainer = MyTrainer(overrides=overrides | no_other)  # added
trainer.args.workers = 2  # on a CPU, the trainer has set it to 0
trainer.train()
