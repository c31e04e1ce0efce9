"""The covering arrays that tests take their cases from leave out no pair."""

from __future__ import annotations

from itertools import combinations, product

from pairwise import each_once, pairwise

FACTORS = ["abc", (True, False), range(4), (None, 1)]


def test_every_pair_of_values_meets_in_far_fewer_cases_than_the_product() -> None:
    cases = pairwise(*FACTORS)
    for one, other in combinations(range(len(FACTORS)), 2):
        assert {(case[one], case[other]) for case in cases} == set(product(FACTORS[one], FACTORS[other]))
    assert len(cases) <= 16 < 48


def test_every_value_stands_in_a_case() -> None:
    cases = each_once(*FACTORS)
    assert len(cases) == 4
    assert all({case[at] for case in cases} == set(factor) for at, factor in enumerate(FACTORS))
