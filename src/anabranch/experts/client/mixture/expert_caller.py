"""``ExpertCaller``: finds the experts that a mixture has chosen, and calls each once for all its rows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anabranch.autodiff.boundary.crossing import Form, RecordedBoundary, cross, outside_tracing
from anabranch.deadline import Deadline
from anabranch.errors import BoundaryError, NonFinite, PeerLost, SchemaError
from anabranch.experts.client.beam_search import Choices, beam_search
from anabranch.experts.client.calls import Calls, ExpertCall, call_experts, output_forms, sample_forms
from anabranch.experts.client.expert_call import CallCounts, CallStatistics
from anabranch.experts.client.finder import ExpertFinder
from anabranch.experts.client.mixture.answers_by_row import (
    check_same_outputs,
    count_answers,
    gather_answers,
    positions_of_answers,
    select_rows,
)
from anabranch.experts.directory import within
from anabranch.experts.nesting import Nesting, flatten
from anabranch.experts.schema import Schema
from anabranch.tensors import Structure

__all__ = ["CallLimits", "CallerModes", "ChosenAnswers", "ExpertCaller"]

_log = logging.getLogger("anabranch.experts")


@dataclass(frozen=True, slots=True)
class CallLimits:
    """Timeouts and the experts that must answer, from the modules' arguments."""

    k_min: int
    forward_timeout: float
    timeout_after_k_min: float | None
    backward_k_min: int
    backward_timeout: float
    allow_zero_outputs: bool
    detect_anomalies: bool


@dataclass(frozen=True, slots=True)
class CallerModes:
    """The caller's mode and precision when the mixture is called or captured.

    Attributes:
        evaluating: in eval mode.
        casting: under autocast.
    """

    evaluating: bool
    casting: bool


@dataclass(slots=True)
class _ExpertCalls:
    """The calls of one forward: those of the best experts, then those in place of lost ones.

    Attributes:
        calls: the calls.
        rows: the rows of each call.
        outputs: its answer; ``None`` if there was none.
    """

    calls: list[ExpertCall]
    rows: list[NDArray[np.int64]]
    outputs: list[list[Tensor | None] | None]

    def add(
        self,
        calls: Sequence[ExpertCall],
        rows: Sequence[NDArray[np.int64]],
        outputs: Sequence[list[Tensor | None] | None],
    ) -> None:
        self.calls += calls
        self.rows += rows
        self.outputs += outputs

    def present(self, choices: Choices) -> NDArray[np.bool_]:
        """Return an array of shape (rows, k): true if the slot's expert has answered for the row."""
        position, count = positions_of_answers(choices, self.calls, self.rows)
        return cast("NDArray[np.bool_]", position != count)

    def lost_any(self, choices: Choices) -> bool:
        """Return True if an expert's process is gone, or the expert is listed but cannot be reached."""
        gone = any(isinstance(call.error, PeerLost) for call in self.calls)
        return gone or bool(set(choices.uids) - {call.uid for call in self.calls})

    def failed(self, choices: Choices) -> set[str]:
        """Return the uids of the chosen experts that gave no answer."""
        return set(choices.uids) - {call.uid for call in self.calls if call.answered}


@dataclass(frozen=True, slots=True)
class ChosenAnswers:
    """The answers of the chosen experts.

    Attributes:
        choices: the experts finally called for each row.
        present: of shape (rows, k): true if the slot's expert answered.
        outputs: for each output of the schema, of shape (rows, k, ...): the answers, zeros where it did not.
        schema: of the experts.
    """

    choices: Choices
    present: Tensor
    outputs: list[Tensor | None]
    schema: Schema


