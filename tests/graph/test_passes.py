"""Each pass alone: it makes its change, and the results are bitwise the same."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anabranch.graph import Graph, capture, gradients
from anabranch.graph.passes import drop_dead_nodes, drop_handles
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
