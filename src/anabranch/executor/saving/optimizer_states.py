"""An optimizer's state in a checkpoint, by the names of its parameters, so that their order and split may change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

from torch import Tensor
from torch.optim import Optimizer

from anabranch.autodiff.moved_parameter import MovedState, from_within
from anabranch.errors import CheckpointError
from anabranch.executor.saving.program_values import restored, to_save
from anabranch.executor.steps import parameters_of


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
) -> dict[str, object]:
    """Return the optimizer's state by parameter name instead of torch's index, and its state ``elsewhere``.

    State under keys of the optimizer's own, which are no parameters, is kept apart: a key may be a parameter's name.
    """
    with from_within():
        state = optimizer.state_dict()
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    name_of = dict(zip(numbers, (name for group in names for name in group), strict=True))
    here = {number: values for number, values in state["state"].items() if not isinstance(values, MovedState)}
    states = {name_of[number]: dict(values) for number, values in here.items() if number in name_of}
    for number, parameter in zip(numbers, parameters_of(optimizer), strict=True):
        if elsewhere.get(parameter):
            states[name_of[number]] = elsewhere[parameter]
    return {
        "optimizer": type(optimizer).__qualname__,
        "state": states,
        "own": {key: value for key, value in state["state"].items() if key not in name_of},
        "groups": [
            {**{key: to_save(value) for key, value in group.items() if key != "params"}, "params": group_names}
            for group, group_names in zip(state["param_groups"], names, strict=True)
        ],
    }


def by_position(saved: dict[str, object], optimizer: Optimizer, names: list[list[str]], what: str) -> dict[str, object]:
    """Return the inverse of ``by_parameter_name``; the groups may list their parameters in another order."""
    if saved["optimizer"] != type(optimizer).__qualname__:
        raise CheckpointError(
            f"{what} is {type(optimizer).__qualname__}, but the checkpoint has {saved['optimizer']}; load with the "
            "optimizer that was saved"
        )
    groups = cast("list[dict[str, object]]", saved["groups"])
    if [sorted(cast("Iterable[str]", group["params"])) for group in groups] != [sorted(group) for group in names]:
        raise CheckpointError(
            f"{what} holds the parameter groups {names}, but the checkpoint has {[group['params'] for group in groups]}"
        )
    position = {name: index for index, name in enumerate(name for group in names for name in group)}
    state = cast("dict[str, dict[str, object]]", saved["state"])
    own = cast("dict[object, object]", saved.get("own", {}))  # which older checkpoints do not have
    numbered: dict[object, object] = {position[name]: values for name, values in state.items()}
    return {
        "state": own | numbered,
        "param_groups": [
            {
                **{key: _as_here(value, here.get(key), what) for key, value in group.items()},
                "params": [position[name] for name in group_names],
            }
            for group, here, group_names in zip(groups, optimizer.param_groups, names, strict=True)
        ],
    }


def _as_here(saved: object, here: object, what: str) -> object:
    """Return a group's value, a tensor on the device where the new group's is."""
    if isinstance(saved, Tensor) and isinstance(here, Tensor):
        return saved.to(here.device)
    return restored(saved, here, what, [])


def load_uncast(optimizer: Optimizer, plan: dict[str, object]) -> None:
    """Load ``by_position``'s plan, each tensor of the state in the type in which it was saved.

    ``Optimizer.load_state_dict`` casts them to their parameter's type, such as the float32 master weights of a bfloat16
    model, and makes nonsense of strings.
    """
    optimizer.load_state_dict(plan)
    saved = cast("dict[int, object]", plan["state"])
    for position, parameter in enumerate(parameters_of(optimizer)):
        if position in saved and parameter in optimizer.state:
            optimizer.state[parameter] = _uncast(optimizer.state[parameter], saved[position])


def _uncast(loaded: Any, saved: Any) -> Any:
    if isinstance(loaded, Tensor) and isinstance(saved, Tensor):
        return loaded if loaded.dtype is saved.dtype else saved.to(loaded.device)
    if isinstance(loaded, dict) and isinstance(saved, dict):
        return {key: _uncast(value, saved.get(key)) for key, value in loaded.items()}
    if isinstance(loaded, list | tuple) and type(loaded) is type(saved) and len(loaded) == len(saved):
        return type(loaded)(map(_uncast, loaded, saved))
    return saved if isinstance(saved, str) else loaded
