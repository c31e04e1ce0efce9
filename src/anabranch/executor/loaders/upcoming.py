"""The rows that the next batch will look up, known before its step begins, so that they can be prefetched.

A step makes ids of its batch by a few operations: it takes a column, adds an offset, wraps it around. The first run is
watched: from the ids that reached a table back to the batch's tensors, the operations in between are a recipe, which is
then followed with the next batch::

    batch["x"] ──[:, 3]──> + offset ──> lookup of "emb.weight"        watched once
    next["x"]  ──[:, 3]──> + offset ──> rows of "emb.weight" to ask for

A recipe is a hint. Only operations that change nothing and draw nothing are followed; where others make the ids, or
another batch does not go through, nothing is asked for ahead, and the step's own lookups do not notice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from anabranch.graph import Graph
from anabranch.graph.crossings import crossing_of
from anabranch.parameter_server.client.remote_weight import heard_lookups
from anabranch.tensors import Structure, flatten, paths

__all__ = ["UpcomingIds"]

_ATTEMPTS = 8
# fmt: off
_PURE = frozenset({
    "__getitem__", "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__mod__", "__floordiv__",
    "__and__", "__or__", "__xor__", "__lshift__", "__rshift__", "add", "sub", "mul", "remainder", "fmod",
    "floor_divide", "bitwise_and", "bitwise_or", "bitwise_xor", "clamp", "abs", "where", "view", "reshape", "flatten",
    "unflatten", "squeeze", "unsqueeze", "permute", "transpose", "t", "expand", "select", "narrow", "index_select",
    "gather", "take", "unbind", "chunk", "split", "tensor_split", "cat", "stack", "hstack", "concat", "to", "long",
    "int", "contiguous", "clone", "detach", "repeat_interleave", "flip", "movedim", "masked_select", "type", "cpu",
    "cuda", "unique", "sum", "cumsum",
})
# fmt: on


@dataclass(frozen=True, slots=True)
class _OperationResult:
    """One operation's result: the operation, its arguments, and the index of the output."""

    func: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    output: int | None


class _UnknownOrigin(Exception):
    """Ids that were made in another way."""


class _OperationRecorder(TorchFunctionMode):
    """Records the pure operations that run in its block, and the results of others."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, _OperationResult] = {}
        self.others: set[int] = set()
        self._alive: list[Tensor] = []  # so that no two results share an address

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        pure = getattr(func, "__name__", "") in _PURE and "out" not in kwargs
        several = isinstance(result, tuple | list)
        for output, tensor in enumerate(result if several else (result,)):
            if isinstance(tensor, Tensor):
                self._alive.append(tensor)
                if pure and not tensor.is_floating_point():
                    self.made.setdefault(id(tensor), _OperationResult(func, args, kwargs, output if several else None))
                else:
                    self.others.add(id(tensor))
        return result


class UpcomingIds:
    """Learns how a step derives ids from its batches, and computes those of another batch.

    >>> from anabranch.parameter_server import RemoteEmbedding
    >>> users = RemoteEmbedding("users", 100, 2, optimizer=lambda rows: torch.optim.SGD(rows, lr=0.1))
    >>> upcoming = UpcomingIds()
    >>> with upcoming.watching({"x": torch.tensor([[1, 7], [2, 8]])}) as batch:
    ...     _ = users(batch["x"][:, 1] + 10)
    >>> upcoming.of({"x": torch.tensor([[3, 9]])})
    {'users': tensor([19])}
    >>> users.close()
    """

    def __init__(self) -> None:
        self._recipes: dict[str, list[Callable[[Any], Tensor]]] | None = None
        self._attempts = 0
        self._by_path = False

    @property
    def learning(self) -> bool:
        """True if there is something to learn yet, from a run on the tape: no operation is seen inside a graph."""
        return self._recipes is None and self._attempts < _ATTEMPTS

    @contextmanager
    def watching(self, batch: Structure) -> Iterator[Structure]:
        """Learn from the block's use of ``batch``."""
        self._attempts += 1
        watch, looked_up, here = _OperationRecorder(), list[tuple[str, Tensor]](), get_ident()

        def note(table: str, ids: Tensor) -> None:
            if get_ident() == here:
                looked_up.append((table, ids))

        with heard_lookups(note), watch:
            yield batch
        leaves = {id(leaf): number for number, leaf in enumerate(flatten(batch)[0]) if isinstance(leaf, Tensor)}
        recipes: dict[str, list[Callable[[Any], Tensor]]] = {}
        for table, ids in looked_up:
            try:
                recipes.setdefault(table, []).append(_recipe(ids, watch, leaves))
            except _UnknownOrigin:
                continue
        self._recipes, self._by_path = recipes, False

    def learn_from(self, graph: Graph) -> None:
        """Learns from a captured step: the operations between the batch and the ids of each lookup."""
        self._attempts += 1
        recipes: dict[str, list[Callable[[Any], Tensor]]] = {}
        names = dict(zip(graph.placeholders, graph.inputs, strict=True))
        bound = dict(graph.shared())
        for node in graph.fx.nodes:
            crossing = crossing_of(node)
            if crossing is None or crossing.boundary.kind != "table" or crossing.phase != "forward":
                continue
            try:
                ids = node.args[0][0]
                recipes.setdefault(crossing.boundary.name, []).append(_traced_recipe(ids, names, bound))
            except _UnknownOrigin:
                continue
        self._recipes, self._by_path = recipes, True

    def of(self, batch: Structure) -> dict[str, Tensor]:
        """Return the ids that a step with ``batch`` is expected to look up, by table."""
        if not self._recipes:
            return {}
        leaves: Any = flatten(batch)[0]
        if self._by_path:
            leaves = {f"batch.{path}" if path else "batch": v for path, v in zip(paths(batch), leaves, strict=True)}
        try:
            with torch.no_grad():
                return {
                    table: torch.cat([follow(leaves).reshape(-1) for follow in recipes])
                    for table, recipes in self._recipes.items()
                    if recipes
                }
        except (RuntimeError, LookupError, TypeError, ValueError):  # a batch of another shape: learn again
            self._recipes = None
            return {}


