"""A run without effects: its requests to tables and experts are recorded, and nothing in other processes changes.

``DryRun`` takes the place of a graph tracer, so every boundary of the model calls it. A lookup on servers returns
zeros; an expert's forward is called, but never its backward.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from anabranch.autodiff.boundary.crossing import Boundary, Crossed, run_forward, traced_by


class DryRun:
    """Answers boundaries, and records their traffic.

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

    def forward(self, boundary: Boundary, inputs: Sequence[Tensor | None], wants: Sequence[bool] | None) -> Crossed:
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
        """Cross boundaries in the block as usual."""
        with traced_by(None):
            yield


def _size(tensors: Sequence[Tensor | None]) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


class Lookups(TorchFunctionMode):
    """Records lookups in a model's own tables, and answers those in tables on servers with zeros.

    Args:
        tables: their names, and whether their rows belong on servers, moved there or not.
        dry_run: records each lookup.
    """

    def __init__(self, tables: Mapping[Tensor, tuple[str, bool]], dry_run: DryRun) -> None:
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
