"""One stage: its layers, and their forward and backward for one microbatch after the other.

::

    from earlier stages                                              to later stages
    Packet ──(enter)──┐                                     ┌──(cut)──> Packet
                      ├──> layer ──> layer ──> ... ─────────┤
    Packet ──(enter)──┘      ^          ^                   └──(cut)──> Packet
                             │          │
                       stand-ins for the parameters

Every microbatch has a separate graph, from its entering packets to its leaving ones, so stages run backward in parallel
as they run forward in parallel. In the graph placeholders replace the parameters: leaves that share their memory.
Gradients accumulate in the placeholders; the parameters get them once, complete, at the end of a call, through
autograd, so a hook on a parameter fires once, a tied parameter has one gradient, and a failed step leaves nothing
behind.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from anabranch.autodiff.boundary.crossing import FirstForward, runs_again
from anabranch.autodiff.layer_state import LayerState, StateValues
from anabranch.autodiff.moved_parameter import Elsewhere, Switch
from anabranch.autodiff.thread_modes import ThreadModes
from anabranch.pipeline.parts.part_program import SplitCall
from anabranch.pipeline.stage.deferred_batch_norm import DeferredBatchNorm
from anabranch.pipeline.stage.packet import (
    Gradients,
    Packet,
    Watched,
    check_unchanged,
    cloned,
    cut,
    enter,
    mark_doubled,
    memory_of,
    sweep,
)
from anabranch.pipeline.stage.partition import Layer, Route
from anabranch.pipeline.stage.random_streams import drawing_from
from anabranch.pipeline.stage.skips import SkipName, SkipStore, using_store
from anabranch.pipeline.stage.weight_split import SplitBackward
from anabranch.tensors import Structure, unflatten

Fingerprints = list[object]
"""For each leaf of some outputs a small tensor that shows a change, or a plain value itself."""

SHARED_CURE = (
    "put the layers that share it into one stage, or give each its own; of a split model, example= tells which stages "
    "use it"
)

OUTSIDE = -1
"""The number of the caller as a stage: it gives the inputs and takes the output."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of the split model.

    Attributes:
        index: its number.
        layers: its layers, in order.
        device: the device of its layers.
        sources: for each stage that sends to it (``OUTSIDE`` for the caller), the values sent.
        targets: for each stage that it sends to, the values sent.
        shared: the skips that several modules pop, in this stage or others.
        has_skips: some of its modules stash or pop.
        common: the parameters and buffers that other stages use too, by name.
        keywords: the keyword inputs of this call, by the names of the layers that take them.
    """

    index: int
    layers: tuple[Layer, ...]
    device: torch.device
    sources: Mapping[int, tuple[Route, ...]]
    targets: Mapping[int, tuple[Route, ...]]
    shared: frozenset[SkipName] = frozenset()
    has_skips: bool = False
    common: Mapping[str, Tensor] = field(default_factory=dict)
    keywords: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Head:
    """The part after the last layer in ``step``: the loss, its weight for each microbatch, and the targets.

    Backward starts from ``seed``. ``modules`` are the loss's own: what it holds of the model belongs to the stages.
    ``trains``: a step of which no microbatch's loss needs a gradient is a mistake.
    """

    loss: Callable[[Structure, Structure], Structure]
    targets: Sequence[Structure]
    weights: Sequence[float]
    keeps_outputs: bool
    seed: float = 1.0
    modules: Sequence[nn.Module] = ()
    trains: bool = False


_Hooks: TypeAlias = list[tuple[dict[Any, Any], dict[Any, Any]]]


@dataclass(slots=True)
class LooseLeaves:
    """Leaves that the stages of one call read past their placeholders, such as a parameter in the closure of a loss.

    Autograd adds to ``.grad`` of these with each microbatch. So until the call is over, their gradients and hooks of
    before are set aside: a failed step leaves nothing behind, and a hook sees the sum, once.

    Attributes:
        placeholders: the ids of those of all stages here.
    """

    placeholders: set[int] = field(default_factory=set)
    _before: dict[Tensor, tuple[Tensor | None, _Hooks]] = field(default_factory=dict)

    def set_aside(self, loss: Node, outputs: Iterable[Node | None]) -> None:
        """Set aside what the leaves between the model's outputs and the loss have so far."""
        for leaf in _leaves_between([loss], outputs):
            if leaf not in self._before and id(leaf) not in self.placeholders:
                hooks = [those for those in (leaf._backward_hooks, leaf._post_accumulate_grad_hooks) if those]
                self._before[leaf] = leaf.grad, [(those, those.copy()) for those in hooks]
                leaf.grad = None
                for those in hooks:
                    those.clear()

    def take(self) -> list[tuple[Tensor, Tensor | None]]:
        """Return the leaves with the gradients of this call, and give them back what they had before."""
        gradients = [(leaf, leaf.grad) for leaf in self._before]
        for leaf, (grad, hooks) in self._before.items():
            leaf.grad = grad
            for those, before in hooks:
                those.update(before)
        self._before.clear()
        return gradients


