"""Runs an ``EvalStep``, eagerly or as a graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Literal, cast

import torch
from torch import Tensor

from anabranch.executor.engines.engine import Fetch
from anabranch.executor.engines.graph_engine import Check, Trials, check_results
from anabranch.executor.steps import EvalStep
from anabranch.graph import Graph
from anabranch.graph.step.program import EvalProgram
from anabranch.pipeline import Pipe
from anabranch.tensors import Structure


class Evaluator:
    """Runs one ``EvalStep``.

    Args:
        step: the step to run.
        engine: ``"tape"`` runs eagerly.
        compile: compile the graph with Inductor.
    """

    def __init__(self, step: EvalStep, engine: Literal["graph", "tape"], *, compile: bool = False) -> None:  # noqa: A002
        self._step = step
        self._program: EvalProgram | None = None
        if engine == "graph" and not any(isinstance(module, Pipe) for module in step.model.modules()):
            self._program = EvalProgram(step.model, step.outputs, compile=compile)
            reason = "compile=True rounds differently" if compile else None
            self._trials = Trials(self._program, step.model, "an evaluation", reason)

    @property
    def name(self) -> str:
        """The engine of the last run."""
        if self._program is None:
            return "tape"
        return "graph+inductor" if self._program.compile else "graph"

    @property
    def graph(self) -> Graph | None:
        """The graph of the last run, if it was one."""
        return None if self._program is None else self._program.graph

    def follow_move(self) -> None:
        """Run from now on with some of the parameters on servers, if any are."""
        if self._program is not None:
            self._program.follow_model()

    def run(self, batch: Structure, fetch: Fetch) -> Mapping[str, Tensor]:
        """Return the result of the step's ``outputs``, in eval mode and without gradients; modes are restored after.

        Raises:
            ValueError: ``fetch`` names a submodule of a pipe, which sees microbatches one at a time.
        """
        model = self._step.model
        if isinstance(model, Pipe) and (layers := [name for name in fetch.names or () if name in model.submodules]):
            raise ValueError(
                f"fetch names {layers}, layers of a Pipe, which run one microbatch at a time; return the values "
                "from outputs(model, batch)"
            )
        modes = [(module, module.training) for module in model.modules()]
        with model.output_everywhere() if isinstance(model, Pipe) else nullcontext(), torch.no_grad():
            model.eval()
            try:
                return self._run(batch, fetch)
            finally:
                for module, training in modes:
                    module.training = training

    def _run(self, batch: Structure, fetch: Fetch) -> Mapping[str, Tensor]:
        program = self._program
        if program is None:
            return self._eagerly(batch, fetch)

        def as_graph(may_trace: bool) -> Mapping[str, Tensor]:
            returned, outputs = program.evaluate(batch, fetch.modules, may_trace=may_trace)
            fetch.record(outputs)
            return _checked(returned, fetch)

        def on_tape(compare: Callable[[Check], None]) -> Mapping[str, Tensor]:
            returned = self._eagerly(batch, fetch)
            compare(lambda results, *_: check_results(results, returned))
            return returned

        return self._trials.run(as_graph, partial(program.prepare, batch, fetch.modules, whole=False), on_tape)

    def _eagerly(self, batch: Structure, fetch: Fetch) -> Mapping[str, Tensor]:
        with fetch.recording():
            returned = self._step.outputs(self._step.model, batch)
        return _checked(returned, fetch)


def _checked(returned: object, fetch: Fetch) -> Mapping[str, Tensor]:
    if not isinstance(returned, Mapping):
        raise TypeError(f"outputs(model, batch) returns a dict of tensors, got {type(returned).__name__}")
    fetch.check(returned)
    return cast("Mapping[str, Tensor]", returned)
