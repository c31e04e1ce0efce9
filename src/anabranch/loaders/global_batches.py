"""``GlobalBatches``: batches in one order that does not depend on how many workers read them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, SupportsIndex
from weakref import proxy

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from anabranch.errors import CheckpointError
from anabranch.job import job

__all__ = ["GlobalBatches"]


class GlobalBatches:
    """Batches of a dataset in one global order, of which each worker loads only its own rows.

    Batch b of an epoch is samples ``b * batch_size`` to ``(b + 1) * batch_size`` of the epoch's order, and worker r of
    W loads those at places r, r + W, ... of it. So training sees the same samples in each step on any number of
    workers, every sample once an epoch, and continues within an epoch on another number.

    >>> loader = GlobalBatches(range(10), 4, shuffle=False)
    >>> [batch.tolist() for batch in loader]
    [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    >>> batches = iter(loader)
    >>> next(batches).tolist(), loader.state_dict()["samples"]
    ([0, 1, 2, 3], 4)

    Each step of an Executor that it is bound to (``dataloaders=``) reads it by itself, as the worker that the Executor
    is; without one, it is read as the worker that ``ab.job()`` says, and each iteration to the end is an epoch. Nothing
    is drawn from the process's random generators.

    Args:
        dataset: with ``__len__`` and ``__getitem__``, as a ``DataLoader``'s.
        batch_size: samples of a batch, of all workers together.
        shuffle: a new order in each epoch, from ``seed`` and the epoch's number; else the dataset's.
        seed: a whole number, at least 0; the same on all workers.
        drop_last: whether a last batch of fewer samples is left out.
        num_workers: processes that load batches ahead; 0 loads each batch when it is taken.
        collate_fn: makes a batch of a list of samples; by default torch's.
        dataloader: further arguments of ``torch.utils.data.DataLoader``, such as ``pin_memory``.

    Attributes:
        epoch: the number of the epoch that is read, or read next.

    Raises:
        TypeError: a dataset that cannot be indexed, or ``sampler``, ``batch_sampler``, ``generator``, whose place this
            takes.
        ValueError: fewer samples in a batch than workers, so that some would never have any; ``in_order=False``.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        **dataloader: Any,
    ) -> None:
        indexed = all(hasattr(dataset, name) for name in ("__len__", "__getitem__"))
        if isinstance(dataset, IterableDataset) or not indexed:
            raise TypeError(
                f"GlobalBatches takes samples by their numbers, so the dataset has __len__ and __getitem__; a "
                f"{type(dataset).__name__} has no order of its own to share out"
            )
        if own := sorted({"sampler", "batch_sampler", "generator"} & dataloader.keys()):
            raise TypeError(f"GlobalBatches itself decides the order: {own[0]} is not taken; use shuffle= and seed=")
        if not dataloader.get("in_order", True):
            raise ValueError("in_order=False has no position to resume from; leave it out")
        self.dataset, self.num_workers = dataset, num_workers
        self.batch_size, self.seed = whole("batch_size", batch_size, 1), whole("seed", seed, 0)
        self.drop_last, self.shuffle = bool(drop_last), bool(shuffle)
        self.options = {"num_workers": num_workers, "collate_fn": collate_fn, **dataloader}
        self.epoch = 0
        self.asked = 0, 0  # how often the script has set it, and to what
        self._loaded: Mapping[str, Any] | None = None  # the position at which the next iteration begins
        self._reader: Reader | None = None  # of the last iteration
        self.reader(_of_job)

    def reader(self, worker: Callable[[], tuple[int, int]]) -> Reader:
        """Return what reads the epochs as the worker, of that many, that ``worker`` returns."""
        return Reader(self, worker)

    def __len__(self) -> int:
        """Return the number of batches in an epoch, the same on all workers."""
        samples = len(self.dataset)
        return samples // self.batch_size if self.drop_last else -(-samples // self.batch_size)

    def set_epoch(self, epoch: int) -> None:
        """Let the next epoch that begins be in the order of that number."""
        self.epoch, self.asked = epoch, (self.asked[0] + 1, epoch)

    def __iter__(self) -> Iterator[Any]:
        """Load this worker's rows of the epoch's batches, from the beginning or a loaded position on.

        A worker for which a short last batch has no sample ends before it.
        """
        self._reader = reader = self.reader(_of_job)
        reader.start(*(self.take_loaded() or (self.epoch, 0)))
        yield from (batch for batch in reader if batch is not NOTHING)
        if self.epoch == reader.epoch:
            self.epoch += 1

    def take_loaded(self) -> tuple[int, int] | None:
        """Return the epoch and the sample that were loaded, where the next iteration begins; ``None`` without any."""
        loaded, self._loaded = self._loaded, None
        return None if loaded is None else (loaded["epoch"], loaded["samples"])

    def order(self, epoch: int) -> Any:
        """Return the samples of an epoch in their order."""
        samples = len(self.dataset)
        return np.random.default_rng([self.seed, epoch]).permutation(samples) if self.shuffle else range(samples)

    def follow(self, reader: Reader) -> None:
        """Let ``state_dict`` be the position of ``reader``."""
        self._reader, self.epoch = reader, reader.epoch

    def state_dict(self) -> dict[str, Any]:
        """Return the position: the epoch, and the samples of its order that were handed out to all workers."""
        if self._loaded is not None:
            return dict(self._loaded)
        reader = self._reader
        samples = 0 if reader is None or reader.epoch != self.epoch else reader.samples
        return self.position(self.epoch, samples)

    def position(self, epoch: int, samples: int) -> dict[str, Any]:
        """Return a position as ``state_dict`` does."""
        order = {"seed": self.seed, "shuffle": self.shuffle, "length": len(self.dataset)}
        return {"epoch": epoch, "samples": samples, **order}

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise ``CheckpointError`` if ``state`` is a position in another order."""
        for name, here in self.position(0, 0).items():
            if name not in ("epoch", "samples") and state.get(name) != here:
                raise CheckpointError(
                    f"the checkpoint's GlobalBatches has {name}={state.get(name)!r}, but this one has {here!r}: its "
                    "samples are in another order; load with the data and the arguments that were saved"
                )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin the next iteration behind the samples of ``state``, on any number of workers.

        Raises:
            CheckpointError: another seed, ``shuffle`` or length of the dataset.
        """
        self.check(state)
        self._loaded, self.epoch = dict(state), state["epoch"]


