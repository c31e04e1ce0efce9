"""A loader's position in its epoch, saved and restored: one class for each kind of loader.

============  ==================================  ==============================================================
kind          which loaders                       position
============  ==================================  ==============================================================
``stateful``  any with ``state_dict`` and         their own ``state_dict``, as it was before the first batch that
              ``load_state_dict``                 was not handed out
``map``       ``torch.utils.data.DataLoader``     samples (of the batch sampler's batches, if it is of a kind of
              over a map-style dataset            its own); resuming draws from the sampler and loads nothing
``counted``   any other iterable                  batches; resuming draws them and throws them away
============  ==================================  ==============================================================

All need as many workers as there were, except ``map`` over a strided sampler, one with ``num_replicas`` and ``rank`` as
``DistributedSampler``. There rank r of W reads samples r, r + W, r + 2W, ... of one global order, so that workers who
have read the same number of batches have read the first G samples of that order, all of them. On V workers rank r goes
on at its first sample that is not among these, its number ``ceil((G - r) / V)``, whatever V.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol, cast

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from anabranch.errors import CheckpointError
from anabranch.executor.randomness import random_state, restore_random_state
from anabranch.tensors import Structure

State = dict[str, object]


class LoaderPosition(Protocol):
    """Starts epochs of one loader for a ``BoundLoader``, and tracks its position."""

    kind: str
    epochs: _Epochs

    def begin(self) -> Iterator[Structure]:
        """Start an epoch."""

    def next_epoch(self) -> None:
        """Go on to the next epoch."""

    def snapshot(self) -> State:
        """State that changes as batches are fetched, as of now; called by the fetching thread before each fetch."""

    def state(self, batches: int, snapshot: State) -> State:
        """Return the position after ``batches`` of this epoch, when ``snapshot`` was taken."""

    def check(self, states: Sequence[State], rank: int, *, between: bool) -> State:
        """Return the state to continue from on this rank, chosen from those of all ranks of the job that saved.

        ``between``: all of them were between two epochs, where no samples are shared out.

        Raises:
            CheckpointError: they do not fit this loader or this number of workers.
        """

    def resume(self, state: State) -> Iterator[Structure]:
        """Start the epoch that was in progress, where it was."""

    def ready(self, state: State) -> None:
        """Put the loader between two epochs, where it was."""


def position_of(loader: Iterable[Structure], world_size: int) -> LoaderPosition:
    """Return the kind of position that ``loader`` has."""
    if callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None)):
        return StatefulPosition(cast(_Stateful, loader), world_size)
    # A subclass may iterate as it likes.
    if type(loader) is DataLoader and not isinstance(loader.dataset, IterableDataset):
        return MapPosition(loader, world_size)
    return CountedPosition(loader, world_size)


def first_of_next_epoch(loader: Iterable[Structure], position: LoaderPosition) -> Structure | None:
    """Return the first batch of the epoch after this one, which has ended, without consuming it; ``None`` without one.

    The random number generators of the process, of the loader and of its samplers are as before.
    """
    random, state = random_state(), position.state(0, position.snapshot())
    generators = [(one, one.get_state()) for one in _generators(loader, _samplers(loader)).values()]
    with position.epochs.unchanged():
        try:
            position.next_epoch()
            return next(position.begin(), None)
        finally:
            position.ready(state)
            restore_random_state(random)
            for generator, before in generators:
                generator.set_state(before)


class _Stateful(Protocol):
    def __iter__(self) -> Iterator[Structure]: ...

    def state_dict(self) -> object: ...

    def load_state_dict(self, state: object) -> None: ...


class StatefulPosition:
    """A loader that keeps its own position."""

    kind = "stateful"

    def __init__(self, loader: _Stateful, world_size: int) -> None:
        self._loader = loader
        self._world_size = world_size
        self.epochs = _Epochs(loader)
        self._begun = False

    def begin(self) -> Iterator[Structure]:
        """Start an epoch."""
        self._begun = True
        self.epochs.begin()
        return iter(self._loader)

    def next_epoch(self) -> None:
        """Call every ``set_epoch``; all else is the loader's own business."""
        self.epochs.next()

    def snapshot(self) -> State:
        """Return a copy of the loader's state, which the loader may continue to change."""
        # Before the first epoch no state has to be kept, and some loaders start their workers when asked for it.
        return {"state": copy.deepcopy(self._loader.state_dict()) if self._begun else None}

    def state(self, batches: int, snapshot: State) -> State:
        """Return the loader's state at the snapshot."""
        return {**snapshot, "epochs": self.epochs.state()}

    def check(self, states: Sequence[State], rank: int, *, between: bool) -> State:
        """Return this rank's own position; there must be as many as there are workers, once an epoch has begun."""
        if between and all(state["state"] is None for state in states):
            return states[0]
        return _own(states, rank, self._world_size, self._loader, "stores its own position")

    def resume(self, state: State) -> Iterator[Structure]:
        """Iterate from the position on."""
        self.ready(state)
        return self.begin()

    def ready(self, state: State) -> None:
        """Load the loader's state."""
        self.epochs.restore(state["epochs"])
        if state["state"] is not None:
            self._loader.load_state_dict(state["state"])
            self._begun = True


