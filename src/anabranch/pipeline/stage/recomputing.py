"""The second forward of a microbatch: a layer's query whether this is one, and whether it returned the same values."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch import Tensor

Fingerprints = list[object]
"""For each leaf of some outputs a small tensor that shows a change, or a plain value itself."""


class _Current(threading.local):
    again = False


_current = _Current()


def is_recomputing() -> bool:
    """Return True in a layer whose forward a pipe recomputes, because it kept no activations of the microbatch.

    A layer that counts, logs or draws outside PyTorch calls it, to do that only once.

    >>> is_recomputing()
    False

    Source: ``is_recomputing`` of torchgpipe (Kim et al., 2020).
    """
    return _current.again


@contextmanager
def recomputing() -> Iterator[None]:
    """Make this thread's forwards second ones until the block ends."""
    _current.again = True
    try:
        yield
    finally:
        _current.again = False


def fingerprints(leaves: Sequence[object]) -> Fingerprints:
    """Return the fingerprints of ``leaves``, to be compared with ``same``."""
    return [_combined(leaf) if isinstance(leaf, Tensor) else _text(leaf) for leaf in leaves]


def _text(leaf: object) -> str:
    return repr(leaf) if isinstance(leaf, int | float) else type(leaf).__name__


def _combined(tensor: Tensor) -> Tensor | None:
    """Return a random combination of the numbers of each row.

    Not ``torch.hash_tensor``, which takes eight times as long, and in which equal numbers cancel in pairs.
    """
    if type(tensor) is not Tensor or tensor.layout != torch.strided:
        return None
    x = tensor.detach() if tensor.ndim else tensor.detach()[None]
    if x.itemsize < 2 or not (x.is_floating_point() or x.is_complex()):
        x = x.double()
    n = x.shape[-1]
    return x @ _weights(1 << n.bit_length(), x.dtype, x.device)[:n]


@lru_cache(maxsize=64)
def _weights(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(n)
    return torch.randn(n, generator=generator, device="cpu", dtype=torch.float64).to(device, dtype)


def same(first: Fingerprints, again: Fingerprints) -> bool:
    """Return True if two forwards returned the same values, up to the order of their sums."""
    return len(first) == len(again) and all(map(_same, first, again))


def _same(one: object, other: object) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return one is other or (isinstance(one, str) and one == other)
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if torch.equal(one, other):
        return True
    tolerance = 0.0
    if one.device.type != "cpu" or one.dtype.itemsize > 2:  # index_put_ adds float32 in any order on a CPU, too
        tolerance = torch.finfo(one.dtype).eps ** 0.75 * one.nan_to_num(0.0, 0.0, 0.0).abs().max().item()
    return torch.allclose(one, other, rtol=0.0, atol=tolerance, equal_nan=True)
