"""The kind of a call's inputs, and the state of a model that decides what its code does with them.

A program is made for one kind and one state, and used again for all calls of both: shapes, dtypes and plain values of
the inputs, and of the model its modes and the plain values that its modules keep.
"""

from __future__ import annotations

import functools
import hashlib
import types
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from anabranch.autodiff.moved_parameter import Switch
from anabranch.autodiff.thread_modes import ThreadModes
from anabranch.pipeline.parts.part_program import is_plain
from anabranch.pipeline.parts.trees import Tree, take_apart

__all__ = ["Signature", "TensorFacts", "key_of", "seen_in", "signature_of", "state_of"]


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """Facts of a tensor that are known before it has values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class Signature:
    """The containers of ``(args, kwargs)``, and in them facts of tensors and plain values."""

    tree: Tree | None
    leaves: tuple[object, ...]


def signature_of(args: tuple[object, ...], kwargs: Mapping[str, object]) -> Signature:
    """Return the kind of these inputs.

    Raises:
        TypeError: one that is not a tensor, number, string or ``None``.
    """
    found: list[object] = []
    tree = take_apart((tuple(args), dict(sorted(kwargs.items()))), found)
    return Signature(tree, tuple(map(_facts, found)))


def _facts(leaf: object) -> object:
    if isinstance(leaf, Tensor):
        if leaf.layout is not torch.strided:
            raise TypeError(f"a {leaf.layout} tensor cannot be an input of a split model; make it dense")
        return TensorFacts(tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
    if is_plain(leaf) or isinstance(leaf, torch.dtype):
        return leaf
    raise TypeError(
        f"a {type(leaf).__name__} cannot be an input of a split model; pass tensors, numbers, strings and "
        "None, nested in dict, list, tuple and dataclass"
    )


def state_of(model: nn.Module, modes: ThreadModes) -> str:
    """Return a string that changes when the model's code may handle the same inputs differently."""
    text = [repr(modes)]
    seen: set[int] = set()
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in _KEPT_BY_TORCH:
                text.append(f"{path}.{name}={_seen(value, 0, seen)}")
            elif value and name.endswith("_hooks"):
                text.append(f"{path}.{name}={len(value)}")
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                shape = () if type(tensor) is Switch else tuple(tensor.shape)
                text.append(f"{path}.{name}:{shape}{tensor.dtype}{tensor.requires_grad}")
    return hashlib.blake2b("\n".join(text).encode(), digest_size=8).hexdigest()


def seen_in(value: object) -> str:
    """Return a string that changes when a plain value in ``value`` does."""
    return _seen(value, 0, set())


_KEPT_BY_TORCH = frozenset(vars(nn.Module())) - {"training"}
_DEEPEST = 4


def _seen(value: object, depth: int, seen: set[int]) -> str:
    if is_plain(value):
        return repr(value)
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)}{value.dtype}"
    if depth == _DEEPEST or isinstance(value, nn.Module):
        return type(value).__name__
    if isinstance(value, Mapping):
        return str([(str(key), _seen(item, depth + 1, seen)) for key, item in value.items()])
    if isinstance(value, list | tuple | set | frozenset):
        items = [_seen(item, depth + 1, seen) for item in value]
        return str(items if isinstance(value, list | tuple) else sorted(items))
    if isinstance(value, torch.dtype | torch.device):
        return str(value)
    if id(value) in seen:
        return "seen"
    seen.add(id(value))
    if isinstance(value, types.FunctionType):
        return value.__qualname__ + _seen(_of_function(value), depth + 1, seen)
    if isinstance(value, functools.partial):
        return _seen([value.func, value.args, value.keywords], depth + 1, seen)
    if isinstance(value, types.MethodType):
        return _seen([value.__func__, value.__self__], depth + 1, seen)
    if hasattr(value, "__qualname__"):
        return str(value.__qualname__)
    kept = {name: getattr(value, name, None) for name in getattr(type(value), "__slots__", ()) if name[:2] != "__"}
    kept |= getattr(value, "__dict__", {})
    return type(value).__name__ + _seen(kept, depth + 1, seen)


def _of_function(function: types.FunctionType) -> list[object]:
    """Return the identity of a function: its code, its defaults and its closure's values."""
    code = function.__code__
    constants = [constant for constant in code.co_consts if is_plain(constant)]
    closed = [cell.cell_contents for cell in function.__closure__ or () if cell != _EMPTY]
    return [code.co_code, code.co_names, constants, function.__defaults__, function.__kwdefaults__, closed]


_EMPTY = types.CellType()


def key_of(signature: Signature, state: str) -> str:
    """Return a short name for inputs of this kind to a model in this state."""
    typed = [(type(leaf).__name__, leaf) for leaf in signature.leaves]
    return hashlib.blake2b(f"{signature.tree}{typed}{state}".encode(), digest_size=8).hexdigest()
