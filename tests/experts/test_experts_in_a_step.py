"""Experts inside a training step of the executor: it runs on the tape, and is the plain loop's."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import anabranch as ab


class Model(nn.Module):
    def __init__(self, expert: nn.Module) -> None:
        super().__init__()
        self.before = nn.Linear(4, 4)
        self.expert = expert
        self.after = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(torch.relu(self.expert(self.before(x))))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return (model(x) - y).square().mean()


@pytest.mark.parametrize("engine", ["auto", "tape"])
def test_a_step_with_an_expert_is_the_plain_loop(engine: str) -> None:
    here = Model(nn.Linear(4, 4))
    module = copy.deepcopy(here.expert)
    backend = ab.ExpertBackend(
        "linear.0", module, torch.optim.SGD(module.parameters(), lr=0.1), args_schema=[ab.TensorSpec(4)]
    )
    plain = torch.optim.SGD(here.parameters(), lr=0.1)
    batches = [(torch.randn(5, 4), torch.randn(5, 1)) for _ in range(4)]
    with ab.ExpertServer([backend]) as server:
        there = Model(ab.RemoteExpert("linear.0", server.endpoint))
        there.before.load_state_dict(here.before.state_dict())
        there.after.load_state_dict(here.after.state_dict())
        optimizer = torch.optim.SGD(there.parameters(), lr=0.1)
        with ab.Executor({"train": ab.TrainStep(there, loss, optimizer)}, engine=engine) as executor:
            for batch in batches:
                plain.zero_grad()
                expected = loss(here, batch)
                expected.backward()
                plain.step()
                assert torch.equal(executor.run("train", batch)["loss"], expected.detach())
            assert executor.engine("train") == ("graph" if engine == "auto" else "tape")
    assert torch.equal(module.weight, here.expert.weight)  # type: ignore[arg-type]
    assert torch.equal(there.before.weight, here.before.weight)
    assert backend.updates == 4
