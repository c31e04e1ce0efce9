"""What Dynamo would compute or read otherwise than the tape: the same bits in a graph, or the tape's; never others."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import anabranch as ab
from anabranch.errors import CaptureError
from covering import slow_except

STEPS, CHANGED_AT = 12, 6


def drawn(i: int) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(i))


@dataclass
class Case:
    """A factor of the loss, from the batch and a number that changes in each step, and what changes in the middle."""

    factor: Callable[[Tensor, Any], Any]
    batch: Callable[[int], Tensor] = drawn
    number: Callable[[int], Any] = lambda i: round(0.1 * i + 0.5, 1)
    change: Callable[[], object] = lambda: None
    restore: Callable[[], object] = lambda: None


def annotated(number: float = 1.0) -> float:
    return number


def view_of(i: int) -> Tensor:
    return drawn(i) if i < CHANGED_AT else drawn(i)[:]


def leaf_of(i: int) -> Tensor:
    leaf = drawn(i).requires_grad_()
    return leaf if i < CHANGED_AT else leaf * 1


def with_hook(i: int) -> Tensor:
    leaf = drawn(i).requires_grad_()
    if i >= CHANGED_AT:
        leaf.register_hook(lambda gradient: None)
    return leaf


def begin_group() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def switch_of(holder: Any, name: str, changed: object) -> dict[str, Callable[[], object]]:
    before = getattr(holder, name)
    return {
        "change": lambda: setattr(holder, name, changed),
        "restore": lambda: setattr(holder, name, before),
    }


def autocast_dtype_of(dtype: torch.dtype) -> Callable[[], None]:
    return lambda: torch.set_autocast_dtype("cpu", dtype)


def in_autocast(x: Tensor, _number: float) -> Tensor:
    with torch.autocast("cpu"):
        return (x @ x.t()).float().sum()


def in_lstm() -> Callable[[Tensor, float], Tensor]:
    torch.manual_seed(3)
    layer = nn.LSTM(4, 6, batch_first=True).requires_grad_(False)
    return lambda x, _: layer(x[None])[0].sum()  # type: ignore[no-any-return]


def lerped(x: Tensor, _number: float) -> Tensor:
    moved = [x[0] * 1.0]
    torch._foreach_lerp_(moved, [x[1]], 0.137)  # type: ignore[attr-defined]
    return moved[0].sum()


NUMPY: dict[str, Case] = {
    "exp": Case(lambda x, _: torch.from_numpy(np.exp(x.numpy())).sum()),
    "power": Case(lambda x, _: torch.from_numpy(np.power(np.abs(x.numpy()), np.float32(1.7))).mean()),
    "deviation": Case(lambda x, _: torch.from_numpy(np.std(x.numpy(), axis=0)).sum()),
    "number": Case(lambda x, v: v / (x.square().sum() + 1), number=lambda i: np.float32(0.13 * i + 0.1)),
    "whole number": Case(lambda x, v: x.abs().sum() ** v, number=lambda i: np.int64(i % 4 + 1)),
    "array": Case(lambda x, v: float(v), number=lambda i: np.array(0.1 * i)),
}
DIVISIONS: dict[str, Case] = {
    "//": Case(lambda x, v: 1 + v // 0.1),
    "other way": Case(lambda x, v: 1 + 5.5 // v),
    "divmod": Case(lambda x, v: 1 + divmod(v, 0.1)[0]),
    "in a branch": Case(lambda x, v: 2.0 if v // 0.1 == 9.0 else 1.0),
}
BRANCHES: dict[str, tuple[Case, str]] = {  # and the engine that the step has
    "sum": (Case(lambda x, v: 3.0 if v + 0.1 + 0.2 >= 0.9 else 1.0, number=lambda i: (12 - i) / 10), "refused"),
    "product": (Case(lambda x, v: 3.0 if v * 0.1 * 3 >= 0.21 else 1.0, number=lambda i: (12 - i) / 10), "refused"),
    "one sum": (Case(lambda x, v: 3.0 if 1 - v > 0.3 else v, number=lambda i: (12 - i) / 100), "graph"),
}
READS: dict[str, Case] = {
    "_base": Case(lambda x, _: 2 if x._base is not None else 1, view_of),
    "base of what is computed": Case(lambda x, _: 2 if x.view(-1)._base.dim() == 2 else 1, view_of),
    "_is_view": Case(lambda x, _: 2 if x._is_view() else 1, view_of),
    "is_leaf": Case(lambda x, _: 2 if x.is_leaf else 1, leaf_of),
    "grad_fn": Case(lambda x, _: 2 if x.grad_fn is None else 1, leaf_of),
    "hooks": Case(lambda x, _: 2 if x._backward_hooks else 1, with_hook),
    "memory": Case(
        lambda x, _: x.untyped_storage().size(), lambda i: torch.cat([drawn(i)] * (1 if i < CHANGED_AT else 2))[:8]
    ),
    "annotations": Case(
        lambda x, _: 1 + len(annotated.__annotations__), **switch_of(annotated, "__annotations__", {"number": float})
    ),
    "names of a function": Case(
        lambda x, _: len(dir(annotated)),
        change=lambda: setattr(annotated, "more", 1),
        restore=lambda: vars(annotated).clear(),
    ),
}
STATES: dict[str, Case] = {
    "dtype of autocast": Case(
        in_autocast, change=autocast_dtype_of(torch.float16), restore=autocast_dtype_of(torch.bfloat16)
    ),
    "dtype of autocast, asked for": Case(
        lambda x, _: 2 if torch.get_autocast_dtype("cpu") == torch.float16 else 1,
        change=autocast_dtype_of(torch.float16),
        restore=autocast_dtype_of(torch.bfloat16),
    ),
    "cache of autocast": Case(
        lambda x, _: 2 if torch.is_autocast_cache_enabled() else 1,
        change=lambda: torch.set_autocast_cache_enabled(False),
        restore=lambda: torch.set_autocast_cache_enabled(True),
    ),
    "process group": Case(
        lambda x, _: 2 if dist.is_initialized() else 1, change=begin_group, restore=dist.destroy_process_group
    ),
    "size of the group": Case(
        lambda x, _: 2 if dist.is_initialized() and dist.get_world_size() == 1 else 1,
        change=begin_group,
        restore=dist.destroy_process_group,
    ),
    "oneDNN": Case(in_lstm(), **switch_of(torch.backends.mkldnn, "enabled", False)),
    "cuDNN": Case(
        lambda x, _: 2 if torch.backends.cudnn.enabled else 1, **switch_of(torch.backends.cudnn, "enabled", False)
    ),
}


def of_attention() -> Callable[[Tensor, float], Tensor]:
    torch.manual_seed(3)
    layer = nn.MultiheadAttention(4, 2, batch_first=True).requires_grad_(False)

    def attend(x: Tensor) -> Tensor:
        return layer(x[None], x[None], x[None], need_weights=False)[0].sum()  # type: ignore[no-any-return]

    return lambda x, _: attend(x)


def of_attention_again() -> Callable[[Tensor, float], Tensor]:
    attend = of_attention()
    return lambda x, v: checkpoint(attend, x, v, use_reentrant=False)  # type: ignore[no-any-return]


attended = F.scaled_dot_product_attention
patched = switch_of(F, "scaled_dot_product_attention", lambda q, *a, **k: attended(q * 3, *a, **k))
UNENTERED: dict[str, Case] = {
    "attention replaced": Case(of_attention(), **patched),
    "attention replaced in a checkpointed region": Case(of_attention_again(), **patched),
    "defaults": Case(
        lambda x, _: F.cross_entropy(x, x.argmax(1)),
        **switch_of(F.cross_entropy, "__defaults__", (*F.cross_entropy.__defaults__[:-1], 0.3)),
    ),
    "kinds of sums": Case(
        lambda x, _: F.mse_loss(x, x * 0.3), **switch_of(torch.nn._reduction, "get_enum", lambda kind: 2)
    ),
}
WHOLE: dict[str, Case] = {
    "addcdiv": Case(lambda x, _: sum(torch.addcdiv(row[0], row[1], row[2].abs() + 1.1, value=0.13) for row in x)),
    "addcdiv_": Case(lambda x, _: (x[0] * 1.0).addcdiv_(x[1], x[2].abs() + 1.1, value=0.13).sum()),
    "addcmul_": Case(lambda x, _: (x[0] * 1.0).addcmul_(x[1], x[2], value=0.13).sum()),
    "foreach_lerp_": Case(lerped),
}


@contextmanager
def restored(case: Case) -> Iterator[None]:
    try:
        yield
    finally:
        case.restore()


def losses(case: Case, engine: Any) -> tuple[list[Tensor], str]:
    torch.manual_seed(0)
    held = {"number": case.number(0)}

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x.detach()).square().mean() * case.factor(x, held["number"])  # type: ignore[no-any-return]

    model = nn.Linear(4, 4)
    step = ab.TrainStep(model, loss, torch.optim.SGD(model.parameters(), lr=1e-4))
    found = []
    with restored(case), ab.Executor(step, engine=engine) as executor:
        for i in range(STEPS):
            if i == CHANGED_AT:
                case.change()
            held["number"] = case.number(i)
            try:
                found.append(executor.run(batch=case.batch(i))["loss"].clone())
            except CaptureError as error:
                return found, f"refused: {error}"
        return found, executor.engine()


def check(case: Case) -> str:
    """Compare the losses of a graph, up to where it is refused; return why it is, or the engine."""
    found, said = losses(case, "graph")
    expected, _ = losses(case, "tape")
    assert all(map(torch.equal, found, expected)), said  # as far as there is a graph
    return said


@pytest.mark.parametrize("name", NUMPY)
def test_numpy_in_a_loss_is_refused(name: str) -> None:
    said = check(NUMPY[name])
    assert said.startswith("refused")
    assert "NumPy" in said


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", slow_except(DIVISIONS, "//", "in a branch"))
def test_a_float_that_changes_is_divided_as_python_does(name: str) -> None:
    assert re.match(r"refused: .*test_faithful_values.py:\d+: .* by // or divmod", check(DIVISIONS[name]))


@pytest.mark.parametrize("name", BRANCHES)
def test_a_branch_on_a_float_that_changes_is_taken_as_python_does(name: str) -> None:
    case, engine = BRANCHES[name]
    assert check(case).startswith(engine)


def test_a_number_that_changes_keeps_its_format_in_a_text() -> None:
    check(Case(lambda x, v: float(f"{v:.1f}"), number=lambda i: 0.137 * i + 0.5))


@pytest.mark.parametrize("name", WHOLE)
def test_calls_stay_whole(name: str) -> None:
    assert check(WHOLE[name]).startswith("graph")


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("name", READS)
def test_unguarded_values_are_refused(name: str) -> None:
    assert re.match("refused: .*(a graph would not|cannot be a graph)", check(READS[name]))


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", UNENTERED)
def test_functions_of_torch_that_are_replaced_beneath_another_are_noticed(name: str) -> None:
    check(UNENTERED[name])


@pytest.mark.parametrize("name", STATES)
def test_states_of_the_process_are_looked_at(name: str) -> None:
    assert check(STATES[name]).startswith("graph")
