"""``fit``: checks that saved tensors fit those they are loaded into, with all differences in one message."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from anabranch.errors import CheckpointError
from anabranch.tensors.dtypes import dtype_name


def fit(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], what: str = "model") -> None:
    """Raise ``CheckpointError`` unless both have the same names, and under each the same shape and dtype.

    >>> import torch
    >>> fit({"weight": torch.ones(2)}, {"weight": torch.ones(3), "bias": torch.ones(2)})
    Traceback (most recent call last):
    anabranch.errors.CheckpointError: the checkpoint belongs to another model:
      unexpected: bias (2,) float32
      differs: weight is (3,) float32 in the checkpoint, (2,) float32 here

    Args:
        expected: the tensors to load into.
        found: the checkpoint's tensors.
        what: what both are, for the message.
    """
    problems = [f"missing: {name} {_show(expected[name])}" for name in expected if name not in found]
    problems += [f"unexpected: {name} {_show(found[name])}" for name in found if name not in expected]
    problems += [
        f"differs: {name} is {_show(found[name])} in the checkpoint, {_show(tensor)} here"
        for name, tensor in expected.items()
        if name in found and (found[name].shape != tensor.shape or found[name].dtype != tensor.dtype)
    ]
    if problems:
        raise CheckpointError(f"the checkpoint belongs to another {what}:\n  " + "\n  ".join(problems))


def _show(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {dtype_name(tensor.dtype)}"
