"""State other than tensors, as the tree codec writes it, and tensors taken out of it by name.

Besides what the codec knows, a checkpoint holds::

    Path("a/b")             {"$path": "a/b"}
    TensorName("model.w")   {"$tensor": "model.w"}
    Custom("Phase", 2)      {"$custom": ["Phase", 2]}            a value of a class that the reader knows
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from anabranch.errors import CheckpointError
from anabranch.tensors import tree_codec
from anabranch.tensors.tree_codec import map_leaves, show


@dataclass(frozen=True, slots=True)
class TensorName:
    """Stands in a state for a tensor that is kept elsewhere; see ``split``."""

    name: str


@dataclass(frozen=True, slots=True)
class Custom:
    """Stands in a state for a value of a class of the program's own, which no file names a module of."""

    kind: str
    value: object


def encode(state: object, tensors: list[Tensor] | None = None) -> object:
    """``state`` as values that JSON can say: what the tree codec knows, paths, ``TensorName`` and ``Custom``.

    ``tensors`` gets those in ``state``; left out, there may be none.

    Raises:
        ValueError: a value that would not come back as it is; names its path.
    """
    return tree_codec.encode(state, _own, tensors=tensors)


def decode(encoded: object, tensors: Sequence[Tensor] | None = None) -> Any:
    """Return the state that ``encode`` was given.

    Raises:
        CheckpointError: ``encoded`` is nothing that ``encode`` makes.
    """
    named: dict[str, Callable[[Any], object]] = {"$tensor": TensorName} if tensors is None else {}
    try:
        return tree_codec.decode(encoded, _MAKERS | named, tensors=tensors or ())
    except ValueError as error:
        raise CheckpointError(f"the state cannot be read: {error}") from error


def _own(value: Any, path: tree_codec.Path) -> object:
    kind = type(value)
    if kind is TensorName:
        return {"$tensor": value.name}
    if kind is Custom:
        return {"$custom": [value.kind, value.value]}
    if kind is type(Path()):
        return {"$path": str(value)}
    raise ValueError(
        f"the state at {show(path)} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint does not support; "
        "use None, bool, int, float, str, bytes, a path, NumPy's numbers, or a list, tuple, set or dict of them, and "
        "put tensors into a group"
    )


_MAKERS: dict[str, Callable[[Any], object]] = {"$custom": lambda content: Custom(*content), "$path": Path}


def split(structure: object) -> tuple[object, dict[str, Tensor]]:
    """Take the tensors out of a nested structure; a ``TensorName`` stays in the place of each.

    >>> import torch
    >>> state, tensors = split({"lr": 0.1, "moments": [torch.ones(2)]})
    >>> state
    {'lr': 0.1, 'moments': [TensorName(name='moments.0')]}
    >>> join(state, tensors)["moments"]
    [tensor([1., 1.])]
    """
    tensors: dict[str, Tensor] = {}

    def name(tensor: object, path: tree_codec.Path) -> object:
        if isinstance(tensor, Custom):
            return Custom(tensor.kind, map_leaves(name, tensor.value, path))
        if not isinstance(tensor, Tensor):
            return tensor
        plain = unique = ".".join(map(str, path)) or "tensor"
        count = 1
        while unique in tensors:  # {"a.b": ..., "a": {"b": ...}}
            count += 1
            unique = f"{plain}#{count}"
        tensors[unique] = tensor
        return TensorName(unique)

    return map_leaves(name, structure), tensors


def join(state: object, tensors: Mapping[str, Tensor]) -> Any:
    """Put the ``tensors`` that ``split`` took out back into ``state``.

    Raises:
        CheckpointError: ``state`` names a tensor that is not in ``tensors``.
    """

    def tensor(value: object, path: tree_codec.Path) -> object:
        if isinstance(value, Custom):
            return Custom(value.kind, map_leaves(tensor, value.value, path))
        if not isinstance(value, TensorName):
            return value
        if value.name not in tensors:
            raise CheckpointError(f"the state at {show(path)} names the tensor {value.name!r}, which does not exist")
        return tensors[value.name]

    return map_leaves(tensor, state)
