"""The state that graphs are bound to, and a check before every step that it is unchanged, in loops of C.

Values that Python code reads are guarded by Dynamo. Checked here are the optimizers, which Dynamo does not read, the
memory of parameters, and hooks on gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from anabranch.autodiff.hooks import hooks_registered
from anabranch.autodiff.moved_parameter import parameters_here
from anabranch.graph.dynamo.refusals import refuse_hooks
from anabranch.tensors.structures import identical


class BoundState:
    """The current parameters, optimizers and their state."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._model = model
        self._optimizers = list(optimizers)
        self.parameters = parameters_here(model)
        self._tensors = [tensor for tensor in self.parameters.values() if tensor.layout is torch.strided]
        self._forms = list(map(_form, self._tensors))
        self._note_places()
        self._groups, self._state = self._now()
        self._handles = self._next_handle = -1

    def note_optimizer_state(self) -> None:
        """Record the optimizers' state as it is now."""
        self._state = self._now()[1]

    def intact(self, *, optimizers: bool = True, kept_by_optimizers: bool = True) -> bool:
        """Return True if every object is identical to the recorded one.

        Args:
            optimizers: check the optimizers, too.
            kept_by_optimizers: and their state; false if they step outside the graph.

        Raises:
            CaptureError: a hook was set that a graph would not call.
        """
        if RemovableHandle.next_id != self._next_handle:
            self._refuse_new_hooks()
        if optimizers:
            groups, state = self._now()
            if not identical(groups, self._groups) or (kept_by_optimizers and not identical(state, self._state)):
                return False
        return list(map(Tensor.data_ptr, self._tensors)) == self._places or self._moved_alike()

    def _now(self) -> tuple[list[object], list[object]]:
        """Return the optimizers' groups with their parameters, and their state; each container before its items."""
        groups: list[object] = []
        state: list[object] = []
        for optimizer in self._optimizers:
            groups += (optimizer.param_groups, vars(optimizer).get("step"))
            for group in optimizer.param_groups:
                groups += (group, *group["params"])
            state += (optimizer.state, *optimizer.state.values())
            with suppress(TypeError):  # those that step outside the graph may keep something else than dicts
                state += chain.from_iterable(map(_values, optimizer.state.values()))
        return groups, state

    def _refuse_new_hooks(self) -> None:
        """Check for hooks, if any was registered, anywhere, since the last check."""
        number = hooks_registered()
        if number != self._handles:
            modules = {module: name for name, module in self._model.named_modules()}
            refuse_hooks(modules, self.parameters, self._optimizers)
            self._handles = number
        self._next_handle = RemovableHandle.next_id

    def _moved_alike(self) -> bool:
        """Return True if only memory has moved (``parameter.data = ...``), which generated code follows."""
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


class OptimizerGroups:
    """The contents of the optimizers' parameter groups beside parameters: learning rates, and other numbers.

    A rate that is a number is copied into a float64 tensor, so that a scheduler reaches a graph that was captured
    before; one that is a tensor is used itself. A change of another number makes a new graph.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self._rates = [torch.zeros((), dtype=torch.float64, device="cpu") for _ in self._groups]
        self._names: list[object] = []
        self._values: list[object] = []
        self._numbers: tuple[object, ...] = ()
        self._all_plain = False

    def read(self) -> tuple[object, ...]:
        """Copy the rates, and return the other numbers as they are now."""
        names: list[object] = list(chain.from_iterable(self._groups))
        values: list[object] = list(chain.from_iterable(map(_values, self._groups)))
        if not self._all_plain or names != self._names or not identical(values, self._values):
            for group, tensor in zip(self._groups, self._rates, strict=True):
                if type(group.get("lr")) in (float, int):  # others step outside the graph
                    tensor.fill_(group["lr"])
            numbers = [pair for group in self._groups for pair in numbers_of(group).items()]
            parts = (part for _, value in numbers for part in (value if type(value) is tuple else (value,)))
            self._names, self._values, self._all_plain = names, values, all(isinstance(part, _PLAIN) for part in parts)
            # A learning rate counts as a tensor, which the graph is bound to, or by an odd type.
            rates = [group.get("lr") for group in self._groups if type(group.get("lr")) not in (float, int)]
            odd = (id(rate) if isinstance(rate, Tensor) else type(rate) for rate in rates)
            self._numbers = (*((name, _hashable(value)) for name, value in numbers), *odd)
        return self._numbers

    def rate_of(self, group: Mapping[str, object]) -> Tensor:
        """Return the tensor that holds the rate of ``group``."""
        rate = group["lr"]
        if isinstance(rate, Tensor):
            return rate
        return next(t for g, t in zip(self._groups, self._rates, strict=True) if g is group)


def numbers_of(group: Mapping[str, object]) -> dict[str, object]:
    """Return what a group has beside parameters, their names, and learning rates."""
    beside = ("params", "param_names", "lr", "initial_lr")
    return {name: value for name, value in group.items() if name not in beside}


_PLAIN = (bool, int, float, complex, str, type(None))


def _hashable(value: object) -> object:
    """``value`` as its type and contents, or by identity: of tensors, and of what torch's optimizers do not read."""
    if isinstance(value, _PLAIN):
        return value
    return type(value), tuple(map(_hashable, value)) if isinstance(value, (list, tuple)) else id(value)


_values = dict.values


def _form(tensor: Tensor) -> object:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.layout
