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
and so are its gradients. Rows left with too few answers ask the next best experts. One whose schema is not that of the
others is left out before it is called. The experts asked depend on the gate's values, so all of that is behind one
boundary: the tape and a captured graph see one operation whose outputs have the form given by the experts' schema.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from anabranch.autodiff.boundary.crossing import Form, RecordedBoundary, cross, outside_tracing
from anabranch.deadline import Deadline, check_seconds
from anabranch.errors import BoundaryError, DeadlineExceeded, NonFinite, PeerLost, SchemaError
from anabranch.experts.client.calls import (
    CallCounts,
    Calls,
    CallStatistics,
    ExpertCall,
    call_experts,
    output_forms,
    sample_forms,
)
from anabranch.experts.client.finder import GONE, Choices, ExpertFinder, Phase, beam_search
from anabranch.experts.client.remote_expert import RemoteModule
from anabranch.experts.directory import DirectoryLike, as_directory, within
from anabranch.experts.wire import Nesting, Schema, outline, with_leading
from anabranch.tensors import Structure, TensorSpec
from anabranch.transport import Client
from anabranch.transport.announcements import check_prefix
from anabranch.transport.client import ModuleClient
from anabranch.transport.failures import printable

_log = logging.getLogger("anabranch.experts")

# A mixture has other experts, so it does not wait for one that refuses connections.
_RETRIES = 2
# Experts whose schemas tell the form of a mixture, where none of those to be called fits.
_SURVEYED = 16
# Times that rows with too few answers are asked for from other experts, the first one included.
_ROUNDS = 3
# Seconds between two looks whether experts that are gone are back.
_PAUSE = 0.1
# For an error: seconds of asking the directory for its experts, how many, and kinds of those that are named.
_GLANCE, _SOME, _NAMED = 2.0, 1024, 8

Rows = NDArray[np.int64]
Experts = dict[str, tuple[str, Schema]]
"""The endpoint and schema of each uid."""


class _Call(ExpertCall, eq=False, kw_only=True):
    """The call of one expert, and the places of its rows in the mixture's input."""

    places: Rows


@dataclass(slots=True)
class _Forward:
    """One forward of a mixture: the inputs, and the calls so far.

    Attributes:
        args, kwargs: the experts' inputs.
        evaluating: the caller is in eval mode.
        casting: the caller is under autocast.
        deadline: of all of it.
        entry: a leaf towards which the caller's sweep goes.
        answers: by call, those of the best experts, then those in place of lost ones; ``None`` where one is missing.
    """

    args: tuple[Structure, ...]
    kwargs: dict[str, Structure]
    evaluating: bool
    casting: bool
    deadline: Deadline
    entry: Tensor | None
    answers: dict[_Call, list[Tensor | None] | None]

    def accepted_by(self, schema: Schema) -> bool:
        """Return True if the inputs fit ``schema``."""
        try:
            schema.flatten_inputs(self.args, self.kwargs, casting=self.casting)
        except SchemaError:
            return False
        return True

    def positions(self, choices: Choices) -> tuple[Rows, int]:
        """For each row and slot the index of its answer among all answers joined, and their number, which stands for
        no answer.
        """
        answered = [call for call, outputs in self.answers.items() if outputs is not None]
        count = sum(call.rows for call in answered)
        position = np.full(choices.slots.shape, count, dtype=np.int64)
        start = 0
        for call in answered:
            # None of a row that has other experts by now, because too few of its first ones had answered.
            row, slot = np.nonzero(choices.slots[call.places] == choices.uids.index(call.uid))
            position[call.places[row], slot] = start + row
            start += call.rows
        return position, count

    def present(self, choices: Choices) -> NDArray[np.bool_]:
        """Return an array of shape (rows, k): true if the slot's expert has answered for the row."""
        position, count = self.positions(choices)
        return cast("NDArray[np.bool_]", position != count)

    def failed(self, choices: Choices) -> set[str]:
        """Return the uids of the chosen experts that gave no answer."""
        return set(choices.uids) - {call.uid for call, outputs in self.answers.items() if outputs is not None}


