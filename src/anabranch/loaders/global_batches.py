"""``GlobalBatches``: batches in one order that does not depend on how many workers read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

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

    An Executor that it is bound to (``dataloaders=``) says which worker this is, and starts the epochs; without one,
    ``ab.job()`` does, and each iteration to the end is an epoch. Nothing is drawn from the process's random generators.

    Args:
        dataset: with ``__len__`` and ``__getitem__``, as a ``DataLoader``'s.
        batch_size: samples of a batch, of all workers together.
        shuffle: a new order in each epoch, from ``seed`` and the epoch's number; else the dataset's.
        seed: a whole number, at least 0; the same on all workers.
        drop_last: whether a last batch of fewer samples is left out.
        num_workers: processes that load batches ahead; 0 loads each batch when it is taken.
        collate_fn: makes a batch of a list of samples; by default torch's.
        dataloader: further arguments of ``torch.utils.data.DataLoader``, such as ``pin_memory``.

    Raises:
        TypeError: a dataset that cannot be indexed, or ``sampler``, ``batch_sampler``, ``generator``, whose place this
            takes.
        ValueError: fewer samples in a batch than workers, so that some would never have any.
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
        if isinstance(dataset, IterableDataset) or not (
            hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
        ):
            raise TypeError(
                f"GlobalBatches takes samples by their numbers, so the dataset has __len__ and __getitem__; a "
                f"{type(dataset).__name__} has no order of its own to share out"
            )
        if taken := sorted({"sampler", "batch_sampler", "generator"} & dataloader.keys()):
            raise TypeError(f"GlobalBatches itself decides the order: {taken[0]} is not taken; use shuffle= and seed=")
        for name, number, least in (("batch_size", batch_size, 1), ("seed", seed, 0)):
            if isinstance(number, bool) or not isinstance(number, int):
                raise TypeError(f"{name} is a whole number, got {number!r}")
            if number < least:
                raise ValueError(f"{name} is at least {least}, got {number}")
        self.dataset, self.batch_size, self.num_workers = dataset, batch_size, num_workers
        self._shuffle, self._seed, self._drop_last = bool(shuffle), seed, drop_last
        self._options = {"num_workers": num_workers, "collate_fn": collate_fn, **dataloader}
        self.epoch = 0
        self._samples = 0  # of the epoch's order that were handed out, to all workers together
        self._first = 0  # sample with which the next iteration begins
        self._worker: Callable[[], tuple[int, int]] = _of_job
        self._generator = torch.Generator()  # of the loading processes' seeds
        self._loader = DataLoader(dataset, batch_sampler=_Indices(self), generator=self._generator, **self._options)
        self._check_worker()

    def bind(self, worker: Callable[[], tuple[int, int]]) -> None:
        """Take rank and number of workers from ``worker`` from now on, which an Executor calls for its loaders."""
        self._worker = worker
        self._check_worker()

    def one_pass(self) -> Iterator[Any]:
        """Load this worker's rows of all batches of the epoch, and leave the position as it is."""
        options = {"shuffle": self._shuffle, "seed": self._seed, "drop_last": self._drop_last, **self._options}
        again = GlobalBatches(self.dataset, self.batch_size, **options)
        again.bind(self._worker)
        again.epoch = self.epoch
        return iter(again)

    def _check_worker(self) -> tuple[int, int]:
        rank, size = self._worker()
        if self.batch_size < size:
            raise ValueError(f"batch_size={self.batch_size} is of all {size} workers, and some would get no sample")
        return rank, size

    def __len__(self) -> int:
        """Return the number of batches in an epoch, the same on all workers."""
        samples = len(self.dataset)
        return samples // self.batch_size if self._drop_last else -(-samples // self.batch_size)

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch with the next iteration, which is in the order of that number."""
        if epoch != self.epoch:
            self.epoch, self._samples, self._first = epoch, 0, 0

    def __iter__(self) -> Iterator[Any]:
        """Load this worker's rows of the epoch's batches, from the beginning or a loaded position on.

        A worker for which a short last batch has no sample ends before it.
        """
        self._samples, self._first = self._first, 0
        while True:
            worker = self._check_worker()
            self._generator.manual_seed(int(np.random.default_rng([self._seed, self.epoch, worker[0]]).integers(2**62)))
            for batch in self._loader:
                self._samples = min(self._samples + self.batch_size, len(self.dataset))
                yield batch
                if self._worker() != worker:
                    break  # what was loaded ahead is another worker's by now
            else:
                break
        self.set_epoch(self.epoch + 1)

    def indices(self) -> Iterator[list[int]]:
        """Yield the samples of this worker in each batch that is left of this epoch."""
        rank, size = self._check_worker()
        samples = len(self.dataset)
        order = (
            np.random.default_rng([self._seed, self.epoch]).permutation(samples) if self._shuffle else range(samples)
        )
        end = samples - samples % self.batch_size if self._drop_last else samples
        for begin in range(self._samples, end, self.batch_size):
            if mine := [int(index) for index in order[begin : min(begin + self.batch_size, end)][rank::size]]:
                yield mine

    def state_dict(self) -> dict[str, Any]:
        """Return the position: the epoch, and the samples of its order that were handed out to all workers."""
        samples = self._first or self._samples
        return {"epoch": self.epoch, "samples": samples, **self._order()}

    def _order(self) -> dict[str, Any]:
        return {"seed": self._seed, "shuffle": self._shuffle, "length": len(self.dataset)}

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise ``CheckpointError`` if ``state`` is a position in another order."""
        for name, here in self._order().items():
            if state.get(name) != here:
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
        self.epoch, self._samples, self._first = state["epoch"], 0, state["samples"]


class _Indices:
    """The batch sampler of the loader within: asked anew at each iteration."""

    def __init__(self, batches: GlobalBatches) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        return self._batches.indices()

    def __len__(self) -> int:
        return len(self._batches)


def _of_job() -> tuple[int, int]:
    return job().rank, job().world_size
