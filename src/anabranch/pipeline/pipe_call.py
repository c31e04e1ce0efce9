"""One call of a pipeline: its halves run on the microbatches of its inputs, gradients put together.

``Portal`` makes a call one differentiable operation of the caller's graph, in which inputs are cut and outputs joined::

    x ──split──> microbatches, parameters ──> Portal ──> microbatches ──cat──> output
                                                │
                           forward: the F half of the schedule; backward: its B and W half

``deliver`` gives the gradients of a scheduled step to parameters and inputs the same way: as an operation's backward,
so that hooks, accumulation and graphs before ``x`` behave as with the unsplit module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, product
from typing import Literal, TypeAlias, cast

import torch
from torch import Tensor, nn

from anabranch.autodiff.boundary.crossing import reaches
from anabranch.autodiff.grad_sessions import boundary_entry
from anabranch.pipeline.engine import EngineRun, StageEngine
from anabranch.pipeline.microbatch import Batch, Part, gather
from anabranch.pipeline.schedule import Action, Kind
from anabranch.pipeline.stage.packet import Gradients, Message, Packet
from anabranch.pipeline.stage.stage import OUTSIDE, Head, Stage, StagePlan, StageRun
from anabranch.tensors import Structure, flatten, paths, unflatten

Args: TypeAlias = tuple[Structure, ...]
Named: TypeAlias = Mapping[str, Structure]
Loss: TypeAlias = Callable[[Structure, Structure], Tensor]
"""A function from output and target to one number."""
Reduction: TypeAlias = Literal["mean", "sum"]
"""Reduction of the loss over the rows of a batch."""
Weigh: TypeAlias = Callable[[Sequence[int]], Sequence[float | Tensor]]
"""A function from the rows of the microbatches to the weight of each one's loss in the mean."""


def with_keywords(stage: Stage, taken: Mapping[str, tuple[str, ...]]) -> Stage:
    """Return the stage with the keyword inputs that its layers, by name, take."""
    keywords = {layer.name: taken[layer.name] for layer in stage.layers}
    names = dict.fromkeys(chain.from_iterable(keywords.values()))
    if not names:
        return stage
    outside = (*stage.sources.get(OUTSIDE, ()), *names)
    return replace(stage, sources={**stage.sources, OUTSIDE: outside}, keywords=keywords)


MakeHead: TypeAlias = Callable[[Part, Sequence[int], torch.device, nn.Module], Head]
"""Makes the head of a call from its target, its microbatches' sizes, the last stage's device and the model."""


def make_head(
    target: Part,
    sizes: Sequence[int],
    device: torch.device,
    model: nn.Module,
    *,
    loss: Loss,
    reduction: Reduction,
    weigh: Weigh | None,
    keeps_outputs: bool = True,
    seed: float = 1.0,
    trains: bool = False,
) -> Head:
    """Return the loss of each microbatch, as the last stage computes it.

    Under ``"mean"`` microbatches weigh by their rows, or by ``weigh``; ``seed`` is the loss's gradient.
    """
    target.check_rows(sum(sizes))
    leaves: list[object] = [leaf.to(device) if isinstance(leaf, Tensor) else leaf for leaf in target.leaves]
    weights = [1.0] * len(sizes)
    if reduction == "mean":
        weights = list(map(float, sizes if weigh is None else weigh(sizes)))
        if any(not 0 <= weight < math.inf for weight in weights):
            raise ValueError(f"rows= gave {weights}: the weight of a microbatch is a finite number of at least 0")
        total = sum(weights)
        weights = [weight / total for weight in weights] if total else [1.0] * len(sizes)
    own: list[nn.Module] = []
    if isinstance(loss, nn.Module):
        layers = set(model.modules())
        own = [module for module in loss.modules() if module not in layers]
    targets = replace(target, leaves=leaves).structures(sizes)
    return Head(loss, targets, weights, keeps_outputs, seed, own, trains)


