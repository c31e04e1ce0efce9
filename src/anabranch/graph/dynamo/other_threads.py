"""Compilations invisible to other threads.

While a thread compiles, ``torch.compiler.is_compiling()`` is True in the whole process. Torch's optimizers then compute
on tensors instead of Python numbers: meanwhile a plain loop in another thread would round differently. In our
compilations it is True only for traced code, through Dynamo itself.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

__all__ = ["unseen_by_other_threads"]

_ANNOUNCE = "_compile_session_context"


@contextmanager
def unseen_by_other_threads() -> Iterator[None]:
    """Compile in the block, invisible to other threads; to be entered by one thread at a time."""
    compiler: Any = torch.compiler
    announce = getattr(compiler, _ANNOUNCE, None)
    if announce is None:
        yield
        return
    own = threading.get_ident()

    def announce_of_others() -> AbstractContextManager[Any]:
        return nullcontext() if threading.get_ident() == own else announce()

    setattr(compiler, _ANNOUNCE, announce_of_others)
    try:
        yield
    finally:
        setattr(compiler, _ANNOUNCE, announce)
