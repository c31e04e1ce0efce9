"""A microbatch whose forward runs twice: both start from the same state, and what they return is compared."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pipeline_models import assert_trains_alike, close
from torch import Tensor, nn

from anabranch import Pipe
from anabranch.pipeline import is_recomputing
from covering import pairwise

ONE = torch.ones(1, dtype=torch.float64)
Change = Callable[[nn.Module], object]


def buffer(layer: nn.Module) -> None:
    layer.register_buffer("n", ONE.clone())


def frozen(layer: nn.Module) -> None:
    layer.n = nn.Parameter(ONE.clone(), requires_grad=False)


def assigned(make: Callable[[], object]) -> Change:
    return lambda layer: setattr(layer, "n", make())


def view(layer: nn.Module) -> None:
    layer.register_buffer("both", torch.ones(2, dtype=torch.float64))
    layer.n = layer.both[1:]


def memory(layer: nn.Module) -> None:
    """Not PyTorch's own, so that no copy on write is possible."""
    layer.register_buffer("n", torch.from_numpy(np.ones(1)))


def in_place(layer: nn.Module) -> None:
    layer.n += 1


def in_data(layer: nn.Module) -> None:
    layer.n.data += 1


def rebound(layer: nn.Module) -> None:
    layer.n = getattr(layer, "n", 1.0) + 1


WAYS: dict[str, tuple[Change, Change]] = {
    "buffer": (buffer, in_place),
    "buffer .data": (buffer, in_data),
    "frozen": (frozen, in_place),
    "frozen .data": (frozen, in_data),
    "tensor": (assigned(ONE.clone), in_place),
    "tensor .data": (assigned(ONE.clone), in_data),
    "tensor rebound": (assigned(ONE.clone), rebound),
    "number": (assigned(lambda: 1.0), rebound),
    "missing": (lambda layer: None, rebound),
    "tuple": (assigned(lambda: (ONE.clone(), 1)), lambda layer: setattr(layer, "n", (layer.n[0] + 1, 1))),
    "list": (assigned(lambda: [ONE.clone()]), lambda layer: layer.n[0].add_(1)),
    "view": (view, lambda layer: layer.both.add_(1)),
    "memory": (memory, in_place),
}


class Counts(nn.Module):
    """Returns its input times a weight and the number of its forwards, kept in one of many ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.w = nn.Parameter(ONE.clone())
        make, self.count_on = WAYS[how]
        make(self)

    def forward(self, x: Tensor) -> Tensor:
        self.count_on(self)
        return x * self.w * (self.count.clone() if isinstance(self.count, Tensor) else self.count)

    @property
    def count(self) -> Tensor | float:
        return self.n[0] if isinstance(self.n, tuple | list) else self.n


class Reads(nn.Module):
    """Reads the count of another layer of its stage, as the same tensor."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self.w = nn.Parameter(ONE.clone())
        for name, kind in (("n", "_buffers"), ("n", "_parameters")):
            if name in counts.__dict__[kind]:
                self.__dict__[kind][name] = counts.__dict__[kind][name]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.w * self.n.clone()


def by_microbatch(model: nn.Module, x: Tensor, loss: Callable[[Tensor, Tensor], Tensor], chunks: int) -> list[Tensor]:
    """What the plain loop makes of the microbatches, one after the other: the losses."""
    parts = [loss(model(part), part) for part in x.chunk(chunks)]
    for part in parts:
        part.backward()
    return [part.detach() for part in parts]


def total(y: Tensor, _: Tensor) -> Tensor:
    return y.sum()


@pytest.mark.parametrize(
    ("how", "checkpoint", "schedule", "whole"),
    pairwise(WAYS, ("always", "except_last", "never"), ("GPipe", "1F1B", "ZB1P"), (True, False)),
)
def test_a_layer_that_counts_its_forwards_counts_each_microbatch_once(
    how: str, checkpoint: str, schedule: str, whole: bool
):
    model, plain = (nn.Sequential(nn.Identity(), Counts(how)) for _ in range(2))
    x = torch.arange(1.0, 7.0, dtype=torch.float64)[:, None]
    losses = by_microbatch(plain, x, total, 3)
    with Pipe(model, [1, 1], chunks=3, checkpoint=checkpoint, schedule=schedule) as pipe:
        if whole:
            loss = pipe.step(x, target=x, loss=total, reduction="sum").loss
        else:
            loss = pipe(x).sum()
            loss.backward()
    assert close(loss, sum(losses))
    assert close(model[1].w.grad, plain[1].w.grad)
    assert model[1].count == plain[1].count == 4.0


