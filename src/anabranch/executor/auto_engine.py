"""The engine of ``engine="auto"``: the graph, and the tape for what no graph can represent.

A refusal is found while a batch is captured, before anything has run: the tape then makes the step as if nothing had
been tried. What was refused is remembered by the kind of batch, and captures are rationed, so that a step whose shapes
or control flow never settle pays for a few captures and no more. The warning comes after the first step that the tape
has made instead: a mistake of the user's that the tape meets too raises there, and needs none.

Workers may decide differently. Gradients go through the same buckets in the same order either way.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping

from torch import Tensor, nn

from anabranch.errors import CaptureError, CaptureWarning
from anabranch.executor.engine import Ran, Ready
from anabranch.executor.fetching import Fetch
from anabranch.executor.graph_engine import GraphEngine
from anabranch.executor.steps import TrainStep
from anabranch.executor.tape import TapeEngine
from anabranch.graph import StepProgram
from anabranch.graph.tracing import is_library
from anabranch.pipeline import Pipe
from anabranch.tensors import Structure

__all__ = ["AutoEngine"]

_MOST_REFUSED = 3
_MOST_IN_A_ROW = 16
_FREE_CAPTURES = 8
_RUNS_A_CAPTURE = 8


class _Rationed(CaptureError):
    """Not now: too many kinds of batches for the use that their graphs have had."""


class AutoEngine:
    """Runs one ``TrainStep`` on the graph engine as far as that goes.

    Args:
        step: what to run.
        compile: hand the graph to Inductor.
    """

    def __init__(self, step: TrainStep, *, compile: bool = False) -> None:  # noqa: A002
        self._step = step
        self._compile = compile
        self._tape = TapeEngine(step)
        self._graph: GraphEngine | None = None
        self._gives_up = _runs_by_itself(step.model)
        self._attached: tuple[Mapping[str, Tensor], Ready] | None = None
        self._refused: dict[object, str] = {}
        self._kind: object = None
        self._captures = 0
        self._runs = 0
        self._in_a_row = 0
        self._on_graph = not self._gives_up
        self._warned = False

    @property
    def name(self) -> str:
        """The engine of the last run; before it, the one that will be tried."""
        return ("graph+inductor" if self._compile else "graph") if self._on_graph else self._tape.name

    @property
    def tape(self) -> TapeEngine:
        """The other engine, for a run that must be one of the tape."""
        return self._tape

    @property
    def program(self) -> StepProgram | None:
        """The captured graphs, if the last run was on one."""
        return self._graph.program if self._graph is not None and self._on_graph else None

    def attach(self, parameters: Mapping[str, Tensor], ready: Ready) -> None:
        """Hands the gradients of these parameters to ``ready`` from now on, whichever engine computes them."""
        self._attached = parameters, ready
        self._tape.attach(parameters, ready)
        if self._graph is not None:
            self._graph.attach(parameters, ready)

    def differentiate(self, batch: Structure, fetch: Fetch, begin: Callable[[Tensor], None]) -> Ran:
        """Forward and backward; ``begin(loss)`` is called before the first gradient is final."""
        return self._run(
            lambda graph: graph.differentiate(batch, fetch, begin),
            lambda: self._tape.differentiate(batch, fetch, begin),
        )

    def step(self, batch: Structure, fetch: Fetch) -> Ran:
        """Forward, backward, clipping and the optimizers' step."""
        return self._run(lambda graph: graph.step(batch, fetch), lambda: self._tape.step(batch, fetch))

    def update(self) -> None:
        """The optimizers' step on what ``.grad`` holds."""
        if self._graph is not None and self._on_graph:
            self._graph.update()
            self._tell_of_update(self._graph)
        else:
            self._tape.update()

    def _run(self, on_graph: Callable[[GraphEngine], Ran], on_tape: Callable[[], Ran]) -> Ran:
        if self._gives_up:
            self._on_graph = False
            return on_tape()
        self._kind = None
        try:
            graph = self._graph or self._make_graph()
            ran = on_graph(graph)
        except CaptureError as error:
            return self._fall_back(error, on_tape)
        self._on_graph = True
        self._runs += 1
        self._in_a_row = 0
        self._tell_of_update(graph)
        return ran

    def _make_graph(self) -> GraphEngine:
        self._graph = GraphEngine(self._step, compile=self._compile, gate=self._gate, update_eagerly=True)
        if self._attached is not None:
            self._graph.attach(*self._attached)
        return self._graph

    def _gate(self, kind: object) -> None:
        """Asked before a kind of batch is captured."""
        self._kind = kind
        known = self._refused.get(kind)
        if known is not None:
            raise CaptureError(known)
        if self._captures >= _FREE_CAPTURES + self._runs // _RUNS_A_CAPTURE:
            raise _Rationed(
                f"{self._captures} kinds of batches (shapes, dtypes, modes, numbers) have come in {self._runs} runs on "
                "a graph, and another has; more are captured as these are used: pad batches to a few shapes, or use "
                "engine='tape'"
            )
        self._captures += 1

    def _fall_back(self, error: CaptureError, on_tape: Callable[[], Ran]) -> Ran:
        self._on_graph = False
        ran = on_tape()
        # Only now: what raises on the tape too is no refusal.
        self._in_a_row += 1
        if not isinstance(error, _Rationed) and self._kind is not None:
            self._refused.setdefault(self._kind, str(error))
        hopeless = len(self._refused) >= _MOST_REFUSED and self._runs < _RUNS_A_CAPTURE
        if hopeless or self._in_a_row >= _MOST_IN_A_ROW:
            self._gives_up, self._graph = True, None
        self._warn(f"this step runs on the tape where it cannot be a graph: {error}")
        return ran

    def _tell_of_update(self, graph: GraphEngine) -> None:
        if graph.refused_update is not None:
            self._warn(f"the optimizers of this step run on the tape: {graph.refused_update}")

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(f"{text} (engine='tape' silences this)", CaptureWarning, stacklevel=_users_frame())


def _users_frame() -> int:
    """How many frames above ``_warn`` the user's call is."""
    depth, frame = 1, sys._getframe(2)
    while frame is not None and is_library(frame.f_code.co_filename):
        depth, frame = depth + 1, frame.f_back  # type: ignore[assignment]
    return depth + 1


def _runs_by_itself(model: nn.Module) -> bool:
    """A pipe runs its stages on threads or ranks of their own, by a schedule that is no graph's."""
    return any(isinstance(module, Pipe) for module in model.modules())
