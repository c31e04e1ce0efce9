"""Where ids go, of all tables at once and of each by itself."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.parameter_server.client.routing import Placements, arrange, owners_of
from anabranch.tables.shard_placement import Placement


@settings(deadline=None, max_examples=80)
@given(
    st.lists(st.tuples(st.sampled_from([None, 1, 2, 100, 10**7, 2**40]), st.integers(0, 60)), min_size=1, max_size=5),
    st.integers(1, 5),
    st.integers(1, 3),
    st.booleans(),
    st.integers(0, 1000),
)
def test_all_tables_at_once_are_each_by_itself(
    tables: list[tuple[int | None, int]], shards: int, count: int, astray: bool, seed: int
) -> None:
    draw = np.random.default_rng(seed)
    each = [Placement(rows, shards, int(draw.integers(1 << 60))) for rows, _ in tables]
    ids = np.concatenate([draw.integers(*((0, rows) if rows else (-(2**63), 2**63 - 1)), size=n) for rows, n in tables])
    starts = np.append(0, np.cumsum([n for _, n in tables]))
    if astray and ids.size:
        ids[draw.integers(ids.size)] = draw.choice([-1, 2**62])
    placed = Placements.of(each)
    found, bad = owners_of(ids, starts, placed, shards)
    if bad >= 0:
        table = int(np.searchsorted(starts, bad, "right")) - 1
        limit = tables[table][0]
        assert limit is not None
        assert not 0 <= ids[bad] < limit
        return
    for placement, first, last in zip(each, starts, starts[1:], strict=False):
        assert (found[first:last] == placement.owners(ids[first:last])).all()
    assert (found < shards).all()
    kinds = draw.integers(count, size=ids.size)
    order, counts = arrange(found, kinds, starts, shards, count)
    at = 0
    for shard in range(shards):
        for table in range(len(tables)):
            for kind in range(count):
                mine = np.arange(starts[table], starts[table + 1])
                mine = mine[(found[mine] == shard) & (kinds[mine] == kind)]
                assert counts[shard, table, kind] == mine.size
                assert (order[at : at + mine.size] == mine).all()
                at += mine.size
    assert at == ids.size