@pytest.mark.parametrize("how", ["buffer", "frozen"])
@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_a_tensor_of_two_modules_is_one_in_a_stage_and_may_only_be_read_by_two(how: str, checkpoint: str):
    model, plain = (nn.Sequential(counts, Reads(counts)) for counts in (Counts(how), Counts(how)))
    readers = nn.Sequential(Reads(model[0]), Reads(model[0]))
    x = torch.randn(6, 1, dtype=torch.float64)
    assert_trains_alike(readers, [1, 1], x, x, chunks=3, checkpoint=checkpoint)
    by_microbatch(plain, x, total, 3)
    with Pipe(model, [2], chunks=3, checkpoint=checkpoint) as pipe:
        pipe.step(x, target=x, loss=total, reduction="sum")
    assert all(close(model[i].w.grad, plain[i].w.grad) for i in range(2))
    refused = pytest.raises(RuntimeError, match=r"\.n, which several stages use, was changed in a forward")
    with Pipe(nn.Sequential(model[1], model[0]), [1, 1], chunks=3, checkpoint=checkpoint) as pipe, refused:
        pipe(x)


def test_another_backward_starts_from_the_same_state_again():
    model = nn.Sequential(Counts("frozen"))
    model[0].n.shards = 2
    model[0].register_forward_pre_hook(lambda layer, _: marks.append((type(layer.n), layer.n.shards)))
    marks: list[object] = []
    with Pipe(model, [1], chunks=3, checkpoint="always") as pipe:
        y = pipe(torch.ones(6, 1, dtype=torch.float64))
        y.sum().backward(retain_graph=True)
        y.sum().backward()
    assert model[0].w.grad.item() == 2 * 2 * (2 + 3 + 4)
    assert model[0].count == 4.0
    assert marks == [(nn.Parameter, 2)] * 9, "what others have set on a parameter is on its copies, too"


class Watches(nn.Module):
    """Frozen, but for a small addition; remembers where its weight was."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.randn(3, 3), requires_grad=False)
        self.down, self.up = nn.Linear(3, 1, bias=False), nn.Linear(1, 3, bias=False)
        self.seen: deque[tuple[int, int]] = deque()  # a list would be put back for the second forward

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append((id(self.base), torch._C._data_address(self.base)))
        return F.linear(x, self.base) + self.up(self.down(x))


def test_frozen_weights_that_no_forward_changes_are_not_copied():
    layer = Watches()
    weight = layer.base
    with Pipe(nn.Sequential(layer), [1], chunks=3, checkpoint="always") as pipe:
        pipe.step(torch.randn(6, 3), torch.randn(6, 3), loss=F.mse_loss)
    assert set(layer.seen) == {(id(weight), torch._C._data_address(weight))}
    assert len(layer.seen) == 6


class Passes(nn.Module):
    """Returns a part of its inputs, computing nothing."""

    def __init__(self, choose: Callable[..., Tensor]) -> None:
        super().__init__()
        self.choose = choose

    def forward(self, x: Tensor, by_name: object = None) -> Tensor:
        return self.choose(x, by_name)


@pytest.mark.parametrize(
    ("choose", "wrap"),
    {
        "the input": (lambda x, _: x, lambda buffer: (buffer, {})),
        "a view of it": (lambda x, _: x[:, :3], lambda buffer: (buffer, {})),
        "an input that requires grad": (lambda x, _: x, lambda buffer: (buffer.detach().requires_grad_(), {})),
        "a keyword": (lambda _, named: named, lambda buffer: (torch.ones(4, 3), {"by_name": buffer})),
        "inside an object": (lambda _, obj: obj.x, lambda buffer: (torch.ones(2, 3), {"by_name": Inside(buffer)})),
    }.values(),
)
def test_what_a_stage_passes_on_of_the_caller_stays_where_its_numpy_view_is(
    choose: Callable[..., Tensor], wrap: Callable[[Tensor], tuple[Tensor, dict[str, object]]]
):
    buffer = torch.zeros(4, 3)
    array, (x, named) = buffer.numpy(), wrap(buffer)
    with Pipe(nn.Sequential(Passes(choose), nn.Linear(3, 3)), [1, 1], chunks=2, checkpoint="always") as pipe:
        y = pipe(x, **named)
        buffer.add_(1.0)  # while the graph of y still keeps the stages' inputs
        assert array.sum() == 12.0
        assert y.requires_grad


class Inside:
    """An object whose tensor a pipe does not see."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


