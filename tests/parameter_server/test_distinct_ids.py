"""A batch's distinct ids of all tables at once against ``torch.unique`` of each."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.parameter_server.client.remote_weight import distinct_ids


@settings(deadline=None, max_examples=30)
@given(
    st.lists(
        st.tuples(st.sampled_from([1, 2, 100, 5000, 10**7, 2**40]), st.integers(0, 60), st.booleans()), max_size=5
    ),
    st.integers(0, 1000),
)
def test_all_tables_at_once_are_each_by_itself(tables: list[tuple[int, int, bool]], seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    wanted = {}
    for number, (rows, count, astray) in enumerate(tables):
        ids = (torch.rand(count, generator=draw, dtype=torch.float64) ** 3 * rows).long()
        if astray:
            ids[: count // 5] = torch.tensor([-1, rows, 2**62])[: count // 5].repeat(count)[: count // 5]
        wanted[str(number)] = ids.int() if rows < 2**31 and not astray else ids
    rows = {name: tables[int(name)][0] for name in wanted}
    distinct = distinct_ids(wanted, rows)
    assert distinct.keys() == wanted.keys()
    for name, ids in wanted.items():
        inside = (ids >= 0) & (ids < rows[name])
        assert torch.equal(distinct[name].ids, torch.unique(ids[inside].long()))
        places = distinct[name].of(ids)
        assert (places is None) == (not inside.all())
        if places is not None:
            assert torch.equal(distinct[name].ids[places], ids.long())


def test_places_are_those_of_the_ids_as_they_were() -> None:
    ids = torch.tensor([[3, 1], [1, 0]])
    found = distinct_ids({"a": ids}, {"a": 4})["a"]
    assert found.of(torch.tensor([3, 1, 1, 0])) is not None
    assert found.of(torch.tensor([3, 1, 1, 1])) is None
    assert found.of(torch.tensor([3, 1])) is None
    ids -= 1
    assert found.of(ids) is None