class RemoteMixtureOfExperts(RemoteModule):
    """Calls the best experts of a grid for each row, and mixes the answers received.

    >>> from anabranch.experts import Directory, ExpertBackend, ExpertServer
    >>> from anabranch.tensors import TensorSpec
    >>> directory = Directory()
    >>> backends = [
    ...     ExpertBackend(f"same.{i}", torch.nn.Identity(), args_schema=[TensorSpec(4)])
    ...     for i in range(3)
    ... ]
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
        k_min: answers that each row needs, or ``BoundaryError`` is raised. Rows with fewer ask the next best experts
            before it is.
        forward_timeout: seconds for all of a forward, beam search included.
        timeout_after_k_min: seconds for which stragglers are waited for once every row has ``k_min`` answers; ``None``:
            as long as ``forward_timeout``.
        backward_k_min: gradients that each row needs (all of those that answered it, if they are fewer, leaving out
            those whose process has died since: the log ``anabranch.experts`` tells of them).
        backward_timeout: seconds for a backward.
        allow_zero_outputs: rows with fewer than ``k_min`` answers are mixed from the answers there are, zeros without
            any, instead of raising.
        detect_anomalies: treats an answer that holds NaN, Inf or a number above 1e18 (6e4 in float16) as missing.
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
    An expert that fails twice in a row is avoided for a while: forwards, backwards and stragglers that were cut off are
    counted apart. One whose schema is not that of most of those first called is left out, with a warning in the log
    ``anabranch.experts``; the next best is called. A mixture can be copied, and pickled if its directory
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
        client: Client | None = None,
        keys: str | os.PathLike[str] | None = None,
        insecure: bool = False,
    ) -> None:
        super().__init__(f"the experts {uid_prefix!r}")
        self.grid_size = tuple(grid_size)
        if not self.grid_size or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in self.grid_size):
            raise ValueError(f"grid_size is one size above 0 per dimension, got {grid_size!r}")
        for name, count in (("k_best", k_best), ("k_min", k_min), ("backward_k_min", backward_k_min)):
            if isinstance(count, bool) or not isinstance(count, int):
                raise TypeError(f"{name} is a whole number of experts, got {count!r}")
        if k_best < 1 or not 0 <= k_min <= k_best or not 0 <= backward_k_min <= k_best:
            counts = f"k_best={k_best}, k_min={k_min}, backward_k_min={backward_k_min}"
            raise ValueError(f"0 <= k_min, backward_k_min <= k_best and k_best >= 1, got {counts}")
        check_seconds(forward_timeout=forward_timeout, backward_timeout=backward_timeout)
        if timeout_after_k_min:  # None and 0, which does not wait, are fine
            check_seconds(timeout_after_k_min=timeout_after_k_min)
        self.k_best, self.k_min, self.backward_k_min = k_best, k_min, backward_k_min
        self.forward_timeout, self.backward_timeout = forward_timeout, backward_timeout
        self.timeout_after_k_min = timeout_after_k_min
        self.allow_zero_outputs, self.detect_anomalies = allow_zero_outputs, detect_anomalies
        self.uid_prefix = check_prefix(uid_prefix)
        self.gate = nn.Linear(in_features, sum(self.grid_size))
        module_client = ModuleClient(client, keys=keys, insecure=insecure, retries=_RETRIES)
        self._finder = ExpertFinder(as_directory(directory, keys=keys, insecure=insecure), module_client)
        self._counts = CallCounts()
        self._dimensions = 1

    def _call_experts(self, x: Tensor, *args: Any, **kwargs: Any) -> Structure:
        leading = self._leading_sizes(x)
        gated = self._gate_logits(x, leading)
        schema, outputs = self._behind((gated, x, *args), kwargs)
        return schema.nest_outputs(with_leading(outputs, leading))

    def extra_repr(self) -> str:
        """Return where the experts are in the grid, and how many are called."""
        return f"{self.uid_prefix!r}, grid_size={self.grid_size}, k_best={self.k_best}"

    def statistics(self) -> CallStatistics:
        """Counters of its calls of experts since it was made, or copied."""
        return self._counts.read(frozenset(self._finder.backoff.now()))

    # --- the gate

    def learn_form(self) -> None:
        """Request the nesting of the experts' outputs and the dimensions of their inputs, for a capture."""
        self._schema = self._form()
        self._dimensions = _dimensions_of(self._schema)

    def _leading_sizes(self, x: Tensor) -> tuple[int, ...]:
        """Return the sizes of those dimensions of the input that come before an expert's: its rows."""
        compiling = torch.compiler.is_dynamo_compiling()
        if not compiling:
            _check_gated(x, self.gate)
        if x.ndim < 3:
            return tuple(x.shape[:1])
        dimensions = self._dimensions if compiling else _dimensions_of(self._form())
        return tuple(x.shape[: max(x.ndim - dimensions, 1)])

    def _gate_logits(self, x: Tensor, leading: tuple[int, ...]) -> Tensor:
        """Return the gate's logits for each row."""
        rows = x.flatten(0, len(leading) - 1)
        if rows.ndim < 2:
            raise SchemaError(f"a mixture's input has rows and features, got shape {tuple(x.shape)}")
        rows = rows if rows.ndim == 2 else rows.flatten(1, -2).mean(1)
        return cast("Tensor", self.gate(self._prepare_gate_input(rows)))

    def _prepare_gate_input(self, x: Tensor) -> Tensor:
        """Return the input as the gate gets it."""
        return x

    def _weights(self, scores: Sequence[Tensor], choices: Choices, present: Tensor) -> Tensor:
        """Return the weights of the chosen experts' answers, (rows, k_best); 0 for those that are not ``present``."""
        # A row without responders has no softmax; zero scores keep NaN out of its gradient too.
        answered = present.any(dim=1, keepdim=True)
        logits = scores_of(scores, choices).masked_fill(~present, float("-inf")).masked_fill(~answered, 0.0)
        return torch.softmax(logits, dim=1) * answered

    def _extra_outputs(self, choices: Choices, gated: Tensor) -> list[Tensor]:
        """More outputs of the call."""
        return []

    def _extra_forms(self, device: torch.device) -> list[Form]:
        """Return the forms of these."""
        return []

    # --- the boundary

    def _cross(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, evaluating: bool
    ) -> tuple[Schema, Sequence[Tensor]]:
        gated, args = cast("Tensor", args[0]), args[1:]
        nesting = Nesting.of((args, kwargs))
        leaves = nesting.leaves_of((args, kwargs))
        for leaf in leaves:
            if leaf is not None and not isinstance(leaf, Tensor):
                raise SchemaError(f"experts take tensors and None, got {type(leaf).__name__}")
        casting = torch.is_autocast_enabled(gated.device.type)
        schemas: list[Schema] = []

        def start(entry: Tensor | None, inputs: Sequence[Tensor | None]) -> _Forward:
            # The experts read mappings and tuples of any class by their own schema.
            its_args, its_kwargs = nesting.rebuild(inputs)
            deadline = Deadline.after(self.forward_timeout)
            return _Forward(its_args, its_kwargs, evaluating, casting, deadline, entry, {})

        def run(entry: Tensor | None, gated: Tensor, *inputs: Tensor | None) -> list[Tensor]:
            # A captured graph runs this outside the autocast of its capture, and the tape does the same.
            with torch.autocast(gated.device.type, enabled=False) if casting else nullcontext():
                outputs, schema = self._mix(start(entry, inputs), gated)
            schemas[:] = [schema]
            return outputs

        def forms(inputs: Sequence[Tensor | None]) -> list[Form]:
            # Not the outer ``gated``: a graph must not hold a tensor of its capture.
            gated = cast("Tensor", inputs[0])
            schema, outputs = self._forms(start(None, inputs[1:]), len(gated), gated.device)
            schemas[:] = [schema]
            # The gate's gradient comes through every output.
            return [*(replace(form, differentiable=True) for form in outputs), *self._extra_forms(gated.device)]

        boundary = RecordedBoundary("mixture", self.uid_prefix, run, forms)
        tensors = cast("list[Tensor | None]", leaves)
        outputs = list(cross(boundary, gated, *tensors, entry=self.weights_there))
        # A stage of a pipe that runs again is given the first answers, and asks nobody.
        return schemas[0] if schemas else self._form(), outputs

    def _forms(self, forward: _Forward, rows: int, device: torch.device) -> tuple[Schema, list[Form]]:
        """Return the form of the experts, and those of their outputs for these inputs."""
        schema = self._form()
        if not schema.varies:
            return schema, output_forms(schema, rows, device)
        leaves = cast("list[Tensor | None]", schema.input_nesting.leaves_of((forward.args, forward.kwargs)))
        with outside_tracing():
            experts = self._finder.find(self._announced(forward.deadline), forward.deadline)
            for uid, (endpoint, its) in experts.items():
                if _same_form(its, schema):
                    client = self._finder.client
                    return its, sample_forms(client, uid, endpoint, its, leaves, rows, forward.deadline)
        raise self._no_form(forward.deadline)

    def _mix(self, forward: _Forward, gated: Tensor) -> tuple[list[Tensor], Schema]:
        """Return the outputs, and the schema of the experts that gave them."""
        # Softmax and sums are in single precision under autocast.
        if forward.casting and gated.dtype in (torch.float16, torch.bfloat16):
            gated = gated.float()
        if not len(gated):
            return self._mix_no_rows(forward, gated)
        scores = list(torch.split(gated, list(self.grid_size), dim=-1))
        choices = self._call_chosen(forward, scores)
        schema = self._finder.form
        if schema is None:
            raise self._no_form(forward.deadline)
        outputs = self._answers(forward, choices, schema, gated.device)
        weights = self._weights(scores, choices, torch.from_numpy(forward.present(choices)).to(gated.device))
        mixed = [_weighted_sum(weights, answers) for answers in outputs if answers is not None]
        return [*mixed, *self._extra_outputs(choices, gated)], schema

    def _mix_no_rows(self, forward: _Forward, gated: Tensor) -> tuple[list[Tensor], Schema]:
        """Return the outputs for no rows: connected to the gate, and through it to the input."""
        schema, forms = self._forms(forward, 0, gated.device)
        zero = gated.sum() * 0.0
        outputs = [gated.new_zeros(form.shape, dtype=form.dtype) + zero.to(form.dtype) for form in forms]
        shape = (0, self.k_best)
        none = Choices([], np.full(shape, -1), np.zeros((*shape, len(self.grid_size)), dtype=np.int64))
        return [*outputs, *self._extra_outputs(none, gated)], schema

    # --- the form of the experts

    def _form(self, forward: _Forward | None = None, experts: Experts | None = None) -> Schema:
        """Return the form of the mixture: that of most of the experts first called that take the inputs.

        It is kept, unless no expert that can be reached has it any longer.
        """
        finder = self._finder
        schemas = [schema for _, schema in (experts or {}).values()]
        if finder.form is not None and (experts is None or any(_same_form(one, finder.form) for one in schemas)):
            return finder.form
        deadline = Deadline.after(self.forward_timeout) if forward is None else forward.deadline
        candidates = [] if finder.form or forward is None else [one for one in schemas if _can_mix(one, forward)]
        if not candidates:
            with outside_tracing():
                announced = finder.find(self._announced(deadline), deadline)
            schemas = [schema for _, schema in announced.values()] or schemas
            if finder.form is not None and any(_same_form(one, finder.form) for one in schemas):
                return finder.form
            candidates = [one for one in schemas if _can_mix(one, forward)] or schemas
        if not candidates:
            raise self._no_form(deadline)
        form = max(candidates, key=lambda one: sum(_same_form(one, other) for other in candidates))
        if not form.floating:
            raise SchemaError(f"experts of {self.uid_prefix!r} return {outline(form.outputs)}, which has no mean")
        finder.form = form
        return form

    def _announced(self, deadline: Deadline) -> list[str]:
        """Return some of the announced experts."""
        uids = [self.uid_prefix]
        directory = within(self._finder.directory, deadline)
        for size in self.grid_size:
            active = directory.active(uids)
            uids = [f"{prefix}.{i}" for prefix in uids for i in active.get(prefix, ()) if i < size][:_SURVEYED]
        return uids

    def _leave_out(self, forward: _Forward, experts: Experts) -> set[str]:
        """Return those of ``experts`` whose form is not the mixture's; they count as failed."""
        if not experts:
            return set()
        form = self._form(forward, experts)
        misfits = {
            uid
            for uid, (_, schema) in experts.items()
            if not _same_form(schema, form) and not (_same_outputs(schema, form) and forward.accepted_by(schema))
        }
        if misfits:  # or the mistake is the caller's: this raises
            form.flatten_inputs(forward.args, forward.kwargs, casting=forward.casting)
        for uid in misfits:
            endpoint, schema = experts[uid]
            says = printable(
                f"{uid} at {endpoint} is left out of the mixture: it takes {_inputs_of(schema)} and returns "
                f"{outline(schema.outputs)}, the others take {_inputs_of(form)} and return {outline(form.outputs)}"
            )
            self._counts.failure(SchemaError(says))
            self._finder.backoff.failed(uid, "form")
            if uid not in self._finder.misfits:
                _log.warning("%s; serve it as they are, or under another prefix", says)
            self._finder.misfits[uid] = says
        self._finder.forget(misfits)
        return misfits

    # --- the calls

    def _choose(self, forward: _Forward, scores: Sequence[Tensor], failed: Collection[str]) -> tuple[Choices, Experts]:
        """Return the best experts of each row by the gate's scores, without those avoided, ``failed``, or of another
        form; and those of them that can be reached.
        """
        arrays = [grid.detach().double().cpu().numpy() for grid in scores]
        if not all(np.isfinite(array).all() for array in arrays):
            raise NonFinite("the gate's scores hold NaN or Inf; check its inputs and weights")
        active = partial(self._finder.active, deadline=forward.deadline)
        avoid = self._finder.backoff.now().union(failed)
        while True:
            choices = beam_search(active, self.uid_prefix, arrays, self.k_best, avoid)
            experts = self._finder.find(choices.uids, forward.deadline)
            misfits = self._leave_out(forward, experts)
            if not misfits:
                return choices, experts
            avoid |= misfits

    def _call_chosen(self, forward: _Forward, scores: Sequence[Tensor]) -> Choices:
        """Call the best experts, and the next best ones for rows with too few answers; return those of each row.

        Where experts have gone, they are called again until they are back or the deadline has passed.
        """
        deadline = forward.deadline
        choices, experts = self._choose(forward, scores, ())
        self._call(forward, choices, choices.slots >= 0, experts)
        failed: set[str] = set()
        waits = False
        for attempt in itertools.count(1):
            short = forward.present(choices).sum(axis=1) < self.k_min
            if not short.any() or self.allow_zero_outputs:
                return choices
            silent = forward.failed(choices) - failed
            try:
                if attempt >= _ROUNDS or not silent:
                    if deadline.expired() or not self._may_come_back(forward):
                        break
                    if not waits:
                        waits = True
                        _log.warning("too few experts of %s answer; waiting until they are back", self.uid_prefix)
                    time.sleep(min(_PAUSE, deadline.remaining()))
                    silent = set()
                    failed.clear()
                    self._finder.retry_gone()
                failed |= silent
                others, experts = self._choose(forward, scores, failed)
            except DeadlineExceeded:
                break
            choices = choices.with_rows_of(others, short)
            self._call(forward, choices, short[:, None] & (choices.slots >= 0) & ~forward.present(choices), experts)
        raise self._too_few("forward", {call: call.error for call in forward.answers}, short.sum(), deadline)

    def _may_come_back(self, forward: _Forward) -> bool:
        """Return True if rows are short of answers only because experts are away that were there before."""
        if any(call.error is not None and not isinstance(call.error, GONE) for call in forward.answers):
            return False
        return self._finder.some_away(forward.deadline)

    def _call(self, forward: _Forward, choices: Choices, which: NDArray[np.bool_], experts: Experts) -> None:
        """Call the experts of the slots that are true in ``which``, each once for all its rows."""
        calls: list[_Call] = []
        for slot, uid in enumerate(choices.uids):
            mine = np.nonzero(((choices.slots == slot) & which).any(axis=1))[0]
            if uid in experts and len(mine):
                endpoint, schema = experts[uid]
                inputs, _ = schema.flatten_inputs(forward.args, forward.kwargs, casting=forward.casting)
                some = [None if tensor is None else _select(tensor, mine) for tensor in inputs]
                calls.append(_Call(uid, endpoint, schema, some, len(mine), forward.evaluating, places=mine))
        if not calls:
            return
        total = len(choices.slots)
        least = np.minimum(_count_answers(total, calls), self.k_min)

        def enough(now: Sequence[ExpertCall]) -> bool:
            return bool((_count_answers(total, [call for call in now if call.answered]) >= least).all())

        outputs = call_experts(
            Calls(
                self._finder.client,
                calls,
                forward.deadline,
                self.backward_timeout,
                enough=None if self.timeout_after_k_min is None else enough,
                grace=self.timeout_after_k_min or 0.0,
                check_backward=lambda its: self._check_backward(its, total),
                finite_only=self.detect_anomalies,
                counts=self._counts,
            ),
            forward.entry,
        )
        self._finder.note_gone(calls)
        for call in calls:
            if not call.answered and call.error is None:
                self._finder.backoff.failed(call.uid, "cut off", seconds=self.timeout_after_k_min or 0.0)
            else:
                self._note(call.uid, "forward", call.error)
            if isinstance(call.error, SchemaError):
                self._finder.forget([call.uid])
        forward.answers |= zip(calls, outputs, strict=True)

    def _answers(
        self, forward: _Forward, choices: Choices, schema: Schema, device: torch.device
    ) -> list[Tensor | None]:
        """Return for each output of the schema the answers, (rows, k, ...), zeros where there are none."""
        if schema.varies:
            self._leave_out_sizes(forward, schema)
        position, count = forward.positions(choices)
        index = torch.from_numpy(position.reshape(-1)).to(device)
        answers: list[Tensor | None] = []
        for number, spec in enumerate(schema.output_specs):
            if spec is None:
                answers.append(None)
                continue
            outputs = [its[number] for its in forward.answers.values() if its is not None]
            parts = [tensor for tensor in outputs if tensor is not None]
            if spec.varying and not parts:
                raise self._no_form(forward.deadline)
            sizes = spec.sizes_of(parts[0].shape) if spec.varying else ()
            joined = torch.cat([*parts, spec.zeros(1, sizes, device=device)])
            assert len(joined) == count + 1
            answers.append(joined.index_select(0, index).view(*position.shape, *joined.shape[1:]))
        return answers

    def _leave_out_sizes(self, forward: _Forward, schema: Schema) -> None:
        """Count answers as missing whose sizes, where these vary, are not those of most others."""
        sizes = {
            call: tuple(
                spec.sizes_of(tensor.shape)
                for tensor, spec in zip(outputs, schema.output_specs, strict=True)
                if tensor is not None and spec is not None and spec.varying
            )
            for call, outputs in forward.answers.items()
            if outputs is not None
        }
        most = Counter(sizes.values()).most_common(1)
        for call, its in sizes.items():
            if its != most[0][0]:
                forward.answers[call] = None  # but it has answered, and its place in the graph stays
                call.error = SchemaError(f"{call.uid} returned sizes {its}, most others {most[0][0]}")
                self._counts.failure(call.error)
                self._note(call.uid, "forward", call.error)

    def _check_backward(self, calls: Sequence[ExpertCall], total: int) -> None:
        """Note which gradients arrived; raise if too few did, warn of those that died with their process."""
        errors = {call: call.gradient_error for call in cast("Sequence[_Call]", calls)}
        for call, error in errors.items():
            self._note(call.uid, "backward", error)
        came = _count_answers(total, [call for call, error in errors.items() if error is None])
        lost = sorted({call.uid for call, error in errors.items() if isinstance(error, PeerLost)})
        alive = [call for call in errors if call.uid not in lost]
        least = np.minimum(_count_answers(total, alive), self.backward_k_min)
        if (came < least).any():
            raise self._too_few("backward", errors, (came < least).sum())
        if lost:
            alone = ((came == 0) & (_count_answers(total, list(errors)) > 0)).sum()
            says = "%s died between forward and backward: their updates for this step may be lost, and %d rows %s"
            _log.warning(says, ", ".join(lost), alone, "get no gradient through the mixture in it")

    def _note(self, uid: str, phase: Phase, error: Exception | None) -> None:
        if error is None:
            self._finder.backoff.answered(uid, phase)
        else:
            self._finder.backoff.failed(uid, phase, seconds=getattr(error, "elapsed", None) or 0.0)

    def _too_few(
        self, phase: str, errors: Mapping[_Call, Exception | None], short: int, deadline: Deadline | None = None
    ) -> BoundaryError:
        least = self.k_min if phase == "forward" else self.backward_k_min
        causes = {call.uid: f"{call.uid}: {error}" for call, error in errors.items() if error is not None}
        if phase == "backward":
            cures = f"with backward_k_min={least - 1} the step continues without these gradients"
        else:
            for uid in sorted(self._finder.backoff.now() - set(causes)):
                causes[uid] = self._finder.misfits.get(uid, f"{uid} is left alone for a while after its failures")
            cures = "give allow_zero_outputs=True to mix these rows from the available answers"
            if least > 1:
                cures = f"lower k_min={least}, or {cures}"
            if any(isinstance(error, PeerLost) for error in errors.values()):
                cures += ", or serve the experts from more processes (anabranch run --experts N)"
            if not errors and not causes:
                causes[""], cures = self._nobody(), "check uid_prefix, grid_size and whether the servers run"
        why = printable("; ".join([*causes.values()][:3])) or "the directory lists no more"
        says = f"{short} rows have fewer than {least} experts that answered ({why}); {cures}"
        peer, elapsed = f"{len(errors)} experts", None if deadline is None else deadline.elapsed()
        return BoundaryError(says, peer=peer, operation=f"mixture.{phase}", elapsed=elapsed)

    def _no_form(self, deadline: Deadline) -> BoundaryError:
        says = f"no expert has answered, so the shape of their outputs is not known ({self._nobody()})"
        return BoundaryError(says, peer="experts", operation="mixture", elapsed=deadline.elapsed())

    def _nobody(self) -> str:
        """Say that the directory lists no expert of this mixture, if so, and what it lists."""
        directory = within(self._finder.directory, Deadline.after(_GLANCE))
        grid = "".join(f".[0:{size}]" for size in self.grid_size)
        says = f"the directory lists no expert {self.uid_prefix}{grid}"
        if directory.active([self.uid_prefix]).get(self.uid_prefix):
            return f"of the experts {self.uid_prefix}{grid} that the directory lists none answers"
        if hasattr(directory, "announced"):  # as ours have; a DirectoryLike need not
            some = itertools.islice(directory.announced(), _SOME)
            kinds = sorted({re.sub(r"\.\d+", ".*", one.uid) for one in some})
            says += f"; it lists {', '.join(kinds[:_NAMED]) or 'none at all'}{' and more' if kinds[_NAMED:] else ''}"
        return printable(says)


