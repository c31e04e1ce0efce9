"""A batch cut into microbatches along its rows, and joined again.

Rows are dim 0 of every tensor. Numbers, strings, ``None``, tensors of no dimensions and values in ``NoChunk`` have
none: each microbatch gets them whole.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch
from optree import PyTreeSpec
from torch import Tensor

from anabranch.pipeline.stage.packet import Packet, memory_of
from anabranch.tensors import Structure, flatten, paths, unflatten


class NoChunk:
    """A value that a pipe does not cut: every microbatch gets it whole.

    >>> from anabranch.pipeline import Pipe
    >>> class Masked(torch.nn.Module):
    ...     def forward(self, x, mask=None):
    ...         return x * mask
    >>> pipe = Pipe(torch.nn.Sequential(torch.nn.Identity(), Masked()), [1, 1], chunks=2)
    >>> pipe(torch.ones(4, 3), mask=NoChunk(torch.tensor([1.0, 0.0, 1.0]))).sum()
    tensor(8.)

    The gradient of a tensor in it is the sum over the microbatches, as in the unsplit module. It may stand for an
    input, or for a part of a nested one.

    Args:
        value: tensors of any shape in any nesting.

    Attributes:
        value: the value wrapped.

    Source: ``NoChunk`` of ``torch.distributed.pipeline.sync``, in early versions of PyTorch 2.
    """

    __slots__ = ("value",)

    def __init__(self, value: Structure) -> None:
        self.value = value


def open_whole(batch: Structure) -> tuple[Structure, list[bool]]:
    """Return ``batch`` without its ``NoChunk``, and for each leaf whether every microbatch gets it whole."""
    leaves, treedef = flatten(batch)
    opened: list[object] = []
    whole: list[bool] = []
    for leaf in leaves:
        inside = leaf
        while isinstance(inside, NoChunk):
            inside, _ = open_whole(inside.value)
        opened.append(inside)
        is_cut = isinstance(leaf, Tensor) and leaf.ndim > 0
        whole += [not is_cut] if inside is leaf else [True] * len(flatten(inside)[0])
    return unflatten(treedef, opened), whole


@dataclass(frozen=True, slots=True)
class Part:
    """One input of a call, or its target, taken apart.

    Attributes:
        what: its name in errors.
        treedef: how its leaves are nested.
        leaves: tensors and other values.
        whole: for each leaf whether every microbatch gets it whole.
    """

    what: str
    treedef: PyTreeSpec
    leaves: list[object]
    whole: list[bool]

    def rows(self) -> int | None:
        """Return the rows (dim 0) on which its tensors agree; ``None`` if none is cut.

        Raises:
            ValueError: they disagree; names each with its shape.
        """
        rows = {leaf.shape[0] for leaf, whole in zip(self.leaves, self.whole, strict=True) if not whole}  # type: ignore[attr-defined]
        if len(rows) > 1:
            raise ValueError(f"the tensors of {self.what} have different numbers of rows (dim 0): {self.shapes()}")
        return rows.pop() if rows else None

    def check_rows(self, rows: int) -> None:
        """Raise ``ValueError`` for tensors whose number of rows differs from the batch's."""
        own = self.rows()
        if own not in (None, rows):
            raise ValueError(f"{self.what} has {own} rows, but the batch has {rows}; both are split alike")

    def shapes(self) -> str:
        """Return the paths and shapes of its tensors."""
        alone = self.treedef.type is tuple and self.treedef.num_children == 1  # a single input
        pairs = zip(self.treedef.paths(), self.leaves, strict=True)
        named = [(".".join(map(str, path[alone:])), leaf) for path, leaf in pairs if isinstance(leaf, Tensor)]
        return ", ".join(f"{name or self.what} {tuple(leaf.shape)}" for name, leaf in named)

    def cut(self, sizes: Sequence[int]) -> list[list[object]]:
        """Return for each microbatch the leaves that it gets."""
        if len(sizes) == 1:
            return [list(self.leaves)]
        columns = [
            [leaf] * len(sizes) if whole else cut_rows(leaf, sizes)  # type: ignore[arg-type]
            for leaf, whole in zip(self.leaves, self.whole, strict=True)
        ]
        return [[column[i] for column in columns] for i in range(len(sizes))]

    def differentiable(self, sizes: Sequence[int]) -> list[Sequence[Tensor]]:
        """Return for each leaf that requires gradients those that the microbatches get, on its graph."""
        pairs = zip(self.leaves, self.whole, strict=True)
        return [
            # No views, which autograd would refuse once a layer has changed the caller's tensor in place.
            [leaf] * len(sizes) if whole or len(sizes) == 1 else torch.unsafe_split_with_sizes(leaf, list(sizes))
            for leaf, whole in pairs
            if isinstance(leaf, Tensor) and leaf.requires_grad
        ]

    def packets(self, sizes: Sequence[int]) -> list[Packet]:
        """Return its value for each microbatch as it enters a stage."""
        needs_grad = tuple([isinstance(leaf, Tensor) and leaf.requires_grad for leaf in self.leaves])
        shared = tuple([index for index, whole in enumerate(self.whole) if whole]) if len(sizes) > 1 else ()
        detached = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        cut = replace(self, leaves=detached).cut(sizes)
        return [Packet(self.treedef, leaves, needs_grad, shared) for leaves in cut]

    def structures(self, sizes: Sequence[int]) -> list[Structure]:
        """Return its value for each microbatch."""
        return [unflatten(self.treedef, leaves) for leaves in self.cut(sizes)]


