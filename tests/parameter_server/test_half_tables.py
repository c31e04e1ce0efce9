"""float16 tables: weights of two bytes, moved in float32 beside float32 state, and rounded after each step."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from test_row_table import DENSE
from torch import nn

import anabranch as ab
from anabranch.parameter_server import ParameterClient, RemoteTables
from anabranch.parameter_server.messages import Share, join, split
from anabranch.tables import (
    Constant,
    DenseParameter,
    Normal,
    RowOptimizer,
    RowWiseAdagrad,
    Table,
    TableSpec,
    arena,
)
from anabranch.tensors.dtypes import working_dtype

ROWS, WIDTH = 24, 16
FUSED = ("sgd with decay", "nesterov with decay", "adagrad", "adam", "adamw amsgrad")
RULES = {name: functools.partial(DENSE[name], fused=True) for name in FUSED}
RULES |= {name: DENSE[name] for name in ("rmsprop with momentum", "adamax", "ftrl")}
RULES["row-wise adagrad"] = functools.partial(RowWiseAdagrad, lr=0.1)
INEXACT = ("rmsprop with momentum", "ftrl")  # torch's roots are not exact


class RoundedLoop:
    """The plain loop; float16 weights are widened for each step of a float32 optimizer, whose result is rounded."""

    def __init__(self, weights: torch.Tensor, make: Callable[..., torch.optim.Optimizer]) -> None:
        self.weights = weights.clone()
        self._wide = nn.Parameter(weights.to(working_dtype(weights.dtype), copy=True))
        self.optimizer = make([self._wide])

    def step(self, grad: torch.Tensor) -> None:
        assert grad.dtype == self.weights.dtype
        self._wide.grad = grad.to(self._wide.dtype)
        self.optimizer.step()
        self.weights = self._wide.detach().to(grad.dtype, copy=True)
        self._wide.data = self.weights.to(self._wide.dtype, copy=True)

    def state(self, names: tuple[str, ...]) -> list[torch.Tensor]:
        return [self.optimizer.state[self._wide][name] for name in names]


def half_table(rule: RowOptimizer, **changes: object) -> Table:
    spec = TableSpec("t", ROWS, WIDTH, torch.float16, Normal(0, 1), **{"every_row_moves": True, **changes})
    return Table(spec, rule)


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("name", RULES)
def test_rows_move_as_in_the_plain_loop_that_rounds_each_step(name: str) -> None:
    rounding = 0.01 if name in INEXACT else 0.0  # and half numbers are coarse
    table = half_table(RowOptimizer.from_factory(RULES[name]))
    everyone = torch.arange(ROWS)
    plain = RoundedLoop(table.pull(everyone), RULES[name])
    for step in range(60):
        plain.optimizer.param_groups[0]["lr"] *= 0.98
        ids = torch.randint(0, 8 if step < 50 else ROWS, (6,)).unique()
        grad = torch.randn(len(ids), WIDTH).half()
        torch.testing.assert_close(table.pull(ids, training=True), plain.weights[ids], rtol=rounding, atol=rounding)
        table.rule = RowOptimizer.from_torch(plain.optimizer)
        table.push(ids, grad)
        plain.step(torch.zeros(ROWS, WIDTH, dtype=torch.float16).index_copy(0, ids, grad))
    assert table.pull(everyone).dtype == torch.float16
    torch.testing.assert_close(table.pull(everyone), plain.weights, rtol=rounding, atol=rounding)
    found = table.pull_with_state(everyone)
    for number, wanted in enumerate(plain.state(table.rule.state_names), 1):
        mine = found[:, number * WIDTH : (number + 1) * WIDTH] if wanted.ndim == 2 else found[:, WIDTH]
        torch.testing.assert_close(mine, wanted, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", RULES)
def test_a_dense_parameter_moves_as_in_the_plain_loop_that_rounds_each_step(name: str, dtype: torch.dtype) -> None:
    weights = torch.randn(8, 32).to(dtype)
    plain = RoundedLoop(weights, RULES[name])
    kept = DenseParameter("w", weights, RowOptimizer.from_torch(plain.optimizer))
    for step in range(10):
        plain.optimizer.param_groups[0]["lr"] *= 0.9
        grad = torch.randn(8, 32).to(dtype)
        shared, before = kept.share(), [part.clone() for part in kept.share()]
        if step == 5:  # goes on from a checkpoint
            kept = DenseParameter("w", weights, kept.rule)
            kept.restore(shared, step)
        kept.rule = RowOptimizer.from_torch(plain.optimizer)
        kept.push(grad)
        plain.step(grad)
        assert all(map(torch.equal, shared, before))  # whoever has them sees no step
    rounding = {torch.float16: 0.01, torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    if name not in INEXACT and (name, dtype) != ("row-wise adagrad", torch.float64):
        rounding = 0.0  # float64 squares are summed in another order
    torch.testing.assert_close(kept.value, plain.weights, rtol=rounding, atol=rounding)
    assert all(state.dtype == working_dtype(dtype) for state in kept.states)


def test_rows_take_two_bytes_a_weight_and_four_a_number_of_state() -> None:
    table = half_table(RowOptimizer.from_factory(RULES["adam"]))
    assert table.bytes() == ROWS * (16 + WIDTH * (2 + 2 * 4))


def test_first_values_that_float16_does_not_hold_are_refused() -> None:
    with pytest.raises(ValueError, match="float16 cannot represent"):
        TableSpec("t", 4, 2, torch.float16, Constant(1e5))


def test_a_processor_that_does_not_convert_float16_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena.binding, "get_process_triple", lambda: "x86_64-unknown-linux-gnu")
    monkeypatch.setattr(arena.binding, "get_host_cpu_features", dict)
    with pytest.raises(ValueError, match="table t: this processor has no F16C instructions.*use bfloat16"):
        half_table(RowOptimizer.from_factory(RULES["adagrad"]))


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("cache", [None, ab.Cache("LFU", capacity=6)], ids=["uncached", "cached"])
@pytest.mark.parametrize("name", ["nesterov with decay", "adam", "ftrl"])
def test_a_half_model_trains_on_servers_as_in_the_plain_loop(name: str, cache: ab.Cache | None) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.EmbeddingBag(ROWS, WIDTH, mode="sum"), nn.Linear(WIDTH, 1)).half()
    twin = copy.deepcopy(model)
    plain = RoundedLoop(twin[0].weight.detach(), RULES[name])
    optimizer = RULES[name](model[0].parameters())
    step = ab.TrainStep(model[0], lambda bags, ids: bags(ids).float().square().sum(), optimizer)
    with ab.Executor(step, "Hybrid", cache=cache) as executor:
        for _ in range(6):
            ids = torch.randint(0, ROWS, (4, 1))
            executor.run(batch=ids)
            twin[0].weight.data = plain.weights
            twin[0].weight.grad = None
            twin[0](ids).float().square().sum().backward()
            plain.step(twin[0].weight.grad)
    assert model[0].weight.dtype == torch.float16
    assert torch.equal(model[0].weight.detach(), plain.weights)
    state = optimizer.state[model[0].weight]
    assert all(state[label].dtype == torch.float16 for label in state if label != "step")


def test_state_survives_a_checkpoint_unchanged(tmp_path: Path) -> None:
    rule = RowOptimizer.from_factory(RULES["adam"])
    kept = []
    with ParameterClient() as client:
        client.init_table(TableSpec("t", ROWS, WIDTH, torch.float16), rule)
        for turn in range(2):
            client.sparse_push("t", torch.arange(3), torch.randn(3, WIDTH).half())
            if not turn:
                client.save(tmp_path / "saved")
                kept.append(client.read_state("t", rule))
        client.load(tmp_path / "saved")
        kept.append(client.read_state("t", rule))
    for one, other in zip([kept[0].values, *kept[0].states], [kept[1].values, *kept[1].states], strict=True):
        assert torch.equal(one, other)
    assert kept[1].values.dtype == torch.float16
    assert kept[1].states[0].dtype == torch.float32


def test_a_cache_that_would_move_half_rows_is_refused() -> None:
    model = nn.Embedding(ROWS, WIDTH, dtype=torch.float16)
    with ParameterClient() as client:
        tables = RemoteTables(client, cache=ab.Cache(push_bound=2))
        with pytest.raises(ValueError, match=r"weight is float16.*push_bound=0"):
            tables.adopt(model, ["weight"], torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("compression", [None, "bfloat16", "int8"])
def test_half_rows_travel_without_overflow(compression: str | None) -> None:
    rows = torch.tensor([[65504.0, -65504.0, 1.0, 0.001]]).half()
    share = [Share(torch.float16, (1, 4), "rows")]
    (came,) = split(join([rows], share, compression), share, compression)
    assert torch.isfinite(came).all()
    assert compression == "int8" or torch.equal(came, rows)
