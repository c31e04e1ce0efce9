"""Losses: what they may return, and those with parameters of their own, trained, saved and loaded beside the model."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import anabranch as ab
from plain_loop import TrainingCase, check
from toys import in_job, plain_step

Batch = dict[str, Tensor]


class Uncertain(nn.Module):
    """Two tasks weighed by what is learned of them, with a head and a running mean of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.logs = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        self.head = nn.Linear(4, 1).double()
        self.drop = nn.Dropout(0.5)
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        hidden = model(batch["x"])
        if self.training:
            self.seen += 1.0
        first, second = (self.drop(self.head(hidden)) - batch["y"]).square().mean(), hidden.square().mean()
        return (self.logs.exp() * torch.stack([first, second])).sum() - 0.1 * self.logs.sum()


def made() -> tuple[nn.Module, Uncertain, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model, loss = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double(), Uncertain()
    return model, loss, torch.optim.Adam([*model.parameters(), *loss.parameters()], lr=0.05)


def batches(steps: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "x": torch.randn(8, 4, generator=generator, dtype=torch.float64),
            "y": torch.randn(8, 1, generator=generator, dtype=torch.float64),
        }
        for _ in range(steps)
    ]


def plain(given: list[Batch]) -> tuple[list[float], dict[str, Tensor]]:
    model, loss, optimizer = made()
    torch.manual_seed(5)
    return [plain_step(model, loss, optimizer, batch).item() for batch in given], state_of(model, loss)


def state_of(model: nn.Module, loss: nn.Module) -> dict[str, Tensor]:
    own = {f"loss.{name}": tensor for name, tensor in loss.state_dict().items()}
    return {name: tensor.clone() for name, tensor in (model.state_dict() | own).items()}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize("engine", ["tape", "graph"])
def test_parameters_of_the_loss_are_trained_as_by_the_plain_loop(engine: str) -> None:
    def build(patch: pytest.MonkeyPatch) -> TrainingCase:
        model, loss, optimizer = made()
        return TrainingCase(model, loss, optimizer, batch=batches(9).__getitem__, seen=loss.state_dict)

    assert check(build, engine).refused_at is None


def test_it_is_saved_beside_the_model_under_its_own_name(tmp_path: Path) -> None:
    given = batches(6)
    wanted, state = plain(given)
    model, loss, optimizer = made()
    with ab.Executor(ab.TrainStep(model, loss, optimizer)) as executor:
        torch.manual_seed(5)
        for batch in given[:3]:
            executor.run(batch=batch)
        executor.save(tmp_path / "half")
    model, loss, optimizer = made()
    with ab.Executor(ab.TrainStep(model, loss.forward, optimizer)) as executor:
        executor.load(tmp_path / "half")
        assert [executor.run(batch=batch)["loss"].item() for batch in given[3:]] == pytest.approx(
            wanted[3:], rel=0, abs=1e-12
        )
    assert_same(state_of(model, loss), state)


def test_a_pipe_refuses_it_and_a_model_that_has_a_loss_already() -> None:
    _, loss, _ = made()
    pipe = ab.Pipe(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), balance=[1, 1])
    with pytest.raises(ValueError, match="make them a layer at the end of the Pipe"):
        ab.TrainStep(pipe, loss, torch.optim.SGD(pipe.parameters(), lr=0.1))

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.loss = nn.Linear(4, 4)

    named = Named()
    with pytest.raises(ValueError, match="Named has a 'loss'"):
        ab.TrainStep(named, loss, torch.optim.SGD(named.parameters(), lr=0.1))
    own = named.loss.forward  # a method of a part of the model: nothing to train beside it
    assert ab.TrainStep(named, own, torch.optim.SGD(named.parameters(), lr=0.1)).model is named


def served() -> dict[str, list[float]]:
    """Train on the workers of a job, each on its part of every batch."""
    model, loss, optimizer = made()
    loss.drop.p = 0.0
    job = ab.job()
    with ab.Executor(ab.TrainStep(model, loss, optimizer)) as executor:
        for batch in batches(4):
            executor.run(batch={name: value.chunk(job.world_size)[job.rank] for name, value in batch.items()})
    loss.seen.zero_()  # each worker has its own buffers
    return {name: value.flatten().tolist() for name, value in state_of(model, loss).items()}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("servers", [0, 1])
def test_workers_and_servers_train_it_as_one_process_does(servers: int) -> None:
    alone = served()
    for state in in_job(served, 2, servers=servers):
        assert state == {name: pytest.approx(values, rel=0, abs=1e-12) for name, values in alone.items()}


# What a loss may return.


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


@pytest.mark.parametrize(("engine", "error"), [("tape", TypeError), ("graph", ab.CaptureError)])
@pytest.mark.parametrize("answer", [3.0, {"logits": torch.ones(1)}, None])
def test_an_output_without_a_loss_is_refused(engine: Any, error: type[Exception], answer: object) -> None:
    model = nn.Linear(3, 2)

    def loss(model: nn.Module, batch: Tensor) -> object:
        return answer

    step = ab.TrainStep(model, loss, torch.optim.SGD(model.parameters(), lr=0.1))
    with ab.Executor(step, engine=engine) as executor, pytest.raises(error, match=r"or an object with \.loss"):
        executor.run(batch=torch.ones(2, 3))
