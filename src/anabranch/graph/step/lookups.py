"""Sparse lookups cut at the looked-up rows: the gradient of a table stays ``(ids, rows)`` and is never dense.

While a step is traced, ``embedding`` and ``embedding_bag`` with ``sparse=True`` read the table without recording it::

    table --(1)--> rows ----> the rest of the forward ----> loss
                     ^                                        |
                     +-------------- d_rows <-----------------+      (1) is not differentiated

The graph returns ids and ``d_rows``; the optimizer gets them as the sparse tensor that eager autograd would create.
``gradients``, which replays a graph's operations, cuts its lookups in the same way.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from anabranch.errors import CaptureError
from anabranch.graph.effects import arguments

_aten = torch.ops.aten
_ROWS = _aten.embedding.default
_BAGS = (_aten._embedding_bag.default, _aten._embedding_bag_forward_only.default)


@dataclass(frozen=True, slots=True)
class SparseRows:
    """The gradient of a table: the rows' ids, duplicates included, and a gradient per row.

    Attributes:
        ids: int tensor of any shape.
        rows: ``(*ids.shape, dim)``, aligned with ``ids``.
        padding_idx: the id whose row gets no gradient, ``-1`` for none.
    """

    ids: Tensor
    rows: Tensor
    padding_idx: int = -1

    def pairs(self) -> tuple[Tensor, Tensor]:
        """Flat ids and their rows, without padding; contiguous, as in ``.grad``."""
        ids, rows = self.ids.reshape(-1).contiguous(), self.rows.reshape(-1, self.rows.shape[-1]).contiguous()
        if self.padding_idx == -1:
            return ids, rows
        kept = ids != self.padding_idx
        return ids[kept], rows[kept]


def as_sparse_gradient(lookups: Sequence[SparseRows], table: Tensor) -> Tensor:
    """Return eager autograd's sparse gradient of ``table`` for these lookups, including the order of its sum."""

    def one(lookup: SparseRows) -> Tensor:
        ids, rows = lookup.pairs()
        return torch.sparse_coo_tensor(ids[None], rows, table.shape, check_invariants=False, device=rows.device)

    *earlier, last = lookups
    return reduce(lambda total, lookup: one(lookup) + total, reversed(earlier), one(last))


@dataclass(frozen=True, slots=True)
class Lookup:
    """One traced lookup: the table's name, the ids, and the leaf whose gradient the rows' gradient is."""

    table: str
    ids: Tensor
    leaf: Tensor
    padding_idx: int


