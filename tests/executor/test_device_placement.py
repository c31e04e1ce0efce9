"""``devices=``: parts of a model elsewhere, the same numbers, and transfers at the edges only."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

import anabranch as ab
from anabranch.autodiff.hooks import move_at_edges
from anabranch.executor import device_placement

Engine = Literal["tape", "graph"]
ENGINES: tuple[Engine, ...] = ("tape", "graph")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 8)
        # Its bias would have no gradient, so that Adam would move it by what was rounded.
        self.encoder = nn.Sequential(
            nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8), nn.Sequential(nn.Tanh(), nn.Linear(8, 8))
        )
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(x + self.encoder(x))  # type: ignore[no-any-return]


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return nn.functional.mse_loss(model(x), y)


def train(engine: Engine, devices: dict[str, str] | None) -> tuple[list[Tensor], list[str]]:
    """The losses and the state in the end, and the transfers in the graph."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    step = ab.TrainStep(model, loss, optimizer, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
    with ab.Executor({"train": step}, engine=engine, devices=devices) as executor:
        losses = [executor.run("train", (torch.randn(6, 4), torch.randn(6, 1)))["loss"].cpu() for _ in range(3)]
        transfers = []
        if engine == "graph":
            page = executor.graph("train").to_dot()
            transfers = [line.split("tooltip=")[1] for line in page.splitlines() if "tooltip=" in line]
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"cpu"}  # back where they were
    assert not model.encoder._forward_hooks
    return [*losses, *model.state_dict().values()], transfers


@pytest.mark.parametrize("engine", ENGINES)
def test_a_placed_model_gives_the_same_numbers(engine: Engine) -> None:
    plain, _ = train("tape", None)
    placed, transfers = train(engine, {"encoder": "cpu", "encoder.2": "cpu"})
    assert all(map(torch.equal, plain, placed))
    assert transfers == []  # it is where it was


def test_each_part_runs_on_its_own_device_and_returns_to_the_outer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    moves: dict[nn.Module, tuple[str, str]] = {}

    def note(module: nn.Module, device: torch.device, around: torch.device) -> AbstractContextManager[None]:
        moves[module] = str(device), str(around)
        return nullcontext()

    monkeypatch.setattr(device_placement, "move_at_edges", note)
    model = Model()
    devices = {"encoder.2": "cpu", "encoder": "meta", "head": "meta"}
    with pytest.raises(NotImplementedError, match="meta"), device_placement.placed([model], devices):  # no way back
        places = {name: str(tensor.device) for name, tensor in model.state_dict().items()}
    assert moves == {model.encoder[2]: ("cpu", "meta"), model.encoder: ("meta", "cpu"), model.head: ("meta", "cpu")}
    assert {name for name, device in places.items() if device == "meta"} == {
        name for name in places if name.startswith(("encoder.0", "encoder.1", "head"))
    }


def test_tensors_are_moved_at_the_edges() -> None:
    seen: list[str] = []

    class Inner(nn.Module):
        def forward(self, x: dict[str, Tensor], *, scale: Tensor) -> tuple[Tensor, int]:
            seen.extend((str(x["x"].device), str(scale.device)))
            return torch.ones(2, device="cpu"), 3

    module = Inner()
    with move_at_edges(module, torch.device("meta"), torch.device("meta")):
        output, number = module({"x": torch.ones(2)}, scale=torch.ones(()))
    assert seen == ["meta", "meta"]
    assert (str(output.device), number) == ("meta", 3)
    assert str(module({"x": torch.ones(2)}, scale=torch.ones(()))[0].device) == "cpu"


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_part_on_another_device_trains_there(engine: Engine) -> None:
    plain, _ = train("tape", None)
    placed, transfers = train(engine, {"encoder": "cuda:0"})
    for theirs, mine in zip(placed, plain, strict=True):
        torch.testing.assert_close(theirs, mine, rtol=1e-4, atol=1e-5)
    if engine == "graph":
        assert any("cpu -> cuda:0" in transfer for transfer in transfers)
        assert any("cuda:0 -> cpu" in transfer for transfer in transfers)