Tie: TypeAlias = tuple[int, Tensor, Sequence[int]]
"""A parameter whose gradient comes from several ranks: a number, the same on all of them, itself, and those ranks."""


def _sum(parts: Sequence[Tensor | None]) -> Tensor | None:
    total: Tensor | None = None
    for part in parts:
        if total is None:
            total = part
        elif part is not None:
            part = part.to(total.device)
            total = part + total if total.is_sparse else total + part  # to a dense one a sparse one can be added
    return total


@dataclass(slots=True)
class PipeCall:
    """One call: the stages' runs, its inputs, and the actions to run.

    Attributes:
        engine: takes the turn of its backward.
        runs: the stages of this process, by number.
        actions: of each rank.
        batch: the caller's inputs; only those parts that these stages take are used.
        plan: the settings of the call.
        ties: parameters that other ranks train too.
        anchor: a leaf that makes the call differentiable on a rank without inputs or parameters that require grad.
        output_rank: the rank with the output, if the others get it too.
        switches: leaves for what its stages train elsewhere: a sweep that reaches none of them trains nothing there.
    """

    engine: StageEngine
    runs: Mapping[int, StageRun]
    actions: Sequence[Sequence[Action]]
    batch: Batch
    plan: StagePlan
    ties: Sequence[Tie] = ()
    anchor: Tensor | None = None
    output_rank: int | None = None
    switches: list[Tensor] = field(default_factory=list)
    _parameters: dict[int, Tensor] = field(init=False)
    _pieces: list[Tensor] = field(default_factory=list)
    _ends: list[Tensor] = field(init=False)
    _open: bool = True

    def __post_init__(self) -> None:
        self._parameters = {id(p): p for _, run in sorted(self.runs.items()) for p in run.parameters()}
        if self.plan.records:
            for part in self.batch.inputs.values():
                self._pieces += chain.from_iterable(part.differentiable(self.plan.sizes))
            self.switches += [boundary_entry(p) for run in self.runs.values() for p in run.switches if p.requires_grad]
        self._ends = self.switches if self.anchor is None else [*self.switches, self.anchor]

    @property
    def leaves(self) -> list[Tensor]:
        """The call's differentiable inputs: those that require grad, cut, the parameters, switches, and the anchor."""
        return [*self._pieces, *self._parameters.values(), *self._ends]

    @property
    def differentiable(self) -> bool:
        """True if a gradient can reach anything through the call."""
        return self.plan.records and bool(self.leaves)

    @property
    def has_output(self) -> bool:
        """True if the last stage is in this process."""
        return any(OUTSIDE in run.stage.targets for run in self.runs.values())

    def output(self, parts: Sequence[Structure]) -> Structure:
        """Return the model's output from those of the last stage for all microbatches."""
        return (gather if self.plan.split is None else self.plan.split.join)(parts, self.plan.sizes)

    def check(self) -> None:
        """Refuse a call whose modules changed what the code between them reads."""
        if self.plan.split is not None:
            self.plan.split.check()

    def loss(self) -> Tensor | None:
        """Return the sum of the microbatches' losses; ``None`` without a loss here."""
        return _sum([run.losses[i] for run in self.runs.values() if run.head for i in range(len(self.plan.sizes))])

    def forward(self) -> tuple[list[Structure], list[bool]]:
        """Run the F half. Returns the microbatches' outputs, and for each of their leaves whether it needs a gradient.

        Where all ranks have the outputs, gradients of them count on the last stage's rank.
        """
        packets = self._collect(self.engine.run(self.runs, self._half(forward=True), self._outside()))
        outputs, needs_grad = [packet.structure() for packet in packets], [n for p in packets for n in p.needs_grad]
        if self.output_rank is not None:
            everywhere = self.engine.spread((outputs, needs_grad), self.output_rank)
            outputs, needs_grad = cast("tuple[list[Structure], list[bool]]", everywhere)
        return outputs, needs_grad

    def backward(self, grads: Sequence[Tensor | None], *, keep: bool) -> list[Tensor | None]:
        """Run the B and W half from the gradients of the outputs' leaves. Returns those of ``leaves``."""
        if not self._open:
            raise RuntimeError("second backward through the pipeline; use retain_graph=True the first time")
        self._open = keep
        nodes = [node for node, _ in torch._C._current_autograd_node().next_functions]
        ends = [node for node in nodes if any(getattr(node, "variable", None) is end for end in self.switches)]
        for run in self.runs.values():
            run.updates = not ends or any(map(reaches, ends))
        with self.engine.turn("backward", self.plan.step) as turn:
            outcome = turn.run(self.runs, self._half(forward=False), self._output_gradients(grads), keep=keep)
            return self._gradients(outcome)

    def step(self) -> tuple[list[Structure], list[Tensor | None]]:
        """Run the whole schedule, loss included; the F half where no backward may follow.

        Returns the microbatches' outputs and the gradients of ``leaves``.
        """
        actions = self.actions if self.plan.records else self._half(forward=True)
        outcome = self.engine.run(self.runs, actions, self._outside())
        outputs = [packet.structure() for packet in self._collect(outcome)]
        grads = self._gradients(outcome) if self.plan.records else []
        self.check()
        return outputs, grads

    def _half(self, *, forward: bool) -> list[list[Action]]:
        return [[action for action in actions if (action.kind is Kind.F) is forward] for actions in self.actions]

    def _outside(self) -> dict[int, Sequence[Message]]:
        messages: dict[int, Sequence[Message]] = {}
        for j, run in self.runs.items():
            if OUTSIDE in run.stage.sources:
                names = cast("tuple[str | None, ...]", run.stage.sources[OUTSIDE])
                routes = [self.batch.inputs[name].packets(self.plan.sizes) for name in names]
                messages[j] = list(map(list, zip(*routes, strict=True)))
        return messages

    def _collect(self, outcome: EngineRun) -> list[Packet]:
        return [cast(Packet, message[0]) for _, message in sorted(outcome.outputs.items())]

    def _output_gradients(self, grads: Sequence[Tensor | None]) -> dict[int, Sequence[Message]]:
        if not self.has_output:
            return {}
        last = [j for j, run in self.runs.items() if OUTSIDE in run.stage.targets]
        n = len(grads) // len(self.plan.sizes)
        return {last[0]: [[list(grads[start : start + n])] for start in range(0, len(grads), n)]}

    def _gradients(self, outcome: EngineRun) -> list[Tensor | None]:
        gathered: dict[int, list[Tensor | None]] = {}
        for _, run in sorted(self.runs.items()):
            for parameter, grad in run.take_gradients():
                self._parameters.setdefault(id(parameter), parameter)
                gathered.setdefault(id(parameter), []).append(grad)
        grads = {key: parts[0] if len(parts) == 1 else _sum(parts) for key, parts in gathered.items()}
        for number, parameter, ranks in self.ties:
            grads[id(parameter)] = _sum(self.engine.share(number, grads.get(id(parameter)), ranks))
        # A tied parameter is on one of its stages' devices.
        pairs = [(parameter, grads.get(key)) for key, parameter in self._parameters.items()]
        on_device = [None if grad is None else grad.to(parameter.device) for parameter, grad in pairs]
        return [*self._of_inputs(outcome.input_gradients), *on_device, *[None] * len(self._ends)]

    def _of_inputs(self, answers: Mapping[tuple[int, int], Message]) -> list[Tensor | None]:
        """Return the gradients of the inputs that require them, from those that stages returned by microbatch."""
        if not self._pieces:
            return []
        grads: list[Tensor | None] = []
        for name, part in self.batch.inputs.items():
            routes = [(j, run.stage.sources.get(OUTSIDE, ())) for j, run in sorted(self.runs.items())]
            places = [(j, names.index(name)) for j, names in routes if name in names]
            needs = [(n, x.device) for n, x in enumerate(part.leaves) if isinstance(x, Tensor) and x.requires_grad]
            for (index, device), i in product(needs, range(len(self.plan.sizes))):
                grad = _sum([cast("list[Gradients]", answers[j, i])[at][index] for j, at in places])
                grads.append(None if grad is None else grad.to(device))
        return grads


