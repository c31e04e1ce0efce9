"""Copies between devices in parallel with computation: on CUDA each uses separate streams, one at either end.

::

    source device    ── F0.0 ──┬── F0.1 ────────        its stream computes on
    leaving stream             └─ copy ─┐               waits for F0.0, then copies
    arriving stream                     └┐              where the copy's memory comes from; PyTorch lets it wait
    target device    ────────────────────┴─ F1.0        waits for the copy alone

PyTorch runs a copy on the current stream of the source device, and makes that of the target wait. If these were the
streams that compute, a copy would be in both queues and delay the next computation.

Source: torchgpipe (Kim et al., 2020), section 4.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor


class _Streams(threading.local):
    """This thread's streams for copies, one per device."""

    def __init__(self) -> None:
        self._by_device: dict[torch.device, torch.cuda.Stream] = {}

    def on(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._by_device:
            self._by_device[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._by_device[device]


_streams = _Streams()


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` on ``device``; of all streams only the calling thread's current one there waits for it.

    >>> on_device(torch.ones(2), torch.device("cpu"))
    tensor([1., 1.])
    """
    if tensor.device == device or not (tensor.is_cuda and device.type == "cuda"):
        return tensor.to(device, non_blocking=device.type == "cuda")
    return _over_copy_streams(tensor, device)


def _over_copy_streams(tensor: Tensor, device: torch.device) -> Tensor:
    leaving, arriving = _streams.on(tensor.device), _streams.on(device)
    leaving.wait_stream(torch.cuda.current_stream(tensor.device))
    with torch.cuda.stream(leaving), torch.cuda.stream(arriving):
        copied = tensor.to(device, non_blocking=True)
    # Neither side's memory may be reused before the other stream is done with it.
    tensor.record_stream(leaving)
    here = torch.cuda.current_stream(device)
    here.wait_stream(arriving)
    copied.record_stream(here)
    return copied
