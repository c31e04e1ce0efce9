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

from anabranch.graph.crossings import Crossing

_BATCH_NORMS = {"aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"}
# Views not declared in their schemas, and waits, which return the same tensor that they wait for.
_UNDECLARED_VIEWS = {"aten::_unsafe_view", "aten::lift_fresh", "_c10d_functional::wait_tensor"}
_UNDECLARED_VIEWS |= {"aten::unsafe_split", "aten::unsafe_split_with_sizes", "aten::unsafe_chunk"}
_NOTICED = ("aten::_assert", "aten::_linalg_check_errors", "aten::record_stream")  # though nothing reads their result


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
    if schema.name in _BATCH_NORMS:
        written.update(names[3:5])  # the running statistics
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
        if node.target._schema.name in _BATCH_NORMS and len(node.args) > 5 and not node.args[5]:  # not in training
            return
        self._writes[node] = tuple(written)
        for target in written:
            self.writers.setdefault(self.root[target], []).append(node)

    def written_by(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """Return the arguments that the node changes in place."""
        return self._writes.get(node, ())

    def must_stay(self, node: fx.Node) -> bool:
        """Return True if dropping the node would be noticed even if its result is unused."""
        if node.op in ("placeholder", "output") or is_random(node) or isinstance(node.target, Crossing):
            return True
        if not isinstance(node.target, OpOverload):
            return False
        return node.target.namespace == "_c10d_functional" or node.target._schema.name.startswith(_NOTICED)
