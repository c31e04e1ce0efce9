"""``BoundLoader``: an executor's way to a step's batches, exactly where they were after a restart.

============  ======================================  ==========================================================
kind          which loaders                           position
============  ======================================  ==========================================================
``global``    ``GlobalBatches``                       samples of the global order: any number of workers resumes
``stateful``  others with ``state_dict`` and          their own ``state_dict``
              ``load_state_dict``
``counted``   any other iterable                      batches: resuming takes them and throws them away
============  ======================================  ==========================================================

The last two need as many workers as there were. Everything happens on the thread that trains.
"""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, cast

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from anabranch.errors import CheckpointError
from anabranch.executor.randomness import random_state, restore_random_state
from anabranch.loaders.global_batches import NOTHING, GlobalBatches, end_processes
from anabranch.tensors import Structure

__all__ = ["ENDED", "NOTHING", "BoundLoader"]

_log = logging.getLogger("anabranch.executor")

State = dict[str, Any]
Moment = tuple[State, int, int | None]


ENDED: Final = object()
"""Returned by ``next_batch`` when an epoch is over."""


class BoundLoader:
    """Takes batches from a loader, one epoch after the other.

    >>> loader = BoundLoader([1, 2])
    >>> loader.next_batch(), loader.next_batch(), loader.next_batch() is ENDED, loader.next_batch() is ENDED
    (1, 2, True, True)
    >>> loader.start_epoch()
    >>> loader.next_batch()
    1
    >>> position = loader.state()
    >>> again = BoundLoader([1, 2])
    >>> again.restore([position])
    >>> again.next_batch()
    2

    Args:
        loader: any iterable of batches; an iterator has one epoch. It, its samplers and its dataset, if they have a
            ``set_epoch``, get the number of each epoch after the first.
        worker: returns this worker's rank and the number of workers.
        looks_ahead: whether ``peek`` may fetch.

    Raises:
        TypeError: ``loader`` cannot be iterated, or is a dataset of samples.
    """

    def __init__(
        self,
        loader: Iterable[Structure],
        *,
        worker: Callable[[], tuple[int, int]] = lambda: (0, 1),
        looks_ahead: bool = True,
    ) -> None:
        if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
            raise TypeError(f"a loader is an iterable of batches, got {type(loader).__name__}; give it __iter__")
        if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
            raise TypeError(
                f"{type(loader).__name__} is a Dataset, whose items are samples; give a loader of batches: "
                "DataLoader(dataset, batch_size) or ab.loaders.GlobalBatches(dataset, batch_size)"
            )
        self.source: Any = loader
        self._worker = worker
        self._reader = loader.reader(worker) if isinstance(loader, GlobalBatches) else None
        self._number = loader.epoch if isinstance(loader, GlobalBatches) else 0  # of the reader's epoch
        self._asked = 0  # how often the script had set the number, when it was last looked at
        self._samples: int | None = None  # at which the epoch begins, after a restart
        stateful = all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))
        self.kind = "global" if isinstance(loader, GlobalBatches) else "stateful" if stateful else "counted"
        # Where looking draws from no generator of this process, and runs no code of the user's.
        self._looks_ahead = looks_ahead and (isinstance(loader, list | tuple) or getattr(loader, "num_workers", 0) > 0)
        self._epochs = _Epochs(loader)
        self._generators = _generators(loader)
        self.epoch = 0
        self.closed = False
        self._iterated = False
        self._iterated_then: bool | None = None  # what it was where the restored position was saved
        self._reset()

    def _reset(self) -> None:
        """Between two epochs."""
        self._iterator: Iterator[Structure] | None = None
        self._ahead: list[Structure] = []  # the next batch, if it was looked at
        self._failure: Exception | None = None  # or what the loader raised there
        self._state_behind: object = None  # the loader's, from before that
        self._at_start: State = {}
        self.taken = 0
        self._ended = False

    # Taking batches.

    def next_batch(self) -> Structure:
        """Return the next batch, or ``ENDED`` from the end of the epoch until ``start_epoch``.

        ``NOTHING`` in place of a batch of which the others have rows and this worker has none.

        Raises:
            ValueError: the loader is an iterator and has been read, or this is closed.
            Exception: raised by the loader, unchanged.
        """
        if self.closed:
            raise ValueError("the loader is closed")
        if self._ended:
            return ENDED
        looked = bool(self._ahead) or self._failure is not None
        iterator = self._begun()
        try:
            batch = self._look() if looked else next(iterator, ENDED)
        except Exception:
            self.taken, self._failure = self.taken + 1, None  # the loader is past the batch that it could not make
            raise
        self._ahead.clear()
        if batch is ENDED:
            if self.taken == 0 and self.epoch > 0 and iterator is self.source:
                raise ValueError(
                    f"the loader is an iterator ({type(self.source).__name__}) and is exhausted: it has one epoch. "
                    "Pass something that can be iterated again: a list, a DataLoader, a class whose __iter__ starts "
                    "over"
                )
            self._ended, self._iterator = True, None
            return ENDED
        self.taken += 1
        return batch

    def peek(self) -> Structure | None:
        """Return the next batch without consuming it, or ``None`` if fetching it now could change results."""
        if self._iterator is None or not self._looks_ahead:
            return None
        try:
            return self.first()
        except Exception:  # noqa: BLE001 - it is next_batch's to raise
            return None

    def first(self) -> Structure | None:
        """Return the epoch's next batch without consuming it, fetched now if necessary; ``None`` if there is none.

        Raises:
            Exception: raised by the loader.
        """
        batch = ENDED if self.closed or self._ended else self._look()
        return None if batch is ENDED or batch is NOTHING else batch

    def _look(self) -> Structure:
        """Fetch the next batch, if it is not there."""
        if self._failure is not None:
            raise self._failure
        iterator = self._begun()
        if not self._ahead:
            self._state_behind = self._own_state()
            try:
                self._ahead = [next(iterator, ENDED)]
            except Exception as error:
                self._failure = error
                raise
        return self._ahead[0]

    def _begun(self) -> Iterator[Structure]:
        return self._begin() if self._iterator is None else self._iterator

    def _begin(self) -> Iterator[Structure]:
        """Begin the epoch."""
        self._epochs.begin()
        self._at_start = {"random": random_state(), **self._before_epoch()}
        if self._iterated_then not in (None, self._iterated) and getattr(self.source, "persistent_workers", False):
            self._draw_as_then()
        self._iterated, self._iterated_then = True, None
        self._iterator = iter(self.source) if self._reader is None else self._read()
        return self._iterator

    def _read(self) -> Iterator[Structure]:
        """Begin an epoch of ``GlobalBatches``; each bound loader has its own place in them."""
        assert self._reader is not None
        source: GlobalBatches = self.source
        samples, self._samples = self._samples, None
        if samples is None and source.asked[0] != self._asked:
            self._number = source.asked[1]  # the script's own has the last word
        if samples is None and self.epoch == 0:
            self._number, samples = source.take_loaded() or (self._number, 0)
        self._asked = source.asked[0]
        self._reader.start(self._number, samples or 0)
        source.follow(self._reader)
        self.taken = len(self.source) - self._reader.left()
        return self._reader

    def samples(self) -> list[int] | None:
        """Return how many samples each batch of an epoch has, if that is known."""
        if self._reader is None:
            return None
        size, samples = self.source.batch_size, len(self.source.dataset)
        return [min(size, samples - first) for first in range(0, len(self.source) * size, size)]

    def facts(self) -> str:
        """Return what must be the same of it on all workers."""
        source = self.source
        if self._reader is None:
            return ""
        return f"GlobalBatches({source.batch_size}, drop_last={source.drop_last}, {source.position(0, 0)})"

    def left(self) -> int | None:
        """Return how many batches of this epoch are left, if that is known whatever was read before."""
        if self._reader is None or self._iterator is None:
            return None
        return self._reader.left() + (len(self._ahead) > 0 and self._ahead[0] is not ENDED)

    @property
    def in_epoch(self) -> bool:
        """True if an epoch has begun and not ended."""
        return self._iterator is not None

    def _before_epoch(self) -> State:
        return {
            "generators": [generator.get_state() for generator in self._generators],
            "epochs": self._epochs.begun,
            "iterated": self._iterated if self._iterated_then is None else self._iterated_then,
        }

    def _draw_as_then(self) -> None:
        """Let persistent processes be there, or draw their seed: they do so in the first epoch only."""
        if not self._iterated:
            iter(self.source)  # starts them
            restore_random_state(self._at_start["random"])
            self._set_generators(self._at_start)
        elif isinstance(self.source, DataLoader):
            torch.empty((), dtype=torch.int64).random_(generator=self.source.generator)

    def one_pass(self) -> Iterator[Structure]:
        """Load all batches from the start, and leave the position as it is."""
        position = self.state() if self.kind == "stateful" and self._iterated else None
        try:
            if self._reader is None:
                yield from self.source
            else:
                again = self.source.reader(self._worker)
                again.start(self.source.epoch, 0)
                yield from (batch for batch in again if batch is not NOTHING)
        finally:
            if position is not None:
                self.restore([position] * self._worker()[1])

    def start_epoch(self) -> None:
        """Lets the next ``next_batch`` start a new epoch, wherever this one is; nothing if none has begun."""
        if self._iterator is None and not self._ended:
            return
        self._reset()
        self._epochs.next()
        self.epoch += 1
        self._number += 1

    def length(self) -> int | None:
        """Batches an epoch, ``None`` if the loader does not know."""
        try:
            return len(self.source)
        except TypeError:
            return None

    def close(self) -> None:
        """Release the loader's iterator."""
        self.closed = True
        end_processes(self.source, self._iterator)
        self._reset()
        if self._reader is not None:
            self._reader.stop()

    # The position.

    def _own_state(self) -> object:
        if self._reader is not None:
            samples = self._reader.samples if self._iterator is not None else self._samples or 0
            return self.source.position(self._number, samples)
        # Before the first epoch no state has to be kept, and some loaders start their workers when asked for it.
        if self.kind == "counted" or (self.kind == "stateful" and not self._iterated):
            return None
        return copy.deepcopy(self.source.state_dict())

    def state(self) -> State:
        """Return the loader's position, a batch that was only looked at not counted, as a checkpoint keeps it."""
        # Behind the last batch it is between two epochs, although the end was not asked for yet.
        over = isinstance(self.source, DataLoader | list | tuple) and self.taken == self.length() and not self._ahead
        ended = self._ended or (self.kind == "counted" and self._iterator is not None and over)
        begun = self._iterator is not None and not ended
        return {
            "kind": self.kind,
            "phase": "ended" if ended else "begun" if begun else "fresh",
            "epoch": self.epoch,
            "taken": self.taken,
            "start": self._at_start if begun else self._before_epoch(),
            "state": self._state_behind if self._ahead or self._failure else self._own_state(),
        }

    def moment(self) -> Moment:
        """Return what ``go_back`` takes: the position, and what the script has set since the last epoch began."""
        return self.state(), self._asked, self._samples

    def go_back(self, moment: Moment) -> None:
        """Go back to a ``moment``, with the workers of now."""
        position, asked, samples = moment
        self.restore([position])
        self._asked, self._samples = asked, samples

    def check(self, states: Sequence[object]) -> State:
        """Return the position to continue from where the workers were whose ``state()`` these are; changes nothing.

        Raises:
            CheckpointError: the loader is of another kind or order, or cannot continue with another number of workers.
        """
        saved = cast("Sequence[State]", states)
        rank, size = self._worker()
        kind, name = saved[0]["kind"], type(self.source).__name__
        if kind != self.kind:
            raise CheckpointError(
                f"the checkpoint's loader stores its position as {kind!r}, but this one ({name}) as {self.kind!r}; "
                "load with the kind of loader that was saved"
            )
        own = saved[rank % len(saved)]
        if len(saved) != size:
            begun = [state for state in saved if state["phase"] == "begun"]
            if kind == "global":
                own = begun[0] if begun else own
                goes_on = all(state["state"] == own["state"] for state in begun)
            else:
                goes_on = not begun and (kind == "counted" or all(state["state"] is None for state in saved))
            if not goes_on or len({state["epoch"] for state in saved}) > 1:
                why = "which did not wait for each other, " if kind == "global" else ""
                raise CheckpointError(
                    f"the checkpoint has positions of the loader {name} for {len(saved)} workers, {why}and this job "
                    f"has {size}; load with {len(saved)} workers, or read the data by ab.loaders.GlobalBatches, which "
                    "any number resumes where workers wait for each other"
                )
        if kind == "global":
            self.source.check(own["state"])
        return own

    def restore(self, states: Sequence[object]) -> None:
        """Resume at the position of the workers whose ``state()`` these are, in the order of their ranks.

        The process's random number generators are left unchanged.

        Raises:
            CheckpointError: as ``check`` does, or the data has become fewer; the loader may have been read then.
        """
        chosen = self.check(states)
        self._reset()
        self.epoch = chosen["epoch"]
        now = random_state()
        try:
            self._put_back(chosen)
            if chosen["phase"] == "begun":
                restore_random_state(chosen["start"]["random"])
                self._resume(chosen)
            self._ended = chosen["phase"] == "ended"
        finally:
            restore_random_state(now)

    def _put_back(self, state: State) -> None:
        """Set samplers, generators and the loader itself to ``state``."""
        self._epochs.restore(state["start"]["epochs"])
        self._set_generators(state["start"])
        self._iterated_then = state["start"]["iterated"]
        if self._reader is not None:
            self._number, self._samples = state["state"]["epoch"], state["state"]["samples"]
            self._asked = self.source.asked[0]
        elif state["state"] is not None:
            self.source.load_state_dict(state["state"])
            self._iterated = True

    def _set_generators(self, start: State) -> None:
        for generator, before in zip(self._generators, start["generators"], strict=False):
            generator.set_state(before)

    def _resume(self, state: State) -> None:
        """Begin the epoch in which ``state`` was, behind the batches that had been taken."""
        iterator = self._begin()
        self._at_start = state["start"]
        if self._reader is None:
            self.taken = state["taken"]
        if self.kind != "counted" or not self.taken:
            return
        name = type(self.source).__name__
        _log.info("the loader %s has no state_dict: skipping the %d batches that were read", name, self.taken)
        drawn = sum(1 for _ in itertools.islice(iterator, self.taken))
        if drawn < self.taken:
            raise CheckpointError(
                f"the loader {name} was at batch {self.taken} of its epoch when saved and yields {drawn} now; load "
                "with the same data"
            )


