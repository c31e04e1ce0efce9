"""An unmodified torch optimizer's step, captured as a graph: gradients in, state updated in place."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from anabranch.errors import CaptureError
from anabranch.graph.dynamo.silence import silent
from anabranch.graph.graph import Graph
from anabranch.graph.trace.build import build
from anabranch.graph.trace.make_fx import TraceRecorder, TraceSource
from anabranch.graph.trace.optimizer_contents import Contents
from anabranch.graph.trace.unseen_hooks import refuse_hooks

__all__ = ["GroupNumbers", "LearningRates", "capture_update", "has_state"]


class LearningRates:
    """The optimizers' learning rates as tensors, so that a scheduler reaches a graph that was captured before.

    One float64 number per parameter group. ``refresh`` copies the scheduler's values; a learning rate that is already a
    tensor is used itself.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        if any("lr" not in group for group in self._groups):
            raise CaptureError("an optimizer has a parameter group without 'lr'; use engine='tape'")
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
        names_of_groups = [sorted(_without_tensors(group)) for group in self._groups]
        # All names, so that a missing one is noticed; at least two, so that an itemgetter gives a tuple.
        self._readers = [
            operator.itemgetter("lr", "initial_lr" if "initial_lr" in group else "lr", *names)
            for group, names in zip(self._groups, names_of_groups, strict=True)
        ]
        self._names = str(names_of_groups)  # whose hash Python keeps
        self._sizes = list(map(len, self._groups))
        self._all_plain = all(all(map(_is_plain, group.values())) for group in map(_without_tensors, self._groups))

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
        return [_numbers(read(group)) for read, group in zip(self._readers, self._groups, strict=True)]


def _without_tensors(group: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in group.items() if name not in ("params", "lr", "initial_lr")}


def _is_plain(value: object) -> bool:
    if type(value) is tuple:
        return all(map(_is_plain, value))
    return isinstance(value, (bool, int, float, complex, str, type(None)))


def _numbers(found: tuple[object, ...]) -> tuple[object, ...]:
    """Return the group without its learning rate, unless that is a tensor, which the graph is bound to, or of an odd
    type.
    """
    rate = found[0]
    if type(rate) in (float, int):
        return found[2:]
    return (*found[2:], id(rate) if isinstance(rate, Tensor) else type(rate))