MODULES: dict[str, Callable[[], nn.Module]] = {
    "spectral_norm": lambda: nn.utils.spectral_norm(nn.Linear(3, 3).double()),
    "parametrized spectral_norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3).double()),
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3).double()),
    "batch norm": lambda: nn.BatchNorm1d(3).double(),
}


@pytest.mark.parametrize(
    ("name", "checkpoint", "schedule"),
    pairwise(MODULES, ("always", "except_last", "never"), ("GPipe", "1F1B", "Interleaved1F1B", "ZB1P")),
)
def test_modules_with_state_train_as_in_a_loop_over_the_microbatches(name: str, checkpoint: str, schedule: str):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3).double(), MODULES[name](), nn.Linear(3, 2).double())
    plain = copy.deepcopy(model)
    batches = [torch.randn(2, 7, 3, dtype=torch.float64) for _ in range(2)]
    ours, theirs = (torch.optim.SGD(module.parameters(), lr=0.1) for module in (model, plain))
    with Pipe(model, [1, 1, 1], chunks=3, checkpoint=checkpoint, schedule=schedule) as pipe:
        for x, target in batches:
            ours.zero_grad()
            pipe.step(x, target[:, :2], loss=F.mse_loss)
            ours.step()
            theirs.zero_grad()
            for part, wanted in zip(x.split([3, 2, 2]), target[:, :2].split([3, 2, 2]), strict=True):
                (F.mse_loss(plain(part), wanted) * len(part) / 7).backward()
            theirs.step()
    for key, value in plain.state_dict().items():
        assert close(model.state_dict()[key], value), key


class Reversed(nn.Module):
    """Changes gradients alone, by a scale that grows with each forward."""

    def __init__(self, scale: list[float] | dict[str, float], key: int | str) -> None:
        super().__init__()
        self.scale, self.key = scale, key

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale[self.key]
        self.scale[self.key] = scale * 2
        return x.detach() * (1 + scale) - scale * x


@pytest.mark.parametrize("checkpoint", ["always", "except_last"])
def test_a_scale_of_gradients_in_a_list_or_dict_is_each_microbatchs_own(checkpoint: str):
    shared = [0.5]
    scales: list[tuple[list[float] | dict[str, float], int | str]] = [([0.5, 3.0], 0), ({"scale": 0.5}, "scale")]
    scales += [(shared, 0), (shared, 0)]
    model = nn.Sequential(nn.Linear(1, 1), *(Reversed(*pair) for pair in scales)).double()
    plain = copy.deepcopy(model)
    model[1].alias = held = model[1].scale
    x = torch.arange(1.0, 9.0, dtype=torch.float64)[:, None]
    by_microbatch(plain, x, total, 4)
    with Pipe(model, [1, 4], chunks=4, checkpoint=checkpoint, schedule="1F1B") as pipe:
        pipe.step(x, target=x, loss=total, reduction="sum")
    assert close(model[0].weight.grad, plain[0].weight.grad)
    assert model[1].scale is model[1].alias is held
    assert held == plain[1].scale == [8.0, 3.0]
    assert [layer.scale for layer in model[2:]] == [layer.scale for layer in plain[2:]]


