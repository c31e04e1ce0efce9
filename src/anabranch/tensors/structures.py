"""Nested containers of tensors: flatten, rebuild, map, name each leaf by its path, and count a batch's rows.

Containers are optree's (dict, list, tuple, named tuple, ...) and the classes registered with it or with PyTorch's own
pytree; besides, every other mapping and every dataclass, which are registered under our namespace when first seen.
Any other object is a leaf. ``None`` is a leaf, too, not an empty container: a missing tensor keeps its place when it
crosses a boundary.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
import threading
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard, cast

import numpy as np
import optree
import torch.utils._pytree  # named in torch.export's errors as the place to register classes; there is no public one
from torch import Tensor

from anabranch.tensors.jagged import KeyedJagged

if TYPE_CHECKING:
    from optree import PyTreeSpec

Structure: TypeAlias = Any
"""Tensors in any nesting of lists, tuples, named tuples, mappings and dataclasses."""

_NAMESPACE = "anabranch"
_register: Callable[..., object] = optree.register_pytree_node
_registering = threading.Lock()
_registered: set[type] = set()
_LEAVES = frozenset({torch.Tensor, torch.nn.Parameter, int, float, bool, str, type(None)})  # most leaves, known at once


def flatten(structure: Structure, is_leaf: Callable[[object], bool] | None = None) -> tuple[list[object], PyTreeSpec]:
    """Return the leaves, those for which ``is_leaf`` holds whole, and the treedef that puts them back.

    >>> leaves, treedef = flatten({"a": 1, "b": (2, None)})
    >>> leaves
    [1, 2, None]
    >>> unflatten(treedef, leaves)
    {'a': 1, 'b': (2, None)}
    """
    known = len(_registered)
    leaves, treedef = optree.tree_flatten(structure, is_leaf, none_is_leaf=True, namespace=_NAMESPACE)
    kinds = {*map(type, leaves)}
    if not kinds <= _LEAVES:
        _register_new(kinds)
    # Again for each level of classes that were never seen before, here or meanwhile in another thread.
    return (leaves, treedef) if len(_registered) == known else flatten(structure, is_leaf)


def unflatten(treedef: PyTreeSpec, leaves: Iterable[object]) -> Structure:
    """Return the structure that ``treedef`` describes, holding ``leaves``."""
    return optree.tree_unflatten(treedef, leaves)


def map_structure(function: Callable[..., object], structure: Structure, *others: Structure) -> Structure:
    """``structure`` with ``function(leaf)`` in place of every leaf, also given the leaves of ``others`` alike."""

    def opened(leaf: object, *beside: object) -> object:
        _register_new({type(leaf)})
        return map_structure(function, leaf, *beside) if type(leaf) in _registered else function(leaf, *beside)

    # Not flatten and unflatten: Dynamo, which follows this at the edges of placed modules, cannot make a treedef of an
    # empty dict.
    return optree.tree_map(opened, structure, *others, none_is_leaf=True, namespace=_NAMESPACE)


def paths(structure: Structure, is_leaf: Callable[[object], bool] | None = None) -> list[str]:
    """Each leaf's path, joined by dots, in the order of ``flatten``.

    >>> paths({"ids": 0, "pair": (1, [2])})
    ['ids', 'pair.0', 'pair.1.0']
    """
    return [".".join(map(str, path)) for path in flatten(structure, is_leaf)[1].paths()]


def named_parts(structure: Structure) -> dict[str, Structure] | None:
    """Return the items of a mapping, or the fields of a dataclass; ``None`` of anything else."""
    if isinstance(structure, Mapping):
        return {str(name): structure[name] for name in structure}
    if dataclasses.is_dataclass(structure) and not isinstance(structure, type):
        return {each.name: getattr(structure, each.name) for each in dataclasses.fields(structure)}
    return None


def _register_new(kinds: set[type]) -> None:
    """Register those ``kinds`` of leaves that are containers."""
    for kind in kinds.difference(_LEAVES, _registered):
        node = None if issubclass(kind, (list, tuple)) else _node_of(kind)
        if node is not None:
            with _registering:
                if kind not in _registered:
                    _register(kind, *node, namespace=_NAMESPACE)
                    _registered.add(kind)


def _node_of(kind: type) -> tuple[Callable[..., object], Callable[..., object]] | None:
    """Return how a container of this class is taken apart and made again; ``None`` if it is no container."""
    if known := torch.utils._pytree.SUPPORTED_NODES.get(kind):
        return known.flatten_fn, lambda context, parts: known.unflatten_fn(parts, context)
    if issubclass(kind, (dict, UserDict)):  # a copy of another mapping may share its items with it
        return _copied(_put_item, lambda value: tuple(value), operator.getitem)
    if issubclass(kind, Mapping):
        return (
            lambda value: (list(value.values()), tuple(value), tuple(value)),
            lambda names, parts: kind(dict(zip(names, parts, strict=True))),  # type: ignore[call-arg]
        )
    if dataclasses.is_dataclass(kind):
        names = tuple(each.name for each in dataclasses.fields(kind))
        # Frozen ones refuse setattr; a field that __init__ does not set may be missing.
        return _copied(object.__setattr__, lambda value: tuple(n for n in names if hasattr(value, n)), getattr)
    return None


def _put_item(value: Any, name: object, part: object) -> None:
    value[name] = part  # Dynamo follows this, but not operator.setitem of any class


@dataclass(frozen=True)
class _Around:
    """The names of the parts of a container, and the container without them."""

    names: tuple[object, ...]
    shell: Any = field(compare=False, repr=False)  # a treedef reads the same in every process


def _copied(
    put: Callable[[Any, Any, object], None],
    names_of: Callable[[Any], tuple[object, ...]],
    get: Callable[[Any, Any], object],
) -> tuple[Callable[..., object], Callable[..., object]]:
    """Return the functions for a class whose objects are copied, with what else they hold, and given other parts."""

    def filled(value: Any, names: Iterable[object], parts: Iterable[object]) -> Any:
        value = copy.copy(value)
        for name, part in zip(names, parts, strict=True):
            put(value, name, part)
        return value

    def take_apart(value: Any) -> tuple[list[object], _Around, tuple[object, ...]]:
        names = names_of(value)
        return [get(value, name) for name in names], _Around(names, filled(value, names, [None] * len(names))), names

    return take_apart, lambda around, parts: filled(around.shell, around.names, parts)


# --- a batch, and the rows (dim 0) that its tensors agree in: what a mean loss is a mean over, so the weight of a
# worker's gradient; a batch whose tensors disagree has no such weight and is refused


_DEVICE = operator.attrgetter("device")


def identical(some: Sequence[object], others: Sequence[object]) -> bool:
    """Return True if both have the same objects."""
    return len(some) == len(others) and all(map(operator.is_, some, others))


def as_tensors(batch: Structure, device: torch.device | None = None) -> Structure:
    """``batch`` with numpy arrays and scipy.sparse matrices as tensors, moved to ``device`` if one is given.

    >>> as_tensors({"x": np.zeros((2, 3), dtype=np.float32), "name": "kept"})
    {'x': tensor([[0., 0., 0.],
            [0., 0., 0.]]), 'name': 'kept'}

    Arrays share memory with the result where torch can. A sparse matrix becomes a ``torch.sparse_csr`` tensor. Leaves
    of other types are kept as they are, and a batch that is right already is returned itself.
    """
    if (plain := tensors_of(batch)) and (device is None or {*map(_DEVICE, plain)} == {device}):
        return batch
    leaves, treedef = flatten(batch)
    converted = [_as_tensor(leaf, device) for leaf in leaves]
    return batch if identical(leaves, converted) else unflatten(treedef, converted)


def _as_tensor(leaf: Any, device: torch.device | None) -> object:
    if isinstance(leaf, np.ndarray):
        leaf = torch.from_numpy(leaf if leaf.flags.writeable else leaf.copy())
    elif type(leaf).__module__.startswith("scipy.sparse"):  # scipy itself is never imported
        csr = leaf.tocsr()
        starts, columns, values = (
            torch.from_numpy(np.ascontiguousarray(array)) for array in (csr.indptr, csr.indices, csr.data)
        )
        leaf = torch.sparse_csr_tensor(
            starts, columns, values, size=csr.shape, check_invariants=True, device=values.device
        )
    if isinstance(leaf, Tensor) and device is not None and leaf.device != device:
        return leaf.to(device, non_blocking=True)
    return leaf


def tensors_of(batch: Structure) -> Sequence[Tensor]:
    """Return the leaves of a tensor, or of a flat tuple, list or dict (in its own order) of tensors, much faster than
    ``flatten``; else nothing.
    """
    kind = type(batch)
    if kind is Tensor:
        return (batch,)
    leaves = [*batch.values()] if kind is dict else batch if kind in (tuple, list) else ()
    for leaf in leaves:
        if type(leaf) is not Tensor:
            return ()
    return cast("Sequence[Tensor]", leaves)


def count_rows(batch: Structure) -> int:
    """Return the number of rows on which all of the batch's tensors agree.

    >>> count_rows({"x": torch.zeros(4, 2), "y": torch.zeros(4)})
    4

    Tensors without dimensions, and leaves that are not tensors, are ignored. A ``KeyedJagged`` has the rows of
    its features.

    Raises:
        ValueError: if the tensors disagree, or none has rows; names each tensor with its shape.
    """
    rows: set[int | None] = {leaf.shape[0] for leaf in tensors_of(batch) if leaf.ndim}
    rows = rows or {_rows_of(leaf) for leaf in flatten(batch, is_jagged)[0]} - {None}
    if len(rows) > 1:
        shapes = ", ".join(
            f"{path or 'batch'} {tuple(leaf.shape) if isinstance(leaf, Tensor) else leaf}"
            for path, leaf in zip(paths(batch, is_jagged), flatten(batch, is_jagged)[0], strict=True)
            if _rows_of(leaf) is not None
        )
        raise ValueError(
            f"the batch's tensors disagree in rows (dim 0): {shapes}; make them agree, or give TrainStep "
            "rows=callable(batch) -> weight"
        )
    if not rows:
        raise ValueError(
            "the batch holds no tensor with rows (dim 0); convert its numbers to tensors or arrays, or give TrainStep "
            "rows=callable(batch) -> weight"
        )
    return cast(int, rows.pop())


def _rows_of(leaf: object) -> int | None:
    if isinstance(leaf, Tensor):
        return leaf.shape[0] if leaf.ndim else None
    return leaf.stride() if is_jagged(leaf) else None


def is_jagged(node: object) -> TypeGuard[KeyedJagged]:
    """Return True for ``KeyedJagged`` and for TorchRec's, whose three tensors differ in length."""
    return hasattr(type(node), "weights_or_none")
