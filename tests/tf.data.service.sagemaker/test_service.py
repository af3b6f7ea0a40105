"""`distribute`: names, ranks, epochs, random numbers, state, and data hosts that do not answer.

test_service_pipelines.py tests which pipelines it takes, and test_tensorflow.py tests jobs. Here
the workers are in this process. helpers/carried.py has the pipelines with random numbers and state;
`make containers` runs it with TensorFlow 2.12, too.
"""

import os
import re
import runpy
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.data_service import LEAN, counted, data_hosts, dispatcher_of, numbered
from helpers.pages import TENSORFLOW

CODE = TENSORFLOW / "code"
SAMPLES = 400


@pytest.fixture(scope="module", autouse=True)
def imports() -> None:
    """Import TensorFlow, which takes seconds, only in the process that runs these tests."""
    global Dataset, carried, distribute, numpy_function, tf
    import tensorflow as tf

    from helpers import carried
    from service import distribute, numpy_function

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


def test_keras_keeps_epochs_of_a_dataset_that_ends():
    model = tf.keras.Sequential([tf.keras.Input((1,)), tf.keras.layers.Dense(1)])
    seen: list[int] = []

    class Model(tf.keras.Model):
        def train_step(self, batch: tuple) -> dict:
            seen.extend(batch[0][:, 0].numpy().astype(int).tolist())
            return {"loss": 0.0}

    model = Model(model.inputs, model.outputs)
    model.compile(optimizer="sgd", loss="mse", run_eagerly=True)
    samples = Dataset.range(SAMPLES).map(lambda n: (tf.cast([n], tf.float32), n))
    with data_hosts(2):
        model.fit(distribute(samples.batch(16)), epochs=3, verbose=0)
    assert sorted(seen) == sorted([*range(SAMPLES)] * 3)


