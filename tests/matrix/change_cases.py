"""Training loops in which a module, a hook, a parameter, an optimizer, code or a setting changes between two steps."""

from __future__ import annotations

import contextlib
import copy
import functools
import linecache
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils.prune
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint

from plain_loop import Build, TrainingCase, linear, mean_square, nothing, sgd

CASES: dict[str, Build] = {}


def case(function: Build) -> Build:
    CASES[function.__name__] = function
    return function


def network() -> Any:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.5), nn.BatchNorm1d(6), nn.Linear(6, 3))


def of(model: nn.Module, change: Callable[[int], Any], **keywords: Any) -> TrainingCase:
    """A case of ``model`` under a mean square and SGD with momentum."""
    optimizer = keywords.pop("optimizer", None) or sgd(model, momentum=0.9)
    loss = keywords.pop("loss", mean_square)
    return TrainingCase(model, loss, optimizer, lambda k: (change(k), None)[1], **keywords)


# Nothing changes: what the graph itself must get right.


def _steady(make: Callable[[], nn.Module], **keywords: Any) -> Build:
    return lambda patch: of(make(), nothing, **keywords)


class Counting(nn.Module):
    """Counts its calls in Python and uses the count."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x) * (1 + 0.1 * self.calls)  # type: ignore[no-any-return]


class Remembering(nn.Module):
    """Keeps its last output, detached, and adds it to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(4, 3), None

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        out = y if self.last is None else y + 0.1 * self.last
        self.last = y.detach()
        return out  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    """Carries a hidden state from one step into the next."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.net, self.state = kind(4, 5, batch_first=True), None

    def forward(self, x: Tensor) -> Tensor:
        y, state = self.net(x[:, None], self.state)
        self.state = tuple(s.detach() for s in state) if isinstance(state, tuple) else state.detach()
        return y  # type: ignore[no-any-return]


class Printing(nn.Module):
    def __init__(self, stream: list[str]) -> None:
        super().__init__()
        self.layer, self.stream = nn.Linear(4, 3), stream

    def forward(self, x: Tensor) -> Tensor:
        self.stream.append(f"{tuple(x.shape)}")
        return self.layer(x)  # type: ignore[no-any-return]


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y * 2 if y.sum() > 0 else y.square()  # type: ignore[no-any-return]


class Caching(nn.Module):
    """Computes a table at its first call, by shape, as position tables are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.tables: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        if rows not in self.tables:
            self.tables[rows] = torch.arange(rows, dtype=torch.float32)[:, None] * 0.1
        return self.layer(x) + self.tables[rows]  # type: ignore[no-any-return]


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.drop, self.last, self.reentrant = nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3), reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_() if self.reentrant else x
        y = checkpoint(lambda x: self.drop(torch.tanh(self.first(x))), x, use_reentrant=self.reentrant)
        return self.last(y)  # type: ignore[no-any-return]


def _gradient_penalty(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    y = model(x)
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y.square().mean() + gradient.norm(dim=1).sub(1).square().mean()


def _accuracy(model: nn.Module, x: Tensor) -> Any:
    y = model(x)
    return y.square().mean(), {"positive": (y > 0).float().mean()}


CASES |= {
    "steady_dropout_and_batch_norm": _steady(network),
    "steady_counter": _steady(Counting),
    "steady_memory": _steady(Remembering),
    "steady_lstm_state": _steady(lambda: Recurrent(nn.LSTM)),
    "steady_gru_state": _steady(lambda: Recurrent(nn.GRU)),
    "steady_branch_on_data": _steady(Branching),
    "steady_cache_by_shape": _steady(Caching),
    "steady_checkpoint": _steady(lambda: Checkpointed(False)),
    "steady_reentrant_checkpoint": _steady(lambda: Checkpointed(True)),
    "steady_gradient_penalty": _steady(
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)), loss=_gradient_penalty
    ),
    "steady_extras": _steady(network, loss=_accuracy),
    "steady_clipping": _steady(network, clip=0.1),
    "steady_loss_of_a_dict_comprehension": _steady(
        network, loss=lambda m, x: sum({n: p.square().sum() for n, p in m.named_parameters()}.values()) + m(x).mean()
    ),
    "steady_unused_parameter": _steady(
        lambda: nn.ModuleDict({"used": nn.Linear(4, 3), "unused": nn.Linear(4, 3)}),
        loss=lambda m, x: m["used"](x).square().mean(),
    ),
    "steady_negative_and_infinite": _steady(linear, loss=lambda m, x: m(x).mean() * -1e30 * 1e30),
    "steady_loss_without_gradient": _steady(linear, loss=lambda m, x: x.sum()),
    "steady_loss_not_scalar": _steady(linear, loss=lambda m, x: m(x)),
    "steady_vmap": _steady(linear, loss=lambda m, x: torch.vmap(m)(x).square().mean()),
    "steady_einsum_and_complex": _steady(
        linear, loss=lambda m, x: torch.fft.rfft(torch.einsum("ij,kj->ik", m(x), m(x))).abs().sum()
    ),
    "steady_data_dependent_shape": _steady(linear, loss=lambda m, x: m(x)[x[:, 0] > 0].square().sum()),
    "steady_item": _steady(linear, loss=lambda m, x: m(x).square().mean() * (1.0 + m(x).detach().max().item())),
    "steady_inner_backward": _steady(
        linear,
        loss=lambda m, x: (m(x).sum() * 0.1).backward() or m(x).square().mean(),  # type: ignore[func-returns-value]
    ),
    "steady_raises": _steady(linear, loss=lambda m, x: m(x[:, :2]).sum()),
    "steady_embedding": _steady(
        lambda: nn.Embedding(5, 3),
        batch=lambda i: torch.tensor([i % 5, 1, 1, 4 - i % 4]),
    ),
    "steady_sparse_embedding": lambda patch: (
        lambda m: of(m, nothing, optimizer=sgd(m), batch=lambda i: torch.tensor([i % 5, 1, 1, 4 - i % 4]))
    )(nn.Embedding(5, 3, sparse=True)),
    "steady_max_norm_embedding": _steady(
        lambda: nn.Embedding(5, 3, max_norm=0.5),
        batch=lambda i: torch.tensor([i % 5, 1, 1, 4 - i % 4]),
    ),
    "steady_attention": _steady(
        lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True),
        batch=lambda i: torch.ones(2, 3, 4) * (i + 1),
    ),
    "steady_bilinear": _steady(lambda: nn.Bilinear(4, 4, 3), loss=lambda m, x: m(x, x).square().mean()),
    "steady_rrelu": _steady(lambda: nn.Sequential(nn.Linear(4, 4), nn.RReLU(), nn.AlphaDropout(0.3))),
    "steady_loss_of_the_gradient": _steady(
        linear, loss=lambda m, x: m(x).square().mean() * (1.0 if m.weight.grad is None else 2.0)
    ),
}


@case
def steady_printing(patch: pytest.MonkeyPatch) -> TrainingCase:
    said: list[str] = []
    return of(Printing(said), nothing, seen=lambda: list(said))


