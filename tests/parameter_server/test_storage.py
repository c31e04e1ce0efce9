"""Tables in files: the same rows as in memory."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from saved_rows import blocks

from anabranch.tables import RowOptimizer, RowWiseAdagrad, Table, TableSpec

RULES = {
    "adam": functools.partial(torch.optim.Adam, lr=0.01),
    "row-wise": functools.partial(RowWiseAdagrad, lr=0.1),
    "momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize(
    ("rows", "width", "dtype"),
    [(30_000, 8, torch.float32), (None, 8, torch.float32), (None, 5, torch.float16)],
    ids=str,
)
@pytest.mark.parametrize("name", RULES)
def test_a_table_in_a_file_is_the_table_in_memory(
    name: str, rows: int | None, width: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    rule = RowOptimizer.from_factory(RULES[name])
    capacity = None if rows else 2000
    make = functools.partial(TableSpec, "t", rows, width, dtype, every_row_moves=rows is not None, capacity=capacity)
    memory = Table(make(), rule)
    file = Table(make(memory_map=True), rule, scratch=tmp_path)
    for _ in range(6):
        ids, grads = torch.randint(0, 30_000, (900,)), torch.randn(900, width).to(dtype)
        for table in (memory, file):
            table.push(ids, grads)
        assert torch.equal(file.pull(ids.flip(0), training=True), memory.pull(ids.flip(0), training=True))
        assert torch.equal(file.versions(ids), memory.versions(ids))
    for mine, theirs in zip(blocks(file, 5000), blocks(memory, 5000), strict=True):
        assert torch.equal(mine.ids, theirs.ids)
        assert torch.equal(mine.weights, theirs.weights)
        assert torch.equal(mine.states, theirs.states)
    assert list(tmp_path.iterdir()) == []  # the file has no name
