"""The training process's side: a Dataset on data hosts, and its batches in order.

    dataset = RemoteDataset(["algo-1:7712", "algo-2:7712"], token)
    sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank)
    keys = BatchKeys(BatchSampler(sampler, 64, drop_last=True), seed=0)
    loader = DataLoader(RemoteBatches(dataset, keys), batch_size=None, collate_fn=as_is)
    for epoch in range(3):
        keys.set_epoch(epoch)
        for batch in loader:
            ...

The batches are those of `batches.SeededBatches` on this machine, whatever the number of hosts, and
whichever of them fail on the way.
"""

import atexit
import contextlib
import queue
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import grpc
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from feed.batches import NOT_BATCHED, BatchKeys
from feed.epoch import Epoch, Host, share_calls
from feed.wire import SERVICE, messages

FINAL = {  # errors that the next call would get, too
    grpc.StatusCode.UNAUTHENTICATED: PermissionError,
    grpc.StatusCode.FAILED_PRECONDITION: ValueError,
}


class RemoteDataset(Dataset):
    """The Dataset that `hosts` ("host:port") serve: what a sampler needs of it, its length.

    Waits up to `timeout` seconds for the first host to answer; all may be silent for as long later,
    while batches are fetched. Raises PermissionError when one refuses the token, ConnectionError
    when none answers.
    """

    def __init__(self, hosts: Sequence[str], token: str, timeout: float = 60.0):
        if isinstance(hosts, str) or not hosts:
            raise ValueError(f'hosts must be a list such as ["algo-1:7712"], but is {hosts!r}')
        self.hosts = [Host(address) for address in dict.fromkeys(hosts)]
        self.metadata, self.timeout = [("authorization", f"Bearer {token}")], timeout
        self.description = messages.DatasetDescription()
        self.interval = 0.0  # seconds between two batches that the training takes
        answers: queue.SimpleQueue[tuple[Host, grpc.Future]] = queue.SimpleQueue()
        with contextlib.ExitStack() as stack:
            for host in self.hosts:
                call = self.ask(stack.enter_context(host.connect()))
                call.add_done_callback(lambda call, host=host: answers.put((host, call)))
            while not self.description.fingerprint:
                host, call = answers.get()
                try:
                    self.description = call.result()
                    host.workers = self.description.workers
                    share_calls(self.hosts)
                except grpc.RpcError as error:
                    if final := self.leave(host, error):
                        raise final from None
                    if all(host.failure for host in self.hosts):
                        failures = "; ".join(host.failure for host in self.hosts)
                        raise ConnectionError(failures) from None

    def __len__(self) -> int:
        return self.description.length

    def __getitem__(self, index: Any) -> None:
        """Raise TypeError: only whole batches can be asked for."""
        raise TypeError(
            "samples stay at the data hosts: DataLoader(RemoteBatches(dataset, keys), ...)"
        )

    def ask(self, channel: grpc.Channel) -> grpc.Future:
        """Ask a host what it serves; it refuses if something else is expected."""
        ask = channel.unary_unary(
            f"/{SERVICE}/Describe",
            messages.DatasetDescription.SerializeToString,
            messages.DatasetDescription.FromString,
        )
        return ask.future(self.description, self.timeout, self.metadata, wait_for_ready=True)

    def leave(self, host: Host, error: grpc.RpcError) -> Exception | None:
        """Ask a host for no batch until it answers again; return an exception if it never will."""
        text = f"data host {host.address} failed ({error.code().name}: {error.details()})"
        if not host.failure:
            print(f"{text}: its batches are asked of whoever answers", flush=True)
        host.is_up, host.failure = False, host.failure or text
        host.failing_since = min(host.failing_since, time.monotonic())
        return FINAL[error.code()](text) if error.code() in FINAL else None


class RemoteBatches(IterableDataset):
    """The batches of `keys`, in order, for a DataLoader with batch_size=None and no workers.

    read_ahead: batches held here before their turn; others wait at their hosts. pin_memory: receive
    batches in page-locked memory (DataLoader's own would copy them in the training's thread).
    Iterating raises `wire.DatasetError`, ConnectionError when no host has answered for the
    `timeout` of `dataset`, PermissionError when one refuses the token, ValueError when one serves
    another Dataset.
    """

    def __init__(
        self, dataset: RemoteDataset, keys: BatchKeys, read_ahead: int = 4, pin_memory: bool = False
    ):
        if not (isinstance(dataset, RemoteDataset) and isinstance(keys, BatchKeys)):
            raise TypeError(
                "RemoteBatches(RemoteDataset(...), BatchKeys(batch_sampler)) is its use"
            )
        if read_ahead < 1:
            raise ValueError(f"read_ahead must be at least 1, but is {read_ahead}")
        self.dataset, self.keys, self.read_ahead = dataset, keys, read_ahead
        self.pin_memory = pin_memory and torch.cuda.is_available()  # as DataLoader does it

    def set_epoch(self, epoch: int, first_batch: int = 0) -> None:
        """Choose the epoch of the next iteration, and its first batch: see `BatchKeys`."""
        self.keys.set_epoch(epoch, first_batch)

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[Any]:
        if get_worker_info():
            raise RuntimeError("RemoteBatches uses the data hosts' workers: set num_workers=0")
        # torch does not tell a Dataset that it makes batches of what comes: its fetcher knows.
        if getattr(sys._getframe(1).f_locals.get("self"), "auto_collation", False):
            raise TypeError(NOT_BATCHED)
        return self.fetched()

    def fetched(self) -> Iterator[Any]:
        """Yield the batches, which are fetched ahead."""
        epoch = Epoch(self.dataset, self.keys.first_batch, self.read_ahead, self.pin_memory)
        # A program may end in the middle of an epoch: by then no thread may be left in gRPC.
        atexit.register(epoch.close)
        try:
            for key in self.keys:
                epoch.want(key)
                while epoch.wants_enough():
                    yield epoch.take()
            while epoch.tasks:
                yield epoch.take()
        finally:
            epoch.close()
            atexit.unregister(epoch.close)