def refuse_hidden_gradients(output: Structure) -> None:
    """Raise ``TypeError`` for an object whose tensors a pipe does not see."""
    for path, leaf in zip(paths(output), flatten(output)[0], strict=True):
        inside = getattr(leaf, "__dict__", {}).values()
        if not isinstance(leaf, Tensor) and any(isinstance(part, Tensor) and part.requires_grad for part in inside):
            where = f"the model's output {path}".rstrip() + f" is a {type(leaf).__name__}"
            raise TypeError(
                f"{where}, whose tensors a pipe does not see, so their gradients would be lost; return tensors in "
                "mappings, lists, tuples or dataclasses, or compute the loss in step()"
            )


class _Portal(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, call: PipeCall, box: list[Structure], *_: Tensor
    ) -> tuple[Tensor, ...]:
        outputs, needs_grad = call.forward()
        if not outputs:  # whoever is on another rank starts its backward from this
            outputs, needs_grad = [torch.empty(0, device="cpu")], [True]
        leaves, treedef = flatten(outputs)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        plain = [leaf for leaf, needs in zip(leaves, needs_grad, strict=True) if isinstance(leaf, Tensor) and not needs]
        ctx.mark_non_differentiable(*plain)
        ctx.set_materialize_grads(False)
        ctx.call = call  # type: ignore[attr-defined]
        ctx.places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]  # type: ignore[attr-defined]
        ctx.count = len(leaves)  # type: ignore[attr-defined]
        box += [treedef, leaves]
        return tuple(tensors)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            # Not once_differentiable: that would let results of gradients that need none pass as constants.
            why = "a pipeline does not compute gradients of gradients"
            raise RuntimeError(f"{why}: leave create_graph=True out, or run the unsplit module where you need them")
        by_leaf: list[Tensor | None] = [None] * ctx.count  # type: ignore[attr-defined]
        for index, grad in zip(ctx.places, grads, strict=True):  # type: ignore[attr-defined]
            by_leaf[index] = grad
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        return None, None, *ctx.call.backward(by_leaf, keep=keep)  # type: ignore[attr-defined]


