"""`distribute`: names, ranks, epochs, and what happens if no data host answers.

test_service_pipelines.py tests which pipelines it takes, and test_tensorflow.py tests jobs. Here
the workers are in this process.
"""

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from helpers.data_service import counted, data_hosts, dispatcher_of, numbered
from helpers.pages import TENSORFLOW

CODE = TENSORFLOW / "code"
SAMPLES = 400


@pytest.fixture(scope="module", autouse=True)
def imports() -> None:
    """Import TensorFlow, which takes seconds, only in the process that runs these tests."""
    global Dataset, distribute, distributed, numpy_function, tf
    import tensorflow as tf

    from service import distribute, distributed, numpy_function

    Dataset = tf.data.Dataset


# ---- names, ranks and epochs


def test_each_dataset_has_a_name_of_its_own():
    with data_hosts(2):
        training = distribute(numbered(Dataset.range(SAMPLES)).batch(16))
        validation = numbered(Dataset.range(1000, 1100)).batch(16)
        with pytest.raises(ValueError, match="another dataset has the name 'training'.*name="):
            distribute(validation)
        other = distribute(validation, name="validation")
        assert counted(other) == counted(validation) and sum(counted(training).values()) == SAMPLES


def test_several_ranks_need_a_dataset_without_end():
    with data_hosts(1, ranks=2):
        with pytest.raises(ValueError, match=r"2 ranks would get unequal numbers .*repeat\(\)"):
            distribute(Dataset.range(SAMPLES).batch(16))
        distribute(Dataset.range(SAMPLES).batch(16), name="validation")
        distribute(Dataset.range(SAMPLES).repeat().batch(16))
        distribute(Dataset.range(tf.int64.max).batch(16), name="other")


@pytest.mark.parametrize("hosts", ["", "nobody:1"])
def test_ranks_that_would_train_alone_are_refused(monkeypatch: pytest.MonkeyPatch, hosts: str):
    """test_tensorflow.py has jobs whose ranks have joined, and get their samples."""
    monkeypatch.setenv("HETERO_DATA_HOSTS", hosts)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="WORLD_SIZE is 2, but nothing keeps the ranks in step"):
        distribute(Dataset.range(SAMPLES))


def test_keras_keeps_epochs_of_a_dataset_that_ends():
    model = tf.keras.Sequential([tf.keras.Input((1,)), tf.keras.layers.Dense(1)])
    seen: list[int] = []

    class Model(tf.keras.Model):
        def train_step(self, batch: tuple) -> dict:
            seen.extend(batch[0][:, 0].numpy().astype(int).tolist())
            return {"loss": 0.0}

    def samples(numbers: Any) -> Any:
        return numbers.map(lambda n: (tf.cast([n], tf.float32), n)).batch(16)

    model = Model(model.inputs, model.outputs)
    model.compile(optimizer="sgd", loss="mse", run_eagerly=True)
    with data_hosts(2):
        model.fit(distribute(samples(Dataset.range(SAMPLES))), epochs=3, verbose=0)
        assert sorted(seen) == sorted([*range(SAMPLES)] * 3)


class Forgetful(set):
    """Forgets the names in use, as if several processes called `distribute`."""

    def __contains__(self, name: object) -> bool:
        return False


