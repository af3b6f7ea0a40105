"""The TensorFlow example's input pipeline, compared with plain references."""

import io
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from helpers.data_service import dispatcher_of
from helpers.images import encode, image, write_records

FILES, RECORDS = 5, 24  # records in each file


@pytest.fixture(scope="module", autouse=True)
def imports() -> None:
    """Import TensorFlow, which takes seconds, only in the process that runs these tests."""
    global distributed, pipeline, tf
    import tensorflow as tf

    import pipeline
    from service import distributed


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """TFRecord files in which a record's label is its number."""
    folder = tmp_path_factory.mktemp("records")
    write_records(folder, FILES, RECORDS)
    return pipeline.find_files(f"{folder}/*.tfrecord")


def labels(files: list[str], **settings) -> list[list[int]]:
    """Return the labels of each batch."""
    return [
        batch.tolist() for _, batch in pipeline.build(files, 16, **settings).as_numpy_iterator()
    ]


def test_jpeg_and_other_sizes_are_read_too(tmp_path: Path):
    picture, stream = Image.new("RGB", (90, 60), (255, 128, 0)), io.BytesIO()
    picture.save(stream, "JPEG")
    with tf.io.TFRecordWriter(f"{tmp_path}/jpeg") as writer:
        writer.write(encode(stream.getvalue(), 0))
    ((images, _),) = pipeline.build([f"{tmp_path}/jpeg"], 1, passes=1).as_numpy_iterator()
    assert images.shape == (1, 32, 32, 3)
    np.testing.assert_allclose(images[0, 16, 16], [1, 0.5, 0], atol=0.02)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_together_see_every_record_once_in_each_pass(files: list[str], ranks: int):
    seen = []
    for rank in range(ranks):
        shares = labels(files, augment=0, passes=2, rank=rank, ranks=ranks)
        seen += [number for batch in shares for number in batch]
    assert sorted(seen) == sorted([*range(FILES * RECORDS)] * 2)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_workers_together_give_every_record_once_in_each_pass_with_its_label(
    files: list[str], monkeypatch: pytest.MonkeyPatch, workers: int
):
    """The label is the image's number; the seed of a record's random numbers grows by pass."""
    prepare = pipeline.prepare

    def prepare_and_tell(n: object, record: object, augment: int) -> tuple:
        return *prepare(n, record, augment), n

    monkeypatch.setattr(pipeline, "prepare", prepare_and_tell)
    monkeypatch.setattr(distributed, "used_names", set())
    seen = []
    with dispatcher_of(workers) as dispatcher:
        monkeypatch.setenv("HETERO_DATA_HOSTS", dispatcher)
        settings = {"augment": 0, "seed": 7, "passes": 3, "on_data_hosts": True}
        for images, numbers, ns in pipeline.build(files, 8, **settings).as_numpy_iterator():
            assert images.dtype == np.float32 and numbers.dtype == np.int64
            for got, number in zip(images, numbers, strict=True):
                np.testing.assert_allclose(got, image(int(number)) / 255, atol=1e-6)
            seen += zip(ns.tolist(), numbers.tolist(), strict=True)
    assert sorted(seen) == [*product((7, 8, 9), range(FILES * RECORDS))]


def test_order_depends_on_seed_and_pass_and_endless_batches_are_full(files: list[str]):
    once = labels(files, augment=0, passes=1, seed=1)
    assert once == labels(files, augment=0, passes=1, seed=1)
    assert once != labels(files, augment=0, passes=1, seed=2)
    numbers = sum(labels(files, augment=0, passes=2, seed=1), [])
    first = [*dict.fromkeys(numbers)]
    second = [*dict.fromkeys(reversed(numbers))][::-1]
    assert sorted(first) == sorted(second) == [*range(FILES * RECORDS)] and first != second
    endless = pipeline.build(files, 50, augment=0).take(10).as_numpy_iterator()
    assert {len(numbers) for _, numbers in endless} == {50}


def test_augmentation_differs_in_each_pass_and_repeats_with_the_seed(files: list[str]):
    def seen(seed: int) -> dict[int, list[np.ndarray]]:
        found: dict[int, list[np.ndarray]] = {}
        for images, numbers in pipeline.build(files, 1, 1, seed, passes=2).as_numpy_iterator():
            found.setdefault(int(numbers[0]), []).append(images[0])
        return found

    first, again = seen(seed=1), seen(seed=1)
    for number, (one, other) in first.items():
        np.testing.assert_array_equal(one, again[number][0])
        assert np.abs(one - other).max() > 0.01


def test_finer_augmentation_costs_more(files: list[str]):
    coarse, fine = (pipeline.milliseconds_per_sample(files, augment) for augment in (1, 3))
    assert 0 < coarse < fine


def test_files_that_are_not_there(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"No file matches training/\*"):
        pipeline.find_files("training/*")