def open_portal(call: PipeCall) -> list[Structure]:
    """Run the call's forward half now, and its backward half in the backward of the tensors returned: the outputs."""
    box: list[Structure] = []
    tensors = iter(_Portal.apply(call, box, *call.leaves))  # type: ignore[no-untyped-call]
    treedef, leaves = box
    assert isinstance(leaves, list)
    outputs = unflatten(treedef, [next(tensors) if isinstance(leaf, Tensor) else leaf for leaf in leaves])
    return cast("list[Structure]", outputs)


class _Deliver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, grads: list[Tensor], *_: Tensor) -> Tensor:
        ctx.grads = grads  # type: ignore[attr-defined]
        return torch.zeros((), device="cpu")

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, _: Tensor) -> tuple[Tensor | None, ...]:
        grads = tuple(ctx.grads)  # type: ignore[attr-defined]
        ctx.grads.clear()  # type: ignore[attr-defined]
        return None, *grads


def deliver(leaves: Sequence[Tensor], grads: list[Tensor | None]) -> None:
    """Accumulate ``grads`` into ``leaves`` as a backward would, including hooks and graphs before them.

    The list is emptied: a gradient without another reference becomes ``.grad`` itself, without a copy.
    """
    reached = [leaf for leaf, grad in zip(leaves, grads, strict=True) if grad is not None]
    arrived = [grad for grad in grads if grad is not None]
    grads.clear()
    if reached:
        with torch.enable_grad():
            done: Tensor = _Deliver.apply(arrived, *reached)  # type: ignore[no-untyped-call]
            done.backward()  # type: ignore[no-untyped-call]
