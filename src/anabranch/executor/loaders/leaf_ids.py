"""The ids that a step will look up, known before it begins: most are a leaf of its batch, or a part of one.

::

    step 1    ids of a lookup ── compared with ──> every leaf, column and slice of the batch     candidates
    step 2    the same, of another batch ────────> candidates that fit again; the best is the rule
    step 3..  this batch ──rule──> ids: the rows of all tables in one message a shard, before the forward
              next batch ──rule──> ids: its rows are prefetched into the caches

Only the *set* of ids matters, as each row is read once: ``.t()``, ``.long()``, ``unique`` and ``.to(device)`` need
nothing of their own. A rule is a hint: a lookup of other ids reads those itself, and the next step is looked at again.
From the best to the last:

====  ==================================================  ======================================
rank  the ids of a lookup are                              such as
====  ==================================================  ======================================
0     a part of a leaf, number by number                   ``x[:, 3]``, ``f[:, 13:].long()``
1     the same set as a part of a leaf                     ``x.t()``, ``hist.unique()``
2     a part of a leaf and an offset, or one a column      ``x + offsets``, ``ids + 1``
3     within one or several parts, but for a few           ``hist[hist > 0]``, ``cat([hist, item])``
4     those of the last steps                              position embeddings
====  ==================================================  ======================================
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from anabranch.tensors import Structure, bags_of, flatten, is_jagged

_LOOKS = 10  # at the lookups of a table: two make a rule, and eight times it is looked at again
_FEW = 8  # ids of a lookup that are in no leaf, such as padding and the beginning of a sequence
_COLUMNS = 256  # of a dim, to be compared one by one
_LARGEST = 1 << 22  # numbers of a leaf that is compared
_NO_ID = torch.iinfo(torch.int64).min
_NONE = torch.empty(0, dtype=torch.int64, device="cpu")

Leaves = Mapping[tuple[object, ...], Tensor]
"""The tensors of a batch, by their paths."""


class _Part(NamedTuple):
    """``leaf[:, start:stop]``, with as many colons before it as the dim says."""

    leaf: tuple[object, ...]
    dim: int = 0
    start: int = 0
    stop: int | None = None

    def of(self, leaves: Leaves) -> Tensor:
        return leaves[self.leaf][(slice(None),) * self.dim + (slice(self.start, self.stop),)]

    def __str__(self) -> str:
        start, stop = self.start or "", "" if self.stop is None else self.stop
        cut = f"{self.start}" if self.stop == self.start + 1 or self.start == -1 else f"{start}:{stop}"
        return ".".join(map(str, ("batch", *self.leaf))) + ("" if cut == ":" else f"[{':, ' * self.dim}{cut}]")


@dataclass(frozen=True, eq=False, slots=True)
class _Rule:
    """``more`` are the offsets of rank 2, or the ids of rank 3 and 4 that are in every batch."""

    rank: int
    parts: tuple[_Part, ...] = ()
    more: Tensor = _NONE
    fits: bool = False  # in two steps running

    def of(self, leaves: Leaves) -> Tensor | None:
        """Return the ids of a batch with these leaves; ``None`` if it has no such leaves."""
        try:
            parts = [part.of(leaves) for part in self.parts]
            ids = [parts[0].long() + self.more] if self.rank == 2 else [*parts, self.more]
            return torch.cat([each.reshape(-1).long() for each in ids])
        except (LookupError, RuntimeError):
            return None

    def after(self, leaves: Leaves, ids: Tensor) -> _Rule | None:
        """Return the rule after a step that has looked up the distinct ``ids``; ``None`` if it does not fit."""
        guess = self.of(leaves)
        if guess is None:
            return None
        guess = torch.unique(guess)
        if self.rank == 4:
            longer = torch.unique(torch.cat([guess, ids]))  # the positions of a longer sequence
            most = min(1.25 * len(guess), 16 * len(ids))  # the first step may have looked up a whole table
            return _Rule(4, more=longer, fits=True) if len(longer) <= most else None
        around = self.rank == 3 and len(guess) <= 2 * len(ids) + _FEW and _outside(ids, guess, 0) is not None
        return replace(self, fits=True) if around or torch.equal(guess, ids) else None

    def __str__(self) -> str:
        names = " and ".join(map(str, self.parts)) or "the ids of the last steps"
        return names + (" + offsets" if self.rank == 2 else ", some" if self.rank == 3 else "")


class LeafIds:
    """Learns which leaves of a batch a step looks up, and returns the ids of another batch.

    >>> learned = LeafIds()
    >>> for ids in (torch.tensor([[1, 7], [2, 8]]), torch.tensor([[3, 9], [4, 6]])):
    ...     _ = learned.begin({"x": ids})
    ...     learned.end([("users", ids[:, 1])], {"users"})
    >>> learned.of({"x": torch.tensor([[3, 5]])}), learned.describe()
    ({'users': tensor([5])}, {'users': 'batch.x[:, 1]'})

    Args:
        ids: ``ids(batch)`` returns the ids of some tables, which are not learned.
        parameters: the names that it may use.
        tables: those of them whose rows are on servers; the others' ids are not returned.
    """

    def __init__(
        self,
        ids: Callable[[Structure], Mapping[str, Tensor]] | None = None,
        parameters: Collection[str] = (),
        tables: Collection[str] = (),
    ) -> None:
        self._ids, self._parameters, self._tables = ids, parameters, tables
        self._own: Collection[str] = ()
        # For each lookup of a table the rules that have fitted so far, the best first; before several all together.
        self._lookups: dict[str, list[list[_Rule]]] = {}
        self._rules: dict[str, list[_Rule]] = {}  # of each table, those that are used
        self._used: set[tuple[object, ...]] = set()  # the leaves that they read
        self._looks: Counter[str] = Counter()
        self._leaves: Leaves = {}
        self.watching = True  # the lookups of the next step are wanted by ``end``

    def begin(self, batch: Structure) -> dict[str, Tensor]:
        """Return the ids that the step of ``batch``, which begins, is expected to look up, by table."""
        # Copies, as the step may change its batch in place.
        leaves = _leaves(batch) if self.watching else ()
        self._leaves = {path: _as_ids(leaf) for path, leaf in leaves if _may_be_ids(leaf)}
        return self.of(batch)

    def end(self, lookups: Sequence[tuple[str, Tensor]], unexpected: Collection[str]) -> None:
        """Learn from the step that ``begin`` began.

        Args:
            lookups: if it is watched, each lookup's table and ids, flat and on the CPU.
            unexpected: the tables of which it has looked up ids that were not expected.
        """
        if self.watching:
            self._learn(lookups)
        self._leaves = {}
        self.watching = any(self._looks[table] < _LOOKS for table in unexpected if table not in self._own)

    def _learn(self, lookups: Sequence[tuple[str, Tensor]]) -> None:
        tables: dict[str, list[Tensor]] = {}
        for table, ids in lookups:
            if len(ids) and table not in self._own:
                tables.setdefault(table, []).append(ids)
        candidates = _Candidates(self._leaves)
        learned = {table: lookups for table, lookups in self._lookups.items() if self._rules[table]}
        for table, several in tables.items():
            self._looks[table] += 1
            before = self._lookups.get(table, [])
            learned[table] = []
            for number, ids in enumerate([torch.cat(several), *several] if len(several) > 1 else several):
                distinct = torch.unique(ids)
                old = before[number] if number < len(before) else ()
                rules = [rule for rule in (rule.after(self._leaves, distinct) for rule in old) if rule is not None]
                learned[table].append(rules or candidates.of(ids, distinct))
        self._lookups = learned
        self._rules = {table: _best(*lookups) for table, lookups in learned.items()}
        self._used = {part.leaf for rules in self._rules.values() for rule in rules for part in rule.parts}

    def of(self, batch: Structure) -> dict[str, Tensor]:
        """Return the ids that a step with ``batch`` is expected to look up, by table; those that are known."""
        expected: dict[str, Tensor] = {} if self._ids is None else dict(self._ids(batch))
        self._own = set(expected)
        for table in expected:
            if table not in self._parameters:
                raise ValueError(f"ids= names {table!r}; the parameters are: {', '.join(self._parameters)}")
        if expected:
            expected = {
                table: torch.as_tensor(ids, device="cpu") for table, ids in expected.items() if table in self._tables
            }
        leaves: dict[tuple[object, ...], Tensor] = {}
        for path, leaf in _leaves(batch) if self._used else ():
            if path in self._used:
                leaves[path] = leaf.detach().cpu()
        for table, rules in self._rules.items():
            parts = []
            for rule in rules if table not in expected else ():
                if (part := rule.of(leaves)) is not None:
                    parts.append(part)  # noqa: PERF401 - a comprehension is one more call
            if parts:
                expected[table] = torch.cat(parts)
        return expected

    def describe(self) -> dict[str, str]:
        """Return how each table's ids are known, of those whose ids are."""
        rules = {table: ", ".join(dict.fromkeys(map(str, rules))) for table, rules in self._rules.items()}
        return {table: text for table, text in rules.items() if text} | dict.fromkeys(self._own, "ids=")


