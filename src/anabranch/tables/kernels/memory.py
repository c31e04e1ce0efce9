"""Memory of tensors as the kernels take it, and ``KernelThreads``, which run a kernel on several threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

_KERNEL_SECONDS = 600.0  # a kernel only touches memory; one that runs longer is a bug
_SMALL = 16_000  # rows below which waking a thread costs more than it saves
_HALVES = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}  # which Numba does not know


def as_array(tensor: Tensor) -> NDArray[Any]:
    """Return the memory of a contiguous CPU tensor as a flat array: bfloat16 as ``uint16``, float16 as ``int16``."""
    flat = tensor.detach().reshape(-1)
    return flat.view(_HALVES.get(flat.dtype, flat.dtype)).numpy()


def as_tensor(array: NDArray[Any], dtype: torch.dtype) -> Tensor:
    """Return a copy of an array as ``as_array`` gives it, in the form of its tensor."""
    # With its own strides: those of an empty array cannot be viewed as bytes.
    return torch.from_numpy(array).clone(memory_format=torch.contiguous_format).view(dtype)


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of arithmetic on rows of ``dtype``: float32 for the half types, else the same."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


class KernelThreads:
    """Threads that divide the rows of one message; a context manager that ends them.

    >>> with KernelThreads(2) as threads:
    ...     parts = []
    ...     threads.run(lambda number, count: parts.append((number, count)), rows=100_000)
    >>> sorted(parts)
    [(0, 2), (1, 2)]

    Each has kernels do its share of all rows, whichever table they are of. The kernels release the GIL, so the shares
    are done at once. Numba's own threads are not used: its layers abort the process when two threads enter a kernel
    together, or after a fork.

    Args:
        threads: the most threads that work, the caller's among them; at least 1.
    """

    def __init__(self, threads: int = 1) -> None:
        if threads < 1:
            raise ValueError(f"at least 1 thread is needed, got {threads}")
        self.threads = threads
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def run(self, part: Callable[[int, int], None], rows: int) -> None:
        """Call ``part(number, count)`` on each of ``count`` threads: on this one alone if there are few ``rows``."""
        if rows < _SMALL or self.threads == 1:
            part(0, 1)
            return
        futures = [self._start().submit(part, number, self.threads) for number in range(1, self.threads)]
        try:
            part(0, self.threads)
        finally:
            for future in futures:
                future.result(timeout=_KERNEL_SECONDS)

    def _start(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self.threads - 1, thread_name_prefix="anabranch-table")
            return self._pool

    def close(self) -> None:
        """End the threads."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()

    def __enter__(self) -> KernelThreads:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
