"""Covering arrays: few cases in which every pair of values meets, instead of the product of all values."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product

__all__ = ["each_once", "pairwise"]


def pairwise(*factors: Sequence[object]) -> list[tuple[object, ...]]:
    """Return cases, one value of each factor, in which any two values of any two factors stand side by side once."""
    places = [tuple(range(len(factor))) for factor in factors]
    missing = {
        (one, other, i, j)
        for one, other in combinations(range(len(factors)), 2)
        for i in places[one]
        for j in places[other]
    }
    chosen: list[tuple[int, ...]] = []
    while missing:
        best = max(product(*places), key=lambda case: sum(case[a] == i and case[b] == j for a, b, i, j in missing))
        missing = {(a, b, i, j) for a, b, i, j in missing if (best[a], best[b]) != (i, j)}
        chosen.append(best)
    return [tuple(factor[at] for factor, at in zip(factors, case, strict=True)) for case in chosen]


def each_once(*factors: Sequence[object]) -> list[tuple[object, ...]]:
    """Return as many cases as the longest factor has values; every value of every factor stands in one at least."""
    return [tuple(factor[at % len(factor)] for factor in factors) for at in range(max(map(len, factors)))]