def _hashable(value: object) -> object:
    """``value`` with copies of its containers; a tensor is an input of the graph, and is kept."""
    if isinstance(value, Tensor):
        return Tensor, id(value)
    if isinstance(value, Mapping):
        return dict, tuple((key, _hashable(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(_hashable, value))
    if isinstance(value, (set, frozenset)):
        return set, frozenset(map(_hashable, value))
    if type(value).__hash__ is None:
        return type(value), id(value)
    return value


def has_state(optimizers: Sequence[Optimizer], parameters: Sequence[Tensor]) -> bool:
    """Return True if the optimizers have stepped on all these parameters, so that all the state they keep exists."""
    wanted = set(map(id, parameters))
    return all(
        parameter in optimizer.state or _keeps_nothing(optimizer, group)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
        if id(parameter) in wanted
    )


def _keeps_nothing(optimizer: Optimizer, group: Mapping[str, object]) -> bool:
    return isinstance(optimizer, torch.optim.SGD) and group["momentum"] == 0


def capture_update(
    optimizers: Sequence[Optimizer], gradients: Mapping[str, Tensor], rates: LearningRates, names: Mapping[Tensor, str]
) -> Graph:
    """Return the graph of one step of ``optimizers`` on dense gradients.

    Args:
        optimizers: their state must exist already: step them once before.
        gradients: an example gradient for each parameter that has one, by the parameter's name.
        rates: holds the learning rates.
        names: the name of each parameter.

    Returns:
        A graph with an input ``<name>.grad`` for each gradient, and no outputs.
    """
    refuse_hooks({}, {}, optimizers)
    state: dict[int, TraceSource] = {}
    taken: set[str] = set()

    def add(name: str, tensor: Tensor) -> None:
        state.setdefault(id(tensor), TraceSource(name, tensor, state=True))

    def add_all(name: str, value: object) -> None:
        for tensor in _tensors_in(value):
            if id(tensor) not in state:
                while name in taken:
                    name += "_"
                taken.add(name)
                add(name, tensor)

    for index, optimizer in enumerate(optimizers):
        label = "optimizer" if len(optimizers) == 1 else f"optimizer.{index}"
        for position, group in enumerate(optimizer.param_groups):
            alone = len(optimizer.param_groups) == 1
            add(f"{label}.lr" if alone else f"{label}.lr.{position}", rates.of(group))
            for parameter in group["params"]:
                name = names.get(parameter)
                if name is None or name not in gradients:
                    continue
                add(name, parameter)
                for key, value in optimizer.state.get(parameter, {}).items():
                    add_all(f"{label}.{name}.{key}", value)
            for key, value in _without_tensors(group).items():
                add_all(f"{label}.{key}" if alone else f"{label}.{key}.{position}", value)
        for key, value in _own_attributes(optimizer).items():
            add_all(f"{label}.{key}", value)

    sources = [*(TraceSource(f"{name}.grad", gradient) for name, gradient in gradients.items()), *state.values()]

    def body(values: list[Tensor], recorder: TraceRecorder) -> Sequence[object]:
        recorder.phase = "update"
        traced = {id(source.value): value for source, value in zip(sources, values, strict=True)}
        for optimizer in optimizers:
            with torch.no_grad(), _swapped(optimizer, traced, gradients, rates, names):
                _step(optimizer)
        return []

    with silent():
        return build(body, sources, [], kinds={"": "optimizer"}, may_read=True)


def _step(optimizer: Optimizer) -> None:
    try:
        type(optimizer).step(optimizer)
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(
            f"{type(optimizer).__name__}.step does something that a graph cannot, such as branching on the number of "
            f"steps{_said(error)}"
        ) from error


def _said(error: Exception) -> str:
    """Return the error of the optimizer's own code, without that of PyTorch's tracer, which does not help a user."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    if isinstance(error, GuardOnDataDependentSymNode):
        return ""
    return f" ({type(error).__name__})"


@contextmanager
def _swapped(
    optimizer: Optimizer,
    traced: Mapping[int, Tensor],
    gradients: Mapping[str, Tensor],
    rates: LearningRates,
    names: Mapping[Tensor, str],
) -> Iterator[None]:
    """Let the optimizer work on traced parameters, gradients, state and learning rates until the block ends."""
    held = Contents([optimizer])
    groups, state = optimizer.param_groups, optimizer.state
    try:
        optimizer.state = defaultdict(dict)
        stand_ins = _StandIns(traced, [groups, *groups, state], [groups, *groups, optimizer.state])
        for group in groups:
            rate = traced[id(rates.of(group))]
            parameters = [parameter for parameter in group["params"] if names.get(parameter) in gradients]
            group.update({name: stand_ins.of(value) for name, value in _without_tensors(group).items()})
            group["lr"] = rate if group.get("fused") or isinstance(group["lr"], Tensor) else rate.item()
            group["params"] = [traced[id(parameter)] for parameter in parameters]
            for parameter, stand_in in zip(parameters, group["params"], strict=True):
                stand_in.grad = traced[id(gradients[names[parameter]])]
                for name, value in vars(parameter).items():  # such as p.lr_scale
                    setattr(stand_in, name, stand_ins.of(value))
                if parameter in state:
                    optimizer.state[stand_in] = {key: stand_ins.of(value) for key, value in state[parameter].items()}
        for key, value in state.items():
            if not isinstance(key, Tensor):
                optimizer.state[key] = stand_ins.of(value)
        vars(optimizer).update({name: stand_ins.of(value) for name, value in _own_attributes(optimizer).items()})
        known = frozenset(map(id, traced.values()))
        before, python = _state_of(optimizer, known), _in_python(optimizer, known)
        yield
        _refuse_changed(optimizer, python, _in_python(optimizer, known))
        _refuse_rebound(optimizer, before, _state_of(optimizer, known))
    finally:
        held.restore()


class _StandIns:
    """Copies of containers in which traced tensors replace the optimizer's; a shared container is copied once."""

    def __init__(self, traced: Mapping[int, Tensor], known: Sequence[object], instead: Sequence[object]) -> None:
        self._traced = traced
        self._copies: dict[int, object] = {id(old): new for old, new in zip(known, instead, strict=True)}

    def of(self, value: object) -> Any:
        """``value`` with tensors replaced."""
        if isinstance(value, Tensor):
            return self._traced.get(id(value), value)
        if type(value) not in (dict, list, tuple, set):
            return value
        if id(value) not in self._copies:
            self._copies[id(value)] = self._copied(value)
        return self._copies[id(value)]

    def _copied(self, value: Any) -> object:
        if type(value) is dict:
            return {self.of(key): self.of(item) for key, item in value.items()}
        return type(value)(map(self.of, value))


def _own_attributes(optimizer: Optimizer) -> dict[str, object]:
    """Return the optimizer's attributes besides its groups and its state; torch's optimizers have none."""
    if type(optimizer).__module__.startswith("torch."):
        return {}
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in ("state", "param_groups", "_opt_called") and not name.startswith("_optimizer_")
    }


def _tensors_in(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from _tensors_in(item)


def _in_python(optimizer: Optimizer, known: Collection[int]) -> dict[str, object]:
    """Return the optimizer's Python values besides its state: attributes, and numbers of its groups."""
    found = {name: _frozen(value, known) for name, value in _own_attributes(optimizer).items()}
    found |= {f"state[{k!r}]": _frozen(v, known) for k, v in optimizer.state.items() if not isinstance(k, Tensor)}
    for index, group in enumerate(optimizer.param_groups):
        found |= {f"param_groups[{index}][{k!r}]": _frozen(v, known) for k, v in _without_tensors(group).items()}
    return found


def _state_of(optimizer: Optimizer, known: Collection[int]) -> list[dict[str, object]]:
    return [
        {key: _frozen(value, known) for key, value in optimizer.state[parameter].items()}
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]


def _frozen(value: object, known: Collection[int]) -> object:
    """Return a comparable copy of ``value``, safe from later changes; ``known`` tensors may change in place."""
    if isinstance(value, Tensor):
        return id(value), None if id(value) in known else value._version
    if isinstance(value, Mapping):
        return {key: _frozen(item, known) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return type(value), [_frozen(item, known) for item in value]
    return value


def _refuse_changed(optimizer: Optimizer, before: Mapping[str, object], after: Mapping[str, object]) -> None:
    """Raise for Python values that a step changes: a replay would not. ``_swapped`` restores them."""
    changed = [name for name, value in after.items() if name not in before or before[name] != value]
    if changed:
        raise CaptureError(
            f"{type(optimizer).__name__}.step changes {changed[0]} in Python, which a graph would do only once"
        )


def _refuse_rebound(optimizer: Optimizer, before: list[dict[str, object]], after: list[dict[str, object]]) -> None:
    for old, new in zip(before, after, strict=True):
        changed = [key for key in new if key not in old or new[key] != old[key]]
        if changed:
            raise CaptureError(
                f"{type(optimizer).__name__} replaces its state {changed[0]!r} instead of changing it in place, so "
                "a graph, which binds its state once, would lose it"
            )
