"""What tests of parameter servers share."""

from __future__ import annotations

import pytest
import torch

from anabranch.tables.warming import compile_kernels


@pytest.fixture(scope="session")
def compiled_for_all_dtypes() -> None:
    """Kernels of every dtype: a server in this process that compiles in a request sends no beats meanwhile."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        compile_kernels(dtype)
