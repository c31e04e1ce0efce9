"""A layer's query whether its forward is the first, or a recomputation for its activations."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["is_recomputing", "recomputing"]


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
