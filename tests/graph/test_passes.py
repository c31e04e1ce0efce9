"""Each pass alone: it makes its change, and the results are bitwise the same."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anabranch.graph import Graph, StepProgram, capture, gradients
from anabranch.graph.passes.dead_nodes import drop_dead_nodes, drop_handles
from anabranch.graph.passes.in_place import reuse_in_place
from covering import pairwise


def operations(graph: Graph) -> list[str]:
    return [node.operation.split(".")[-2] if "." in node.operation else node.operation for node in graph.nodes]


def test_dead_operations_go_and_writes_that_matter_stay() -> None:
    state = torch.zeros(3)

    def fn(x: Tensor) -> Tensor:
        torch.cos(x)
        scratch = torch.zeros(3)
        scratch.add_(x)
        kept = torch.zeros(3)
        view = kept.view(3)
        view.add_(x)
        state.add_(1)
        return kept

    graph = drop_dead_nodes(capture(fn, torch.ones(3)))
    assert "cos" not in operations(graph)
    assert operations(graph).count("add_") == 2
    assert torch.equal(graph(torch.ones(3)), torch.ones(3))
    assert torch.equal(state, torch.ones(3))


def test_statistics_that_an_unused_normalisation_updates_are_updated() -> None:
    norm = nn.BatchNorm1d(3)

    def fn(x: Tensor) -> Tensor:
        norm(x)
        return x + 1

    graph = drop_dead_nodes(capture(fn, torch.ones(4, 3)))
    graph(torch.randn(4, 3) + 5)
    assert norm.running_mean is not None
    assert (norm.running_mean > 0.2).all()
    norm.eval()
    assert operations(drop_dead_nodes(capture(fn, torch.ones(4, 3)))) == ["add"]


def test_a_random_draw_with_an_unused_result_still_draws() -> None:
    def fn(x: Tensor) -> Tensor:
        torch.rand(3)
        return x + torch.rand(3)

    graph = drop_dead_nodes(capture(fn, torch.ones(3)))
    torch.manual_seed(0)
    expected = fn(torch.ones(3))
    torch.manual_seed(0)
    assert torch.equal(graph(torch.ones(3)), expected)


def test_handles_of_the_same_values_are_dropped() -> None:
    def fn(x: Tensor) -> Tensor:
        return x.t().t().view(6).view(3, 2).view(2, 3).exp().sin()

    graph = drop_handles(capture(fn, torch.ones(2, 3)))
    assert operations(drop_dead_nodes(graph)) == ["exp", "sin"]
    x = torch.randn(2, 3)
    assert torch.equal(graph(x), x.exp().sin())


@functools.cache
def step_graph() -> Graph:
    """Shared by the tests, which put its state back: a capture each would take most of their time."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=True)
    program = StepProgram(model, lambda m, x: m(x).square().mean(), [optimizer])
    program.run(torch.ones(5, 4))
    return program.graph


def assert_same_step(one: Graph, other: Graph) -> None:
    """Both graphs leave the same bits in the state that they share."""
    state = [binding.bound for binding in one.bindings if binding.bound is not None]
    before = [tensor.detach().clone() for tensor in state]
    found = []
    for graph in (one, other):
        with torch.no_grad():
            for tensor, value in zip(state, before, strict=True):
                tensor.copy_(value)
        results = graph.program().run(torch.randn(5, 4, generator=torch.Generator().manual_seed(0)))
        found.append([*results, *(tensor.detach().clone() for tensor in state)])
    assert all(map(torch.equal, *found))  # type: ignore[arg-type]


@pytest.mark.parametrize("improve", [drop_dead_nodes, drop_handles, reuse_in_place])
def test_a_pass_changes_no_bit_of_a_step_and_not_its_argument(improve: Callable[[Graph], Graph]) -> None:
    graph = step_graph()
    before = [str(node) for node in graph.nodes]
    assert_same_step(graph, improve(graph))
    assert [str(node) for node in graph.nodes] == before


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    ("kind", "width", "hot"), pairwise(["rows", "bags", "bags of two dimensions", "padded"], [1, 5], [40, 3])
)
def test_gradients_of_tables_are_the_same_bits_by_the_quicker_kernel(kind: str, width: int, hot: int) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, hot, (60, 4), generator=generator)
    starts = torch.tensor([0, 0, 7, 100, 100, 230])
    weight = torch.randn(6 if kind == "bags" else 60, width, generator=generator)

    def total(table: Tensor, ids: Tensor, starts: Tensor) -> Tensor:
        if kind == "bags":
            return (F.embedding_bag(ids.reshape(-1), table, starts, mode="sum") * weight).sum()
        if kind == "bags of two dimensions":
            return (F.embedding_bag(ids, table, mode="sum") * weight).sum()
        padding = 1 if kind == "padded" else None
        return (F.embedding(ids, table, padding) * weight[:, None] * torch.arange(1, 5)[:, None]).sum()

    table = torch.randn(40, width, generator=generator, requires_grad=True)
    (expected,) = torch.autograd.grad(total(table, ids, starts), [table])
    graph = gradients(capture(total, table, ids, starts), wrt=["table"])
    assert ("index_add_" in graph.code) == (kind != "padded")
    found = graph(table, ids, starts)[1]  # type: ignore[index]
    assert torch.equal(found, expected)
    assert torch.equal(graph(table, ids, starts)[1], expected), "zeros anew in each run"  # type: ignore[index]
