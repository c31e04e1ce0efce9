"""A trial: a new graph's first batch, run on the tape and then again as the graph, and compared bitwise.

The tape's run is the step that counts. The graph's leaves no trace: state is restored before it and after it, random
numbers are drawn again, boundaries answer with what they answered the tape, and Python's part of the step is not
repeated, for the program is run behind Dynamo's guards and without what Dynamo does afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from anabranch.autodiff.boundary.answers import Answers, AnswersDiffer
from anabranch.autodiff.moved_parameter import Elsewhere, parameters_here
from anabranch.graph.step.lookups import SparseRows, as_sparse_gradient


class Differs(Exception):
    """The graph is not bitwise equal to the tape; names the difference."""


class Snapshot:
    """Everything that forward and backward may change: tensors, gradients, and torch's random state.

    Args:
        model: its parameters, buffers and gradients.
        others: further tensors.
        since: the snapshot at the step's beginning, for one at its end. Only gradients that were there then are kept
            with their contents: a step adds to those. A collective may be using the others by now.
    """

    def __init__(self, model: nn.Module, others: Iterable[object], since: Snapshot | None = None) -> None:
        found = [*model.parameters(), *model.buffers()]
        found += [value for value in others if isinstance(value, Tensor)]
        # Sparse batches are read only.
        here = (t for t in dict.fromkeys(found) if not isinstance(t, Elsewhere))
        self._tensors = [t for t in here if t.layout is torch.strided]
        with torch.no_grad():
            self._memories = [_without_repeats(tensor).detach() for tensor in self._tensors]
            self._copies = [memory.clone() for memory in self._memories]
        self._gradients = [(parameter, parameter.grad) for parameter in parameters_here(model).values()]
        kept = [(parameter, gradient) for parameter, gradient in self._gradients if gradient is not None]
        if since is not None:
            kept = [(parameter, gradient) for parameter, gradient in kept if parameter in since._kept]
        self._kept: dict[Tensor, tuple[Tensor, Tensor]] = {p: (g, g.detach().clone()) for p, g in kept}
        self._random = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]

    def restore(self) -> None:
        """Put everything back."""
        with torch.no_grad():
            for memory, copy in zip(self._memories, self._copies, strict=True):
                memory.copy_(copy)
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for held, (gradient, copy) in self._kept.items():
                if gradient.layout is torch.strided:
                    _without_repeats(gradient).detach().copy_(_without_repeats(copy))
                else:
                    held.grad = copy.clone()
        torch.set_rng_state(self._random)
        if self._cuda is not None:
            torch.cuda.set_rng_state_all(self._cuda)

    def differing(self) -> str | None:
        """Return a description of the first bitwise difference from the snapshot."""
        for tensor, memory, copy in zip(self._tensors, self._memories, self._copies, strict=True):
            if bits_differ(memory, copy):
                return f"a tensor of shape {tuple(tensor.shape)} that the step changes has a different value"
        return None

    def gradients_before(self) -> dict[Tensor, Tensor]:
        """Return the gradients that there were, by parameter."""
        return {parameter: copy for parameter, (_, copy) in self._kept.items()}

    def gradients_after(self, parameters: Iterable[Tensor]) -> dict[Tensor, Tensor]:
        """Return the present gradients, separate from the tensors that ``restore`` writes to."""
        found = {parameter: parameter.grad for parameter in parameters if parameter.grad is not None}
        return {p: gradient.clone() if p in self._kept else gradient for p, gradient in found.items()}

    @property
    def random_differs(self) -> bool:
        """True if random numbers were drawn since, on the CPU or a device."""
        if not torch.equal(torch.get_rng_state(), self._random):
            return True
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return False
        return self._cuda is None or not all(map(torch.equal, torch.cuda.get_rng_state_all(), self._cuda))


def bits_differ(one: Any, other: Any) -> bool:
    """Return True if two results are not bitwise equal; NaN equals NaN."""
    if isinstance(one, Tensor) != isinstance(other, Tensor):
        return True
    if not isinstance(one, Tensor):
        return bool(one != other) and not (one != one and other != other)
    if one.layout is not torch.strided:
        one, other = one.coalesce(), other.coalesce()
        return bits_differ(one.indices(), other.indices()) or bits_differ(one.values(), other.values())
    if one.shape != other.shape or one.dtype != other.dtype:
        return True
    if not one.is_floating_point() and not one.is_complex():
        return not torch.equal(one, other)
    if one.is_complex():
        one, other = torch.view_as_real(one.resolve_conj()), torch.view_as_real(other.resolve_conj())
    # Zeros of either sign compare equal, but 1 / x differs a step later.
    same = torch.eq(one, other) & (torch.signbit(one) == torch.signbit(other))
    return not bool((same | (torch.isnan(one) & torch.isnan(other))).all())


def check_results(results: Mapping[str, object], loss: Tensor, returned: Mapping[str, object]) -> None:
    """Raise ``Differs`` if the loss or another result of the step is not bitwise equal."""
    if bits_differ(results["loss"], loss):
        raise Differs("the loss")
    for name, value in returned.items():
        if isinstance(value, Tensor) and bits_differ(results.get(name), value.detach()):
            raise Differs(f"the result {name!r}")


def check_gradients(
    found: Mapping[str, Tensor],
    rows: Mapping[str, Sequence[SparseRows]],
    seen: Mapping[Tensor, Tensor],
    parameters: Mapping[str, Tensor],
    before: Mapping[Tensor, Tensor],
) -> None:
    """Raise ``Differs`` if a gradient is not bitwise the tape's, or only one of them has it.

    Args:
        found: the graph's dense ones, by name.
        rows: the graph's of sparse tables, by name.
        seen: the tape's.
        parameters: by name.
        before: the gradients that the tape's were added to.
    """
    for name, gradient in found.items():
        expected, earlier = seen.get(parameters[name]), before.get(parameters[name])
        if expected is None:
            raise Differs("which parameters have a gradient")
        if bits_differ(gradient if earlier is None else earlier + gradient, expected):
            raise Differs(f"the gradient of {name!r}")
    for name, lookups in rows.items():
        expected = seen.get(parameters[name])
        if expected is None or expected.layout is torch.strided:
            raise Differs("which parameters have a sparse gradient")
        earlier, gradient = before.get(parameters[name]), as_sparse_gradient(lookups, parameters[name])
        if bits_differ(gradient if earlier is None else earlier + gradient, expected):
            raise Differs(f"the gradient of {name!r}")
    graphs = {parameters[name] for name in (*found, *rows)}
    names = {parameter: name for name, parameter in parameters.items()}
    for parameter, gradient in seen.items():
        # A gradient from before the step to which nothing was added is not of this step.
        if parameter not in graphs and (parameter not in before or bits_differ(before[parameter], gradient)):
            raise Differs(f"the gradient of {names.get(parameter, 'a parameter')!r}, which the graph does not compute")


def repeat(
    before: Snapshot,
    after: Snapshot,
    answers: Answers,
    run: Callable[[], Mapping[str, object]],
    check: Callable[[Mapping[str, object]], None],
) -> None:
    """Run the graph once on the batch that the tape has run, and leave the tape's state.

    Args:
        before: the state before the step.
        after: the state after the tape's step.
        answers: of the boundaries.
        run: the graph's program.
        check: called with its results; raises ``Differs``.

    Raises:
        Differs: the graph's results, state or random numbers are not the tape's.
    """
    try:
        before.restore()
        with answers.replayed():
            results = run()
        check(results)
        found = after.differing()
        if found is not None:
            raise Differs(found)
        if after.random_differs:
            raise Differs("it draws other random numbers")
    except AnswersDiffer as error:
        raise Differs(str(error)) from error
    finally:
        after.restore()


def _without_repeats(tensor: Tensor) -> Tensor:
    """Return a view of each number of an expanded tensor once, to be copied and written."""
    with torch._C.DisableTorchFunctionSubclass():
        for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            if stride == 0 and size > 1:
                tensor = tensor.narrow(dim, 0, 1)
    return tensor
