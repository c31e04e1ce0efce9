"""A number that the loss reads may be held in any way Python knows, and change between two steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from change_holders import HOLDERS

from plain_loop import TrainingCase, check, mark_others_slow, reading, reading_inside

QUICK = {
    "user_dict",
    "chain_map",
    "mapping_proxy",
    "context_variable",
    "weak_reference",
    "object_in_a_list_of_a_hundred",
    "dict_six_deep",
    "dict_of_20000",
    "normal_replaced_loc",
    "environment",
    "swapped_code",
    "function_of_exec",
    "counter_in_closure",
    "teacher_layer_replaced",
    "generator_state",
    "compiling_branch_after_the_change",
    "nonstrict_function",
    "zero_becomes_minus_zero",
}
PLACES = {"loss": reading, "forward": reading_inside}


def play_of(name: str, place: str) -> Callable[[pytest.MonkeyPatch], TrainingCase]:
    def build(patch: pytest.MonkeyPatch) -> TrainingCase:
        read, change = HOLDERS[name](patch)
        return PLACES[place](read, change)

    return build


@pytest.mark.parametrize("place", mark_others_slow(PLACES, ["loss"]))
@pytest.mark.parametrize("name", mark_others_slow(HOLDERS, QUICK))
@pytest.mark.parametrize("engine", ["tape", "graph"])
def test_a_number_changes_where_it_is_held(engine: str, name: str, place: str) -> None:
    check(play_of(name, place), engine)