def test_coordinated_reads_give_ranks_batches_of_one_round():
    """Both ranks take part, each in a thread here."""
    rounds = Dataset.range(tf.int64.max).flat_map(lambda n: Dataset.from_tensors(n).repeat(2))
    seen: dict[int, list[int]] = {}

    def read(rank: int) -> None:
        batches = distribute(rounds.batch(1), consumer_index=rank, num_consumers=2)
        seen[rank] = [int(batch[0]) for batch in batches.take(50)]

    with data_hosts(2, ranks=2, processes=2):
        threads = [threading.Thread(target=read, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert seen[0] == seen[1] and len({*seen[0]}) == 50


def test_two_trainings_may_share_the_work():
    cache = tf.data.experimental.service.CrossTrainerCache
    numbers = Dataset.range(tf.int64.max).batch(4)
    with data_hosts(1, processes=2):
        both = [
            [*distribute(numbers, cross_trainer_cache=cache(trainer_id=trainer)).take(20).unbatch()]
            for trainer in "ab"
        ]
    assert both[0] == both[1]


def test_ranks_with_different_pipelines_are_refused():
    names = [f"{number}.tfrecord" for number in range(8)]

    def pipeline(files: list, size: int = 4) -> Any:
        return tf.data.TFRecordDataset(files).repeat().batch(size)

    with data_hosts(1, ranks=2, processes=2):
        distribute(pipeline(names[0::2]))
        distribute(pipeline(names[0::2]))
        for other in (pipeline(names[1::2]), pipeline(names[0::2], 5), pipeline(names[6::-2])):
            with pytest.raises(ValueError, match="different dataset with the name 'training'.*All"):
                distribute(other)
        distribute(pipeline(names[1::2]), name="other")


def test_a_pipeline_has_one_fingerprint_in_all_processes(capsys: pytest.CaptureFixture):
    """Although this process has done other work before."""
    program = str(Path(__file__).parent / "fingerprint.py")
    places = {"PYTHONPATH": f"{CODE}:{LEAN}"}
    other = subprocess.check_output([sys.executable, program], env=os.environ | places, text=True)
    capsys.readouterr()
    runpy.run_path(program)
    assert capsys.readouterr().out == other != ""


# ---- random numbers and state

ALL_WORKERS = [2, *(pytest.param(n, marks=pytest.mark.thorough) for n in (1, 3))]


@pytest.mark.parametrize(
    "workers, seed",
    [(2, 1), *(pytest.param(n, s, marks=pytest.mark.thorough) for n in (1, 3) for s in (None, 1))],
)
def test_random_numbers_differ_in_each_epoch_and_worker(workers: int, seed: int | None):
    carried.check_random_numbers(workers, seed)
    carried.check_orders(workers)


@pytest.mark.parametrize("workers", ALL_WORKERS)
def test_what_does_not_change_is_used_as_it_is(workers: int):
    carried.check_constants(workers)


def test_what_can_change_or_is_seen_in_shares_is_refused():
    carried.check_refusals()


def test_what_is_known_to_be_right_can_be_allowed():
    variable = tf.Variable(3, dtype=tf.int64)
    dataset = Dataset.range(9).map(lambda n: n + variable).cache().batch(4)
    with data_hosts(1):
        for allow in (["ReadVariableOp"], ["Cache"], ["Zip"]):
            with pytest.raises(ValueError):
                distribute(dataset, allow=allow)
        numbers = distribute(dataset, allow=["ReadVariableOp", "Cache"]).unbatch()
        assert sorted(numbers.as_numpy_iterator()) == [*range(3, 12)]


def test_the_script_s_own_dataset_stays_as_it_is(monkeypatch: pytest.MonkeyPatch):
    """`distribute` changes a copy: with a seed, the dataset itself repeats its numbers."""
    dataset = Dataset.range(9).map(lambda n: tf.random.uniform([], seed=5))
    with data_hosts(1):
        distribute(dataset)
    first, second = ([*dataset.as_numpy_iterator()] for _ in range(2))
    assert first == second
    monkeypatch.delenv("HETERO_DATA_HOSTS", raising=False)  # then there is nothing to change
    dataset = Dataset.range(SAMPLES).cache()
    assert distribute(dataset) is dataset and distribute(dataset) is dataset


# ---- what is refused

ALONE = "WORLD_SIZE is 2, but nothing keeps the ranks in step"
MALFORMED = "HETERO_DATA_HOSTS must begin with HOST:PORT"
NO_DATASET = "it takes a tf.data.Dataset, not"
IN_GRAPH = "call it outside of a tf.function"


@pytest.mark.parametrize(
    "hosts, ranks, call, sentence",
    [
        # test_tensorflow.py has jobs whose ranks have joined, and get their samples.
        ("", 2, lambda: distribute(Dataset.range(9)), ALONE),
        ("nobody:1", 2, lambda: distribute(Dataset.range(9)), ALONE),
        ("algo-1", 1, lambda: distribute(Dataset.range(9)), MALFORMED),
        ("algo-1:", 1, lambda: distribute(Dataset.range(9)), MALFORMED),
        ("algo-1:x", 1, lambda: distribute(Dataset.range(9)), MALFORMED),
        (" ", 1, lambda: distribute(Dataset.range(9)), MALFORMED),
        ("nobody:1", 1, lambda: distribute(iter(Dataset.range(3))), NO_DATASET),
        ("nobody:1", 1, lambda: tf.function(lambda: distribute(Dataset.range(9)))(), IN_GRAPH),
    ],
)
def test_wrong_calls_are_refused(
    monkeypatch: pytest.MonkeyPatch, hosts: str, ranks: int, call: Callable, sentence: str
):
    monkeypatch.setenv("HETERO_DATA_HOSTS", hosts)
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    with pytest.raises(ValueError, match=sentence):
        call()


@pytest.mark.parametrize("function", [lambda value: value, Path.exists])
def test_functions_that_data_hosts_cannot_import_are_refused(function: Callable):
    with pytest.raises(ValueError, match="numpy_function: data hosts cannot import"):
        Dataset.range(3).map(lambda n: numpy_function(function, [n], tf.int64))


# ---- waiting

WAIT = """
import os
import tensorflow as tf
from service import distribute, waiting
there, os.environ["HETERO_DATA_HOSTS"] = os.environ["HETERO_DATA_HOSTS"], "127.0.0.1:1"
waiting.HOPELESS_SECONDS = 1
dataset = tf.data.Dataset.range(100)
try:
    distribute(dataset)
except ConnectionError as error:
    print(error)
os.environ["HETERO_DATA_HOSTS"] = there
waiting.HOPELESS_SECONDS, waiting.TELL_SECONDS = 6, 2
if {slow}:
    def slowly(n):
        return tf.while_loop(lambda i: i < {slow}, lambda i: i + 1, [tf.constant(0, tf.int64)])[0]
    dataset = dataset.map(slowly)
for batch in distribute(dataset.batch(10)):
    print("a batch has come", flush=True)
"""
UNREACHABLE = r"gave up after 1 s: the dispatcher at 127.0.0.1:1 cannot be reached \(.*refused\)\n"
NO_WORKER = (
    r"distribute: no batch of training in \d s: (no worker has come to the dispatcher at ADDRESS)\n"
    r"(.*\n)*distribute: gave up after 6 s: \1\.$"
)
SLOW = r"no batch of training in \d+ s: workers are at \w+:\d+, \w+:\d+\n(.*\n)*a batch has come$"


@pytest.mark.parametrize(
    "workers, slow, status, sentence",
    [
        (0, 0, 1, NO_WORKER),
        pytest.param(2, 200_000, 0, SLOW, marks=pytest.mark.thorough),
    ],
)
def test_a_training_waits_for_its_first_batch_while_it_may_come(workers, slow, status, sentence):
    with dispatcher_of(workers) as address:
        places = {"HETERO_DATA_HOSTS": address, "PYTHONPATH": f"{CODE}:{LEAN}"}
        done = subprocess.run(
            [sys.executable, "-c", WAIT.format(slow=slow)],
            env=os.environ | places,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=250,
        )
    said = done.stdout.strip()
    assert re.search(UNREACHABLE, said)
    assert done.returncode == status
    assert re.search(sentence.replace("ADDRESS", address), said), said
