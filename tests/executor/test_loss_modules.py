"""A loss that is a module with its own parameters: trained, fetched, saved and loaded beside the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import anabranch as ab
from anabranch.testing import LocalJob

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
    losses = []
    for batch in given:
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses, state_of(model, loss)


def state_of(model: nn.Module, loss: nn.Module) -> dict[str, Tensor]:
    own = {f"loss.{name}": tensor for name, tensor in loss.state_dict().items()}
    return {name: tensor.clone() for name, tensor in (model.state_dict() | own).items()}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize("engine", ["tape", "graph"])
def test_parameters_of_the_loss_are_trained_as_by_the_plain_loop(engine: str) -> None:
    given = batches(6)
    wanted, state = plain(given)
    model, loss, optimizer = made()
    with ab.Executor(ab.TrainStep(model, loss, optimizer), engine=engine) as executor:
        torch.manual_seed(5)
        losses = [executor.run(batch=batch)["loss"].item() for batch in given]
        assert losses == pytest.approx(wanted, rel=0, abs=1e-12)
    assert_same(state_of(model, loss), state)


def test_a_method_of_a_module_is_accepted_as_a_loss() -> None:
    given = batches(3)
    wanted, _ = plain(given)
    model, loss, optimizer = made()
    with ab.Executor(ab.TrainStep(model, loss.forward, optimizer)) as executor:
        torch.manual_seed(5)
        assert [executor.run(batch=batch)["loss"].item() for batch in given] == pytest.approx(wanted, rel=0, abs=1e-12)


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
    steps = {
        "train": ab.TrainStep(model, loss, optimizer),
        "look": ab.EvalStep(model, lambda model, batch: {"output": model(batch["x"])}),
    }
    with ab.Executor({"default": steps["train"], "look": steps["look"]}) as executor:
        executor.load(tmp_path / "half")
        assert [executor.run(batch=batch)["loss"].item() for batch in given[3:]] == pytest.approx(
            wanted[3:], rel=0, abs=1e-12
        )
        executor.run("look", given[0])
    assert_same(state_of(model, loss), state)


def test_each_of_the_two_keeps_its_own_mode() -> None:
    """A teacher's habit: the loss stays in eval mode, and a model that was in eval mode goes back to train."""
    model, loss, optimizer = made()
    with ab.Executor(ab.TrainStep(model, loss, optimizer)) as executor:
        model.eval()
        executor.run(batch=batches(1)[0])
        assert model.training
        assert loss.training


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


def served(folder: str) -> None:
    """Train on the workers of a job, each on its part of every batch; rank 0 leaves what came out in ``folder``."""
    model, loss, optimizer = made()
    loss.drop.p = 0.0
    job = ab.job()
    step = ab.TrainStep(model, loss, optimizer)
    with ab.Executor(step, comm_mode="PS" if job.servers else "AllReduce") as executor:
        for batch in batches(4):
            executor.run(batch={name: value.chunk(job.world_size)[job.rank] for name, value in batch.items()})
        executor.save(Path(folder) / "saved")
    if job.rank == 0:
        torch.save({name: value for name, value in state_of(model, loss).items() if "seen" not in name}, f"{folder}/s")


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("servers", [0, 1])
def test_workers_and_servers_train_it_as_one_process_does(servers: int, tmp_path: Path) -> None:
    model, loss, optimizer = made()
    loss.drop.p = 0.0
    with ab.Executor(ab.TrainStep(model, loss, optimizer)) as executor:
        for batch in batches(4):
            executor.run(batch=batch)
    source = "import sys; sys.path[:0] = sys.argv[2:]; from test_loss_modules import served; served(sys.argv[1])"
    LocalJob(2, servers=servers).run_source(source, str(tmp_path), str(Path(__file__).parent)).check()
    wanted = {name: value for name, value in state_of(model, loss).items() if "seen" not in name}
    assert_same(torch.load(tmp_path / "s"), wanted)