class Batch:
    """The positional inputs, the keyword inputs and the target of one call, flattened together, once.

    Attributes:
        inputs: the parts, keyword inputs by their names, and the positional ones, a tuple, under ``None``.
        target: of the loss.
    """

    def __init__(self, args: tuple[Structure, ...], keywords: Mapping[str, Structure], target: Structure) -> None:
        values = [args, *keywords.values(), target]
        flat, treedef = flatten(values)
        whole = [not (isinstance(leaf, Tensor) and leaf.ndim) for leaf in flat]
        if NoChunk in map(type, flat):
            opened, whole = open_whole(values)
            flat, treedef = flatten(opened)
        parts: list[Part] = []
        start = 0
        names = ["the batch", *[f"the keyword input {name!r}" for name in keywords], "the target"]
        for what, tree in zip(names, treedef.children(), strict=True):
            end = start + tree.num_leaves
            parts.append(Part(what, tree, flat[start:end], whole[start:end]))
            start = end
        self.target = parts.pop()
        self.inputs: dict[str | None, Part] = dict(zip([None, *keywords], parts, strict=True))

    def rows(self) -> int:
        """Return the rows of the batch; keyword inputs are compared with those of the positional ones later.

        Raises:
            ValueError: they disagree, or there are none.
        """
        for part in self.inputs.values():
            if (rows := part.rows()) is not None:
                return rows
        shapes = ", ".join(filter(None, [part.shapes() for part in self.inputs.values()]))
        raise ValueError(
            f"the tensors of the batch have no rows (dim 0) to split into microbatches: {shapes or 'there are none'}"
        )

    def memory(self) -> set[int]:
        """Return the memory of the inputs, as of ``memory_of``."""
        leaves = [leaf for part in self.inputs.values() for leaf in part.leaves]
        return {memory_of(leaf) for leaf in leaves if isinstance(leaf, Tensor)}


