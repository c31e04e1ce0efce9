"""Covering arrays: few cases that contain every pair of values of two parameters.

They find every fault that depends on the values of one parameter or two, as the full product does, which is left to the
slow tests.
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
    """Return cases for ``pytest.mark.parametrize``, each the one with the most new pairs, the first of equals.

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


def slow_except(values: Iterable[object], *quick: object) -> list[ParameterSet]:
    """Return all values for ``pytest.mark.parametrize``; those not among ``quick`` are marked as slow."""
    cases = [(value, value if isinstance(value, tuple) else (value,)) for value in values]
    return [pytest.param(*case, marks=[] if value in quick else pytest.mark.slow) for value, case in cases]
