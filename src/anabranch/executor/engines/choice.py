"""``EngineChoice``: the engine that the caller requested, and the one that each step gets."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal, TypeAlias

from anabranch.choices import choice
from anabranch.executor.engines.checked_graph import CheckedGraph
from anabranch.executor.engines.engine import Engine
from anabranch.executor.engines.evaluator import Evaluator
from anabranch.executor.engines.graph_engine import GraphEngine
from anabranch.executor.engines.tape_engine import TapeEngine
from anabranch.executor.steps import EvalStep, TrainStep

__all__ = ["EngineChoice"]

_log = logging.getLogger("anabranch")

_Name: TypeAlias = Literal["tape", "graph"]
_NAMES: tuple[_Name, ...] = ("tape", "graph")


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """The arguments of ``Executor`` of these names."""

    engine: _Name
    compile: bool

    @classmethod
    def parse(cls, engine: str, compile: bool) -> EngineChoice:  # noqa: A002
        """Return the choice.

        Raises:
            ValueError, TypeError: there is no such engine, or ``compile`` without a graph.
        """
        name = choice("engine", engine, _NAMES)
        if not isinstance(compile, bool):
            raise TypeError(f"compile is True or False, got {compile!r}")
        if compile and name == "tape":
            raise ValueError("compile=True compiles the graph, but the engine is 'tape'; give engine='graph'")
        return cls(name, compile)

    def engine_for(self, name: str, step: TrainStep) -> Engine:
        """Return the engine of a training step.

        Raises:
            ValueError: the step cannot run on the requested engine; gives the reason.
        """
        if self.engine == "tape":
            if step.activation_budget is not None:
                raise ValueError(
                    f"step {name!r} has an activation_budget, which needs a graph, but the engine is 'tape'; give "
                    "engine='graph', or checkpoint layers with torch.utils.checkpoint"
                )
            return TapeEngine(step)
        if step.precision == "float16":
            raise ValueError(
                f"step {name!r} has precision='float16', whose loss is scaled on the tape, but engine='graph' was "
                "requested; use precision='bfloat16', or engine='tape'"
            )
        if self.compile or step.activation_budget is not None:
            # Inductor's kernels round differently, and the tape would not fit the budget.
            reason = "compile=True rounds differently" if self.compile else "the tape would not fit activation_budget"
            _log.info("the first batches of step %r as a graph are not compared with the tape: %s", name, reason)
            return GraphEngine(step, compile=self.compile, name=name)
        return CheckedGraph(step, name=name)

    def evaluator_for(self, step: EvalStep) -> Evaluator:
        """Return the evaluator of an evaluation step."""
        return Evaluator(step, self.engine, compile=self.compile)
