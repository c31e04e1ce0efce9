"""Copies between main memory and a device, in parallel with the device's computation.

::

    thread that reads   pinned memory ── copy stream ──> device memory, an event behind it
    device thread                                          │ the computing stream waits for the event, and for no other
                        pinned memory <── copy stream ──── outputs of the batch

A request is copied to the device while the previous batch is computed. Memory is pinned because the device copies only
such memory asynchronously.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["DeviceCopies"]


class DeviceCopies:
    """The copies to and from one CUDA device.

    Args:
        device: the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def bring(self, tensors: Sequence[Tensor | None]) -> tuple[list[Tensor | None], torch.cuda.Event]:
        """Start copying ``tensors`` to the device; call ``await_arrival`` before computing with them."""
        with torch.cuda.stream(self._stream):
            there = [None if tensor is None else tensor.to(self._device, non_blocking=True) for tensor in tensors]
            return there, self._stream.record_event()

    def await_arrival(self, tensors: Sequence[Tensor | None], copied: torch.cuda.Event) -> None:
        """Make this thread's later computation wait for ``tensors``, returned by ``bring``."""
        computing = torch.cuda.current_stream(self._device)
        computing.wait_event(copied)
        for tensor in tensors:
            if tensor is not None:
                # The memory belongs to the copy stream: without this it could be reused before the computation is done.
                tensor.record_stream(computing)

    def take(self, outputs: Sequence[Sequence[Tensor | None]]) -> list[list[Tensor | None]]:
        """Copy the outputs computed on this thread to pinned main memory."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            here = [[None if tensor is None else self._to_pinned(tensor) for tensor in one] for one in outputs]
        self._stream.record_event().synchronize()
        return here

    def _to_pinned(self, tensor: Tensor) -> Tensor:
        tensor.record_stream(self._stream)
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True, device="cpu").copy_(
            tensor, non_blocking=True
        )