def _leaves_between(roots: Iterable[Node], ends: Iterable[Node | None]) -> list[Tensor]:
    leaves: list[Tensor] = []
    seen, todo = {*ends, None}, [*roots]
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            following = node.next_functions
            todo += [after for after, _ in following]  # type: ignore[misc]
            if not following and hasattr(node, "variable"):
                leaves.append(node.variable)
    return leaves


@dataclass(frozen=True, slots=True)
class StagePlan:
    """Settings of a whole call.

    Attributes:
        modes: the caller's.
        seed: of the random stream.
        step: the call's number.
        sizes: the rows of the microbatches.
        recompute: the stages and microbatches that keep no activations.
        split_backward: the schedule has actions of their own for weights.
        records: a backward may follow.
        outside: the caller's memory, as of ``memory_of``, if a stage runs forward again.
        split: the programs of a split model.
        loose: what its stages read past their placeholders.
        context: the caller's context variables, for a second forward, which may begin after they have changed.
    """

    modes: ThreadModes
    seed: int
    step: int
    sizes: Sequence[int]
    recompute: frozenset[tuple[int, int]]
    split_backward: bool
    records: bool
    outside: Container[int] = ()
    split: SplitCall | None = None
    loose: LooseLeaves = field(default_factory=LooseLeaves)
    context: Context = field(default_factory=copy_context)


_VERSIONED = (Tensor, nn.Parameter)  # a table on servers has no version
Messages = dict[int, list[Packet]]
GradientMessages = dict[int, list[Gradients]]


@dataclass(slots=True)
class _Pass:
    """One microbatch's pass through the stage, kept from forward to backward."""

    inputs: Messages = field(default_factory=dict)
    batch: list[tuple[Tensor, int]] = field(default_factory=list)
    target: Structure = None
    state: StateValues = field(default_factory=list)
    fingerprints: Fingerprints = field(default_factory=list)
    boxes: GradientMessages = field(default_factory=dict)
    edges: dict[int, list[list[GradientEdge | None]]] = field(default_factory=dict)
    loss_edge: GradientEdge | None = None
    hooked: set[int] = field(default_factory=set)
    split: SplitBackward | None = None
    experts: FirstForward | None = None


