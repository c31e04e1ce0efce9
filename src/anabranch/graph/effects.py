"""Side effects of operations: the arguments that they write to or alias, and whether they draw random numbers.

Passes may move, merge or drop nodes only as far as these facts allow. They come from the operators' schemas, plus the
few operators whose schemas do not show it (``native_batch_norm`` writes its running statistics).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from anabranch.graph.crossings import Effect

__all__ = [
    "Effects",
    "arguments",
    "is_collective",
    "is_random",
    "is_view",
    "is_wait",
    "mark_unused_calls",
    "raises_on_values",
]

_BATCH_NORMS = {"aten::native_batch_norm": (3, 4), "aten::cudnn_batch_norm": (3, 4), "aten::miopen_batch_norm": (3, 4)}
# Views not declared in their schemas, and waits, which return the same tensor that they wait for.
_UNDECLARED_VIEWS = {"aten::_unsafe_view", "aten::lift_fresh", "_c10d_functional::wait_tensor"}
_UNDECLARED_VIEWS |= {"aten::unsafe_split", "aten::unsafe_split_with_sizes", "aten::unsafe_chunk"}
_CHECKS = ("aten::_assert", "aten::_linalg_check_errors")
_UNPREDICTABLE = (*_CHECKS, "aten::record_stream", "profiler::")
_DIVIDING = {"div", "floor_divide", "remainder", "fmod"}  # whole numbers by 0
_RAISING = {
    *("index", "index_select", "gather", "take", "embedding", "_embedding_bag", "_embedding_bag_forward_only"),
    *("index_put", "index_add", "index_copy", "index_fill", "scatter", "scatter_add", "scatter_reduce", "put"),
    *("nll_loss_forward", "nll_loss2d_forward", "multi_margin_loss", "_ctc_loss", "binary_cross_entropy"),
    *("multinomial", "normal", "poisson", "bernoulli", "binomial", "masked_scatter", "searchsorted", "bucketize"),
    *(
        "segment_reduce",
        "multilabel_margin_loss",
        "multilabel_margin_loss_forward",
        "linalg_eig",
        "_linalg_eigh",
        "_linalg_svd",
        "cholesky",
        "histc",
    ),
    *("cholesky_inverse", "cholesky_solve", "max_unpool2d", "max_unpool3d", "repeat_interleave", "bincount"),
}
"""Operators whose errors depend on values."""


@dataclass(frozen=True, slots=True)
class _Signature:
    names: tuple[str, ...]
    written: frozenset[str]
    viewed: frozenset[str]


@cache
def _signature(op: OpOverload) -> _Signature:
    schema = op._schema
    names = tuple(argument.name for argument in schema.arguments)
    written = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    written.update(names[index] for index in _BATCH_NORMS.get(schema.name, ()))
    returned = set[str]()
    for result in schema.returns:
        if result.alias_info is not None:
            returned |= set(result.alias_info.before_set)
    # A list of views (``split``, ``unbind``) names no argument; its source is the argument with a mark and no write.
    viewed = {
        a.name
        for a in schema.arguments
        if a.alias_info is not None and (not a.alias_info.is_write or returned & set(a.alias_info.before_set))
    }
    if schema.name in _UNDECLARED_VIEWS:
        viewed.add(names[0])
    return _Signature(names, frozenset(written), frozenset(viewed))


def arguments(node: fx.Node) -> Iterator[tuple[str, object]]:
    """Yield the node's arguments by the names that the operator's schema gives them."""
    assert isinstance(node.target, OpOverload)
    yield from zip(_signature(node.target).names, node.args, strict=False)
    yield from node.kwargs.items()


def is_random(node: fx.Node) -> bool:
    """Return True if the node draws from a random number generator, so that its place in the order matters."""
    return isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def is_collective(node: fx.Node) -> bool:
    """Return True if the node starts a collective, whose order is the same on all ranks."""
    return isinstance(node.target, OpOverload) and node.target.namespace == "_c10d_functional" and not is_wait(node)


def is_wait(node: fx.Node) -> bool:
    """Return True if the node waits for a collective."""
    return isinstance(node.target, OpOverload) and node.target._schema.name == "_c10d_functional::wait_tensor"


def is_view(node: fx.Node) -> bool:
    """Return True if the node's result shares the memory of an argument that it does not write to."""
    if not isinstance(node.target, OpOverload):
        return False
    signature = _signature(node.target)
    return bool(signature.viewed) and not signature.written


