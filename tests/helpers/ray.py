"""What jobs with docs/ray need: its files and command, and a folder of images."""

import re
from io import BytesIO

import boto3
import numpy as np
from PIL import Image

from helpers.jobs import texts_in
from helpers.pages import ROOT
from helpers.running import CODE

FOLDER = ROOT / "docs" / "ray"
FILES = {**texts_in(CODE, "hetero"), **texts_in(FOLDER)}
[COMMAND] = re.findall(r'command="(exec .*)"', FOLDER.with_suffix(".md").read_text())
IMAGES = 321  # one more than two ranks can share


def upload_images() -> str:
    """Put IMAGES images of two classes into S3, of one color each, its number; return their URI."""
    s3 = boto3.client("s3")
    s3.create_bucket(Bucket="pets")
    for number in range(IMAGES):
        pixels = np.full((48, 48, 3), [number // 256, number % 256, 0], np.uint8)
        Image.fromarray(pixels).save(file := BytesIO(), "png")
        key = f"images/{('cat', 'dog')[number % 2]}/{number}.png"
        s3.put_object(Bucket="pets", Key=key, Body=file.getvalue())
    return "s3://pets/images"
