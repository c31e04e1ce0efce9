"""Mixtures of remote experts: a gate here, experts anywhere, and an answer from those that answer.

::

                     ┌─ the boundary ─────────────────────────────────────────────────────────────┐
    x ──> gate ──> scores ──> beam search over the directory ──> rows grouped by expert            │
    │                │                                                  │                         │
    │                │                     one call an expert, all at once, one deadline          │
    │                │                                                  │                         │
    │                └──> softmax over the responders ──> * ──> sum ────┼─────────────────────────┼─> y
    └─────────────────────── inputs of the calls ────────────┘                                     │
                     └────────────────────────────────────────────────────────────────────────────┘

An expert that does not answer is left out of the softmax, so the result is that of a mixture of the responders alone,
and so are its gradients. Rows left with too few experts, some of them lost with their process, ask the next best ones.
The experts asked depend on the gate's values, so all of that is behind one boundary: the tape and a captured graph see
one operation whose outputs have the form given by the experts' schema.

The file is long because the two mixtures share one caller and one boundary, which nothing else uses.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from numbers import Real
from typing import ClassVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from anabranch.autodiff import opaque
from anabranch.autodiff.boundary.crossing import Form, cross, outside_tracing
from anabranch.autodiff.boundary.recorded import RecordedBoundary
from anabranch.deadline import Deadline, check_seconds
from anabranch.errors import BoundaryError, NonFinite, PeerLost, SchemaError
from anabranch.experts.client.beam_search import Choices, beam_search
from anabranch.experts.client.calls import Calls, ExpertCall, call_experts, output_forms, sample_forms
from anabranch.experts.client.connections import Reach
from anabranch.experts.client.finder import ExpertFinder
from anabranch.experts.directory import DirectoryLike, as_directory, within
from anabranch.experts.nesting import Nesting, flatten
from anabranch.experts.schema import Schema, with_leading
from anabranch.job import job
from anabranch.tensors import Structure, TensorSpec
from anabranch.transport import Client
from anabranch.transport.directory.uids import check_prefix

__all__ = ["MixtureStatistics", "RemoteMixtureOfExperts", "RemoteSwitchMixtureOfExperts"]

_log = logging.getLogger("anabranch.experts")

# A mixture has other experts, so it does not wait for one that refuses connections.
_RETRIES = 2
_MOST_LOOKED_UP = 4096
_LOOK_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class MixtureStatistics:
    """Counters of a mixture's calls since it was made.

    Attributes:
        calls: calls of experts.
        answered: those that were answered.
        failed: those that failed, by the name of the error.
        cancelled: calls cancelled as stragglers.
        rows: rows sent to each expert, by uid: how evenly the experts are used.
        avoided: experts that are avoided at the moment.
    """

    calls: int
    answered: int
    failed: dict[str, int]
    cancelled: int
    rows: dict[str, int]
    avoided: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Terms:
    """Timeouts and the experts that must answer, from the modules' arguments."""

    k_min: int
    forward_timeout: float
    timeout_after_k_min: float | None
    backward_k_min: int
    backward_timeout: float
    allow_zero_outputs: bool
    detect_anomalies: bool


@dataclass(frozen=True, slots=True)
class _Manner:
    """The caller's mode and precision when the mixture is called or captured.

    Attributes:
        evaluating: in eval mode.
        casting: under autocast.
    """

    evaluating: bool
    casting: bool


@dataclass(slots=True)
class _Asked:
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
        position, count = _positions(choices, self.calls, self.rows)
        return cast("NDArray[np.bool_]", position != count)

    def lost_any(self, choices: Choices) -> bool:
        """Return True if an expert's process is gone, or the expert is listed but cannot be reached."""
        gone = any(isinstance(call.error, PeerLost) for call in self.calls)
        return gone or bool(set(choices.uids) - {call.uid for call in self.calls})

    def failed(self, choices: Choices) -> set[str]:
        """Return the uids of the chosen experts that gave no answer."""
        return set(choices.uids) - {call.uid for call in self.calls if call.answered}


@dataclass(frozen=True, slots=True)
class _Chosen:
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


