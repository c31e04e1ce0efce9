"""``fit``: checks that saved tensors fit those they are loaded into, with all differences in one message."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from anabranch.errors import CheckpointError
from anabranch.tensors.dtypes import dtype_name


def fit(expected: Mapping[str, object], saved: Mapping[str, object], what: str = "model") -> None:
    """Raise ``CheckpointError`` unless both have the same names, and under each the same shape and dtype.

    >>> import torch
    >>> fit({"weight": torch.ones(2)}, {"weight": torch.ones(3), "bias": torch.ones(2)})
    Traceback (most recent call last):
    anabranch.errors.CheckpointError: the checkpoint belongs to another model:
      unexpected: bias (2,) float32
      differs: weight is (3,) float32 in the checkpoint, (2,) float32 here

    Args:
        expected: the tensors to load into, or other state.
        saved: the checkpoint's.
        what: what both are, for the message.
    """
    here = {name: _show(value) for name, value in expected.items()}
    there = {name: _show(value) for name, value in saved.items()}
    problems = [f"missing: {name} {here[name]}" for name in here if name not in there]
    problems += [f"unexpected: {name} {there[name]}" for name in there if name not in here]
    problems += [
        f"differs: {name} is {there[name]} in the checkpoint, {shown} here"
        for name, shown in here.items()
        if there.get(name, shown) != shown
    ]
    if problems:
        raise CheckpointError(f"the checkpoint belongs to another {what}:\n  " + "\n  ".join(problems))


def _show(value: object) -> str:
    return f"{tuple(value.shape)} {dtype_name(value.dtype)}" if isinstance(value, Tensor) else "(other state)"
