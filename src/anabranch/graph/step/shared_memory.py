"""``SharedMemory``: tensors that a graph writes to must share no memory with others that it is given.

A graph treats its inputs as separate tensors, as during tracing, and orders its operations accordingly. Dynamo does not
guard against tensors that share memory later: two views of one batch, a buffer that is given another's ``.data``. Such
a step is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from anabranch.errors import CaptureError
from anabranch.graph.dynamo.traced_calls import Arguments, picker
from anabranch.graph.operation_graph import OperationGraph

_Range = tuple[int, int]


def written_inputs(graph: OperationGraph) -> set[str]:
    """Return the names of the inputs that a graph changes."""
    effects = graph.effects()
    pairs = zip(graph.placeholders, graph.bindings, strict=True)
    return {binding.name for node, binding in pairs if effects.writers.get(effects.root[node])}


class SharedMemory:
    """The memory of a program's arguments; if it writes to none, nothing is checked.

    Args:
        arguments: the placeholders, sorted.
        written: the names of those that the program writes to.
    """

    def __init__(self, arguments: Arguments, written: Collection[str]) -> None:
        first: dict[int, int] = {}
        for position, index in enumerate(arguments.place):
            if index is not None and _has_memory(arguments.sources[index].value):
                first.setdefault(index, position)
        changed = {position for index, position in first.items() if arguments.sources[index].name in written}
        bound = [position for index, position in first.items() if arguments.sources[index].state]
        free = [position for position in first.values() if position not in bound]
        self._pick_bound, self._pick_free = picker(bound), picker(free)
        self._written = [position in changed for position in (*bound, *free)]
        self._places: list[int] | None = None
        self._ranges: list[_Range] = []

    def check(self, args: Sequence[object]) -> None:
        """Raise if an argument that is written to shares memory with another one.

        Raises:
            CaptureError: it does; nothing has happened.
        """
        bound: Sequence[Tensor] = self._pick_bound(args)  # type: ignore[assignment]
        free: Sequence[Tensor] = self._pick_free(args)  # type: ignore[assignment]
        places = list(map(Tensor.data_ptr, bound))
        if places != self._places:
            self._places, self._ranges = places, list(map(_range, bound))
        if ranges_overlap([*self._ranges, *map(_range, free)], self._written):
            raise CaptureError(
                "a tensor that the step changes in place shares memory with another of its inputs (views of one "
                "tensor in the batch, or '.data' of one buffer given to another), which a graph would not notice; "
                "clone one of them, or use engine='tape'"
            )


def ranges_overlap(ranges: Sequence[_Range], written: Sequence[bool]) -> bool:
    """Return True if two of the ranges overlap, of which one at least is written to."""
    last = last_written = 0
    for (start, end), is_written in sorted(zip(ranges, written, strict=True)):
        if start < end and (start < last_written or (is_written and start < last)):
            return True
        last = max(last, end)
        if is_written:
            last_written = max(last_written, end)
    return False


def _range(tensor: Tensor) -> _Range:
    """Return the first byte of a tensor and the one after its last."""
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    if not tensor.numel():
        return start, start
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return start, start + tensor.itemsize * (1 + sum((size - 1) * stride for size, stride in steps))


def _has_memory(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided and value.device.type != "meta"
