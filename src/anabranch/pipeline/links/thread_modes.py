"""The caller's modes, carried into worker threads: PyTorch keeps grad mode, inference mode and autocast per thread.

CUDA's current streams are per thread too: a worker uses the caller's streams, else it would not wait for their work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

__all__ = ["Ambient", "current_streams", "on_streams"]

_DEVICE_TYPES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class Ambient:
    """The modes of the thread that took them.

    >>> with torch.no_grad():
    ...     ambient = Ambient.take()
    >>> with ambient.entered():
    ...     torch.is_grad_enabled()
    False
    """

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    autocast_cache: bool

    @classmethod
    def take(cls) -> Ambient:
        """Return the modes of the calling thread."""
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _DEVICE_TYPES),
            torch.is_autocast_cache_enabled(),
        )

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Put the calling thread into these modes until the block ends."""
        with ExitStack() as stack:
            if self.inference:
                stack.enter_context(torch.inference_mode())
            else:
                stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, enabled, dtype in self.autocast:
                if enabled != torch.is_autocast_enabled(kind) or enabled:
                    stack.enter_context(
                        torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self.autocast_cache)
                    )
            yield


def current_streams() -> list[torch.cuda.Stream]:
    """Return the calling thread's current stream on each CUDA device; none before CUDA is in use."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return []
    # Entering a stream makes its device the current one, so the stream on the caller's device comes last.
    current = torch.cuda.current_device()
    order = sorted(range(torch.cuda.device_count()), key=lambda index: index == current)
    return [torch.cuda.current_stream(index) for index in order]


@contextmanager
def on_streams(streams: Sequence[torch.cuda.Stream]) -> Iterator[None]:
    """Make these streams the calling thread's current ones until the block ends."""
    with ExitStack() as stack:
        for stream in streams:
            stack.enter_context(torch.cuda.stream(stream))
        yield
