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


class Raises(CaptureError):
    """The step's own code raises, or may raise, also in Python: left to the tape."""


def refusal_of(error: BaseException, what: str) -> CaptureError:
    """Return the error to raise in place of any error of Dynamo's, which becomes its cause.

    The words are PyTorch's: its messages change from one version to the next.
    """
    said = str(error).strip().splitlines() or [type(error).__name__]
    explained = [line.strip().removeprefix("Explanation: ") for line in said if line.strip().startswith("Explanation:")]
    own = said[0] == "Observed exception"  # of the user's own code, told in the line of the context
    told = [line.strip().removeprefix("Developer debug context: ") for line in said if own and " context: " in line]
    words = ". ".join([said[0].rstrip("."), *(told or explained)[:1]]).rstrip(".")
    raises = own or type(error).__name__ == "TorchRuntimeError"  # the other is an operation that refuses these shapes
    kind = Raises if raises else CaptureError
    cure = "" if what == "the function" else "; use engine='tape'"
    refusal = kind(f"{user_line(getattr(error, 'real_stack', None))}{what} cannot be a graph: {words}{cure}")
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
