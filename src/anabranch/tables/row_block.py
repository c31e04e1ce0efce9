"""``RowBlock``: some rows of a table in the form for a checkpoint or another shard; ``Piece``: those of several tables.

A checkpoint has pieces in files of some megabytes each, as ``files`` lays them out and ``pieces`` reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor

from anabranch.errors import SchemaError
from anabranch.tables.optimizers.row_optimizers import RowOptimizer
from anabranch.tables.table_spec import TableSpec

_FILE = 8 << 20  # bytes of rows

Group = Mapping[str, Tensor] | Callable[[], Mapping[str, Tensor]]
"""Tensors of a checkpoint by name, or what reads them from a file."""


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Some rows of a table in the form for a checkpoint or another shard.

    Attributes:
        ids: int64 ``[rows]``.
        weights: ``[rows, width]``.
        states: ``[rows, count]``, of the count and dtype of ``RowOptimizer.state_form``.
        stamps: int64 ``[rows]``: 1 + the step each row has been brought up to.
        usage: int64 ``[rows, 2]``, the number of steps that used a row and the last one; ``[0, 2]`` where no table of
            the kind has a capacity.
    """

    ids: Tensor
    weights: Tensor
    states: Tensor
    stamps: Tensor
    usage: Tensor

    def check(self, spec: TableSpec, rule: RowOptimizer, step: int) -> None:
        """Raise unless each tensor has the shape and dtype of such a table, and the stamps are of steps up to ``step``.

        Raises:
            SchemaError: names the table and what differs.
        """
        rows = self.ids.numel()
        count, kind = rule.state_form(spec.width, spec.dtype)
        forms = [
            ((rows,), torch.int64),
            ((rows, spec.width), spec.dtype),
            ((rows, count), kind),
            ((rows,), torch.int64),
            ((rows if spec.capacity is not None or len(self.usage) else 0, 2), torch.int64),
        ]
        for label, part, (shape, dtype) in zip(_LABELS, self.tensors(), forms, strict=False):
            if tuple(part.shape) != shape or part.dtype != dtype:
                raise SchemaError(
                    f"table {spec.name}: {label} of {shape} {dtype} expected, got {tuple(part.shape)} {part.dtype}"
                )
        if rows and not (self.stamps.min() >= 0 and self.stamps.max() <= step + 1):
            raise SchemaError(f"table {spec.name}: stamps of 0 to {step + 1} expected after {step} steps")

    def tensors(self) -> list[Tensor]:
        """Return its tensors, in their order."""
        return [getattr(self, field.name) for field in fields(self)]


class Piece(NamedTuple):
    """Some rows of tables of one kind, by table: ``counts[k]`` rows of the table at place ``tables[k]``."""

    tables: list[int]
    counts: list[int]
    rows: RowBlock

    def split(self) -> Iterator[tuple[int, RowBlock]]:
        """Yield the place of each table, and its rows."""
        last = 0
        for table, some in zip(self.tables, self.counts, strict=True):
            first, last = last, last + some
            yield table, RowBlock(*(part[first:last] for part in self.rows.tensors()))


def files(some: Iterable[Piece]) -> Iterator[dict[str, Tensor]]:
    """Yield pieces as the tensors of one file after the other, in one dictionary that is filled again."""
    tensors: dict[str, Tensor] = {}
    size = number = 0
    for piece in some:
        parts = piece.rows.tensors()
        owners = torch.tensor([piece.tables, piece.counts], device="cpu")
        tensors |= {f"{number}.{label}": part for label, part in zip(_LABELS, [*parts, owners], strict=True)}
        number, size = number + 1, size + sum(part.nbytes for part in parts)
        if size >= _FILE:
            yield tensors
            tensors.clear()  # before the next are made
            size = number = 0
    if tensors:
        yield tensors


def pieces(tensors: Mapping[str, Tensor]) -> Iterator[Piece]:
    """Yield the pieces in the tensors of a file."""
    for number in count():
        if f"{number}.ids" not in tensors:
            return
        *parts, owners = (tensors[f"{number}.{label}"] for label in _LABELS)
        tables, counts = owners.tolist()
        yield Piece(tables, counts, RowBlock(*parts))


def rows_of(groups: Mapping[str, Group], tables: Container[int]) -> Iterator[tuple[int, RowBlock]]:
    """Yield the rows of the tables at these places in a checkpoint."""
    for name, group in groups.items():
        for piece in pieces(read(group)) if name.startswith("rows-") else ():
            for k, block in piece.split():
                if k in tables:
                    yield k, block


def parts_of(groups: Mapping[str, Group], name: str) -> list[Tensor]:
    """Return the tensors of a group whose names are their numbers; none of a group that is not there."""
    tensors = read(groups[name]) if name in groups else {}
    return [tensors[str(k)] for k in range(len(tensors))]


def read(group: Group) -> Mapping[str, Tensor]:
    """Return the tensors of a group."""
    return group() if callable(group) else group


_LABELS = [*(field.name for field in fields(RowBlock)), "tables"]
