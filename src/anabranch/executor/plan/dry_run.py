"""A run without effects: its requests to tables and experts are recorded, and nothing in other processes changes.

``DryRun`` takes the place of a graph tracer, so every boundary of the model calls it. A lookup returns zeros, or the
rows of a local table; an expert's forward is called, but never its backward.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from anabranch.autodiff.boundary.crossing import Boundary, Crossed, run_forward, traced_by

__all__ = ["DryRun", "Lookups"]


class DryRun:
    """Answers boundaries, and records their traffic.

    Attributes:
        ids: ids of each lookup and the padding id among them, by table, of this run.
        asked: bytes sent and received, by experts, of this run.
        away: seconds that experts took in this run.
        leaves: tensors that backward reaches in addition to the parameters.
    """

    captures = False

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Begin a run."""
        self.ids: dict[str, list[tuple[Tensor, int | None]]] = {}
        self.asked: dict[str, tuple[int, int]] = {}
        self.away = 0.0
        self.leaves: list[Tensor] = []
        self._entry: Tensor | None = None
        self._mixture: str | None = None  # whose experts are being asked

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

    def forward(self, boundary: Boundary, inputs: Sequence[Tensor | None], wants: Sequence[bool] | None) -> Crossed:
        """Answer a crossing."""
        if boundary.kind == "table":
            self.looked_up(boundary.name, cast(Tensor, inputs[0]), getattr(boundary, "padding_id", None))
            forms = boundary.forms(inputs)
            return Crossed([torch.zeros(f.shape, dtype=f.dtype, device=f.device) for f in forms], fresh=True)
        if boundary.kind == "mixture":
            return self._ask_mixture(boundary, inputs)
        if boundary.kind in ("expert", "experts"):
            return self._ask(boundary, inputs)
        with self.outside():
            return run_forward(boundary, inputs, None)

    def _ask_mixture(self, boundary: Boundary, inputs: Sequence[Tensor | None]) -> Crossed:
        self._mixture = boundary.name
        try:
            return run_forward(boundary, inputs, None)  # its experts come back to ``forward``
        finally:
            self._mixture = None

    def _ask(self, boundary: Boundary, inputs: Sequence[Tensor | None]) -> Crossed:
        there = _size(inputs)
        differentiable = _size([x for x in inputs if x is not None and x.is_floating_point()])
        began = time.perf_counter()
        with self.outside():
            crossed = run_forward(boundary, inputs, None)
        self.away += time.perf_counter() - began
        back = _size(crossed.outputs)
        name = self._mixture or boundary.name
        sent, received = self.asked.get(name, (0, 0))
        # Inputs go there a second time, with the gradients of the outputs.
        self.asked[name] = sent + 2 * there + back, received + back + differentiable
        return crossed

    def backward(
        self,
        boundary: Boundary,
        state: object,
        inputs: Sequence[Tensor | None],
        gradients: Sequence[Tensor | None],
        wants: Sequence[bool],
        updates: bool,
    ) -> list[Tensor | None]:
        """Return gradients of zero."""
        return [
            torch.zeros_like(value) if want and value is not None else None
            for value, want in zip(inputs, wants, strict=True)
        ]

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Return a context manager in which boundaries are crossed as usual."""
        with traced_by(None):
            yield


def _size(tensors: Sequence[Tensor | None]) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


class Lookups(TorchFunctionMode):
    """Answers lookups in tables that are here with their rows as leaves: a table's own gradient is not computed.

    Args:
        tables: their names.
        dry_run: records each lookup.
    """

    def __init__(self, tables: Mapping[Tensor, str], dry_run: DryRun) -> None:
        super().__init__()
        self.tables = tables
        self._dry_run = dry_run

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.embedding or func is F.embedding_bag:
            weight = kwargs["weight"] if "weight" in kwargs else args[1]
            if isinstance(weight, nn.Parameter) and weight in self.tables:
                return self._answer(weight, func, args, kwargs)
        return func(*args, **kwargs)

    def _answer(
        self, weight: Tensor, func: Callable[..., Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Tensor:
        ids = kwargs["input"] if "input" in kwargs else args[0]
        padding = kwargs.get("padding_idx")
        if padding is None and func is F.embedding and len(args) > 2:
            padding = args[2]
        if padding is not None and padding < 0:
            padding += weight.shape[0]
        self._dry_run.looked_up(self.tables[weight], ids, padding)
        still = weight.detach()
        given = [still if value is weight else value for value in args]
        rows = func(*given, **{name: still if value is weight else value for name, value in kwargs.items()})
        return self._dry_run.leaf(rows) if weight.requires_grad else rows
