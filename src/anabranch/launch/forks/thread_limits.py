"""The number of threads of a forked process, as its environment would set it in a started process."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

__all__ = ["limit_threads"]

_BLAS_SETTERS = ("scipy_openblas_set_num_threads64_", "scipy_openblas_set_num_threads", "openblas_set_num_threads")


def limit_threads(environment: Mapping[str, str]) -> None:
    """Compute with the number of threads in ``OMP_NUM_THREADS`` and ``OPENBLAS_NUM_THREADS``, or the default.

    The fork server left torch's number unset, so by default torch chooses it. It had to set that of NumPy's BLAS to 1:
    that library starts its threads when it is loaded.
    """
    text = environment.get("OMP_NUM_THREADS")
    cores = len(os.sched_getaffinity(0))  # the default of these libraries is not larger
    if text is not None and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(min(cores, int(text)))
    blas_threads = min(cores, int(environment.get("OPENBLAS_NUM_THREADS") or text or cores))
    if blas_threads > 1:
        for library in _loaded_blas():
            for name in _BLAS_SETTERS:
                with suppress(AttributeError):
                    library[name](ctypes.c_int(blas_threads))


def _loaded_blas() -> Iterator[ctypes.CDLL]:
    """NumPy's and SciPy's copies of OpenBLAS in this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    for path in sorted({line.split(maxsplit=5)[5] for line in lines if "openblas" in line and "/" in line}):
        with suppress(OSError):
            yield ctypes.CDLL(path)
