"""Conditions under which a process cannot be forked, because its settings take effect before its first line runs.

A fork has the fork server's interpreter, libraries and everything that those read from the environment when they were
loaded. So a process whose environment differs there is started without forking, like all processes of a job with a GPU:
a CUDA driver does not survive a fork.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from anabranch.launch.python_program import PythonProgram

# Each of these exists if a driver is loaded: NVIDIA's, NVIDIA's under WSL, AMD's.
_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/dxg"), Path("/dev/kfd"))

# Read when the interpreter, the C library, torch, NumPy or numba is loaded.
_READ_AT_START = (
    *("PYTHON", "LD_", "GLIBC_", "MALLOC_", "LC_", "LANG", "VIRTUAL_ENV"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "GOTO_", "NPY_", "NUMPY_", "NUMBA_"),
    *("TORCH", "PYTORCH", "ATEN_", "DNNL_", "ONEDNN_", "CUDA", "NVIDIA_", "NCCL_", "HIP_", "ROCR_", "ASAN_", "TSAN_"),
)
# ... except for these, which are read when they are needed, or which a fork sets itself.
_READ_LATER = (
    *("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PYTHONFAULTHANDLER", "PYTHONUNBUFFERED"),
    *("TORCHELASTIC_", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCHINDUCTOR_CACHE_DIR", "TORCH_HOME"),
    # Set by importing scikit-learn: a second copy of Intel's OpenMP may be loaded, and none is set up again in a fork.
    # Neither makes a started process differ from a fork.
    *("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"),
)
# If these are set at all, each process is bound to processors, or monitored, from its start.
_FROM_THE_START = ("OMP_", "GOMP_", "KMP_", "COVERAGE_PROCESS_", "COV_CORE_")


def why_no_fork_server(environment: Mapping[str, str]) -> str | None:
    """Return the reason why no process of a job with ``environment`` can be forked; ``None`` if they can."""
    if environment.get("CUDA_VISIBLE_DEVICES") not in ("", "-1") and any(path.exists() for path in _DRIVERS):
        return "a GPU is visible, and its driver does not survive a fork"
    for name in environment:
        if name.startswith(_FROM_THE_START) and not name.startswith(_READ_LATER):
            return f"{name} is set, which is read at process start"
    return None


def why_not_forked(program: PythonProgram, environment: Mapping[str, str], server: Mapping[str, str]) -> str | None:
    """Return the reason why ``program`` cannot be forked by a fork server with another environment; ``None`` if it
    can.
    """
    for name in sorted(environment.keys() | server.keys()):
        settled = name.startswith(_READ_AT_START) and not name.startswith(_READ_LATER)
        if settled and environment.get(name) != server.get(name):
            return f"{name} differs from the fork server's and is read at process start"
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        text = environment.get(name)
        if text is not None and not (text.isascii() and text.isdecimal() and int(text) > 0):
            return f"{name}={text!r} is not a plain number"
    if not program.is_source:
        return f"{os.fspath(program.target)!r} is not a file of Python source"
    return None
