"""What a loss may return: a scalar, a scalar and a dict, a mapping with "loss", an object with ``.loss``."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from small_parts import plain_step
from torch import Tensor, nn

import anabranch as ab


@dataclass
class Output:
    loss: Tensor
    logits: Tensor


class Named(NamedTuple):
    loss: Tensor
    logits: Tensor
    hidden: Any = None


FORMS = {
    "scalar": lambda loss, logits: loss,
    "one element": lambda loss, logits: loss.reshape(1),
    "pair": lambda loss, logits: (loss, {"logits": logits}),
    "dict": lambda loss, logits: {"loss": loss, "logits": logits, "note": "kept out", "hidden": None},
    "user": lambda loss, logits: UserDict({"loss": loss, "logits": logits}),
    "object": Output,
    "named": Named,
}


@pytest.mark.quick_cases(8)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("engine", ["tape", "graph"])
def test_a_loss_may_return(form: str, engine: Any) -> None:
    torch.manual_seed(0)
    model, plain = nn.Linear(3, 2), nn.Linear(3, 2)
    plain.load_state_dict(model.state_dict())
    made = FORMS[form]

    def loss(model: nn.Module, batch: Tensor) -> object:
        logits = model(batch)
        return made(logits.square().mean(), logits)  # type: ignore[no-untyped-call]

    step = ab.TrainStep(model, loss, torch.optim.SGD(model.parameters(), lr=0.1))
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    with ab.Executor(step, engine=engine) as executor:
        for index in range(4):
            batch = torch.arange(6.0).reshape(2, 3) + index
            try:
                found = executor.run(batch=batch)
            except ab.CaptureError:
                assert (engine, form) == ("graph", "user")
                return
            assert not any(value.requires_grad for value in found.values())
            if form in ("pair", "dict", "user"):
                assert torch.equal(found.pop("logits"), plain(batch).detach())
            assert found == {"loss": plain_step(plain, lambda m, x: m(x).square().mean(), reference, batch)}
            assert torch.equal(model.weight, plain.weight)


@pytest.mark.parametrize("engine", ["tape", "graph"])
@pytest.mark.parametrize("answer", [3.0, {"logits": torch.ones(1)}, None])
def test_an_output_without_a_loss_is_refused(engine: Any, answer: object) -> None:
    model = nn.Linear(3, 2)

    def loss(model: nn.Module, batch: Tensor) -> object:
        return answer

    step = ab.TrainStep(model, loss, torch.optim.SGD(model.parameters(), lr=0.1))
    with ab.Executor(step, engine=engine) as executor, pytest.raises(TypeError, match=r"or an object with \.loss"):
        executor.run(batch=torch.ones(2, 3))