def _nodes_in(value: object) -> Iterator[fx.Node]:
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _nodes_in(item)


def raises_on_values(node: fx.Node) -> bool:
    """Return True if the node raises for some values of its arguments."""
    if not isinstance(node.target, OpOverload):
        return False
    name = node.target._schema.name
    plain = name.removeprefix("aten::").removesuffix("_")  # in place or not
    if plain in _DIVIDING:
        result = node.meta.get("val")
        return not (isinstance(result, torch.Tensor) and (result.is_floating_point() or result.is_complex()))
    return plain in _RAISING or name.startswith(_CHECKS)


def mark_unused_calls(graph: fx.Graph) -> None:
    """Keep calls with unused results because they may raise errors on some values."""
    used: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "output" or node in used or not _is_pure(node.target):
            used.update(node.all_input_nodes)
        elif isinstance(node.target, OpOverload):
            node.meta["may_raise"] = raises_on_values(node)


def _is_pure(target: object) -> bool:
    """Return True for a call whose only effect is its result."""
    return target is operator.getitem or (isinstance(target, OpOverload) and not target._schema.is_mutable)


class Effects:
    """The facts of one graph, found in one walk: each node's memory, its writers, and the nodes that must stay.

    ``root`` maps a node to the one that first held its memory; placeholders that share storage share a root.
    """

    def __init__(self, graph: fx.Graph, shared: Iterable[tuple[fx.Node, Tensor]] = ()) -> None:
        self.root: dict[fx.Node, fx.Node] = {}
        self.writers: dict[fx.Node, list[fx.Node]] = {}
        self._writes: dict[fx.Node, tuple[fx.Node, ...]] = {}
        storages: dict[int, fx.Node] = {}
        for node, tensor in shared:
            if tensor.layout == torch.strided and tensor.numel():
                self.root[node] = storages.setdefault(tensor.untyped_storage().data_ptr(), node)
        for node in graph.nodes:
            self._visit(node)

    def _visit(self, node: fx.Node) -> None:
        self.root.setdefault(node, node)
        if node.target is operator.getitem:
            self.root[node] = self.root[node.args[0]]  # type: ignore[index]
        if not isinstance(node.target, OpOverload):
            return
        signature = _signature(node.target)
        if not signature.written and not signature.viewed:
            return
        written: list[fx.Node] = []
        for name, value in arguments(node):
            if name in signature.viewed:
                for viewed in _nodes_in(value):
                    self.root[node] = self.root[viewed]
            if name in signature.written:
                written.extend(_nodes_in(value))
        if written and self._really_writes(node):
            self._writes[node] = tuple(written)
            for target in written:
                self.writers.setdefault(self.root[target], []).append(node)

    @staticmethod
    def _really_writes(node: fx.Node) -> bool:
        op = node.target
        assert isinstance(op, OpOverload)
        if op._schema.name in _BATCH_NORMS:
            return bool(node.args[5]) if len(node.args) > 5 else True
        return True

    def written_by(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """Return the arguments that the node changes in place."""
        return self._writes.get(node, ())

    def must_stay(self, node: fx.Node) -> bool:
        """Return True if dropping the node would be noticed even if its result is unused."""
        if node.meta.get("may_raise"):
            return True
        if node.op in ("placeholder", "output") or is_random(node) or isinstance(node.target, Effect):
            return True
        if not isinstance(node.target, OpOverload):
            return False
        name = node.target._schema.name
        return node.target.namespace == "_c10d_functional" or name.startswith(_UNPREDICTABLE)
