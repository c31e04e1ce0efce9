"""Rewriting graphs: functions from a graph to an equivalent graph; ``lower`` applies those before code generation."""

from __future__ import annotations

import operator
from collections.abc import Collection
from functools import cache

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._prims_common import is_contiguous_or_false

from anabranch.graph.effects import Effects
from anabranch.graph.nodes import copy_node, made, same_layout
from anabranch.graph.operation_graph import AnyGraph, Input, OperationGraph

# Nodes without an effect: unused results, copies of handles, writes into memory that is never read again.


_aten = torch.ops.aten
_HANDLES = {_aten.detach.default, _aten.alias.default, _aten.lift_fresh.default}


def drop_handles(graph: AnyGraph, *, stops: bool = False) -> AnyGraph:
    """``graph`` without nodes that only make another handle of the same values.

    These are ``detach`` and ``alias``, two transpositions in a row, and a ``view`` to the present shape. A ``detach``
    in the user's code stays, because ``gradients`` must stop at it, unless ``stops``
    drops it too.
    """
    graph = graph.copy()
    for node in list(graph.fx.nodes):
        if node.meta.get("stop") and not stops:
            continue
        same = _same_values(node)
        if same is not None:
            node.replace_all_uses_with(same)
            graph.fx.erase_node(node)
    return graph


def _same_values(node: fx.Node) -> fx.Node | None:
    if node.target in _HANDLES:
        return node.args[0]  # type: ignore[return-value]
    if node.target is _aten.t.default:
        inner = node.args[0]
        assert isinstance(inner, fx.Node)
        if inner.target is _aten.t.default:
            return inner.args[0]  # type: ignore[return-value]
    if node.target is _aten.view.default:
        _skip_inner_view(node)
    if node.target is _aten.view.default or node.target is _aten.expand.default:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        before, after = source.meta.get("val"), node.meta.get("val")
        if isinstance(before, Tensor) and isinstance(after, Tensor) and same_layout(before, after):
            return source
    return None


def _skip_inner_view(node: fx.Node) -> None:
    """Replace a view of a view of contiguous memory by one view."""
    inner = node.args[0]
    assert isinstance(inner, fx.Node)
    if inner.target is not _aten.view.default:
        return
    source = inner.args[0]
    assert isinstance(source, fx.Node)
    example = source.meta.get("val")
    if isinstance(example, Tensor) and is_contiguous_or_false(example):
        node.replace_input_with(inner, source)


def drop_dead_nodes(graph: AnyGraph) -> AnyGraph:
    """``graph`` without the nodes whose results reach no output, no state and no random number generator.

    A write in place is alive if its memory is state, or is read later by a live node.
    """
    graph = graph.copy()
    effects = graph.effects()
    live_memory = {effects.root[node] for node in graph.fx.nodes if node.op == "placeholder"}
    for node in reversed(list(graph.fx.nodes)):
        written = effects.written_by(node)
        if node.users or effects.must_stay(node) or any(effects.root[w] in live_memory for w in written):
            live_memory.update(effects.root[read] for read in node.all_input_nodes)
        elif node.op == "call_function":
            graph.fx.erase_node(node)
    return graph


# Two graphs as one: an output of the first feeds the input of the second that has the same name.


