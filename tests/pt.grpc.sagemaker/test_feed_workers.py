"""The loader of the PyTorch example when worker processes of its data hosts die or hang."""

import psutil
import pytest
from test_feed_hosts import expected, steady_keys  # noqa: F401  (a fixture)

from data_hosts import (
    BIG,
    DEADLY,
    SLOW,
    DataHost,
    assert_same,
    has_ended,
    service,
    up,
    wait_until,
)
from feed.wire import DatasetError

BATCHES = [[i] for i in range(100)]


def all_workers(host: DataHost) -> list[psutil.Process]:
    """Its worker processes, when all are there."""

    def living() -> list[psutil.Process]:
        return [worker for worker in host.workers() if not has_ended(worker)]

    wait_until(lambda: len(living()) == host.options["num_workers"], seconds=30)
    return living()


def test_a_worker_that_is_killed_is_replaced_and_the_log_says_so(start, expected):  # noqa: F811
    [host] = up(start("steady", num_workers=2))
    batches = iter(service([host], steady_keys()))
    received = []
    for _ in range(3):
        received += [next(batches), next(batches)]
        victim = all_workers(host)[0]
        victim.kill()
        wait_until(lambda victim=victim: has_ended(victim))
    assert_same(received + list(batches), expected)
    assert "feed: a worker process has died (exit code -9) over batch " in host.said()


def test_workers_that_are_killed_while_they_have_nothing_to_do_cost_nothing(start):
    [host] = up(start("zoo", num_workers=2))
    loader = service([host], BATCHES)
    list(loader)
    for worker in all_workers(host):
        worker.kill()
    assert [batch["index"].item() for batch in loader] == list(range(100))


def test_a_sample_that_kills_its_process_is_an_error_and_no_endless_loop(start):
    [host] = up(start("zoo", num_workers=1))
    batches = iter(service([host], [[0], [DEADLY], [1]]))
    next(batches)
    died = r"a worker process has died \(exit code -9\) over batch 1"
    with pytest.raises(DatasetError, match=f"batch 1: {died}, and then {died}: is there memory"):
        next(batches)
    assert len(list(service([host], BATCHES))) == 100  # it serves on


def test_a_batch_that_takes_longer_than_it_may_is_an_error_too(start):
    [host] = up(start("zoo", num_workers=1, timeout=2))
    batches = iter(service([host], [[0], [SLOW]]))
    next(batches)
    with pytest.raises(DatasetError, match="a worker process hangs over batch 1, and then a work"):
        next(batches)
    assert len(list(service([host], BATCHES))) == 100


def test_a_worker_that_is_frozen_is_replaced(start):
    [host] = up(start("zoo", num_workers=1, timeout=2))
    batches = iter(service([host], BATCHES, read_ahead=1))
    received = [next(batches) for _ in range(3)]
    for worker in all_workers(host):
        worker.suspend()
    received += list(batches)
    assert [batch["index"].item() for batch in received] == list(range(100))
    assert "feed: a worker process hangs over batch " in host.said()


def test_a_worker_that_is_frozen_within_a_batch_is_replaced(start):
    """One whose server waits for the rest of a large batch."""
    [host] = up(start("zoo", num_workers=1, timeout=2))
    batches = iter(service([host], [[BIG]] * 150, read_ahead=1))
    [worker] = all_workers(host)
    for _ in range(3):
        assert next(batches).sum() == 40 << 20
    worker.suspend()
    for batch in batches:
        assert batch.sum() == 40 << 20
        if "hangs" in host.said():
            break
    assert next(batches).sum() == 40 << 20


@pytest.mark.thorough
@pytest.mark.parametrize(
    "frozen, others", [(1, []), (1, ["20"]), (2, ["20"]), (2, ["400"])]
)  # of the first host's two; other hosts' milliseconds for a batch
def test_a_frozen_worker_holds_nobody_up_beside_one_that_is_not(start, frozen, others):
    """The overdue batch is asked for again, long before the server gives its worker up."""
    hosts = [start("paced", num_workers=2, environment={"PACE": pace}) for pace in ["20", *others]]
    up(*hosts)
    loader = service(hosts, BATCHES[:50])
    list(loader)  # now it is known how long a batch takes
    batches = iter(loader)
    received = [next(batches) for _ in range(10)]
    for worker in all_workers(hosts[0])[:frozen]:
        worker.suspend()
    received += list(batches)
    assert [indices.item() for indices, _ in received] == list(range(50))
    assert "worker" not in hosts[0].said()  # for serve's 300 s are not over