class StageRun:
    """A stage during one call of the pipeline: its placeholders and the passes in progress.

    Attributes:
        switches: parameters for others that its layers train elsewhere: experts, rows.
        updates: backward trains these, too.
    """

    def __init__(self, stage: Stage, plan: StagePlan, head: Head | None = None) -> None:
        self.stage = stage
        self.plan = plan
        self.head = head
        modules = [child for layer in stage.layers for child in layer.module.modules()]
        self.switches = [p for child in modules for p in child._parameters.values() if type(p) is Switch]
        self.updates = True
        if head is not None:
            modules += head.modules
        self._slots = _stand_ins(modules, stage.device) if plan.records else []
        plan.loose.placeholders.update([id(slot.stand_in) for slot in self._slots])
        self._state = LayerState(modules) if plan.recompute else None
        buffers = [buffer for child in modules for buffer in child._buffers.values() if type(buffer) is Tensor]
        self._buffers = set(map(memory_of, buffers))
        self._norms = [child for child in modules if isinstance(child, DeferredBatchNorm)]
        self._phony = torch.empty(0, device=stage.device, requires_grad=True)
        self._passes: dict[int, _Pass] = {}
        self._forwards_left = len(plan.sizes)
        self.losses: dict[int, Tensor] = {}
        self._constant_losses = 0

    def forward(self, i: int, inputs: Messages) -> Messages:
        """Run microbatch ``i`` on the packets of each source; returns those for each target."""
        recompute = (self.stage.index, i) in self.plan.recompute
        here = _Pass()
        if recompute:
            assert self._state is not None
            here.state, here.experts = self._state.take(), FirstForward()
            if self.head is not None:  # a loss may change its target in place
                here.target = cloned(self.head.targets[i])
            here.inputs = _kept(inputs, self.plan.outside)
        common = self.stage.common
        versions = [(n, t, t._version) for n, t in common.items() if type(t) in _VERSIONED] if common else []
        outputs = self._run(i, inputs, here)
        for name, tensor, version in versions:
            if tensor._version != version:
                raise RuntimeError(
                    f"{name}, which several stages use, was changed in a forward: they run different microbatches at "
                    f"once, so each would see another value; {SHARED_CURE}"
                )
        if recompute:
            leaves = _leaves({OUTSIDE: inputs.get(OUTSIDE, [])})
            here.batch = [(x, x._version) for x in leaves if isinstance(x, Tensor) and not x.is_inference()]
            here.boxes, here.edges, here.loss_edge = {}, {}, None
        if self.plan.records:
            self._passes[i] = here
        self._forwards_left -= 1
        if not self._forwards_left:
            for norm in self._norms:
                norm.commit()
        return outputs

    def recompute(self, i: int) -> None:
        """Run microbatch ``i`` forward again, on the same inputs, state and random numbers.

        Raises:
            RuntimeError: the batch has been changed since, or the outputs are others.
        """
        here = self._passes[i]
        if any(leaf._version != version for leaf, version in here.batch):
            what = f"the input of stage {self.stage.index} was changed in place after its forward"
            raise RuntimeError(f"{what}, which other microbatches still read; leave it alone until backward ends")
        inputs = _kept(here.inputs, self.plan.outside, again=True)  # another backward may follow
        first = here.fingerprints
        assert self._state is not None
        with self._state.restored(here.state):
            self.plan.context.copy().run(self._run, i, inputs, here, again=True)
        if len(first) != len(here.fingerprints) or not all(map(_same, first, here.fingerprints)):
            raise RuntimeError(
                f"stage {self.stage.index} returned other values when it ran forward again on microbatch {i}: a layer "
                "or the loss has state in a list, a global variable or a generator of its own, or calls what has "
                'changed; keep state in buffers, or use checkpoint="never"'
            )

    def _run(self, i: int, inputs: Messages, here: _Pass, *, again: bool = False) -> Messages:
        plan, stage, head = self.plan, self.stage, self.head
        with ExitStack() as stack:
            stack.enter_context(plan.modes.entered())
            stack.enter_context(_standing_in(self._slots))
            if here.experts is not None:
                stack.enter_context(here.experts.current(again=again))
            store = SkipStore(stage.shared) if stage.has_skips else None
            if store is not None:
                stack.enter_context(using_store(store))
            if plan.split is not None:
                stack.enter_context(plan.split.current(plan.sizes[i]))
            value, keywords, watched = self._enter_all(inputs, here, store)
            positional = cast("tuple[Structure, ...]", value) if stage.index == 0 else (value,)
            with self._drawing(i) as drawing:
                here.hooked = drawing.hooked
                for layer in stage.layers:
                    if stage.keywords:
                        named = {name: keywords[name] for name in stage.keywords.get(layer.name, ())}
                        value = layer.module(*positional, **named)
                    else:
                        value = layer.module(*positional)
                    positional = (value,)
            if watched:
                check_unchanged(watched, stage.index)
            outputs = self._cut_all(value, store, here)
            if head is not None:
                with drawing:
                    result = value if plan.split is None else plan.split.join([value], [plan.sizes[i]])
                    loss = self._loss(head, result, here.target if again else head.targets[i], head.weights[i])
                self.losses[i] = loss.detach()
                if loss.requires_grad:
                    here.loss_edge = get_gradient_edge(loss)
                    ends = [edge.node for edge in here.edges[OUTSIDE][0] if edge is not None]
                    plan.loose.set_aside(here.loss_edge.node, ends)
                elif head.trains and (again or (stage.index, i) not in plan.recompute):
                    self._constant_losses += 1
                    if self._constant_losses == len(head.targets):
                        what = "the loss does not depend on any parameter that requires a gradient"
                        raise ValueError(f"{what}; nothing would be trained")
            if here.experts is not None:
                here.fingerprints = list(map(_fingerprint, [*_leaves(outputs), self.losses.get(i)]))
            packets = [packet for those in outputs.values() for packet in those]
            if self._buffers or watched or len(packets) > 1 or len(packets[0].leaves) > 1:
                mark_doubled(packets, watched, self._buffers)
            return outputs

    def _drawing(self, i: int) -> drawing_from:
        """Return the random numbers of microbatch ``i``; in backward a layer checkpointed in itself runs again."""
        return drawing_from(self.plan.seed, self.plan.step, self.stage.index, i)

    def _enter_all(
        self, inputs: Messages, here: _Pass, store: SkipStore | None
    ) -> tuple[Structure, dict[str, Structure], list[Watched]]:
        """Return what the stage starts from, keyword inputs by their names, and the tensors that it must not change."""
        value: Structure = None
        keywords: dict[str, Structure] = {}
        watched: list[Watched] = []
        for source, routes in self.stage.sources.items():
            boxes = here.boxes[source] = []
            for route, packet in zip(routes, inputs[source], strict=True):
                leaves, box = enter(packet, self.stage.device, self._phony)
                boxes.append(box)
                for index in packet.doubled:
                    leaf = leaves[index]
                    if isinstance(leaf, Tensor) and not leaf.is_inference():
                        watched.append((_name_of(route), leaf, leaf._version))
                structure = unflatten(packet.treedef, leaves)
                if route is None:
                    value = structure
                elif isinstance(route, str):
                    keywords[route] = structure
                else:
                    assert store is not None
                    store.put(route, structure)
        return value, keywords, watched

    def _cut_all(self, value: Structure, store: SkipStore | None, here: _Pass) -> Messages:
        outputs: Messages = {}
        for target, routes in self.stage.targets.items():
            outputs[target], here.edges[target] = [], []
            for route in routes:
                packet, edges = cut(value if route is None else self._stashed(store, route))
                outputs[target].append(packet)
                here.edges[target].append(edges)
        return outputs

    def _stashed(self, store: SkipStore | None, route: Route) -> Structure:
        assert store is not None
        assert isinstance(route, tuple)
        if route not in store:
            what = f"stage {self.stage.index} declares the skip {route[1]!r} for a later stage"
            raise RuntimeError(f"{what} but none of its modules ran to stash it")
        return store.take(route, shared=True)

    def _loss(self, head: Head, output: Structure, target: Structure, weight: float) -> Tensor:
        try:
            loss = head.loss(output, target)
        except Exception as error:
            without = "; this step has no target" if target is None else ""
            error.add_note(f"a Pipe's loss is called as loss(output, target){without}")
            raise
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"the loss must be one number per microbatch, got {shape}; end it with .mean() or .sum()")
        # A microbatch without weight adds nothing, even if its loss is NaN, as a mean over no tokens is.
        return loss.reshape(()) * weight if weight else torch.zeros_like(loss.detach().reshape(()))

    def backward(self, i: int, gradients: GradientMessages, *, keep: bool) -> GradientMessages:
        """Run microbatch ``i`` backward from each target's gradients; returns those for each source.

        With a schedule that splits backward, weights wait for ``weights``. ``keep`` allows for another backward.
        """
        here = self._passes[i]
        edges, grads = self._roots(i, gradients)
        for boxes in here.boxes.values():
            for box in boxes:
                box[:] = [None] * len(box)
        # On this thread alone: torch's thread of a device may be the very one that waits for this pipe.
        with torch.autograd.set_multithreading_enabled(False), self._drawing(~i):
            if edges and not self.updates:
                here_alone = [self._phony, *(slot.stand_in for slot in self._slots)]
                sweep(edges, grads, keep=keep, inputs=here_alone)
            elif edges and self.plan.split_backward:
                here.split = SplitBackward(edges, grads, self._phony, here.hooked)
                here.split.inputs()
            elif edges:
                sweep(edges, grads, keep=keep)
        answers = {source: list(map(list, boxes)) for source, boxes in here.boxes.items()}
        if not self.plan.split_backward:
            self._done(i, keep)
        return answers

    def weights(self, i: int, *, keep: bool) -> None:
        """Run the weights' part of microbatch ``i``, left by ``backward``."""
        here = self._passes[i]
        if here.split is not None:
            with torch.autograd.set_multithreading_enabled(False), self._drawing(~i):
                here.split.weights(keep=keep)
            here.split = None
        self._done(i, keep)

    def _roots(self, i: int, gradients: GradientMessages) -> tuple[list[GradientEdge], list[Tensor]]:
        here, device = self._passes[i], self.stage.device
        starts: list[GradientEdge] = []
        roots: list[Tensor] = []
        for target, routed in here.edges.items():
            arrived = chain.from_iterable(gradients.get(target, ()))
            for edge, grad in zip(chain.from_iterable(routed), arrived, strict=False):
                if edge is not None and grad is not None:
                    starts.append(edge)
                    roots.append(grad.to(device, non_blocking=device.type == "cuda"))
        if here.loss_edge is not None:
            assert self.head is not None
            starts.append(here.loss_edge)
            roots.append(torch.full_like(self.losses[i], self.head.seed))
        return starts, roots

    def _done(self, i: int, keep: bool) -> None:
        if not keep:
            del self._passes[i]
        elif (self.stage.index, i) in self.plan.recompute:
            here = self._passes[i]
            here.boxes, here.edges, here.loss_edge = {}, {}, None

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters that gather gradients here; a tied one is listed once for each of its places."""
        return [slot.parameter for slot in self._slots]

    def take_gradients(self) -> list[tuple[Tensor, Tensor | None]]:
        """Return each parameter with the gradient of its placeholder, and clear the placeholder's; loose leaves too."""
        taken: list[tuple[Tensor, Tensor | None]] = [(slot.parameter, slot.stand_in.grad) for slot in self._slots]
        for slot in self._slots:
            slot.stand_in.grad = None
        return taken + self.plan.loose.take()

    def abandon(self) -> None:
        """Drop all passes in progress: the step has failed."""
        self._passes.clear()
        self.plan.loose.take()
        for norm in self._norms:
            norm.forget()


