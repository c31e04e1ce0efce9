"""The state that graphs are bound to, and a check before every step that it is unchanged, in loops of C.

Values that Python code reads are guarded by Dynamo. Checked here are the optimizers, which Dynamo does not read, the
memory of parameters, and hooks on gradients.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from anabranch.autodiff.hooks import hooks_registered
from anabranch.autodiff.moved_parameter import parameters_here
from anabranch.graph.dynamo.unseen_hooks import refuse_hooks


class BoundState:
    """The current parameters, optimizers and their state."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._model = model
        self._optimizers = list(optimizers)
        self.parameters = parameters_here(model)
        self._tensors = [tensor for tensor in self.parameters.values() if tensor.layout is torch.strided]
        self._forms = list(map(_form, self._tensors))
        self._note_places()
        self._lists = [optimizer.param_groups for optimizer in self._optimizers]
        self._groups = list(chain.from_iterable(self._lists))
        self._sizes, self._members = self._grouped()
        self._steps = [vars(optimizer).get("step") for optimizer in self._optimizers]
        self._handles = self._next_handle = -1
        self.note_optimizer_state()

    def note_optimizer_state(self) -> None:
        """Record the optimizers' state as it is now."""
        self._states = [optimizer.state for optimizer in self._optimizers]
        # Those that step outside the graph may keep something else than a dict.
        self._spaces = [kept for state in self._states for kept in state.values() if isinstance(kept, dict)]
        self._held = list(chain.from_iterable(map(_values, self._spaces)))

    def intact(self, *, kept_by_optimizers: bool = True) -> bool:
        """Return True if every object is identical to the recorded one.

        Args:
            kept_by_optimizers: check the optimizers' state too; false if they step outside the graph.

        Raises:
            CaptureError: a hook was set that a graph would not call.
        """
        if RemovableHandle.next_id != self._next_handle:
            self._refuse_new_hooks()
        same = operator.is_
        for optimizer, state, groups, step in zip(
            self._optimizers, self._states, self._lists, self._steps, strict=True
        ):
            if (
                (kept_by_optimizers and optimizer.state is not state)
                or optimizer.param_groups is not groups
                or vars(optimizer).get("step") is not step
            ):
                return False
        if kept_by_optimizers and not self._state_is_the_same():
            return False
        if len(self._groups) != sum(map(len, self._lists)):
            return False
        if not all(map(same, chain.from_iterable(self._lists), self._groups)):
            return False
        sizes, members = self._grouped()
        if sizes != self._sizes or not all(map(same, members, self._members)):
            return False
        return list(map(Tensor.data_ptr, self._tensors)) == self._places or self._moved_alike()

    def _state_is_the_same(self) -> bool:
        same = operator.is_
        if len(self._spaces) != sum(map(len, self._states)):
            return False
        if not all(map(same, chain.from_iterable(map(_values, self._states)), self._spaces)):
            return False
        state = list(chain.from_iterable(map(_values, self._spaces)))
        return len(state) == len(self._held) and all(map(same, state, self._held))

    def _refuse_new_hooks(self) -> None:
        """Check for hooks, if any was registered, anywhere, since the last check."""
        number = hooks_registered()
        if number != self._handles:
            modules = {module: name for name, module in self._model.named_modules()}
            refuse_hooks(modules, self.parameters, self._optimizers)
            self._handles = number
        self._next_handle = RemovableHandle.next_id

    def _grouped(self) -> tuple[list[int], list[Tensor]]:
        """Return the number of parameters in each group, and the parameters."""
        lists = [group["params"] for groups in self._lists for group in groups]
        return list(map(len, lists)), list(chain.from_iterable(lists))

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


class LearningRates:
    """The optimizers' learning rates as tensors, so that a scheduler reaches a graph that was captured before.

    One float64 number per parameter group. ``refresh`` copies the scheduler's values; a learning rate that is already a
    tensor is used itself.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._groups = [group for optimizer in optimizers for group in optimizer.param_groups if "lr" in group]
        self._tensors = [torch.zeros((), dtype=torch.float64, device="cpu") for _ in self._groups]
        self._values: list[object] = [None] * len(self._groups)
        self.refresh()

    def refresh(self) -> None:
        """Copy the rates that have changed."""
        for index, group in enumerate(self._groups):
            rate = group["lr"]
            if rate is not self._values[index]:
                self._values[index] = rate
                if type(rate) in (float, int):  # others step outside the graph
                    self._tensors[index].fill_(rate)

    def of(self, group: Mapping[str, object]) -> Tensor:
        """Return the tensor that holds the rate of ``group``."""
        rate = group["lr"]
        if isinstance(rate, Tensor):
            return rate
        return next(t for g, t in zip(self._groups, self._tensors, strict=True) if g is group)


class GroupNumbers:
    """All contents of parameter groups except parameters and learning rates: a change of one makes a new graph."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self.look_again()

    def look_again(self) -> None:
        """Read the groups again, in which a number may have changed its type, or a name may have been added."""
        names_of_groups = [sorted(without_tensors(group)) for group in self._groups]
        # All names, so that a missing one is noticed; at least two, so that an itemgetter gives a tuple.
        self._readers = [
            operator.itemgetter("lr", "initial_lr" if "initial_lr" in group else "lr", *names)
            for group, names in zip(self._groups, names_of_groups, strict=True)
        ]
        self._names = str(names_of_groups)  # whose hash Python keeps
        self._sizes = list(map(len, self._groups))
        values = [value for group in self._groups for value in without_tensors(group).values()]
        parts = (part for value in values for part in (value if type(value) is tuple else (value,)))
        self._all_plain = all(isinstance(part, _PLAIN) for part in parts)

    def current(self) -> tuple[object, ...]:
        """Return the current numbers, to be compared and hashed; lists in them may change later."""
        if list(map(len, self._groups)) != self._sizes:
            self.look_again()
        try:
            found = self._read()
        except KeyError:  # another name in its place
            self.look_again()
            found = self._read()
        return self._names, *(found if self._all_plain else map(_hashable, found))

    def _read(self) -> list[tuple[object, ...]]:
        found = []
        for read, group in zip(self._readers, self._groups, strict=True):
            rate, _, *numbers = read(group)
            # A learning rate counts as a tensor, which the graph is bound to, or by an odd type.
            if type(rate) not in (float, int):
                numbers.append(id(rate) if isinstance(rate, Tensor) else type(rate))
            found.append(tuple(numbers))
        return found


def without_tensors(group: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in group.items() if name not in ("params", "lr", "initial_lr")}


_PLAIN = (bool, int, float, complex, str, type(None))


def _hashable(value: object) -> object:
    """``value`` as its type and contents, or by identity: of tensors, and of what torch's optimizers do not read."""
    if isinstance(value, _PLAIN):
        return value
    return type(value), tuple(map(_hashable, value)) if isinstance(value, (list, tuple)) else id(value)


_values = dict.values


def _form(tensor: Tensor) -> object:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.layout
