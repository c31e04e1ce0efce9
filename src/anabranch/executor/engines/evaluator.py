"""Runs an ``EvalStep``, eagerly or as a graph."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Literal, cast

import torch
from torch import Tensor

from anabranch.autodiff.boundary.answers import Answers
from anabranch.errors import CaptureError
from anabranch.executor.engines.engine import Fetch
from anabranch.executor.engines.trial import Differs, Snapshot, bits_differ, repeat
from anabranch.executor.steps import EvalStep
from anabranch.graph import Graph
from anabranch.graph.dynamo.front import GuardMiss
from anabranch.graph.dynamo.refusals import Raises
from anabranch.graph.step.program import EvalProgram, Prepared
from anabranch.pipeline import Pipe
from anabranch.tensors import Structure

_log = logging.getLogger("anabranch")


class Evaluator:
    """Runs one ``EvalStep``.

    Args:
        step: the step to run.
        engine: ``"tape"`` runs eagerly.
        compile: compile the graph with Inductor.
    """

    def __init__(
        self,
        step: EvalStep,
        engine: Literal["graph", "tape"],
        *,
        compile: bool = False,  # noqa: A002
    ) -> None:
        self._step, self._compile = step, compile
        pipe = any(isinstance(module, Pipe) for module in step.model.modules())
        self._program = None if engine == "tape" or pipe else EvalProgram(step.model, step.outputs, compile=compile)
        self._on_graph = False
        self._wrong: str | None = None

    @property
    def name(self) -> str:
        """The engine of the last run."""
        if not self._on_graph:
            return "tape"
        return "graph+inductor" if self._compile else "graph"

    @property
    def graph(self) -> Graph | None:
        """The graph of the last run, if it was one."""
        return self._program.graph if self._program is not None and self._on_graph else None

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
        """Run it; of a new graph, return eager mode's result, with which it is compared."""
        program = self._program
        if program is None:
            return self._eagerly(batch, fetch)
        if self._wrong is not None:
            raise CaptureError(self._wrong)
        try:
            return self._as_graph(program, batch, fetch, may_trace=False)
        except GuardMiss:
            pass
        try:
            prepared = program.prepare(batch, fetch.modules, whole=False)
        except Raises as error:  # eager mode raises it too, after the operations before it
            returned = self._eagerly(batch, fetch)
            self._wrong = str(error)
            return returned
        if self._compile or prepared.talks():
            reason = "compile=True rounds differently" if self._compile else "it communicates between workers"
            _log.info("a graph of an evaluation is not compared with eager mode: %s", reason)
            prepared.confirm()
            return self._as_graph(program, batch, fetch, may_trace=True)
        return self._compared(prepared, batch, fetch)

    def _eagerly(self, batch: Structure, fetch: Fetch) -> Mapping[str, Tensor]:
        self._on_graph = False
        with fetch.recording():
            returned = self._step.outputs(self._step.model, batch)
        _check(returned)
        fetch.check(returned)
        return returned

    def _as_graph(
        self, program: EvalProgram, batch: Structure, fetch: Fetch, *, may_trace: bool
    ) -> Mapping[str, Tensor]:
        returned, outputs = program.evaluate(batch, fetch.modules, may_trace=may_trace)
        _check(returned)
        self._on_graph = True
        fetch.record(outputs)
        fetch.check(returned)
        return cast("Mapping[str, Tensor]", returned)

    def _compared(self, prepared: Prepared, batch: Structure, fetch: Fetch) -> Mapping[str, Tensor]:
        """Return eager mode's result; a graph that gives other bits, or fails, makes the next run an error."""
        model, answers = self._step.model, Answers()
        before = Snapshot(model, prepared.args)
        with answers.noted():
            returned = self._eagerly(batch, fetch)
        after = Snapshot(model, prepared.args)

        def check(results: Mapping[str, object]) -> None:
            for name, value in returned.items():
                if isinstance(value, Tensor) and bits_differ(results.get(name), value):
                    raise Differs(f"the result {name!r}")

        failed = None
        try:
            repeat(before, after, answers, prepared.compute, check)
        except Differs as error:
            failed = f"the graph's results are not bitwise those of eager mode: {error}"
        except Exception as error:  # noqa: BLE001 - whatever it is, the eager run counts
            failed = f"the graph failed but eager mode did not ({type(error).__name__}: {error})"
        if failed is not None:
            self._wrong = f"on the last batch {failed}; eager mode computed the result; use engine='tape'"
        else:
            prepared.confirm()
            self._on_graph = True
        return returned


def _check(returned: object) -> None:
    if not isinstance(returned, Mapping):
        raise TypeError(f"outputs(model, batch) returns a dict of tensors, got {type(returned).__name__}")
