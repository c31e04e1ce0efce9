"""The inputs of a pipe: several by position and by name, values that are not cut; and its attributes."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from pipeline_models import Computes, PopSecond, StashSecond, assert_same_gradients, close, reference
from torch import Tensor, nn

from anabranch import Executor, TrainStep
from anabranch.pipeline import NoChunk, Pipe, is_recomputing


class Join(nn.Module):
    """The first layer: two inputs, one of them nested, and options."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3, dtype=torch.float64))

    def forward(
        self, x: Tensor, others: Mapping[str, object], *, power: float = 1.0, name: str | None = None
    ) -> Tensor:
        assert name in (None, "join")
        first, second = others["pair"]
        return x @ self.weight + first * second**power


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3, dtype=torch.float64)

    def forward(self, x: Tensor, mask: Tensor | None = None, weights: list[Tensor] | None = None) -> Tensor:
        x = self.linear(x)
        if mask is not None:
            x = x * mask
        return x if weights is None else x * weights[0] + weights[1]


class Plain(nn.Module):
    """The layers' own loop."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor, others: object, mask: Tensor | None = None, weights: object = None, **named) -> Tensor:
        x = self.layers[0](x, others, **named)
        for layer in self.layers[1:]:
            x = layer(x, mask, weights)
        return x


def model_and_inputs(rows: int = 5) -> tuple[nn.Sequential, Plain, list[Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(Join(), Masked(), Masked())
    return model, Plain(reference(model)), list(torch.rand(4, rows, 3, dtype=torch.float64))


def trained(*tensors: Tensor) -> list[Tensor]:
    return [tensor.clone().requires_grad_() for tensor in tensors]


@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
@pytest.mark.parametrize("rows", [5, 2])
def test_inputs_by_position_and_by_name_are_those_of_the_plain_loop(schedule: str, checkpoint: str, rows: int):
    model, plain, (x, first, second, weight) = model_and_inputs(rows)
    target = torch.randn(rows, 3, dtype=torch.float64)
    mask, shift = torch.rand(3, dtype=torch.float64), torch.rand(1, 3, dtype=torch.float64)
    with Pipe(model, [1, 1, 1], ["cpu"] * 3, checkpoint=checkpoint, schedule=schedule) as pipe:
        for chunks in (1, 3):
            pipe.chunks = chunks
            ours, theirs = trained(x, first, weight, mask, shift), trained(x, first, weight, mask, shift)
            y = pipe(
                ours[0],
                {"pair": (ours[1], second), "none": None},
                mask=NoChunk(ours[3]),
                weights=[ours[2], NoChunk(ours[4])],
                power=2.0,
                name="join",
            )
            others = {"pair": (theirs[1], second), "none": None}
            expected = plain(theirs[0], others, theirs[3], [theirs[2], theirs[4]], power=2.0, name="join")
            y.square().sum().backward()
            expected.square().sum().backward()
            assert close(y, expected)
            assert all(close(one.grad, other.grad) for one, other in zip(ours, theirs, strict=True))
            assert_same_gradients(pipe, plain.layers)
            others = {"pair": (first, NoChunk(second[:1]))}
            result = pipe.step(x, others, target, loss=F.mse_loss, mask=NoChunk(mask))
            loss = F.mse_loss(plain(x, {"pair": (first, second[:1])}, mask), target)
            loss.backward()
            assert close(result.loss, loss)
            assert_same_gradients(pipe, plain.layers)


def test_all_inputs_by_name_and_a_target_that_is_whole():
    model, plain, (x, first, second, _) = model_and_inputs()
    scale = torch.tensor([2.0, 1.0], dtype=torch.float64)

    def loss(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(output * target[1][0], target[0])

    with Pipe(model, [2, 1], chunks=2) as pipe:
        y = pipe(others={"pair": (first, second)}, x=x)
        assert close(y, plain(x, {"pair": (first, second)}))
        inputs = {"others": {"pair": (first, second)}, "x": x}
        result = pipe.step(loss=loss, target=(x, NoChunk(scale)), **inputs)
        assert close(result.loss, loss(y, (x, scale)))
        assert pipe.step(loss=lambda output, target: output.mean(), **inputs).loss is not None


def test_keywords_beside_skips():
    model = nn.Sequential(StashSecond(), nn.Linear(3, 3), PopSecond()).double()
    x, y, factor = torch.randn(3, 4, 3, dtype=torch.float64)
    ours, theirs = trained(y, factor), trained(y, factor)
    with Pipe(model, [1, 1, 1], chunks=3, checkpoint="always") as pipe:
        got = pipe(x, ours[0], factor=ours[1])
        got.sum().backward()
    expected = model[1](x + theirs[0]) * theirs[1] + theirs[0]
    expected.sum().backward()
    assert close(got, expected)
    assert all(close(one.grad, other.grad) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda pipe, x: pipe(x, x, masks=x), TypeError, "no layer's forward has a parameter named 'masks'"),
        (lambda pipe, x: pipe(x, x, others=x), TypeError, "Join, got 2 inputs by position"),
        (lambda pipe, x: pipe(x, {"pair": (x, x)}, mask=x[:2]), ValueError, "'mask' has 2 rows, but the batch has 5"),
        (lambda pipe, x: pipe(x, {"pair": (x, x[:2])}), ValueError, "different numbers of rows"),
        (lambda pipe, x: pipe(x, x[:2].sum(0)), ValueError, r"rows \(dim 0\): 0 \(5, 3\), 1 \(3,\)"),
        (lambda pipe, x: pipe.step(x, x, x[:3], loss=F.mse_loss), ValueError, "target has 3 rows, but the batch has 5"),
        (lambda pipe, x: pipe(torch.zeros(()), 3.0), ValueError, "have no rows"),
        (lambda pipe, x: pipe(NoChunk(x), 3.0), ValueError, "have no rows"),
        (lambda pipe, x: pipe(), ValueError, "have no rows"),
        (lambda pipe, x: pipe.step(loss=F.mse_loss), ValueError, "have no rows"),
        (lambda pipe, x: pipe.step(x, loss=torch.sum, reduction="sum", rows=len), ValueError, "rows= weighs the means"),
        (lambda pipe, x: pipe.step(x, loss=torch.sum, reduction="max"), ValueError, "reduction is 'mean' or 'sum'"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(call, error: type[Exception], message: str):
    model, _, (x, *_) = model_and_inputs()
    with Pipe(model, [1, 2], chunks=2) as pipe, pytest.raises(error, match=message):
        call(pipe, x)


def test_batches_of_a_train_step():
    model, plain, (x, first, second, target) = model_and_inputs()
    optimizer = torch.optim.SGD(plain.layers.parameters(), 0.1)
    mask = torch.rand(3, dtype=torch.float64)
    others = {"pair": (first, second)}
    with Pipe(model, [2, 1], chunks=3) as pipe:
        step = TrainStep(pipe, F.mse_loss, torch.optim.SGD(pipe.parameters(), 0.1))
        with Executor({"train": step}) as executor:
            for batch, with_mask in (
                ((x, others, target), None),
                ({"x": x, "others": others, "target": target, "mask": NoChunk(mask), "power": 1.0}, mask),
            ):
                got = executor.run("train", batch)["loss"]
                loss = F.mse_loss(plain(x, others, with_mask), target)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                assert close(got, loss)
            with pytest.raises(ValueError, match="several inputs come before the target"):
                executor.run("train", x)


def test_a_pipe_has_its_layers_balance_and_devices_as_attributes():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Tanh(), nn.Linear(2, 2)), nn.ReLU())
    pipe = Pipe(model, [1, 2], ["cpu", "cpu"])
    assert len(pipe) == 4
    assert list(pipe) == [model[0], *model[1], model[2]]
    assert pipe[0] is model[0]
    assert pipe[-1] is model[2]
    assert pipe.balance == [1, 3]
    assert Pipe(model, [2, 2]).balance == [2, 2], "a balance counts children, or the layers inside them"
    assert pipe.devices == [torch.device("cpu")] * 2
    with pytest.raises(IndexError):
        pipe[4]


@pytest.mark.parametrize(("checkpoint", "again"), [("always", 3), ("except_last", 2), ("never", 0)])
def test_a_layer_knows_that_it_is_recomputed(checkpoint: str, again: int):
    seen: list[bool] = []
    counts = Computes(lambda x: seen.append(is_recomputing()) or x * 2)
    with Pipe(nn.Sequential(nn.Linear(2, 2), counts), [1, 1], chunks=3, checkpoint=checkpoint) as pipe:
        pipe(torch.randn(3, 2)).sum().backward()
        pipe.step(torch.randn(3, 2), torch.randn(3, 2), loss=F.mse_loss)
    assert sorted(seen) == [False] * 6 + [True] * 2 * again
    assert not is_recomputing()


def test_process_group_none_and_left_out_are_told_apart(monkeypatch: pytest.MonkeyPatch):
    """``dist.group.WORLD`` is None before ``init_process_group``: each worker would train alone."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    Pipe(model, [1, 1], process_group=None).close()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"process_group=None in a job of 2 workers.*init_process_group"):
        Pipe(model, [1, 1], process_group=torch.distributed.group.WORLD)
    x = torch.randn(4, 2)
    with Pipe(model, [1, 1]) as pipe:
        with torch.no_grad():
            pipe(x)
        with pytest.warns(UserWarning, match="one of 2 workers without process_group=") as caught:
            pipe.step(x, loss=lambda y, _: y.sum())
        pipe.step(x, loss=lambda y, _: y.sum())
        pipe(x).sum().backward()
        with Pipe(model, [1, 1]) as other, pytest.warns(UserWarning, match="without process_group=") as caught_in_call:
            other(x)
        assert caught[0].filename == caught_in_call[0].filename == __file__
        assert pipe.process_group is None