def microbatch_sizes(rows: int, chunks: int) -> list[int]:
    """Return the rows of each microbatch: ``min(rows, chunks)`` of them, sizes differing by at most one.

    >>> microbatch_sizes(7, 4), microbatch_sizes(2, 4), microbatch_sizes(0, 4)
    ([2, 2, 2, 1], [1, 1], [0])
    """
    m = max(1, min(rows, chunks))
    return [rows // m + (i < rows % m) for i in range(m)]


def cut_rows(tensor: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    """Return the rows of each microbatch, in the memory of ``tensor``.

    Each has its own count of changes in place: autograd would take one microbatch's for a change of what it has saved
    of another. The first shares the count of ``tensor``, so that the caller's graph and the pipe's see each other's.
    """
    first, *others = torch.split(tensor, list(sizes))
    return [first, *(others if tensor.requires_grad else [other.data for other in others])]


def scatter(batch: Structure, sizes: Sequence[int]) -> list[Structure]:
    """``batch`` cut along its rows; ``NoChunk``, other values and tensors of no dimensions go to every microbatch.

    >>> [part["x"].tolist() for part in scatter({"x": torch.arange(3)}, [2, 1])]
    [[0, 1], [2]]
    """
    return Batch((), {}, batch).target.structures(sizes)


def gather(parts: Sequence[Structure], sizes: Sequence[int], *, lists: bool = False) -> Structure:
    """Return the outputs of microbatches of ``sizes`` rows as one: tensors joined along their rows, equal values once.

    >>> gather([{"y": torch.zeros(2, 1)}, {"y": torch.zeros(1, 1)}], [2, 1])["y"].shape
    torch.Size([3, 1])

    A list with an entry per row cannot be joined, and is refused unless ``lists`` are known to be of other values.

    Raises:
        ValueError: values that depend on the microbatch and cannot be joined: no tensors, or without a row or the same
            number of rows per row of the batch, or in different structures.
    """
    if len(parts) == 1:
        return parts[0]
    flat = [flatten(part) for part in parts]
    treedef = flat[0][1]
    for i, (_, other) in enumerate(flat):
        if other != treedef:
            both = f"{treedef} in the first, {other} in microbatch {i}"
            raise ValueError(f"the model's output has a different structure in some microbatches: {both}")
    if not lists:
        _refuse_lists_of_rows(parts[0], sizes)
    columns = zip(paths(parts[0]), zip(*(leaves for leaves, _ in flat), strict=True), strict=True)
    return unflatten(treedef, [_join(path, leaves, sizes) for path, leaves in columns])


def _refuse_lists_of_rows(value: object, sizes: Sequence[int]) -> None:
    """Raise for a list with an entry per row, such as a detector's boxes: entries of microbatches would be joined."""
    if type(value) is list and len(value) > 1 and all(len(value) == size for size in sizes):
        what = f"the model's output has a list of {len(value)} values in microbatches of {list(sizes)} rows"
        raise ValueError(f"{what}, which cannot be joined; stack them, use chunks=1, or return a tuple of other values")
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
        _refuse_lists_of_rows(part, sizes)


def _join(path: str, leaves: Sequence[object], sizes: Sequence[int]) -> object:
    where = f"the model's output {path}".rstrip()
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if len(tensors) < len(leaves):
        return _agreed(where, leaves, sizes)
    cure = "return a row, or the same number of rows, per row of the batch, and reduce in the loss"
    if any(tensor.ndim == 0 for tensor in tensors):
        raise ValueError(f"{where} is a tensor without dimensions, with no rows to join microbatches along; {cure}")
    rows = [tensor.shape[0] for tensor in tensors]
    if any(n * sizes[0] != rows[0] * size or n % size for n, size in zip(rows, sizes, strict=True)):
        raise ValueError(f"{where} has {rows} rows (dim 0) in microbatches of {list(sizes)} rows of the batch; {cure}")
    return torch.cat(tensors)


def _agreed(where: str, leaves: Sequence[object], sizes: Sequence[int]) -> object:
    """Return the value of all microbatches, unless it may depend on their rows."""
    first, *others = leaves
    constant = first is None or isinstance(first, bool | str | Enum)
    if not constant and isinstance(first, int | float | complex):
        constant = any(first != size for size in sizes)
    for other in others:
        if not constant or type(other) is not type(first) or other != first:
            what = f"{where} is {_brief(first)} in one microbatch and {_brief(other)} in another, of {list(sizes)} rows"
            raise ValueError(f"{what}; return a tensor with a row per row of the batch, or use chunks=1")
    return first


def _brief(leaf: object) -> str:
    return f"a tensor of shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else reprlib.repr(leaf)
