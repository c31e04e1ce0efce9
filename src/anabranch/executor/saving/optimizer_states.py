"""The state of optimizers and schedulers in a checkpoint.

An optimizer's is by the names of its parameters, so that their order and split may change: a checkpoint does not depend
on the stages of a ``Pipe``, but has the unsplit model's names.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import Enum
from functools import partial
from itertools import zip_longest
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, TypedDict

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from anabranch.autodiff.moved_parameter import MovedState, from_within
from anabranch.checkpoint.state import Custom
from anabranch.errors import CheckpointError
from anabranch.executor.steps import parameters_of
from anabranch.pipeline import Pipe
from anabranch.pipeline.pipe import PipeRanks
from anabranch.tensors.tree_codec import Path, map_leaves, show


class OptimizerState(TypedDict):
    """The state of one optimizer, or of the part of it on one stage.

    ``state`` is by parameter, ``own`` under keys that are no parameters: a key may be a parameter's name.
    """

    kind: str
    state: dict[str, dict[str, object]]
    own: dict[object, object]
    groups: list[dict[str, Any]]


def names_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of ``model`` by their names in checkpoints."""
    if isinstance(model, Pipe):
        return {name: parameter for parameter, name in PipeRanks(model).first_names().items()}
    return dict(model.named_parameters())


