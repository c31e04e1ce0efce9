"""``StepProgram``: a training step as graphs, one for each set of fixed values.

::

    batch --> Dynamo's guards choose --> backward graph --> gradients --> between --> update graph --> state, in place
                                         (forward, autograd)   |         (traced)    (unmodified optimizer)
                                                               +-- sparse rows ---------> optimizer.step on those rows

The three graphs are captured separately and joined into one for ``graph``. ``run`` runs it, or as two programs, forward
and backward and then the rest, where something decides in between. ``backward`` and ``update`` run them separately, for
a caller whose work in between cannot be traced.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from anabranch.autodiff.boundary.whole_calls import learn_forms
from anabranch.autodiff.grad_sessions import loss_and_returned
from anabranch.autodiff.hooks import OutputRecorder
from anabranch.autodiff.moved_parameter import parameters_here
from anabranch.errors import AnabranchError, CaptureError
from anabranch.graph.dynamo.front import DynamoFront, GuardMiss, TracedCall, changed_objects, mark
from anabranch.graph.graph import Graph
from anabranch.graph.step.backward import Gradients, Report
from anabranch.graph.step.joint import Joint, JointKey
from anabranch.graph.step.step_state import Between, Gate, StepState
from anabranch.graph.step.update import containers_of
from anabranch.graph.trace import undisturbed
from anabranch.tensors import Structure, flatten
from anabranch.tensors.structures import tensors_of

Loss = Callable[[nn.Module, Any], object]
"""``loss(model, batch)`` returns a scalar tensor, or that and a dict of further tensors."""
_MOST_GRAPHS = 128
_MOST_NUMBERS = 8


@dataclass(slots=True)
class _Task:
    """The task of the run in progress."""

    key: JointKey
    begin: Callable[[Sequence[str]], None] | None
    report: Report | None
    may_trace: bool = True
    only_prepare: bool = False
    results: dict[str, object] | None = None
    joint: Joint | None = None
    later: list[Callable[[], None]] = field(default_factory=list)


Prepared: TypeAlias = "tuple[Joint, tuple[object, ...]]"
"""A program that was made for a batch, with its arguments, and has not run."""


class _OnlyPrepared(BaseException):
    """Ends a run after the guards, before any computation."""


class StepProgram(StepState):
    """Forward, backward and optimizer of one training step, captured at the first batch of each kind.

    >>> import torch
    >>> model = nn.Linear(3, 1)
    >>> optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    >>> def loss(model, batch):
    ...     return model(batch).square().mean()
    >>> program = StepProgram(model, loss, [optimizer])
    >>> batch = torch.randn(8, 3)
    >>> first, second = program.run(batch)["loss"], program.run(batch)["loss"]
    >>> bool(second < first)
    True

    A graph is kept for each kind of batch and for each state of all Python values that the loss reads, as Dynamo's
    guards see them, and for the numbers in the parameter groups; learning rates may change freely. Results and state
    are bit for bit those of ``loss.backward(); optimizer.step()``; ``.grad`` is not read, and
    written only if requested.

    Args:
        model: its parameters, buffers and the optimizers' state are updated in place.
        loss: ``loss(model, batch)`` returns a scalar tensor, or that and a dict of tensors.
        optimizers: torch optimizers over disjoint parameters.
        between: a function that is traced between gradients and optimizers; see ``Between``.
        compile: compile the graph with Inductor, which rounds differently, except for the optimizers.
        leaves_gradients: leave each parameter's gradient in ``.grad`` after ``run``, as ``backward()`` does.
        gate: asked before each update; see ``Gate``.
        activation_budget: bytes that forward and backward may have allocated at once: more is computed again.
        differentiates: False for an evaluation, a step without backward and update: ``loss`` is
            ``outputs(model, batch)``, which returns a mapping of tensors, and ``evaluate`` runs it.

    Attributes:
        refused_update: the reason why the optimizers step outside the graph, if their step cannot be captured.

    Raises:
        CaptureError: from ``run`` or ``backward``, for a step that a graph cannot represent faithfully.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        optimizers: Sequence[Optimizer] = (),
        *,
        between: Between | None = None,
        compile: bool = False,  # noqa: A002 - the executor's own word
        leaves_gradients: bool = False,
        gate: Gate | None = None,
        activation_budget: int | None = None,
        differentiates: bool = True,
    ) -> None:
        super().__init__(model, optimizers)
        self.between, self.gate, self.activation_budget = between, gate, activation_budget
        self.compile, self.leaves_gradients, self.differentiates = compile, leaves_gradients, differentiates
        if differentiates:
            self._front = DynamoFront(_evaluated(loss), self._make)
        else:
            self._front = DynamoFront(_marked(loss), self._make, what="the evaluation")
        self._recorder = OutputRecorder()
        self._task: _Task | None = None
        self._last: Graph | None = None
        self._kinds: set[object] = set()
        self._seen_numbers: set[object] = set()
        self._joints: weakref.WeakSet[Joint] = weakref.WeakSet()
        self.captures = 0

    @property
    def graph(self) -> Graph:
        """The graph of the last ``run``, or of the last ``backward``."""
        if self._last is None:
            raise RuntimeError("nothing has been captured yet; run a batch first")
        return self._last

    # --- running

    def run(
        self,
        batch: Structure,
        fetch: Collection[str] = (),
        begin: Callable[[Sequence[str]], None] | None = None,
        *,
        may_trace: bool = True,
    ) -> dict[str, Structure]:
        """One whole step; returns ``"loss"``, the loss's further tensors, and the values fetched.

        Args:
            batch: a nested structure of tensors.
            fetch: names of submodules (their outputs) and of gradients (``<parameter>.grad``, as the optimizer sees
                it; sparse for a table looked up sparsely, ``None`` where none arrives).
            begin: called with the names of the outputs before any computation.
            may_trace: make a graph if none fits; otherwise raise ``GuardMiss``, also for a graph that was prepared but
                never confirmed.
        """
        gradients = tuple([name for name in fetch if name.endswith(".grad")]) if fetch else ()
        modules = tuple([name for name in fetch if name not in gradients]) if fetch else ()
        task = _Task(self._key(True, gradients), begin, None)
        outputs = self._through_front(task, batch, modules, may_trace)
        assert task.results is not None
        return outputs | {name: task.results.get(name) for name in gradients} if gradients else outputs

    def backward(
        self,
        batch: Structure,
        fetch: Collection[str] = (),
        begin: Callable[[Sequence[str]], None] | None = None,
        report: Report | None = None,
        *,
        may_trace: bool = True,
    ) -> Gradients:
        """Forward and backward alone, for all parameters that require a gradient: nothing is updated but buffers.

        Args:
            batch: a nested structure of tensors.
            fetch: names of submodules.
            begin: as for ``run``.
            report: called with results while the graph runs.
            may_trace: as for ``run``.
        """
        task = _Task(self._key(False, ()), begin, report)
        outputs = self._through_front(task, batch, tuple(fetch), may_trace)
        assert task.joint is not None
        assert task.results is not None
        return replace(task.joint.backward.sort(task.results), outputs=outputs)

    def evaluate(
        self, batch: Structure, fetch: Collection[str] = (), *, may_trace: bool = True
    ) -> tuple[Any, dict[str, Structure]]:
        """Return an evaluation's own result, and the outputs of the submodules ``fetch``; call it under ``no_grad``.

        Args:
            batch: a nested structure of tensors.
            fetch: names of submodules.
            may_trace: as for ``run``.
        """
        return self._call(_Task(self._key(False, ()), None, None), batch, tuple(fetch), may_trace)

    def prepare(self, batch: Structure, fetch: Collection[str] = (), *, whole: bool) -> Prepared:
        """Capture the step for this batch without running it.

        Args:
            batch: a nested structure of tensors.
            fetch: the names that ``run`` or ``backward`` will fetch.
            whole: with the update, as for ``run``; else as for ``backward``.
        """
        modules = tuple(name for name in fetch if not name.endswith(".grad"))
        gradients = tuple(name for name in fetch if name.endswith(".grad"))
        task = _Task(self._key(whole, gradients), None, None, only_prepare=True)
        try:
            self._through_front(task, batch, modules, True)
        except _OnlyPrepared as prepared:
            joint, args = prepared.args
            return joint, args
        raise CaptureError(f"{self._front.what} computes nothing from tensors")

    def _key(self, whole: bool, gradients: tuple[str, ...]) -> JointKey:
        if not self.differentiates:  # Dynamo guards all that it reads
            return JointKey(False, self.epoch, None, ())
        # Forward and backward do not depend on the optimizers, and `update` looks at them as they are then.
        if not self._state.intact(optimizers=whole, kept_by_optimizers=self.refused_update is None):
            self._bind()
        before = self.numbers
        if (numbers := self.read_numbers()) != before:
            self._seen_numbers.add(numbers)
            if len(self._seen_numbers) > _MOST_NUMBERS:
                raise CaptureError(
                    "values other than 'lr' in the optimizer's parameter groups (betas, momentum, ...) change from "
                    "step to step, and each change needs a new graph; use engine='tape', or a scheduler that leaves "
                    "them alone (cycle_momentum=False)"
                )
        return JointKey(whole, self.epoch, numbers if whole else None, gradients)

    def _through_front(
        self, task: _Task, batch: Structure, modules: tuple[str, ...], may_trace: bool
    ) -> dict[str, Structure]:
        (loss, extras), outputs = self._call(task, batch, modules, may_trace)
        for optimizer in self.optimizers if task.key.whole else ():
            optimizer._opt_called = True  # type: ignore[attr-defined]
        found = {"loss": loss.detach()}
        for name, value in extras.items():
            found[name] = value.detach() if isinstance(value, Tensor) else value
        return found | outputs

    def _call(
        self, task: _Task, batch: Structure, modules: tuple[str, ...], may_trace: bool
    ) -> tuple[Any, dict[str, Structure]]:
        """Return the function's own result, and the outputs of the submodules ``modules``."""
        kind = (kind_of(batch), modules)
        if may_trace and kind not in self._kinds:
            learn_forms(self.model.modules())
            self._kinds.add(kind)
        self._task = task
        task.may_trace = may_trace
        try:
            submodules = dict(self.model.named_modules()) if modules else {}
            recorded = {name: submodules[name] for name in modules if name in submodules}
            with self._recorder.recording(recorded) if modules else nullcontext(dict[str, object]()) as outputs:
                result = self._front.run(kind, self.model, batch, may_trace=may_trace)
        finally:
            self._task = None
        try:
            # Here, where Python's part of the forward has happened: the optimizers' code may read it.
            for step_on in task.later:
                step_on()
        finally:
            if task.joint is not None:
                self._last = task.joint.graph
        for name in modules:
            if name not in outputs:
                raise ValueError(f"{name!r} cannot be fetched: the forward called no module of that name")
        return result, dict(outputs)

    def finish(self, joint: Joint) -> None:
        """Confirm a program after the optimizers' own step, whose new state is not a change."""
        joint.confirmed = True
        if joint.key.whole:
            self._state.note_optimizer_state()
            joint.take_state()
        self._last = joint.graph

    # --- programs

    def _make(self, call: TracedCall) -> Callable[..., Sequence[object]]:
        changed = changed_objects()
        if changed and self.refused_update is None and not changed.isdisjoint(containers_of(self.optimizers)):
            self.refused_update = CaptureError("the loss changes its groups or its state")
        return _Programs(self, call)

    def up_to_date(self, key: JointKey) -> JointKey:
        """``key`` for the tensors that the model holds now: parameters may have been replaced or added."""
        now = parameters_here(self.model)
        if now.keys() != self.parameters.keys() or any(now[n] is not p for n, p in self.parameters.items()):
            self._bind()
        else:
            self.tensors = {tensor: name for name, tensor in self.model.named_buffers()}
            self.tensors |= {tensor: name for name, tensor in now.items()}
        numbers = None if self.refused_update is not None else key.numbers
        return replace(key, epoch=self.epoch, numbers=numbers)

    def joint(self, call: TracedCall, args: Sequence[object], task: _Task) -> Joint:
        """Return a program for these arguments."""
        if len(self._joints) >= _MOST_GRAPHS:
            raise CaptureError(
                f"{_MOST_GRAPHS} graphs of {self._front.what} are kept, and it needs yet another, for another shape of "
                "a batch, number that an operation reads, or tensor that the model holds; pad batches to a few shapes, "
                "make the numbers tensors, or use engine='tape'"
            )
        self.captures += 1
        try:
            with undisturbed():
                joint = Joint(self, call, args, task.key)
                self._joints.add(joint)
                return joint
        except (AnabranchError, ValueError, TypeError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise CaptureError(
                f"the step cannot be a graph ({type(error).__name__}: {error}); use engine='tape'"
            ) from error


class _Programs:
    """Called by Dynamo in place of the loss, after its guards; checks the state that guards do not cover."""

    def __init__(self, step: StepProgram, call: TracedCall) -> None:
        self._step = weakref.ref(step)  # Dynamo keeps this
        self._call = call
        self._joints: list[Joint] = []
        self._last: Joint | None = None

    def __call__(self, *args: object) -> Sequence[object]:
        step = self._step()
        assert step is not None
        task = step._task
        assert task is not None
        joint = self._last
        if joint is None or not joint.fits(args, task.key):
            joint = self._last = self._find(step, args, task)
        if not (joint.confirmed or task.may_trace):
            raise GuardMiss("the graph of the step has not been compared with the tape yet")
        if joint.memory is not None:
            joint.memory.check(args)
        if task.only_prepare:
            raise _OnlyPrepared(joint, args)
        task.joint = joint
        task.results = joint.run(step, args, task.begin, task.report, task.later)
        return joint.in_order(task.results)

    def _find(self, step: StepProgram, args: Sequence[object], task: _Task) -> Joint:
        for joint in self._joints:
            if joint.fits(args, task.key):
                return joint
        self._joints = [joint for joint in self._joints if joint.key.epoch is step.epoch]
        if not task.may_trace:
            raise GuardMiss("no graph of the step matches the current tensors and numbers")
        task.key = step.up_to_date(task.key)
        joint = step.joint(self._call, args, task)
        self._call.release_tensors()
        self._joints.append(joint)
        return joint


def _evaluated(loss: Loss) -> Callable[..., object]:
    """``loss`` with its results marked, in a form that Dynamo can read: it holds only objects that Dynamo can read."""

    def evaluated(model: nn.Module, batch: object) -> object:
        value, returned = loss_and_returned(loss(model, batch))
        named = {}
        for name, more in returned.items():
            named[name] = mark(name, more).detach() if isinstance(more, Tensor) and name != "loss" else more
        # Detached: Dynamo refuses outputs that depend on a tensor whose gradient was taken inside the graph.
        return mark("loss", value).detach(), named

    return evaluated


def _marked(outputs: Callable[..., object]) -> Callable[..., object]:
    """Return ``outputs`` with its results named, in a form that Dynamo can read."""

    def marked(model: nn.Module, batch: object) -> object:
        result = outputs(model, batch)
        if not isinstance(result, Mapping):
            return result
        named = {}
        for name, value in result.items():
            named[name] = mark(name, value) if isinstance(value, Tensor) else value
        return named

    return marked


def kind_of(batch: object) -> object:
    """Return the shapes, dtypes and devices of the batch's tensors, and the types of all other leaves.

    A hint which programs to try first: guards decide, and a wrong hint costs a longer search.
    """
    leaves: Sequence[object] = tensors_of(batch)
    kind: object = type(batch)
    if not leaves:
        leaves, treedef = flatten(batch)
        kind = treedef.type
    return kind, *[(leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves]
