"""The state of layers beside their trained parameters: a second forward starts from what the first started from.

::

    values = state.take()             the first forward may change them, and so may those of later microbatches
    ...
    with state.restored(values):      the second forward sees ``values`` and changes copies;
        ...                           afterwards the modules hold again what the first forwards have left

State is buffers, frozen parameters, and tensors and plain values in attributes. A copy takes memory only once one
side is written to, so frozen weights that no forward changes cost a microsecond, and stay the same objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeGuard, cast

import torch
from torch import Tensor, nn

__all__ = ["LayerState", "StateValues"]

StateValues = list[dict[str, object]]
"""For each mapping of names in the modules the values to put back, tensors as ``_Saved``, others ``_OTHER``."""

_PLAIN = frozenset({bool, int, float, complex, str, type(None)})
_OTHER = object()
_MODULES_OWN = frozenset(nn.Module().__dict__)
"""Attributes of every module: dicts of its parts and hooks, and its mode, which a forward leaves alone."""


@dataclass(frozen=True, slots=True)
class _Saved:
    tensor: Tensor
    copy: Tensor

    def is_current(self, value: object) -> bool:
        """Return True if ``value`` is the same tensor, unchanged: a write would have moved it away from its copy."""
        return value is self.tensor and _address(self.tensor) == _address(self.copy)


class LayerState:
    """The state of some modules.

    Args:
        modules: the layers and all modules inside.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list({id(module): module for module in modules}.values())

    def _mappings(self) -> Iterator[MutableMapping[str, object]]:
        for module in self._modules:
            yield module.__dict__
            yield module._buffers  # type: ignore[misc]
            yield module._parameters  # type: ignore[misc]

    def take(self) -> StateValues:
        """Return the current values, as copies on write."""
        copies = _Copies()
        return [{name: copies.saved(value) for name, value in names.items()} for names in self._names()]

    def _names(self) -> list[dict[str, object]]:
        return [
            {name: value for name, value in mapping.items() if name not in _MODULES_OWN} for mapping in self._mappings()
        ]

    @contextmanager
    def restored(self, values: StateValues) -> Iterator[None]:
        """Let the modules start from ``values`` until the block ends; they get back what they hold now."""
        left = self._names()
        copies = _Copies()  # of the copies: another backward, with retain_graph, starts from them again
        for mapping, before, now in zip(self._mappings(), values, left, strict=True):
            names = {name: value for name, value in before.items() if value is not _OTHER or name in now}
            _put(mapping, now, {name: copies.restored(value, now.get(name)) for name, value in names.items()})
        try:
            yield
        finally:
            for mapping, now, after in zip(self._mappings(), self._names(), left, strict=True):
                _put(mapping, now, after)


def _put(mapping: MutableMapping[str, object], now: Mapping[str, object], values: Mapping[str, object]) -> None:
    """Make the names in ``mapping``, which holds ``now``, those of ``values``."""
    for name in now.keys() - values.keys():
        del mapping[name]
    for name, value in values.items():
        if now.get(name, _OTHER) is not value:
            mapping[name] = value


class _Copies:
    """Copies on write of tensors, each storage once: of tensors that share memory they share it, too."""

    def __init__(self) -> None:
        self._storages: dict[int, Tensor] = {}
        self._replacements: dict[int, Tensor] = {}

    def saved(self, value: object) -> object:
        """Return a plain value, a tensor with its copy, or ``_OTHER`` for everything that is not put back.

        Tensors with a graph are not: they are results of an earlier forward, which would be kept alive.
        """
        if type(value) in _PLAIN:
            return value
        if type(value) is tuple:  # such as the state of an LSTM; what changes inside it is not seen
            return value if all(type(part) in _PLAIN or _is_constant(part) for part in value) else _OTHER
        if not _is_constant(value):
            return _OTHER
        copy = self._lazy(value)
        if copy is None:
            if isinstance(value, nn.Parameter):  # too large to copy; the comparison of outputs sees a change
                return _OTHER
            copy = value.detach().clone()
        return _Saved(value, copy)

    def restored(self, saved: object, now: object) -> object:
        """Return a saved value, of a changed tensor a copy, the same for each place where the tensor is."""
        if saved is _OTHER or (isinstance(saved, _Saved) and saved.is_current(now)):
            return now
        if not isinstance(saved, _Saved):
            return saved
        key = id(saved.tensor)
        if key not in self._replacements:
            copy = self._lazy(saved.copy)
            value = saved.copy.clone() if copy is None else copy
            if isinstance(saved.tensor, nn.Parameter):
                value = nn.Parameter(value, requires_grad=False)
                value.__dict__.update(saved.tensor.__dict__)
            self._replacements[key] = value
        return self._replacements[key]

    def _lazy(self, tensor: Tensor) -> Tensor | None:
        """Return a copy on write; ``None`` where PyTorch has none that can be trusted."""
        # On CUDA the late copy would run on the default stream, in no order with a stage's own one.
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return None
        storage = tensor.untyped_storage()._cdata
        first = self._storages.get(storage)
        if first is not None:
            alike = torch.empty(0, dtype=tensor.dtype, device="cpu")
            return alike.set_(first.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
        try:
            copy = self._storages[storage] = tensor._lazy_clone()
        except RuntimeError:  # memory that is not PyTorch's own: NumPy's, shared, or a mapped file's
            return None
        return copy


def _is_constant(value: object) -> TypeGuard[Tensor]:
    """Return True for a tensor without a graph; of subclasses nobody knows what a copy of them is."""
    return type(value) in (Tensor, nn.Parameter) and not cast(Tensor, value).requires_grad


def _address(tensor: Tensor) -> int:
    """Return the address of a tensor's memory; ``data_ptr()`` would take it for a write."""
    return torch._C._data_address(tensor)  # type: ignore[attr-defined, no-any-return]