class _Epochs:
    """Everything of a loader with ``set_epoch``: a ``DistributedSampler``, a dataset of Hugging Face's."""

    def __init__(self, loader: object) -> None:
        parts = [*samplers_of(loader), loader]
        while (inner := getattr(parts[-1], "dataset", None)) is not None:  # also what a Subset is of
            parts.append(inner)
        parts = [part for part in parts if not isinstance(part, GlobalBatches)]  # whose epochs are each step's own
        self._parts: list[Any] = [part for part in parts if callable(getattr(part, "set_epoch", None))]
        self.begun = [0] * len(self._parts)  # the numbers as this epoch began
        self.begun = self._now()

    def _now(self) -> list[int]:
        numbers = [getattr(part, "epoch", None) for part in self._parts]
        return [now if isinstance(now, int) else epoch for now, epoch in zip(numbers, self.begun, strict=True)]

    def begin(self) -> None:
        self.begun = self._now()

    def next(self) -> None:
        # A script that sets it itself, between two epochs, has the last word.
        self.restore([epoch + (epoch == begun) for epoch, begun in zip(self._now(), self.begun, strict=True)])

    def restore(self, epochs: Sequence[int]) -> None:
        self.begun = list(epochs)
        for part, epoch in zip(self._parts, epochs, strict=False):
            part.set_epoch(epoch)


def samplers_of(loader: object) -> list[object]:
    """Return the samplers of a ``DataLoader`` from the outermost to the one that decides the order."""
    batches = getattr(loader, "batch_sampler", None)
    inner = getattr(batches, "sampler", None) or getattr(loader, "sampler", None)
    return [sampler for sampler in (batches, inner) if sampler is not None]


def _generators(loader: object) -> list[torch.Generator]:
    """Return the own generators of a ``DataLoader`` and its samplers."""
    generators = [getattr(owner, "generator", None) for owner in (loader, *samplers_of(loader))]
    return list(dict.fromkeys(one for one in generators if isinstance(one, torch.Generator)))