def scores_of(scores: Sequence[Tensor], choices: Choices) -> Tensor:
    """Of shape (rows, k): the sums of the chosen coordinates' scores, with their gradients."""
    coordinates = torch.from_numpy(choices.coordinates).to(scores[0].device)
    return torch.stack([grid.gather(1, coordinates[:, :, dimension]) for dimension, grid in enumerate(scores)]).sum(0)


def _select(tensor: Tensor, rows: Rows) -> Tensor:
    """Return these rows, without a copy if they are all."""
    return tensor if len(rows) == len(tensor) else tensor.index_select(0, torch.from_numpy(rows).to(tensor.device))


def _count_answers(total: int, calls: Iterable[ExpertCall]) -> Rows:
    """Return for each of ``total`` rows the number of these calls that it has a part in."""
    counts = np.zeros(total, dtype=np.int64)
    for call in cast("Iterable[_Call]", calls):
        counts[call.places] += 1
    return counts


def _weighted_sum(weights: Tensor, answers: Tensor) -> Tensor:
    """Return the sums over k: of (rows, k) and (rows, k, ...), of shape (rows, ...)."""
    shape = (*weights.shape, *[1] * (answers.ndim - 2))
    return (weights.to(answers.dtype).view(shape) * answers).sum(1)


def _can_mix(schema: Schema, forward: _Forward | None) -> bool:
    return schema.floating and (forward is None or forward.accepted_by(schema))


