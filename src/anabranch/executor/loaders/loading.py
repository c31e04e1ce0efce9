"""``BoundLoader``: an executor's way to a step's batches, prefetched, and exactly where they were after a restart.

While a step runs, a thread fetches the next batch. It must not be seen in the numbers, so three things are made sure of
by fetching the first two batches of an epoch in the calling thread and looking what happens:

- Nothing may draw from the process's random number generators while the training step runs, since the order of draws
  would depend on timing. The first fetch may draw (samplers draw their seed then), the second may not.
- Nothing may change a batch that was returned: some loaders fill the same memory again and again.
- ``iter(loader)`` is called in the calling thread always: it draws, and may fork workers.

A loader that fails the first two is fetched in the calling thread for good, and the log says how to cure it. So is one
whose fetches are over before a thread could hand the batch over, silently and until they take longer.

The position that is saved is that of the batches returned; what was prefetched does not count.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Final, cast

import torch
from torch import Tensor

from anabranch.autodiff.thread_modes import ThreadModes, current_streams, on_streams
from anabranch.errors import CheckpointError
from anabranch.executor.loaders.positions import State, first_of_next_epoch, position_of
from anabranch.executor.randomness import random_state, restore_random_state, same_random_state
from anabranch.tensors import Structure, as_tensors, flatten

__all__ = ["BoundLoader", "ENDED"]

_log = logging.getLogger("anabranch.executor")

_WATCHED = 2  # fetches at the start of an epoch that are made in the calling thread
# Handing a batch from thread to thread takes 0.06 to 0.2 ms: no gain if fetches take less than this many seconds. The
# usual time is a running mean, in which one fetch counts a tenth, and no more than the cap: a hiccup of the machine.
_WORTH_A_THREAD = 3e-4
_CAP = 1e-3
_PATIENCE = 60.0  # seconds until a slow loader is logged


class _Ended:
    """Returned by ``next_batch`` when an epoch is over."""

    def __repr__(self) -> str:
        return "ENDED"


ENDED: Final = _Ended()


class BoundLoader:
    """Takes batches from a loader, one epoch after the other.

    >>> loader = BoundLoader([1, 2], rank=0, world_size=1)
    >>> loader.next_batch(), loader.next_batch(), loader.next_batch(), loader.next_batch()
    (1, 2, ENDED, ENDED)
    >>> loader.start_epoch()
    >>> loader.next_batch()
    1
    >>> position = loader.state()
    >>> again = BoundLoader([1, 2], rank=0, world_size=1)
    >>> again.restore([position])
    >>> again.next_batch()
    2

    Args:
        loader: any iterable of batches; an iterator has one epoch. It, its samplers and its dataset, if they have a
            ``set_epoch``, get the number of each epoch after the first.
        rank: this worker's.
        world_size: the number of workers.
        prefetch: fetch the next batch while the step runs.

    Raises:
        TypeError: ``loader`` cannot be iterated.
    """

    def __init__(self, loader: Iterable[Structure], *, rank: int, world_size: int, prefetch: bool = True) -> None:
        if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
            raise TypeError(f"a loader is an iterable of batches, got {type(loader).__name__}; give it __iter__")
        self._loader = loader
        self._rank = rank
        self._world_size = world_size
        self._position = position_of(loader, world_size)
        # The batches of a list need no fetching.
        self._in_memory = isinstance(loader, list | tuple)
        self._prefetch = prefetch and not self._in_memory
        self._usual_seconds = 0.0
        self._thread: ThreadPoolExecutor | None = None
        self._closed = False
        self._epoch = 0
        self._reset()

    def _reset(self) -> None:
        """Between two epochs."""
        self._iterator: Iterator[Structure] | None = None
        self._pending: Future[Structure] | None = None
        self._snapshot: State = {}
        self._at_start: dict[str, object] = {}
        self._taken = 0
        self._fetched = 0
        self._last: Structure = None
        self._ended = False

    # Taking batches.

    def next_batch(self) -> Structure:
        """Return the next batch, or ``ENDED`` from the end of the epoch until ``start_epoch``.

        Raises:
            ValueError: the loader is an iterator and has been read, or this is closed.
            Exception: raised by the loader, unchanged.
        """
        if self._closed:
            raise ValueError("the loader is closed")
        if self._ended:
            return ENDED
        iterator = self._begin()
        try:
            batch = self._received() if self._pending is not None else self._timed()
        except Exception:
            self._taken += 1  # the loader is past the batch that it could not make
            raise
        if batch is ENDED:
            self._end()
            return ENDED
        self._taken += 1
        if self._prefetch and self._fetched >= _WATCHED and self._usual_seconds > _WORTH_A_THREAD:
            self._fetch_ahead(iterator)
        return batch

    def peek(self) -> Structure | None:
        """Return the next batch without consuming it, or ``None`` if fetching it now could change results.

        ``None``, too, until the loader is known to fetch without side effects, and while its thread is fetching.
        """
        if self._closed or self._ended or self._iterator is None:
            return None
        if self._pending is None:
            if not self._in_memory and not (self._prefetch and self._fetched >= _WATCHED):
                return None
            self._snapshot = self._position.snapshot()
            self._pending = Future()
            try:
                self._pending.set_result(self._fetch(self._iterator))
            except Exception as error:  # noqa: BLE001 - it is next_batch's to raise
                self._pending.set_exception(error)
        if not self._pending.done() or self._pending.exception(timeout=0) is not None:
            return None
        batch = self._pending.result(timeout=0)
        return None if batch is ENDED else batch

    def first(self) -> Structure | None:
        """Return the next batch without consuming it, as ``peek`` does, and fetch it now if necessary.

        At the end of an epoch it is the next epoch's first, for which the loader is iterated once more; ``None`` if it
        has none.

        Raises:
            Exception: raised by the loader.
        """
        if self._closed:
            return None
        if self._pending is None and not self._ended:
            self._begin()
            self._snapshot = self._position.snapshot()
            fetched: Future[Structure] = Future()
            try:
                fetched.set_result(self._watched())
            except Exception as error:  # noqa: BLE001 - it is next_batch's to raise, too
                fetched.set_exception(error)
            self._pending = fetched
        batch = ENDED if self._ended else self._arrived().result(timeout=0)
        return first_of_next_epoch(self._loader, self._position) if batch is ENDED else batch

    def _begin(self) -> Iterator[Structure]:
        """Begin the epoch, if it has not begun."""
        if self._iterator is None:
            self._at_start = random_state()
            self._iterator = self._position.begin()
        return self._iterator

    def start_epoch(self) -> None:
        """Lets the next ``next_batch`` start a new epoch, wherever this one is; nothing if none has begun."""
        if self._iterator is None and not self._ended:
            return
        self._abandon()
        self._position.next_epoch()
        self._epoch += 1

    @property
    def epoch(self) -> int:
        """The number of epochs before this one."""
        return self._epoch

    @property
    def taken(self) -> int:
        """The batches that were taken in this epoch."""
        return self._taken

    def length(self) -> int | None:
        """Batches an epoch, ``None`` if the loader does not know."""
        try:
            return len(self._loader)  # type: ignore[arg-type]
        except TypeError:
            return None

    def close(self, timeout: float = 10.0) -> None:
        """End the thread and release the loader's iterator; log it if this takes longer than ``timeout``."""
        self._closed = True
        pending, self._pending = self._pending, None
        if self._thread is not None:
            idle = pending is None or bool(wait([pending], timeout).done)
            if not idle:
                _log.warning(
                    "the loader %s has been fetching a batch for over %.0f s; its thread is left running until it "
                    "returns",
                    type(self._loader).__name__,
                    timeout,
                )
            self._thread.shutdown(wait=idle, cancel_futures=True)
            self._thread = None
        self._reset()

    def _end(self) -> None:
        if self._taken == 0 and self._epoch > 0 and self._iterator is self._loader:
            raise ValueError(
                f"the loader is an iterator ({type(self._loader).__name__}) and is exhausted: it has one "
                "epoch. Pass something that can be iterated again: a list, a DataLoader, a class whose __iter__ starts "
                "over"
            )
        self._ended = True
        self._iterator = None
        self._last = None

    def _abandon(self) -> None:
        if self._pending is not None:
            with contextlib.suppress(Exception):  # of a discarded batch
                self._received()
        self._reset()

    # Fetching.

    def _fetch(self, iterator: Iterator[Structure]) -> Structure:
        return next(iterator, ENDED)

    def _timed(self) -> Structure:
        """Return a fetch in the calling thread, which shows whether others are worth a thread."""
        began = time.monotonic()
        batch = self._watched()
        self._usual_seconds += 0.1 * (min(time.monotonic() - began, _CAP) - self._usual_seconds)
        return batch

    def _watched(self) -> Structure:
        """Return a fetch in the calling thread; the first ones of an epoch show whether others may go ahead."""
        assert self._iterator is not None
        self._fetched += 1
        if not self._prefetch or self._fetched > _WATCHED:
            return self._fetch(self._iterator)
        if self._fetched < _WATCHED:
            self._last = self._fetch(self._iterator)
            return self._last
        random_before, contents_before = random_state(), _contents(self._last)
        batch = self._fetch(self._iterator)
        if not same_random_state(random_before, random_state()):
            self._never_ahead(
                "draws from the process's random number generators while fetching, which alongside the training step "
                "would make runs differ. Give its sampler and dataset their own generators "
                "(generator=torch.Generator(), numpy.random.default_rng(seed)) or use DataLoader workers"
            )
        elif not all(map(torch.equal, _contents(self._last), contents_before)):
            self._never_ahead(
                "reuses the memory of the previous batch while fetching, which the training step may still be using. "
                "Let it allocate new memory for each batch"
            )
        self._last = None
        return batch

    def _never_ahead(self, why: str) -> None:
        self._prefetch = False
        _log.warning("the batches of the loader %s are not prefetched, since it %s", type(self._loader).__name__, why)

    def _fetch_ahead(self, iterator: Iterator[Structure]) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="anabranch-loader")
        # Taken here, where nothing else runs on the loader, and valid until this batch is returned.
        self._snapshot = self._position.snapshot()
        self._pending = self._thread.submit(_in_modes_of_this_thread(lambda: self._fetch(iterator)))

    def _received(self) -> Structure:
        """Return the prefetched batch. Without a deadline, because the caller's own code is awaited."""
        pending, self._pending = self._arrived(), None
        return pending.result(timeout=0)

    def _arrived(self) -> Future[Structure]:
        assert self._pending is not None
        waited = 0.0
        while not wait([self._pending], _PATIENCE).done:
            waited += _PATIENCE
            _log.warning("the loader %s has been fetching for %.0f s", type(self._loader).__name__, waited)
        return self._pending

    # The position.

    def state(self) -> dict[str, object]:
        """Return the loader's position, prefetched batches not counted: nested values and tensors that a checkpoint
        keeps.
        """
        begun = self._iterator is not None
        snapshot = self._position.snapshot() if self._pending is None else self._snapshot
        return {
            "kind": self._position.kind,
            "phase": "ended" if self._ended else "begun" if begun else "fresh",
            "epoch": self._epoch,
            "random_at_start": self._at_start,
            "position": self._position.state(self._taken, snapshot),
        }

    def check(self, states: Sequence[object]) -> State:
        """Return the position to continue from where the workers were whose ``state()`` these are; changes nothing.

        Raises:
            CheckpointError: the loader is of another kind or order, or cannot continue with another number of workers.
        """
        saved = [cast("dict[str, object]", state) for state in states]
        kinds = {state["kind"] for state in saved}
        if kinds != {self._position.kind}:
            raise CheckpointError(
                f"the checkpoint's loader stores its position as {sorted(map(str, kinds))}, but this one "
                f"({type(self._loader).__name__}) as {self._position.kind!r}; load with the kind of loader that was "
                "saved"
            )
        if len({state["epoch"] for state in saved}) > 1:
            raise CheckpointError("the checkpoint's workers were in different epochs of the loader")
        positions = [cast(State, state["position"]) for state in saved]
        return self._position.check(positions, self._rank, between=_between(saved))

    def restore(self, states: Sequence[object]) -> None:
        """Resume at the position of the workers whose ``state()`` these are, in the order of their ranks.

        The process's random number generators are left unchanged.

        Raises:
            CheckpointError: as ``check`` does, or the data has become fewer; the loader may have been read then.
        """
        chosen = self.check(states)
        saved = [cast("dict[str, object]", state) for state in states]
        mine = saved[self._rank % len(saved)]
        as_many = len(saved) == self._world_size
        self._abandon()
        self._epoch = cast(int, mine["epoch"])
        if mine["phase"] == "begun" or not (as_many or _between(saved)):
            self._resume(chosen, cast("dict[str, object]", mine["random_at_start"]) if as_many else None)
        else:
            self._position.ready(chosen)
            self._ended = mine["phase"] == "ended"

    def _resume(self, position: State, random_at_start: dict[str, object] | None) -> None:
        now = random_state()
        try:
            if random_at_start is not None:
                restore_random_state(random_at_start)
            self._at_start = random_state()
            self._iterator = self._position.resume(position)
        finally:
            restore_random_state(now)


def _between(saved: Sequence[dict[str, object]]) -> bool:
    """Return True if all workers were between two epochs."""
    return all(state["phase"] != "begun" for state in saved)


def _in_modes_of_this_thread(function: Callable[[], Structure]) -> Callable[[], Structure]:
    """Return ``function`` for another thread, under this thread's settings: PyTorch keeps them per thread."""
    context, modes, streams = contextvars.copy_context(), ThreadModes.take(), current_streams()

    def run() -> Structure:
        with modes.entered(), on_streams(streams):
            return context.run(function)

    return run


def _contents(batch: Structure) -> list[Tensor]:
    """Copy of the bytes of a batch, to see later whether they have changed."""
    return [
        leaf.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
        for leaf in flatten(as_tensors(batch))[0]
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided and not leaf.is_meta
    ]
