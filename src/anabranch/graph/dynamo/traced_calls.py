"""Dynamo's calls as the traced function: its arguments sorted into state and inputs, its calls in order.

Dynamo passes on every tensor and number that a function reads. The model's own parameters and buffers are bound to the
graph and compared by identity before each run; the others are passed in every run.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator

from anabranch.errors import AnabranchError, CaptureError
from anabranch.graph.dynamo.front import TracedCall, mark, plain_name
from anabranch.graph.dynamo.refusals import reason_of_call, user_line_of
from anabranch.graph.trace import TraceRecorder, TraceSource, free_name

_CONTROL_FLOW = ("cond", "while_loop", "map_impl", "scan", "associative_scan")


@dataclass(frozen=True, slots=True)
class Arguments:
    """The placeholders of a call, sorted by kind.

    Attributes:
        sources: the inputs of the graph: each tensor once.
        place: for each placeholder the index of its source; ``None`` for a value that the graph holds.
        free: the placeholders that are passed in every run, in the order of the free sources.
        bound: the placeholders that must be identical to the tensors of the trace.
        fixed: the placeholders whose values the graph holds, with those values.
    """

    sources: tuple[TraceSource, ...]
    place: tuple[int | None, ...]
    free: tuple[int, ...]
    bound: tuple[int, ...]
    fixed: tuple[tuple[int, object], ...]

    def given(self, args: Sequence[object], values: Sequence[object]) -> list[object]:
        """Return the traced values in the order of the placeholders."""
        held = dict(self.fixed)
        return [held.get(i, args[i]) if at is None else values[at] for i, at in enumerate(self.place)]


def picker(indices: Sequence[int]) -> Callable[[Sequence[object]], Sequence[object]]:
    """Return a function that picks these values, always as a sequence."""
    if len(indices) > 1:
        return operator.itemgetter(*indices)
    return lambda values: [values[index] for index in indices]


def arrange(
    call: TracedCall,
    args: Sequence[object],
    state: Mapping[Tensor, str],
    *,
    fix_numbers: bool = False,
) -> Arguments:
    """Sorts the arguments of a call.

    Args:
        call: Dynamo's call.
        args: the placeholders' values in the run in progress.
        state: the tensors that are bound, with their names.
        fix_numbers: let the graph hold the Python numbers, where an operation does not accept an unknown number.
    """
    used = [bool(node.users) for node in call.module.graph.find_nodes(op="placeholder")]
    sources: list[TraceSource] = []
    place: list[int | None] = []
    free: list[int] = []
    bound: list[int] = []
    fixed: list[tuple[int, object]] = []
    known: dict[int, int] = {}
    for position, value in enumerate(args):
        if position in call.numbers and isinstance(value, Tensor) and fix_numbers:
            fixed.append((position, value.item()))
            place.append(None)
            continue
        whole = isinstance(value, int) and not isinstance(value, bool) and used[position] and not fix_numbers
        if not isinstance(value, (Tensor, float)) and not whole:
            place.append(None)
            if used[position]:
                fixed.append((position, value))
            continue
        is_state = isinstance(value, Tensor) and value in state
        if is_state:
            bound.append(position)
        if isinstance(value, Tensor) and id(value) in known:
            place.append(known[id(value)])
            continue
        place.append(len(sources))
        known[id(value)] = len(sources)
        name = state[value] if is_state else _renamed(call.names[position])  # type: ignore[index]
        if position in call.numbers:
            assert isinstance(value, Tensor)
            value = value.item()
        number = cast("Tensor | float | int", value)
        sources.append(TraceSource(free_name(name, sources), number, "buffer" if is_state else "argument"))
        if not is_state:
            free.append(position)
    return Arguments(tuple(sources), tuple(place), tuple(free), tuple(bound), tuple(fixed))


def _renamed(name: str) -> str:
    """Return the name without the step's own arguments in front: the model and the batch."""
    head, _, rest = name.partition(".")
    return ".".join(filter(None, ({"0": "", "1": "batch"}.get(head, head), rest))) or "input"


def run_calls(
    call: TracedCall, values: Sequence[object], recorder: TraceRecorder
) -> tuple[list[object], dict[str, Tensor]]:
    """Return the outputs of the calls for traced ``values``, and the tensors that are marked, by name."""
    runner = _Runner(call, recorder)
    results = runner.run(*values)
    return list(results), runner.marked


class _Runner(fx.Interpreter):
    """Runs the calls in order, and passes the module and line of each to the recorder."""

    def __init__(self, call: TracedCall, recorder: TraceRecorder, module: fx.GraphModule | None = None) -> None:
        super().__init__(module or call.module, garbage_collect_values=False)
        self.extra_traceback = False
        self._call, self._recorder = call, recorder
        placeholders = list(call.module.graph.find_nodes(op="placeholder"))
        self._numbers = {placeholders[index] for index in call.numbers}
        self.marked: dict[str, Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "call_method" and n.target == "item" and n.args[0] in self._numbers:
            return self.env[n.args[0]]  # type: ignore[index] # the number itself, traced as one
        if n.op == "call_function" and n.target is torch.ops.higher_order.tag_activation_checkpoint:
            return self._checkpointed(n)
        if isinstance(n.target, HigherOrderOperator) and str(n.target) in _CONTROL_FLOW:
            raise CaptureError(
                f"{user_line_of(n)}the step cannot be a graph: which functions {n.target} runs, or how often, depends "
                "on values; choose between values with torch.where, or use engine='tape'"
            )
        self._recorder.switch(_scope(n))
        self._recorder.line = user_line_of(n)
        try:
            result = super().run_node(n)
        except AnabranchError:
            raise
        except Exception as error:
            raise CaptureError(reason_of_call(error, self._recorder.line)) from error
        if n.target is mark:
            self.marked[str(n.args[0])] = result
        return result

    def _checkpointed(self, n: fx.Node) -> Any:
        """Return a region of ``torch.utils.checkpoint``: marked, so that its values are recomputed instead of kept."""
        body, *rest = cast("tuple[Any, ...]", self.map_nodes_to_values(n.args, n))
        runner, recorder = _Runner(self._call, self._recorder, body), self._recorder
        before, recorder.is_checkpointed = recorder.is_checkpointed, True
        results = runner.run(*rest)
        recorder.is_checkpointed = before  # an exception ends the trace
        self.marked.update(runner.marked)
        return results


def _scope(node: fx.Node) -> str:
    """Return the qualified name of the module that makes the call."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    return plain_name(str(list(stack.values())[-1][0]).removeprefix("L['args'][0]"))
