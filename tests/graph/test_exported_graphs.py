"""``Graph.to_torch_export``: the same numbers from PyTorch's own program, state included."""

from __future__ import annotations

import pytest
import torch
from test_boundaries import Scale
from torch import Tensor, nn

import anabranch as ab


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)).double()


def batch(seed: int) -> dict[str, Tensor]:
    return {"x": torch.randn(3, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)}


def test_a_module_takes_and_returns_the_captured_structure_and_updates_its_state() -> None:
    here, twin = model(), model()

    def forward(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"y": here(batch["x"]), "twice": batch["x"] * 2}

    exported = ab.capture(forward, batch(0)).to_torch_export()
    assert exported.state_dict.keys() == here.state_dict().keys()
    run = exported.module()
    for seed in (1, 2):
        found = run(batch(seed))
        assert torch.equal(found["y"], twin(batch(seed)["x"]))
        assert torch.equal(found["twice"], batch(seed)["x"] * 2)
    assert torch.equal(run.state_dict()["1.running_mean"], twin[1].running_mean)


def test_gradients_are_part_of_the_program() -> None:
    here = model()
    graph = ab.capture(lambda x: here(x).square().sum(), batch(0)["x"])
    exported = ab.gradients(graph, wrt=["0.weight"]).to_torch_export()
    twin = model()
    (wanted,) = torch.autograd.grad(twin(batch(1)["x"]).square().sum(), [twin[0].weight])
    assert torch.equal(exported.module()(batch(1)["x"])[1], wanted)


def test_a_whole_training_step_trains_the_exported_state() -> None:
    here, twin = model(), model()
    optimizer = torch.optim.SGD(here.parameters(), lr=0.1, momentum=0.9)
    with ab.Executor(ab.TrainStep(here, _loss, optimizer), engine="graph") as executor:
        executor.run(batch=batch(0)["x"])
        exported = executor.graph("default").to_torch_export()
    plain = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    program = exported.module()
    losses = [program(batch(seed)["x"])[0].item() for seed in (1, 2)]
    wanted = []
    for seed in (0, 1, 2):
        plain.zero_grad()
        loss = _loss(twin, batch(seed)["x"])
        loss.backward()
        plain.step()
        wanted.append(loss.item())
    assert losses == wanted[1:]
    for name, value in twin.state_dict().items():
        assert torch.equal(program.state_dict()[name], value), name


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def test_a_boundary_stays_in_its_process() -> None:
    far = Scale()
    graph = ab.capture(lambda x: far.call_whole(x)[0].sum(), torch.ones(2, 2))
    with pytest.raises(ValueError, match="belongs to this process"):
        graph.to_torch_export()
    with pytest.raises(ValueError, match="belongs to this process"):
        graph.save("never.safetensors")
