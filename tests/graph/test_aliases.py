"""Values that share memory: whatever is viewed, split, written to and done in place, a graph gives eager's bits."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from anabranch.graph import capture, gradients
from anabranch.graph.passes import drop_dead_nodes, drop_handles, reuse_in_place
from covering import slow_except


def random_program(seed: int) -> Callable[[Tensor, Tensor], tuple[Tensor, ...]]:
    """Operations picked at random on values picked at random, views and writes among them."""
    chance = random.Random(seed)
    kinds = ["unary", "unary", "binary", "binary", "view", "split", "unbind", "mm", "rows", "sum", "cat", "chunk"]
    kinds += ["change", "copy", "assign"]
    steps = [(chance.choice(kinds), *(chance.random() for _ in range(3))) for _ in range(chance.randint(6, 22))]
    returned = 1 + chance.randrange(3)

    def program(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        values = [x * 1.5, w + 1, x @ w]

        def pick(share: float, *, square: bool = True, writable: bool = False) -> Tensor:
            found = [v for v in values if (v.shape == (4, 4) or not square) and (0 not in v.stride() or not writable)]
            return found[int(share * len(found))]

        for kind, a, b, c in steps:
            if kind == "unary":
                functions = [torch.sigmoid, torch.relu, torch.sin, torch.tanh, torch.neg, torch.square]
                values.append(functions[int(c * 6)](pick(a, square=False)))
            elif kind == "binary":
                values.append([torch.add, torch.mul, torch.sub, torch.maximum][int(c * 4)](pick(a), pick(b)))
            elif kind == "view":
                values.append(pick(a).t() if c < 0.4 else pick(a).reshape(2, 8).reshape(4, 4))
            elif kind == "split":
                values += [(parts := pick(a).split(2))[int(c * 2)], torch.cat([parts[1], parts[0] * 2])]
            elif kind == "chunk":
                values += [(parts := pick(a).chunk(2, 1))[0], torch.cat([parts[1], parts[0]], 1)]
            elif kind == "unbind":
                values += [(parts := pick(a).unbind(int(c * 2)))[1], torch.stack(parts[::-1])]
            elif kind == "mm":
                values.append(torch.addmm(pick(c)[0], pick(a), pick(b).t()) / 4)
            elif kind == "rows":
                values += [pick(a)[1:3], pick(b)[0].expand(4, 4)]
            elif kind == "sum":
                values.append(pick(a).sum(int(c * 2), keepdim=True).expand(4, 4))
            elif kind == "cat":
                values.append(torch.where(pick(c) > 0, torch.cat([pick(a)[:2], pick(b)[2:]]), pick(a)))
            elif kind == "change":
                pick(a, square=False, writable=True).mul_(0.5)
            elif kind == "copy":
                pick(a, writable=True).copy_(pick(b) * 0.5)
            else:
                pick(a, writable=True)[0] = pick(b)[1] * 0.5
        return *values[-returned:], sum(value.sum() for value in values[::2])  # type: ignore[return-value]

    return program


@pytest.mark.parametrize("seed", slow_except([5, 12, 42, 6, 8, 19], 42))
def test_random_programs_give_eagers_bits_after_every_pass_and_its_gradients(seed: int) -> None:
    program = random_program(seed)
    torch.manual_seed(seed)
    x, w = torch.randn(4, 4, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)
    expected = program(x, w)
    graph = capture(program, x, w)
    nodes = [str(node) for node in graph.nodes]
    for improve in (lambda g: g, drop_dead_nodes, drop_handles, reuse_in_place):
        assert all(map(torch.equal, improve(graph)(x, w), expected))
        assert [str(node) for node in graph.nodes] == nodes
    for share in (0.9, 0.6):
        try:
            smaller = graph.recompute(int(share * graph.memory_plan().peak_bytes))
        except ValueError:
            continue
        assert all(map(torch.equal, smaller(x, w), expected))  # type: ignore[arg-type]
    leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
    wanted = torch.autograd.grad(program(*leaves)[-1], leaves)
    found = gradients(graph, outputs=graph.outputs[-1:], wrt=["x", "w"])(x, w)
    for mine, plain in zip(found[1:], wanted, strict=True):  # type: ignore[index]
        torch.testing.assert_close(mine, plain, rtol=1e-12, atol=1e-14)
