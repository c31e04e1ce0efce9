"""An unmodified torch optimizer's step, captured as a graph: gradients in, state updated in place."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer

from anabranch.errors import CaptureError
from anabranch.graph.build import build
from anabranch.graph.graph import Graph
from anabranch.graph.hooks import refuse_hooks
from anabranch.graph.tracing import Recorder, Source

__all__ = ["GroupNumbers", "LearningRates", "capture_update", "freeze", "has_state"]


class LearningRates:
    """The optimizers' learning rates as tensors, so that a scheduler reaches a graph that was captured before.

    One float64 number a parameter group. ``refresh`` copies what the scheduler has set; a learning rate that is a
    tensor already is used itself.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self._tensors = [torch.zeros((), dtype=torch.float64) for _ in self._groups]
        self._values: list[object] = [None] * len(self._groups)

    def refresh(self) -> None:
        """Copies the rates that have changed."""
        for index, group in enumerate(self._groups):
            rate = group["lr"]
            if rate is not self._values[index]:
                self._values[index] = rate
                if not isinstance(rate, Tensor):
                    self._tensors[index].fill_(rate)

    def of(self, group: Mapping[str, object]) -> Tensor:
        """The tensor that holds the rate of ``group``."""
        rate = group["lr"]
        if isinstance(rate, Tensor):
            return rate
        return next(t for g, t in zip(self._groups, self._tensors, strict=True) if g is group)


