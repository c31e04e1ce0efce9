"""``GatedMixture``: a gate, and the boundary behind which its experts are chosen, called and weighted."""

from __future__ import annotations

import itertools
import math
import os
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from numbers import Real
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from anabranch.autodiff.boundary import whole_calls
from anabranch.autodiff.boundary.crossing import Form
from anabranch.deadline import Deadline, check_seconds
from anabranch.errors import BoundaryError, SchemaError
from anabranch.experts.client.beam_search import Choices
from anabranch.experts.client.connections import ModuleClient
from anabranch.experts.client.expert_call import CallStatistics
from anabranch.experts.client.finder import ExpertFinder
from anabranch.experts.client.mixture.answers_by_row import scores_of, weighted_sum
from anabranch.experts.client.mixture.expert_caller import CallerModes, CallLimits, ExpertCaller
from anabranch.experts.client.remote_module import RemoteModule
from anabranch.experts.directory import DirectoryLike, as_directory, within
from anabranch.experts.nesting import flatten
from anabranch.experts.schema import Schema
from anabranch.job import job
from anabranch.tensors import Structure, TensorSpec
from anabranch.transport import Client
from anabranch.transport.announcements import check_prefix

__all__ = ["GatedMixture", "check_fraction", "make_finder"]

# A mixture has other experts, so it does not wait for one that refuses connections.
_RETRIES = 2
_MOST_LOOKED_UP = 4096
_LOOK_SECONDS = 2.0