def join(first: AnyGraph, second: AnyGraph, keep: Collection[str]) -> AnyGraph:
    """``first`` followed by ``second``, as one graph.

    An input of ``second`` is fed by the output of ``first`` of the same name, or shares an input of ``first`` that is
    bound to the same tensor or, if free, has the same name.

    Args:
        first: the graph whose operations run first.
        second: the graph that takes its results.
        keep: names of outputs of ``first`` that the joint graph still returns, before those of ``second``.
    """
    joint = fx.Graph()
    inputs: list[Input] = []
    mapping: dict[fx.Node, fx.Node] = {}
    by_tensor: dict[int, fx.Node] = {}
    by_name: dict[str, fx.Node] = {}

    def place(node: fx.Node, binding: Input) -> fx.Node:
        placed = joint.node_copy(node, mapping.__getitem__)
        inputs.append(binding)
        if binding.bound is not None:
            by_tensor[id(binding.bound)] = placed
        else:
            by_name[binding.name] = placed
        return placed

    for node, binding in zip(first.placeholders, first.bindings, strict=True):
        mapping[node] = place(node, binding)
    yielded = dict(zip(first.outputs, first.results, strict=True))
    waiting = list(zip(second.placeholders, second.bindings, strict=True))
    for node, binding in waiting:
        if binding.name in yielded and binding.bound is None:
            continue
        shared = by_tensor.get(id(binding.bound)) if binding.bound is not None else by_name.get(binding.name)
        mapping[node] = shared if shared is not None else place(node, binding)
    _copy_operations(first.fx, joint, mapping)
    for node, binding in waiting:
        if node not in mapping:
            source = yielded[binding.name]
            assert isinstance(source, fx.Node)
            mapping[node] = mapping[source]
    _copy_operations(second.fx, joint, mapping)
    names = [name for name in first.outputs if name in keep]
    results = [yielded[name] for name in names] + list(second.results)
    joint.output(tuple(mapping[r] if isinstance(r, fx.Node) else r for r in results))  # type: ignore[misc]
    return type(first)(joint, inputs, [*names, *second.outputs])


def _copy_operations(source: fx.Graph, target: fx.Graph, mapping: dict[fx.Node, fx.Node]) -> None:
    for node in source.nodes:
        if node.op not in ("placeholder", "output"):
            mapping[node] = copy_node(target, node, mapping.__getitem__)


# Elementwise operations in the memory of an argument that no later operation reads.


_COMMUTATIVE = {torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor}


def reuse_in_place(graph: AnyGraph) -> AnyGraph:
    """``graph`` with elementwise operations done in place where the argument's memory is not used afterwards.

    The values are the same bits: the kernel is the same. Memory of inputs, state and results is never reused.
    """
    graph = graph.copy()
    effects = graph.effects()
    last = _last_readers(graph, effects)
    constant = _constants(graph, effects)
    for node in graph.fx.nodes:
        target = _in_place(node.target) if isinstance(node.target, OpOverload) else None
        if target is None or effects.written_by(node):
            continue
        for index in range(2 if node.target in _COMMUTATIVE and not node.kwargs and len(node.args) == 2 else 1):
            if node not in constant and _dies(node, index, effects, last, constant):
                if index:
                    node.args = (node.args[1], node.args[0])
                node.meta["reused"] = node.args[0]
                node.target = target
                break
    return graph


def _dies(node: fx.Node, index: int, effects: Effects, last: dict[fx.Node, fx.Node], constant: set[fx.Node]) -> bool:
    """Return True if the argument has the result's form and its memory is not used later or by another argument."""
    source = node.args[index]
    if not isinstance(source, fx.Node) or not _same_form(source.meta.get("val"), node.meta.get("val")):
        return False
    root = effects.root[source]
    if root.op == "placeholder" or root in constant or last.get(root) is not node:
        return False
    return sum(effects.root[other] is root for other in node.all_input_nodes) == 1


def _constants(graph: OperationGraph, effects: Effects) -> set[fx.Node]:
    """Nodes that depend on no input and no state: generated code computes them once, and all runs share them."""
    found: set[fx.Node] = set()
    for node in graph.fx.nodes:
        if node.op != "call_function" or effects.must_stay(node) or effects.root[node] in effects.writers:
            continue
        if str(node.target).endswith("_like.default") or found.issuperset(node.all_input_nodes):
            found.add(node)
    return found


def _same_form(before: object, after: object) -> bool:
    if not isinstance(before, Tensor) or not isinstance(after, Tensor):
        return False
    return same_layout(before, after) and before.device == after.device


def _last_readers(graph: OperationGraph, effects: Effects) -> dict[fx.Node, fx.Node]:
    """For each memory, the last node that reads any part of it; that may be the graph's output."""
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.fx.nodes:
        for source in node.all_input_nodes:
            last[effects.root[source]] = node
    return last


