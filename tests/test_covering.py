"""The cases that stand for a product of parameters."""

from __future__ import annotations

import itertools

from covering import pairwise


def test_every_pair_of_values_occurs_and_the_rest_of_the_product_is_slow() -> None:
    values = ("abc", range(4), [None, 1.5])
    cases = pairwise(*values)
    quick = [case.values for case in cases if not case.marks]
    for one, other in itertools.combinations(range(3), 2):
        found = {(case[one], case[other]) for case in quick}
        assert found == set(itertools.product(values[one], values[other]))
    assert 12 <= len(quick) <= 14
    assert sorted(map(str, (case.values for case in cases))) == sorted(map(str, itertools.product(*values)))
