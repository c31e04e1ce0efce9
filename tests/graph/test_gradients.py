"""Reverse mode on graphs: the same gradients as autograd, arriving gradients, sparse rows, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anabranch.errors import CaptureError, NotFound, SchemaError
from anabranch.graph import capture, gradients


def model_and_graph() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2), nn.LogSoftmax(-1))
    return model, torch.randn(5, 3)


def test_gradients_of_inputs_and_parameters_are_autograds_bit_for_bit() -> None:
    model, x = model_and_graph()
    graph = gradients(capture(lambda x: model(x), x), wrt=["x", "0.weight", "3.bias"])
    assert graph.outputs == ["output", "x.grad", "0.weight.grad", "3.bias.grad"]
    y, *found = graph(x)  # type: ignore[misc]
    leaf = x.clone().requires_grad_()
    expected = model(leaf)
    wanted = torch.autograd.grad(expected.sum(), [leaf, model[0].weight, model[3].bias])  # type: ignore[index]
    assert torch.equal(y, expected)
    assert all(map(torch.equal, found, wanted))


def test_a_gradient_may_arrive_from_elsewhere() -> None:
    model, x = model_and_graph()
    graph = gradients(capture(lambda x: model(x), x), wrt=["x"], insert_grad=True)
    assert graph.inputs[-1] == "grad_output"
    arriving = torch.randn(5, 2)
    _, found = graph(x, arriving)  # type: ignore[misc]
    leaf = x.clone().requires_grad_()
    assert torch.equal(found, torch.autograd.grad(model(leaf), leaf, arriving)[0])
    graph = gradients(capture(lambda x: x * 3, torch.ones(2)), wrt=["x"], insert_grad=[torch.tensor([1.0, 2.0])])
    assert torch.equal(graph(torch.ones(2))[1], torch.tensor([3.0, 6.0]))  # type: ignore[index]


def test_outputs_may_be_chosen_and_intermediates_differentiated() -> None:
    graph = capture(lambda x: (torch.sin(x), torch.cos(x)), torch.ones(2))
    inner = next(node.name for node in graph.nodes if "sin" in node.operation)
    x = torch.randn(2)
    both = gradients(graph, ["output.0"], [inner, "x"])(x)
    assert torch.equal(both[1], torch.ones(2))  # type: ignore[index]
    assert torch.equal(both[2], torch.cos(x))  # type: ignore[index]


def test_a_graph_of_gradients_may_be_differentiated_again() -> None:
    first = gradients(capture(lambda x: torch.sigmoid(x) ** 2, torch.ones(3)), wrt=["x"])
    second = gradients(first, ["x.grad"], ["x"])
    x = torch.randn(3)
    leaf = x.clone().requires_grad_()
    once = torch.autograd.grad((torch.sigmoid(leaf) ** 2).sum(), leaf, create_graph=True)[0]
    twice = torch.autograd.grad(once.sum(), leaf)[0]
    torch.testing.assert_close(second(x)[1], twice)  # type: ignore[index]


def test_dropout_and_its_gradient_share_the_mask() -> None:
    model = nn.Dropout(0.5)
    graph = gradients(capture(lambda x: model(x), torch.ones(50)), wrt=["x"])
    y, found = graph(torch.ones(50))  # type: ignore[misc]
    assert torch.equal(y, found)


LOOKUPS: dict[str, Callable[[], nn.Module]] = {
    "rows": lambda: nn.Embedding(6, 3, sparse=True),
    "padded rows": lambda: nn.Embedding(6, 3, sparse=True, padding_idx=1),
    "sums": lambda: nn.EmbeddingBag(6, 3, sparse=True, mode="sum"),
    "padded means": lambda: nn.EmbeddingBag(6, 3, sparse=True, mode="mean", padding_idx=1),
}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("kind", LOOKUPS)
def test_a_graph_cut_at_its_lookups_gives_the_same_bits_and_eagers_gradient(kind: str) -> None:
    torch.manual_seed(0)
    table = LOOKUPS[kind]().double()
    ids = torch.tensor([[1, 4, 1], [0, 1, 5]])

    def fn(ids: Tensor) -> Tensor:
        return (table(ids) * table(ids.flip(0))).square().sum()

    graph = capture(fn, ids)
    value, (looked_up, rows) = gradients(graph, wrt=["weight"])(ids)  # type: ignore[misc]
    fn(ids).backward()
    assert torch.equal(value, fn(ids))
    dense = torch.zeros(6, 3, dtype=torch.float64).index_add_(0, looked_up, rows)
    torch.testing.assert_close(dense, table.weight.grad.to_dense(), rtol=1e-12, atol=1e-12)  # type: ignore[union-attr, operator]


def test_lookups_without_gradients_give_none_and_a_table_used_densely_too_is_refused() -> None:
    table = nn.Embedding(6, 3, sparse=True)
    ids = torch.tensor([1, 4])

    def unrecorded(ids: Tensor, w: Tensor) -> Tensor:
        with torch.no_grad():
            rows = table(ids)
        return (rows * w).sum()

    with pytest.raises(ValueError, match="'weight' is not reached"):
        gradients(capture(unrecorded, ids, torch.ones(3)), wrt=["weight"])
    tied = capture(lambda ids: table(ids).sum() + table.weight.square().sum(), ids)
    with pytest.raises(CaptureError, match="'weight' has both sparse lookups and dense uses"):
        gradients(tied, wrt=["weight"])


def test_what_has_no_gradient_and_wrong_gradients_are_refused_by_name() -> None:
    graph = capture(lambda x, y, ids: x[ids], torch.ones(2), torch.ones(2), torch.tensor([0]))
    refused: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"wrt": ["y"]}, ValueError, "'y' is not reached"),
        ({"wrt": ["z"]}, NotFound, "no 'z'"),
        ({"wrt": ["ids"]}, TypeError, "'ids' does not have a floating dtype"),
        ({"wrt": ["x"], "insert_grad": [torch.ones(1)] * 2}, SchemaError, "2 tensors for 1 outputs"),
        ({"wrt": ["x"], "insert_grad": [torch.ones(3)]}, SchemaError, r"shape \(3,\), the output \(1,\)"),
        ({}, ValueError, "wrt is empty"),
    ]
    for options, kind, message in refused:
        with pytest.raises(kind, match=message):
            gradients(graph, **options)


def test_shapes_are_inferred_for_another_batch() -> None:
    model, x = model_and_graph()
    graph = capture(lambda x: model(x), x)
    assert graph.infer_shapes()["output"] == (5, 2)
    assert graph.infer_shapes((7, 3))["output"] == (7, 2)
    both = gradients(graph, wrt=["x"])
    assert both.infer_shapes((9, 3))["x.grad"] == (9, 3)


def test_shapes_that_do_not_fit_are_refused() -> None:
    graph = capture(lambda x, y: x @ y, torch.ones(2, 3), torch.ones(3, 4))
    with pytest.raises(ValueError, match=r"does not work on \[\(2, 3\), \(5, 4\)\]"):
        graph.infer_shapes((2, 3), (5, 4))
    with pytest.raises(ValueError, match="a shape for each of x, y"):
        graph.infer_shapes((2, 3))