class ExpertCaller:
    """Finds the chosen experts, calls each once for all its rows, and sorts the answers by row, for both mixtures."""

    def __init__(self, finder: ExpertFinder, limits: CallLimits) -> None:
        self.finder = finder
        self.limits = limits
        self._counts = CallCounts()

    def __deepcopy__(self, memo: dict[int, object]) -> ExpertCaller:
        # A copied mixture has its own gate and shares the original's cache of experts.
        return ExpertCaller(self.finder, self.limits)

    def __reduce__(self) -> tuple[type[ExpertCaller], tuple[ExpertFinder, CallLimits]]:
        return ExpertCaller, (self.finder, self.limits)

    def statistics(self) -> CallStatistics:
        """Return the counters of all calls so far."""
        return self._counts.read(frozenset(self.finder.backoff.now()))

    def choose(
        self,
        uid_prefix: str,
        scores: Sequence[Tensor],
        k: int,
        deadline: Deadline,
        kept: Sequence[Tensor] | None,
        failed: Collection[str] = (),
    ) -> Choices:
        """Return the ``k`` best experts of each row by the gate's scores, without those avoided or ``failed``."""
        arrays = [grid.detach().double().cpu().numpy() for grid in scores]
        if not all(np.isfinite(array).all() for array in arrays):
            raise NonFinite("the gate's scores hold NaN or Inf; check its inputs and weights")
        directory = within(self.finder.directory, deadline)
        masks = None if kept is None else [mask.cpu().numpy() for mask in kept]
        return beam_search(directory, uid_prefix, arrays, k, self.finder.backoff.now().union(failed), masks)

    def _schema(self, uid_prefix: str, dimensions: int, deadline: Deadline) -> Schema:
        """Return the schema of any announced expert, requested if none has been asked yet."""
        with outside_tracing():
            if self.finder.any_schema is None:
                self._find_any(uid_prefix, dimensions, deadline)
            if self.finder.any_schema is None:
                raise _no_schema(deadline)
            return self.finder.any_schema

    def forms_of(self, uid_prefix: str, dimensions: int, gated: Tensor, inputs: Structure) -> tuple[Schema, list[Form]]:
        """Return the schema of the experts, and the forms of their outputs for these inputs."""
        deadline = Deadline.after(self.limits.forward_timeout)
        schema = self._schema(uid_prefix, dimensions, deadline)
        if not schema.varies:
            return schema, output_forms(schema, len(gated), gated.device)
        assert self.finder.any_known is not None
        uid, endpoint, _ = self.finder.any_known
        leaves = cast("list[Tensor | None]", schema.input_nesting.leaves_of(inputs))
        with outside_tracing():
            client = self.finder.client
            return schema, sample_forms(client, uid, endpoint, schema, leaves, len(gated), deadline)

    def _find_any(self, uid_prefix: str, dimensions: int, deadline: Deadline) -> None:
        uids = [uid_prefix]
        directory = within(self.finder.directory, deadline)
        for _ in range(dimensions):
            active = directory.active(uids)
            uids = [f"{prefix}.{index}" for prefix in uids for index in active.get(prefix, ())]
        for uid in uids:
            if self.finder.any_schema is None and not deadline.expired():
                self.finder.find([uid], deadline)

    def call_chosen(
        self,
        choose: Callable[[Collection[str]], Choices],
        args: tuple[Structure, ...],
        kwargs: dict[str, Structure],
        deadline: Deadline,
        entry: Tensor | None,
        modes: CallerModes,
    ) -> ChosenAnswers:
        """Call the chosen experts, and the next best ones for rows that lost theirs with a process.

        ``choose`` returns the choices of all rows, without the given uids.
        """
        device = next(leaf.device for leaf in flatten((args, kwargs))[0] if isinstance(leaf, Tensor))
        choices = choose(())
        asked = _ExpertCalls([], [], [])
        self._call_slots(asked, choices, choices.slots >= 0, args, kwargs, deadline, entry, modes)
        short = ~self._has_enough(asked.present(choices))
        if short.any() and asked.lost_any(choices) and not self.limits.allow_zero_outputs and not deadline.expired():
            choices = choices.with_rows_of(choose(asked.failed(choices)), short)
            unasked = short[:, None] & (choices.slots >= 0) & ~asked.present(choices)
            self._call_slots(asked, choices, unasked, args, kwargs, deadline, entry, modes)
        present = asked.present(choices)
        self._check_enough(present, asked.calls, deadline)
        schema = asked.calls[0].schema if asked.calls else self.finder.any_schema
        if schema is None:
            raise _no_schema(deadline)
        check_same_outputs(asked.calls)
        position, count = positions_of_answers(choices, asked.calls, asked.rows)
        columns = [
            None if spec is None else gather_answers(asked.outputs, index, spec, position, count, device)
            for index, spec in enumerate(schema.output_specs)
        ]
        return ChosenAnswers(choices, torch.from_numpy(present).to(device), columns, schema)

    def _call_slots(
        self,
        asked: _ExpertCalls,
        choices: Choices,
        wanted: NDArray[np.bool_],
        args: tuple[Structure, ...],
        kwargs: dict[str, Structure],
        deadline: Deadline,
        entry: Tensor | None,
        modes: CallerModes,
    ) -> None:
        """Call the experts of the slots that are true in ``wanted``, each once for all its rows."""
        found = self.finder.find(choices.uids, deadline)
        calls, rows = self._make_calls(choices, wanted, found, args, kwargs, modes)
        if calls:
            outputs = self._run(calls, rows, choices, deadline, entry)
            asked.add(calls, rows, outputs)

    def schema_of(self, uid_prefix: str, dimensions: int) -> Schema:
        """Return the schema of the mixture's experts."""
        return self._schema(uid_prefix, dimensions, Deadline.after(self.limits.forward_timeout))

    def run_boundary(
        self,
        uid_prefix: str,
        grid_size: Sequence[int],
        mix: Callable[..., tuple[list[Tensor], Schema]],
        gated: Tensor,
        drawn: Tensor | None,
        leaves: Sequence[object],
        nesting: Nesting,
        entry: Tensor,
        more: Sequence[Form] = (),
    ) -> tuple[Schema, list[Tensor]]:
        """Return the result of ``mix`` for the gate's scores and the inputs: the outputs, then the further values of
        ``more``.

        ``mix`` also returns the schema of the experts that it called.
        """
        for leaf in leaves:
            if leaf is not None and not isinstance(leaf, Tensor):
                raise SchemaError(f"experts take tensors and None, got {type(leaf).__name__}")
        asked: list[Schema] = []

        def crossing(entry: Tensor | None, *inputs: Tensor | None) -> list[Tensor]:
            outputs, schema = mix(entry, *inputs)
            asked[:] = [schema]
            return outputs

        def forms(inputs: Sequence[Tensor | None]) -> list[Form]:
            # Not the outer ``gated``: a graph must not hold a tensor of its capture.
            gated = cast("Tensor", inputs[0])
            schema, found = self.forms_of(uid_prefix, len(grid_size), gated, nesting.rebuild(inputs[2:], plain=True))
            asked[:] = [schema]
            # The gate's gradient comes through every output.
            return [*(replace(form, differentiable=True) for form in found), *more]

        boundary = RecordedBoundary("mixture", uid_prefix, crossing, forms)
        outputs = list(cross(boundary, gated, drawn, *cast("Sequence[Tensor | None]", leaves), entry=entry))
        # A stage of a pipe that runs again is given the first answers, and asks nobody.
        return asked[0] if asked else self.schema_of(uid_prefix, len(grid_size)), outputs

    def _make_calls(
        self,
        choices: Choices,
        wanted: NDArray[np.bool_],
        found: dict[str, tuple[str, Schema]],
        args: tuple[Structure, ...],
        kwargs: dict[str, Structure],
        modes: CallerModes,
    ) -> tuple[list[ExpertCall], list[NDArray[np.int64]]]:
        calls: list[ExpertCall] = []
        rows: list[NDArray[np.int64]] = []
        for slot, uid in enumerate(choices.uids):
            if uid not in found:
                continue
            endpoint, schema = found[uid]
            mine = np.nonzero(((choices.slots == slot) & wanted).any(axis=1))[0]
            if not len(mine):
                continue
            inputs, _ = schema.flatten_inputs(args, kwargs, casting=modes.casting)
            some = [None if tensor is None else select_rows(tensor, mine) for tensor in inputs]
            calls.append(ExpertCall(uid, endpoint, schema, some, modes.evaluating))
            rows.append(mine)
        return calls, rows

    def _run(
        self,
        calls: list[ExpertCall],
        rows: list[NDArray[np.int64]],
        choices: Choices,
        deadline: Deadline,
        entry: Tensor | None,
    ) -> list[list[Tensor | None] | None]:
        limits = self.limits
        total = len(choices.slots)
        rows_of = {id(call): mine for call, mine in zip(calls, rows, strict=True)}
        wanted = np.minimum(count_answers(total, rows), limits.k_min)

        def enough(now: Sequence[ExpertCall]) -> bool:
            counts = count_answers(total, [mine for call, mine in zip(now, rows, strict=True) if call.answered])
            return bool((counts >= wanted).all())

        def check_backward(asked: Sequence[ExpertCall]) -> None:
            for call in asked:
                self._note(call.uid, call.gradient_error)
            came = count_answers(total, [rows_of[id(call)] for call in asked if call.gradient_error is None])
            alive = [call for call in asked if not isinstance(call.gradient_error, PeerLost)]
            least = np.minimum(count_answers(total, [rows_of[id(call)] for call in alive]), limits.backward_k_min)
            if (came < least).any():
                raise self._too_few("backward", asked, [call.gradient_error for call in asked], (came < least).sum())
            if len(alive) < len(asked):
                answered = count_answers(total, [rows_of[id(call)] for call in asked]) > 0
                self._warn_of_lost_gradients(asked, (came == 0) & answered)

        made = call_experts(
            Calls(
                self.finder.client,
                calls,
                limits.forward_timeout,
                limits.backward_timeout,
                enough=None if limits.timeout_after_k_min is None else enough,
                grace=limits.timeout_after_k_min,
                check_backward=check_backward,
                finite_only=limits.detect_anomalies,
                deadline=deadline,
                counts=self._counts,
            ),
            entry,
        )
        for call in calls:
            if call.answered or call.error is not None:
                self._note(call.uid, call.error)
            if isinstance(call.error, SchemaError):
                self.finder.forget([call.uid])
        return made

    def _warn_of_lost_gradients(self, asked: Sequence[ExpertCall], without: NDArray[np.bool_]) -> None:
        uids = sorted({call.uid for call in asked if isinstance(call.gradient_error, PeerLost)})
        _log.warning(
            "%s died between forward and backward: their updates for this step may be lost, and %d rows "
            "get no gradient through the mixture in it",
            ", ".join(uids),
            without.sum(),
        )

    def _note(self, uid: str, error: Exception | None) -> None:
        if error is None:
            self.finder.backoff.answered(uid)
        else:
            self.finder.backoff.failed(uid)

    def _has_enough(self, present: NDArray[np.bool_]) -> NDArray[np.bool_]:
        return cast("NDArray[np.bool_]", present.sum(axis=1) >= self.limits.k_min)

    def _check_enough(self, present: NDArray[np.bool_], calls: Sequence[ExpertCall], deadline: Deadline) -> None:
        short = ~self._has_enough(present)
        if short.any() and not self.limits.allow_zero_outputs:
            raise self._too_few("forward", calls, [call.error for call in calls], short.sum(), deadline.elapsed())

    def _too_few(
        self,
        phase: str,
        calls: Sequence[ExpertCall],
        errors: Sequence[Exception | None],
        short: int,
        elapsed: float | None = None,
    ) -> BoundaryError:
        least = self.limits.k_min if phase == "forward" else self.limits.backward_k_min
        said = [f"{call.uid}: {error}" for call, error in zip(calls, errors, strict=True) if error is not None]
        told = "; ".join(said[:3]) or "the directory lists too few"
        cures = _cures(phase, least, lost=any(isinstance(error, PeerLost) for error in errors))
        return BoundaryError(
            f"{short} rows have fewer than {least} experts that answered ({told}); {cures}",
            peer=f"{len(calls)} experts",
            operation=f"mixture.{phase}",
            elapsed=elapsed,
        )


def _cures(phase: str, least: int, *, lost: bool) -> str:
    """Return the arguments that let a step continue with fewer answers, and advice on losing fewer."""
    if phase == "backward":
        return f"with backward_k_min={least - 1} the step continues without these gradients"
    fewer = [f"lower k_min={least}"] if least > 1 else []
    more = ["serve the experts from more processes (anabranch run --experts N)"] if lost else []
    return ", or ".join([*fewer, "give allow_zero_outputs=True to mix these rows from the available answers", *more])


def _no_schema(deadline: Deadline) -> BoundaryError:
    return BoundaryError(
        "no expert has answered yet, so the shape of their outputs is not known",
        peer="experts",
        operation="mixture",
        elapsed=deadline.elapsed(),
    )
