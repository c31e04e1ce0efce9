"""Covering arrays: few cases among which every pair of values of two parameters occurs.

A fault that needs a certain value of one parameter, or of two together, is found by them as by the full product, which
is left to the slow tests.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import pytest
from _pytest.mark import ParameterSet


def pairs_of(case: Sequence[int]) -> set[tuple[int, int, int, int]]:
    """Pairs of values of two parameters that occur together in a case, given by the places of its values."""
    return {(i, case[i], k, case[k]) for i, k in itertools.combinations(range(len(case)), 2)}


def pairwise(*values: Iterable[object], slow: bool = True) -> list[ParameterSet]:
    """Cases for ``pytest.mark.parametrize``: each time the one with the most pairs that are new, the first of equals.

    With ``slow`` the rest of the product follows, marked as slow.
    """
    columns = [list(column) for column in values]
    left = list(itertools.product(*(range(len(column)) for column in columns)))
    missing = set().union(*map(pairs_of, left))
    chosen = []
    while missing:
        best = max(left, key=lambda case: len(pairs_of(case) & missing))
        chosen.append(best)
        left.remove(best)
        missing -= pairs_of(best)

    def named(case: Sequence[int]) -> list[object]:
        return [column[place] for column, place in zip(columns, case, strict=True)]

    found = [pytest.param(*named(case)) for case in chosen]
    return found + [pytest.param(*named(case), marks=pytest.mark.slow) for case in left if slow]


def few(values: Iterable[object], *quick: object) -> list[ParameterSet]:
    """Return all values for ``pytest.mark.parametrize``, those that are not named as ``quick`` marked as slow."""
    cases = [(value, value if isinstance(value, tuple) else (value,)) for value in values]
    return [pytest.param(*case, marks=[] if value in quick else pytest.mark.slow) for value, case in cases]