@dataclass(frozen=True, slots=True)
class _Slot:
    """One place in a module where a placeholder replaces a parameter."""

    module: nn.Module
    name: str
    parameter: nn.Parameter
    stand_in: nn.Parameter


def _stand_ins(modules: Sequence[nn.Module], device: torch.device) -> list[_Slot]:
    slots = []
    for module in modules:
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.requires_grad and not isinstance(parameter, Elsewhere):
                # A parameter tied to one of another device is copied here; all others share memory and version.
                slots.append(_Slot(module, name, parameter, nn.Parameter(parameter.detach().to(device))))
    return slots


@contextmanager
def _standing_in(slots: Sequence[_Slot]) -> Iterator[None]:
    for slot in slots:
        slot.module._parameters[slot.name] = slot.stand_in
    try:
        yield
    finally:
        for slot in slots:
            slot.module._parameters[slot.name] = slot.parameter


def _name_of(route: Route) -> str:
    if route is None:
        return "its input"
    return f"the input {route!r}" if isinstance(route, str) else f"the skip {route[1]!r}"


def _kept(inputs: Messages, outside: Container[int], *, again: bool = False) -> Messages:
    return {source: [packet.kept(outside, again=again) for packet in packets] for source, packets in inputs.items()}


def _leaves(messages: Messages) -> list[object]:
    return [leaf for packets in messages.values() for packet in packets for leaf in packet.leaves]


# The second forward of a microbatch: whether this is one, and whether it returned the same values.


def is_recomputing() -> bool:
    """Return True in a layer whose forward a pipe recomputes, because it kept no activations of the microbatch.

    A layer that counts, logs or draws outside PyTorch calls it, to do that only once.

    >>> is_recomputing()
    False

    Source: ``is_recomputing`` of torchgpipe (Kim et al., 2020).
    """
    return runs_again()


def _fingerprint(leaf: object) -> Tensor | str | None:
    """Return of a tensor a random combination of the numbers of each row.

    Not ``torch.hash_tensor``, which takes eight times as long, and in which equal numbers cancel in pairs.
    """
    if not isinstance(leaf, Tensor):
        return repr(leaf) if isinstance(leaf, int | float) else type(leaf).__name__
    if type(leaf) is not Tensor or leaf.layout != torch.strided:
        return None
    x = leaf.detach() if leaf.ndim else leaf.detach()[None]
    if x.itemsize < 2 or not (x.is_floating_point() or x.is_complex()):
        x = x.double()
    n = x.shape[-1]
    return x @ _weights(1 << n.bit_length(), x.dtype, x.device)[:n]


@lru_cache(maxsize=64)
def _weights(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(n)
    return torch.randn(n, generator=generator, device="cpu", dtype=torch.float64).to(device, dtype)


def _same(one: object, other: object) -> bool:
    """Return True for the fingerprints of the same value, up to the order of its sums."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return one is other or (isinstance(one, str) and one == other)
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if torch.equal(one, other):
        return True
    tolerance = 0.0
    if one.device.type != "cpu" or one.dtype.itemsize > 2:  # index_put_ adds float32 in any order on a CPU, too
        tolerance = torch.finfo(one.dtype).eps ** 0.75 * one.nan_to_num(0.0, 0.0, 0.0).abs().max().item()
    return torch.allclose(one, other, rtol=0.0, atol=tolerance, equal_nan=True)
