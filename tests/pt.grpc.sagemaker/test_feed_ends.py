"""If a program leaves an epoch or ends, the loader ends at once and leaves nothing behind."""

import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from helpers.data_hosts import (
    CODE,
    DataHost,
    environment_of,
    has_ended,
    loader_of,
    up,
    wait_for_threads,
)
from helpers.datasets import SLOW, Troubled
from helpers.waiting import wait_until


@pytest.fixture(scope="module")
def many() -> Iterator[DataHost]:
    """A data host with so many workers that some may stay asleep."""
    [host] = up(DataHost(workers=40))
    yield host
    host.kill()


def test_leaving_an_epoch_leaves_nothing(many):
    """Whether the loader waits for the training or for a sample."""
    threads, others = set(threading.enumerate()), set(psutil.Process().children())
    for num_workers, numbers in [(0, [[0]] * 9), (2, [[0]] * 9), (1, [[0]] + [[SLOW]] * 9)]:
        batches = iter(loader_of([many], Troubled(), numbers, num_workers=num_workers))
        next(batches)
        workers = set(psutil.Process().children()) - others
        del batches
        wait_for_threads(threads)
        wait_until(lambda workers=workers: all(map(has_ended, workers)))


PROGRAM = """if True:
    import sys
    from helpers.data_hosts import *
    from helpers.datasets import *
    numbers = [[0]] * 3 + [[{number}]] * 99
    batches = iter(
        DataLoader(RemoteDataset(Troubled()), batch_sampler=numbers, num_workers={workers})
    )
    next(batches)
    {end}"""


def begin(host: DataHost, number: int, num_workers: int, end: str) -> psutil.Popen:
    """Start a program that runs the line `end` in the middle of an epoch."""
    program = PROGRAM.format(number=number, workers=num_workers, end=end)
    return psutil.Popen(
        [sys.executable, "-W", "ignore", "-c", program],
        env=environment_of([host]),
        stderr=subprocess.PIPE,
        text=True,
        # If the tests run in the background, the program would ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def begin_and_wait(host: DataHost, num_workers: int) -> psutil.Popen:
    """Start a program that waits for a sample forever."""
    asleep = host.said().count("asleep")
    program = begin(host, SLOW, num_workers, "list(batches)")
    wait_until(lambda: host.said().count("asleep") > asleep + max(0, num_workers - 1))
    return program


@pytest.mark.parametrize("num_workers, end, code", [(0, "1 / 0", 1), (2, "sys.exit(5)", 5)])
def test_a_program_may_end_in_the_middle_of_an_epoch(many, num_workers, end, code):
    program = begin(many, 0, num_workers, end)
    _, errors = program.communicate(timeout=60)
    said = ["ZeroDivisionError: division by zero"] if code == 1 else []
    assert (program.returncode, errors.splitlines()[-1:]) == (code, said)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_ctrl_c_ends_a_program_that_waits_for_a_sample(many, num_workers):
    program = begin_and_wait(many, num_workers)
    program.send_signal(signal.SIGINT)
    _, errors = program.communicate(timeout=60)
    assert program.returncode == -signal.SIGINT
    assert errors.splitlines()[-1] == "KeyboardInterrupt"


def test_workers_of_a_dataloader_end_with_a_training_that_is_killed(many):
    program = begin_and_wait(many, 2)
    workers = program.children()
    assert len(workers) == 2
    program.kill()
    program.communicate()
    wait_until(lambda: all(map(has_ended, workers)))


@pytest.mark.thorough
def test_feed_can_be_imported_from_any_path_and_after_tensorflow(tmp_path: Path):
    folder = tmp_path / "a b" / "ü"
    shutil.copytree(CODE / "feed", folder / "feed")
    program = f"import sys, tensorflow; sys.path.insert(0, {str(folder)!r}); import feed"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
