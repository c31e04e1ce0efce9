"""Random states of GPUs, untouched by a capture.

PyTorch's tracer sets the state of a GPU's generator to what it was before, though a capture draws nothing. Whoever sets
it makes cuDNN's dropout, which ``nn.LSTM`` and ``nn.GRU`` have between layers, start anew with a seed from that
generator: later steps on the tape would draw other numbers than the plain loop.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["random_states_untouched"]


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
