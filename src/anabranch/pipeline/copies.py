"""Copies between devices, beside the computing: on CUDA each goes over a stream of its own.

::

    source device    ── F0.0 ──┬── F0.1 ────────        its stream computes on
    copy stream                └─ copy ─┐               waits for F0.0, then copies
    target device    ───────────────────┴── F1.0        waits for the copy alone

Without it a copy would stand in the queue of one of the two devices and hold up what it computes next.

Source: torchgpipe (Kim et al., 2020), section 4.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

__all__ = ["brought"]

_streams: dict[tuple[torch.device, int], torch.cuda.Stream] = {}
_lock = threading.Lock()


def brought(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` on ``device``; the calling thread's stream there waits for it, nothing else does.

    >>> brought(torch.ones(2), torch.device("cpu"))
    tensor([1., 1.])
    """
    if tensor.device == device or not (tensor.is_cuda and device.type == "cuda"):
        return tensor.to(device, non_blocking=device.type == "cuda")
    return _over_copy_stream(tensor, device)


def _over_copy_stream(tensor: Tensor, device: torch.device) -> Tensor:
    copying = _stream_into(device)
    copying.wait_stream(torch.cuda.current_stream(tensor.device))
    with torch.cuda.stream(copying):
        copied = tensor.to(device, non_blocking=True)
    # Neither side's memory may be handed out again before the other stream is done with it.
    tensor.record_stream(copying)
    here = torch.cuda.current_stream(device)
    here.wait_stream(copying)
    copied.record_stream(here)
    return copied


def _stream_into(device: torch.device) -> torch.cuda.Stream:
    """This thread's stream for copies to ``device``."""
    key = (device, threading.get_ident())
    with _lock:
        if key not in _streams:
            _streams[key] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return _streams[key]
