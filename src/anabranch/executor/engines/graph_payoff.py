"""Estimate of a graph's gain: the part of a step that is PyTorch's overhead, and the cost of capturing.

A graph avoids eager mode's overhead around kernels, a few microseconds per operation, forward, backward and update.
So the operations of one step are counted, the overhead of one is measured on this machine, and a step whose time is
mostly kernels is left alone.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["GraphPayoff"]

_SHARE = 0.1
"""The most of the run's time that capturing may take."""
_LEAST_GAIN = 0.1
"""A step of which overhead takes less is left alone."""
_LEAST_RUNS = 8
_SECONDS_AN_OPERATION = 2e-3
_FIRST_SECONDS = 2.0
"""The cost of a capture: loading PyTorch's compiler, then so much for each operation."""


class _Count(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let the user's compiled code run: otherwise TorchDynamo would leave it uncompiled from then on."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class GraphPayoff:
    """The gain that a graph of a step would bring, from its time and operations, and the cost of capturing it."""

    def __init__(self) -> None:
        self._operations: int | None = None
        self._overhead = 0.0
        self._spent = 0.0
        self._runs = 0
        self._tried = 0.0
        self._cost: float | None = None

    @property
    def wants_to_count(self) -> bool:
        """True if the next run is the one whose operations are counted."""
        return self._operations is None and self._runs == _LEAST_RUNS - 1

    @property
    def known(self) -> bool:
        """True once the operations were counted."""
        return self._operations is not None

    @contextmanager
    def counting(self, model: nn.Module) -> Iterator[None]:
        """Count the operations of the block."""
        counter = _Count()
        with counter:
            yield
        self._operations = counter.count
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self._overhead = counter.count * _overhead_of_one(device)

    def spent(self, seconds: float) -> None:
        """Record the time of a run on the tape."""
        self._runs += 1
        self._spent += seconds

    def tried(self, seconds: float) -> None:
        """Record the time of a trial in addition to the step itself."""
        self._tried += seconds
        self._cost = seconds

    def pays(self, seconds: Sequence[float]) -> bool:
        """Return True if a graph is to be tried now, for a step that takes ``seconds`` on the tape."""
        if self._operations is None or not seconds:
            return False
        if self._overhead < _LEAST_GAIN * statistics.median(seconds):
            return False
        cost = self._cost or _FIRST_SECONDS + self._operations * _SECONDS_AN_OPERATION
        return self._tried + cost <= _SHARE * self._spent

    def reason(self, seconds: Sequence[float]) -> str:
        """Return the reason that it does not."""
        step = statistics.median(seconds)
        if self._overhead < _LEAST_GAIN * step:
            return (
                f"a step of {step * 1e3:.1f} ms spends about {self._overhead * 1e3:.1f} ms outside its kernels, too "
                "little for a graph to be faster"
            )
        return (
            "a graph would be faster; it is captured once the run is so long that the capture takes at most a tenth of "
            "it"
        )


def _overhead_of_one(device: torch.device) -> float:
    """Seconds that eager mode spends around one small operation, forward and backward taken together."""
    best = float("inf")
    with torch.inference_mode(False), torch.enable_grad():  # an evaluation is counted without gradients
        x = torch.ones(1, device=device, requires_grad=True)
        for _ in range(3):
            began = time.perf_counter()
            y = x
            for _ in range(20):
                y = y * 1.5
            y.backward()  # type: ignore[no-untyped-call]
            best = min(best, time.perf_counter() - began)
    return best / 40