class CountedPosition:
    """An iterable that knows nothing of positions: batches are counted."""

    kind = "counted"

    def __init__(self, loader: Iterable[Structure], world_size: int) -> None:
        self._loader = loader
        self._world_size = world_size
        self.epochs = _Epochs(loader)
        self._workers = _PersistentWorkers(loader)
        self._skipped = 0

    def begin(self) -> Iterator[Structure]:
        """Start an epoch."""
        self.epochs.begin()
        return self._workers.begin()

    def next_epoch(self) -> None:
        """Call every ``set_epoch``."""
        self._skipped = 0
        self.epochs.next()

    def snapshot(self) -> State:
        """Nothing."""
        return {}

    def state(self, batches: int, snapshot: State) -> State:
        """Return the number of batches."""
        return {
            "batches": self._skipped + batches,
            "epochs": self.epochs.state(),
            "persistent_workers": self._workers.state(),
        }

    def check(self, states: Sequence[State], rank: int, *, between: bool) -> State:
        """Return this rank's own; there must be as many as there are workers, within an epoch."""
        if between:
            return states[rank % len(states)]
        why = "has no samples that could be redistributed (a DataLoader over a map-style dataset has)"
        return _own(states, rank, self._world_size, self._loader, why)

    def resume(self, state: State) -> Iterator[Structure]:
        """Draws the batches that were returned."""
        self.ready(state)
        iterator = self._workers.resume(self._loader)
        batches = self._skipped
        drawn = sum(1 for _ in itertools.islice(iterator, batches))
        if drawn < batches:
            raise CheckpointError(
                f"the loader {_name(self._loader)} was at batch {batches} of its epoch when saved and yields {drawn} "
                "now; load with the same data"
            )
        return iterator

    def ready(self, state: State) -> None:
        """Tells the samplers their epoch."""
        self._skipped = cast(int, state["batches"])
        self.epochs.restore(state["epochs"])
        self._workers.restore(state)


