"""The errors of code that cannot be a graph: the user's line, and PyTorch's own words."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from traceback import StackSummary

import torch
from torch import fx
from torch._subclasses.fake_tensor import DynamicOutputShapeException

from anabranch.errors import CaptureError

# With the separator: torch_geometric is not torch.
_OURS = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parents[2]}{os.sep}")
"""Prefixes of the files of torch and of this package: their lines are not the user's."""


def refusal_of(error: BaseException, what: str) -> CaptureError:
    """Return the error to raise in place of any error of Dynamo's, which becomes its cause.

    PyTorch's words are given whole: its messages change from one version to the next.
    """
    cure = "" if what == "the function" else "; use engine='tape'"
    line, words = user_line(getattr(error, "real_stack", None)), f"{type(error).__name__}: {error}"
    refusal = CaptureError(f"{line}{what} cannot be a graph{cure}. PyTorch says:\n{words.strip()}")
    refusal.__cause__ = error
    return refusal


def reason_of_call(error: Exception, line: str) -> str:
    """Return the error of one of Dynamo's calls, in one line, for the user's line."""
    words = (str(error).splitlines() or [""])[0]
    if isinstance(error, DynamicOutputShapeException):  # its message is the operator's name alone
        words = f"the shape of a result depends on values ({words}), which a graph cannot hold; use engine='tape'"
    return f"{line}{type(error).__name__}: {words}"


def user_line(stack: StackSummary | None) -> str:
    """Return the innermost line of the user's own code, or else of a library's, followed by a colon."""
    return _innermost([(frame.filename, frame.lineno) for frame in stack or ()])


def user_line_of(node: fx.Node) -> str:
    """Return the same of a call of Dynamo's graph."""
    return _innermost(re.findall(r'File "([^"]+)", line (\d+), in ', str(node.meta.get("stack_trace") or "")))


def _innermost(places: Sequence[tuple[str, object]]) -> str:
    own = [place for place in places if not place[0].startswith(_OURS)]
    chosen = own or [place for place in places if not place[0].startswith(_OURS[1])]
    return f"{chosen[-1][0]}:{chosen[-1][1]}: " if chosen else ""
