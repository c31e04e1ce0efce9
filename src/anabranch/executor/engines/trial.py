"""A trial: a new graph's first batch, run on the tape and then again as the graph, and compared bitwise.

The tape's run is the step that counts. The graph's leaves no trace: state is restored before it and after it, random
numbers are drawn again, boundaries answer with what they answered the tape, and Python's part of the step is not
repeated, for the program is run behind Dynamo's guards and without what Dynamo does afterwards.

::

    batch ── a graph fits ──────────────────────────────────────────────────────────> graph
        └─ none does ──> captured (or refused: nothing has happened)
                         └─> the tape takes the step; in its middle the graph computes loss and gradients once more,
                             from the same state and random numbers: other bits, and the next run is refused;
                             an error of the tape is the caller's, and the graph waits for a batch without one

Code that no guard covers, such as a check of ``torch.compiler.is_compiling()``, makes a graph of a different function
than the one that Python runs. The tape's step counts, so a wrong graph never changes a parameter. A loss that itself
communicates between workers is not compared: the second run would send more than the other workers expect.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from anabranch.autodiff.boundary.answers import Answers, AnswersDiffer
from anabranch.autodiff.moved_parameter import Elsewhere, parameters_here
from anabranch.errors import CaptureError
from anabranch.graph import StepProgram
from anabranch.graph.dynamo.front import GuardMiss
from anabranch.graph.dynamo.refusals import Raises
from anabranch.graph.step.program import Prepared

_log = logging.getLogger("anabranch")
_T = TypeVar("_T")
Check: TypeAlias = "Callable[[Mapping[str, object], Prepared, Snapshot], None]"
"""``check(results, prepared, before)`` raises ``Differs`` if the results of a graph, which was run from the state
``before``, are not those of the tape."""


class Differs(Exception):
    """The graph is not bitwise equal to the tape; names the difference."""


class Trials:
    """Runs a step's graphs; on the first batch of each the plain code takes the step, and the graph is compared.

    Args:
        program: makes the graphs.
        model: its tensors are what a step changes.
        what: the step, for the log.
        uncompared: the reason why no graph is compared, if there is one.
    """

    def __init__(self, program: StepProgram, model: nn.Module, what: str, uncompared: str | None) -> None:
        self._program, self._model, self._what = program, model, what
        self._compares = uncompared is None
        self._refused: str | None = None
        if uncompared is not None:
            _log.info("the first batches of %s as a graph are not compared with the tape: %s", what, uncompared)

    def run(
        self,
        as_graph: Callable[[bool], _T],
        prepare: Callable[[], Prepared],
        on_tape: Callable[[Callable[[Check], None]], _T],
    ) -> _T:
        """Run the step once.

        Args:
            as_graph: ``as_graph(may_trace)`` runs the graph.
            prepare: captures without running.
            on_tape: ``on_tape(compare)`` runs the plain code, and calls ``compare(check)`` once its results are there;
                ``check`` is given the graph's.

        Raises:
            CaptureError: an earlier comparison failed.
        """
        if not self._compares:
            return as_graph(True)
        if self._refused is not None:
            raise CaptureError(self._refused)
        try:
            return as_graph(False)
        except GuardMiss:
            pass
        try:
            prepared = prepare()
        except (ValueError, TypeError, Raises) as error:
            # The plain code raises the user's mistake in its place; if it does not, the next run is refused.
            ran = on_tape(lambda check: None)
            self._refused = f"the step cannot be captured: {error}; use engine='tape'"
            return ran
        if prepared.talks():
            _log.info("a graph of %s is not compared with the tape: it communicates between workers", self._what)
            ran = as_graph(True)
            prepared.confirm()
            return ran
        before, answers = Snapshot(self._model, prepared.args), Answers()
        with answers.noted():
            ran = on_tape(partial(self._compare, prepared, before, answers))
        self._program.finish(prepared)
        return ran

    def _compare(self, prepared: Prepared, before: Snapshot, answers: Answers, check: Check) -> None:
        """Run the graph once on the batch that the tape has run, and leave the tape's state."""
        after = Snapshot(self._model, prepared.args)
        failure = None
        try:
            before.restore()
            with answers.replayed():
                results = prepared.compute()
            check(results, prepared, before)
            after.compare()
        except (Differs, AnswersDiffer) as error:
            failure = f"was not bitwise equal to the tape, whose step was kept: {error}"
            failure += "; the code behaves differently under capture than in Python"
        except Exception as error:  # noqa: BLE001 - whatever it is, the tape's step counts
            failure = f"failed but the tape, whose step was kept, did not ({type(error).__name__}: {error})"
        finally:
            after.restore()
        if failure is not None:
            self._refused = f"on the last batch the graph {failure}; use engine='tape'"


