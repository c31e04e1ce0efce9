"""The state of layers beside their trained parameters: a second forward changes it no second time.

::

    values = state.take()             the first forward may change them, and so may those of later microbatches
    ...
    with state.restored(values):      the second forward sees ``values`` and changes copies;
        ...                           afterwards the modules hold again what the first forwards have left

    with state.put_back():            for whoever has kept no values: the forward starts from what there is, and is
        ...                           undone afterwards, in the same tensors

State is buffers, frozen parameters, and tensors and plain values in attributes, or in short lists and dicts there. A
copy takes memory only once one side is written to, so frozen weights that no forward changes cost a microsecond, and
stay the same objects.
"""

from __future__ import annotations

import threading
from collections.abc import Container, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import getitem
from typing import Any, Literal, TypeAlias, TypeGuard, cast

import torch
from torch import Tensor, nn

StateValues = list[object]
"""To put back in each place: a value, or a tensor or list as ``_Saved...``; ``_OTHER`` for nothing, ``_MISSING`` to
delete it."""

_Kind: TypeAlias = Literal[0, 1] | None
"""Of places: 0 in attributes, 1 of a parameter or buffer, ``None`` of a norm's statistics."""
_PLAIN = frozenset({bool, int, float, complex, str, type(None)})
_TENSORS = frozenset({Tensor, nn.Parameter})
_OTHER, _MISSING = object(), object()
_MOST_ITEMS = 64  # of what a layer counts or scales by; a vocabulary would be copied for each microbatch
_cloning = threading.Lock()
"""Two clones at once, of a weight that stages on two threads share, tear its memory's bookkeeping in PyTorch."""
_MODULES_OWN = frozenset(nn.Module().__dict__)
"""Attributes of every module: dicts of its parts and hooks, and its mode, which a forward leaves alone."""


@dataclass(frozen=True, slots=True)
class _Saved:
    tensor: Tensor
    copy: Tensor

    def is_current(self, value: object) -> bool:
        """Return True if ``value`` is the same tensor, unchanged: a write would have moved it away from its copy."""
        return value is self.tensor and _address(self.tensor) == _address(self.copy)


@dataclass(frozen=True, slots=True)
class _SavedItems:
    container: list[object] | dict[object, object]
    items: dict[object, object]


class LayerState:
    """The state of some modules.

    Args:
        modules: the layers and all modules inside.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = modules
        self._mappings: list[tuple[MutableMapping[str, Any], _Kind]] = []
        self._all: list[MutableMapping[str, Any]] = []
        self._lengths: list[int] = []
        # Of each place: where it is, its name and its kind. Names are added at the end, as they appear.
        self._holders: list[MutableMapping[str, Any]] = []
        self._names: list[str] = []
        self._kinds: list[_Kind] = []

    def take(self) -> StateValues:
        """Return the current values, as copies on write."""
        copies = _Copies()
        return [copies.saved(value) for value in self._now()]

    def _now(self) -> list[object]:
        if not self._mappings:
            for module in dict.fromkeys(self._modules):
                buffers: _Kind = None if isinstance(module, nn.modules.batchnorm._NormBase) else 1
                self._mappings += [(module.__dict__, 0), (module._buffers, buffers), (module._parameters, 1)]
            self._all = [mapping for mapping, _ in self._mappings]
        lengths = list(map(len, self._all))
        if lengths != self._lengths:
            known = set(zip(map(id, self._holders), self._names, strict=True))
            self._lengths = lengths
            for mapping, kind in self._mappings:
                for name in list(mapping.keys()):
                    if name not in _MODULES_OWN and (id(mapping), name) not in known:
                        self._holders.append(mapping)
                        self._names.append(name)
                        self._kinds.append(kind)
        try:
            return list(map(getitem, self._holders, self._names))
        except KeyError:
            # Not by get(), which TorchScript's mappings do not have.
            places = zip(self._holders, self._names, strict=True)
            return [mapping[name] if name in mapping else _MISSING for mapping, name in places]  # noqa: SIM401

    @contextmanager
    def restored(self, values: StateValues) -> Iterator[None]:
        """Let the modules start from ``values`` until the block ends; they get back what they hold now."""
        left = self._now()
        copies = _Copies()  # of the copies: another backward, with retain_graph, starts from them again
        before = [*values, *[_MISSING] * (len(left) - len(values))]
        self._put(left, [copies.restored(value, now) for value, now in zip(before, left, strict=True)])
        try:
            yield
        finally:
            now = self._now()
            self._put(now, [*left, *[_MISSING] * (len(now) - len(left))])

    @contextmanager
    def put_back(self, *, trained: Container[int] = (), if_it_fails: bool = False) -> Iterator[None]:
        """Undo afterwards what the block changes, in the same tensors; or only ``if_it_fails``.

        Args:
            trained: the places in ``marks`` of parameters that forwards write, although they are trained.
            if_it_fails: leave what a block without an exception has changed.
        """
        before, copies = self._now(), _Copies(on_cuda=True)
        saved = [
            copies.saved(value, trained=place in trained)
            for place, value in enumerate(before)
            if type(value) in _TENSORS and (not value.requires_grad or place in trained)  # type: ignore[attr-defined]
        ]
        failed = True
        try:
            yield
            failed = False
        finally:
            if failed or not if_it_fails:
                for one in saved:
                    if isinstance(one, _Saved) and not one.is_current(one.tensor):
                        with torch.no_grad():
                            one.tensor.copy_(one.copy)
                now = self._now()
                self._put(now, [*before, *[_MISSING] * (len(now) - len(before))])

    def marks(self) -> list[object]:
        """Return for each place what changes when it does, except through ``.data``: a plain value, a version.

        Not a norm's statistics, which every forward in train mode moves, and no output in train mode shows; nor that
        an attribute holds another tensor, which may be a result kept for a look.
        """
        marks: list[object] = []
        for value, kind in zip(self._now(), self._kinds, strict=True):
            mark: object = None
            if type(value) in _PLAIN:
                mark = value
            elif kind is not None and type(value) in _TENSORS and not value.is_inference():  # type: ignore[attr-defined]
                mark = id(value) * kind, value._version  # type: ignore[attr-defined]
            marks.append(mark)
        return marks

    def _put(self, now: Sequence[object], values: Sequence[object]) -> None:
        for mapping, name, old, new in zip(self._holders, self._names, now, values, strict=True):
            if new is _MISSING and old is not _MISSING:
                del mapping[name]
            elif new is not old:
                mapping[name] = new


class _Copies:
    """Copies on write of tensors, each storage once: of tensors that share memory they share it, too."""

    def __init__(self, *, on_cuda: bool = False) -> None:
        self._on_cuda = on_cuda
        self._storages: dict[int, Tensor] = {}
        self._replacements: dict[int, object] = {}

    def saved(self, value: object, *, trained: bool = False) -> object:
        """Return a plain value, a tensor with its copy, or ``_OTHER`` for everything that is not put back.

        Tensors with a graph are not: they are results of an earlier forward, which would be kept alive.
        """
        if type(value) in _PLAIN or value is _MISSING:
            return value
        if type(value) is tuple:  # such as the state of an LSTM; what changes inside it is not seen
            return value if all(type(part) in _PLAIN or _is_constant(part) for part in value) else _OTHER
        if (type(value) is list or type(value) is dict) and len(value) <= _MOST_ITEMS:
            pairs = value.items() if type(value) is dict else enumerate(value)
            items = {key: self.saved(item) for key, item in pairs}
            return _OTHER if any(item is _OTHER for item in items.values()) else _SavedItems(value, items)
        if not _is_constant(value, trained=trained):
            return _OTHER
        copy = self._lazy(value.detach())
        if copy is None:
            # A frozen one is too large to copy; the comparison of outputs sees a change.
            if isinstance(value, nn.Parameter) and not trained:
                return _OTHER
            copy = value.detach().clone()
        return _Saved(value, copy)

    def restored(self, saved: object, now: object) -> object:
        """Return a saved value, of a changed tensor a copy, the same for each place where the tensor is."""
        if saved is now or saved is _OTHER:
            return now
        if isinstance(saved, _SavedItems):  # a copy in any case, because the second forward may change it, too
            key = id(saved.container)
            if key not in self._replacements:
                items = {name: self.restored(part, getattr(part, "tensor", None)) for name, part in saved.items.items()}
                self._replacements[key] = items if isinstance(saved.container, dict) else list(items.values())
            return self._replacements[key]
        if not isinstance(saved, _Saved):
            return saved
        if saved.is_current(now):
            return now
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
        storage = tensor.untyped_storage()._cdata
        first = self._storages.get(storage)
        if first is not None:
            alike = torch.empty(0, dtype=tensor.dtype, device="cpu")
            return alike.set_(first.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
        copy = lazy_clone(tensor, on_cuda=self._on_cuda)
        if copy is not None:
            self._storages[storage] = copy
        return copy


def lazy_clone(tensor: Tensor, *, on_cuda: bool = False) -> Tensor | None:
    """Return a copy that takes memory once one side is written to; ``None`` where PyTorch has none to be trusted.

    Not of a caller's batch: a NumPy array that shares its memory would no longer follow it. ``on_cuda`` is for those
    who run on the default stream: the late copy runs there, in no order with a stage's own.
    """
    if tensor.is_quantized or (tensor.device.type != "cpu" and not on_cuda):  # quantized: a segmentation fault
        return None
    try:
        with _cloning:
            return tensor._lazy_clone()
    except RuntimeError:  # memory that is not PyTorch's own (NumPy's, shared, a mapped file's), or another layout
        return None


def _is_constant(value: object, *, trained: bool = False) -> TypeGuard[Tensor]:
    """Return True for a dense tensor without a graph; of subclasses nobody knows what a copy of them is."""
    if type(value) not in _TENSORS:
        return False
    tensor = cast(Tensor, value)
    return (trained or not tensor.requires_grad) and tensor.layout == torch.strided


def _address(tensor: Tensor) -> int:
    """Return the address of a tensor's memory; ``data_ptr()`` would take it for a write."""
    return torch._C._data_address(tensor)  # type: ignore[attr-defined, no-any-return]
