"""The worker's cache: frequently used rows, at most a bounded number of steps behind the servers.

::

    ask, answer:      have it, checked at most pull_bound steps ago ──────────────────> here
                      have it, older ──> ask by version ──> unchanged: here again; changed: the new row + own gradients
                      have it not ────> pull ──> put in, if a row can leave for it; one that leaves is pushed if dirty
    write(ids, grads, step):  the row here moves at once (own writes are read); its gradient waits, and is pushed once
                              the first of it is push_bound steps old

Own gradients can update a cached row only if its optimizer's state is cached too, but most rows are used once and then
evicted: a row is first sent without it. Its first gradient is pushed with the step; used again, it is sent with its
state, and from then on is updated here and not sent again.

Rows of the next step are requested during this one, as of the pushes before this step::

    prefetch(ids, step):  not here, soon too old, or used again without its state ──> ask; gradients of the latter
                                wait
    its answer:           as it was at ``step``, with the own gradients that wait; what was pushed since is left
                                as it is, and asked about when it is read, for own writes are read

To avoid requesting a row twice, or by a read that must wait for the answer, bounds of ``SPARE`` steps and more keep one
step in reserve: a row is requested a step before it is too old, and gradients are pushed a step before they have waited
too long, unless they must be added to an answer in flight.

An update of another worker waits there for at most push_bound steps, and is missed here for at most pull_bound: a read
misses none older than their sum. Age is counted in steps, not lookups, so a hot id ages no faster than others.

Waiting gradients are added up, and an optimizer that scales its steps by squared gradients (Adagrad, Adam) would square
the sum of 50 equal gradients: 2,500 times one square instead of 50. So each row's sum is sent with its *squares*: the
sum of its gradients' squares, divided by the square of their sum.

``parameter_server/client/cache_group.py`` does this for many tables at once, with ``kernels/caches.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from anabranch.choices import choice

Policy = Literal["LRU", "LFU", "LFUOpt"]
SPARE = 8  # steps from which on a bound has one to spare
SETTLED = 10  # steps of use after which LFUOpt keeps a row for good
Due = tuple[Tensor, Tensor, Tensor | None]
"""Gradients for the servers: ids, a gradient of each, and its squares (``None`` for gradients of one step)."""


@dataclass(frozen=True, slots=True)
class Cache:
    """Configuration of the workers' cache of each table.

    >>> Cache(policy="LFU", capacity=10_000, pull_bound=5).pull_bound
    5
    >>> Cache(capacity=0)
    Traceback (most recent call last):
    ValueError: capacity=0 must be a number of rows, at least 1

    Attributes:
        policy: the row to evict: ``"LRU"`` the one unused longest, ``"LFU"`` the one used in the fewest steps; under
            ``"LFUOpt"`` a row used in 10 steps stays for good, and once all have, no further row is cached.
        capacity: rows, of each table.
        pull_bound: steps that a row may be behind the servers.
        push_bound: steps that own gradients may wait before they are pushed.

    Raises:
        ValueError: an unknown policy, a capacity below 1, a bound below 0.

    Source: the cache of HET (Miao et al., "HET: Scaling out Huge Embedding Model Training via Cache-enabled Distributed
    Framework", 2022), whose clocks tick with an id's lookups; these tick with steps.
    """

    policy: Policy = "LRU"
    capacity: int = 100_000
    pull_bound: int = 0
    push_bound: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "policy", choice("policy", self.policy, ("LRU", "LFU", "LFUOpt")))
        for name, least, what in (("capacity", 1, "rows"), ("pull_bound", 0, "steps"), ("push_bound", 0, "steps")):
            number = getattr(self, name)
            if isinstance(number, bool) or not isinstance(number, int) or number < least:
                raise ValueError(f"{name}={number!r} must be a number of {what}, at least {least}")


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """Counters of a cache, in rows.

    Attributes:
        hits: read without a transfer: checked recently, or checked now and unchanged.
        misses: read and pulled.
        refreshed: misses on rows that were cached but too old, and had changed.
        evictions: rows evicted to make room.
        pushed: gradients of rows sent to the servers.
    """

    hits: int
    misses: int
    refreshed: int
    evictions: int
    pushed: int


def spare_of(cache: Cache) -> int:
    """Return the number of steps kept in reserve of the bounds."""
    return int(cache.pull_bound >= SPARE and (cache.push_bound >= SPARE or not cache.push_bound))
