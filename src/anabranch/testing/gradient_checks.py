"""Comparison of two modules as functions: outputs, gradients of inputs, gradients of parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from anabranch.autodiff.moved_parameter import parameters_here
from anabranch.tensors import Structure, flatten, map_structure, paths


def assert_same_gradients(
    module_a: nn.Module, module_b: nn.Module, batch: Structure, *, tolerance: float = 0.0
) -> None:
    """Run both modules forward and backward on ``batch``; their results must be equal.

    Both start from the same random numbers. Compared are the outputs, the gradients of the floating-point tensors in
    ``batch``, and those of parameters, by name. Neither ``.grad`` nor ``batch`` is changed; buffers move as in any
    forward.

    Args:
        module_a: a model, say, or an expert that is here.
        module_b: the model's ``ab.Pipe``, or an ``ab.RemoteExpert``. Parameters that only one of the two has, as a
            remote one has none, are not compared.
        batch: a tuple is the arguments, a dict the keyword arguments, anything else the one argument.
        tolerance: how far a number may be off, as a share of its tensor's largest magnitude; 0 wants equal bits.

    Raises:
        AssertionError: names the first tensor that differs, and by how much.
        ValueError: the modules share no parameter names although both have parameters.

    >>> import copy
    >>> from anabranch.testing import assert_same_gradients
    >>> model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    >>> assert_same_gradients(model, copy.deepcopy(model), torch.randn(5, 3))
    """
    mine, theirs = map(parameters_here, (module_a, module_b))
    if mine and theirs and mine.keys().isdisjoint(theirs):
        raise ValueError(f"no parameter name is in both modules: {', '.join(mine)}; {', '.join(theirs)}")
    state = torch.get_rng_state()
    found = []
    for module in (module_a, module_b):
        torch.set_rng_state(state)
        found.append(_run(module, batch))
    for key in found[0]:
        if key in found[1]:
            _compare(key, found[0][key], found[1][key], tolerance)
        elif not key.startswith("the gradient of parameter"):
            raise AssertionError(f"{key}: {type(module_a).__name__} has it, {type(module_b).__name__} does not")


def _run(module: nn.Module, batch: Structure) -> dict[str, Tensor | None]:
    inputs: list[Tensor] = []

    def fresh(value: object) -> object:
        if isinstance(value, Tensor) and value.is_floating_point():
            value = value.detach().clone().requires_grad_()
            inputs.append(value)
        return value

    given = map_structure(fresh, batch)
    with _clear_gradients(module):
        if isinstance(given, tuple):
            output = module(*given)
        else:
            output = module(**given) if isinstance(given, Mapping) else module(given)
        leaves = [(path, leaf) for path, leaf in zip(paths(output), flatten(output)[0], strict=True)]
        tensors = [(path, leaf) for path, leaf in leaves if isinstance(leaf, Tensor)]
        roots = [leaf for _, leaf in tensors if leaf.requires_grad]
        # Gradients unlike each other, or a sum that is right by chance would do.
        chance = torch.Generator().manual_seed(0)
        torch.autograd.backward(
            roots,
            [torch.randn(root.shape, generator=chance, dtype=torch.float64, device="cpu").to(root) for root in roots],
        )
        seen: dict[str, Tensor | None] = {f"output {path}".strip(): leaf.detach() for path, leaf in tensors}
        seen |= {f"the gradient of input {index}": value.grad for index, value in enumerate(inputs)}
        for name, parameter in module.named_parameters():
            seen[f"the gradient of parameter {name}"] = parameter.grad
    return seen


@contextmanager
def _clear_gradients(module: nn.Module) -> Iterator[None]:
    before = [(parameter, parameter.grad) for parameter in module.parameters()]
    for parameter, _ in before:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient


def _compare(what: str, mine: Tensor | None, theirs: Tensor | None, tolerance: float) -> None:
    if mine is None or theirs is None:
        if mine is not theirs:
            raise AssertionError(f"{what}: one of the modules has none")
        return
    mine, theirs = (value.to_dense() if value.layout is not torch.strided else value for value in (mine, theirs))
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        raise AssertionError(f"{what}: {tuple(mine.shape)} {mine.dtype} and {tuple(theirs.shape)} {theirs.dtype}")
    theirs = theirs.to(mine.device)
    if torch.equal(mine, theirs):
        return
    apart = (mine.double() - theirs.double()).abs().max().item()
    largest = theirs.double().abs().max().item()
    if not apart <= tolerance * largest:
        raise AssertionError(f"{what}: they differ by {apart:.3g}, relative to {largest:.3g}; tolerance={tolerance:g}")
