"""Where ids go, of all tables at once and of each by itself."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_kernels import owners as owners_of

from anabranch.errors import NotFound
from anabranch.parameter_server.client.row_messages import Layout, Routed
from anabranch.tables.table_spec import Placement


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
    layout = Layout({f"t{number}": (placement, torch.float32, 2) for number, placement in enumerate(each)})
    parts = [torch.from_numpy(ids[first:last]) for first, last in itertools.pairwise(starts)]
    outside = [
        limit is not None and not all(0 <= one < limit for one in part.tolist())
        for (limit, _), part in zip(tables, parts, strict=True)
    ]
    if any(outside):
        with pytest.raises(NotFound, match=f"table t{outside.index(True)} has ids 0 to"):
            Routed(layout, parts, shards)
        return
    routed = Routed(layout, parts, shards)
    for placement, first, last in zip(each, starts, starts[1:], strict=False):
        assert (routed.owners[first:last] == owners_of(placement, ids[first:last])).all()
    assert (routed.owners < shards).all()
    kinds = draw.integers(count, size=ids.size)
    routed.arrange(kinds, count)
    found, order, counts = routed.owners, routed.order, routed.counts
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
