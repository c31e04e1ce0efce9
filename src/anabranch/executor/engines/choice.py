"""The engine of each training step."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Literal, TypeAlias

from anabranch.choices import choice
from anabranch.executor.engines.engine import Engine
from anabranch.executor.engines.graph_engine import GraphEngine
from anabranch.executor.engines.pipe_engine import PipeEngine
from anabranch.executor.steps import Step, TrainStep
from anabranch.pipeline import Pipe

_log = logging.getLogger("anabranch")

EngineName: TypeAlias = Literal["tape", "graph"]
_NAMES: tuple[EngineName, ...] = ("tape", "graph")


def check_engine(engine: str, compile: bool, steps: Mapping[str, Step]) -> EngineName:  # noqa: A002
    """Return the name of the engine.

    Raises:
        ValueError, TypeError: there is no such engine, ``compile`` without a graph, or a step that cannot run on it.
    """
    name = choice("engine", engine, _NAMES)
    if not isinstance(compile, bool):
        raise TypeError(f"compile is True or False, got {compile!r}")
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


def engine_for(name: str, step: TrainStep, engine: EngineName, compile: bool, workers: int) -> Engine:  # noqa: A002
    """Return the engine of the step called ``name``, on one of so many workers."""
    if isinstance(step.model, Pipe):
        if engine == "graph":
            _log.warning("step %r trains a Pipe, which runs its own schedule: its engine is the tape", name)
        return PipeEngine(step, workers)
    return Engine(step) if engine == "tape" else GraphEngine(step, compile=compile, name=name)
