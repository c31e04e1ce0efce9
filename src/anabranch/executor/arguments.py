"""Checks the arguments of ``Executor``, before anything is started."""

from __future__ import annotations

import os
from collections.abc import Mapping
from numbers import Integral
from pathlib import Path
from typing import Literal, TypeAlias

from anabranch.checkpoint.generations import check_path
from anabranch.choices import choice
from anabranch.executor.steps import Step, TrainStep
from anabranch.pipeline import Pipe
from anabranch.tables import Cache

EngineName: TypeAlias = Literal["tape", "graph"]
_ENGINES: tuple[EngineName, ...] = ("tape", "graph")


def check_arguments(
    steps: Mapping[str, Step], *, seed: object, cache: object, dataloaders: object, state: object, check_workers: object
) -> None:
    """Raise for an argument of the wrong kind.

    Raises:
        TypeError: names the argument, its value, and what is accepted.
        ValueError: a loader for a step that does not exist, or a negative number.
    """
    if not isinstance(seed, Integral | None):
        raise TypeError(f"seed is a whole number, or None, got {seed!r}")
    if not isinstance(cache, Cache | None):
        raise TypeError(f"cache is an ab.Cache, such as ab.Cache(capacity=1000), or None, got {cache!r}")
    if not isinstance(dataloaders, Mapping | None):
        raise TypeError(f"dataloaders is a dict of loaders by the step's name, got {dataloaders!r}")
    if isinstance(check_workers, bool) or not isinstance(check_workers, Integral) or check_workers < 0:
        kind = TypeError if isinstance(check_workers, bool) or not isinstance(check_workers, Integral) else ValueError
        raise kind(f"check_workers is a number of steps, or 0 for never, got {check_workers!r}")
    if unknown := sorted({*(dataloaders or ())} - {*steps}):
        raise ValueError(f"no step is called {unknown[0]!r}; the steps are {sorted(steps)}")
    if not isinstance(state, Mapping | None):
        raise TypeError(f"state is a dict of objects by name, got {type(state).__name__}")
    for name in state or {}:
        if not isinstance(name, str):
            raise TypeError(f"the names in state are strings, got {name!r}")


def check_engine(engine: str, compile: bool, steps: Mapping[str, Step]) -> EngineName:  # noqa: A002
    """Return the name of the engine.

    Raises:
        ValueError: there is no such engine, ``compile`` without a graph, or a step that cannot run on it.
    """
    name = choice("engine", engine, _ENGINES)
    if compile and name == "tape":
        raise ValueError("compile=True compiles the graph, but the engine is 'tape'; give engine='graph'")
    for step_name, step in steps.items():
        if not isinstance(step, TrainStep) or isinstance(step.model, Pipe):
            continue
        if name == "tape" and step.activation_budget is not None:
            raise ValueError(
                f"step {step_name!r} has an activation_budget, which needs a graph, but the engine is 'tape'; give "
                "engine='graph', or checkpoint layers with torch.utils.checkpoint"
            )
        if name == "graph" and step.precision == "float16":
            raise ValueError(
                f"step {step_name!r} has precision='float16', whose loss is scaled on the tape, but engine='graph' was "
                "requested; use precision='bfloat16', or engine='tape'"
            )
    return name


def check_log_path(path: str | os.PathLike[str] | None) -> Path | None:
    """Return the path of the file that ``record_loads`` appends to.

    Raises:
        ValueError: no file can be made there.
    """
    checked = None if path is None else check_path(path, "log_path")
    if checked is not None and not checked.parent.is_dir():
        raise ValueError(f"log_path={path!r} is in a directory that does not exist; create {checked.parent}")
    return checked