class MapPosition:
    """A ``DataLoader`` over a map-style dataset: the order comes from a sampler, which can be skipped alone."""

    kind = "map"

    def __init__(self, loader: DataLoader[Structure], world_size: int) -> None:
        self._loader = loader
        self._world_size = world_size
        samplers = _samplers(loader)
        self._sampler = samplers[-1]
        self.epochs = _Epochs(loader)
        self._workers = _PersistentWorkers(loader)
        self._generators = _generators(loader, samplers)
        self._shards = getattr(self._sampler, "num_replicas", None)
        self._shard = getattr(self._sampler, "rank", None)
        self._skipped = 0
        self._at_start: object = {}

    def begin(self) -> Iterator[Structure]:
        """Start an epoch."""
        self._at_start = self._generator_states()
        self.epochs.begin()
        return self._workers.begin()

    def next_epoch(self) -> None:
        """Call every ``set_epoch``."""
        self._skipped = 0
        self.epochs.next()

    def snapshot(self) -> State:
        """Return the own generators of the loader and its samplers."""
        return {"generators": self._generator_states()}

    def state(self, batches: int, snapshot: State) -> State:
        """Return the number of samples, and the state that determines their order."""
        return {
            "sampler": _type_name(self._sampler),
            "dataset": _length(self._loader.dataset),
            "shards": self._shards,
            "share": _length(self._sampler),
            "unit": self._unit()[0],
            "consumed": self._skipped + batches * self._unit()[1],
            "epochs": self.epochs.state(),
            "generators_at_start": self._at_start,
            "persistent_workers": self._workers.state(),
            **snapshot,
        }

    def check(self, states: Sequence[State], rank: int, *, between: bool) -> State:
        """Return this rank's own batches, or under a strided sampler its share of what all have read."""
        own = states[rank % len(states)]
        if between:
            return own
        here = self.state(0, {})
        for key, what in (("sampler", "sampler"), ("dataset", "number of samples in the dataset")):
            if own[key] != here[key]:
                raise CheckpointError(
                    f"the checkpoint's loader has {own[key]} as its {what}, but this one has {here[key]}: the position "
                    "cannot be carried over; load with the loader that was saved"
                )
        if not self._loader.in_order:
            raise CheckpointError("a DataLoader with in_order=False has no position to resume from; use in_order=True")
        if len(states) == self._world_size and own["shards"] == self._shards:
            if own["unit"] != here["unit"]:
                raise CheckpointError(
                    f"the checkpoint's loader counts {own['unit']}, but this one counts {here['unit']}"
                )
            return own
        return self._share(states, own)

    def resume(self, state: State) -> Iterator[Structure]:
        """Goes on behind the samples that were returned, without loading them."""
        self.ready(state)
        self._restore_generators(self._at_start)
        rest = _RemainingIndices(self._loader, self._skipped, self._unit()[0] == "samples")
        iterator = self._workers.resume(_with_sampler(self._loader, rest))
        rest.skip()  # after the loader has drawn its workers' seed: in an epoch the sampler draws its own after it
        self._restore_generators(state["generators"])
        return iterator

    def ready(self, state: State) -> None:
        """Tells the samplers their epoch, and puts the generators back."""
        self._skipped, self._at_start = cast(int, state["consumed"]), state["generators_at_start"]
        self.epochs.restore(state["epochs"])
        self._workers.restore(state)
        self._restore_generators(state["generators"])

    def _unit(self) -> tuple[str, int]:
        """Return the unit that is counted, and how many of it make a batch."""
        if self._loader.batch_sampler is None:
            return "samples", 1
        if type(self._loader.batch_sampler) is BatchSampler:
            return "samples", self._loader.batch_sampler.batch_size
        return "batches", 1

    def _share(self, states: Sequence[State], own: State) -> State:
        units = {self._unit()[0], own["unit"]}
        if self._shards != self._world_size or own["shards"] != len(states) or units != {"samples"}:
            raise CheckpointError(
                f"the checkpoint's loader was read by {len(states)} workers, and this job has {self._world_size}: only "
                "a DataLoader with a strided sampler, such as DistributedSampler, and without its own batch sampler "
                "can be redistributed; load with as many workers, or save between epochs"
            )
        # A last batch may have been short.
        consumed = [min(cast(int, state["consumed"]), cast(int, state["share"])) for state in states]
        total = sum(consumed)
        if consumed != [_share_of(total, rank, len(states)) for rank in range(len(states))]:
            raise CheckpointError(
                f"the {len(states)} workers of the checkpoint had read {consumed} samples of this epoch, which are not "
                "the first ones of the global order in round-robin; load with as many workers, or save between epochs"
            )
        return {**own, "consumed": _share_of(total, cast(int, self._shard), self._shards)}

    def _generator_states(self) -> dict[str, Tensor]:
        return {name: generator.get_state() for name, generator in self._generators.items()}

    def _restore_generators(self, states: object) -> None:
        for name, state in cast("Mapping[str, Tensor]", states or {}).items():
            if name in self._generators:
                self._generators[name].set_state(state)


class _RemainingIndices:
    """The indices of an epoch from some position on, in place of a loader's sampler.

    Samplers may draw from a random number generator as they are iterated or at their first index, so both are done when
    a loader does them: a sampler that it iterates itself at once, one within a ``BatchSampler`` at the first batch.
    """

    def __init__(self, loader: DataLoader[Structure], skip: int, samples: bool) -> None:
        self._skip = skip
        batches = loader.batch_sampler
        self._batching = batches if samples and isinstance(batches, BatchSampler) else None
        if self._batching is not None:
            self._source: Iterable[object] = self._batching.sampler  # not loader.sampler, which may be a default
        else:
            self._source = loader.sampler if batches is None else batches
        self._items: Iterator[object] | None = None
        self._skipped = False

    def skip(self) -> None:
        """Skip the batches that have been read, unless already done."""
        if self._skipped:
            return
        self._skipped = True
        items = iter(self._source) if self._items is None else self._items
        for _ in itertools.islice(items, self._skip):
            pass
        if self._batching is not None:
            indices = cast("Iterable[int]", items)
            items = iter(BatchSampler(indices, self._batching.batch_size, self._batching.drop_last))
        self._items = items

    def __iter__(self) -> Iterator[object]:
        if self._batching is None:
            self._items = iter(self._source)
        return self

    def __next__(self) -> object:
        self.skip()
        assert self._items is not None
        return next(self._items)


def _with_sampler(loader: DataLoader[Structure], rest: _RemainingIndices) -> DataLoader[Structure]:
    """``loader`` with other indices, for the rest of one epoch."""
    options: dict[str, object] = {
        "num_workers": loader.num_workers,
        "collate_fn": loader.collate_fn,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "generator": loader.generator,
        "prefetch_factor": loader.prefetch_factor,
    }
    if loader.batch_sampler is None:
        options |= {"batch_size": None, "sampler": rest}
    else:
        options["batch_sampler"] = rest
    return DataLoader(loader.dataset, **options)  # type: ignore[arg-type]


