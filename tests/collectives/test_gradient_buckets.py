"""Buckets launch in one order, while backward runs, and leave the gradients of the plain loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anabranch.autodiff import GradManager
from anabranch.collectives import GradientBuckets
from anabranch.collectives.buckets import in_buckets


class Done:
    """A collective that happens when it is waited for."""

    def __init__(self, happen: Any) -> None:
        self._happen = happen

    def finish(self) -> None:
        self._happen()


class Twins:
    """Two workers that hold the same gradients: a sum is twice this one's, and a gather has it twice."""

    size = 2
    rank = 0
    hosts = ()  # what they do is in the log

    def __init__(self) -> None:
        self.log: list[str] = []

    def start_all_reduce(self, tensor: Tensor, *, operation: str, step: int | None = None) -> Done:
        self.log.append(f"all_reduce {tensor.numel()}")
        return Done(lambda: tensor.mul_(2))

    def start_all_gather(self, tensor: Tensor, into: Tensor, *, operation: str, step: int | None = None) -> Done:
        self.log.append("all_gather")
        return Done(lambda: into.copy_(tensor.expand_as(into)))

    def all_gather(self, tensor: Tensor, *, operation: str, step: int | None = None) -> Tensor:
        self.log.append("all_gather rows")
        return torch.stack([tensor, tensor])


def layers(count: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(count)))


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters())


def one_run(buckets: GradientBuckets, model: nn.Module, loss: Tensor, weight: float = 1.0, last: bool = True) -> None:
    manager = GradManager().attach(list(model.parameters()), buckets.ready)
    manager.record()
    buckets.start_run(weight, last=last)
    manager.backward(loss)
    buckets.launch_rest()


def in_order(model: nn.Module, order: Sequence[str], buckets: GradientBuckets) -> None:
    """Hands the buckets gradients of ones in the given order."""
    parameters = parameters_of(model)
    buckets.start_window()
    buckets.start_run(1.0, last=True)
    for name in order:
        buckets.ready(parameters[name], torch.ones_like(parameters[name]))


def test_a_bucket_is_launched_as_soon_as_it_and_its_predecessors_are_complete() -> None:
    model, workers = layers(3), Twins()
    buckets = GradientBuckets(parameters_of(model), workers, bucket_bytes=1)  # a bucket each, from the last layer on
    in_order(model, ["2.weight"], buckets)
    assert len(workers.log) == 1
    in_order(model, ["0.weight"], buckets)
    assert len(workers.log) == 1  # out of turn: it waits for its predecessors
    in_order(model, ["0.weight", "2.weight"], buckets)
    assert len(workers.log) == 2
    buckets.ready(model[1].weight, torch.ones(4, 4))
    assert len(workers.log) == 4


def test_buckets_are_closed_before_they_are_too_large() -> None:
    sizes = {"a": 4, "large": 40, "bias": 1, "b": 5, "c": 3, "d": 2, "e": 4}
    parameters = {name: torch.ones(size, dtype=torch.int8) for name, size in sizes.items()}
    names = [[name for name, _ in members] for members in in_buckets(parameters, close_at=10)]
    assert names == [["e", "d", "c"], ["b", "bias"], ["large"], ["a"]]
    small_first = in_buckets({name: parameters[name] for name in ("large", "bias")}, close_at=10)
    assert [name for name, _ in small_first[0]] == ["bias", "large"]


def test_launches_overlap_the_rest_of_backward() -> None:
    model, workers = layers(3), Twins()
    buckets = GradientBuckets(parameters_of(model), workers, bucket_bytes=1)
    buckets.start_window()
    x = torch.ones(2, 4)
    for layer in model:
        x = layer(x)
        # Backward passes here after the layer's own gradient is on its way, or before: the log tells.
        x.register_hook(lambda grad: workers.log.append("backward") or grad)
    one_run(buckets, model, x.sum())
    assert workers.log == ["backward", "all_reduce 17"] * 3


def test_sparse_gradients_travel_as_rows_with_duplicates_merged_and_stay_sparse() -> None:
    model, workers = nn.Embedding(1000, 4, sparse=True), Twins()
    buckets = GradientBuckets(parameters_of(model), workers, sparse=["weight"])
    buckets.start_window()
    one_run(buckets, model, model(torch.tensor([5, 5, 999])).sum())
    buckets.finish(2.0)
    gradient = model.weight.grad
    assert gradient.is_sparse
    assert gradient.is_coalesced()
    assert gradient.indices().tolist() == [[5, 999]]
    assert gradient.values().tolist() == [[2.0] * 4, [1.0] * 4]
    assert workers.log == ["all_gather", "all_gather rows"]


@pytest.mark.parametrize("known", [True, False])
def test_a_table_that_is_also_a_heads_weight_has_one_dense_gradient_as_in_the_plain_loop(known: bool) -> None:
    model, workers = nn.Embedding(6, 4, sparse=True), Twins()
    buckets = GradientBuckets(parameters_of(model), workers, sparse=["weight"] if known else [])
    ids = torch.tensor([1, 1, 5])
    dense = nn.Embedding(6, 4)
    dense.load_state_dict(model.state_dict())
    F.linear(dense(ids), dense.weight).sum().backward()
    for window in range(2):
        buckets.start_window()
        model.zero_grad()
        one_run(buckets, model, (F.linear(model(ids), model.weight)).sum())
        buckets.finish(2.0)
        assert torch.allclose(model.weight.grad, dense.weight.grad)
        if window:  # found out once, remembered
            assert workers.log == ["all_reduce 25"]
        workers.log.clear()


def test_gradients_lie_in_memory_as_their_parameters_do_so_that_fused_optimizers_see_them_right() -> None:
    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    expected = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    expected.load_state_dict(model.state_dict())
    x = torch.randn(2, 3, 5, 5)
    buckets = GradientBuckets(parameters_of(model), Twins())
    buckets.start_window()
    one_run(buckets, model, model(x).square().sum())
    buckets.finish(2.0)
    expected(x).square().sum().backward()
    for each in (model, expected):
        torch.optim.AdamW(each.parameters(), lr=0.1, fused=True).step()
    assert model.weight.grad.stride() == model.weight.stride()
    assert torch.equal(model.weight, expected.weight)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_rows_of_any_width_and_dtype_travel(dtype: torch.dtype, rows: int) -> None:
    model = nn.Embedding(10, 3, sparse=True, dtype=dtype)
    buckets = GradientBuckets(parameters_of(model), Twins(), sparse=["weight"])
    buckets.start_window()
    one_run(buckets, model, model(torch.arange(rows)).abs().sum())
    expected = torch.autograd.grad(model(torch.arange(rows)).abs().sum(), model.weight)[0]
    buckets.finish(2.0)
    assert torch.equal(model.weight.grad.to_dense(), expected.to_dense())


@pytest.mark.parametrize("workers", [Twins(), None])
@pytest.mark.parametrize("sparse", [False, True])
def test_half_precision_gradients_of_many_rows_do_not_overflow(workers: Twins | None, sparse: bool) -> None:
    model = nn.Embedding(4, 2, sparse=sparse, dtype=torch.float16)
    buckets = GradientBuckets(parameters_of(model), workers, sparse=["weight"] if sparse else [])
    buckets.start_window()
    for run in range(2):
        model.zero_grad()
        one_run(buckets, model, model(torch.tensor([1])).sum() * 30, weight=4096.0, last=run == 1)
    buckets.finish(2 * 4096.0 * (2 if workers else 1))
    assert model.weight.grad.dtype is torch.float16
    assert model.weight.grad.to_dense()[1].tolist() == [30.0, 30.0]
