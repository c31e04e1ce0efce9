"""The roots of a backward sweep, checked, and the sweep itself."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor


def check_differentiable(tensor: object) -> None:
    """Raise ``TypeError`` unless ``tensor`` is a tensor of a dtype that can have a gradient."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"gradients are of tensors, got {type(tensor).__name__}")
    if not (tensor.requires_grad or tensor.is_floating_point() or tensor.is_complex()):
        raise TypeError(
            f"a tensor of {tensor.dtype} and shape {tuple(tensor.shape)} has no gradient; only floating-point and "
            "complex tensors do"
        )


def roots_on_tape(
    y: Tensor | Sequence[Tensor] | None, dy: Tensor | Sequence[Tensor | None] | None
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return the roots that require a gradient and the gradients they start with, ones where none is given.

    Raises:
        ValueError: another number or shape of ``dy``, or ``dy`` without ``y``.
        TypeError: a root that is not a tensor.
    """
    if isinstance(y, Tensor) and dy is None and not y.ndim and y.requires_grad:
        return [y], [None]  # a loss: nothing to check
    ys: list[Tensor] = [] if y is None else [y] if isinstance(y, Tensor) else list(y)
    dys: list[Tensor | None]
    if dy is None:
        dys = [None] * len(ys)
    else:
        dys = [dy] if isinstance(dy, Tensor) else list(dy)
    if len(ys) != len(dys):
        raise ValueError(f"backward needs a gradient for each root: {len(ys)} roots, {len(dys)} gradients")
    roots: list[Tensor] = []
    gradients: list[Tensor | None] = []
    for index, (root, gradient) in enumerate(zip(ys, dys, strict=True)):
        if not isinstance(root, Tensor):
            raise TypeError(f"root {index} is a {type(root).__name__}; roots are tensors")
        if gradient is None:
            if not root.requires_grad:
                continue
            if root.ndim:
                gradient = torch.ones_like(root, memory_format=torch.preserve_format)
        elif gradient.shape != root.shape:
            raise ValueError(
                f"root {index} has shape {tuple(root.shape)} and its gradient {tuple(gradient.shape)}; they must agree"
            )
        if root.requires_grad:
            roots.append(root)
            gradients.append(gradient)
    return roots, gradients


def run_sweep(roots: list[Tensor], gradients: list[Tensor | None], retain: bool, create: bool) -> None:
    """``torch.autograd.backward``, recorded itself where an outer session watches."""
    if not create:
        torch.autograd.backward(roots, gradients, retain_graph=retain)
        return
    with warnings.catch_warnings():
        # torch warns that .grad then keeps the graph alive: here the outer session requested just that.
        warnings.filterwarnings("ignore", message="Using backward\\(\\) with create_graph=True")
        torch.autograd.backward(roots, gradients, retain_graph=True, create_graph=True)