def test_a_loss_with_state_counts_each_microbatch_once():
    class Loss(nn.Module):
        scale = 1.0

        def forward(self, y: Tensor, _: Tensor) -> Tensor:
            self.scale *= 2
            return y.sum() * self.scale

    loss, layer = Loss(), nn.Linear(1, 1, bias=False).double()
    with Pipe(nn.Sequential(layer), [1], chunks=3, checkpoint="always") as pipe:
        pipe.step(torch.ones(6, 1, dtype=torch.float64), target=None, loss=loss, reduction="sum")
    assert layer.weight.grad.item() == 2.0 * (2 + 4 + 8)
    assert loss.scale == 8.0


# State that is not put back.


class Outside(nn.Module):
    """Its factor is where nobody looks for a module's state."""

    def __init__(self, factor: Callable[[], float]) -> None:
        super().__init__()
        self.w = nn.Parameter(ONE.clone())
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.w * self.factor()


def of_a_list() -> Callable[[], float]:
    history = [1.0]

    def factor() -> float:
        history.append(history[-1] + 1.0)
        return history[-1]

    return factor


OUTSIDE = {
    "a list": of_a_list,
    "Python's generator": lambda: random.Random(0).random,
    "NumPy's generator": lambda: np.random.default_rng(0).random,
}


@pytest.mark.parametrize("where", OUTSIDE)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_second_forward_with_another_result_is_refused_by_stage_and_microbatch(where: str, dtype: torch.dtype):
    model = nn.Sequential(nn.Identity(), Outside(OUTSIDE[where]()).to(dtype))
    x = torch.ones(6, 2, dtype=dtype)  # equal numbers, which cancel in an exclusive or
    with Pipe(model, [1, 1], chunks=3, checkpoint="except_last") as pipe:
        with pytest.raises(
            RuntimeError, match='stage 1 returned other values .* on microbatch 1: .*checkpoint="never"'
        ):
            pipe.step(x, target=x, loss=total, reduction="sum")
        assert model[1].w.grad is None
        pipe.checkpoint = "never"
        pipe.step(x, target=x, loss=total, reduction="sum")
        assert model[1].w.grad is not None


@pytest.mark.parametrize(
    ("dtype", "by", "is_noise"),
    [
        (torch.float64, 1e-15, True),
        (torch.float64, 1e-10, False),
        (torch.float32, 2e-7, True),
        (torch.float32, 1e-4, False),
        (torch.bfloat16, 0.02, False),
    ],
)
def test_another_order_of_sums_is_not_taken_for_another_result(dtype: torch.dtype, by: float, is_noise: bool):
    model = nn.Sequential(Outside(lambda: 1.0 + by * is_recomputing()).to(dtype))
    with Pipe(model, [1], chunks=2, checkpoint="always") as pipe:
        y = pipe(torch.randn(64, 8).to(dtype))
        if is_noise:
            y.sum().backward()
        else:
            with pytest.raises(RuntimeError, match="stage 0 returned other values"):
                y.sum().backward()


def test_a_loss_with_another_result_is_refused_too():
    """In a stage that has no state of its own."""
    factor = of_a_list()
    refused = pytest.raises(RuntimeError, match="stage 1 returned other values")
    with Pipe(nn.Sequential(nn.Linear(2, 2), nn.Identity()), [1, 1], chunks=2, checkpoint="always") as pipe, refused:
        pipe.step(torch.ones(4, 2), target=None, loss=lambda y, _: (y * y).sum() * factor())


class Once(nn.Module):
    """Counts in a list, but only once a microbatch; returns what compares badly."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))
        self.rows: list[int] = []

    def forward(self, x: Tensor) -> dict[str, object]:
        if not is_recomputing():
            self.rows.append(len(x))
        y = x * self.w
        nan = torch.full((len(x), 2), float("nan"))
        return {"y": y, "nan": nan, "empty": y[:, :0], "ids": y.long(), "flag": y > 0, "complex": y * 1j, "none": None}


def test_nan_and_every_dtype_are_the_same_twice():
    layer = Once()
    with Pipe(nn.Sequential(layer, nn.Identity()), [1, 1], chunks=3, checkpoint="always") as pipe:
        y = pipe(torch.ones(6, 2))
        y["y"].sum().backward()
    assert layer.w.grad.item() == 12.0
    assert layer.rows == [2, 2, 2]
