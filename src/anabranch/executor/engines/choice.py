"""``EngineChoice``: the engine that the caller requested, and the one that each step gets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from anabranch.choices import choice
from anabranch.executor.engines.auto_engine import AutoEngine
from anabranch.executor.engines.checked_graph import CheckedGraph
from anabranch.executor.engines.engine import Engine
from anabranch.executor.engines.graph_engine import GraphEngine
from anabranch.executor.engines.tape_engine import TapeEngine
from anabranch.executor.running.evaluator import Evaluator
from anabranch.executor.steps import EvalStep, TrainStep

__all__ = ["EngineChoice"]

_Name: TypeAlias = Literal["auto", "graph", "tape"]
_NAMES: tuple[_Name, ...] = ("auto", "graph", "tape")


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """The arguments of ``Executor`` of these names."""

    engine: _Name
    compile: bool
    capture_after: int | None

    @classmethod
    def parse(cls, engine: str, compile: bool, capture_after: int | None) -> EngineChoice:  # noqa: A002
        """Return the choice.

        Raises:
            ValueError, TypeError: there is no such engine, a number of runs below 0, or arguments that exclude each
                other.
        """
        name = choice("engine", engine, _NAMES)
        if not isinstance(compile, bool):
            raise TypeError(f"compile is True or False, got {compile!r}")
        if compile and name == "tape":
            raise ValueError("compile=True compiles the graph, but the engine is 'tape'; give engine='graph'")
        if capture_after is not None and (isinstance(capture_after, bool) or not isinstance(capture_after, int)):
            raise TypeError(f"capture_after is a number of runs, or None, got {capture_after!r}")
        if capture_after is not None and capture_after < 0:
            raise ValueError(f"capture_after is a number of runs, at least 0, got {capture_after}")
        return cls(name, compile, capture_after)

    def engine_for(self, name: str, step: TrainStep) -> Engine:
        """Return the engine of a training step.

        Raises:
            ValueError: the step cannot run on the requested engine; gives the reason.
        """
        if step.precision == "float16":
            if self.engine == "graph":
                raise ValueError(
                    f"step {name!r} has precision='float16', whose loss is scaled on the tape, but engine='graph' was "
                    "requested; use precision='bfloat16', or engine='auto'"
                )
            return TapeEngine(step, why="precision='float16' scales the loss on the tape")
        if step.activation_budget is not None:
            if self.engine == "tape":
                raise ValueError(
                    f"step {name!r} has an activation_budget, which needs a graph, but engine='tape' was requested; "
                    "leave one of them out, or checkpoint layers with torch.utils.checkpoint"
                )
            # Not compared with the tape, which would not fit.
            return GraphEngine(
                step, compile=self.compile, leaves_gradients=not self.compile, name=name, tape=TapeEngine(step)
            )
        if self.engine == "tape":
            return TapeEngine(step)
        if self.engine == "auto":
            return AutoEngine(step, compile=self.compile, capture_after=self.capture_after, name=name)
        # Inductor's kernels round differently: a bitwise comparison would fail.
        if self.compile:
            return GraphEngine(step, compile=True, name=name, tape=TapeEngine(step))
        return CheckedGraph(step, name=name)

    def evaluator_for(self, name: str, step: EvalStep) -> Evaluator:
        """Return the evaluator of an evaluation step."""
        return Evaluator(step, self.engine, compile=self.compile, capture_after=self.capture_after, name=name)
