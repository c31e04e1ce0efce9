"""``survey_step``: forward and backward of one batch, to measure their time and their requests to other processes.

Nothing is trained, and nothing that lives elsewhere is changed; gradients, generators, buffers, modes and counts are as
before afterwards. User code that counts its own calls counts these.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from anabranch.autodiff.boundary.crossing import Boundary, Crossed, Tensors, Tracer, run_forward, traced_by
from anabranch.autodiff.grad_sessions import loss_and_returned
from anabranch.autodiff.moved_parameter import parameters_here
from anabranch.executor.randomness import random_state, restore_random_state
from anabranch.executor.steps import TrainStep
from anabranch.experts import RemoteExpert, RemoteMixtureOfExperts
from anabranch.tensors import Structure

_RUNS = 4  # the same number on every worker, because a loss may communicate; the first warms up


@dataclass(frozen=True, slots=True)
class TableRows:
    """The lookups of one table in a run.

    Attributes:
        read: distinct ids.
        moved: distinct ids that get a gradient: a padding id does not.
    """

    read: int = 0
    moved: int = 0


@dataclass(frozen=True, slots=True)
class StepSurvey:
    """The facts of one worker's run.

    Attributes:
        parts: seconds by cause: ``"compute"`` is forward and backward, without experts.
        tables: by the table's name.
        experts: bytes that cross to each, by name.
        notes: what was not measured.
    """

    parts: Mapping[str, float]
    tables: Mapping[str, TableRows] = field(default_factory=dict)
    experts: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def survey_step(step: TrainStep, batch: Structure, tables: Mapping[Tensor, tuple[str, bool]]) -> StepSurvey:
    """Return the facts of a run of ``step`` on ``batch``.

    Args:
        step: computes the loss.
        batch: this worker's.
        tables: the tables that are here, as ``_Lookups`` takes them.

    Raises:
        Exception: raised by the loss.
    """
    with _as_before(step.model):
        runs = [_run(step, batch, tables) for _ in range(_RUNS)][1:]
    notes = () if all(whole for _, whole, _ in runs) else ("compute is forward alone: this backward cannot be tried",)
    dry_run = runs[-1][2]
    parts = {"compute": median(seconds for seconds, _, _ in runs)}
    away = median(dry_run.away for _, _, dry_run in runs)
    if away:
        parts["experts"] = 2 * away  # backward, which would train them, is taken to last as long as forward
    lookups = {name: _lookup(ids) for name, ids in dry_run.ids.items()}
    return StepSurvey(parts, lookups, dry_run.expert_bytes, notes)


def _run(step: TrainStep, batch: Structure, tables: Mapping[Tensor, tuple[str, bool]]) -> tuple[float, bool, _DryRun]:
    """Return the seconds of forward and backward here, and whether backward is among them."""
    dry_run, whole = _DryRun(), True
    began = time.perf_counter()
    with torch.enable_grad(), traced_by(dry_run), _Lookups(tables, dry_run):
        loss, _ = loss_and_returned(step.loss(step.model, batch))
    parameters = [p for p in parameters_here(step.model).values() if p.requires_grad]
    try:
        torch.autograd.grad(loss, [*parameters, *dry_run.leaves], allow_unused=True)
    except RuntimeError:  # reentrant checkpoints refuse it, and backward() would reach .grad and the user's hooks
        whole = False
    if loss.device.type == "cuda":
        torch.cuda.current_stream(loss.device).synchronize()
    return time.perf_counter() - began - dry_run.away, whole, dry_run


def _lookup(parts: Sequence[tuple[Tensor, int | None]]) -> TableRows:
    ids = torch.cat([some for some, _ in parts])
    moved = torch.cat([some if padding is None else some[some != padding] for some, padding in parts])
    return TableRows(len(torch.unique(ids)), len(torch.unique(moved)))


@contextmanager
def _as_before(model: nn.Module) -> Iterator[None]:
    """Put random generators, buffers and modes back after the block, in which experts evaluate: no call moves them."""
    random, buffers = random_state(), [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    modes = [(module, module.training) for module in model.modules()]
    try:
        if not model.training:
            model.train()
        for module in model.modules():
            if isinstance(module, RemoteExpert | RemoteMixtureOfExperts):
                module.eval()
        yield
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        for module, training in modes:
            module.training = training
        restore_random_state(random)


# What the model asks of other processes.


class _DryRun(Tracer):
    """A run without effects: it answers boundaries, and records what they ask of other processes.

    It takes the place of a graph tracer, so every boundary of the model calls it. A lookup on servers returns zeros; an
    expert's forward is called, but never its backward.

    Attributes:
        ids: ids of each lookup and the padding id among them, by table.
        expert_bytes: sent and received, by expert, as if they kept no activations.
        away: seconds that experts' forward took.
        leaves: tensors that backward reaches in addition to the parameters.
    """

    captures = False
    failure: Exception | None = None

    def __init__(self) -> None:
        self.ids: dict[str, list[tuple[Tensor, int | None]]] = {}
        self.expert_bytes: dict[str, int] = {}
        self.away = 0.0
        self.leaves: list[Tensor] = []
        self._entry: Tensor | None = None
        self._mixture: str | None = None  # whose experts are being called

    def leaf(self, value: Tensor) -> Tensor:
        """Return ``value`` as a tensor that backward is to reach."""
        self.leaves.append(value.detach().requires_grad_())
        return self.leaves[-1]

    def looked_up(self, name: str, ids: Tensor, padding: int | None) -> None:
        """Note a lookup."""
        self.ids.setdefault(name, []).append((ids.detach().reshape(-1), padding))

    # The tracer.

    def entry(self) -> Tensor:
        """Return a leaf that every crossing depends on."""
        if self._entry is None:
            self._entry = self.leaf(torch.zeros((), device="cpu"))
        return self._entry

    def forward(self, boundary: Boundary, inputs: Tensors, wants: Sequence[bool] | None) -> Crossed:
        """Answer a crossing."""
        if boundary.kind == "table":
            self.looked_up(boundary.name, cast(Tensor, inputs[0]), None)
            forms = boundary.forms(inputs)
            return Crossed([torch.zeros(f.shape, dtype=f.dtype, device=f.device) for f in forms], fresh=True)
        if boundary.kind == "mixture":
            self._mixture = boundary.name
            try:
                return run_forward(boundary, inputs, None)  # its experts come back to ``forward``
            finally:
                self._mixture = None
        began = time.perf_counter()
        with self.outside():
            crossed = run_forward(boundary, inputs, None)
        if boundary.kind in ("expert", "experts"):
            self.away += time.perf_counter() - began
            there, back = _size(inputs), _size(crossed.outputs)
            gradients = _size([x for x in inputs if x is not None and x.is_floating_point()])
            # Inputs go there a second time, with the gradients of the outputs.
            size = 2 * there + 2 * back + gradients
            name = self._mixture or boundary.name
            self.expert_bytes[name] = self.expert_bytes.get(name, 0) + size
        return crossed

    def backward(
        self,
        boundary: Boundary,
        state: object,
        inputs: Tensors,
        gradients: Tensors,
        wants: Sequence[bool],
        updates: bool,
    ) -> Tensors:
        """Return gradients of zero."""
        return [
            torch.zeros_like(value) if want and value is not None else None
            for value, want in zip(inputs, wants, strict=True)
        ]

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Cross boundaries in the block as usual."""
        with traced_by(None):
            yield


def _size(tensors: Sequence[Tensor | None]) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


class _Lookups(TorchFunctionMode):
    """Records lookups in a model's own tables, and answers those in tables on servers with zeros.

    Args:
        tables: their names, and whether their rows belong on servers, moved there or not.
        dry_run: records each lookup.
    """

    def __init__(self, tables: Mapping[Tensor, tuple[str, bool]], dry_run: _DryRun) -> None:
        super().__init__()
        self._tables = tables
        self._dry_run = dry_run

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # PyTorch hands ids and weight over in this order, the rest by name, however they were given.
        if func not in (F.embedding, F.embedding_bag) or args[1] not in self._tables:
            return func(*args, **kwargs)
        ids, weight = args
        kwargs = {**kwargs, "max_norm": None}  # which would shrink rows in place
        (name, served), padding = self._tables[weight], kwargs["padding_idx"]
        self._dry_run.looked_up(name, ids, padding if padding is None else padding % weight.shape[0])
        if not served:
            return func(*args, **kwargs)
        row = torch.zeros(1, weight.shape[1], dtype=weight.dtype, device=weight.device)
        return self._dry_run.leaf(func(torch.zeros_like(ids), row, **{**kwargs, "padding_idx": None}))
