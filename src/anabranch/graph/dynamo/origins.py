"""The origin of code: torch and this package, installed libraries, or the user; and closures of functions."""

from __future__ import annotations

import os
import site
import sys
import sysconfig
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType

import torch

__all__ = ["INSTALLED", "LIBRARIES", "OURS", "closed_over", "is_of_a_library"]

# With the separator: torch_geometric is not torch.
OURS = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parents[2]}{os.sep}")
"""Prefixes of the files of torch and of this package."""

_paths = sysconfig.get_paths()
INSTALLED = tuple({*site.getsitepackages(), _paths["stdlib"], _paths["purelib"]})
"""Prefixes of the files of Python and of installed libraries."""

LIBRARIES = (*OURS, *INSTALLED)

_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)


def is_of_a_library(value: object) -> bool:
    """Return True for a module, a class, or a function that closes over nothing, none of them the user's."""
    if isinstance(value, FunctionType):
        return value.__code__.co_filename.startswith(LIBRARIES) and not value.__closure__
    if isinstance(value, ModuleType):
        file = getattr(value, "__file__", None)
        return str(file).startswith(LIBRARIES) if file else value.__name__ in sys.builtin_module_names
    if isinstance(value, type):
        return value.__module__ in sys.builtin_module_names or is_of_a_library(sys.modules.get(value.__module__))
    if isinstance(value, BuiltinFunctionType):
        return value.__self__ is None or isinstance(value.__self__, (ModuleType, type))
    return isinstance(value, _OF_TORCH)


def closed_over(function: object) -> list[object]:
    """Return the values that a Python function closes over, as far as they are assigned.

    >>> number = 3
    >>> closed_over((lambda number: lambda: number)(number))
    [3]
    """
    found: list[object] = []
    for cell in (function.__closure__ or ()) if isinstance(function, FunctionType) else ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not assigned yet
            continue
    return found
