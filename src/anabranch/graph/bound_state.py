"""The state that graphs are bound to, and whether it still is that: looked at before every step, in loops of C."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

__all__ = ["BoundState"]

_MODULE_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = (
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
)
_OPTIMIZER_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_hooks_of = operator.attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")


class BoundState:
    """Modules, parameters, buffers, hooks and optimizer state as they are now."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        modules = list(model.modules())
        self._of_modules: list[dict[str, Any]] = [s for m in modules for s in (m._parameters, m._buffers, m._modules)]
        self._spaces = self._of_modules
        self._note_held()
        self._parameters = list(model.parameters())
        tensors = [*self._parameters, *model.buffers()]
        self._tensors = [tensor for tensor in tensors if tensor.layout is torch.strided]
        self._forms = list(map(_form, self._tensors))
        self._note_places()
        self._optimizers = list(optimizers)
        self._states = [optimizer.state for optimizer in optimizers]
        self._groups = self._grouped()
        self._hooks = [getattr(m, kind) for m in modules for kind in _MODULE_HOOKS]
        self._hooks += [getattr(global_hooks, kind) for kind in _GLOBAL_HOOKS]
        self._hooks += [getattr(optimizer, kind) for optimizer in optimizers for kind in _OPTIMIZER_HOOKS]
        self._hook_count = sum(map(len, self._hooks))
        self._tensor_hook_count = self._count_tensor_hooks()
        self._handles = RemovableHandle.next_id

    def note_optimizer_state(self) -> None:
        """The optimizers' state exists now and is bound too."""
        self._spaces = self._of_modules + [kept for state in self._states for kept in state.values()]
        self._note_held()

    def _note_held(self) -> None:
        self._held = list(chain.from_iterable(map(dict.values, self._spaces)))

    def intact(self) -> bool:
        """Whether everything is the very thing that it was."""
        same = operator.is_
        if len(self._held) != sum(map(len, self._spaces)):
            return False
        if not all(map(same, chain.from_iterable(map(dict.values, self._spaces)), self._held)):
            return False
        if not self._hooks_intact():
            return False
        for optimizer, state in zip(self._optimizers, self._states, strict=True):
            if optimizer.state is not state:
                return False
        if self._grouped() != self._groups:
            return False
        return list(map(Tensor.data_ptr, self._tensors)) == self._places or self._moved_alike()

    def _grouped(self) -> list[int]:
        """How many parameters each group holds; ``add_param_group`` changes it."""
        return [len(group["params"]) for optimizer in self._optimizers for group in optimizer.param_groups]

    def _moved_alike(self) -> bool:
        """Memory has moved (``parameter.data = ...``), and nothing else: generated code follows by itself."""
        if list(map(_form, self._tensors)) != self._forms:
            return False
        shared = self._shared
        self._note_places()
        return self._shared == shared

    def _note_places(self) -> None:
        self._places = list(map(Tensor.data_ptr, self._tensors))
        first: dict[int, int] = {}
        storages = [tensor.untyped_storage().data_ptr() for tensor in self._tensors]
        self._shared = [first.setdefault(place, index) for index, place in enumerate(storages)]

    def _hooks_intact(self) -> bool:
        # Each hook that anybody registers takes a number; without a new one, none can have come to where none was.
        number = RemovableHandle.next_id
        if number == self._handles and not self._hook_count and not self._tensor_hook_count:
            return True
        if sum(map(len, self._hooks)) != self._hook_count or self._count_tensor_hooks() != self._tensor_hook_count:
            return False
        self._handles = number
        return True

    def _count_tensor_hooks(self) -> int:
        return sum(len(hooks) for each in map(_hooks_of, self._parameters) for hooks in each if hooks)


def _form(tensor: Tensor) -> object:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.layout
