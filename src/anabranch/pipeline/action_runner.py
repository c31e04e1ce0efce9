"""Runs a rank's actions: the loop behind forward, backward and step, in one process and across ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import cast

from torch import Tensor

from anabranch.pipeline.description import Observed
from anabranch.pipeline.links.exchange import Link, Message
from anabranch.pipeline.schedule.actions import Action, Kind
from anabranch.pipeline.stage.packet import Packet, size_of
from anabranch.pipeline.stage.stage import OUTSIDE, GradientMessages, Messages, StageRun
from anabranch.record import spans
from anabranch.record.fault_points import fault_point

__all__ = ["ActionFailure", "Runner", "phase_of"]

_PHASES = {Kind.F: "forward", Kind.B: "backward", Kind.W: "weight", Kind.R: "recompute"}


def phase_of(action: Action) -> str:
    """Return the name of a computing action in errors and events: forward, backward, weight or recompute."""
    return _PHASES[action.kind]


class ActionFailure(Exception):
    """An error raised by a stage, with its action; carries the original as its cause."""

    def __init__(self, action: Action, error: BaseException) -> None:
        super().__init__()  # without the error's own text: str() of it may raise
        self.action = action
        self.error = error


class Runner:
    """A rank in one call: its stages, the messages it holds, and its link to the others.

    Args:
        runs: the stages on this rank, by number.
        outside: the caller's inputs to each stage, a message for each microbatch, by stage.
        link: to the other stages.
    """

    def __init__(
        self, runs: Mapping[int, StageRun], outside: Mapping[int, Sequence[Message]], link: Link, *, keep: bool = False
    ) -> None:
        self._runs = runs
        self._outside = outside
        self._link = link
        self._keep = keep
        self._in: dict[Action, dict[int, Message]] = {}
        self._out: dict[Action, dict[int, Message]] = {}
        self.observed = Observed()
        self.outputs: dict[int, Message] = {}
        self.input_gradients: dict[tuple[int, int], Message] = {}

    def run(self, actions: Sequence[Action]) -> None:
        """Run ``actions`` in order.

        Raises:
            ActionFailure: a stage raised.
            Aborted: a stage of another rank did.
        """
        for action in actions:
            self._link.check()
            self._carry_out(action)

    def _carry_out(self, action: Action) -> None:
        match action.kind:
            case Kind.RECV_F | Kind.RECV_B:
                began = spans.begin()
                message = self._link.receive(action)
                self._in.setdefault(_computing(action), {})[_peer(action)] = message
                self._record(began, action, message)
            case Kind.SEND_F | Kind.SEND_B:
                began = spans.begin()
                message = self._out[_computing(action)].pop(_peer(action))
                self._link.send(action, message)
                self._record(began, action, message)
            case _:
                started = perf_counter()
                with _watched(action):
                    self._compute(action)
                place = action.stage, phase_of(action)
                self.observed.seconds[place] = self.observed.seconds.get(place, 0.0) + perf_counter() - started

    def _record(self, began: int, action: Action, message: Message) -> None:
        """Record a transfer for a trace."""
        if not began:
            return
        sends = action.kind in (Kind.SEND_F, Kind.SEND_B)
        stages = (action.stage, action.peer) if sends else (action.peer, action.stage)
        way = "activations" if action.kind in (Kind.SEND_F, Kind.RECV_F) else "gradients"
        name = f"{self._link.name}/{way} {stages[0]}>{stages[1]}.{action.microbatch}"
        facts: dict[str, object] = {"stage": action.stage, "microbatch": action.microbatch}
        facts |= {"peer": f"stage {action.peer}", "bytes": _bytes(message)}
        flow: spans.Flow = ("send", name) if sends else ("receive", name)
        spans.complete(began, f"{flow[0]} {way}", "crossing", flow=flow, facts=facts)

    def _note_sizes(self, stage: int, outputs: Mapping[int, Message]) -> None:
        sizes = self.observed.sent_bytes
        for target, message in outputs.items():
            sizes[stage, target] = max(sizes.get((stage, target), 0), _bytes(message))

    def _compute(self, action: Action) -> None:
        run, i = self._runs[action.stage], action.microbatch
        match action.kind:
            case Kind.F:
                inputs = self._in.pop(action, {})
                if OUTSIDE in run.stage.sources:
                    inputs[OUTSIDE] = self._outside[action.stage][i]
                outputs = cast(dict[int, Message], run.forward(i, cast(Messages, inputs)))
                self._out[action] = outputs
                self._note_sizes(action.stage, outputs)
                if OUTSIDE in outputs:
                    output = outputs.pop(OUTSIDE)
                    if run.head is None or run.head.keeps_outputs:
                        self.outputs[i] = output
            case Kind.R:
                run.recompute(i)
            case Kind.B:
                gradients = self._in.pop(action, {})
                if OUTSIDE in run.stage.targets and run.head is None:
                    gradients[OUTSIDE] = self._outside[action.stage][i]
                answers = cast(dict[int, Message], run.backward(i, cast(GradientMessages, gradients), keep=self._keep))
                self._out[action] = answers
                if OUTSIDE in answers:
                    self.input_gradients[action.stage, i] = answers.pop(OUTSIDE)
                self._note_sizes(action.stage, answers)
            case Kind.W:
                run.weights(i, keep=self._keep)


def _bytes(message: Message) -> int:
    leaves = (leaf for part in message for leaf in (part.leaves if isinstance(part, Packet) else part))
    return sum(size_of(leaf) for leaf in leaves if isinstance(leaf, Tensor))


def _computing(transfer: Action) -> Action:
    """Return the action that a transfer's values come from or go to."""
    forward = transfer.kind in (Kind.RECV_F, Kind.SEND_F)
    return Action(Kind.F if forward else Kind.B, transfer.stage, transfer.microbatch)


def _peer(action: Action) -> int:
    assert action.peer is not None
    return action.peer


@contextmanager
def _watched(action: Action) -> Iterator[None]:
    """Record the action's time, and add the place to an exception."""
    try:
        fault_point(f"pipeline.{phase_of(action)}.{action.stage}.{action.microbatch}")
        with spans.span(phase_of(action), "compute", stage=action.stage, microbatch=action.microbatch):
            yield
    except BaseException as error:
        raise ActionFailure(action, error) from error
