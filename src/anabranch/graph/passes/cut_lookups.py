"""Cuts a graph at its sparse lookups: the looked-up rows are differentiated, never the table.

::

    table ──> detach ──> embedding(sparse=False) ──> rows ──> the rest
                              ids ──┘                  └ a gradient ends here: (ids, d_rows)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import fx

from anabranch.graph.effects import arguments
from anabranch.graph.nodes import made
from anabranch.graph.operation_graph import AnyGraph

__all__ = ["ROWS_OF", "cut_lookups"]

_aten = torch.ops.aten
_BAGS = (_aten._embedding_bag.default, _aten._embedding_bag_forward_only.default)

ROWS_OF = "rows_of"
"""Key in a node's ``meta`` for the input whose rows it reads, at the ids that are its second argument."""


def cut_lookups(graph: AnyGraph, tables: Collection[str] | None = None) -> AnyGraph:
    """``graph`` with each sparse lookup in an input reading rows through which no gradient reaches the table.

    The results are the same bits. The nodes of the rows are marked with ``ROWS_OF``.

    Args:
        graph: a captured graph.
        tables: names of the inputs to cut; all by default.
    """
    graph = graph.copy()
    meant = {
        node: name
        for node, name in zip(graph.placeholders, graph.inputs, strict=True)
        if tables is None or name in tables
    }
    for node in list(graph.fx.nodes):
        if node.target is not _aten.embedding.default and node.target not in _BAGS:
            continue
        named = dict(arguments(node))
        if not named.get("sparse") or named.get("scale_grad_by_freq") or not node.meta.get("recorded", True):
            continue
        if named["weight"] in meant:
            with graph.fx.inserting_before(node):
                table = made(graph.fx, node, _aten.detach.default, named["weight"])
                table.meta["stop"] = True
            cut = _cut_bags if node.target in _BAGS else _cut_rows
            cut(graph.fx, node, named, table).meta[ROWS_OF] = meant[named["weight"]]
    return graph


def _cut_rows(graph: fx.Graph, node: fx.Node, named: Mapping[str, Any], table: fx.Node) -> fx.Node:
    """Return the rows, read by the lookup itself; those of the padding continue without a gradient."""
    node.args, node.kwargs = (table, named["indices"]), {}
    padding = named.get("padding_idx", -1)
    if padding >= 0:
        readers = list(node.users)
        with graph.inserting_before(node.next):
            still = made(graph, node, _aten.detach.default, node)
            still.meta["stop"] = True
            is_padding = made(graph, node, _aten.eq.Scalar, named["indices"], padding)
            column = made(graph, node, _aten.unsqueeze.default, is_padding, -1)
            masked = made(graph, node, _aten.where.self, column, still, node)
        for reader in readers:
            reader.replace_input_with(node, masked)
    return node


def _cut_bags(graph: fx.Graph, node: fx.Node, named: Mapping[str, Any], table: fx.Node) -> fx.Node:
    """Bags of the rows by their positions, made by the same kernel; padding points to a row after the last."""
    ids, padding = named["indices"], named.get("padding_idx", -1)
    form = ids.meta["val"]
    with graph.inserting_before(node):
        rows = table_of_bags = made(graph, node, _aten.embedding.default, table, ids)
        positions = made(graph, node, _aten.arange.default, form.shape[0], dtype=form.dtype, device=form.device)
        if padding >= 0:
            is_padding = made(graph, node, _aten.eq.Scalar, ids, padding)
            padding = form.shape[0]
            positions = made(graph, node, _aten.where.ScalarSelf, is_padding, padding, positions)
            table_of_bags = made(graph, node, _aten.constant_pad_nd.default, rows, [0, 0, 0, 1])
    options = (named.get("mode", 0), False, named.get("per_sample_weights"), named.get("include_last_offset", False))
    node.target, node.kwargs = _aten._embedding_bag.default, {}
    node.args = (table_of_bags, positions, named["offsets"], False, *options, padding)
    return rows