class GroupNumbers:
    """All that parameter groups hold besides parameters and learning rates: a change of it makes a new graph."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self._names = [sorted(set(group) - {"params", "lr", "initial_lr"}) for group in self._groups]
        # Two names at least, so that an itemgetter gives a tuple.
        self._readers = [operator.itemgetter("lr", "lr", *names) for names in self._names]

    def current(self) -> tuple[object, ...]:
        """The numbers now."""
        return tuple([_numbers(read(group)) for read, group in zip(self._readers, self._groups, strict=True)])


def _numbers(found: tuple[object, ...]) -> tuple[object, ...]:
    """All but the learning rate, unless that is a tensor, which the graph is bound to."""
    rate = found[0]
    return (*found[2:], id(rate)) if isinstance(rate, Tensor) else found[2:]


def has_state(optimizers: Sequence[Optimizer], parameters: Sequence[Tensor]) -> bool:
    """Whether the optimizers have stepped on all these parameters, so that whatever state they keep exists."""
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
    """The graph of one step of ``optimizers`` on dense gradients.

    Args:
        optimizers: their state must exist already: step them once before.
        gradients: an example gradient for each parameter that has one, by the parameter's name.
        rates: holds the learning rates.
        names: the name of each parameter.

    Returns:
        A graph with an input ``<name>.grad`` for each gradient, and no outputs.
    """
    refuse_hooks({}, {}, optimizers)
    state: dict[int, Source] = {}

    def add(name: str, tensor: Tensor) -> None:
        state.setdefault(id(tensor), Source(name, tensor, state=True))

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
                    if isinstance(value, Tensor):
                        add(f"{label}.{name}.{key}", value)

    sources = [*(Source(f"{name}.grad", gradient) for name, gradient in gradients.items()), *state.values()]

    def body(values: list[Tensor], recorder: Recorder) -> Sequence[object]:
        recorder.phase = "update"
        traced = {id(source.value): value for source, value in zip(sources, values, strict=True)}
        for optimizer in optimizers:
            with torch.no_grad(), _swapped(optimizer, traced, gradients, rates, names):
                _step(optimizer)
        return []

    return build(body, sources, [], kinds={"": "optimizer"}, may_read=True)


def _step(optimizer: Optimizer) -> None:
    try:
        type(optimizer).step(optimizer)
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(
            f"{type(optimizer).__name__}.step does what a graph cannot, such as to branch on the number of steps "
            f"({type(error).__name__}); use another optimizer, or engine='tape'"
        ) from error


@contextmanager
def _swapped(
    optimizer: Optimizer,
    traced: Mapping[int, Tensor],
    gradients: Mapping[str, Tensor],
    rates: LearningRates,
    names: Mapping[Tensor, str],
) -> Iterator[None]:
    """The optimizer working on traced parameters, gradients, state and learning rates until the block ends."""
    groups = optimizer.param_groups
    kept = [{name: _kept(value) for name, value in group.items()} for group in groups]
    state = optimizer.state
    own = {name: _kept(value) for name, value in vars(optimizer).items()}
    own["param_groups"] = groups
    try:
        optimizer.state = defaultdict(dict)
        for group in groups:
            rate = traced[id(rates.of(group))]
            group["lr"] = rate if group.get("fused") or isinstance(group["lr"], Tensor) else rate.item()
            parameters = [parameter for parameter in group["params"] if names.get(parameter) in gradients]
            group["params"] = [traced[id(parameter)] for parameter in parameters]
            for parameter, stand_in in zip(parameters, group["params"], strict=True):
                stand_in.grad = traced[id(gradients[names[parameter]])]
                if parameter in state:
                    optimizer.state[stand_in] = {
                        key: traced.get(id(value), value) for key, value in state[parameter].items()
                    }
        before = [dict(optimizer.state[p]) for group in groups for p in group["params"]]
        attributes, numbers = _in_python(optimizer)
        yield
        _refuse_changed(optimizer, attributes, numbers)
        after = [dict(optimizer.state[p]) for group in groups for p in group["params"]]
        _refuse_rebound(optimizer, before, after)
    finally:
        for name in vars(optimizer).keys() - own.keys():
            delattr(optimizer, name)
        vars(optimizer).update(own)
        optimizer.state = state
        for group, original in zip(groups, kept, strict=True):
            group.clear()
            group.update(original)


def _kept(value: object) -> object:
    """``value``, containers copied, so that what a step does to them can be put back."""
    if type(value) is dict:
        return {key: _kept(item) for key, item in value.items()}
    if type(value) is list:
        return [_kept(item) for item in value]
    return set(value) if type(value) is set else value


def _in_python(optimizer: Optimizer) -> tuple[dict[str, object], list[object]]:
    """What the optimizer keeps in Python beside its state: attributes (torch's own keep nothing there), numbers."""
    own = not type(optimizer).__module__.startswith("torch.")
    attributes = {
        name: freeze(value)
        for name, value in vars(optimizer).items()
        if own and name not in ("state", "param_groups", "_opt_called") and not name.startswith("_optimizer_")
    }
    return attributes, [freeze({**group, "params": None, "lr": None}) for group in optimizer.param_groups]


def freeze(value: object) -> object:
    """What of ``value`` can be compared later, whoever changes it meanwhile."""
    if isinstance(value, Tensor):
        return id(value), value._version
    if isinstance(value, Mapping):
        return {key: freeze(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return type(value), [freeze(item) for item in value]
    return value


def _refuse_changed(optimizer: Optimizer, attributes: Mapping[str, object], numbers: Sequence[object]) -> None:
    """Raises for Python values that a step changes: a replay would not. ``_swapped`` puts them back."""
    attributes_now, numbers_now = _in_python(optimizer)
    changed = [name for name, value in attributes_now.items() if attributes.get(name) != value]
    changed += [f"param_groups[{i}]" for i, (a, b) in enumerate(zip(numbers, numbers_now, strict=True)) if a != b]
    if changed:
        raise CaptureError(
            f"{type(optimizer).__name__}.step changes {changed[0]} in Python, which a graph would do once and for all; "
            "keep it in a tensor, or use engine='tape'"
        )


def _refuse_rebound(optimizer: Optimizer, before: list[dict[str, object]], after: list[dict[str, object]]) -> None:
    for old, new in zip(before, after, strict=True):
        changed = [key for key in new if new[key] is not old.get(key)]
        if changed:
            raise CaptureError(
                f"{type(optimizer).__name__} replaces its state {changed[0]!r} instead of changing it in place, which "
                "a graph whose state is bound once would lose; use engine='tape'"
            )
