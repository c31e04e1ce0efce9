"""Selection of kernels: the compiled ones where Numba is installed, else the plain ones, reported once.

Both are modules of the same functions; the compiled module's docstring has the conventions that they share.
``KernelThreads`` runs one of them on several threads of this package.
"""

from __future__ import annotations

import functools
import importlib.util
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["KernelThreads", "Kernels", "as_array", "as_rows", "as_tensor", "kernels", "working_dtype"]

_KERNEL_SECONDS = 600.0  # a kernel only touches memory; one that runs longer is a bug
_SMALL = 1 << 15  # numbers below which waking a thread costs more than it saves


class Kernels(Protocol):
    """The functions of both kernel modules; each is described at its definition."""

    first_outside: Callable[..., int]
    merge: Callable[..., int]
    place: Callable[..., None]
    gather: Callable[..., None]
    first_behind: Callable[..., int]
    merge_sums: Callable[..., None]
    initialise: Callable[..., None]
    step_sgd: Callable[..., None]
    step_adagrad: Callable[..., None]
    step_adam: Callable[..., None]
    step_row_wise_adagrad: Callable[..., None]
    replay: Callable[..., None]


def kernels(kind: Literal["compiled", "plain"] | None = None) -> Kernels:
    """Return the kernels of that kind; by default the compiled ones if Numba is installed.

    >>> kernels("plain").first_outside(np.array([0, 4, 2]), 4)
    1

    Raises:
        ImportError: ``"compiled"`` was requested and Numba is not installed.
    """
    if kind == "plain" or (kind is None and not _has_numba()):
        from anabranch.tables.kernels import _plain

        return cast(Kernels, _plain)
    from anabranch.tables.kernels import _compiled

    return cast(Kernels, _compiled)


@functools.cache
def _has_numba() -> bool:
    if importlib.util.find_spec("numba") is not None:
        return True
    warnings.warn(
        "numba is not installed, so tables use the plain PyTorch kernels, which are many times slower; "
        "pip install 'anabranch[servers]'",
        RuntimeWarning,
        stacklevel=3,
    )
    return False


def as_array(tensor: Tensor) -> NDArray[Any]:
    """Return the memory of a contiguous CPU tensor as a flat array; bfloat16, which NumPy does not know, as
    ``uint16``.
    """
    flat = tensor.detach().reshape(-1)
    return (flat.view(torch.uint16) if flat.dtype == torch.bfloat16 else flat).numpy()


def as_rows(tensor: Tensor, width: int) -> tuple[NDArray[Any], int]:
    """Return the memory under a CPU tensor of ``[..., width]``, and the distance between its rows; copied only if
    necessary.

    >>> memory, apart = as_rows(torch.zeros(3, 10)[:, 2:6], 4)
    >>> memory.size, apart
    (24, 10)
    """
    rows = tensor.detach().reshape(-1, width)
    if rows.stride(1) != 1 or (len(rows) > 1 and rows.stride(0) < width):
        rows = rows.contiguous()
    apart = rows.stride(0) if len(rows) > 1 else width
    return as_array(rows.as_strided(((len(rows) - 1) * apart + width if len(rows) else 0,), (1,))), apart


def as_tensor(array: NDArray[Any]) -> Tensor:
    """Return the tensor over an array's memory; ``uint16`` is bfloat16."""
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of arithmetic on rows of ``dtype``: float32 for the half types, else the same."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


class KernelThreads:
    """Threads that divide one kernel's work; a context manager that ends them.

    >>> with KernelThreads(2) as threads:
    ...     parts = []
    ...     threads.run(lambda first, last: parts.append((first, last)), count=10, numbers=1 << 20)
    >>> sorted(parts)
    [(0, 5), (5, 10)]

    The kernels release the GIL, so the parts run at once. Numba's own threads are not used: its layers abort the
    process when two threads enter a kernel together, or after a fork.

    Args:
        threads: the most threads that work, the caller's among them; at least 1.
    """

    def __init__(self, threads: int = 1) -> None:
        if threads < 1:
            raise ValueError(f"at least 1 thread is needed, got {threads}")
        self.threads = threads
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def run(self, part: Callable[[int, int], None], count: int, numbers: int) -> None:
        """Call ``part(first, last)`` on ranges that cover ``range(count)``: one if there are few ``numbers`` to do."""
        parts = min(self.threads, count) if numbers >= _SMALL else 1
        if parts <= 1:
            part(0, count)
            return
        edges = [count * k // parts for k in range(parts + 1)]
        futures: list[Future[None]] = [self._start().submit(part, edges[k], edges[k + 1]) for k in range(1, parts)]
        try:
            part(edges[0], edges[1])
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