def _same_outputs(one: Schema, other: Schema) -> bool:
    return _mixed(one) == _mixed(other) and one.output_nesting.paths() == other.output_nesting.paths()


def _mixed(schema: Schema) -> list[object]:
    """Return what a mean of outputs depends on: not how they travel, as each call reads by its own schema."""
    return [spec and (spec.shape, spec.dtype) for spec in schema.output_specs]


def _same_form(one: Schema, other: Schema) -> bool:
    return one is other or (one.inputs == other.inputs and _same_outputs(one, other))


def _inputs_of(schema: Schema) -> str:
    return outline((*schema.arguments, *([dict(schema.keywords)] if schema.keywords else [])))


def _dimensions_of(schema: Schema) -> int:
    """Return the number of dimensions of a row of an expert's first input."""
    first = schema.arguments[0] if schema.arguments else None
    return len(first.shape) if isinstance(first, TensorSpec) else 1


def _check_gated(x: object, gate: nn.Module) -> None:
    """Refuse an input that the gate does not accept; a user's own gate checks its input itself."""
    if not isinstance(x, Tensor):
        raise SchemaError(f"a mixture's first input is the tensor for its gate, got a {type(x).__name__}")
    if type(gate) is not nn.Linear:
        return
    if x.ndim >= 2 and x.shape[-1] != gate.in_features:
        features = f"in_features={gate.in_features}, for its gate"
        raise SchemaError(f"the last dimension of a mixture's input is {features}, got shape {tuple(x.shape)}")
    dtype = gate.weight.dtype
    casts = torch.is_autocast_enabled(x.device.type) and x.is_floating_point() and x.dtype != torch.float64
    if x.dtype != dtype and not casts:
        raise SchemaError(f"a mixture's input must be {dtype}, as its gate, got {x.dtype}; give x.to({dtype})")


