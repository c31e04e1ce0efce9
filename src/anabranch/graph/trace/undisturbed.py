"""Captures leave alone the random states of GPUs, and the user's log.

- PyTorch's tracer sets the state of a GPU's generator to what it was before, though a capture draws nothing. Whoever
  sets it makes cuDNN's dropout, which ``nn.LSTM`` and ``nn.GRU`` have between layers, start anew with a seed from that
  generator: later steps on the tape would draw other numbers than the plain loop.
- PyTorch logs code that it cannot trace: the caller gets one error, from this package.
"""

from __future__ import annotations

import gc
import logging
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_LOUD = (
    "torch._dynamo",
    "torch._guards",
    "torch._subclasses.fake_tensor",
    "torch.fx.experimental.sym_node",
    "torch.fx.experimental.symbolic_shapes",
)


@contextmanager
def random_states_untouched() -> Iterator[None]:
    """Run a block in which setting a GPU's random state to what it is does nothing; for one thread at a time."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        yield
        return
    usual, own = torch.cuda.set_rng_state, threading.get_ident()

    def set_if_other(new_state: Tensor, device: int | str | torch.device = "cuda") -> None:
        if threading.get_ident() != own or not torch.equal(new_state, torch.cuda.get_rng_state(device)):
            usual(new_state, device)

    torch.cuda.set_rng_state = set_if_other
    try:
        yield
    finally:
        torch.cuda.set_rng_state = usual


@contextmanager
def silent() -> Iterator[None]:
    """Run a block without warnings, and without records of PyTorch's tracers."""
    # Each separately: a disabled logger still propagates records of its children.
    known = [logging.getLogger(name) for name in list(logging.root.manager.loggerDict) if name.startswith(_LOUD)]
    loggers = [*known, *map(logging.getLogger, _LOUD)]
    before = [logger.disabled for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.disabled = True
        try:
            yield
        finally:
            for logger, disabled in zip(loggers, before, strict=True):
                logger.disabled = disabled


@contextmanager
def undisturbed() -> Iterator[None]:
    """Run a block without Python's collector, which would search the many new objects hundreds of times."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