def parameter_names(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> list[list[str]]:
    """Return the names of each group's parameters.

    Raises:
        CheckpointError: the model has no such parameter any more, or another one under its name.
    """
    names = {parameter: name for name, parameter in parameters.items()}
    for parameter in parameters_of(optimizer):
        if parameter not in names:
            raise CheckpointError(
                f"{type(optimizer).__name__} holds a parameter of shape {tuple(parameter.shape)} that the model does "
                "not have under any name, by which checkpoints know it; remove it from the optimizer's param_groups, "
                "or put it into the model"
            )
    return [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]


def by_parameter_name(
    optimizer: Optimizer, names: list[list[str]], elsewhere: Mapping[Tensor, dict[str, object]]
) -> OptimizerState:
    """Return the optimizer's state by parameter name instead of torch's index, and its state ``elsewhere``."""
    with from_within():
        state = optimizer.state_dict()
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    name_of = dict(zip(numbers, (name for group in names for name in group), strict=True))
    here = {number: values for number, values in state["state"].items() if not isinstance(values, MovedState)}
    states = {name_of[number]: dict(values) for number, values in here.items() if number in name_of}
    for number, parameter in zip(numbers, parameters_of(optimizer), strict=True):
        if elsewhere.get(parameter):
            states[name_of[number]] = elsewhere[parameter]
    return OptimizerState(
        kind=type(optimizer).__qualname__,
        state=states,
        own={key: value for key, value in state["state"].items() if key not in name_of},
        groups=[
            {**{key: to_save(value) for key, value in group.items() if key != "params"}, "params": group_names}
            for group, group_names in zip(state["param_groups"], names, strict=True)
        ],
    )


def merge_stage(states: Mapping[str, list[OptimizerState]], other: Mapping[str, list[OptimizerState]]) -> None:
    """Merge another stage's optimizer states into ``states``, by parameter and group.

    Raises:
        CheckpointError: the stages' optimizers are of different kinds or have different numbers of groups.
    """
    none = OptimizerState(kind="none", state={}, own={}, groups=[])
    for name, entries in states.items():
        for index, (here, there) in enumerate(zip_longest(entries, other[name], fillvalue=none)):
            shapes = [(one["kind"], len(one["groups"])) for one in (here, there)]
            if shapes[0] != shapes[1]:
                raise CheckpointError(
                    f"optimizer {index} of {name!r} differs between stages: {shapes[0]} and {shapes[1]} (kind, "
                    "groups); make the same optimizers on every rank, with empty groups where a stage has nothing"
                )
            here["state"] = {**there["state"], **here["state"]}
            here["own"] = {**there["own"], **here["own"]}
            for k, (group, more) in enumerate(zip(here["groups"], there["groups"], strict=True)):
                new = [key for key in more["params"] if key not in group["params"]]
                here["groups"][k] = {**(group if group["params"] else more), "params": group["params"] + new}


def by_position(
    saved: OptimizerState, optimizer: Optimizer, names: list[list[str]], here: Collection[str] | None, what: str
) -> dict[str, Any]:
    """Return the inverse of ``by_parameter_name``; the groups may list their parameters in another order.

    Args:
        saved: of the whole model.
        optimizer: of this rank.
        names: as ``parameter_names`` says.
        here: the parameters on this rank, if others are elsewhere.
        what: the optimizer, for an error.
    """
    groups = [[name for name in group["params"] if here is None or name in here] for group in saved["groups"]]
    if [*map(sorted, groups)] != [*map(sorted, names)]:
        raise CheckpointError(f"{what} holds the parameter groups {names}, but the checkpoint has {groups}")
    position = {name: index for index, name in enumerate(name for group in names for name in group)}
    numbered = {position[name]: values for name, values in saved["state"].items() if name in position}
    return {
        "state": {**saved["own"], **numbered},
        "param_groups": [
            {
                **{key: _as_here(value, new.get(key), what) for key, value in group.items()},
                "params": [position[name] for name in group_names],
            }
            for group, new, group_names in zip(saved["groups"], optimizer.param_groups, names, strict=True)
        ],
    }


def _as_here(saved: object, here: object, what: str) -> object:
    """Return a group's value, a tensor on the device where the new group's is."""
    if isinstance(saved, Tensor) and isinstance(here, Tensor):
        return saved.to(here.device)
    return restored(saved, here, what, [])


def load_uncast(optimizer: Optimizer, plan: dict[str, Any]) -> None:
    """Load ``by_position``'s plan, each tensor of the state in the type in which it was saved.

    ``Optimizer.load_state_dict`` casts them to their parameter's type, such as the float32 master weights of a bfloat16
    model, and makes nonsense of strings.
    """
    optimizer.load_state_dict(plan)
    for position, parameter in enumerate(parameters_of(optimizer)):
        if position in plan["state"] and parameter in optimizer.state:
            optimizer.state[parameter] = _uncast(optimizer.state[parameter], plan["state"][position])


def _uncast(loaded: Any, saved: Any) -> Any:
    if isinstance(loaded, Tensor) and isinstance(saved, Tensor):
        return loaded if loaded.dtype is saved.dtype else saved.to(loaded.device)
    if isinstance(loaded, dict) and isinstance(saved, dict):
        return {key: _uncast(value, saved.get(key)) for key, value in loaded.items()}
    if isinstance(loaded, list | tuple) and type(loaded) is type(saved) and len(loaded) == len(saved):
        return type(loaded)(map(_uncast, loaded, saved))
    return saved if isinstance(saved, str) else loaded


# Values of the program's own classes. A checkpoint names no class that would be imported: an enum is restored into the
# class of its name that the new object's state has somewhere. A function is code, not state: the new object keeps the
# one that it has at that place. A scheduler is loaded into the one that is there.

_CODE = (FunctionType, BuiltinFunctionType, MethodType, partial, type)


def to_save(state: object, holders: tuple[LRScheduler, ...] = ()) -> object:
    """Return ``state``, of the last of ``holders``, with ``Custom`` in place of the program's own values.

    Raises:
        ValueError: a scheduler that holds itself, by others or not; names its path.
    """

    def leaf(value: object, path: Path) -> object:
        if isinstance(value, Enum):
            return Custom(f"enum {type(value).__qualname__}", to_save(value.value))
        if isinstance(value, LRScheduler):
            if value in holders:
                raise ValueError(
                    f"the state of a scheduler holds itself: {show(path)} is a {type(value).__qualname__} that is "
                    "around it; give it a state_dict() without it"
                )
            return Custom("scheduler", to_save(value.state_dict(), (*holders, value)))
        return Custom("function", None) if isinstance(value, _CODE) else value

    return map_leaves(leaf, state)


def restored(saved: object, here: object, what: str, within: list[tuple[LRScheduler, object]]) -> object:
    """Return the state that ``to_save`` was given, with the classes and functions of ``here``.

    Args:
        saved: the state of the object that was saved.
        here: the state of the new one.
        what: the object, for an error.
        within: gets the schedulers in ``here``, each with the state to load into it.

    Raises:
        CheckpointError: ``here`` has no such enum, function or scheduler.
    """
    enums: dict[str, type[Enum]] = {}

    def note(value: object, path: Path) -> object:
        if isinstance(value, Enum):
            enums[f"enum {type(value).__qualname__}"] = type(value)
        return value

    map_leaves(note, here)

    def leaf(value: object, path: Path) -> object:
        if not isinstance(value, Custom):
            return value
        there = _at(here, path)
        if value.kind == "function" and isinstance(there, _CODE):
            return there
        if value.kind == "scheduler" and isinstance(there, LRScheduler):
            within.append((there, restored(value.value, there.state_dict(), what, within)))
            return there
        try:
            return enums[value.kind](restored(value.value, None, what, within))
        except (KeyError, TypeError, ValueError):
            raise CheckpointError(
                f"{what} was saved with a value at {'.'.join(map(str, path))} that only the program can make "
                f"({value.kind}), but the new one's state has {there!r} there; make it as it was made when it was saved"
            ) from None

    return map_leaves(leaf, saved)


def _at(here: object, path: Path) -> object:
    for key in path:
        try:
            here = here[key]  # type: ignore[index]
        except (KeyError, IndexError, TypeError):
            return None
    return here
