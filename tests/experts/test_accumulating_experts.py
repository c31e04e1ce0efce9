"""An override of ``apply_gradients`` that steps at every k-th batch sees the sum of their gradients."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_modules import Feedforward, calling
from torch import Tensor, nn

from anabranch.errors import NonFinite, RemoteError
from anabranch.experts import ExpertBackend
from anabranch.tensors import TensorSpec

SPEC = TensorSpec(4, dtype=torch.float64)


class Patient(ExpertBackend):
    """Steps at every third batch."""

    calls = 0
    fails = False

    def apply_gradients(self) -> None:
        self.calls += 1
        if self.fails:
            raise OSError("not now")
        if self.calls % 3 == 0:
            super().apply_gradients()


class Plain(Patient):
    """The same with the optimizer's own step, and nothing cleared."""

    def apply_gradients(self) -> None:
        self.calls += 1
        if self.calls % 3 == 0:
            assert self.optimizer is not None
            self.optimizer.step()


class ByHand(Patient):
    """The same without an optimizer, behind autograd's back."""

    def apply_gradients(self) -> None:
        self.calls += 1
        if self.calls % 3 == 0:
            for parameter in self.module.parameters():
                if parameter.grad is not None:
                    parameter.data -= 0.1 * parameter.grad


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("keep", [0, 100])
@pytest.mark.parametrize("kind", [Patient, Plain, ByHand])
def test_every_third_batch_steps_with_the_sum_of_three_gradients(kind: type[Patient], keep: int) -> None:
    here = Feedforward().double()
    there = copy.deepcopy(here)
    mine = sgd(here)
    backend = kind("ffn.0", there, sgd(there), args_schema=[SPEC], keep_activations=keep)
    with calling(backend) as expert:
        for index in range(7):
            x = torch.randn(3, 4, dtype=torch.float64)
            here(x).square().sum().backward()
            expert(x).square().sum().backward()  # type: ignore[attr-defined]
            if index % 3 == 2:
                mine.step()
                mine.zero_grad()
            for a, b in zip(here.parameters(), there.parameters(), strict=True):
                assert torch.allclose(a, b, rtol=1e-12)
                assert (a.grad is None) == (b.grad is None)
                if a.grad is not None and b.grad is not None:
                    assert torch.allclose(a.grad, b.grad, rtol=1e-11)


class Steps(ExpertBackend):
    """Steps at every batch and clears nothing."""

    def apply_gradients(self) -> None:
        assert self.optimizer is not None
        self.optimizer.step()


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
        lambda p: torch.optim.Adam(p, fused=True),
        lambda p: torch.optim.AdamW(p, foreach=True),
        lambda p: torch.optim.Adagrad(p),
        lambda p: torch.optim.Rprop(p),
    ],
)
def test_an_override_that_steps_at_every_batch_sees_each_gradient_once(make: object) -> None:
    here = nn.Linear(4, 4)
    there = copy.deepcopy(here)
    mine, theirs = make(here.parameters()), make(there.parameters())  # type: ignore[operator]
    backend = Steps("ffn.0", there, theirs, args_schema=[TensorSpec(4)])
    for _ in range(3):
        x = torch.randn(3, 4)
        here(x).sum().backward()
        backend.backward(x, torch.ones(3, 4))
        mine.step()
        mine.zero_grad()
        assert all(parameter.grad is None for parameter in there.parameters())
    for a, b in zip(here.parameters(), there.parameters(), strict=True):
        assert torch.allclose(a, b)


def test_a_batch_that_fails_leaves_the_gradients_of_the_others() -> None:
    module = nn.Linear(1, 1, bias=False).double()
    nn.init.ones_(module.weight)
    backend = Patient("n.0", module, sgd(module), args_schema=[TensorSpec(1, dtype=torch.float64)])
    x = torch.ones(1, 1, dtype=torch.float64)
    with calling(backend) as expert:
        expert(x).sum().backward()  # type: ignore[attr-defined]
        with pytest.raises(NonFinite):
            (expert(x * 1e308) * 1e308).sum().backward()  # type: ignore[operator]
        backend.fails = True
        with pytest.raises(RemoteError, match="not now"):
            expert(x).sum().backward()  # type: ignore[attr-defined]
        backend.fails = False
        assert module.weight.grad is not None
        assert float(module.weight.grad) == 1.0
        backend.calls = 1
        expert(2 * x).sum().backward()  # type: ignore[attr-defined]
        assert float(module.weight.grad) == 3.0
        expert(4 * x).sum().backward()  # type: ignore[attr-defined]
    assert module.weight.grad is None
    assert float(module.weight.detach()) == pytest.approx(1.0 - 0.7, rel=1e-15)


class Fails(Patient):
    def apply_gradients(self) -> None:
        assert self.optimizer is not None
        self.optimizer.step()
        raise OSError("after the step")


def test_an_update_that_fails_after_its_step_is_not_made_again() -> None:
    module = nn.Linear(1, 1, bias=False)
    backend = Fails("n.0", module, sgd(module), args_schema=[TensorSpec(1)])
    with pytest.raises(RuntimeError, match="after the step"):
        backend.backward(torch.ones(1, 1), torch.ones(1, 1))
    assert module.weight.grad is None


@pytest.mark.parametrize(
    ("sparse", "optimizer"), [(False, torch.optim.SGD), (True, torch.optim.SGD), (True, torch.optim.SparseAdam)]
)
def test_gradients_that_wait_survive_a_restart(tmp_path: Path, sparse: bool, optimizer: Any) -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.table = nn.Embedding(5, 2, sparse=sparse)

        def forward(self, ids: Tensor) -> Tensor:
            return self.table(ids)  # type: ignore[no-any-return]

    def make() -> Patient:
        module = Rows()
        schema = [TensorSpec(dtype=torch.int64)]
        return Patient("rows.0", module, optimizer(module.parameters(), lr=0.1), args_schema=schema)

    first = make()
    for step, backend in enumerate((first, make())):
        backend.calls = 2 * step
        with calling(backend, checkpoint_dir=tmp_path) as expert:
            for ids in ([1, 1, 2], [2, 3]) if step == 0 else ([1],):
                expert(torch.tensor(ids)).sum().backward()  # type: ignore[attr-defined]
    here = Rows()
    for ids in ([1, 1, 2], [2, 3], [1]):
        here(torch.tensor(ids)).sum().backward()
    optimizer(here.parameters(), lr=0.1).step()
    assert torch.allclose(here.table.weight, backend.module.table.weight)  # type: ignore[union-attr]
    assert torch.equal(first.module.table.weight, Rows().table.weight)  # type: ignore[union-attr]