def _best(together: list[_Rule], *each: list[_Rule]) -> list[_Rule]:
    """Return the rules of a table's lookups: one for all together, where it is as good as one for each."""
    worst = max((rules[0].rank if rules[0].fits else 5 for rules in each), default=5)
    best = together[0].fits and together[0].rank <= max(worst, 2)
    return [rules[0] for rules in ([together] if best else each) if rules[0].fits]


class _Candidates:
    """The rules that explain lookups of one batch."""

    def __init__(self, leaves: Leaves) -> None:
        self._leaves = leaves
        self._distinct_in = cache(lambda part: torch.unique(part.of(leaves)))

    def of(self, ids: Tensor, distinct: Tensor) -> list[_Rule]:
        """Return the rules that explain the ids of one lookup, the best first."""
        parts = {part: part.of(self._leaves) for part in self._parts(len(ids))}
        if same := [_Rule(0, (part,)) for part, numbers in parts.items() if torch.equal(numbers.reshape(-1), ids)]:
            return same
        large = [part for part, numbers in parts.items() if 4 * numbers.numel() >= 3 * len(distinct)]
        rules = [_Rule(1, (part,)) for part in large if torch.equal(self._distinct_in(part), distinct)]
        if not rules:
            offsets = {part: _offsets(numbers, ids) for part, numbers in parts.items() if numbers.numel() == len(ids)}
            rules = [_Rule(2, (part,), added) for part, added in offsets.items() if added is not None]
        return [*(rules or self._around(large, distinct)), _Rule(4, more=distinct)]

    def _around(self, parts: Sequence[_Part], ids: Tensor) -> list[_Rule]:
        """Return the rules of rank 3: the leaves that have nearly all ids together, or the least part that has."""
        few = min(_FEW, len(ids) // 4)
        rest, leaves = ids, list[_Part]()
        for leaf in sorted(map(_Part, self._leaves), key=lambda leaf: -len(self._distinct_in(leaf))):
            if _outside(self._distinct_in(leaf), ids, 0) is not None:
                left = _outside(rest, self._distinct_in(leaf), len(rest))
                if left is not None and len(left) < len(rest):
                    rest, leaves = left, [*leaves, leaf]
        if len(rest) <= few:
            return [_Rule(3, tuple(leaves), rest)]
        parts = [part for part in parts if len(self._distinct_in(part)) <= 2 * len(ids)]
        others = {part: left for part in parts if (left := _outside(ids, self._distinct_in(part), few)) is not None}
        best = sorted(others, key=lambda part: (len(others[part]), len(self._distinct_in(part))))[:1]
        return [_Rule(3, (part,), others[part]) for part in best]

    def _parts(self, count: int) -> Iterator[_Part]:
        """Yield the leaves, their columns, and slices of ``count`` numbers."""
        for path, leaf in self._leaves.items():
            yield _Part(path)
            for dim, size in enumerate(leaf.shape):
                length = count * size // max(leaf.numel(), 1)
                if 1 < length < size and length * leaf.numel() == count * size:
                    # Of sequences whose length varies: the head and the tail, by their own length or by the rest's.
                    yield from (_Part(path, dim, 0, length - size), _Part(path, dim, size - length))
                    yield from (_Part(path, dim, -length), _Part(path, dim, 0, length))
                    starts = range(1, size - length) if size <= _COLUMNS else ()
                    yield from (_Part(path, dim, start, start + length) for start in starts)
                if 1 < size <= _COLUMNS:
                    yield from (_Part(path, dim, start, start + 1) for start in range(size))
                    yield _Part(path, dim, -1)


def _leaves(batch: Structure) -> Iterator[tuple[tuple[object, ...], Tensor]]:
    """Yield the tensors of a batch and their paths; a feature of a ``KeyedJagged`` is one, as its place varies."""
    leaves, treedef = flatten(batch, is_jagged)
    for path, leaf in zip(treedef.paths(), leaves, strict=True):
        if isinstance(leaf, Tensor):
            inner = _INNER.get(leaf.layout)
            numbers: Tensor = leaf if inner is None else getattr(leaf, inner)()
            if numbers.ndim and numbers.layout is torch.strided and not numbers.is_nested:
                yield path, numbers
        elif is_jagged(leaf):
            with suppress(RuntimeError):  # features of unequal rows
                yield from [((*path, name), ids) for name, (ids, *_) in bags_of(leaf).items()]


_INNER = {torch.sparse_csr: "col_indices", torch.sparse_coo: "_indices", torch.jagged: "values"}


def _may_be_ids(leaf: Tensor) -> bool:
    numbers = not (leaf.is_complex() or leaf.is_meta or leaf.is_quantized)
    return numbers and leaf.numel() <= _LARGEST and (leaf.ndim < 3 or not leaf.is_floating_point())


def _as_ids(leaf: Tensor) -> Tensor:
    """Return the numbers of a leaf on the CPU, ``_NO_ID`` in place of those that are no integers."""
    leaf = leaf.detach().cpu()
    ids = leaf.to(torch.int64, copy=True)
    return ids.masked_fill_(ids != leaf.double(), _NO_ID) if leaf.is_floating_point() else ids


def _outside(ids: Tensor, known: Tensor, most: int) -> Tensor | None:
    """Return those of ``ids`` that are not in the ascending ``known``; ``None`` if they are more than ``most``."""
    known = torch.cat([known, known.new_full((1,), _NO_ID)])
    for some in (ids[:: len(ids) // 32 + 1].contiguous(), ids):  # most parts are seen not to fit from a few
        others = some[known[torch.searchsorted(known[:-1], some)] != some]
        if len(others) > most:
            return None
    return others


def _offsets(numbers: Tensor, ids: Tensor) -> Tensor | None:
    """Return what is added to each column of ``numbers``; ``None`` if it varies from row to row."""
    if numbers.ndim > 2 or len(numbers) < 2 or bool((numbers == numbers[:1]).all()):
        return None  # anything is a constant and an offset
    added = ids.view(numbers.shape) - numbers
    return added[:1].clone() if bool((added == added[:1]).all()) else None