@cache
def _in_place(op: OpOverload) -> OpOverload | None:
    """Return the operator that writes the same result into its first argument, if ``op`` is elementwise and has one."""
    namespace, name = op._schema.name.split("::")
    if namespace != "aten" or torch.Tag.pointwise not in op.tags or name.endswith("_"):
        return None
    packet = getattr(torch.ops.aten, f"{name}_", None)
    writes = getattr(packet, op._overloadname, None) if packet is not None else None
    if not isinstance(writes, OpOverload):
        return None
    theirs = [(a.name, str(a.type)) for a in writes._schema.arguments]
    return writes if theirs == [(a.name, str(a.type)) for a in op._schema.arguments] else None


# Dense gradients of tables, summed by the faster of two kernels that add the same numbers in the same order.
#
# ``embedding_dense_backward`` and ``_embedding_bag_backward`` go through a tensor iterator, or a sort, for each id; on
# a CPU ``index_add_`` into zeros takes a third to a tenth of their time, and the sums are the same bits.


_ROWS = _aten.embedding_dense_backward.default
_BAGS = _aten._embedding_bag_backward.default


def sum_table_gradients(graph: AnyGraph) -> AnyGraph:
    """``graph`` with the gradients of tables on a CPU summed by ``index_add_``; padding and weights are left alone."""
    if not any(node.target in (_ROWS, _BAGS) for node in graph.fx.nodes):
        return graph
    graph = graph.copy()
    for node in list(graph.fx.nodes):
        if node.op != "call_function" or node.target not in (_ROWS, _BAGS) or not _is_plain(node):
            continue
        with graph.fx.inserting_before(node):
            ids, rows = _of_rows(graph, node) if node.target is _ROWS else _of_bags(graph, node)
            form = node.meta["val"]
            options = {"dtype": form.dtype, "device": form.device}
            zeros = made(graph.fx, node, _aten.full.default, list(form.shape), 0, **options)
            total = made(graph.fx, node, _aten.index_add_.default, zeros, 0, ids, rows)
        node.replace_all_uses_with(total)
        graph.fx.erase_node(node)
    return graph


def _is_plain(node: fx.Node) -> bool:
    grad, form = node.args[0], node.meta["val"]
    assert isinstance(grad, fx.Node)
    if not isinstance(form, Tensor) or form.device.type != "cpu" or form.dtype not in (torch.float32, torch.float64):
        return False
    if form.ndim != 2 or not form.is_contiguous() or grad.meta["val"].dtype is not form.dtype or node.kwargs:
        return False
    if node.target is _ROWS:
        padding, by_frequency = node.args[3:5]
        return bool(padding == -1 and not by_frequency)
    _, _, by_frequency, mode, sparse, weights, *padding = node.args[5:]
    plain = not by_frequency and mode == 0 and not sparse and weights is None
    return bool(plain and padding in ([], [-1], [None]))


def _of_rows(graph: OperationGraph, node: fx.Node) -> tuple[fx.Node, fx.Node]:
    grad, ids = node.args[:2]
    assert isinstance(grad, fx.Node)
    width = node.meta["val"].shape[1]
    flat = made(graph.fx, node, _aten.reshape.default, ids, [-1])
    return flat, made(graph.fx, node, _aten.reshape.default, grad, [-1, width])


def _of_bags(graph: OperationGraph, node: fx.Node) -> tuple[fx.Node, fx.Node]:
    grad, ids, offsets = node.args[:3]
    assert isinstance(ids, fx.Node)
    form = ids.meta["val"]
    positions = made(graph.fx, node, _aten.arange.default, form.shape[0], dtype=form.dtype, device=form.device)
    after = made(graph.fx, node, _aten.searchsorted.Tensor, offsets, positions, right=True)
    bags = made(graph.fx, node, _aten.sub.Tensor, after, 1)
    # The kernel sorts the ids first, unstably: its sums run in the order that this very sort gives.
    both = made(graph.fx, node, _aten.sort.default, ids)
    ordered, order = (made(graph.fx, node, operator.getitem, both, index) for index in (0, 1))
    bags = made(graph.fx, node, _aten.index_select.default, bags, 0, order)
    return ordered, made(graph.fx, node, _aten.index_select.default, grad, 0, bags)


def lower(graph: AnyGraph) -> AnyGraph:
    """Return the graph that the program of ``graph`` is generated from."""
    return reuse_in_place(sum_table_gradients(drop_handles(graph, stops=True)))
