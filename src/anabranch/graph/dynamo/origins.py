"""Prefixes of the files of torch and of this package: their lines are not the user's."""

from __future__ import annotations

import os
from pathlib import Path

import torch

__all__ = ["OURS"]

# With the separator: torch_geometric is not torch.
OURS = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parents[2]}{os.sep}")
