"""Data hosts for the tests of the loader."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def hosts() -> Iterator[list]:
    """Three data hosts with different numbers of worker processes.

    They are forked. test_feed_servers.py and helpers/scripts.py start them as users do.
    """
    from helpers.data_hosts import DataHost, up

    hosts = up(*[DataHost(workers) for workers in (1, 2, 3)])
    yield hosts
    for host in hosts:
        host.kill()
