"""The reasons why Python code cannot be a graph, in the user's terms, with the line of code."""

from __future__ import annotations

import re

import torch
from torch import fx

from anabranch.errors import CaptureError
from anabranch.graph.dynamo.origins import OURS

__all__ = [
    "DIVIDED",
    "Raises",
    "WITHOUT_WORDS",
    "is_inside_talk",
    "reason_here",
    "reason_of",
    "reason_of_call",
    "refusal_of",
    "user_line_of",
]

_REASONS = (
    ("trace_numpy", "it computes with NumPy, which a graph would round differently; compute with torch"),
    ("numpy.", "it computes with NumPy, which a graph would round differently; compute with torch"),
    ("fork_rng", "it restores torch's random state in the middle of the step"),
    ("scope of this HOP", "a checkpointed region, or a branch, changes a variable outside it"),
    ("tolist()", "it reads a tensor's value (item(), int(), float(), tolist()) in the middle of the step"),
    ("torch.nn.Parameter()", "it makes an nn.Parameter in the middle of the step"),
    ("ops that return a non-Tensor", "it calls a PyTorch operation whose result is not a tensor"),
    ("Cannot trace class definition", "it defines a class in the middle of the step"),
    ("sparse Tensors", "it computes with sparse tensors"),
    ("copy.deepcopy()", "it copies a tensor or a module (copy.deepcopy)"),
    ("changes to a Tensor's `requires_grad`", "it calls requires_grad_() in the middle of the step"),
    ("Data-dependent branching", "it branches on a value that it computes; use torch.where, or return the tensor"),
    ("item()", "it reads a tensor's value (item(), int(), float(), tolist()) in the middle of the step"),
    ("DynamicOutputShape", "the shape of a result depends on values (nonzero, unique, a mask as an index)"),
    ("returning intermediate with requires_grad_", "a result depends on a tensor on which requires_grad was set"),
    ("_LegacyVariableBase", "it makes an autograd.Variable; use tensor.detach().requires_grad_()"),
    ("pack_padded_sequence", "it packs sequences, whose shape depends on the values of their lengths"),
    ("intentionally marked", "PyTorch does not let this function be captured"),
    ("Dynamic shape operator", "the shape of a result depends on values (nonzero, unique, a mask as an index)"),
    ("DataDependentOutput", "the code depends on a value that it computes"),
    ("data-dependent", "the code depends on a value that it computes"),
    ("operator `print`", "it prints"),
    ("operator `open`", "it reads or writes a file"),
    ("logging", "it writes to a log"),
    ("random", "it draws random numbers outside torch"),
    ("Generator", "it draws from its own generator"),
    ("register_hook", "it sets a hook on a gradient"),
    ("backward hook", "a module has a backward hook"),
    ("Backward hook", "a module has a backward hook"),
    ("backward()", "it calls backward() in the middle of the step"),
    ("UntypedStorage", "an operation reads several tensors as one piece of memory, as nn.LSTM and nn.GRU do on a GPU"),
)
DIVIDED = "it divides a float that changes by // or divmod(), which a graph would round differently"
_CURE = "; use engine='tape' for this step"


class Raises(CaptureError):
    """The step's own code raises, or may raise, also in Python: left to the tape."""


def refusal_of(error: BaseException, what: str) -> CaptureError:
    """Return the error to raise in place of Dynamo's."""
    text = str(error)
    raises = "Observed exception" in text or _failed_operation(text) is not None
    return (Raises if raises else CaptureError)(reason_of(error, what))


def reason_of(error: BaseException, what: str) -> str:
    """One sentence: the line, the reason, and an alternative."""
    text = str(error)
    changed = re.search(r"certain side effects happened.*?: \[(.*)\]", text)
    if changed:
        names = ", ".join(sorted({_python_name(name) for name in re.findall(r'"(.*?)"', changed[1])}))
        return (
            f"{what} changes {names or 'Python state'} while it is captured; a replay runs tensor operations only and "
            "would lose the change: return the value, or make it a tensor that is changed in place"
        )
    line = _user_line(text)
    where = f"{line}: " if line else ""
    if "for divmod(): 'float' and 'float'" in text:  # of numbers unknown to Dynamo
        return f"{where}{what} cannot be a graph: {DIVIDED}{_CURE}"
    if "Observed exception" in text:
        return f"{where}{what} raises {_raised(text)} while it is captured"
    failed = _failed_operation(text)
    if failed is not None:
        return f"{where}{what} raises {failed[1]}: {failed[2]}"
    builtin = re.search(r"how to trace builtin operator `(\w+)`", text)
    if builtin and builtin[1] not in ("print", "open"):
        return f"{where}{what} cannot be a graph: it calls {builtin[1]}(){_CURE}"
    for needle, words in _REASONS:
        if needle in text:
            return f"{where}{what} cannot be a graph: {words}{_CURE}"
    explanation = re.search(r"Explanation: (?!Dynamo does not support this)(.*)", text)
    said = explanation[1] if explanation else (text.strip().splitlines() or [type(error).__name__])[0]
    return f"{where}{what} cannot be a graph: {_simple(said)}{_CURE}"