class _PersistentWorkers:
    """The draw of the workers' seed: a ``DataLoader`` makes it in each epoch, or only in the first if they persist.

    A restarted loader has no workers yet, whatever the epoch. It must start them without that draw, or the order of a
    shuffled epoch would be another one.
    """

    def __init__(self, loader: Iterable[Structure]) -> None:
        self._loader = loader
        self._persist = isinstance(loader, DataLoader) and loader.persistent_workers and loader.num_workers > 0
        self._restored: bool | None = None  # whether the loader that this one continues had workers
        self._at_start = False  # whether there were some as this epoch began

    def begin(self) -> Iterator[Structure]:
        """Start an epoch of the loader."""
        self._at_start, self._restored = self._exist, None
        return self.resume(self._loader)

    def resume(self, loader: Iterable[Structure]) -> Iterator[Structure]:
        """Iterate over ``loader``, which is the loader itself or continues its epoch, with the draws of that epoch."""
        exist = _has_workers(loader)
        if not self._persist or exist is self._at_start:
            return iter(loader)
        assert isinstance(loader, DataLoader)
        if exist:  # the workers of a later epoch, and a checkpoint of the first
            torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
            return iter(loader)
        usual = loader.generator
        there = torch.get_default_device() if usual is None else usual.device
        loader.generator = torch.Generator(there).manual_seed((usual or torch.default_generator).initial_seed())
        try:
            return iter(loader)
        finally:
            loader.generator = usual

    @property
    def _exist(self) -> bool:
        return self._persist and (_has_workers(self._loader) if self._restored is None else self._restored)

    def state(self) -> list[bool]:
        return [self._at_start, self._exist]

    def restore(self, state: State) -> None:
        self._at_start, self._restored = cast("list[bool]", state.get("persistent_workers", [False, False]))


def _has_workers(loader: object) -> bool:
    return getattr(loader, "_iterator", None) is not None


class _Epochs:
    """Everything of a loader with ``set_epoch``: a ``DistributedSampler``, a dataset of Hugging Face's."""

    def __init__(self, loader: object) -> None:
        parts = [*_samplers(loader), loader]
        while (inner := getattr(parts[-1], "dataset", None)) is not None:  # also what a Subset is of
            parts.append(inner)
        self._parts = [part for part in parts if callable(getattr(part, "set_epoch", None))]
        self._epochs = [0] * len(self._parts)
        self.begin()

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        began, now = self._epochs, self._current()
        try:
            yield
        finally:
            self.restore(now)
            self._epochs = began

    def state(self) -> list[int]:
        return list(self._epochs)

    def begin(self) -> None:
        self._epochs = self._current()

    def next(self) -> None:
        # A script that sets it itself, between two epochs, has the last word.
        now = self._current()
        self.restore([epoch + (epoch == began) for epoch, began in zip(now, self._epochs, strict=True)])

    def restore(self, epochs: object) -> None:
        self._epochs = list(cast("list[int]", epochs))
        for part, epoch in zip(self._parts, self._epochs, strict=False):
            part.set_epoch(epoch)  # type: ignore[attr-defined]

    def _current(self) -> list[int]:
        known = [getattr(part, "epoch", None) for part in self._parts]
        return [now if isinstance(now, int) else epoch for now, epoch in zip(known, self._epochs, strict=True)]


def _samplers(loader: object) -> list[object]:
    """Return the samplers of a ``DataLoader`` from the outermost to the one that decides the order."""
    batches = getattr(loader, "batch_sampler", None)
    inner = getattr(batches, "sampler", None) or getattr(loader, "sampler", None)
    return [sampler for sampler in (batches, inner) if sampler is not None]


def _generators(loader: object, samplers: Sequence[object]) -> dict[str, torch.Generator]:
    owners = {"loader": loader, **{f"sampler{index}": sampler for index, sampler in enumerate(samplers)}}
    found: dict[str, torch.Generator] = {}
    for name, owner in owners.items():
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator) and not any(generator is known for known in found.values()):
            found[name] = generator
    return found


def _own(states: Sequence[State], rank: int, world_size: int, loader: object, why: str) -> State:
    if len(states) != world_size:
        raise CheckpointError(
            f"the checkpoint has positions of the loader {_name(loader)} for {len(states)} workers, and this job has "
            f"{world_size}: it {why}; load with {len(states)} workers"
        )
    return states[rank]


def _share_of(total: int, rank: int, shards: int) -> int:
    """Return this rank's share of the first ``total`` samples."""
    return max(0, -(-(total - rank) // shards))


def _length(sized: object) -> int | None:
    try:
        return len(sized)  # type: ignore[arg-type]
    except TypeError:
        return None


def _name(loader: object) -> str:
    return type(loader).__name__


def _type_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
