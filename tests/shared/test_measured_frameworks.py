"""measured.py in real time; time.sleep stands for work, because other programs don't slow it."""

import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

from helpers.simulated import numbers
from shared import measured as module
from shared.measured import measured

pytestmark = pytest.mark.usefixtures("alone")
thorough = pytest.mark.thorough  # test_measured.py has more cases, in simulated time


@pytest.fixture
def finds(capsys) -> Callable:
    """Checks that a run finds about the given times, or those that two further runs take."""

    def finds(run: Callable[[], None], step_ms: Callable, without_data_ms: Callable) -> None:
        for _ in range(8):  # now and then a machine is too busy even for that
            run()
            found = numbers(capsys.readouterr().out)
            times, expected = (
                (found["step_ms"], found["without_data_ms"]),
                (step_ms(), without_data_ms()),
            )
            if times == pytest.approx(expected, rel=0.1, abs=2):
                return
        pytest.fail(f"{times} instead of {expected}")

    return finds


def mean_ms(ends: list[float], first: int = 10) -> float:
    """Return the mean step time, without the first steps."""
    return 1000 * (ends[-1] - ends[first - 1]) / (len(ends) - first)


class Digits(Dataset):
    def __init__(self, batches: int, seconds: float):
        self.batches, self.seconds = batches, seconds

    def __len__(self) -> int:
        return 8 * self.batches

    def __getitem__(self, index: int) -> tuple:
        time.sleep(self.seconds / 8)
        return torch.full((1, 28, 28), index / len(self)), index % 10


class Net(torch.nn.Module):
    def __init__(self, seconds: float):
        super().__init__()
        self.fc, self.seconds = torch.nn.Linear(28 * 28, 10), seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return F.log_softmax(self.fc(torch.flatten(x, 1)), dim=1)


def train(model: Net, train_loader, wrap: Callable = iter) -> float:
    """Train as PyTorch's official example, mnist/main.py, does; return the step time."""
    ends, optimizer = [], torch.optim.Adadelta(model.parameters())
    model.train()
    for batch_idx, (data, target) in enumerate(wrap(train_loader)):
        data, target = data.to("cpu"), target.to("cpu")
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        ends.append(time.perf_counter())
        if batch_idx % 10 == 0:
            print(f"Train Epoch: 1 [{batch_idx * len(data)}]")
    return mean_ms(ends)


@pytest.mark.parametrize(
    "workers, data, step",
    [
        pytest.param(0, 0.02, 0.02, marks=thorough, id="no workers"),
        pytest.param(2, 0.06, 0.015, id="loader is the limit"),
        pytest.param(2, 0.02, 0.03, marks=thorough, id="loader is not the limit"),
    ],
)
def test_pytorch_loop_as_two_jobs_find_it(finds, workers, data, step):
    def loader(batches: int) -> DataLoader:
        return DataLoader(Digits(batches, data), batch_size=8, num_workers=workers)

    finds(
        lambda: train(Net(step), loader(150), lambda batches: measured(batches, 72)),
        lambda: train(Net(step), loader(40)),
        lambda: train(Net(step), [next(iter(loader(1)))] * 30),
    )


def slow(data: float, *tensors: list, prefetch: int = 2):
    """A tf.data.Dataset that makes a batch in `data` seconds; its sleep takes no CPU time."""
    import tensorflow as tf
    from tensorflow.python.data.experimental.ops import testing

    dataset = tf.data.Dataset.from_tensors(tensors).repeat()
    return dataset.apply(testing.sleep(int(1e6 * data))).prefetch(prefetch)


def slow_in_parallel(data: float):
    """The same, but up to four batches at a time, as far as there are cores."""
    import tensorflow as tf

    def slowly(x: np.ndarray) -> np.ndarray:
        time.sleep(4 * data)
        return x

    dataset = tf.data.Dataset.from_tensors([1.0]).repeat()
    return dataset.map(
        lambda x: tf.numpy_function(slowly, [x], tf.float32), num_parallel_calls=4
    ).prefetch(1)


@pytest.mark.parametrize(
    "data, step, make",
    [
        (0.02, 0.012, slow_in_parallel),
        pytest.param(
            *(0.005, 0.03, lambda data: slow(data, [1.0], prefetch=-1)),  # -1: AUTOTUNE
            marks=thorough,
        ),
    ],
)
def test_tensorflow_loop_as_two_jobs_find_it(finds, data, step, make):
    def train(batches) -> float:
        ends = []
        for _ in batches:
            time.sleep(step)
            ends.append(time.perf_counter())
            if getattr(batches, "reported", False):
                break
        return mean_ms(ends, 20)

    finds(
        lambda: train(measured(make(data), 144)),
        lambda: train(make(data).take(60)),
        lambda: train(make(data).take(1).cache().repeat().take(60)),
    )


def keras_model(**settings):
    import tensorflow as tf

    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    model.compile(loss="mse", **settings)
    return model


def after_each_batch(function: Callable[[], None]):
    import tensorflow as tf

    return tf.keras.callbacks.LambdaCallback(on_train_batch_end=lambda *_, **__: function())


@thorough
def test_keras_fit_as_two_jobs_find_it(finds):
    dataset, model = slow(0.04, [[1.0, 2.0]], [[3.0]]), keras_model()
    work = after_each_batch(lambda: time.sleep(0.015))

    def fit(dataset) -> float:
        ends = []
        look = after_each_batch(lambda: ends.append(time.perf_counter()))
        model.fit(dataset, steps_per_epoch=40, callbacks=[work, look], verbose=0)
        return mean_ms(ends)

    finds(
        lambda: module.measured_fit(model, dataset, callbacks=[work], verbose=0),
        lambda: fit(dataset),
        lambda: fit(dataset.take(1).cache().repeat()),
    )


def test_keras_fit_of_a_python_dataset_and_of_arrays(capsys):
    """A PyDataset prepares batches when fit asks for them."""
    import tensorflow as tf

    class Slow(tf.keras.utils.PyDataset):
        def __len__(self) -> int:
            return 7

        def __getitem__(self, index: int) -> tuple:
            time.sleep(0.04)
            return np.ones((2, 2), "float32"), np.ones((2, 1), "float32")

    work = after_each_batch(lambda: time.sleep(0.02))
    module.measured_fit(keras_model(), Slow(), callbacks=[work], verbose=0)
    found = numbers(capsys.readouterr().out)
    assert 38 < found["step_ms"] < 90 and 20 < found["without_data_ms"] < 38  # it prefetches
    with pytest.raises(TypeError, match=r"measured_fit\(ndarray\).*arrays are prepared already"):
        module.measured_fit(keras_model(), np.ones((2, 2)))
    with pytest.raises(ValueError, match="compile the model with steps_per_execution=1"):
        module.measured_fit(keras_model(steps_per_execution=2), Slow())
