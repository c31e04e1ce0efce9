"""Training idioms are bitwise equal to the plain loop on every engine."""

from __future__ import annotations

import pytest
from idiom_cases import IDIOMS

from plain_loop import check, mark_others_slow

QUICK = {
    "bags_with_weights",
    "generator_of_its_own",
    "own_function_that_counts",
    "gradient_noise",
    "one_batch_object_refilled",
    "averages_swapped_in_to_evaluate",
    "tensor_learning_rate_changed_in_place",
    "batch_that_is_a_parameter",
}


@pytest.mark.parametrize("name", mark_others_slow(IDIOMS, QUICK))
@pytest.mark.parametrize("engine", ["tape", "graph"])
def test_an_idiom_is_the_plain_loops(engine: str, name: str) -> None:
    got = check(IDIOMS[name], engine)
    assert "Exception:" not in got.refusal