def _traced_recipe(
    ids: fx.Node, names: Mapping[fx.Node, str], bound: Mapping[fx.Node, Tensor]
) -> Callable[[Mapping[str, Any]], Any]:
    """Return the function that gives ``ids`` for the leaves of another batch, by their paths."""
    if ids in bound:
        return lambda batch: bound[ids]
    if ids.op == "placeholder":
        return lambda batch: batch[names[ids]]
    target = ids.target
    if (
        not isinstance(target, OpOverload)
        or target._schema.is_mutable
        or torch.Tag.nondeterministic_seeded in target.tags
    ):
        raise _UnknownOrigin
    sources = {source: _traced_recipe(source, names, bound) for source in ids.all_input_nodes}

    def follow(batch: Mapping[str, Any]) -> Any:
        values = {source: made(batch) for source, made in sources.items()}
        return target(*fx.map_arg(ids.args, values.get), **fx.map_arg(ids.kwargs, values.get))

    return follow


def _recipe(value: Any, watch: _OperationRecorder, leaves: Mapping[int, int]) -> Callable[[list[Any]], Any]:
    """Return the function that gives ``value`` from the leaves of another batch."""
    if isinstance(value, tuple | list):
        kind, parts = type(value), [_recipe(part, watch, leaves) for part in value]
        return lambda batch: kind([part(batch) for part in parts])
    if isinstance(value, slice):
        bounds = [_recipe(bound, watch, leaves) for bound in (value.start, value.stop, value.step)]
        return lambda batch: slice(*(bound(batch) for bound in bounds))
    if isinstance(value, FakeTensor):
        raise _UnknownOrigin  # a graph is being captured
    if not isinstance(value, Tensor):
        return lambda batch: value
    if id(value) in leaves:
        number = leaves[id(value)]
        return lambda batch: batch[number]
    made = watch.made.get(id(value))
    if made is not None:
        args = _recipe(tuple(made.args), watch, leaves)
        kwargs = {name: _recipe(argument, watch, leaves) for name, argument in made.kwargs.items()}

        def follow(batch: list[Any]) -> Any:
            result = made.func(*args(batch), **{name: argument(batch) for name, argument in kwargs.items()})
            return result if made.output is None else result[made.output]

        return follow
    if id(value) in watch.others:
        raise _UnknownOrigin
    return lambda batch: value  # it was there before the step: a buffer of the model