NOTHING = object()
"""In place of a batch of which the worker has no sample."""


class Reader:
    """Reads one epoch after the other of ``GlobalBatches``, as one worker; an iterator of what is left of an epoch.

    Attributes:
        epoch: the number of the epoch.
        samples: samples of its order that were handed out, to all workers together.
    """

    def __init__(self, batches: GlobalBatches, worker: Callable[[], tuple[int, int]]) -> None:
        self._batches, self._worker = batches, worker
        self._generator = torch.Generator()  # of the loading processes' seeds
        options = {"batch_sampler": _Indices(self), "generator": self._generator, **batches.options}
        self._loader = DataLoader(batches.dataset, **options)
        self._at = self._workers()
        self.start(0, 0)

    def _workers(self) -> tuple[int, int]:
        rank, size = self._worker()
        if self._batches.batch_size < size:
            raise ValueError(
                f"batch_size={self._batches.batch_size} is of all {size} workers, and some would get no sample"
            )
        return rank, size

    def start(self, epoch: int, samples: int) -> None:
        """Begin an epoch behind some samples."""
        self.epoch, self.samples = epoch, samples
        self._iterator: Iterator[Any] | None = None
        left = len(self._batches.dataset) - samples
        self._end = samples + (left - left % self._batches.batch_size if self._batches.drop_last else left)

    def stop(self) -> None:
        """End the processes that load ahead."""
        end_processes(self._loader, self._iterator)
        self._iterator = None

    def left(self) -> int:
        """Return how many batches of the epoch are left."""
        return -(-(self._end - self.samples) // self._batches.batch_size)

    def __iter__(self) -> Reader:
        """Return this reader."""
        return self

    def __next__(self) -> Any:
        """Return this worker's rows of the next batch, ``NOTHING`` if it has none of them."""
        if self.samples >= self._end:
            self.stop()
            raise StopIteration
        behind = min(self.samples + self._batches.batch_size, self._end)
        if (workers := self._workers()) != self._at or self._iterator is None:
            self._at = workers  # what was loaded ahead is another worker's by now
            mixed = np.random.default_rng([self._batches.seed, self.epoch, workers[0]])
            self._generator.manual_seed(int(mixed.integers(2**62)))
            self._iterator = iter(self._loader)
        if self._at[0] >= behind - self.samples:
            self.samples = behind
            return NOTHING
        try:
            batch = next(self._iterator)
        except Exception:
            self.samples = behind  # past the batch that could not be made, as a DataLoader is
            raise
        except BaseException:  # Ctrl-C, in the middle of anything: the same batch again
            self._iterator = None
            raise
        self.samples = behind
        return batch

    def indices(self) -> Iterator[list[int]]:
        """Return the samples of this worker in each batch that is left."""
        (rank, size), order, end, count = self._at, self._batches.order(self.epoch), self._end, self._batches.batch_size
        shares = (order[begin : min(begin + count, end)][rank::size] for begin in range(self.samples, end, count))
        return ([int(index) for index in share] for share in shares if len(share))


def end_processes(loader: object, iterator: object) -> None:
    """End the processes of a DataLoader's iterator now, unless they are to persist.

    The traceback of an error that it raised holds it in a cycle of references, see ``_Indices``.
    """
    if not getattr(loader, "persistent_workers", False) and hasattr(iterator, "_shutdown_workers"):
        iterator._shutdown_workers()


class _Indices:
    """The batch sampler of the loader within: asked anew at each iteration.

    Neither it nor what it yields from holds the reader: a loader's iterator that goes with a cycle of references has
    lost the threads that tell its processes to end, and waits five seconds for each.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = proxy(reader)

    def __iter__(self) -> Iterator[list[int]]:
        indices: Iterator[list[int]] = self._reader.indices()
        return indices


def _of_job() -> tuple[int, int]:
    return job().rank, job().world_size


def whole(name: str, number: SupportsIndex, least: int) -> int:
    """Return a whole number of at least ``least``; an error names what is none."""
    try:
        value = operator.index(number)
    except TypeError:
        raise TypeError(f"{name} is a whole number, got {number!r}") from None
    if value < least:
        raise ValueError(f"{name} is at least {least}, got {value}")
    return value
