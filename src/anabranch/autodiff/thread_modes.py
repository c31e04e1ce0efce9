"""``ThreadModes``: what PyTorch keeps per thread, carried to work that another thread does for this one.

Grad mode, inference mode, autocast and the default device. CUDA's current streams are per thread too: work on another
thread uses the caller's, else it would not wait for theirs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

_DEVICE_TYPES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class ThreadModes:
    """The modes of the thread that took them.

    >>> with torch.no_grad():
    ...     modes = ThreadModes.take()
    >>> with modes.entered():
    ...     torch.is_grad_enabled()
    False
    """

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    autocast_cache: bool
    device: torch.device

    @classmethod
    def take(cls) -> ThreadModes:
        """Return the modes of the calling thread."""
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            tuple([(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _DEVICE_TYPES]),
            torch.is_autocast_cache_enabled(),
            torch.get_default_device(),
        )

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Put the calling thread into these modes until the block ends."""
        with ExitStack() as stack:
            enter = stack.enter_context
            if self.inference:
                enter(torch.inference_mode())
            enter(torch.set_grad_enabled(self.grad))
            for kind, enabled, dtype in self.autocast:
                if enabled or torch.is_autocast_enabled(kind):
                    enter(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self.autocast_cache))
            if self.device != torch.get_default_device():
                enter(self.device)
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