class _Asker:
    """Finds the chosen experts, calls each once for all its rows, and sorts the answers by row, for both mixtures."""

    def __init__(self, finder: ExpertFinder, terms: _Terms) -> None:
        self.finder = finder
        self.terms = terms
        self._calls = self._answered = self._cancelled = 0
        self._failed: Counter[str] = Counter()
        self._rows: Counter[str] = Counter()

    def __deepcopy__(self, memo: dict[int, object]) -> _Asker:
        # A copied mixture has its own gate and shares the original's cache of experts.
        return _Asker(self.finder, self.terms)

    def __reduce__(self) -> tuple[type[_Asker], tuple[ExpertFinder, _Terms]]:
        return _Asker, (self.finder, self.terms)

    def statistics(self) -> MixtureStatistics:
        return MixtureStatistics(
            self._calls,
            self._answered,
            dict(self._failed),
            self._cancelled,
            dict(self._rows),
            frozenset(self.finder.avoidance.now()),
        )

    def choose(
        self,
        uid_prefix: str,
        scores: Sequence[Tensor],
        k: int,
        deadline: Deadline,
        kept: Sequence[Tensor] | None,
        failed: Collection[str] = (),
    ) -> Choices:
        arrays = [grid.detach().double().cpu().numpy() for grid in scores]
        if not all(np.isfinite(array).all() for array in arrays):
            raise NonFinite("the gate's scores hold NaN or Inf; check its inputs and weights")
        directory = within(self.finder.directory, deadline)
        masks = None if kept is None else [mask.cpu().numpy() for mask in kept]
        return beam_search(directory, uid_prefix, arrays, k, self.finder.avoidance.now().union(failed), masks)

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
        deadline = Deadline.after(self.terms.forward_timeout)
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

    def ask(
        self,
        choose: Callable[[Collection[str]], Choices],
        args: tuple[Structure, ...],
        kwargs: dict[str, Structure],
        deadline: Deadline,
        entry: Tensor | None,
        manner: _Manner,
    ) -> _Chosen:
        """Call the chosen experts, and the next best ones for rows that lost theirs with a process.

        ``choose`` returns the choices of all rows, without the given uids.
        """
        device = next(leaf.device for leaf in flatten((args, kwargs))[0] if isinstance(leaf, Tensor))
        choices = choose(())
        asked = _Asked([], [], [])
        self._ask_round(asked, choices, choices.slots >= 0, args, kwargs, deadline, entry, manner)
        short = ~self._has_enough(asked.present(choices))
        if short.any() and asked.lost_any(choices) and not self.terms.allow_zero_outputs and not deadline.expired():
            choices = choices.with_rows_of(choose(asked.failed(choices)), short)
            unasked = short[:, None] & (choices.slots >= 0) & ~asked.present(choices)
            self._ask_round(asked, choices, unasked, args, kwargs, deadline, entry, manner)
        present = asked.present(choices)
        self._check_enough(present, asked.calls, deadline)
        schema = asked.calls[0].schema if asked.calls else self.finder.any_schema
        if schema is None:
            raise _no_schema(deadline)
        _check_alike(asked.calls)
        position, count = _positions(choices, asked.calls, asked.rows)
        columns = [
            None if spec is None else _gather(asked.outputs, index, spec, position, count, device)
            for index, spec in enumerate(schema.output_specs)
        ]
        return _Chosen(choices, torch.from_numpy(present).to(device), columns, schema)

    def _ask_round(
        self,
        asked: _Asked,
        choices: Choices,
        wanted: NDArray[np.bool_],
        args: tuple[Structure, ...],
        kwargs: dict[str, Structure],
        deadline: Deadline,
        entry: Tensor | None,
        manner: _Manner,
    ) -> None:
        """Call the experts of the slots that are true in ``wanted``, each once for all its rows."""
        found = self.finder.find(choices.uids, deadline)
        calls, rows = self._make_calls(choices, wanted, found, args, kwargs, manner)
        if calls:
            outputs = self._run(calls, rows, choices, deadline, entry)
            asked.add(calls, rows, outputs)

    def schema_of(self, uid_prefix: str, dimensions: int) -> Schema:
        """Return the schema of the mixture's experts."""
        return self._schema(uid_prefix, dimensions, Deadline.after(self.terms.forward_timeout))

    def mixed(
        self,
        uid_prefix: str,
        grid_size: Sequence[int],
        mix: Callable[..., tuple[list[Tensor], Schema]],
        gated: Tensor,
        drawn: Tensor | None,
        leaves: Sequence[object],
        nesting: Nesting,
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
        outputs = list(cross(boundary, gated, drawn, *cast("Sequence[Tensor | None]", leaves)))
        return asked[0], outputs

    def _make_calls(
        self,
        choices: Choices,
        wanted: NDArray[np.bool_],
        found: dict[str, tuple[str, Schema]],
        args: tuple[Structure, ...],
        kwargs: dict[str, Structure],
        manner: _Manner,
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
            inputs, _ = schema.flatten_inputs(args, kwargs, casting=manner.casting)
            some = [None if tensor is None else _select(tensor, mine) for tensor in inputs]
            calls.append(ExpertCall(uid, endpoint, schema, some, manner.evaluating))
            rows.append(mine)
            self._rows[uid] += len(mine)
        return calls, rows

    def _run(
        self,
        calls: list[ExpertCall],
        rows: list[NDArray[np.int64]],
        choices: Choices,
        deadline: Deadline,
        entry: Tensor | None,
    ) -> list[list[Tensor | None] | None]:
        terms = self.terms
        total = len(choices.slots)
        rows_of = {id(call): mine for call, mine in zip(calls, rows, strict=True)}
        wanted = np.minimum(_count(total, rows), terms.k_min)

        def enough(now: Sequence[ExpertCall]) -> bool:
            counts = _count(total, [mine for call, mine in zip(now, rows, strict=True) if call.answered])
            return bool((counts >= wanted).all())

        def check_backward(asked: Sequence[ExpertCall]) -> None:
            for call in asked:
                self._note(call.uid, call.gradient_error)
            came = _count(total, [rows_of[id(call)] for call in asked if call.gradient_error is None])
            alive = [call for call in asked if not isinstance(call.gradient_error, PeerLost)]
            least = np.minimum(_count(total, [rows_of[id(call)] for call in alive]), terms.backward_k_min)
            if (came < least).any():
                raise self._too_few("backward", asked, [call.gradient_error for call in asked], (came < least).sum())
            if len(alive) < len(asked):
                self._tell_of_lost_gradients(asked, (came == 0) & (_count(total, [rows_of[id(c)] for c in asked]) > 0))

        made = call_experts(
            Calls(
                self.finder.client,
                calls,
                terms.forward_timeout,
                terms.backward_timeout,
                enough=None if terms.timeout_after_k_min is None else enough,
                grace=terms.timeout_after_k_min,
                check_backward=check_backward,
                finite_only=terms.detect_anomalies,
                deadline=deadline,
            ),
            entry,
        )
        self._calls += len(calls)
        for call in calls:
            self._answered += call.answered
            self._cancelled += not call.answered and call.error is None
            if call.answered or call.error is not None:
                self._note(call.uid, call.error)
            if isinstance(call.error, SchemaError):
                self.finder.forget([call.uid])
        return made

    def _tell_of_lost_gradients(self, asked: Sequence[ExpertCall], without: NDArray[np.bool_]) -> None:
        uids = sorted({call.uid for call in asked if isinstance(call.gradient_error, PeerLost)})
        _log.warning(
            "%s died between forward and backward: their updates for this step are lost, and %d rows "
            "get no gradient through the mixture in it",
            ", ".join(uids),
            without.sum(),
        )

    def _note(self, uid: str, error: Exception | None) -> None:
        if error is None:
            self.finder.avoidance.answered(uid)
        else:
            self._failed[type(error).__name__] += 1
            self.finder.avoidance.failed(uid)

    def _has_enough(self, present: NDArray[np.bool_]) -> NDArray[np.bool_]:
        return cast("NDArray[np.bool_]", present.sum(axis=1) >= self.terms.k_min)

    def _check_enough(self, present: NDArray[np.bool_], calls: Sequence[ExpertCall], deadline: Deadline) -> None:
        short = ~self._has_enough(present)
        if short.any() and not self.terms.allow_zero_outputs:
            raise self._too_few("forward", calls, [call.error for call in calls], short.sum(), deadline.elapsed())

    def _too_few(
        self,
        phase: str,
        calls: Sequence[ExpertCall],
        errors: Sequence[Exception | None],
        short: int,
        elapsed: float | None = None,
    ) -> BoundaryError:
        least = self.terms.k_min if phase == "forward" else self.terms.backward_k_min
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


def _select(tensor: Tensor, rows: NDArray[np.int64]) -> Tensor:
    if len(rows) == len(tensor):
        return tensor
    return tensor.index_select(0, torch.from_numpy(rows).to(tensor.device))


def _count(total: int, rows: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    counts = np.zeros(total, dtype=np.int64)
    for mine in rows:
        counts[mine] += 1
    return counts


def _check_alike(calls: Sequence[ExpertCall]) -> None:
    for call in calls[1:]:
        if call.schema.output_specs != calls[0].schema.output_specs:
            raise SchemaError(
                f"{calls[0].uid} returns {calls[0].schema.outputs}, but {call.uid} returns {call.schema.outputs}: the "
                "experts of a mixture must return the same"
            )
    for spec in calls[0].schema.output_specs if calls else ():
        if spec is not None and not spec.dtype.is_floating_point:
            raise SchemaError(f"{calls[0].uid} returns {spec.dtype}, which has no weighted mean")


def _positions(
    choices: Choices, calls: Sequence[ExpertCall], rows: Sequence[NDArray[np.int64]]
) -> tuple[NDArray[np.int64], int]:
    """For each row and slot the index of its answer among all answers joined; the last index if there is no answer."""
    count = sum(len(mine) for call, mine in zip(calls, rows, strict=True) if call.answered)
    position = np.full(choices.slots.shape, count, dtype=np.int64)
    slot_of = {uid: slot for slot, uid in enumerate(choices.uids)}
    start = 0
    for call, mine in zip(calls, rows, strict=True):
        if call.answered:
            where = choices.slots[mine] == slot_of[call.uid]
            position[mine[:, None].repeat(where.shape[1], 1)[where], np.nonzero(where)[1]] = start + np.arange(
                len(mine)
            )
            start += len(mine)
    return position, count


def _gather(
    outputs: Sequence[list[Tensor | None] | None],
    index: int,
    spec: TensorSpec,
    position: NDArray[np.int64],
    count: int,
    device: torch.device,
) -> Tensor:
    parts = [tensor for answer in outputs if answer is not None and (tensor := answer[index]) is not None]
    sizes = {spec.sizes_of(part.shape) for part in parts} if spec.varying else {()}
    if len(sizes) > 1:
        raise SchemaError(f"experts returned outputs of different sizes, {sorted(sizes)}, which cannot be averaged")
    if not sizes:
        raise BoundaryError(
            f"no expert answered, so the sizes of their outputs, {spec.describe()}, are not known",
            peer="experts",
            operation="mixture",
        )
    joined = torch.cat([*parts, spec.zeros(1, *sizes, device=device)])
    assert len(joined) == count + 1
    flat = joined.index_select(0, torch.from_numpy(position.reshape(-1)).to(device))
    return flat.view(*position.shape, *joined.shape[1:])


def _weigh(weights: Tensor, answers: Tensor) -> Tensor:
    shape = (*weights.shape, *[1] * (answers.ndim - 2))
    return (weights.to(answers.dtype).view(shape) * answers).sum(1)


def _scores_of(scores: Sequence[Tensor], choices: Choices) -> Tensor:
    """Of shape (rows, k): the sums of the chosen coordinates' scores, with their gradients."""
    coordinates = torch.from_numpy(choices.coordinates).to(scores[0].device)
    return torch.stack([grid.gather(1, coordinates[:, :, dimension]) for dimension, grid in enumerate(scores)]).sum(0)


def _kept(drawn: Tensor | None, grid_size: Sequence[int]) -> list[Tensor] | None:
    """Return for each dimension which indices may be chosen; ``None`` if all may."""
    if drawn is None:
        return None
    return [mask | ~mask.any() for mask in torch.split(drawn, list(grid_size))]


def _dimensions_of(schema: Schema) -> int:
    """Return the number of dimensions of a row of an expert's first input."""
    first = schema.arguments[0] if schema.arguments else None
    return len(first.shape) if isinstance(first, TensorSpec) else 1


def _gate_input(x: Tensor) -> Tensor:
    if x.ndim < 2:
        raise SchemaError(f"a mixture's input has rows and features, got shape {tuple(x.shape)}")
    return x if x.ndim == 2 else x.flatten(1, -2).mean(1)


def _check_arguments(
    grid_size: Sequence[int], uid_prefix: str, terms: _Terms, k_best: int
) -> tuple[tuple[int, ...], str]:
    sizes = tuple(grid_size)
    if not sizes or any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in sizes):
        raise ValueError(f"grid_size is one size above 0 per dimension, got {grid_size!r}")
    counts = {"k_best": k_best, "k_min": terms.k_min, "backward_k_min": terms.backward_k_min}
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int):
            raise TypeError(f"{name} is a whole number of experts, got {count!r}")
    if k_best < 1 or not 0 <= terms.k_min <= k_best or not 0 <= terms.backward_k_min <= k_best:
        raise ValueError(
            f"0 <= k_min, backward_k_min <= k_best and k_best >= 1, got k_best={k_best}, k_min={terms.k_min}, "
            f"backward_k_min={terms.backward_k_min}"
        )
    check_seconds(forward_timeout=terms.forward_timeout, backward_timeout=terms.backward_timeout)
    # None and 0, which does not wait, are fine.
    if terms.timeout_after_k_min:
        check_seconds(timeout_after_k_min=terms.timeout_after_k_min)
    return sizes, check_prefix(uid_prefix)


def _check_fraction(name: str, value: float) -> None:
    if not isinstance(value, Real):
        raise TypeError(f"{name} is a number in [0, 1), got {value!r}")
    if not 0 <= value < 1:
        raise ValueError(f"{name} lies in [0, 1), got {value!r}")


def _check_gated(x: object, gate: nn.Module) -> None:
    """Refuse an input that the gate does not accept; a user's own gate checks its input itself."""
    if not isinstance(x, Tensor):
        raise SchemaError(f"a mixture's first input is the tensor for its gate, got a {type(x).__name__}")
    if type(gate) is not nn.Linear:
        return
    if x.ndim >= 2 and x.shape[-1] != gate.in_features:
        raise SchemaError(
            f"the last dimension of a mixture's input is in_features={gate.in_features}, for its gate, got shape "
            f"{tuple(x.shape)}"
        )
    dtype = gate.weight.dtype
    casts = torch.is_autocast_enabled(x.device.type) and x.is_floating_point() and x.dtype != torch.float64
    if x.dtype != dtype and not casts:
        raise SchemaError(
            f"a mixture's input must be {dtype}, like its gate's weights, got {x.dtype}; give x.to({dtype})"
        )


def _finder(
    directory: DirectoryLike | str, client: Client | None, keys: str | os.PathLike[str] | None, *, insecure: bool
) -> ExpertFinder:
    reach = Reach(client, keys=keys, insecure=insecure, retries=_RETRIES)
    return ExpertFinder(as_directory(directory, keys=keys, insecure=insecure), reach)


class _Mixture(nn.Module):
    """A gate, and the experts of a grid that it chooses for each row, called and weighted as one call."""

    steps_there: ClassVar[bool] = True

    def __init__(
        self,
        in_features: int,
        grid_size: Sequence[int],
        uid_prefix: str,
        k_best: int,
        terms: _Terms,
        grid_dropout: float,
        finder: Callable[[], ExpertFinder],
    ) -> None:
        super().__init__()
        _check_fraction("grid_dropout", grid_dropout)
        self.grid_dropout = grid_dropout
        self.grid_size, self.uid_prefix = _check_arguments(grid_size, uid_prefix, terms, k_best)
        self.k_best = k_best
        self.gate = nn.Linear(in_features, sum(self.grid_size))
        self._asker = _Asker(finder(), terms)
        if job().experts and not terms.allow_zero_outputs:  # they have announced themselves, and can be asked
            self._warn_of_one_process(terms.k_min)
        self._form: object = None
        self._dimensions = 1
        self._handle = opaque.handle_of(self)

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._handle = opaque.handle_of(self)

    def _warn_of_one_process(self, k_min: int) -> None:
        """Warn if one process serves so many of the job's experts that too few are left without it."""
        if math.prod(self.grid_size) > _MOST_LOOKED_UP:
            return
        points = itertools.product(*map(range, self.grid_size))
        uids = [f"{self.uid_prefix}.{'.'.join(map(str, point))}" for point in points]
        try:
            found = within(self._asker.finder.directory, Deadline.after(_LOOK_SECONDS)).lookup(uids)
        except BoundaryError:
            return
        _, most = max(Counter(found.values()).items(), key=lambda item: item[1], default=("", 0))
        if most and len(found) - most < k_min:
            warnings.warn(
                f"one process serves {most} of the {len(found)} experts of {self.uid_prefix!r}: if it dies, rows have "
                f"fewer than k_min={k_min} answers and the step fails. Start more (anabranch run --experts N), or give "
                "allow_zero_outputs=True",
                stacklevel=4,
            )

    def extra_repr(self) -> str:
        """Return where the experts are in the grid, and how many are called."""
        return f"{self.uid_prefix!r}, grid_size={self.grid_size}, k_best={self.k_best}"

    def learn_form(self) -> None:
        """Request the nesting of the experts' outputs and the dimensions of their inputs, for a capture."""
        schema = self._asker.schema_of(self.uid_prefix, len(self.grid_size))
        self._form, self._dimensions = schema.output_form(), _dimensions_of(schema)

    def _leading_of(self, x: Tensor) -> tuple[int, ...]:
        """Return the sizes of those dimensions of the input that come before an expert's: its rows."""
        if not torch.compiler.is_dynamo_compiling():
            _check_gated(x, self.gate)
        if x.ndim < 3:
            return tuple(x.shape[:1])
        if torch.compiler.is_dynamo_compiling():
            dimensions = self._dimensions
        else:
            dimensions = _dimensions_of(self._asker.schema_of(self.uid_prefix, len(self.grid_size)))
        return tuple(x.shape[: max(x.ndim - dimensions, 1)])

    def _gated(self, x: Tensor, leading: tuple[int, ...]) -> Tensor:
        """Return the gate's logits for each row."""
        return cast("Tensor", self.gate(self._seen(_gate_input(x.flatten(0, len(leading) - 1)))))

    def _seen(self, x: Tensor) -> Tensor:
        """Return the part of its input that the gate sees."""
        return x

    def _drawn(self, gated: Tensor) -> Tensor | None:
        """Return which of the gate's columns may be chosen in this call; ``None`` for all."""
        if not (self.training and self.grid_dropout):
            return None
        return torch.rand(gated.shape[-1], device=gated.device) >= self.grid_dropout

    def call_whole(
        self, training: bool, gated: Tensor, drawn: Tensor | None, *args: Structure, **kwargs: Structure
    ) -> Sequence[Tensor]:
        """Everything after the gate, as one call that Dynamo does not trace into."""
        return self._mixed(gated, drawn, args, kwargs, evaluating=not training)[1]

    def statistics(self) -> MixtureStatistics:
        """Counters since the module was made."""
        return self._asker.statistics()

    def _weights(self, scores: Sequence[Tensor], choices: Choices, present: Tensor) -> Tensor:
        """Return the weights of the chosen experts' answers, (rows, k_best); 0 for those that are not ``present``."""
        # A row without responders has no softmax; zero scores keep NaN out of its gradient too.
        answered = present.any(dim=1, keepdim=True)
        logits = _scores_of(scores, choices).masked_fill(~present & answered, float("-inf"))
        return torch.softmax(logits, dim=1) * answered

    def _beside(self, choices: Choices, gated: Tensor) -> list[Tensor]:
        """More outputs of the call."""
        return []

    def _forms_beside(self, gated: Tensor) -> list[Form]:
        """Return the forms of these, for when no expert is called."""
        return []

    def _mixed(
        self,
        gated: Tensor,
        drawn: Tensor | None,
        args: tuple[Structure, ...],
        kwargs: dict[str, Structure],
        *,
        evaluating: bool,
    ) -> tuple[Schema, list[Tensor]]:
        leaves, nesting = flatten((args, kwargs))
        manner = _Manner(evaluating, torch.is_autocast_enabled(gated.device.type))

        Mixed = tuple[list[Tensor], Schema]

        def mix(entry: Tensor | None, gated: Tensor, drawn: Tensor | None, *inputs: Tensor | None) -> Mixed:
            # A captured graph runs this outside the autocast of its capture, and the tape does the same.
            with torch.autocast(gated.device.type, enabled=False) if manner.casting else nullcontext():
                return mix_as_it_is(entry, gated, drawn, *inputs)

        def mix_as_it_is(entry: Tensor | None, gated: Tensor, drawn: Tensor | None, *inputs: Tensor | None) -> Mixed:
            deadline = Deadline.after(self._asker.terms.forward_timeout)
            # Softmax and sums are in single precision under autocast.
            if manner.casting and gated.dtype in (torch.float16, torch.bfloat16):
                gated = gated.float()
            scores = list(torch.split(gated, list(self.grid_size), dim=-1))
            kept = _kept(drawn, self.grid_size)
            # The experts read mappings and tuples of any class by their own schema.
            its_args, its_kwargs = cast(
                "tuple[tuple[Structure, ...], dict[str, Structure]]", nesting.rebuild(inputs, plain=True)
            )
            if not len(gated):
                return self._mixed_nothing(gated, (its_args, its_kwargs))

            def choose(failed: Collection[str]) -> Choices:
                return self._asker.choose(self.uid_prefix, scores, self.k_best, deadline, kept, failed)

            chosen = self._asker.ask(choose, its_args, its_kwargs, deadline, entry, manner)
            if kept is not None:
                scores = [grid.masked_fill(~mask, float("-inf")) for grid, mask in zip(scores, kept, strict=True)]
            weights = self._weights(scores, chosen.choices, chosen.present)
            outputs = [_weigh(weights, answers) for answers in chosen.outputs if answers is not None]
            return [*outputs, *self._beside(chosen.choices, gated)], chosen.schema

        return self._asker.mixed(
            self.uid_prefix, self.grid_size, mix, gated, drawn, leaves, nesting, self._forms_beside(gated)
        )

    def _mixed_nothing(self, gated: Tensor, inputs: Structure) -> tuple[list[Tensor], Schema]:
        """Return the outputs for no rows: connected to the gate, and through it to the input."""
        schema, forms = self._asker.forms_of(self.uid_prefix, len(self.grid_size), gated, inputs)
        zero = gated.sum() * 0.0
        outputs = [gated.new_zeros(form.shape, dtype=form.dtype) + zero.to(form.dtype) for form in forms]
        shape = (0, self.k_best)
        none = Choices([], np.full(shape, -1), np.zeros((*shape, len(self.grid_size)), dtype=np.int64))
        return [*outputs, *self._beside(none, gated)], schema


class RemoteMixtureOfExperts(_Mixture):
    """Calls the best experts of a grid for each row, and mixes the answers received.

    >>> from anabranch.experts import Directory, ExpertBackend, ExpertServer
    >>> directory = Directory()
    >>> backends = [ExpertBackend(f"same.{i}", nn.Identity(), args_schema=[TensorSpec(4)]) for i in range(3)]
    >>> with ExpertServer(backends, directory=directory):
    ...     mixture = RemoteMixtureOfExperts(4, [3], directory, "same", k_best=2)
    ...     torch.allclose(mixture(torch.ones(5, 4)), torch.ones(5, 4))
    True

    Args:
        in_features: of the gate: the last size of the input.
        grid_size: sizes of the grid; experts are called ``uid_prefix.i[.j...]`` with indices below them.
        directory: finds the experts: a ``Directory``, the endpoint of a ``DirectoryServer``, or the URL of a Redis.
        uid_prefix: of the experts' uids.
        k_best: experts called for each row.
        k_min: answers that each row needs, or ``BoundaryError`` is raised. Rows that lost their experts with a process
            ask the next best ones before it is.
        forward_timeout: seconds for all of a forward, beam search included.
        timeout_after_k_min: seconds for which stragglers are waited for once every row has ``k_min`` answers; ``None``:
            as long as ``forward_timeout``.
        backward_k_min: gradients that each row needs (all of those that answered it, if they are fewer, leaving out
            those whose process has died since: the log ``anabranch.experts`` tells of them).
        backward_timeout: seconds for a backward.
        allow_zero_outputs: rows with fewer than ``k_min`` answers are mixed from the answers there are, zeros without
            any, instead of raising.
        detect_anomalies: treats an answer that holds NaN or Inf as missing.
        grid_dropout: in train mode each index of each dimension is left out of a call with this probability, so that
            other experts are tried too; a dimension that would lose all its indices keeps them.
        client: sends the requests; shared by the process's mixtures by default, with ``keys`` and ``insecure``.

    Raises:
        ValueError: a grid without sizes, counts that contradict each other, an invalid prefix or time.
        TypeError: a count, time or probability that is not a number.

    Called with an input of shape (rows, ..., in_features), and further arguments that the experts take, all with as
    many rows; returns what an expert returns. The gate is one ``nn.Linear``. Dimensions before those of the experts'
    first input are rows, and the outputs have them too: experts of ``TensorSpec(in_features)`` take (batch, sequence,
    in_features) and are chosen for each position. Experts of ``TensorSpec(None, in_features)`` are chosen for each
    sequence, by a gate that sees the mean over the dimensions between. In eval mode the experts run in eval mode, and
    under autocast floating inputs are cast to their dtypes.
    An expert that fails twice in a row is avoided for a while. A mixture can be copied, and pickled if its directory
    can.

    Raises, when called: BoundaryError, if too few answer; SchemaError, for arguments that do not fit; NonFinite, if the
    gate's scores are not finite.

    Source: Ryabinin and Gusev, "Towards Crowdsourced Training of Large Neural Networks using Decentralized
    Mixture-of-Experts", 2020; product keys after Lample et al., 2019.
    """

    def __init__(
        self,
        in_features: int,
        grid_size: Sequence[int],
        directory: DirectoryLike | str,
        uid_prefix: str,
        *,
        k_best: int = 4,
        k_min: int = 1,
        forward_timeout: float = 30.0,
        timeout_after_k_min: float | None = None,
        backward_k_min: int = 1,
        backward_timeout: float = 30.0,
        allow_zero_outputs: bool = False,
        detect_anomalies: bool = True,
        grid_dropout: float = 0.0,
        client: Client | None = None,
        keys: str | os.PathLike[str] | None = None,
        insecure: bool = False,
    ) -> None:
        terms = _Terms(
            k_min,
            forward_timeout,
            timeout_after_k_min,
            backward_k_min,
            backward_timeout,
            allow_zero_outputs,
            detect_anomalies,
        )
        super().__init__(
            in_features,
            grid_size,
            uid_prefix,
            k_best,
            terms,
            grid_dropout,
            lambda: _finder(directory, client, keys, insecure=insecure),
        )

    def forward(self, x: Tensor, *args: Structure, **kwargs: Structure) -> Structure:
        """Return the mixture's output for ``x``."""
        if torch.compiler.is_dynamo_compiling() and self._form is None:  # a compiler that is not this library's
            return cast(Structure, opaque.beside(self.forward, (x, *args), kwargs))
        leading = self._leading_of(x)
        gated = self._gated(x, leading)
        if torch.compiler.is_dynamo_compiling():
            outputs = opaque.call(self._handle, (self.training, gated, self._drawn(gated), x, *args), kwargs)
            return cast(Structure, opaque.fill(self._form, with_leading(outputs, leading)))
        schema, given = self._mixed(gated, self._drawn(gated), (x, *args), kwargs, evaluating=not self.training)
        return schema.nest_outputs(with_leading(given, leading))


class RemoteSwitchMixtureOfExperts(_Mixture):
    """Calls the best expert of a grid for each row, and keeps the experts evenly used.

    >>> from anabranch.experts import Directory, ExpertBackend, ExpertServer
    >>> directory = Directory()
    >>> backends = [ExpertBackend(f"same.{i}", nn.Identity(), args_schema=[TensorSpec(4)]) for i in range(3)]
    >>> with ExpertServer(backends, directory=directory):
    ...     mixture = RemoteSwitchMixtureOfExperts(4, [3], directory, "same")
    ...     output, balancing_loss = mixture(torch.ones(5, 4))
    >>> output.shape, balancing_loss.shape
    (torch.Size([5, 4]), torch.Size([]))

    A row's output is its expert's, times the expert's probability: the product over dimensions of the softmax of the
    gate's scores, which is how the gate learns. The balancing loss is, for each dimension, the size times the sum over
    indices of mean probability times utilisation, averaged over dimensions: 1 when all are used evenly, more otherwise.
    Add a small multiple of it to the training loss.

    Arguments not listed here are as for ``RemoteMixtureOfExperts``.

    Args:
        k_min: 1: every row's expert must answer; 0: rows whose expert does not are zeros, if ``allow_zero_outputs``.
        backward_k_min: 1: every gradient must come back.
        allow_zero_outputs: rows without an answer are zeros instead of raising.
        utilization_alpha: weight of the past in the moving mean of utilisation.
        jitter: in train mode the gate's input is multiplied by numbers drawn evenly from 1 - jitter to 1 + jitter.

    Raises:
        ValueError: as ``RemoteMixtureOfExperts``; a weight outside [0, 1) or a jitter outside [0, 1).

    Returns a pair: what an expert returns, and the balancing loss.

    Source: Fedus, Zoph and Shazeer, "Switch Transformers", 2021.
    """

    def __init__(
        self,
        in_features: int,
        grid_size: Sequence[int],
        directory: DirectoryLike | str,
        uid_prefix: str,
        *,
        k_min: int = 0,
        forward_timeout: float = 30.0,
        backward_k_min: int = 0,
        backward_timeout: float = 30.0,
        allow_zero_outputs: bool = True,
        detect_anomalies: bool = True,
        utilization_alpha: float = 0.9,
        jitter: float = 1e-2,
        grid_dropout: float = 0.0,
        client: Client | None = None,
        keys: str | os.PathLike[str] | None = None,
        insecure: bool = False,
    ) -> None:
        for name, value in (("utilization_alpha", utilization_alpha), ("jitter", jitter)):
            _check_fraction(name, value)
        terms = _Terms(
            k_min, forward_timeout, None, backward_k_min, backward_timeout, allow_zero_outputs, detect_anomalies
        )
        super().__init__(
            in_features,
            grid_size,
            uid_prefix,
            1,
            terms,
            grid_dropout,
            lambda: _finder(directory, client, keys, insecure=insecure),
        )
        self.utilization_alpha = utilization_alpha
        self.jitter = jitter
        for dimension, size in enumerate(self.grid_size):
            self.register_buffer(f"utilization_{dimension}", torch.full((size,), 1.0 / size))

    def forward(self, x: Tensor, *args: Structure, **kwargs: Structure) -> tuple[Structure, Tensor]:
        """Return the output for ``x``, and the balancing loss."""
        if torch.compiler.is_dynamo_compiling() and self._form is None:  # a compiler that is not this library's
            return cast("tuple[Structure, Tensor]", opaque.beside(self.forward, (x, *args), kwargs))
        leading = self._leading_of(x)
        gated = self._gated(x, leading)
        grids = len(self.grid_size)
        if torch.compiler.is_dynamo_compiling():
            found = opaque.call(self._handle, (self.training, gated, self._drawn(gated), x, *args), kwargs)
            output = cast(Structure, opaque.fill(self._form, with_leading(found[:-grids], leading)))
        else:
            schema, found = self._mixed(gated, self._drawn(gated), (x, *args), kwargs, evaluating=not self.training)
            output = schema.nest_outputs(with_leading(found[:-grids], leading))
        return output, self._balancing_loss(torch.split(gated, list(self.grid_size), dim=-1), found[-grids:])

    def _seen(self, x: Tensor) -> Tensor:
        if self.training and self.jitter:
            return x * torch.empty_like(x).uniform_(1 - self.jitter, 1 + self.jitter)
        return x

    def _weights(self, scores: Sequence[Tensor], choices: Choices, present: Tensor) -> Tensor:
        return _scores_of([grid.log_softmax(dim=-1) for grid in scores], choices).exp() * present

    def _forms_beside(self, gated: Tensor) -> list[Form]:
        return [Form((n + 1,), self.gate.weight.dtype, gated.device, differentiable=False) for n in self.grid_size]

    def _beside(self, choices: Choices, gated: Tensor) -> list[Tensor]:
        """For each dimension the share of rows of each index, then 1 if there were any rows."""
        taken = choices.slots[:, 0] >= 0
        shares = []
        for dimension, size in enumerate(self.grid_size):
            counts = np.bincount(choices.coordinates[taken, 0, dimension], minlength=size)
            share = np.append(counts / max(counts.sum(), 1), float(taken.any()))
            shares.append(torch.from_numpy(share).to(gated.device, self.gate.weight.dtype))
        return shares

    def _balancing_loss(self, scores: Sequence[Tensor], shares: Sequence[Tensor]) -> Tensor:
        losses: list[Tensor] = []
        for dimension, (grid, share) in enumerate(zip(scores, shares, strict=True)):
            utilization = cast(Tensor, getattr(self, f"utilization_{dimension}"))
            if self.training:
                given = share.to(utilization)
                now = (utilization * self.utilization_alpha).add(given[:-1], alpha=1 - self.utilization_alpha)
                with torch.no_grad():
                    utilization.copy_(torch.where(given[-1] > 0, now, utilization))
            # The mean over no rows is NaN.
            mean = grid.softmax(dim=-1).mean(0) if len(grid) else grid.sum(0)
            losses.append(grid.shape[1] * (mean * utilization).sum())
        return torch.stack(losses).mean()
