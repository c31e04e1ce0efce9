"""A batch may be any object, with other contents at each step."""

from __future__ import annotations

import pytest
from change_batches import BATCHES

from plain_loop import check, mark_others_slow

QUICK = {
    "own_kept_and_changed",
    "dataclass_unequal_kept_and_changed",
    "user_dict_number",
    "none_leaf",
    "text_leaf",
    "dict_number_every_step",
    "named_tuple_number",
}


@pytest.mark.parametrize("name", mark_others_slow(BATCHES, QUICK))
@pytest.mark.parametrize("engine", ["tape", "graph"])
def test_the_contents_of_a_batch_change(engine: str, name: str) -> None:
    check(BATCHES[name], engine)