class RemoteSwitchMixtureOfExperts(RemoteMixtureOfExperts):
    """Calls the best expert of a grid for each row, and keeps the experts evenly used.

    >>> from anabranch.experts import Directory, ExpertBackend, ExpertServer
    >>> from anabranch.tensors import TensorSpec
    >>> directory = Directory()
    >>> backends = [
    ...     ExpertBackend(f"same.{i}", torch.nn.Identity(), args_schema=[TensorSpec(4)])
    ...     for i in range(3)
    ... ]
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
        client: Client | None = None,
        keys: str | os.PathLike[str] | None = None,
        insecure: bool = False,
    ) -> None:
        for name, value in (("utilization_alpha", utilization_alpha), ("jitter", jitter)):
            if not isinstance(value, Real):
                raise TypeError(f"{name} is a number in [0, 1), got {value!r}")
            if not 0 <= value < 1:
                raise ValueError(f"{name} lies in [0, 1), got {value!r}")
        super().__init__(
            in_features,
            grid_size,
            directory,
            uid_prefix,
            k_best=1,
            k_min=k_min,
            forward_timeout=forward_timeout,
            backward_k_min=backward_k_min,
            backward_timeout=backward_timeout,
            allow_zero_outputs=allow_zero_outputs,
            detect_anomalies=detect_anomalies,
            client=client,
            keys=keys,
            insecure=insecure,
        )
        self.utilization_alpha = utilization_alpha
        self.jitter = jitter
        for dimension, size in enumerate(self.grid_size):
            self.register_buffer(f"utilization_{dimension}", torch.full((size,), 1.0 / size))

    def _call_experts(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Structure, Tensor]:
        leading = self._leading_sizes(x)
        gated = self._gate_logits(x, leading)
        grids = len(self.grid_size)
        schema, outputs = self._behind((gated, x, *args), kwargs)
        loss = self._balancing_loss(torch.split(gated, list(self.grid_size), dim=-1), outputs[-grids:])
        return schema.nest_outputs(with_leading(outputs[:-grids], leading)), loss

    def _prepare_gate_input(self, x: Tensor) -> Tensor:
        if self.training and self.jitter:
            return x * torch.empty_like(x).uniform_(1 - self.jitter, 1 + self.jitter)
        return x

    def _weights(self, scores: Sequence[Tensor], choices: Choices, present: Tensor) -> Tensor:
        return scores_of([grid.log_softmax(dim=-1) for grid in scores], choices).exp() * present

    def _extra_forms(self, device: torch.device) -> list[Form]:
        return [Form((n + 1,), self.gate.weight.dtype, device, differentiable=False) for n in self.grid_size]

    def _extra_outputs(self, choices: Choices, gated: Tensor) -> list[Tensor]:
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
                share_there = share.to(utilization)
                now = (utilization * self.utilization_alpha).add(share_there[:-1], alpha=1 - self.utilization_alpha)
                with torch.no_grad():
                    utilization.copy_(torch.where(share_there[-1] > 0, now, utilization))
            # The mean over no rows is NaN.
            mean = grid.softmax(dim=-1).mean(0) if len(grid) else grid.sum(0)
            losses.append(grid.shape[1] * (mean * utilization).sum())
        return torch.stack(losses).mean()
