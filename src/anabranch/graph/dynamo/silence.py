"""Silences PyTorch's logs of code that it cannot trace: the caller gets one error, from this package."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["silent"]

_LOUD = (
    "torch._dynamo",
    "torch._guards",
    "torch._subclasses.fake_tensor",
    "torch.fx.experimental.sym_node",
    "torch.fx.experimental.symbolic_shapes",
)


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
