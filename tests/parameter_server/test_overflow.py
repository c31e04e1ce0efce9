"""Gradients that servers refuse: NaN, Inf, and numbers whose square would not be finite."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from clusters import cluster, durable_shard

from anabranch.errors import NonFinite
from anabranch.parameter_server import Merging, ParameterClient
from anabranch.tables import Constant, RowOptimizer, TableSpec

ADAGRAD = RowOptimizer.from_factory(functools.partial(torch.optim.Adagrad, lr=0.5))
IDS = torch.tensor([1, 3])


@pytest.mark.parametrize("rows", [6, None], ids=["fixed", "dynamic"])
@pytest.mark.parametrize(
    ("dtype", "most", "refused"),
    [
        (torch.float32, 0.9e18, 1.1e18),
        (torch.bfloat16, 0.9e18, 1.1e18),
        (torch.float64, 0.9e150, 1.1e150),
        (torch.float16, 59_000.0, 61_000.0),
        (torch.float32, 0.9e18, float("inf")),
        (torch.float32, 0.9e18, float("nan")),
    ],
    ids=str,
)
def test_a_push_with_a_number_too_large_changes_nothing_and_is_counted(
    dtype: torch.dtype, most: float, refused: float, rows: int | None
) -> None:
    with ParameterClient() as client:
        for name in ("first", "second"):
            capacity = None if rows else 2
            client.init_table(TableSpec(name, rows, 4, dtype, Constant(0.5), capacity=capacity), ADAGRAD)
        client.init("bias", (3,), init=0.25, dtype=dtype, optimizer=functools.partial(torch.optim.Adagrad, lr=0.5))

        def push(number: float, bias: float = 1.0, ids: torch.Tensor = IDS) -> None:
            grads = torch.full((2, 4), number, dtype=dtype)
            rows = {"first": (IDS, torch.ones(2, 4, dtype=dtype)), "second": (ids, grads)}
            client.push_many({**rows, "bias": (IDS[:0], torch.full((3,), bias, dtype=dtype))})

        def state() -> list[torch.Tensor]:
            return [client.sparse_pull("first", IDS), client.sparse_pull("second", IDS), client.pull("bias")]

        push(1.0)
        before = state()
        for where in ({"number": refused, "ids": torch.tensor([4, 5])}, {"number": 1.0, "bias": -refused}):
            with pytest.raises(NonFinite, match="gradients of (second|bias) hold"):
                push(**where)
        assert all(torch.equal(a, b) for a, b in zip(before, state(), strict=True))
        (counts,) = client.statistics()
        assert sum(counts.refused_values.values()) == 2
        assert counts.tables["second"].evictions == 0
        push(most)
        assert torch.isfinite(client.sparse_pull("second", IDS)).all()


def test_under_bsp_a_worker_with_a_number_too_large_is_refused_and_may_push_another() -> None:
    with cluster() as servers:
        first, second = servers.workers(2)
        sgd = RowOptimizer.from_factory(functools.partial(torch.optim.SGD, lr=1.0))
        first.init_table(TableSpec("t", 4, 2, initial=Constant(0.0)), sgd)
        one = torch.tensor([1])
        first.push_many({"t": (one, torch.full((1, 2), 1e18))}, step=0, merging=Merging(mean=False))
        with pytest.raises(NonFinite, match="take torch.float32 up to 1e.18"):
            second.push_many({"t": (one, torch.full((1, 2), 3e18))}, step=0, merging=Merging(mean=False))
        second.push_many({"t": (one, torch.full((1, 2), -1e18))}, step=0, merging=Merging(mean=False))
        assert second.sparse_pull("t", one).tolist() == [[0.0, 0.0]]


def test_weights_that_overflow_as_in_the_plain_loop_are_kept_and_loaded(tmp_path: Path) -> None:
    ids, steep = torch.tensor([1]), functools.partial(torch.optim.SGD, lr=1e25)

    def values(client: ParameterClient) -> list[float]:
        return [client.sparse_pull("t", ids)[0, 0].item(), client.pull("bias")[0].item()]

    with durable_shard(tmp_path / "state") as (_, client):
        client.init_table(TableSpec("t", 4, 2, initial=Constant(0.0)), RowOptimizer.from_factory(steep))
        client.init("bias", (2,), optimizer=steep)
        client.push_many({"t": (ids, torch.full((1, 2), 9e17)), "bias": (ids[:0], torch.full((2,), 9e17))})
        assert values(client) == [float("-inf")] * 2
        client.save(tmp_path / "saved")
    for _ in range(2):  # its own checkpoint, and then also what a client has loaded
        with durable_shard(tmp_path / "state") as (_, client):
            assert values(client) == [float("-inf")] * 2
            client.load(tmp_path / "saved")
            assert values(client) == [float("-inf")] * 2
