"""``StepState``: a captured step's model and optimizers, and the optimizers' part of the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from anabranch.autodiff.moved_parameter import Elsewhere
from anabranch.errors import CaptureError
from anabranch.graph.graph import Graph
from anabranch.graph.step.bound_state import BoundState, OptimizerGroups
from anabranch.graph.step.lookups import SparseRows, as_sparse_gradient
from anabranch.graph.step.update import capture_update, check_captured, has_state

Between: TypeAlias = Callable[[dict[str, Tensor]], dict[str, Tensor]]
"""``between(gradients)`` returns what the optimizers get instead: clipping."""
Gate: TypeAlias = Callable[[list[Tensor], Sequence[str], Mapping[str, Sequence[SparseRows]], bool], bool]
"""``gate(dense, names, sparse, own)`` returns False if nothing is to be updated with these gradients.

``names`` are the parameters of the dense ones; ``own`` says that these are in memory of their own, not in that of the
batch.
"""


class SparseGradients(CaptureError):
    """``between`` would have to see the rows of a table looked up sparsely, which are merged outside of the graph."""


class StepState:
    """The tensors that a step reads and updates, by name, and its settings.

    Args:
        model: its parameters and buffers are updated in place.
        optimizers: torch optimizers over disjoint parameters.

    Attributes:
        between, compile, leaves_gradients, gate, activation_budget: as ``StepProgram`` takes them.
        differentiates: False for an evaluation.
        epoch: a new object each time that the tensors are looked up again.
        parameters: the model's, by name.
        numbers: those in the optimizers' groups, as they were last read; ``None`` once an update was refused.
        names: the names of those that the optimizers hold.
        tensors: the names of parameters and buffers.
        refused_update: the reason why the optimizers step outside the graph, if their step cannot be captured.
    """

    between: Between | None = None
    compile = leaves_gradients = False
    gate: Gate | None = None
    activation_budget: int | None = None
    differentiates = True

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self.model, self.optimizers = model, list(optimizers)
        self.refused_update: CaptureError | None = None
        self._seed = 1.0
        self._seeds: list[Tensor] = []
        self._bind()

    def _bind(self) -> None:
        """Look the state up again and forget every graph's binding, as at construction."""
        self.epoch = object()
        self._state = BoundState(self.model, self.optimizers)
        self.parameters = self._state.parameters
        self.names = _names_of(self.optimizers, self.parameters)
        self.tensors = {tensor: name for name, tensor in self.model.named_buffers()}
        self.tensors |= {tensor: name for name, tensor in self.parameters.items()}
        self._contents = OptimizerGroups(self.optimizers)
        self.numbers: object = None
        self._updates: dict[object, Graph] = {}
        try:
            check_captured(self.optimizers)
        except CaptureError as error:
            self.refused_update = error

    def read_numbers(self) -> object:
        """Read the numbers in the optimizers' groups, and the learning rates, which graphs read when they run."""
        numbers = self._contents.read()
        self.numbers = None if self.refused_update is not None else numbers
        return self.numbers

    def set_seed(self, seed: float) -> None:
        """Start the backward of graphs without an update from this gradient of the loss."""
        if seed != self._seed:
            self._seed = seed
            for tensor in self._seeds:
                tensor.fill_(seed)

    def seed_of(self, loss: Tensor) -> Tensor:
        """Return the tensor from which the backward of a loss like this starts; ``set_seed`` fills it."""
        for tensor in self._seeds:
            if (tensor.dtype, tensor.device) == (loss.dtype, loss.device):
                return tensor
        self._seeds.append(torch.full((), self._seed, dtype=loss.dtype, device=loss.device))
        return self._seeds[-1]

    def captured_update(self, dense: Mapping[str, Tensor]) -> Graph | None:
        """Return the optimizers' step on dense gradients like these; ``None`` without state, or if it is refused."""
        if self.refused_update is not None:
            return None
        heeded = [id(vars(optimizer).get("found_inf")) for optimizer in self.optimizers]  # each held by its graph
        key = (tuple(dense), self._contents.read(), tuple(heeded))
        if key not in self._updates:  # later, state that is not there any more has another identity
            if not has_state(self.optimizers, [self.parameters[name] for name in dense]):
                return None
            self._state.note_optimizer_state()
            try:
                self._updates[key] = capture_update(self.optimizers, dense, self._contents, self.names)
            except CaptureError as error:
                self.refused_update = error
                return None
        return self._updates[key]

    def update(self, dense: Mapping[str, Tensor], sparse: Mapping[str, Sequence[SparseRows]] | None = None) -> None:
        """Step the optimizers on these gradients; parameters without one are left alone."""
        if not self._state.intact(kept_by_optimizers=self.refused_update is None):
            self._bind()
        dense = {name: gradient for name, gradient in dense.items() if self.parameters[name] in self.names}
        if dense:
            graph = self.captured_update(dense)
            if graph is None:
                self.step_eagerly(dense, sparse or {})
                return
            graph.program().run(*dense.values())
        if sparse:
            self.step_eagerly({}, sparse)
        for optimizer in self.optimizers:
            optimizer._opt_called = True  # type: ignore[attr-defined]

    def step_eagerly(self, dense: Mapping[str, Tensor], sparse: Mapping[str, Sequence[SparseRows]]) -> None:
        """Let the optimizers step eagerly on these gradients."""
        gradients = {**dense}
        for name, lookups in sparse.items():
            gradients[name] = as_sparse_gradient(lookups, self.parameters[name])
        with _gradients(self.names, gradients):
            for optimizer in self.optimizers:
                optimizer.step()
        self._state.note_optimizer_state()


def _names_of(optimizers: Sequence[Optimizer], parameters: Mapping[str, Tensor]) -> dict[Tensor, str]:
    known = {tensor: name for name, tensor in parameters.items()}
    names: dict[Tensor, str] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if isinstance(parameter, Elsewhere):
                    continue  # the servers update it
                if parameter not in known:
                    raise CaptureError(
                        f"{type(optimizer).__name__} holds a parameter of shape {tuple(parameter.shape)} that the "
                        "model does not have; give the step the module that owns it, or use engine='tape'"
                    )
                if parameter in names:
                    raise CaptureError(f"{known[parameter]!r} is in two parameter groups; use engine='tape'")
                names[parameter] = known[parameter]
    return names


@contextmanager
def _gradients(names: Mapping[Tensor, str], gradients: Mapping[str, Tensor]) -> Iterator[None]:
    """Set the parameters' ``.grad`` to these, or to ``None``, until the block ends."""
    kept = [(parameter, parameter.grad) for parameter in names]
    try:
        for parameter, name in names.items():
            parameter.grad = gradients.get(name)
        yield
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient
