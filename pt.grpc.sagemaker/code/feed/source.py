"""Where a RemoteDataset's samples come from: data hosts, or, if there are none, this process."""

import fcntl
import io
import mmap
import multiprocessing
import os
import pickle
import tempfile
import threading
import time
from collections.abc import Callable
from typing import IO, Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import get_worker_info

from feed import dataset_file
from feed.compare import WHERE, Comparison, HereProcess, add, explain
from feed.dataloader import LoaderState, calling_loader
from feed.dataset_file import Facts, facts_of
from feed.fetch import Fetcher
from feed.inherit import environment, environment_at_start
from feed.log import logger
from feed.pickling import dump, rngs_of
from feed.samples import Caller, Chunk, make_dataset, prepare, undisturbed

LOAD_HINT = (
    "data hosts need the modules that it uses, and cannot have what only works on one host, such "
    "as a connection. Open that when it is first used, or give RemoteDataset a callable that makes "
    f"the Dataset ({WHERE})"
)
MOST_INIT_FN = 8 << 20  # bytes of a pickled worker_init_fn, which goes with each request


def as_is(batch: Any) -> Any:
    """Return the batch unchanged: the DataLoader's collate_fn if RemoteDataset has one."""
    return batch


class Source:
    """Where a RemoteDataset's samples come from.

    given: the Dataset if is_dataset, else a callable that makes it.
    """

    were_together = False  # whether all ranks are, or have been, in one process group
    began_with: dict[str, str] | None = None  # the environment of the script's first process

    def __init__(self, given: Any, is_dataset: bool, collate_fn: Callable | None, timeout: float):
        self.given, self.is_dataset, self.collate_fn = given, is_dataset, collate_fn
        self.hosts = [host for host in os.environ.get("HETERO_DATA_HOSTS", "").split(",") if host]
        self.token, self.timeout = os.environ.get("HETERO_TOKEN", ""), timeout
        Source.began_with = Source.began_with or environment_at_start()
        if self.hosts and not self.token:
            raise ValueError("RemoteDataset needs HETERO_TOKEN, the job's token, to use data hosts")
        self.first_batch, self.process = 0, 0
        self.share_with_workers()
        self.ranks: tuple[int, int] | None = None  # those of the process that spawned this one
        self.note_ranks()

    def share_with_workers(self) -> None:
        """Make what this process and the workers that it forks have in common."""
        self.is_compared = mmap.mmap(-1, 1)  # whether samples have been compared
        if self.hosts:
            self.shared_facts = open(os.memfd_create("facts"), "r+b")  # see facts  # noqa: SIM115

    def __getstate__(self) -> dict:
        """Pickle this for a spawned process, in which the script is not `__main__`."""
        file = io.BytesIO()
        dump(file, by_reference=not self.hosts, dataset=self.given, collate_fn=self.collate_fn)
        own = "is_dataset", "hosts", "token", "timeout", "first_batch"
        state = {name: getattr(self, name) for name in own}
        state |= {"pickled": file.getvalue(), "ranks": self.note_ranks()}
        of_class = {"were_together": Source.were_together, "began_with": Source.began_with}
        return state | of_class

    def __setstate__(self, state: dict) -> None:
        Source.were_together |= state.pop("were_together")
        Source.began_with = state.pop("began_with")
        self.given, self.collate_fn = pickle.loads(state.pop("pickled"))
        self.__dict__.update(state, process=0)
        self.share_with_workers()

    def begin_process(self) -> None:
        """Forget the state of the process that this one was forked from."""
        if self.process != os.getpid():
            # The parent's gRPC objects must not be freed here.
            self.parents_grpc = self.__dict__.get("fetcher"), self.__dict__.get("stream")
            self.process, self.fetcher = os.getpid(), None
            self.is_changed, self.was_accessed = True, False
            self.is_shared = self.has_rngs = False  # the Dataset: see facts
            self.dataset = self.given if self.is_dataset else None
            self.rngs: dict | None = None  # until they are looked for
            self.comparison: Comparison | None = None  # of this epoch, until it is over
            self.torch_fetcher = self.batch = None  # of the epoch, and its last batch
            self.stream = None  # a RemoteStream's
            self.pickle_is_kept = False  # see renew_fetcher
            self.epoch = self.place = -1
            self.noticed, self.pickled_init_fn = set(), b""
            self.init_fn_modules: set[str] = set()  # modules that worker_init_fn refers to
            if get_worker_info() and (parent := multiprocessing.parent_process()):
                # Once glibc has freed a large block, it reuses memory of up to this size, and Linux
                # need not clear new pages for each batch (mallopt(3), M_MMAP_THRESHOLD).
                np.empty(16 << 20, np.uint8)
                # torch's own watchdog does not check while this process waits for samples.
                threading.Thread(target=end_with, args=(parent,), daemon=True).start()

    def dataset_for(self, name: str) -> Any:
        """Return the Dataset, to read or set its attribute `name`."""
        if not self.is_dataset:
            raise AttributeError(
                f"{name!r} cannot be reached: a callable makes the Dataset on the data hosts. "
                "Give RemoteDataset the Dataset itself, or keep the value elsewhere"
            )
        self.begin_process()
        if self.hosts and get_worker_info() and not self.fetcher:
            loader = calling_loader()
            if not loader.torch_fetcher:  # a worker_init_fn uses the Dataset, and may change it
                self.renew_fetcher(loader, keep=True)
        self.was_accessed = True
        return self.given

    def note_change(self) -> None:
        """Have the Dataset sent again, unless a worker has changed its own copy."""
        self.is_changed |= not get_worker_info()

    def note_ranks(self) -> tuple[int, int] | None:
        """Return torch.distributed's rank and world size, or None if this rank is in no group.

        Also notes if all ranks are together now.
        """
        ranks = self.ranks
        if dist.is_available() and dist.is_initialized():
            ranks = dist.get_rank(), dist.get_world_size()
        if ranks and ranks[1] >= world_size():
            Source.were_together = True
        return ranks

    def length(self) -> int:
        self.note_ranks()  # samplers take the length in each epoch, before workers start
        self.begin_process()
        if self.is_dataset:
            return len(self.given)
        if not self.hosts:
            return len(self.own_dataset())
        self.renew_fetcher()
        self.fetcher.wait_for_host()
        return self.fetcher.first_made[1].length

    def own_dataset(self) -> Any:
        """Return this process's own Dataset, which it makes if a callable was given."""
        if self.dataset is None:
            with undisturbed({}):
                self.dataset = make_dataset(self.given)
        return self.dataset

    def get(self, indices: list, loader: LoaderState | None, is_batch: bool) -> Any:
        """Return the samples, or the batch if there is a collate_fn."""
        self.begin_process()
        self.is_changed |= self.was_accessed and not loader  # without an epoch, at any time
        last, (seed, number) = self.torch_fetcher, self.enter_batch(loader)
        is_ready = is_batch and loader and loader.torch_fetcher.collate_fn is as_is
        if self.collate_fn and not is_ready:
            raise TypeError(
                "RemoteDataset(collate_fn=...) needs DataLoader(dataset, batch_size=..., "
                "collate_fn=as_is)"
            )
        chunk = Chunk(indices, self.place, number, seed, self.caller(loader))
        self.place += len(indices)
        if not self.hosts:
            dataset = self.own_dataset()
            if self.is_changed or self.rngs is None:
                self.rngs, self.is_changed = rngs_of(dataset, self.collate_fn), False
            if info := get_worker_info():
                worker = info.id, info.num_workers
                chunk = chunk._replace(caller=chunk.caller._replace(data_worker=worker))
            with undisturbed(self.rngs):
                return prepare(dataset, self.rngs, chunk, self.collate_fn)
        self.renew_fetcher(loader)
        if self.torch_fetcher is not last and self.is_dataset:
            self.begin_comparison(chunk)
        try:
            return self.fetch(chunk, loader, is_batch)
        except Exception as error:
            if isinstance(error, FileNotFoundError):
                add(error, f"Data hosts need the file at the same path ({WHERE})")
            elif self.is_dataset and self.fetcher.failed_chunk:
                explain(error, self.start_here(self.fetcher.failed_chunk))
            elif self.is_dataset and "Original Traceback" in str(error):
                name = type(self.given).__name__
                add(error, f"The pickle of {name} could not be loaded there: {LOAD_HINT}")
            raise

    def fetch(self, chunk: Chunk, loader: LoaderState | None, is_batch: bool) -> Any:
        """Return the samples, or the batch, from the data hosts."""
        self.fetcher.failed_chunk = None
        self.fetcher.wait_for_host()
        if self.is_dataset:
            takes_batches = hasattr(self.given, "__getitems__")
        else:
            takes_batches = self.fetcher.first_made[1].takes_batches
        is_divisible = not (self.collate_fn or takes_batches)
        self.notice(is_batch, is_divisible, loader)
        num_workers = loader.num_workers if loader else 1
        also = self.comparison.tasks if self.comparison else ()
        samples = self.fetcher.fetch(chunk, is_divisible, num_workers, also)
        if self.comparison:
            self.end_comparison()
        return samples

    def begin_comparison(self, chunk: Chunk) -> None:
        """Begin to compare this epoch's first sample, in one worker of this rank."""
        if self.comparison:
            self.comparison.end()
            self.comparison = None
        if not (info := get_worker_info()) or info.id == 0:
            if not (self.collate_fn or hasattr(self.given, "__getitems__")):
                chunk = chunk._replace(indices=chunk.indices[:1])
            self.comparison = Comparison(type(self.given).__name__, chunk, self.start_here)

    def start_here(self, chunk: Chunk) -> HereProcess:
        """Start a process that prepares a chunk on this host."""
        return HereProcess(self.given, self.collate_fn, chunk, self.timeout, self.has_rngs)

    def end_comparison(self) -> None:
        """Raise RuntimeError if data hosts prepare other samples than workers here.

        The first batch waits for the comparison. In later epochs, it goes on beside the training.
        """
        if not self.is_compared[0]:
            self.fetcher.finish(self.comparison.tasks)
            while not self.comparison.is_over():
                time.sleep(0.01)
        if self.comparison.is_over():
            comparison, self.comparison = self.comparison, None
            if (why := comparison.result()) and not self.is_compared[0]:
                logger.warning("samples of %s were not compared: %s", comparison.name, why)
            self.is_compared[0] = 1

    def caller(self, loader: LoaderState | None) -> Caller:
        """Describe this rank; raise RuntimeError if it would train alone, apart from the others."""
        ranks = self.note_ranks()
        if loader and world_size() > 1 and not Source.were_together:
            raise RuntimeError(
                f"WORLD_SIZE is {world_size()}, but torch.distributed has a process group of "
                f"{ranks[1] if ranks else 1} here, so each rank would train alone, on all samples. "
                "Call init_process_group() before the first batch, or do what your framework needs "
                "('Several ranks' in job.md). If this is what you want, or if something else "
                "keeps the ranks in step, remove WORLD_SIZE from os.environ"
            )
        dtype = torch.get_default_dtype()
        return Caller(ranks, environment(Source.began_with), dtype, self.init_fn(loader))

    def init_fn(self, loader: LoaderState | None) -> bytes:
        """Return the pickled worker_init_fn. Unlike the Dataset, it may differ between ranks."""
        if loader and loader.worker_init_fn and self.hosts and not self.pickled_init_fn:
            file = io.BytesIO()
            self.init_fn_modules = dump(file, worker_init_fn=loader.worker_init_fn).modules
            self.pickled_init_fn = file.getvalue()
            if b"RemoteDataset" in self.pickled_init_fn or b"RemoteStream" in self.pickled_init_fn:
                raise TypeError(
                    "worker_init_fn uses the RemoteDataset, but runs on data hosts: have it take "
                    "the Dataset from get_worker_info().dataset"
                )
            if (size := len(self.pickled_init_fn)) > MOST_INIT_FN:
                raise ValueError(
                    f"the pickled worker_init_fn has {size / 1e6:.0f} MB, too much for each "
                    "request: use a function that does not refer to the Dataset or the model"
                )
        return self.pickled_init_fn

    def enter_batch(self, loader: LoaderState | None) -> tuple[tuple[int, ...], int]:
        """Return the epoch's seed and the batch's number, and set `place` if the batch is new."""
        if not loader:  # dataset[0], which must not take the training's random numbers
            self.place = max(0, self.place)
            return (torch.initial_seed(),), -1
        if self.torch_fetcher is not loader.torch_fetcher:  # a new epoch
            self.torch_fetcher, self.batch = loader.torch_fetcher, None
            if loader.num_workers:
                self.epoch += 1  # persistent workers keep the first epoch's seed
                self.is_changed |= self.is_shared
            else:
                self.epoch, self.is_changed = 0, True
        if self.batch != loader.batch:
            self.batch, self.place = loader.batch, 0
        return (loader.seed, self.epoch), loader.batch + self.first_batch

    def renew_fetcher(self, loader: LoaderState | None = None, keep: bool = False) -> None:
        """Replace the Fetcher if the Dataset has changed, so that data hosts get it as it is now.

        It is pickled once for its digest, and again, into a file, for each upload, so the pickle is
        never in memory as a whole. With `keep`, it is pickled once, into a file that is kept.
        """
        if self.fetcher and not self.is_changed:
            return
        parts = {
            "dataset": self.given,
            "is_dataset": self.is_dataset,
            "collate_fn": self.collate_fn,
        }
        kept = tempfile.TemporaryFile() if keep else None  # noqa: SIM115
        facts = self.facts(parts, loader, kept)

        def open_pickle() -> IO[bytes]:  # without `self`, which it would keep alive
            if kept:
                return kept
            file = tempfile.TemporaryFile()  # noqa: SIM115
            dataset_file.write(file, parts, facts.variables)
            return file

        self.is_shared = facts.is_shared
        # A worker_init_fn may make some.
        self.has_rngs = facts.has_rngs or bool(loader and loader.worker_init_fn)
        self.is_changed = self.was_accessed = False
        self.pickle_is_kept |= keep
        if not self.fetcher or self.fetcher.digest != facts.sha256:
            what, sha256 = facts.what, facts.sha256
            self.fetcher = Fetcher(self.hosts, self.token, self.timeout, what, sha256, open_pickle)

    def facts(self, parts: dict, loader: LoaderState | None, kept: IO[bytes] | None) -> Facts:
        """Return what is known of the Dataset's pickle, which goes to the file `kept`, if any.

        The workers that a DataLoader forks have the same Dataset, unless the script's code has run
        in them before: a worker_init_fn, or an outer Dataset. The one that locks the file first
        computes this, and the others read it there, unless it has memory that others may change.
        A process that is killed loses its lock.
        """
        info = get_worker_info()
        outer = loader.torch_fetcher.dataset if loader and loader.torch_fetcher else None
        is_outermost = type(outer).__module__.startswith("feed.") and outer._source is self
        if not (info and is_outermost) or loader.worker_init_fn or self.fetcher or kept:
            return facts_of(parts, self.init_fn_modules, kept)
        # torch starts them one after the other.
        number = multiprocessing.current_process()._identity[-1] - info.id
        of_loader = os.getppid(), number, loader.seed
        fcntl.lockf(self.shared_facts, fcntl.LOCK_EX)
        try:
            size = os.fstat(self.shared_facts.fileno()).st_size
            data = os.pread(self.shared_facts.fileno(), size, 0)
            its, found = pickle.loads(data) if data else (None, None)
            if its != of_loader:
                found = facts_of(parts, self.init_fn_modules, None)
                os.pwrite(self.shared_facts.fileno(), pickle.dumps((of_loader, found)), 0)
                return found
        finally:
            fcntl.lockf(self.shared_facts, fcntl.LOCK_UN)
        return facts_of(parts, self.init_fn_modules, None) if found.is_shared else found

    def notice(self, is_batch: bool, is_divisible: bool, loader: LoaderState | None) -> None:
        """Print once why getting samples is slow, if it is."""
        name, text, info = "the Dataset", "", get_worker_info()
        if self.is_dataset:
            name = type(self.given).__name__
        is_single = loader and loader.torch_fetcher and not is_batch
        if is_single and loader.torch_fetcher.auto_collation:
            outer = type(loader.torch_fetcher.dataset).__name__
            text = f"{outer} asks {name} for samples one by one: put RemoteDataset around {outer}"
        elif is_single:
            text = "the DataLoader asks for samples one by one: set batch_size"
        elif not is_divisible and not self.collate_fn:
            text = f"{name} has __getitems__, so each batch is prepared by one process: set "
            text += "num_workers to this rank's share of the data hosts' cores"
        if text and text not in self.noticed and (not info or info.id == 0):
            self.noticed.add(text)
            logger.warning(text)


def world_size() -> int:
    """Return the number of ranks that the environment names."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def end_with(parent: Any) -> None:
    """End this process when the training process has ended."""
    parent.join()
    os._exit(1)
