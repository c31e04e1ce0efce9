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

from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass

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
        return [
            {
                name: value if type(value) in _PLAIN else copies.saved(value)
                for name, value in list(mapping.items())
                if name not in _MODULES_OWN
            }
            for mapping in self._mappings()
        ]

    @contextmanager
    def restored(self, values: StateValues) -> Iterator[None]:
        """Let the modules start from ``values`` until the block ends; they get back what they hold now."""
        left = [dict(mapping.items()) for mapping in self._mappings()]
        copies = _Copies()  # of the copies: another backward, with retain_graph, starts from them again
        for mapping, before in zip(self._mappings(), values, strict=True):
            for name in mapping.keys() - before.keys() - _MODULES_OWN:
                del mapping[name]
            for name, value in before.items():
                if isinstance(value, _Saved):
                    if not value.is_current(mapping.get(name)):
                        mapping[name] = copies.in_place_of(value)
                elif value is not _OTHER:
                    mapping[name] = value
        try:
            yield
        finally:
            for mapping, after in zip(self._mappings(), left, strict=True):
                for name in mapping.keys() - after.keys():
                    del mapping[name]
                mapping.update(after)


class _Copies:
    """Copies on write of tensors, each storage once: of tensors that share memory they share it, too."""

    def __init__(self) -> None:
        self._storages: dict[int, Tensor] = {}
        self._replacements: dict[int, Tensor] = {}

    def saved(self, value: object) -> object:
        """Return a tensor with its copy; ``_OTHER`` for everything that is not put back.

        Tensors with a graph are not: they are results of an earlier forward, which would be kept alive.
        """
        if not isinstance(value, Tensor) or value.requires_grad:
            return _OTHER
        copy = self._lazy(value)
        if copy is None:
            if isinstance(value, nn.Parameter):  # too large to copy; the comparison of outputs sees a change
                return _OTHER
            copy = value.detach().clone()
        return _Saved(value, copy)

    def in_place_of(self, saved: _Saved) -> Tensor:
        """Return a tensor with the saved values, the same for each place where the saved tensor is."""
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
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.device.type != "cpu" or tensor.layout != torch.strided:
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


def _address(tensor: Tensor) -> int:
    """Return the address of a tensor's memory; ``data_ptr()`` would take it for a write."""
    return torch._C._data_address(tensor)  # type: ignore[attr-defined, no-any-return]
