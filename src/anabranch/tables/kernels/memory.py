"""Memory of tensors as the kernels take it, and ``KernelThreads``, which run a kernel on several threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
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
        self.threads = threads
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._workers: list[threading.Thread] = []
        self._lock = threading.Lock()
        if threads < 1:
            raise ValueError(f"at least 1 thread is needed, got {threads}")

    def run(self, part: Callable[[int, int], None], rows: int) -> None:
        """Call ``part(number, count)`` on each of ``count`` threads: on this one alone if there are few ``rows``."""
        if rows < _SMALL or self.threads == 1:
            part(0, 1)
            return
        self._start()
        done: SimpleQueue[BaseException | None] = SimpleQueue()
        for number in range(1, self.threads):
            self._jobs.put((part, number, self.threads, done))
        try:
            part(0, self.threads)
        finally:
            errors = [done.get(timeout=_KERNEL_SECONDS) for _ in range(1, self.threads)]
        for error in filter(None, errors):
            raise error

    def _start(self) -> None:
        with self._lock:
            while len(self._workers) < self.threads - 1:
                worker = threading.Thread(target=_work, args=[self._jobs], name="anabranch-table", daemon=True)
                worker.start()
                self._workers.append(worker)

    def close(self) -> None:
        """End the threads."""
        with self._lock:
            workers, self._workers = self._workers, []
        for _ in workers:
            self._jobs.put(None)
        for worker in workers:
            worker.join(timeout=_KERNEL_SECONDS)

    def __del__(self) -> None:
        for _ in self._workers:
            self._jobs.put(None)

    def __enter__(self) -> KernelThreads:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# Not a ``ThreadPoolExecutor``, whose futures cost a tenth of a millisecond a call more, of one for 26,000 rows.
_Job = tuple[Callable[[int, int], None], int, int, SimpleQueue[BaseException | None]]


def _work(jobs: SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get(timeout=None)) is not None:  # idle until there is work, or the pool ends
        part, number, count, done = job
        try:
            part(number, count)
        except BaseException as error:  # noqa: BLE001 - raised by ``run``
            done.put(error)
        else:
            done.put(None)
        del job, part  # the arrays that it holds