class GatedMixture(RemoteModule):
    """A gate, and the experts of a grid that it chooses for each row, called and weighted as one call."""

    def __init__(
        self,
        in_features: int,
        grid_size: Sequence[int],
        uid_prefix: str,
        k_best: int,
        limits: CallLimits,
        grid_dropout: float,
        finder: Callable[[], ExpertFinder],
    ) -> None:
        super().__init__(f"the experts {uid_prefix!r}")
        check_fraction("grid_dropout", grid_dropout)
        self.grid_dropout = grid_dropout
        self.grid_size, self.uid_prefix = _check_arguments(grid_size, uid_prefix, limits, k_best)
        self.k_best = k_best
        self.gate = nn.Linear(in_features, sum(self.grid_size))
        self._caller = ExpertCaller(finder(), limits)
        if job().experts and not limits.allow_zero_outputs:  # they have announced themselves, and can be asked
            self._warn_of_one_process(limits.k_min)
        self._dimensions = 1

    def _warn_of_one_process(self, k_min: int) -> None:
        """Warn if one process serves so many of the job's experts that too few are left without it."""
        if math.prod(self.grid_size) > _MOST_LOOKED_UP:
            return
        points = itertools.product(*map(range, self.grid_size))
        uids = [f"{self.uid_prefix}.{'.'.join(map(str, point))}" for point in points]
        try:
            found = within(self._caller.finder.directory, Deadline.after(_LOOK_SECONDS)).lookup(uids)
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
        schema = self._caller.schema_of(self.uid_prefix, len(self.grid_size))
        self._keep(schema)
        self._dimensions = _dimensions_of(schema)

    def _leading_sizes(self, x: Tensor) -> tuple[int, ...]:
        """Return the sizes of those dimensions of the input that come before an expert's: its rows."""
        if not torch.compiler.is_dynamo_compiling():
            _check_gated(x, self.gate)
        if x.ndim < 3:
            return tuple(x.shape[:1])
        if torch.compiler.is_dynamo_compiling():
            dimensions = self._dimensions
        else:
            dimensions = _dimensions_of(self._caller.schema_of(self.uid_prefix, len(self.grid_size)))
        return tuple(x.shape[: max(x.ndim - dimensions, 1)])

    def _gate_logits(self, x: Tensor, leading: tuple[int, ...]) -> Tensor:
        """Return the gate's logits for each row."""
        return cast("Tensor", self.gate(self._prepare_gate_input(_gate_input(x.flatten(0, len(leading) - 1)))))

    def _prepare_gate_input(self, x: Tensor) -> Tensor:
        """Return the input as the gate gets it."""
        return x

    def _draw_kept(self, gated: Tensor) -> Tensor | None:
        """Return which of the gate's columns may be chosen in this call; ``None`` for all."""
        if not (self.training and self.grid_dropout):
            return None
        return torch.rand(gated.shape[-1], device=gated.device) >= self.grid_dropout

    def _mixed(
        self, gated: Tensor, args: tuple[Structure, ...], kwargs: dict[str, Structure]
    ) -> tuple[Schema, Sequence[Tensor]]:
        """Return the experts' schema and everything after the gate."""
        drawn = self._draw_kept(gated)
        if torch.compiler.is_dynamo_compiling():  # it guards what it reads itself
            assert self._schema is not None
            modes = self.training, self.weights_there.requires_grad
            return self._schema, whole_calls.call(self._handle, (*modes, gated, drawn, *args), kwargs)
        return self._mix(gated, drawn, args, kwargs, evaluating=not self.training)

    def call_whole(
        self, training: bool, trained: bool, gated: Tensor, drawn: Tensor | None, *args: Structure, **kwargs: Structure
    ) -> Sequence[Tensor]:
        """Everything after the gate, as one call that Dynamo does not trace into."""
        return self._mix(gated, drawn, args, kwargs, evaluating=not training)[1]

    def statistics(self) -> CallStatistics:
        """Counters of its calls of experts since it was made, or copied."""
        return self._caller.statistics()

    def _weights(self, scores: Sequence[Tensor], choices: Choices, present: Tensor) -> Tensor:
        """Return the weights of the chosen experts' answers, (rows, k_best); 0 for those that are not ``present``."""
        # A row without responders has no softmax; zero scores keep NaN out of its gradient too. Its own may be -inf:
        # those of indices that grid_dropout has dropped.
        answered = present.any(dim=1, keepdim=True)
        logits = scores_of(scores, choices).masked_fill(~present, float("-inf")).masked_fill(~answered, 0.0)
        return torch.softmax(logits, dim=1) * answered

    def _extra_outputs(self, choices: Choices, gated: Tensor) -> list[Tensor]:
        """More outputs of the call."""
        return []

    def _extra_forms(self, gated: Tensor) -> list[Form]:
        """Return the forms of these, for when no expert is called."""
        return []

    def _mix(
        self,
        gated: Tensor,
        drawn: Tensor | None,
        args: tuple[Structure, ...],
        kwargs: dict[str, Structure],
        *,
        evaluating: bool,
    ) -> tuple[Schema, list[Tensor]]:
        leaves, nesting = flatten((args, kwargs))
        modes = CallerModes(evaluating, torch.is_autocast_enabled(gated.device.type))

        Mixed = tuple[list[Tensor], Schema]

        def mix(entry: Tensor | None, gated: Tensor, drawn: Tensor | None, *inputs: Tensor | None) -> Mixed:
            # A captured graph runs this outside the autocast of its capture, and the tape does the same.
            with torch.autocast(gated.device.type, enabled=False) if modes.casting else nullcontext():
                return mix_without_autocast(entry, gated, drawn, *inputs)

        def mix_without_autocast(
            entry: Tensor | None, gated: Tensor, drawn: Tensor | None, *inputs: Tensor | None
        ) -> Mixed:
            deadline = Deadline.after(self._caller.limits.forward_timeout)
            # Softmax and sums are in single precision under autocast.
            if modes.casting and gated.dtype in (torch.float16, torch.bfloat16):
                gated = gated.float()
            scores = list(torch.split(gated, list(self.grid_size), dim=-1))
            kept = _kept(drawn, self.grid_size)
            # The experts read mappings and tuples of any class by their own schema.
            its_args, its_kwargs = cast(
                "tuple[tuple[Structure, ...], dict[str, Structure]]", nesting.rebuild(inputs, plain=True)
            )
            if not len(gated):
                return self._mix_no_rows(gated, (its_args, its_kwargs))

            def choose(failed: Collection[str]) -> Choices:
                return self._caller.choose(self.uid_prefix, scores, self.k_best, deadline, kept, failed)

            chosen = self._caller.call_chosen(choose, its_args, its_kwargs, deadline, entry, modes)
            if kept is not None:
                scores = [grid.masked_fill(~mask, float("-inf")) for grid, mask in zip(scores, kept, strict=True)]
            weights = self._weights(scores, chosen.choices, chosen.present)
            outputs = [weighted_sum(weights, answers) for answers in chosen.outputs if answers is not None]
            return [*outputs, *self._extra_outputs(chosen.choices, gated)], chosen.schema

        return self._caller.run_boundary(
            self.uid_prefix, self.grid_size, mix, gated, drawn, leaves, nesting, self.weights_there,
            self._extra_forms(gated),
        )  # fmt: skip

    def _mix_no_rows(self, gated: Tensor, inputs: Structure) -> tuple[list[Tensor], Schema]:
        """Return the outputs for no rows: connected to the gate, and through it to the input."""
        schema, forms = self._caller.forms_of(self.uid_prefix, len(self.grid_size), gated, inputs)
        zero = gated.sum() * 0.0
        outputs = [gated.new_zeros(form.shape, dtype=form.dtype) + zero.to(form.dtype) for form in forms]
        shape = (0, self.k_best)
        none = Choices([], np.full(shape, -1), np.zeros((*shape, len(self.grid_size)), dtype=np.int64))
        return [*outputs, *self._extra_outputs(none, gated)], schema


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
    grid_size: Sequence[int], uid_prefix: str, limits: CallLimits, k_best: int
) -> tuple[tuple[int, ...], str]:
    sizes = tuple(grid_size)
    if not sizes or any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in sizes):
        raise ValueError(f"grid_size is one size above 0 per dimension, got {grid_size!r}")
    counts = {"k_best": k_best, "k_min": limits.k_min, "backward_k_min": limits.backward_k_min}
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int):
            raise TypeError(f"{name} is a whole number of experts, got {count!r}")
    if k_best < 1 or not 0 <= limits.k_min <= k_best or not 0 <= limits.backward_k_min <= k_best:
        raise ValueError(
            f"0 <= k_min, backward_k_min <= k_best and k_best >= 1, got k_best={k_best}, k_min={limits.k_min}, "
            f"backward_k_min={limits.backward_k_min}"
        )
    check_seconds(forward_timeout=limits.forward_timeout, backward_timeout=limits.backward_timeout)
    # None and 0, which does not wait, are fine.
    if limits.timeout_after_k_min:
        check_seconds(timeout_after_k_min=limits.timeout_after_k_min)
    return sizes, check_prefix(uid_prefix)


def check_fraction(name: str, value: float) -> None:
    """Raise ``TypeError`` or ``ValueError`` unless ``value`` is a number in [0, 1)."""
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


def make_finder(
    directory: DirectoryLike | str, client: Client | None, keys: str | os.PathLike[str] | None, *, insecure: bool
) -> ExpertFinder:
    """Return a finder that asks ``directory``, by ``client`` or a client shared with other modules."""
    reach = ModuleClient(client, keys=keys, insecure=insecure, retries=_RETRIES)
    return ExpertFinder(as_directory(directory, keys=keys, insecure=insecure), reach)
