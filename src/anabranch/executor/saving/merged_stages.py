"""One checkpoint of a model that is in stages on several ranks: merging and splitting it.

A checkpoint does not depend on stages: it has the unsplit model's names. The ranks' states are stored row by row, where
a row is the ranks of one pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest
from typing import TypedDict, cast

from torch import Tensor, nn

from anabranch.errors import CheckpointError
from anabranch.pipeline import Pipe


class StagePart(TypedDict):
    """The part of the model's state on a stage after the first."""

    model: dict[str, Tensor]
    extra: dict[str, object]
    optimizers: dict[str, list[object]]
    modes: dict[str, bool]


class _OptimizerState(TypedDict):
    optimizer: str
    state: dict[str, object]
    own: dict[object, object]
    groups: list[dict[str, object]]


_NO_OPTIMIZER = _OptimizerState(optimizer="none", state={}, own={}, groups=[])


def names_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of ``model`` by their names in checkpoints."""
    if isinstance(model, Pipe):
        return {name: parameter for parameter, name in model.first_names().items()}
    return dict(model.named_parameters())


def rows_of(state: Mapping[str, object]) -> list[range]:
    """Return the ranks that saved, by pipeline; a worker without stages is its own pipeline."""
    workers, stages = cast(int, state["workers"]), cast(int, state.get("stages", 1))
    return [range(first, first + stages) for first in range(0, workers, stages)]


def merge_optimizer_states(states: Mapping[str, list[object]], other: Mapping[str, list[object]]) -> None:
    """Merge another stage's optimizer states into ``states``, by parameter and group.

    Raises:
        CheckpointError: the stages' optimizers are of different kinds or have different numbers of groups.
    """
    for name, entries in states.items():
        for index, pair in enumerate(zip_longest(entries, other[name], fillvalue=_NO_OPTIMIZER)):
            here, there = cast("tuple[_OptimizerState, _OptimizerState]", pair)
            shapes = [(one["optimizer"], len(one["groups"])) for one in (here, there)]
            if shapes[0] != shapes[1]:
                raise CheckpointError(
                    f"optimizer {index} of {name!r} differs between stages: {shapes[0]} and {shapes[1]} (kind, "
                    "groups); make the same optimizers on every rank, with empty groups where a stage has nothing"
                )
            here["state"] = {**there["state"], **here["state"]}
            here["own"] = {**there["own"], **here["own"]}
            for k, (group, more) in enumerate(zip(here["groups"], there["groups"], strict=True)):
                names = cast("list[str]", group["params"])
                new = [key for key in cast("list[str]", more["params"]) if key not in names]
                here["groups"][k] = {**(group if names else more), "params": names + new}


def restrict(saved: dict[str, object], model: nn.Module) -> dict[str, object]:
    """Return an optimizer's saved state, without the parameters that are on other ranks."""
    if not isinstance(model, Pipe) or not model.elsewhere:
        return saved
    here = names_of(model)
    entry = cast(_OptimizerState, saved)
    return {
        **saved,
        "state": {name: values for name, values in entry["state"].items() if name in here},
        "groups": [
            {**group, "params": [name for name in cast("list[str]", group["params"]) if name in here]}
            for group in entry["groups"]
        ],
    }