def _failed_operation(text: str) -> re.Match[str] | None:
    """Match the error of an operation on these shapes and types, and its message."""
    return re.search(r"got (\w+)\(['\"](.*?)['\"]\)", text) if "fake tensor" in text else None


def reason_here(words: str, what: str) -> str:
    """Return the same for the line of code that is being traced."""
    frames = torch._guards.TracingContext.extract_stack()
    own = [frame for frame in frames if not frame.filename.startswith(OURS)]
    where = f"{own[-1].filename}:{own[-1].lineno}: " if own else ""
    return f"{where}{what} cannot be a graph: {words}{_CURE}"


def reason_of_call(error: Exception, line: str) -> str:
    """Return the same for one of Dynamo's calls: the error of the user's line, or why it cannot be captured."""
    said = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    words = next((words for needle, words in _REASONS if needle in said), None)
    if words is None or not (type(error).__module__.startswith("torch.") or "UntypedStorage" in said):
        return f"{line}{said}"
    return f"{line}the step cannot be a graph: {words}{_CURE}"


def _python_name(source: str) -> str:
    """Return the plain name of a source: ``'seen'`` for ``G['seen']``, ``'calls'`` for ``L['self'].calls``."""
    parts = re.findall(r"\['(\w+)'\]|\.(\w+)", source)
    names = [one or other for one, other in parts if not (one or other).startswith("__")]
    names = [name for name in names if name not in ("args", "cell_contents", "_buffers", "_modules")]
    return repr(names[-1]) if names else "a variable that it closes over"


_INSIDE = re.compile(
    r"VariableTracker|\bHOP\b|AOT|\bFX\b|prox(y|ies)\b|python_type|SymInt|SymNode|fake tensor|FakeTensor|higher.order|"
    r"bytecode|graph.?break|\bunbacked\b|__\w+__|_dynamo|RecursionError",
    re.IGNORECASE,
)
"""Words of PyTorch's tracers, which say nothing to those who write models."""


WITHOUT_WORDS = "PyTorch cannot capture it"
"""The reason where PyTorch gives none that a user would know."""


def is_inside_talk(said: str) -> bool:
    """Return True if PyTorch's message is about its own tracers.

    >>> is_inside_talk("Mutating a variable from outside the scope of this HOP is not supported")
    True
    >>> is_inside_talk("KeyError: _dynamo_marked_constant"), is_inside_talk("it calls open()")
    (True, False)
    """
    return _INSIDE.search(said) is not None


def _simple(said: str) -> str:
    called = re.search(r"how to trace the builtin `([\w.]+?)\.?`", said) or re.search(
        r"calling function `<\w+ (\w+)", said
    )
    if called:
        return f"it calls {called[1]}(), which PyTorch does not capture"
    if is_inside_talk(said):
        return WITHOUT_WORDS
    said = said.replace("Dynamo", "the capture").replace("torch.compile", "the capture")
    return said.strip().rstrip(".")[:300]


def _raised(text: str) -> str:
    held = re.search(r"exceptions must derive from BaseException, not (\w+)", text)
    if held:  # an exception created elsewhere, which Dynamo does not recognise
        return f"{held[1]}, under the current conditions,"
    found = re.search(r"raised exception (.*)", text) or re.search(r"exception (\w+\(.*\))", text)
    return found[1].strip() if found else "an exception"


def _user_line(text: str) -> str:
    """Return the innermost line of the user's own code; of a library's, if there is none."""
    places = re.findall(r'File "([^"]+)", line (\d+), in ', text.partition("from user code:")[2] or text)
    own = [place for place in places if not place[0].startswith(OURS)]
    chosen = own or [place for place in places if not place[0].startswith(OURS[1])]
    return f"{chosen[-1][0]}:{chosen[-1][1]}" if chosen else ""


def user_line_of(node: fx.Node) -> str:
    """Return the line of the user's code that makes a call of Dynamo's graph, followed by a colon."""
    line = _user_line(str(node.meta.get("stack_trace") or ""))
    return f"{line}: " if line else ""
