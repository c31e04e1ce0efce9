"""Torch's per-thread modes, carried to a call on another thread: grad mode, autocast, CUDA stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch.autograd.graph import saved_tensors_hooks

__all__ = ["Surroundings"]

_SaveHooks = tuple[Callable[[torch.Tensor], object], Callable[[object], torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The thread-local modes of the thread that made it, to be entered on another.

    >>> with torch.no_grad():
    ...     here = Surroundings.here()
    >>> with here.entered():
    ...     torch.is_grad_enabled()
    False
    """

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    autocast_cache: bool
    stream: torch.cuda.Stream | None
    save_hooks: _SaveHooks | None

    @classmethod
    def here(cls) -> Surroundings:
        """Those of the calling thread."""
        devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        return cls(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast=tuple(
                (device, torch.get_autocast_dtype(device)) for device in devices if torch.is_autocast_enabled(device)
            ),
            autocast_cache=torch.is_autocast_cache_enabled(),
            stream=torch.cuda.current_stream() if torch.cuda.is_initialized() else None,  # type: ignore[no-untyped-call]
            save_hooks=cast("_SaveHooks | None", torch._C._autograd._top_saved_tensors_default_hooks(False)),
        )

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Make them the calling thread's until the block ends."""
        with ExitStack() as stack:
            enter = stack.enter_context
            enter(torch.inference_mode(self.inference))
            enter(torch.set_grad_enabled(self.grad))
            for device, dtype in self.autocast:
                enter(torch.autocast(device, dtype=dtype, cache_enabled=self.autocast_cache))
            if self.stream is not None:
                enter(torch.cuda.stream(self.stream))
            if self.save_hooks is not None:
                enter(saved_tensors_hooks(*self.save_hooks))
            yield