class SparseLookups:
    """An interceptor that cuts the sparse lookups in ``tables`` (names by the traced tensor's id) and lists them."""

    def __init__(self) -> None:
        self.tables: dict[int, str] = {}
        self.found: list[Lookup] = []

    def __call__(self, func: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Replace a sparse lookup in a known table; leaves every other function alone."""
        if func not in _SIGNATURES or not torch.is_grad_enabled():
            return NotImplemented
        call = _SIGNATURES[func].bind(*args, **kwargs)
        call.apply_defaults()
        named = call.arguments
        weight = named["weight"]
        if not named["sparse"] or not weight.requires_grad or id(weight) not in self.tables:
            return NotImplemented
        if named["max_norm"] is not None:
            with torch.no_grad():
                torch.embedding_renorm_(weight, named["input"].reshape(-1), named["max_norm"], named["norm_type"])
        return self._rows(named) if func is F.embedding else self._bags(named)

    def of_node(self, node: fx.Node, look: Callable[[fx.Node], object]) -> object:
        """Return the result of a node that looks up one of the tables sparsely; ``NotImplemented`` for any other."""
        if node.target is not _ROWS and node.target not in _BAGS:
            return NotImplemented
        named: dict[str, Any] = {
            name: look(value) if isinstance(value, fx.Node) else value for name, value in arguments(node)
        }
        if named.get("scale_grad_by_freq"):
            return NotImplemented
        padding = named.get("padding_idx", -1)
        options = {"padding_idx": padding if padding >= 0 else None, "sparse": named.get("sparse", False)}
        if node.target is _ROWS:
            return self(F.embedding, (named["indices"], named["weight"]), options)
        options |= {name: named[name] for name in ("per_sample_weights", "include_last_offset") if name in named}
        options["mode"] = ("sum", "mean", "max")[named.get("mode", 0)]
        bags = self(F.embedding_bag, (named["indices"], named["weight"], named["offsets"]), options)
        return bags if bags is NotImplemented else (bags, None, None, None)

    def _padding(self, named: Mapping[str, object]) -> int:
        padding, weight = named["padding_idx"], named["weight"]
        assert isinstance(weight, Tensor)
        if not isinstance(padding, int):
            return -1
        return padding if padding >= 0 else padding + weight.shape[0]

    def _rows(self, named: Mapping[str, Tensor]) -> Tensor:
        padding = self._padding(named)
        rows = torch.embedding(named["weight"].detach(), named["input"], padding)
        rows.requires_grad_()
        self.found.append(Lookup(self.tables[id(named["weight"])], named["input"], rows, padding))
        return rows

    def _bags(self, named: Mapping[str, object]) -> Tensor:
        weight, ids, offsets = named["weight"], named["input"], named["offsets"]
        scale, mode, last = named["per_sample_weights"], named["mode"], bool(named["include_last_offset"])
        assert isinstance(weight, Tensor)
        assert isinstance(ids, Tensor)
        if mode == "max" or (isinstance(scale, Tensor) and scale.requires_grad):
            raise CaptureError(
                "a sparse embedding_bag can be captured only with mode 'sum' or 'mean' and weights "
                "that need no gradient; use engine='tape'"
            )
        if ids.ndim == 2:
            width = ids.shape[1]
            offsets = torch.arange(0, ids.numel(), max(width, 1), device=ids.device, dtype=ids.dtype)
            ids, scale, last = ids.reshape(-1), scale.reshape(-1) if isinstance(scale, Tensor) else None, False
        assert isinstance(offsets, Tensor)
        leaf = torch.empty(*ids.shape, weight.shape[1], dtype=weight.dtype, device=weight.device, requires_grad=True)
        padding = self._padding(named)
        self.found.append(Lookup(self.tables[id(weight)], ids, leaf, padding))
        result = _Bags.apply(  # type: ignore[no-untyped-call]
            leaf, weight.detach(), ids, offsets, mode == "mean", scale, last, padding
        )
        assert isinstance(result, Tensor)
        return result


_SIGNATURES = {function: inspect.signature(function) for function in (F.embedding, F.embedding_bag)}


class _Bags(torch.autograd.Function):
    """``embedding_bag`` whose backward yields the gradient of each looked-up row, to a leaf that stands for them."""

    @staticmethod
    def forward(ctx, leaf, weight, ids, offsets, mean, scale, last, padding):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(ids, offsets, *(() if scale is None else (scale,)))
        ctx.facts = (mean, last, padding)
        skipped = padding if padding >= 0 else None
        return torch.embedding_bag(weight, ids, offsets, False, int(mean), True, scale, last, skipped)[0]

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        ids, offsets, *scale = ctx.saved_tensors
        mean, last, padding = ctx.facts
        starts = offsets[:-1] if last else offsets
        positions = torch.arange(ids.numel(), device=ids.device, dtype=offsets.dtype)
        bags = torch.searchsorted(starts, positions, right=True) - 1
        rows = grad.index_select(0, bags)
        if mean:
            counted = torch.ones_like(ids) if padding < 0 else (ids != padding).to(ids.dtype)
            sizes = torch.zeros(starts.shape, dtype=ids.dtype, device=ids.device).index_add_(0, bags, counted)
            rows *= (1 / sizes.to(grad.dtype)).unsqueeze(1).index_select(0, bags)
        for weights in scale:
            rows *= weights.unsqueeze(1)
        return rows, None, None, None, None, None, None, None