class Snapshot:
    """Everything that forward and backward of a graph may change: tensors, and torch's random state.

    Args:
        model: its parameters and buffers.
        others: further tensors.

    Attributes:
        gradients: copies of those that were in ``.grad``, to which a step adds.
    """

    def __init__(self, model: nn.Module, others: Iterable[object]) -> None:
        tensors = [*model.parameters(), *model.buffers(), *(value for value in others if isinstance(value, Tensor))]
        # Sparse batches are read only.
        here = (t for t in dict.fromkeys(tensors) if not isinstance(t, Elsewhere))
        self._tensors = [t for t in here if t.layout is torch.strided]
        with torch.no_grad():
            self._memories = [_without_repeats(tensor).detach() for tensor in self._tensors]
            self._copies = [memory.clone() for memory in self._memories]
        known = parameters_here(model).values()
        self.gradients: dict[Tensor, Tensor] = {p: p.grad.detach().clone() for p in known if p.grad is not None}
        self._random = _random_state()

    def restore(self) -> None:
        """Put everything back."""
        with torch.no_grad():
            for memory, copy in zip(self._memories, self._copies, strict=True):
                memory.copy_(copy)
        torch.set_rng_state(self._random[0])
        if len(self._random) > 1:
            torch.cuda.set_rng_state_all(self._random[1:])

    def compare(self) -> None:
        """Raise ``Differs`` if anything is not bitwise as it was."""
        for tensor, memory, copy in zip(self._tensors, self._memories, self._copies, strict=True):
            if bits_differ(memory, copy):
                raise Differs(f"a tensor of shape {tuple(tensor.shape)} that the step changes has a different value")
        now = _random_state()
        if len(now) != len(self._random) or not all(map(torch.equal, now, self._random)):
            raise Differs("it draws other random numbers")


def _random_state() -> list[Tensor]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    return [torch.get_rng_state(), *cuda]


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
    if one.is_complex():
        one, other = torch.view_as_real(one.resolve_conj()), torch.view_as_real(other.resolve_conj())
    if not one.is_floating_point():
        return not torch.equal(one, other)
    # Zeros of either sign compare equal, but 1 / x differs a step later.
    same = torch.eq(one, other) & (torch.signbit(one) == torch.signbit(other))
    return not bool((same | (torch.isnan(one) & torch.isnan(other))).all())


def check_results(graphs: Mapping[str, object], tapes: Mapping[str, object]) -> None:
    """Raise ``Differs`` if one of the tape's results is not bitwise the graph's."""
    for name, value in tapes.items():
        if isinstance(value, Tensor) and bits_differ(graphs.get(name), value.detach()):
            raise Differs(f"the result {name!r}")


def check_gradients(
    graphs: Mapping[str, Tensor], tapes: Mapping[Tensor, Tensor], parameters: Mapping[str, Tensor], before: Snapshot
) -> None:
    """Raise ``Differs`` if a gradient is not bitwise the tape's, or only one of them has it.

    Args:
        graphs: the graph's, by name.
        tapes: the tape's, added to those that were there before.
        parameters: by name.
        before: the state that the step began with.
    """
    for name, parameter in parameters.items():
        gradient, expected, earlier = graphs.get(name), tapes.get(parameter), before.gradients.get(parameter)
        if gradient is None:
            # A gradient from before the step to which nothing was added is not of this step.
            if expected is not None and (earlier is None or bits_differ(earlier, expected)):
                raise Differs(f"the gradient of {name!r}, which the graph does not compute")
        elif expected is None or expected.layout is not gradient.layout:
            raise Differs("which parameters have a gradient")
        elif bits_differ(gradient if earlier is None else earlier + gradient, expected):
            raise Differs(f"the gradient of {name!r}")


def _without_repeats(tensor: Tensor) -> Tensor:
    """Return a view of each number of an expanded tensor once, to be copied and written."""
    with torch._C.DisableTorchFunctionSubclass():
        for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            if stride == 0 and size > 1:
                tensor = tensor.narrow(dim, 0, 1)
    return tensor