@case
def steady_counter_seen(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = Counting()
    return of(model, nothing, seen=lambda: model.calls)


@case
def counter_set_back(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = Counting()
    return of(model, lambda k: setattr(model, "calls", 10 * k), seen=lambda: model.calls)


@case
def memory_forgotten(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = Remembering()
    return of(model, lambda k: setattr(model, "last", None))


@case
def cache_cleared(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = Caching()
    return of(model, lambda k: model.tables.clear(), seen=lambda: sorted(model.tables))


@case
def cache_filled_with_others(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = Caching()
    return of(model, lambda k: model.tables.update({3: torch.full((3, 1), float(k))}))


@case
def loss_kept_by_the_user(patch: pytest.MonkeyPatch) -> TrainingCase:
    kept: list[float] = []
    return of(network(), nothing, between=lambda out: kept.append(out["loss"].item()), seen=lambda: list(kept))


@case
def loss_tensors_kept_by_the_user(patch: pytest.MonkeyPatch) -> TrainingCase:
    # A graph that gives out one buffer again and again would show the last loss six times.
    kept: list[Tensor] = []
    return of(network(), nothing, between=lambda out: kept.append(out["loss"]), seen=lambda: [t.item() for t in kept])


@case
def extras_kept_by_the_user(patch: pytest.MonkeyPatch) -> TrainingCase:
    # An alias of a parameter shows its later values, a copy and an output do not.
    kept: list[dict[str, Tensor]] = []

    def loss(m: Any, x: Tensor) -> Any:
        y = m(x)
        return y.square().mean(), {
            "output": y,
            "copy": m.weight.clone(),
            "alias": m.weight,
            "view": m.weight[0],
            "x": x,
        }

    return of(linear(), nothing, loss=loss, between=kept.append, seen=lambda: list(kept))


@case
def extras_change(patch: pytest.MonkeyPatch) -> TrainingCase:
    held = {"names": ["a"]}

    def loss(m: Any, x: Tensor) -> Any:
        y = m(x)
        return y.square().mean(), {name: y.mean() for name in held["names"]}

    return of(linear(), lambda k: held.update(names=["b", "c"][:k]), loss=loss)


@case
def extras_with_numbers_made_of_tensors(patch: pytest.MonkeyPatch) -> TrainingCase:
    held = {"n": 1.0}
    return of(
        linear(),
        lambda k: held.update(n=1.0 + k),
        loss=lambda m, x: (m(x).square().mean(), {"n": torch.tensor(held["n"]), "one": torch.ones(2)}),
    )


@case
def loss_is_a_parameter(patch: pytest.MonkeyPatch) -> TrainingCase:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.tensor(1.0))

    kept: list[Tensor] = []
    return of(
        Net(), nothing, loss=lambda m, x: m.w, between=lambda out: kept.append(out["loss"]), seen=lambda: list(kept)
    )


@case
def loss_is_a_buffer_sum(patch: pytest.MonkeyPatch) -> TrainingCase:
    model: Any = linear()
    model.register_buffer("total", torch.zeros(()))

    def loss(m: Any, x: Tensor) -> Any:
        m.total += m(x).detach().mean()
        return m(x).square().mean(), {"total": m.total}

    kept: list[Any] = []
    return of(model, lambda k: model.total.zero_(), loss=loss, between=kept.append, seen=lambda: list(kept))


@case
def weight_changed_inside_the_loss(patch: pytest.MonkeyPatch) -> TrainingCase:
    def loss(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            m.weight.clamp_(-0.3, 0.3)
        return m(x).square().mean()

    return of(linear(), nothing, loss=loss)


@case
def gradient_written_inside_the_loss(patch: pytest.MonkeyPatch) -> TrainingCase:
    def loss(m: Any, x: Tensor) -> Tensor:
        m.weight.grad = torch.ones_like(m.weight)
        return m(x).square().mean()

    return of(linear(), nothing, loss=loss)


@case
def optimizer_changed_inside_the_loss(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = linear()
    optimizer = sgd(model, momentum=0.9)

    def loss(m: Any, x: Tensor) -> Tensor:
        optimizer.param_groups[0]["lr"] *= 0.9
        return m(x).square().mean()

    return of(model, nothing, loss=loss, optimizer=optimizer)


@case
def hook_registered_inside_the_loss(patch: pytest.MonkeyPatch) -> TrainingCase:
    def loss(m: Any, x: Tensor) -> Tensor:
        m.register_forward_hook(lambda m, args, y: y * 0.9)
        return m(x).square().mean()

    return of(linear(), nothing, loss=loss)


@case
def training_mode_changed_inside_the_loss(patch: pytest.MonkeyPatch) -> TrainingCase:
    def loss(m: Any, x: Tensor) -> Tensor:
        m[2].train(not m[2].training)
        return m(x).square().mean()

    return of(network(), nothing, loss=loss)


@case
def parameter_frozen_inside_the_loss(patch: pytest.MonkeyPatch) -> TrainingCase:
    calls = []

    def loss(m: Any, x: Tensor) -> Tensor:
        calls.append(1)
        m.bias.requires_grad_(len(calls) % 3 != 0)
        return m(x).square().mean()

    return of(linear(), nothing, loss=loss)


@case
def seed_set_inside_a_layer(patch: pytest.MonkeyPatch) -> TrainingCase:
    def loss(m: Any, x: Tensor) -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            noise = torch.randn(3, 4)
        return m(x + noise).square().mean()

    return of(network(), nothing, loss=loss)


@case
def inner_optimizer_step(patch: pytest.MonkeyPatch) -> TrainingCase:
    other = linear()
    optimizer = sgd(other)

    def loss(m: Any, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        other(x).square().mean().backward()
        optimizer.step()
        return (m(x) - other(x).detach()).square().mean()

    return of(linear(), nothing, loss=loss, seen=lambda: list(other.parameters()))


@case
def second_order_inside(patch: pytest.MonkeyPatch) -> TrainingCase:
    def loss(m: Any, x: Tensor) -> Tensor:
        inner = m(x).square().mean()
        gradients = torch.autograd.grad(inner, list(m.parameters()), create_graph=True)
        fast = {n: p - 0.1 * g for (n, p), g in zip(m.named_parameters(), gradients, strict=True)}
        return torch.func.functional_call(m, fast, (x * 2,)).square().mean()

    return of(linear(), nothing, loss=loss)


@case
def function_gradient_inside(patch: pytest.MonkeyPatch) -> TrainingCase:
    def loss(m: Any, x: Tensor) -> Tensor:
        return torch.func.vmap(torch.func.grad(lambda row: m(row).square().sum()))(x).square().mean()

    return of(linear(), nothing, loss=loss)


@case
def outputs_kept_by_the_model(patch: pytest.MonkeyPatch) -> TrainingCase:
    model, kept = linear(), []

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        y = m(x)
        kept.append(y.detach())
        return y.square().mean()

    return of(model, nothing, loss=loss, seen=lambda: list(kept))


@case
def gradients_read_between_steps(patch: pytest.MonkeyPatch) -> TrainingCase:
    model, norms = linear(), []
    return of(
        model, nothing, between=lambda out: norms.append(model.weight.grad.norm().item()), seen=lambda: list(norms)
    )


@case
def gradients_decide_the_learning_rate(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = linear()
    optimizer = sgd(model)

    def between(out: dict[str, Tensor]) -> None:
        gradient = model.weight.grad
        optimizer.param_groups[0]["lr"] = 0.1 if gradient is None else 0.1 * gradient.norm().item()

    return of(model, nothing, optimizer=optimizer, between=between)


@case
def gradient_left_by_the_user(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = linear()
    return of(model, lambda k: setattr(model.weight, "grad", torch.ones(3, 4)))


# Modules.


@case
def dropout_probability(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = network()
    return of(model, lambda k: setattr(model[2], "p", [0.2, 0.0][k - 1]))


@case
def dropout_frozen(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = network()
    return of(model, lambda k: model[2].train(k == 2))


@case
def batch_norm_frozen(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = network()
    return of(model, lambda k: model[3].train(k == 2))


@case
def training_flag_assigned(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = network()
    return of(model, lambda k: setattr(model[2], "training", k == 2))


@case
def whole_model_in_eval_mode(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = network()
    return of(model, lambda k: [m.train(k == 2) for m in model.children()])


def _module_number(index: int, name: str, values: tuple[Any, Any]) -> Build:
    def build(patch: pytest.MonkeyPatch) -> TrainingCase:
        model = network()
        return of(model, lambda k: setattr(model[index], name, values[k - 1]))

    return build


CASES |= {
    "batch_norm_momentum": _module_number(3, "momentum", (0.5, None)),
    "batch_norm_eps": _module_number(3, "eps", (0.5, 1e-5)),
    "batch_norm_no_statistics": _module_number(3, "track_running_stats", (False, True)),
    "linear_bias_gone": _module_number(4, "bias", (None, None)),
    "own_attribute_on_a_library_module": _module_number(0, "note", ("a", "b")),
}


@case
def buffer_in_place(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = network()
    return of(model, lambda k: model[3].running_mean.fill_(float(k)))


@case
def buffer_replaced(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = network()
    model[3].eval()
    return of(model, lambda k: setattr(model[3], "running_mean", torch.full((6,), float(k))))


@case
def buffer_replaced_while_it_is_updated(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = network()
    return of(model, lambda k: setattr(model[3], "running_mean", torch.full((6,), float(k))))


@case
def buffer_registered_anew(patch: pytest.MonkeyPatch) -> TrainingCase:
    model: Any = linear()
    model.register_buffer("scale", torch.tensor(1.0))
    return of(
        model,
        lambda k: model.register_buffer("scale", torch.tensor(1.0 + k)),
        loss=lambda m, x: m(x).square().mean() * m.scale,
    )


@case
def buffer_becomes_a_number(patch: pytest.MonkeyPatch) -> TrainingCase:
    model: Any = linear()
    model.register_buffer("scale", None)
    return of(
        model,
        lambda k: setattr(model, "scale", [torch.tensor(2.0), None][k - 1]),
        loss=lambda m, x: m(x).square().mean() * (1.0 if m.scale is None else m.scale),
    )


@case
def layer_replaced(patch: pytest.MonkeyPatch) -> TrainingCase:
    # The optimizer keeps the old layer's parameters: the new one's never move.
    model = network()
    return of(model, lambda k: model.__setitem__(4, nn.Linear(6, 3)))


@case
def layer_replaced_with_its_optimizer(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = network()
    optimizer = sgd(model)

    def change(k: int) -> None:
        if k == 2:
            return  # two more steps show whether the new layer's gradients are those of one step
        model[4] = nn.Linear(6, 3)
        optimizer.param_groups[0]["params"] = list(model.parameters())

    return of(model, change, optimizer=optimizer)


@case
def activation_replaced(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = network()
    return of(model, lambda k: model.__setitem__(1, [nn.ReLU(), nn.Sigmoid()][k - 1]))


@case
def layer_appended(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = network()
    return of(model, lambda k: model.append(nn.Linear(3, 3)))


@case
def layer_removed(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = network()
    return of(model, lambda k: model.__delitem__(1))


@case
def layers_swapped(patch: pytest.MonkeyPatch) -> TrainingCase:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    def change(k: int) -> None:
        model[0], model[2] = model[2], model[0]

    return of(model, change)


@case
def submodule_added_and_used(patch: pytest.MonkeyPatch) -> TrainingCase:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            return self.extra(y) if hasattr(self, "extra") else y  # type: ignore[no-any-return, operator]

    model: Any = Net()
    return of(model, lambda k: setattr(model, "extra", nn.Tanh()) if k == 1 else delattr(model, "extra"))


@case
def module_list_iterated(patch: pytest.MonkeyPatch) -> TrainingCase:
    model: Any = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    return of(
        model,
        lambda k: model.append(nn.Linear(4, 4)),
        loss=lambda m, x: sum(l(x).square().mean() for l in m),  # noqa: E741
    )


@case
def forward_replaced_on_the_instance(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = network()
    return of(
        model,
        lambda k: setattr(model[1], "forward", [lambda x: x * 2, types.MethodType(nn.Tanh.forward, model[1])][k - 1]),
    )


@case
def forward_replaced_on_the_class(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = network()
    return of(model, lambda k: patch.setattr(nn.Tanh, "forward", lambda self, x: x * k))


class _Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.middle(self.layer(x))

    def middle(self, y: Tensor) -> Tensor:
        return y


@case
def forward_of_an_own_class_replaced(patch: pytest.MonkeyPatch) -> TrainingCase:
    class Net(_Base):
        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)  # type: ignore[no-any-return]

    return of(Net(), lambda k: setattr(Net, "forward", lambda self, x: self.layer(x) * (1 + k)))


@case
def forward_of_a_base_class_replaced(patch: pytest.MonkeyPatch) -> TrainingCase:
    class Net(_Base):
        pass

    return of(Net(), lambda k: patch.setattr(_Base, "forward", lambda self, x: self.layer(x) * (1 + k)))


@case
def forward_of_an_own_class_added(patch: pytest.MonkeyPatch) -> TrainingCase:
    class Net(_Base):
        pass

    return of(Net(), lambda k: setattr(Net, "forward", lambda self, x: self.layer(x) * (1 + k)))


@case
def method_of_a_base_class_replaced(patch: pytest.MonkeyPatch) -> TrainingCase:
    class Net(_Base):
        pass

    return of(Net(), lambda k: patch.setattr(_Base, "middle", lambda self, y: y * (1 + k)))


@case
def method_of_an_own_class_added(patch: pytest.MonkeyPatch) -> TrainingCase:
    class Net(_Base):
        pass

    return of(Net(), lambda k: setattr(Net, "middle", lambda self, y: y * (1 + k)))


@case
def forward_of_an_own_submodule_class_replaced(patch: pytest.MonkeyPatch) -> TrainingCase:
    class Block(_Base):
        pass

    model = nn.Sequential(Block(), nn.Tanh())
    return of(model, lambda k: setattr(Block, "forward", lambda self, x: self.layer(x) * (1 + k)))


@case
def bases_of_a_modules_class_replaced(patch: pytest.MonkeyPatch) -> TrainingCase:
    class One(_Base):
        def middle(self, y: Tensor) -> Tensor:
            return y * 2

    class Two(_Base):
        def middle(self, y: Tensor) -> Tensor:
            return y * 3

    class Net(One):
        pass

    return of(Net(), lambda k: setattr(Net, "__bases__", ([Two, One][k - 1],)))


@case
def call_impl_replaced_on_the_instance(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = network()
    return of(model, lambda k: setattr(model[1], "_call_impl", lambda x: x * (1 + k)))


@case
def getitem_of_sequential_replaced(patch: pytest.MonkeyPatch) -> TrainingCase:
    class Net(nn.Sequential):
        pass

    model = Net(nn.Linear(4, 3), nn.Tanh())
    return of(model, lambda k: setattr(Net, "__iter__", lambda self: iter(list(self._modules.values())[:k])))


@case
def call_replaced_on_the_class(patch: pytest.MonkeyPatch) -> TrainingCase:
    class Net(nn.Linear):
        pass

    model = Net(4, 3)
    return of(model, lambda k: setattr(Net, "__call__", lambda self, x: self.forward(x) * (1 + k)))


@case
def class_of_a_module_replaced(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = network()
    return of(model, lambda k: setattr(model[1], "__class__", [nn.Sigmoid, nn.Tanh][k - 1]))


@case
def getattr_of_a_module(patch: pytest.MonkeyPatch) -> TrainingCase:
    number = [1.0]

    class Net(nn.Linear):
        def __getattr__(self, name: str) -> Any:
            return number[0] if name == "scale" else super().__getattr__(name)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale  # type: ignore[no-any-return]

    return of(Net(4, 3), lambda k: number.__setitem__(0, 1.0 + k))


@case
def property_of_a_module(patch: pytest.MonkeyPatch) -> TrainingCase:
    class Net(nn.Linear):
        _scale = 1.0

        @property
        def scale(self) -> float:
            return self._scale

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    model = Net(4, 3)
    return of(model, lambda k: setattr(model, "_scale", 1.0 + k))


@case
def module_number_by_dict(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = network()
    return of(model, lambda k: model[2].__dict__.update(p=0.1 * k))


@case
def module_config(patch: pytest.MonkeyPatch) -> TrainingCase:
    class Net(nn.Linear):
        config: Any = None

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.config["model"]["scale"]  # type: ignore[no-any-return]

    model = Net(4, 3)
    model.config = {"model": {"scale": 1.0}}
    return of(model, lambda k: model.config["model"].update(scale=1.0 + k))


class Scripted(nn.Module):
    """A number that TorchScript keeps as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.scale = torch.jit.Attribute(1.0, float)

    def forward(self, x):  # type: ignore[no-untyped-def]
        return self.layer(x) * self.scale


@case
def scripted_module_number(patch: pytest.MonkeyPatch) -> TrainingCase:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.jit.script(Scripted())  # type: ignore[no-untyped-call]
    return of(model, lambda k: setattr(model, "scale", 1.0 + k))


@case
def fx_module_recompiled(patch: pytest.MonkeyPatch) -> TrainingCase:
    model: Any = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 3), nn.Tanh()))

    def change(k: int) -> None:
        for node in model.graph.nodes:
            if node.op == "call_module" and node.target == "1":
                with model.graph.inserting_after(node):
                    new = model.graph.call_function(torch.mul, (node, 1.0 + k))
                node.replace_all_uses_with(new, delete_user_cb=lambda user, new=new: user is not new)
                break
        model.recompile()

    return of(model, change)


@case
def compiled_submodule(patch: pytest.MonkeyPatch) -> TrainingCase:
    inner = nn.Sequential(nn.Linear(4, 4), nn.LeakyReLU(0.1))
    model: Any = nn.Sequential(torch.compile(inner, backend="eager"), nn.Linear(4, 3))  # type: ignore[arg-type]
    return of(model, lambda k: setattr(inner[1], "negative_slope", 0.1 * k))


@case
def averaged_teacher(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = linear()
    teacher = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = teacher(x)
        return m(x).square().mean() + (m(x) - target).square().mean()

    return of(model, nothing, loss=loss, between=lambda out: teacher.update_parameters(model))


@case
def copied_teacher_reset(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = network()
    held = {"teacher": copy.deepcopy(model).eval()}

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = held["teacher"](x)
        return (m(x) - target).square().mean() + m(x).mean()

    return of(model, lambda k: held.update(teacher=copy.deepcopy(model).eval()), loss=loss)


@case
def teacher_learns_too(patch: pytest.MonkeyPatch) -> TrainingCase:
    # The loss reaches another module's parameters: the plain loop leaves gradients in them.
    model, other = linear(), linear()
    return of(
        model,
        lambda k: other.zero_grad(),
        loss=lambda m, x: (m(x) - other(x)).square().mean(),
        seen=lambda: [p.grad for p in other.parameters()],
    )


@case
def functional_call_state(patch: pytest.MonkeyPatch) -> TrainingCase:
    model, extra = linear(), {"bias": torch.zeros(3)}
    return of(
        model,
        lambda k: extra.update(bias=torch.full((3,), float(k))),
        loss=lambda m, x: torch.func.functional_call(m, extra, (x,)).square().mean(),
    )


# Hooks.


@case
def forward_hook_added(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = network()
    return of(model, lambda k: model[1].register_forward_hook(lambda m, args, y: y * 2))


@case
def forward_hook_replaced(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = network()
    handles = [model[1].register_forward_hook(lambda m, args, y: y * 0.5)]

    def change(k: int) -> None:
        handles.pop().remove()
        handles.append(model[1].register_forward_hook(lambda m, args, y: y * (2.0 + k)))

    return of(model, change)


@case
def forward_hook_replaced_under_its_number(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = network()
    handle = model[1].register_forward_hook(lambda m, args, y: y * 0.5)
    return of(model, lambda k: model[1]._forward_hooks.update({handle.id: lambda m, args, y: y * (2.0 + k)}))


@case
def forward_hook_removed(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = network()
    handle = model[1].register_forward_hook(lambda m, args, y: y * 0.5)
    return of(model, lambda k: handle.remove())


@case
def forward_hook_number(patch: pytest.MonkeyPatch) -> TrainingCase:
    model, number = network(), [1.0]
    model[1].register_forward_hook(lambda m, args, y: y * number[0])
    return of(model, lambda k: number.__setitem__(0, 1.0 + k))


@case
def forward_hook_on_the_root(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = network()
    return of(model, lambda k: model.register_forward_hook(lambda m, args, y: y * (1 + k)))


@case
def forward_hooks_reordered(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = network()
    model[1].register_forward_hook(lambda m, args, y: y * 2)
    model[1].register_forward_hook(lambda m, args, y: y + 1)
    hooks = model[1]._forward_hooks
    return of(model, lambda k: hooks.move_to_end(next(iter(hooks))))


@case
def forward_hook_that_records(patch: pytest.MonkeyPatch) -> TrainingCase:
    model, seen = network(), []
    model[1].register_forward_hook(lambda m, args, y: seen.append(y.detach().clone()))
    return of(model, lambda k: seen.clear(), seen=lambda: list(seen))


@case
def forward_hook_whose_record_is_in_the_loss(patch: pytest.MonkeyPatch) -> TrainingCase:
    model, kept = network(), {}
    model[1].register_forward_hook(lambda m, args, y: kept.update(y=y))
    return of(model, nothing, loss=lambda m, x: m(x).square().mean() + kept["y"].square().mean())


@case
def forward_hook_with_keywords(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = network()
    return of(
        model,
        lambda k: model[1].register_forward_hook(
            lambda m, args, kwargs, y: y * 2, with_kwargs=True, always_call=k == 2
        ),
    )


@case
def forward_pre_hook_added(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = network()
    return of(model, lambda k: model[1].register_forward_pre_hook(lambda m, args: (args[0] * 2,)))


@case
def forward_pre_hook_replaced(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = network()
    handles = [model[1].register_forward_pre_hook(lambda m, args: (args[0] * 0.5,))]

    def change(k: int) -> None:
        handles.pop().remove()
        handles.append(model[1].register_forward_pre_hook(lambda m, args: (args[0] * (2.0 + k),)))

    return of(model, change)


@case
def backward_hook_added(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = network()
    return of(model, lambda k: model[1].register_full_backward_hook(lambda m, gi, go: (gi[0] * 2,)))


@case
def backward_hook_removed(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = network()
    handle = model[1].register_full_backward_hook(lambda m, gi, go: (gi[0] * 2,))
    return of(model, lambda k: handle.remove())


@case
def backward_hook_number(patch: pytest.MonkeyPatch) -> TrainingCase:
    model, number = network(), [1.0]
    model[1].register_full_backward_hook(lambda m, gi, go: (gi[0] * number[0],))
    return of(model, lambda k: number.__setitem__(0, 1.0 + k))


@case
def backward_hook_that_records(patch: pytest.MonkeyPatch) -> TrainingCase:
    model, seen = network(), []
    model[1].register_full_backward_hook(lambda m, gi, go: seen.append(go[0].norm().item()))
    return of(model, nothing, seen=lambda: list(seen))


@case
def backward_pre_hook_added(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = network()
    return of(model, lambda k: model[1].register_full_backward_pre_hook(lambda m, go: (go[0] * 2,)))


@case
def parameter_hook_added(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = network()
    return of(model, lambda k: model[0].weight.register_hook(lambda g: g * 2))


@case
def parameter_hook_removed(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = network()
    handle = model[0].weight.register_hook(lambda g: g * 2)
    return of(model, lambda k: handle.remove())


@case
def parameter_hook_number(patch: pytest.MonkeyPatch) -> TrainingCase:
    model, number = network(), [1.0]
    model[0].weight.register_hook(lambda g: g * number[0])
    return of(model, lambda k: number.__setitem__(0, 1.0 + k))


@case
def accumulation_hook_added(patch: pytest.MonkeyPatch) -> TrainingCase:
    model, seen = network(), []
    return of(
        model,
        lambda k: model[0].weight.register_post_accumulate_grad_hook(
            lambda p: (seen.append(1), p.grad.mul_(2), None)[2]
        ),
        seen=lambda: len(seen),
    )


@case
def optimizer_in_backward(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = linear()
    inner = {p: torch.optim.SGD([p], lr=0.01) for p in model.parameters()}

    def step(p: Tensor) -> None:
        inner[p].step()

    return of(
        model, lambda k: [p.register_post_accumulate_grad_hook(step) for p in model.parameters()] if k == 1 else None
    )


@case
def activation_hook_number(patch: pytest.MonkeyPatch) -> TrainingCase:
    model, number = linear(), [1.0]

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        y = m(x)
        y.register_hook(lambda g: g * number[0])
        return y.square().mean()

    return of(model, lambda k: number.__setitem__(0, 1.0 + k), loss=loss)


@case
def activation_hook_that_records(patch: pytest.MonkeyPatch) -> TrainingCase:
    model, seen = linear(), []

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        y = m(x)
        y.register_hook(lambda g: seen.append(g.norm().item()))
        return y.square().mean()

    return of(model, nothing, loss=loss, seen=lambda: list(seen))


@case
def retained_gradient(patch: pytest.MonkeyPatch) -> TrainingCase:
    model, kept = linear(), []

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        y = m(x)
        y.retain_grad()
        kept.append(y)
        return y.square().mean()

    return of(model, nothing, loss=loss, seen=lambda: [y.grad for y in kept])


def _global_hook(register: Callable[..., Any], hook: Callable[..., Any]) -> Build:
    def build(patch: pytest.MonkeyPatch) -> TrainingCase:
        model, handles = network(), []

        def change(k: int) -> None:
            if k == 1:
                handles.append(register(hook))
            else:
                handles.pop().remove()

        return of(model, change, undo=lambda: [handle.remove() for handle in handles])

    return build


CASES |= {
    "global_forward_hook": _global_hook(nn.modules.module.register_module_forward_hook, lambda m, args, y: y * 1.1),
    "global_forward_pre_hook": _global_hook(
        nn.modules.module.register_module_forward_pre_hook, lambda m, args: (args[0] * 1.1,)
    ),
    "global_backward_hook": _global_hook(
        nn.modules.module.register_module_full_backward_hook,
        lambda m, gi, go: tuple(None if g is None else g * 1.1 for g in gi),
    ),
    "global_backward_pre_hook": _global_hook(
        nn.modules.module.register_module_full_backward_pre_hook, lambda m, go: (go[0] * 1.1,)
    ),
    "global_optimizer_pre_hook": _global_hook(
        register_optimizer_step_pre_hook,
        lambda o, args, kwargs: [p.grad.mul_(2) for p in o.param_groups[0]["params"] if p.grad is not None] and None,
    ),
    "global_optimizer_post_hook": _global_hook(
        register_optimizer_step_post_hook,
        lambda o, args, kwargs: [p.data.mul_(0.9) for p in o.param_groups[0]["params"]] and None,
    ),
}


def _on_registration(kind: str) -> Build:
    def build(patch: pytest.MonkeyPatch) -> TrainingCase:
        model = network()

        def change(k: int) -> None:
            held = {"spectral": parametrizations.spectral_norm, "weight": parametrizations.weight_norm}
            if k == 1:
                held.get(kind, parametrizations.orthogonal)(model[4])
            else:
                parametrize.remove_parametrizations(model[4], "weight")

        return of(model, change)

    return build


CASES |= {f"{kind}_norm_added_and_removed": _on_registration(kind) for kind in ("spectral", "weight", "orthogonal")}


class Times(nn.Module):
    def __init__(self, number: float) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        return x * self.number


@case
def parametrization_number(patch: pytest.MonkeyPatch) -> TrainingCase:
    model, times = network(), Times(1.0)
    parametrize.register_parametrization(model[4], "weight", times)
    return of(model, lambda k: setattr(times, "number", 1.0 + k))


@case
def steady_spectral_norm(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = network()
    parametrizations.spectral_norm(model[0])
    parametrizations.weight_norm(model[4])
    return of(model, nothing)


@case
def old_spectral_norm(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = network()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.nn.utils.spectral_norm(model[0])
        torch.nn.utils.weight_norm(model[4])
    return of(model, lambda k: torch.nn.utils.remove_spectral_norm(model[0]) if k == 1 else None)


@case
def pruning_mask(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = network()
    return of(model, lambda k: torch.nn.utils.prune.l1_unstructured(model[4], "weight", amount=0.3))


# Parameters.


@case
def parameter_frozen(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = network()
    return of(model, lambda k: model[0].weight.requires_grad_(k == 2))


@case
def parameter_thawed(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = network()
    model[0].requires_grad_(False)
    return of(model, lambda k: model[0].requires_grad_(k == 1))


@case
def layer_by_layer_thawing(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = network()
    model.requires_grad_(False)
    model[4].requires_grad_(True)
    return of(model, lambda k: model[[3, 0][k - 1]].requires_grad_(True))


@case
def all_frozen(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = linear()
    return of(model, lambda k: model.requires_grad_(k == 2))


@case
def parameter_tied(patch: pytest.MonkeyPatch) -> TrainingCase:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    return of(
        model, lambda k: setattr(model[2], "weight", model[0].weight if k == 1 else nn.Parameter(torch.ones(4, 4)))
    )


@case
def parameter_untied(patch: pytest.MonkeyPatch) -> TrainingCase:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    return of(model, lambda k: setattr(model[2], "weight", nn.Parameter(model[0].weight.detach().clone())))


@case
def parameters_share_memory(patch: pytest.MonkeyPatch) -> TrainingCase:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    return of(model, lambda k: setattr(model[2].weight, "data", model[0].weight.data if k == 1 else torch.ones(4, 4)))


@case
def parameter_replaced(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = linear()
    return of(model, lambda k: setattr(model, "weight", nn.Parameter(torch.full((3, 4), float(k)))))


@case
def parameter_replaced_in_the_optimizer_too(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = linear()
    optimizer = sgd(model, momentum=0.9)

    def change(k: int) -> None:
        if k == 2:
            return  # two more steps show whether the new weight's gradients are those of one step
        model.weight = nn.Parameter(torch.full((3, 4), float(k)))
        optimizer.param_groups[0]["params"][0] = model.weight

    return of(model, change, optimizer=optimizer)


@case
def parameter_data_assigned(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = linear()
    return of(model, lambda k: setattr(model.weight, "data", torch.full((3, 4), float(k))))


@case
def parameter_data_transposed(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = linear()
    return of(model, lambda k: setattr(model.weight, "data", model.weight.data.t().contiguous().t()))


@case
def parameter_data_narrowed(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = linear()

    def change(k: int) -> None:
        model.weight.data, model.bias.data = model.weight.data[:2].clone(), model.bias.data[:2].clone()

    return of(model, change, optimizer=sgd(model))


@case
def parameter_in_place(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = linear()

    def change(k: int) -> None:
        with torch.no_grad():
            model.weight.fill_(float(k))

    return of(model, change)


@case
def parameters_clamped_after_every_step(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = linear()
    return of(model, nothing, between=lambda out: [p.data.clamp_(-0.2, 0.2) for p in model.parameters()] and None)


@case
def state_loaded(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = network()
    kept = copy.deepcopy(model.state_dict())
    return of(model, lambda k: model.load_state_dict(kept))


@case
def state_loaded_by_assignment(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = network()
    kept = copy.deepcopy(model.state_dict())
    return of(model, lambda k: model.load_state_dict(copy.deepcopy(kept), assign=True))


@case
def tensors_swapped(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = linear()
    return of(model, lambda k: torch.utils.swap_tensors(model.weight, nn.Parameter(torch.full((3, 4), float(k)))))


@case
def model_made_double(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = linear()
    return of(
        model,
        lambda k: model.double() if k == 1 else model.float(),
        optimizer=sgd(model),
        loss=lambda m, x: m(x.to(m.weight.dtype)).square().mean(),
    )


@case
def model_made_bfloat16(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = linear()
    return of(
        model,
        lambda k: model.bfloat16() if k == 1 else model.float(),
        optimizer=sgd(model),
        loss=lambda m, x: m(x.to(m.weight.dtype)).square().mean(),
    )


@case
def channels_last(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 2, 3))
    return of(
        model,
        lambda k: model.to(memory_format=torch.channels_last if k == 1 else torch.contiguous_format),
        batch=lambda i: torch.linspace(0, 1, 100).reshape(2, 2, 5, 5),
    )


@case
def parameter_attribute(patch: pytest.MonkeyPatch) -> TrainingCase:
    model: Any = linear()
    model.weight.decay = 0.0
    return of(
        model,
        lambda k: setattr(model.weight, "decay", 0.1 * k),
        loss=lambda m, x: (
            m(x).square().mean() + sum(getattr(p, "decay", 0.0) * p.square().sum() for p in m.parameters())
        ),
    )


@case
def requires_grad_read_by_the_loss(patch: pytest.MonkeyPatch) -> TrainingCase:
    model: Any = linear()
    return of(
        model,
        lambda k: model.bias.requires_grad_(k == 2),
        loss=lambda m, x: m(x).square().mean() * sum(p.requires_grad for p in m.parameters()),
    )


# Optimizers and schedulers.


def _group_number(make: Callable[[Any], Any], name: str, values: tuple[Any, Any], group: int = 0) -> Build:
    def build(patch: pytest.MonkeyPatch) -> TrainingCase:
        model = linear()
        optimizer = make(list(model.parameters()))
        return of(model, lambda k: optimizer.param_groups[group].update({name: values[k - 1]}), optimizer=optimizer)

    return build


SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
CASES |= {
    "learning_rate": _group_number(SGD, "lr", (0.01, 0.2)),
    "learning_rate_becomes_a_tensor": _group_number(SGD, "lr", (torch.tensor(0.01), torch.tensor(0.02))),
    "learning_rate_of_adam": _group_number(torch.optim.Adam, "lr", (0.01, 0.2)),
    "momentum": _group_number(SGD, "momentum", (0.5, 0.0)),
    "dampening": _group_number(SGD, "dampening", (0.5, 0.0)),
    "nesterov": _group_number(SGD, "nesterov", (True, False)),
    "maximize": _group_number(SGD, "maximize", (True, False)),
    "weight_decay": _group_number(SGD, "weight_decay", (0.5, 0.0)),
    "foreach": _group_number(SGD, "foreach", (True, False)),
    "betas": _group_number(torch.optim.Adam, "betas", ((0.5, 0.9), (0.9, 0.999))),
    "eps": _group_number(torch.optim.Adam, "eps", (0.1, 1e-8)),
    "adam_weight_decay": _group_number(torch.optim.AdamW, "weight_decay", (0.5, 0.0)),
    "amsgrad": _group_number(functools.partial(torch.optim.Adam, amsgrad=True), "amsgrad", (False, True)),
    "own_key_of_a_group": _group_number(SGD, "note", ("a", "b")),
    "second_groups_rate": _group_number(
        lambda ps: torch.optim.Adam([{"params": ps[:1]}, {"params": ps[1:], "lr": 0.1}], lr=0.01), "lr", (0.3, 0.01), 1
    ),
    "groups_emptied": _group_number(SGD, "params", ([], [])),
}


def _steady_optimizer(name: str, **keywords: Any) -> Build:
    return lambda patch: (
        lambda m: of(m, nothing, optimizer=getattr(torch.optim, name)(m.parameters(), **({"lr": 0.1} | keywords)))
    )(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)))


CASES |= {
    f"steady_{name}": _steady_optimizer(name)
    for name in (
        "Adadelta",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "NAdam",
        "RAdam",
        "ASGD",
        "RMSprop",
        "Rprop",
        "Adafactor",
    )
}
CASES |= {
    "steady_fused_Adam": _steady_optimizer("Adam", fused=True),
    "steady_fused_SGD": _steady_optimizer("SGD", fused=True, momentum=0.9),
    "steady_capturable_Adam": _steady_optimizer("Adam", capturable=True),
    "steady_tensor_rate": _steady_optimizer("Adam", lr=torch.tensor(0.1)),
    "steady_foreach_Adam": _steady_optimizer("Adam", foreach=True),
    "steady_maximizing_Adam": _steady_optimizer("Adam", maximize=True, weight_decay=0.1, amsgrad=True),
}


@case
def muon(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = nn.Linear(4, 3, bias=False)
    return of(model, nothing, optimizer=torch.optim.Muon(model.parameters(), lr=0.1))


@case
def several_optimizers(patch: pytest.MonkeyPatch) -> TrainingCase:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    optimizers = [sgd(model[0], momentum=0.9), torch.optim.Adam(model[2].parameters(), lr=0.1)]
    return of(model, lambda k: optimizers[1].param_groups[0].update(lr=0.01 * k), optimizer=optimizers)


@case
def group_added(patch: pytest.MonkeyPatch) -> TrainingCase:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    optimizer = sgd(model[2])
    return of(
        model,
        lambda k: optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.01}) if k == 1 else None,
        optimizer=optimizer,
    )


@case
def parameter_removed_from_its_group(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = linear()
    optimizer = sgd(model)
    return of(model, lambda k: optimizer.param_groups[0]["params"].pop(), optimizer=optimizer)


@case
def groups_swapped(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = linear()
    optimizer = torch.optim.SGD([{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.5}], lr=0.1)

    def change(k: int) -> None:
        one, two = optimizer.param_groups
        one["lr"], two["lr"] = two["lr"], one["lr"]

    return of(model, change, optimizer=optimizer)


@case
def group_dict_replaced(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = linear()
    optimizer = sgd(model, momentum=0.9)
    return of(
        model,
        lambda k: optimizer.param_groups.__setitem__(0, dict(optimizer.param_groups[0], lr=0.01 * k)),
        optimizer=optimizer,
    )


@case
def groups_list_replaced(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = linear()
    optimizer = sgd(model, momentum=0.9)
    return of(
        model,
        lambda k: setattr(optimizer, "param_groups", [dict(g, lr=0.01 * k) for g in optimizer.param_groups]),
        optimizer=optimizer,
    )


def _adam(change: Callable[[Any, Any, int], Any]) -> Build:
    def build(patch: pytest.MonkeyPatch) -> TrainingCase:
        model = linear()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        kept = {"state": None}
        return of(
            model,
            lambda k: change(optimizer, model, k),
            optimizer=optimizer,
            seen=lambda: kept["state"],
        )

    return build


CASES |= {
    "optimizer_state_cleared": _adam(lambda o, m, k: o.state.clear()),
    "optimizer_state_of_one_removed": _adam(lambda o, m, k: o.state.pop(m.weight)),
    "optimizer_state_in_place": _adam(lambda o, m, k: o.state[m.weight]["exp_avg"].zero_()),
    "optimizer_state_replaced": _adam(lambda o, m, k: o.state[m.weight].update(exp_avg=torch.ones(3, 4) * k)),
    "optimizer_step_count_set": _adam(lambda o, m, k: o.state[m.weight]["step"].fill_(100.0 * k)),
    "optimizer_step_count_replaced": _adam(lambda o, m, k: o.state[m.weight].update(step=torch.tensor(100.0 * k))),
    "optimizer_state_loaded": _adam(lambda o, m, k: o.load_state_dict(copy.deepcopy(o.state_dict()))),
    "optimizer_state_swapped_between": _adam(
        lambda o, m, k: o.load_state_dict(
            {"state": {}, "param_groups": [dict(o.state_dict()["param_groups"][0], lr=0.01 * k)]}
        )
    ),
    "optimizer_method_replaced": _adam(
        lambda o, m, k: setattr(
            o, "step", lambda closure=None: [p.data.sub_(p.grad * 0.1) for p in m.parameters()] and None
        )
    ),
    "optimizer_steps_between": _adam(lambda o, m, k: (m(torch.ones(1, 4)).sum().backward(), o.step(), o.zero_grad())),
    "optimizer_zero_grad_not_to_none": _adam(lambda o, m, k: o.zero_grad(set_to_none=False)),
    "optimizer_step_hook_added": _adam(
        lambda o, m, k: o.register_step_post_hook(lambda o, a, b: [p.data.mul_(0.9) for p in m.parameters()] and None)
    ),
    "optimizer_step_pre_hook_added": _adam(
        lambda o, m, k: o.register_step_pre_hook(lambda o, a, b: [p.grad.mul_(0.1) for p in m.parameters()] and None)
    ),
}


class Signed(torch.optim.Optimizer):
    """An optimizer of one's own that reads a number of itself and counts in Python."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.factor, self.count = 1.0, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad.sign(), alpha=-group["lr"] * self.factor / self.count)


@case
def own_optimizer(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = linear()
    optimizer = Signed(model.parameters(), 0.1)
    return of(model, lambda k: setattr(optimizer, "factor", 1.0 + k), optimizer=optimizer, seen=lambda: optimizer.count)


class CountingGroups(torch.optim.SGD):
    """Writes a counter into its group, as many third-party optimizers do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] / group["k"])


@case
def counter_in_the_group(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = linear()
    optimizer = CountingGroups(model.parameters(), 0.1)
    return of(model, lambda k: optimizer.param_groups[0].update(k=0), optimizer=optimizer)


class WarmedUp(torch.optim.SGD):
    """Reads a module's global at every step."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            group["lr"] = WARM["lr"]
        return super().step(closure)


WARM = {"lr": 0.1}


@case
def optimizer_that_reads_a_global(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = linear()
    return of(model, lambda k: patch.setitem(WARM, "lr", 0.01 * k), optimizer=WarmedUp(model.parameters(), 0.1))


class RandomSteps(torch.optim.SGD):
    """Draws noise at every step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad + 0.1 * torch.randn_like(p), alpha=-group["lr"])


@case
def noisy_optimizer(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = linear()
    return of(model, lambda k: torch.manual_seed(k), optimizer=RandomSteps(model.parameters(), 0.1))


class Branchy(torch.optim.SGD):
    """Branches on the gradient's norm."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.grad.norm() > 0.3:
                    p.add_(p.grad, alpha=-group["lr"])


@case
def branching_optimizer(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = linear()
    return of(model, nothing, optimizer=Branchy(model.parameters(), 0.1))


def _scheduled(make: Callable[[Any], Any], *, read: bool = False, **keywords: Any) -> Build:
    def build(patch: pytest.MonkeyPatch) -> TrainingCase:
        model = linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = make(optimizer)
        loss = mean_square
        if read:

            def loss(m: nn.Module, x: Tensor) -> Tensor:
                return mean_square(m, x) + scheduler.get_last_lr()[0] * m.weight.abs().sum()

        return of(model, nothing, optimizer=optimizer, scheduler=scheduler, loss=loss)

    return build


FACTORS = {"f": 0.9}
CASES |= {
    "linear_schedule": _scheduled(lambda o: lr_scheduler.LinearLR(o, 0.1, 1.0, 5)),
    "step_schedule": _scheduled(lambda o: lr_scheduler.StepLR(o, 2, 0.5)),
    "cosine_schedule": _scheduled(lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2)),
    "one_cycle_with_momentum": _scheduled(lambda o: lr_scheduler.OneCycleLR(o, 0.5, 10)),
    "cyclic_with_momentum": _scheduled(lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2)),
    "sequential_schedule": _scheduled(
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.ConstantLR(o, 0.5), lr_scheduler.ExponentialLR(o, 0.9)], [3]
        )
    ),
    "loss_reads_the_scheduler": _scheduled(lambda o: lr_scheduler.LinearLR(o, 0.1, 1.0, 5), read=True),
    "loss_reads_a_cosine_scheduler": _scheduled(lambda o: lr_scheduler.CosineAnnealingLR(o, 6), read=True),
}


@case
def loss_reads_the_users_scheduler(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = nn.Linear(4, 4)
    optimizer = sgd(model)
    scheduler = lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 5)
    return of(
        model,
        nothing,
        optimizer=optimizer,
        loss=lambda m, x: m(x).square().mean() + scheduler.get_last_lr()[0] * m.weight.abs().sum(),
        between=lambda out: scheduler.step(),
    )


@case
def loss_reads_the_schedulers_epoch(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = nn.Linear(4, 4)
    optimizer = sgd(model)
    scheduler = lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 5)
    return of(
        model,
        nothing,
        optimizer=optimizer,
        loss=lambda m, x: m(x).square().mean() * (1 + scheduler.last_epoch),
        between=lambda out: scheduler.step(),
    )


@case
def plateau_fed_by_the_user(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = linear()
    optimizer = sgd(model, lr=2.0)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    return of(model, nothing, optimizer=optimizer, between=lambda out: scheduler.step(out["loss"]))


@case
def lambda_schedule_reads_a_global(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = linear()
    optimizer = sgd(model)
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda epoch: FACTORS["f"] ** epoch)
    return of(model, lambda k: patch.setitem(FACTORS, "f", 0.5 / k), optimizer=optimizer, scheduler=scheduler)


@case
def loss_reads_the_learning_rate(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = linear()
    optimizer = sgd(model)
    return of(
        model,
        lambda k: optimizer.param_groups[0].update(lr=0.1 + 0.1 * k),
        optimizer=optimizer,
        loss=lambda m, x: mean_square(m, x) + optimizer.param_groups[0]["lr"] * m.weight.abs().sum(),
    )


@case
def loss_reads_the_optimizers_state(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = linear()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def loss(m: Any, x: Tensor) -> Tensor:
        state = optimizer.state.get(m.weight)
        return mean_square(m, x) * (1.0 if not state else 1 + state["exp_avg"].abs().sum())

    return of(model, nothing, optimizer=optimizer, loss=loss)


@case
def loss_reads_the_optimizers_step_count(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = linear()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def loss(m: Any, x: Tensor) -> Tensor:
        state = optimizer.state.get(m.weight)
        return mean_square(m, x) * (1.0 if not state else 1 + state["step"])

    return of(model, nothing, optimizer=optimizer, loss=loss)


@case
def loss_reads_the_number_of_states(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = linear()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    return of(
        model,
        lambda k: optimizer.state.clear(),
        optimizer=optimizer,
        loss=lambda m, x: mean_square(m, x) * (1.0 + len(optimizer.state)),
    )


# Code.


@case
def code_of_forward_swapped(patch: pytest.MonkeyPatch) -> TrainingCase:
    class Net(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    def other(self: Any, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) * 2

    def another(self: Any, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) * 3

    class Free(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight, self.bias)

    return of(Free(4, 3), lambda k: setattr(Free.forward, "__code__", [other, another][k - 1].__code__))


@case
def code_of_the_loss_swapped(patch: pytest.MonkeyPatch) -> TrainingCase:
    def loss(m: Any, x: Tensor) -> Tensor:
        return m(x).square().mean()

    def other(m: Any, x: Tensor) -> Tensor:
        return m(x).abs().mean()

    def another(m: Any, x: Tensor) -> Tensor:
        return m(x).square().sum()

    return of(linear(), lambda k: setattr(loss, "__code__", [other, another][k - 1].__code__), loss=loss)


def _helper(y: Tensor) -> Tensor:
    return y.square().mean()


def _other_helper(y: Tensor) -> Tensor:
    return y.abs().mean()


def _third_helper(y: Tensor) -> Tensor:
    return y.square().sum()


@case
def code_of_a_helper_swapped(patch: pytest.MonkeyPatch) -> TrainingCase:
    return of(
        linear(),
        lambda k: patch.setattr(_helper, "__code__", [_other_helper, _third_helper][k - 1].__code__),
        loss=lambda m, x: _helper(m(x)),
    )


@case
def helper_monkeypatched(patch: pytest.MonkeyPatch) -> TrainingCase:
    return of(
        linear(),
        lambda k: patch.setitem(globals(), "_helper", [_other_helper, _third_helper][k - 1]),
        loss=lambda m, x: _helper(m(x)),
    )


SOURCE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x) * {number}

def loss(model, x):
    return model(x).square().mean() * {number}
"""


def _module_of(source: str, name: str, filename: str) -> types.ModuleType:
    module = types.ModuleType(name)
    exec(compile(source, filename, "exec"), module.__dict__)
    return module


def _reloaded(filename: str) -> Build:
    def build(patch: pytest.MonkeyPatch) -> TrainingCase:
        module = _module_of(SOURCE.format(number=1.0), "the_users_module", filename)
        patch.setitem(sys.modules, "the_users_module", module)

        def change(k: int) -> None:
            # As %autoreload does: the old functions get the new ones' code.
            new = _module_of(SOURCE.format(number=1.0 + k), "the_users_module", filename)
            module.Net.forward.__code__ = new.Net.forward.__code__
            module.loss.__code__ = new.loss.__code__

        return of(module.Net(), change, loss=module.loss)

    return build


CASES |= {
    "autoreload_of_a_string": _reloaded("<string>"),
    "autoreload_of_a_cell": _reloaded("<ipython-input-1-abcdef>"),
    "autoreload_of_a_file": _reloaded("the_users_module.py"),
}


@case
def class_of_the_model_reloaded(patch: pytest.MonkeyPatch) -> TrainingCase:
    module = _module_of(SOURCE.format(number=1.0), "the_users_module", "<string>")
    model = module.Net()

    def change(k: int) -> None:
        model.__class__ = _module_of(SOURCE.format(number=1.0 + k), "the_users_module", "<string>").Net

    return of(model, change, loss=module.loss)


STRING_SOURCE = """
scale = 1.0
settings = {"scale": 1.0}
class Settings:
    scale = 1.0
def helper():
    return 1.0
def loss(model, x):
    return model(x).square().mean() * scale * settings["scale"] * Settings.scale * helper()
"""


def _string_module(filename: str, change: Callable[[dict[str, Any], int], None]) -> Build:
    def build(patch: pytest.MonkeyPatch) -> TrainingCase:
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(STRING_SOURCE, filename, "exec"), names)
        return of(linear(), lambda k: change(names, k), loss=names["loss"])

    return build


for _filename in ("<string>", "<stdin>", "<ipython-input-2-abc>", "/nowhere/at/all.py", "torch/nn/functional.py", ""):
    CASES |= {
        f"global_in_code_of_{_filename!r}": _string_module(_filename, lambda n, k: n.update(scale=1.0 + k)),
        f"dict_in_code_of_{_filename!r}": _string_module(_filename, lambda n, k: n["settings"].update(scale=1.0 + k)),
        f"class_in_code_of_{_filename!r}": _string_module(
            _filename, lambda n, k: setattr(n["Settings"], "scale", 1.0 + k)
        ),
        f"helper_in_code_of_{_filename!r}": _string_module(_filename, lambda n, k: n.update(helper=lambda: 1.0 + k)),
    }


@case
def source_in_the_line_cache(patch: pytest.MonkeyPatch) -> TrainingCase:
    source = "def loss(model, x):\n    return model(x).square().mean() * settings['scale']\n"
    linecache.cache["<cell 7>"] = (len(source), None, source.splitlines(True), "<cell 7>")
    names: dict[str, Any] = {"settings": {"scale": 1.0}}
    exec(compile(source, "<cell 7>", "exec"), names)
    return of(linear(), lambda k: names["settings"].update(scale=1.0 + k), loss=names["loss"])


@case
def loss_attribute_of_a_callable_object(patch: pytest.MonkeyPatch) -> TrainingCase:
    class Loss:
        weight = 1.0

        def __call__(self, m: Any, x: Tensor) -> Tensor:
            return m(x).square().mean() * self.weight

    loss = Loss()
    return of(linear(), lambda k: setattr(loss, "weight", 1.0 + k), loss=loss)


@case
def loss_is_a_bound_method(patch: pytest.MonkeyPatch) -> TrainingCase:
    class Trainer:
        weight = 1.0

        def loss(self, m: Any, x: Tensor) -> Tensor:
            return m(x).square().mean() * self.weight

    trainer = Trainer()
    return of(linear(), lambda k: setattr(trainer, "weight", 1.0 + k), loss=trainer.loss)


@case
def loss_is_a_partial(patch: pytest.MonkeyPatch) -> TrainingCase:
    def loss(weight: Any, m: Any, x: Tensor) -> Tensor:
        return m(x).square().mean() * weight["w"]

    weight = {"w": 1.0}
    return of(linear(), lambda k: weight.update(w=1.0 + k), loss=functools.partial(loss, weight))


@case
def loss_is_a_module(patch: pytest.MonkeyPatch) -> TrainingCase:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = Times(1.0)

        def forward(self, m: Any, x: Tensor) -> Tensor:
            return self.scale(m(x).square().mean())  # type: ignore[no-any-return]

    loss = Loss()
    return of(linear(), lambda k: setattr(loss.scale, "number", 1.0 + k), loss=loss)


@case
def loss_is_decorated(patch: pytest.MonkeyPatch) -> TrainingCase:
    number = {"n": 1.0}

    def scaled(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) * number["n"]

        return wrapper

    @scaled
    def loss(m: Any, x: Tensor) -> Tensor:
        return m(x).square().mean()

    return of(linear(), lambda k: number.update(n=1.0 + k), loss=loss)


@case
def loss_under_try_and_with(patch: pytest.MonkeyPatch) -> TrainingCase:
    held = {"fail": False, "n": 1.0}

    @contextlib.contextmanager
    def scaled() -> Iterator[float]:
        yield held["n"]

    def loss(m: Any, x: Tensor) -> Tensor:
        try:
            if held["fail"]:
                raise KeyError("no")
            with scaled() as n:
                return m(x).square().mean() * n
        except KeyError:
            return m(x).abs().mean()

    return of(linear(), lambda k: held.update(fail=k == 2, n=2.0), loss=loss)


@case
def loss_that_raises_for_one_step(patch: pytest.MonkeyPatch) -> TrainingCase:
    held = {"fail": False}

    def loss(m: Any, x: Tensor) -> Tensor:
        y = m(x)
        if held["fail"]:
            held["fail"] = False
            raise RuntimeError("the user's own")
        return y.square().mean()

    return of(network(), lambda k: held.update(fail=True), loss=loss)


def _patched(owner: Any, name: str, new: Callable[[Any, int], Any], loss: Any = mean_square) -> Build:
    def build(patch: pytest.MonkeyPatch) -> TrainingCase:
        old = getattr(owner, name)
        return of(network(), lambda k: patch.setattr(owner, name, new(old, k)), loss=loss)

    return build


CASES |= {
    "activation_forward_monkeypatched": _patched(
        nn.Tanh, "forward", lambda old, k: lambda self, x: old(self, x) * (1 + k)
    ),
    "dropout_forward_monkeypatched": _patched(
        nn.Dropout, "forward", lambda old, k: lambda self, x: old(self, x) * (1 + k)
    ),
    "batch_norm_forward_monkeypatched": _patched(
        nn.BatchNorm1d, "forward", lambda old, k: lambda self, x: old(self, x) * (1 + k)
    ),
    "sequential_forward_monkeypatched": _patched(
        nn.Sequential, "forward", lambda old, k: lambda self, x: old(self, x) * (1 + k)
    ),
    "relu_function_monkeypatched": _patched(torch, "tanh", lambda old, k: lambda x: old(x) * (1 + k)),
    "optimizer_class_monkeypatched": _patched(
        torch.optim.SGD, "step", lambda old, k: lambda self, closure=None: [old(self) for _ in range(1 + k)] and None
    ),
    "optimizer_function_monkeypatched": _patched(
        sys.modules["torch.optim.sgd"],
        "sgd",
        lambda old, k: lambda *a, **kw: old(*a, **(kw | {"lr": kw["lr"] * (1 + k)})),
    ),
    "functional_monkeypatched": _patched(F, "linear", lambda old, k: lambda *args: old(*args) * (1 + k)),
    "torch_function_monkeypatched": _patched(
        torch, "square", lambda old, k: lambda x: old(x) * (1 + k), lambda m, x: torch.square(m(x)).mean()
    ),
    "tensor_method_monkeypatched": _patched(Tensor, "square", lambda old, k: lambda self: old(self) * (1 + k)),
    "library_forward_monkeypatched": _patched(
        nn.Linear, "forward", lambda old, k: lambda self, x: old(self, x) * (1 + k)
    ),
    "module_call_monkeypatched": _patched(
        nn.Module, "__call__", lambda old, k: lambda self, *a: old(self, *a) * (1 + k)
    ),
}


# Settings of the process.


@contextlib.contextmanager
def _nothing() -> Iterator[None]:
    yield


def _around(contexts: Callable[[int], Any], make: Callable[[], nn.Module] = network, **keywords: Any) -> Build:
    """Each step lies in ``contexts(k)``, k the number of changes so far."""

    def build(patch: pytest.MonkeyPatch) -> TrainingCase:
        count = [0]
        return of(make(), lambda k: count.__setitem__(0, k), around=lambda: contexts(count[0]), **keywords)

    return build


class Doubling(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        return result * 2 if function is F.linear else result


class Watching(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        return result * 2 if function is torch.ops.aten.tanh.default else result


CASES |= {
    "autocast_comes_and_goes": _around(lambda k: torch.autocast("cpu", torch.bfloat16, enabled=k == 1)),
    "autocast_type": _around(lambda k: torch.autocast("cpu", [torch.bfloat16, torch.float16, torch.bfloat16][k])),
    "autocast_cache": _around(lambda k: torch.autocast("cpu", torch.bfloat16, cache_enabled=k != 1)),
    "gradients_off": _around(lambda k: torch.set_grad_enabled(k != 1)),
    "inference_mode": _around(lambda k: torch.inference_mode(k == 1)),
    "anomaly_mode": _around(lambda k: torch.autograd.set_detect_anomaly(k == 1, check_nan=False) if k else _nothing()),
    "saved_tensors_scaled": _around(
        lambda k: torch.autograd.graph.saved_tensors_hooks(lambda t: t * (1 + k), lambda t: t) if k else _nothing()
    ),
    "saved_tensors_on_cpu": _around(lambda k: torch.autograd.graph.save_on_cpu() if k else _nothing()),
    "torch_function_mode": _around(lambda k: Doubling() if k == 1 else _nothing()),
    "torch_dispatch_mode": _around(lambda k: Watching() if k == 1 else _nothing()),
    "device_context": _around(lambda k: torch.device("cpu") if k else _nothing()),
    "forked_random_numbers": _around(lambda k: torch.random.fork_rng() if k == 1 else _nothing()),
    "mkldnn_off": _around(lambda k: torch.backends.mkldnn.flags(enabled=k != 1)),
    "stance_eager": _around(lambda k: torch.compiler.set_stance("force_eager") if k == 1 else _nothing()),
    "parametrizations_cached": _around(lambda k: parametrize.cached() if k == 1 else _nothing()),
    "multithreading_off": _around(lambda k: torch.autograd.set_multithreading_enabled(k != 1)),
    "attention_backend": _around(
        lambda k: torch.nn.attention.sdpa_kernel(
            [torch.nn.attention.SDPBackend.MATH, torch.nn.attention.SDPBackend.FLASH_ATTENTION][k % 2]
        ),
        lambda: nn.TransformerEncoderLayer(8, 2, 8, batch_first=True),
        batch=lambda i: torch.linspace(0, 1, 48).reshape(2, 3, 8) * (i + 1),
    ),
}


def _setting(
    setter: Callable[[Any], Any], getter: Callable[[], Any], values: tuple[Any, Any], **keywords: Any
) -> Build:
    def build(patch: pytest.MonkeyPatch) -> TrainingCase:
        old = getter()

        def change(k: int) -> None:
            setter(values[k - 1])

        return of(
            keywords.get("model", network)(), change, undo=lambda: setter(old), loss=keywords.get("loss", mean_square)
        )

    return build


CASES |= {
    "default_dtype": _setting(
        torch.set_default_dtype,
        torch.get_default_dtype,
        (torch.float64, torch.float32),
        loss=lambda m, x: m(x).square().mean() * (torch.tensor(1.1) * torch.ones(()) / 3).float(),
    ),
    "number_of_threads": _setting(
        torch.set_num_threads,
        torch.get_num_threads,
        (2, 1),
        loss=lambda m, x: m(x).square().mean() * torch.get_num_threads(),
    ),
    "deterministic_algorithms": _setting(
        torch.use_deterministic_algorithms,
        torch.are_deterministic_algorithms_enabled,
        (True, False),
        loss=lambda m, x: m(x).square().mean() * (2 if torch.are_deterministic_algorithms_enabled() else 1),
    ),
    "matmul_precision": _setting(
        torch.set_float32_matmul_precision,
        torch.get_float32_matmul_precision,
        ("medium", "highest"),
        loss=lambda m, x: m(x).square().mean() * (1 if torch.get_float32_matmul_precision() == "highest" else 2),
    ),
    "cudnn_flag_read": _setting(
        lambda v: setattr(torch.backends.cudnn, "benchmark", v),
        lambda: torch.backends.cudnn.benchmark,
        (True, False),
        loss=lambda m, x: m(x).square().mean() * (2 if torch.backends.cudnn.benchmark else 1),
    ),
    "default_device_read": _setting(
        torch.set_default_device,
        lambda: None,
        ("cpu", None),
        loss=lambda m, x: m(x).square().mean() * torch.ones(2).sum(),
    ),
    "checkpoint_debug": _setting(
        lambda v: torch.autograd.set_grad_enabled(v),
        torch.is_grad_enabled,
        (False, True),
    ),
    "autocast_enabled_for_ever": _setting(
        lambda v: torch.set_autocast_enabled("cpu", v),
        lambda: torch.is_autocast_enabled("cpu"),
        (True, False),
    ),
    "autocast_type_for_ever": _setting(
        lambda v: torch.set_autocast_dtype("cpu", v),
        lambda: torch.get_autocast_dtype("cpu"),
        (torch.float16, torch.bfloat16),
        loss=lambda m, x: torch.autocast("cpu")(m)(x).square().float().mean(),
    ),
    "flush_denormal": _setting(
        torch.set_flush_denormal,
        lambda: False,
        (True, False),
        loss=lambda m, x: (m(x) * 1e-39).sum() * 1e38,
    ),
    "dynamo_disabled_by_config": _setting(
        lambda v: setattr(torch._dynamo.config, "disable", v), lambda: torch._dynamo.config.disable, (True, False)
    ),
    "dynamo_config_unsound": _setting(
        lambda v: setattr(torch._dynamo.config, "skip_nnmodule_hook_guards", v),
        lambda: torch._dynamo.config.skip_nnmodule_hook_guards,
        (False, True),
    ),
    "python_numbers_of_flags": _setting(torch._C._set_cudnn_allow_tf32, torch._C._get_cudnn_allow_tf32, (False, True)),
}


@case
def dynamo_reset_between_steps(patch: pytest.MonkeyPatch) -> TrainingCase:
    model, number = linear(), [1.0]

    def change(k: int) -> None:
        torch._dynamo.reset()
        number[0] = 1.0 + k

    return of(model, change, loss=lambda m, x: mean_square(m, x) * number[0])


@case
def environment_turns_dynamo_off(patch: pytest.MonkeyPatch) -> TrainingCase:
    model, number = linear(), [1.0]

    def change(k: int) -> None:
        patch.setenv("TORCHDYNAMO_DISABLE", "1")
        number[0] = 1.0 + k

    return of(model, change, loss=lambda m, x: mean_square(m, x) * number[0])


@case
def autocast_inside_turned_off(patch: pytest.MonkeyPatch) -> TrainingCase:
    model, held = network(), {"on": True}

    def loss(m: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=held["on"]):
            y = m(x)
        return y.float().square().mean()

    return of(model, lambda k: held.update(on=k == 2), loss=loss)


@case
def no_gradient_inside(patch: pytest.MonkeyPatch) -> TrainingCase:
    model, held = network(), {"on": True}

    def loss(m: Any, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(held["on"]):
            y = m[0](x)
        return m[1:](y).square().mean()

    return of(model, lambda k: held.update(on=k == 2), loss=loss)


@case
def grad_mode_left_off_inside(patch: pytest.MonkeyPatch) -> TrainingCase:
    model, held = linear(), {"on": True}

    def loss(m: Any, x: Tensor) -> Tensor:
        y = m(x).square().mean()
        torch.set_grad_enabled(held["on"])
        z = x.sum() * 0
        torch.set_grad_enabled(True)
        return y + z

    return of(model, lambda k: held.update(on=k == 2), loss=loss)


# Batches whose shape, type or strides change.


def _batches(batch: Callable[[int], Any], **keywords: Any) -> Build:
    make = keywords.pop("model", network)
    return lambda patch: of(make(), nothing, batch=batch, **keywords)


X = torch.linspace(-1, 1, 40).reshape(10, 4)
CASES |= {
    "rows_change": _batches(lambda i: X[: 3 + i % 4] + i),
    "one_row_at_times": _batches(lambda i: X[: 1 + i % 2], model=linear),
    "strides_change": _batches(lambda i: X[:4] if i < 5 else X[:4].t().contiguous().t()),
    "offset_view": _batches(lambda i: X[i % 7 : i % 7 + 3]),
    "overlapping_view": _batches(lambda i: X[:1].expand(3, 4) if i >= 5 else X[:3], model=linear),
    "type_changes": _batches(
        lambda i: X[:3].double() if i >= 5 else X[:3],
        model=linear,
        loss=lambda m, x: m(x.float()).square().mean() + x.element_size(),
    ),
    "batch_requires_gradient": _batches(lambda i: X[:3].clone().requires_grad_(i >= 5), model=linear),
    "batch_is_the_same_tensor": _batches(lambda i: X[:3].mul_(1.0)),
    "batch_aliases": _batches(
        lambda i: (X[:3], X[:3]) if i >= 5 else (X[:3], X[3:6]),
        model=linear,
        loss=lambda m, b: (m(b[0]) + 2 * m(b[1])).square().mean(),
    ),
    "batch_mutated_by_the_loss": lambda patch: (
        lambda x, m: of(m, nothing, batch=lambda i: x, loss=lambda m, b: m(b.mul_(1.1)).square().mean(), seen=lambda: x)
    )(X[:3].clone(), linear()),
    "batch_is_a_parameter": lambda patch: (
        lambda m: of(
            m, nothing, batch=lambda i: m.weight, loss=lambda m, b: m(X[:3]).square().mean() + b.square().sum()
        )
    )(linear()),
    "batch_is_a_buffer": lambda patch: (
        lambda m: of(
            m, nothing, batch=lambda i: m[3].running_mean, loss=lambda m, b: m(X[:3]).square().mean() + b.sum()
        )
    )(network()),
    "negative_and_conjugate_views": _batches(
        lambda i: (
            torch.view_as_complex(X[:6].reshape(6, 2, 2)).conj()
            if i >= 5
            else torch.view_as_complex(X[:6].reshape(6, 2, 2))
        ),
        model=linear,
        loss=lambda m, x: m(torch.cat([x.real, x.imag], 1)).square().mean(),
    ),
    "sparse_batch": _batches(
        lambda i: (X[:3] * (X[:3] > 0)).to_sparse() if i >= 5 else X[:3],
        model=linear,
        loss=lambda m, x: m(x.to_dense()).square().mean(),
    ),
    "nested_batch": _batches(
        lambda i: torch.nested.nested_tensor([X[: 2 + i], X[:3]], layout=torch.jagged),
        model=linear,
        rows=lambda b: 2.0,
        loss=lambda m, x: m(x).values().square().mean(),
    ),
    "subclass_batch": _batches(lambda i: X[:3].as_subclass(Tagged) if i >= 5 else X[:3], model=linear),
}


class Tagged(Tensor):
    """A subclass whose linear maps are doubled."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(function, types, args, kwargs or {})
        return result * 2 if function is F.linear else result


@case
def subclass_parameter_attribute(patch: pytest.MonkeyPatch) -> TrainingCase:
    class Weighted(Tensor):
        factor = 1.0

        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = super().__torch_function__(function, types, args, kwargs or {})
            return result * cls.factor if function is Tensor.sum else result

    held = torch.ones(3).as_subclass(Weighted)
    return of(
        linear(),
        lambda k: setattr(Weighted, "factor", 1.0 + k),
        loss=lambda m, x: mean_square(m, x) * held.sum().as_subclass(Tensor),
    )


@case
def custom_operator_reads_python(patch: pytest.MonkeyPatch) -> TrainingCase:
    return of(
        linear(),
        lambda k: patch.setitem(OPERATOR, "factor", 1.0 + k),
        loss=lambda m, x: scaled_operator(m(x)).square().mean(),
    )


OPERATOR = {"factor": 1.0}


@torch.library.custom_op("anabranch_tests::scaled", mutates_args=())
def scaled_operator(x: Tensor) -> Tensor:
    return x * OPERATOR["factor"]


@scaled_operator.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


scaled_operator.register_autograd(lambda ctx, g: g * OPERATOR["factor"])


class Twice(torch.autograd.Function):
    """Its backward reads Python too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.number = OPERATOR["factor"]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * OPERATOR["factor"] * ctx.number


@case
def backward_of_a_function_reads_python(patch: pytest.MonkeyPatch) -> TrainingCase:
    return of(
        linear(),
        lambda k: patch.setitem(OPERATOR, "factor", 1.0 + k),
        loss=lambda m, x: Twice.apply(m(x)).square().mean(),  # type: ignore[no-untyped-call]
    )


@case
def backward_of_a_function_swapped(patch: pytest.MonkeyPatch) -> TrainingCase:
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            return gradient

    return of(
        linear(),
        lambda k: setattr(Own, "backward", staticmethod(lambda ctx, g: g * (1 + k))),
        loss=lambda m, x: Own.apply(m(x)).square().mean(),  # type: ignore[no-untyped-call]
    )


@case
def backward_of_a_function_counts(patch: pytest.MonkeyPatch) -> TrainingCase:
    calls = []

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            calls.append(1)
            return gradient * len(calls)

    return of(
        linear(),
        nothing,
        loss=lambda m, x: Own.apply(m(x)).square().mean(),
        seen=lambda: len(calls),  # type: ignore[no-untyped-call]
    )


@case
def checkpointed_function_reads_python(patch: pytest.MonkeyPatch) -> TrainingCase:
    # The forward runs twice a step: a counter tells.
    model, calls = linear(), []

    def inner(x: Tensor) -> Tensor:
        calls.append(1)
        return torch.tanh(model(x)) * len(calls)

    return of(
        model,
        nothing,
        loss=lambda m, x: checkpoint(inner, x, use_reentrant=False).square().mean(),
        seen=lambda: len(calls),
    )


@case
def numpy_inside_the_loss(patch: pytest.MonkeyPatch) -> TrainingCase:
    held = np.ones(3, dtype=np.float32)
    return of(
        linear(),
        lambda k: held.__setitem__(0, 1.0 + k),
        loss=lambda m, x: (m(x) * torch.from_numpy(np.cumsum(held))).square().mean(),
    )


@case
def detached_to_numpy_inside(patch: pytest.MonkeyPatch) -> TrainingCase:
    return of(
        linear(),
        nothing,
        loss=lambda m, x: m(x).square().mean() * float(np.abs(m(x).detach().numpy()).max()),
    )
