"""The batch of a run without one: the next of its step's loader, in epochs that all workers share."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from torch import Tensor

from anabranch.collectives import Workers
from anabranch.executor.exchange import exchange
from anabranch.executor.loaders.loading import ENDED, NOTHING, BoundLoader
from anabranch.liveness.membership import own_place
from anabranch.record import spans
from anabranch.tensors import Structure, as_tensors, map_structure


class Batches:
    """The loaders of an executor's steps, by the step's name.

    Args:
        loaders: one for each.
        workers: the group, in which each worker has its own loaders, alike for the same steps.
        together: whether the workers run the same steps, so that an epoch ends when every worker's loader has ended;
            else each worker has its own epochs.
    """

    def __init__(self, loaders: Mapping[str, BoundLoader], workers: Workers | None, *, together: bool = True) -> None:
        self.loaders = loaders
        self.load_seconds = 0.0
        self._shared = together and workers is not None and workers.several
        self._empty_epochs = 0
        self._eval_runs: dict[str, int] = {}
        self._patterns: dict[str, Structure] = {}
        mine = {name: loader.length() for name, loader in loaders.items()}
        process = place.process if (place := own_place()) is not None else 0
        everyone = exchange(workers, (process, mine), tuple[int, dict[str, int | None]], "all_gather of batch_num")
        self._workers, self._everyone = workers, everyone
        self._lengths = self._longest()

    def bound(self, name: str) -> BoundLoader:
        """Return the step's loader; ``ValueError`` if it has none."""
        if name not in self.loaders:
            raise ValueError(
                f"step {name!r} has no loader, and was given no batches; pass them, or make the Executor with "
                f"dataloaders={{{name!r}: ...}}"
            )
        return self.loaders[name]

    def next(self, name: str, at_end: Callable[[], None]) -> Structure | None:
        """Return the next batch of a training step's loader; ``None`` while it has ended and another worker's has
        not.

        ``at_end`` is called between two epochs of a worker with its own epochs.
        """
        loader = self.bound(name)
        batch = self._take(loader)
        if batch is ENDED and not self._shared:
            at_end()
            loader.start_epoch()
            batch = self._take(loader)
            if batch is ENDED or batch is NOTHING:  # nor would another epoch have one
                raise ValueError(f"the loader of {name!r} yields no batches")
        if batch is NOTHING and not self._shared:
            return self.next(name, at_end)
        if batch is ENDED:
            return None
        self._empty_epochs = 0
        return None if batch is NOTHING else batch

    def length(self, name: str) -> int | None:
        """Return the batches of an epoch, the longest's over all workers, if the loaders have a length."""
        return self._lengths[name]

    def _longest(self) -> dict[str, int | None]:
        lengths = {name: [theirs[name] for _, theirs in self._everyone] for name in self.loaders}
        return {name: None if None in one else max(filter(None, one), default=0) for name, one in lengths.items()}

    def met(self) -> None:
        """Forget the lengths of workers that have left; those of newcomers are the others'."""
        assert self._workers is not None
        assert self._workers.roll is not None
        self._everyone = [one for one in self._everyone if one[0] in self._workers.roll.ranks]
        self._lengths = self._longest()

    def runs_before(self, name: str) -> int | None:
        """Return the runs of this epoch before that of the batch just taken, where the loader knows it."""
        left, length = self.loaders[name].left(), self._lengths[name]
        return None if left is None or length is None else length - left - 1

    def check_free(self, loader: BoundLoader) -> None:
        """Raise ``ValueError`` if iterating ``loader`` would move the position of a step in the middle of an epoch."""
        if loader.kind == "global":
            return
        for name, other in self.loaders.items():
            moves = loader.kind == "stateful" or getattr(loader.source, "persistent_workers", False)
            if other is not loader and other.source is loader.source and moves:
                raise ValueError(
                    f"the loader is that of step {name!r}, too, and has one position for both, which an evaluation "
                    "would move; give evaluate a loader of its own"
                )
            if other is loader and moves and other.in_epoch and loader.kind != "stateful":
                raise ValueError(
                    f"the loader of {name!r} is in the middle of an epoch, and its persistent workers begin anew for "
                    "an evaluation; give evaluate a loader of its own"
                )

    def start_epoch(self, name: str) -> None:
        """Every worker's loader has ended."""
        self._empty_epochs += 1
        if self._empty_epochs > 1:
            raise ValueError(f"the loaders of {name!r} yield no batches on any worker")
        self.loaders[name].start_epoch()

    def next_to_evaluate(self, name: str) -> Structure:
        """Return the next batch; a worker whose loader ended before the longest one's gets batches without rows till
        then.
        """
        loader = self.bound(name)
        batch = self._take(loader)
        if batch is not ENDED and batch is not NOTHING:
            self._patterns[name] = map_structure(_without_rows, as_tensors(batch))
            self._eval_runs[name] = self._eval_runs.get(name, 0) + 1
            return batch
        if self._eval_runs.get(name, 0) < (self._lengths[name] or 0) and name in self._patterns:
            self._eval_runs[name] += 1
            return self._patterns[name]
        self._eval_runs[name] = 0
        loader.start_epoch()
        batch = self._take(loader)
        if batch is ENDED or batch is NOTHING:
            raise ValueError(f"the loader of {name!r} yields no batches")
        self._eval_runs[name] = 1
        return batch

    def _take(self, loader: BoundLoader) -> Structure:
        began = time.monotonic()
        with spans.Lasting("load", "load"):
            batch = loader.next_batch()
        self.load_seconds += time.monotonic() - began
        return batch

    def batch_num(self, name: str) -> int:
        """Batches in an epoch: the longest's over all workers.

        Raises:
            ValueError: the step has no loader, or it has no length.
        """
        self.bound(name)
        length = self._lengths[name]
        if length is None:
            raise ValueError(f"the loader of {name!r} has no length on every worker; give it __len__, or count runs")
        return length

    def loops(self) -> list[dict[str, object]]:
        """Return how far the epoch of each loader with a length is, as ``Progress`` describes a loop."""
        return [
            {"label": f"{name}, epoch {loader.epoch + 1}", "done": loader.taken, "total": length, "seconds": None}
            for name, loader in self.loaders.items()
            if (length := self._lengths[name]) and (loader.taken or loader.epoch)
        ]

    def close(self) -> None:
        """Release the loaders' iterators."""
        for loader in self.loaders.values():
            loader.close()


def _without_rows(leaf: object) -> object:
    return leaf.new_empty((0, *leaf.shape[1:])) if isinstance(leaf, Tensor) and leaf.ndim else leaf
