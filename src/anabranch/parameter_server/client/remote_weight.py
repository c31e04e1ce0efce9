"""Lookups in a table on the servers, in place of ``F.embedding`` and ``F.embedding_bag`` on a ``MovedParameter``.

A model runs unchanged: from any caller, both find the table's placeholder among their arguments and return pulled
rows::

    ids ──unique──> distinct ids ──pull──> rows [distinct, width] ──F.embedding(inverse, rows)──> output
                          └──────────────── push (ids, gradient of rows) <── backward, duplicates merged by torch

The lookup itself is torch's, on the few pulled rows, so modes, ``padding_idx``, per-sample weights and the order in
which duplicates are added up are torch's too. All of it is behind one boundary, because the number of rows depends on
the ids: the tape, or a captured graph, sees ids that go in and an output whose shape follows from theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from anabranch.autodiff.boundary.crossing import Crossed, Form, RecordedBoundary, cross
from anabranch.autodiff.boundary.whole_calls import WholeCall
from anabranch.autodiff.moved_parameter import MovedParameter
from anabranch.errors import NotFound, SchemaError
from anabranch.tables.kernels import vocabulary
from anabranch.tables.table_spec import TableSpec


class WeightSource(Protocol):
    """The source of a table's rows, which also takes their gradients."""

    name: str

    def distinct(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Each of ``ids`` once, ascending, and the index of each among them; on their device."""

    def read(self, ids: Tensor) -> Tensor:
        """Return the rows of distinct ids, on the CPU."""

    def take_gradient(self, ids: Tensor, grads: Tensor) -> None:
        """Take the gradients of the rows of distinct ids."""


def look_up(
    source: Callable[[], WeightSource],
    table: TableSpec,
    trained: bool,
    padding_id: int | None,
    ids: Tensor,
    offsets: Tensor | None = None,
    per_sample_weights: Tensor | None = None,
    scale_grad_by_freq: bool = False,
    mode: str | None = None,
    include_last_offset: bool = False,
) -> Tensor:
    """Return the row of each of ``ids``, or with a ``mode`` one row a bag, as ``F.embedding_bag`` reduces them.

    In grad mode the rows' gradients go to the source, if the table is ``trained``; the padding row's do not.
    """
    if ids.dtype not in (torch.int64, torch.int32):  # as torch.nn.functional.embedding takes them
        raise SchemaError(f"table {table.name}: ids are int64 or int32, got {ids.dtype}; convert them with ids.long()")
    recorded = trained or (per_sample_weights is not None and per_sample_weights.requires_grad)
    with nullcontext() if recorded else torch.no_grad():
        if mode is None:
            return cross(_Rows(source, table, padding_id, scale_grad_by_freq), ids)[0]
        options = {
            "mode": mode, "scale_grad_by_freq": scale_grad_by_freq, "include_last_offset": include_last_offset
        }  # fmt: skip
        boundary = _bags(source, table, padding_id, trained, options)
        return cross(boundary, ids, offsets, per_sample_weights)[0]


@dataclass(frozen=True, slots=True)
class _Rows:
    """The boundary of a lookup of rows; bags, whose backward is more complex, are recorded by torch's own tape."""

    source: Callable[[], WeightSource]
    table: TableSpec
    padding_id: int | None
    scale_grad_by_freq: bool

    kind = "table"

    @property
    def name(self) -> str:
        return self.table.name

    def forms(self, inputs: Sequence[Tensor | None]) -> list[Form]:
        (ids,) = inputs
        assert ids is not None
        return [Form((*ids.shape, self.table.width), self.table.dtype, ids.device)]

    def forward(self, inputs: Sequence[Tensor | None], wants: Sequence[bool] | None) -> Crossed:
        (ids,) = inputs
        assert ids is not None
        source = self.source()
        rows, inverse, ids_once, padding_at = _read_distinct(source, self.table, ids, self.padding_id)
        with torch.no_grad():
            looked_up = F.embedding(inverse, rows)
        return Crossed([looked_up], None if wants is None else (source, inverse, ids_once, padding_at))

    def backward(
        self, state: object, inputs: Sequence[Tensor | None], gradients: Sequence[Tensor | None], *, updates: bool
    ) -> list[Tensor | None]:
        (gradient,) = gradients
        if gradient is not None and updates:
            source, inverse, ids_once, padding_at = cast("tuple[WeightSource, Tensor, Tensor, int | None]", state)
            padding = -1 if padding_at is None else padding_at
            merged = _merge(gradient, inverse, len(ids_once), padding, self.scale_grad_by_freq)
            source.take_gradient(*_without(ids_once, merged, padding_at))
        return [None]


_merge = torch.ops.aten.embedding_dense_backward.default
"""Torch's gradient for a dense table: the gradients of one row are added in the order of its lookups."""


def _bags(
    source: Callable[[], WeightSource],
    table: TableSpec,
    padding_id: int | None,
    trained: bool,
    options: Mapping[str, Any],
) -> RecordedBoundary:
    def crossing(
        entry: Tensor | None, ids: Tensor, offsets: Tensor | None, per_sample_weights: Tensor | None
    ) -> list[Tensor]:
        rows, inverse, padding_at = _distinct_rows(source(), table, ids, padding_id, entry if trained else None)
        # torch's kernels accept no bags of an empty table, and round differently if a table has a padding row.
        if not len(rows) or (padding_id is not None and padding_at is None):
            padding_at = len(rows) if padding_id is not None else None
            rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
        return [
            F.embedding_bag(
                inverse, rows, offsets, per_sample_weights=per_sample_weights, padding_idx=padding_at, **options
            )
        ]

    def forms(inputs: Sequence[Tensor | None]) -> list[Form]:
        ids, offsets, _ = inputs
        assert ids is not None
        count = ids.shape[0] if offsets is None else offsets.shape[0] - options["include_last_offset"]
        return [Form((count, table.width), table.dtype, ids.device)]

    return RecordedBoundary("table", table.name, crossing, forms)


def _distinct_rows(
    source: WeightSource, table: TableSpec, ids: Tensor, padding_id: int | None, entry: Tensor | None
) -> tuple[Tensor, Tensor, int | None]:
    """Return the rows of the distinct ids, the index of each of ``ids`` among them, and that of ``padding_id``."""
    rows, inverse, ids_once, padding_at = _read_distinct(source, table, ids, padding_id)
    if entry is not None:

        def leave(grad: Tensor) -> None:
            source.take_gradient(*_without(ids_once, grad, padding_at))

        rows = cast(Tensor, _PulledRows.apply(entry, rows, leave))  # type: ignore[no-untyped-call]
    return rows, inverse, padding_at


def _read_distinct(
    source: WeightSource, table: TableSpec, ids: Tensor, padding_id: int | None
) -> tuple[Tensor, Tensor, Tensor, int | None]:
    """Return the rows of the distinct ids, the index of each of ``ids`` among them, those ids, and that of padding."""
    distinct, inverse = source.distinct(ids)
    ids_once = distinct.cpu()
    try:
        rows = source.read(ids_once).to(ids.device)
    except NotFound as error:  # which says where among the distinct ones
        limit = table.rows or 0  # none: of any id
        outside = torch.nonzero((ids < 0) | (ids >= limit)).tolist() if limit else []
        if not outside:
            raise
        at, value = outside[0], ids[tuple(outside[0])].item()
        raise NotFound(f"table {table.name} has ids 0 to {limit - 1}; ids{at} is {value}") from error
    if padding_id is None:
        return rows, inverse, ids_once, None
    at = torch.nonzero(ids_once == padding_id)[:, 0]
    return rows, inverse, ids_once, int(at[0]) if len(at) else None


def _without(ids: Tensor, grads: Tensor, padding_at: int | None) -> tuple[Tensor, Tensor]:
    """Both on the CPU, without the padding row, which gets no gradient."""
    grads = grads.detach().cpu()
    if padding_at is None:
        return ids, grads
    others = torch.arange(len(ids), device="cpu") != padding_at
    return ids[others], grads[others]


class _PulledRows(torch.autograd.Function):
    """Pulled rows: the identity in forward; backward passes on their gradient, with duplicates already merged."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, rows: Tensor, leave: Callable[[Tensor], None]) -> Tensor:
        ctx.leave = leave
        ctx.set_materialize_grads(False)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None, None]:
        (grad,) = grads
        if grad is not None:
            ctx.leave(grad)
        return None, None, None


class RemoteLookups:
    """``F.embedding`` and ``F.embedding_bag`` on a ``MovedParameter`` whose rows ``source`` reads."""

    def __init__(self, source: WeightSource, table: TableSpec) -> None:
        self.source, self.name, self._table, self._count = source, table.name, table, table.rows or 0
        self._whole_call = WholeCall(self)

    def rows(
        self,
        input: Tensor,  # noqa: A002 - the names are those of torch.nn.functional
        weight: MovedParameter,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> Tensor:
        return self._whole(max_norm, weight, padding_idx, input, None, None, scale_grad_by_freq)

    def bags(
        self,
        input: Tensor,  # noqa: A002
        weight: MovedParameter,
        offsets: Tensor | None = None,
        max_norm: float | None = None,
        norm_type: float = 2,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = False,
        per_sample_weights: Tensor | None = None,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
    ) -> Tensor:
        options = (scale_grad_by_freq, mode, include_last_offset)
        return self._whole(max_norm, weight, padding_idx, input, offsets, per_sample_weights, *options)

    def _whole(self, max_norm: float | None, weight: MovedParameter, padding_id: int | None, *options: Any) -> Tensor:
        """Return the lookup; where Dynamo reads the code, as one call, of which the weight is no argument."""
        if max_norm is not None:
            raise ValueError(
                f"table {self.name}: max_norm={max_norm} shrinks rows in place whenever they are looked up, which the "
                "servers' copy would not see; leave it None"
            )
        if padding_id is not None and padding_id < 0:
            padding_id += self._count
        args = (weight.requires_grad and not weight.detached, padding_id, *options)
        if torch.compiler.is_dynamo_compiling():
            return self._whole_call(*args)[0]
        return self.call_whole(*args)[0]

    def call_whole(self, *lookup: Any) -> list[Tensor]:
        """Return the rows, or with a ``mode`` the bags; constants if the table is not trained."""
        return [look_up(lambda: self.source, self._table, *lookup)]


# --- distinct ids -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Distinct:
    """The distinct ids of one table's lookups.

    Attributes:
        flat: all ids; a copy, because the caller's tensor may change.
        ids: the valid ones, each once, ascending.
        inverse: the index in ``ids`` of each of ``flat``; ``None`` if some are outside the table.
    """

    flat: Tensor
    ids: Tensor
    inverse: Tensor | None

    def is_of(self, ids: Tensor) -> bool:
        """Return True if ``ids`` equal these, whatever their shape, dtype and device."""
        return ids.numel() == len(self.flat) and torch.equal(self.flat, ids.detach().cpu().long().reshape(-1))

    def of(self, ids: Tensor) -> Tensor | None:
        """``inverse`` in the form of ``ids``, if they are these ids."""
        return None if self.inverse is None or not self.is_of(ids) else self.inverse.view(ids.shape)


def distinct_ids(ids: Mapping[str, Tensor], rows: Mapping[str, int]) -> dict[str, Distinct]:
    """Return the distinct ids of each table, without those outside it.

    >>> users = distinct_ids({"users": torch.tensor([[7, 3], [7, 7]])}, {"users": 10})["users"]
    >>> users.ids, users.of(torch.tensor([[7, 3], [7, 7]]))
    (tensor([3, 7]), tensor([[1, 0],
            [1, 1]]))

    Args:
        ids: by table, of any shape.
        rows: the number of rows of each table.
    """
    flat, counts, limits = list[Tensor](), list[int](), list[int]()
    for name, some in ids.items():
        flat.append(some.detach().cpu().long().reshape(-1))
        counts.append(some.numel())
        limits.append(rows[name])
    if not flat:
        return {}
    starts = np.concatenate([[0], np.cumsum(counts)])
    together = torch.cat(flat)
    out, out_starts = torch.empty_like(together), np.zeros_like(starts)
    inverse, whole = torch.empty_like(together), np.empty(len(flat), np.bool_)
    vocabulary.distinct_all(together.numpy(), starts, np.array(limits), out.numpy(), out_starts, inverse.numpy(), whole)
    each = torch.split(out[: out_starts[-1]], np.diff(out_starts).tolist())
    parts = zip(ids, torch.split(together, counts), each, torch.split(inverse, counts), whole.tolist(), strict=True)
    distinct = {}
    for name, own, each_once, index, all_of in parts:
        distinct[name] = Distinct(own, each_once, index if all_of else None)
    return distinct


def unique_of(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Each of ``ids`` once, ascending, and the index of each among them."""
    distinct, inverse = torch.unique(ids.long(), return_inverse=True)
    return distinct, inverse
