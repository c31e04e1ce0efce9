"""An unmodified torch optimizer's step, captured as a graph: gradients in, state updated in place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from anabranch.errors import CaptureError
from anabranch.graph.dynamo.refusals import refuse_hooks
from anabranch.graph.graph import Graph
from anabranch.graph.step.bound_state import OptimizerGroups, numbers_of
from anabranch.graph.trace import TraceRecorder, TraceSource, build
from anabranch.tensors import flatten, map_structure


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


def check_captured(optimizers: Sequence[Optimizer]) -> None:
    """Raise ``CaptureError`` for an optimizer whose step is not captured: whose code may read anything."""
    for optimizer in optimizers:
        kind = type(optimizer)
        if kind.__module__.partition(".")[0] not in ("torch", "anabranch"):
            raise CaptureError(f"{kind.__name__} is not an optimizer of torch.optim")
        for group in optimizer.param_groups:
            if type(group["lr"]) not in (float, int) and not isinstance(group["lr"], Tensor):
                raise CaptureError(f"{kind.__name__} has a learning rate of type {type(group['lr']).__name__}")


def containers_of(optimizers: Iterable[Optimizer]) -> set[int]:
    """Return the ids of the optimizers, their groups and their states."""
    held: list[object] = []
    for optimizer in optimizers:
        held += [optimizer, optimizer.param_groups, *optimizer.param_groups, optimizer.state, *optimizer.state.values()]
    return set(map(id, held))


def capture_update(
    optimizers: Sequence[Optimizer],
    gradients: Mapping[str, Tensor],
    contents: OptimizerGroups,
    names: Mapping[Tensor, str],
) -> Graph:
    """Return the graph of one step of ``optimizers`` on dense gradients.

    Args:
        optimizers: their state must exist already: step them once before.
        gradients: an example gradient for each parameter that has one, by the parameter's name.
        contents: of their groups.
        names: the name of each parameter.

    Returns:
        A graph with an input ``<name>.grad`` for each gradient, and no outputs.
    """
    check_captured(optimizers)
    refuse_hooks({}, {}, optimizers)
    state: dict[int, TraceSource] = {}
    taken: set[str] = set()

    def add(name: str, value: object) -> None:
        for tensor in flatten(value)[0]:
            if isinstance(tensor, Tensor) and id(tensor) not in state:
                while name in taken:
                    name += "_"
                taken.add(name)
                state[id(tensor)] = TraceSource(name, tensor, "optimizer")

    for index, optimizer in enumerate(optimizers):
        label = "optimizer" if len(optimizers) == 1 else f"optimizer.{index}"
        for position, group in enumerate(optimizer.param_groups):
            alone = len(optimizer.param_groups) == 1
            add(f"{label}.lr" if alone else f"{label}.lr.{position}", contents.rate_of(group))
            for parameter in group["params"]:
                name = names.get(parameter)
                if name is None or name not in gradients:
                    continue
                add(name, parameter)
                for key, value in optimizer.state.get(parameter, {}).items():
                    add(f"{label}.{name}.{key}", value)
            for key, value in numbers_of(group).items():
                add(f"{label}.{key}" if alone else f"{label}.{key}.{position}", value)

    sources = [*(TraceSource(f"{name}.grad", gradient) for name, gradient in gradients.items()), *state.values()]

    def body(values: list[Tensor], recorder: TraceRecorder) -> Sequence[object]:
        recorder.phase = "update"
        traced = {id(source.value): value for source, value in zip(sources, values, strict=True)}
        for optimizer in optimizers:
            with torch.no_grad(), _swapped(optimizer, traced, gradients, contents, names):
                _step(optimizer)
        return []

    return build(body, sources, [], may_read=True)


def _step(optimizer: Optimizer) -> None:
    try:
        type(optimizer).step(optimizer)
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(
            f"{type(optimizer).__name__}.step does something that a graph cannot, such as branching on the number of "
            f"steps ({type(error).__name__})"
        ) from error


@contextmanager
def _swapped(
    optimizer: Optimizer,
    traced: Mapping[int, Tensor],
    gradients: Mapping[str, Tensor],
    contents: OptimizerGroups,
    names: Mapping[Tensor, str],
) -> Iterator[None]:
    """Let the optimizer work on traced parameters, gradients, state and learning rates until the block ends."""
    groups, state, before = optimizer.param_groups, optimizer.state, [dict(group) for group in optimizer.param_groups]
    try:
        optimizer.state = defaultdict(dict)
        for group in groups:
            rate = traced[id(contents.rate_of(group))]
            parameters = [parameter for parameter in group["params"] if names.get(parameter) in gradients]
            group.update({name: _stand_in(value, traced) for name, value in numbers_of(group).items()})
            group["lr"] = rate if group.get("fused") or isinstance(group["lr"], Tensor) else rate.item()
            group["params"] = [traced[id(parameter)] for parameter in parameters]
            for parameter, stand_in in zip(parameters, group["params"], strict=True):
                stand_in.grad = traced[id(gradients[names[parameter]])]
                if parameter in state:
                    kept = state[parameter].items()
                    optimizer.state[stand_in] = {key: _stand_in(value, traced) for key, value in kept}
        known = _state_of(optimizer)
        yield
        if _state_of(optimizer) != known:
            raise CaptureError(
                f"{type(optimizer).__name__} replaces its state instead of changing it in place, so a graph, which "
                "binds its state once, would lose it"
            )
    finally:
        optimizer.state = state
        for group, kept in zip(groups, before, strict=True):
            group.clear()
            group.update(kept)


def _stand_in(value: Any, traced: Mapping[int, Tensor]) -> Any:
    """``value`` with the traced tensors in place of the optimizer's."""
    return map_structure(lambda leaf: traced.get(id(leaf), leaf), value)


def _state_of(optimizer: Optimizer) -> list[dict[str, object]]:
    """Return the state by parameter, tensors by their identity."""
    return [
        {key: id(value) if isinstance(value, Tensor) else value for key, value in kept.items()}
        for kept in optimizer.state.values()
    ]