def test_coordinated_reads_give_ranks_batches_of_one_round():
    """Both ranks take part, each in a thread here."""
    rounds = Dataset.range(tf.int64.max).flat_map(lambda n: Dataset.from_tensors(n).repeat(2))
    seen: dict[int, list[int]] = {}

    def read(rank: int) -> None:
        batches = distribute(rounds.batch(1), consumer_index=rank, num_consumers=2)
        seen[rank] = [int(batch[0]) for batch in batches.take(50)]

    with data_hosts(2, ranks=2), mock.patch.object(distributed, "used_names", Forgetful()):
        threads = [threading.Thread(target=read, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert seen[0] == seen[1] and len({*seen[0]}) == 50


def test_two_trainings_may_share_the_work():
    cache = tf.data.experimental.service.CrossTrainerCache
    both = []
    with data_hosts(1), mock.patch.object(distributed, "used_names", Forgetful()):
        for trainer in "ab":
            dataset = distribute(
                Dataset.range(tf.int64.max).batch(4), cross_trainer_cache=cache(trainer_id=trainer)
            )
            both.append([batch.tolist() for batch in dataset.take(20).as_numpy_iterator()])
    assert both[0] == both[1]


def test_without_data_hosts_a_dataset_stays_as_it_is(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("HETERO_DATA_HOSTS", raising=False)
    dataset = Dataset.range(SAMPLES).cache()
    assert distribute(dataset) is dataset and distribute(dataset) is dataset


# ---- what is refused


def test_only_a_dataset_is_taken(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HETERO_DATA_HOSTS", "nobody:1")
    for other in ([1, 2], iter(Dataset.range(3)), tf.keras.utils.PyDataset()):
        with pytest.raises(ValueError, match="it takes a tf.data.Dataset, not"):
            distribute(other)


@pytest.mark.parametrize("hosts", ["algo-1", "algo-1:", "algo-1:x", " "])
def test_malformed_addresses_are_refused(monkeypatch: pytest.MonkeyPatch, hosts: str):
    monkeypatch.setenv("HETERO_DATA_HOSTS", hosts)
    with pytest.raises(ValueError, match="HETERO_DATA_HOSTS must begin with HOST:PORT"):
        distribute(Dataset.range(SAMPLES))


def test_in_a_tf_function_it_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HETERO_DATA_HOSTS", "nobody:1")
    with pytest.raises(ValueError, match="call it outside of a tf.function"):
        tf.function(lambda: distribute(Dataset.range(SAMPLES)))()


@pytest.mark.parametrize("function", [lambda value: value, Path.exists])
def test_functions_that_data_hosts_cannot_import_are_refused(function: Callable):
    with pytest.raises(ValueError, match="numpy_function: data hosts cannot import"):
        Dataset.range(3).map(lambda n: numpy_function(function, [n], tf.int64))


# ---- waiting

WAIT = """
import tensorflow as tf
from service import distribute, waiting
waiting.HOPELESS_SECONDS, waiting.TELL_SECONDS = 6, 2
dataset = tf.data.Dataset.range(100)
if {slow}:
    def slowly(n):
        return tf.while_loop(lambda i: i < {slow}, lambda i: i + 1, [tf.constant(0, tf.int64)])[0]
    dataset = dataset.map(slowly)
for batch in distribute(dataset.batch(10)):
    print("a batch has come", flush=True)
"""


def run(address: str, slow: int = 0) -> tuple[int, str]:
    """Run a training that waits for this dispatcher; return its exit status and output."""
    environment = {"HETERO_DATA_HOSTS": address, "PYTHONPATH": str(CODE)}
    done = subprocess.run(
        [sys.executable, "-c", WAIT.format(slow=slow)],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=250,
    )
    return done.returncode, done.stdout.strip()


def test_a_dispatcher_that_is_not_there_ends_the_training():
    status, said = run("127.0.0.1:1")
    assert status == 1
    assert re.search(
        r"ConnectionError: distribute: gave up after 6 s: the dispatcher at 127.0.0.1:1 cannot "
        r"be reached \(.*refused\)$",
        said,
    )


def test_a_dispatcher_without_workers_ends_the_training():
    with dispatcher_of(0) as address:
        status, said = run(address)
    assert status == 1
    what = f"no worker has come to the dispatcher at {address}"
    assert re.search(rf"distribute: no batch of training in \d s: {what}\n", said)
    assert said.splitlines()[-1] == f"distribute: gave up after 6 s: {what}."


@pytest.mark.thorough
def test_a_slow_first_batch_is_waited_for():
    with dispatcher_of(2) as address:
        status, said = run(address, slow=200_000)
    assert status == 0 and said.endswith("a batch has come")
    assert re.search(r"no batch of training in \d+ s: workers are at \w+:\d+, \w+:\d+\n", said)
