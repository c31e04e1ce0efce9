"""What is made in an evaluation under ``torch.inference_mode()`` serves the training after it, at every boundary."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anabranch as ab

Mode = Callable[[], AbstractContextManager[object]]


def batch_of(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, 20, (6, 3), generator=generator), torch.randn(6, 2, generator=generator)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(20, 4)
        self.norm, self.linear = nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.linear(self.norm(self.table(ids).sum(1)))


def losses_of(folder: Path, mode: Mode, comm_mode: str | None, **options: object) -> list[float]:
    """Losses of a training in whose pauses is evaluated, saved and loaded, in ``mode``."""
    model = Model()
    adagrad = torch.optim.Adagrad(model.parameters(), lr=0.1)
    train = ab.TrainStep(model, lambda model, batch: F.mse_loss(model(batch[0]), batch[1]), adagrad)
    evaluate = ab.EvalStep(model, lambda model, batch: {"y": model(batch[0])})
    losses = []
    with mode():
        executor = ab.Executor({"train": train, "eval": evaluate}, comm_mode, engine="tape", **options)
    with executor:
        for number in range(6):
            with mode():
                executor.run("eval", batch_of(number + 3))
                executor.statistics()
                if number == 3:
                    executor.save(folder)
                    executor.load(folder)
            losses.append(executor.run("train", batch_of(number))["loss"].item())
    return losses


@pytest.mark.parametrize(
    ("comm_mode", "options"),
    [
        (None, {}),
        ("AllReduce", {}),
        ("PS", {}),
        ("Hybrid", {}),
        ("Hybrid", {"cache": ab.Cache(capacity=8)}),
        ("Hybrid", {"cache": ab.Cache(capacity=8, push_bound=2, pull_bound=2)}),
    ],
    ids=str,
)
def test_an_executor_trains_after_evaluations_in_inference_mode(
    tmp_path: Path, comm_mode: str | None, options: dict[str, object]
):
    expected = losses_of(tmp_path / "plain", nullcontext, comm_mode, **options)
    assert losses_of(tmp_path / "inference", torch.inference_mode, comm_mode, **options) == expected


def of_a_pipe(mode: Mode) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    x, target = torch.randn(6, 4), torch.randn(6, 2)
    with mode():
        pipe = ab.Pipe(model, [2, 1], chunks=3, deferred_batch_norm=True)
    with pipe:
        pipe.eval()
        with mode():
            pipe(x)
            pipe.step(x, target, loss=F.mse_loss)
        pipe.train().zero_grad()
        pipe.step(x, target, loss=F.mse_loss)
        pipe(x).sum().backward()
    return [parameter.grad for parameter in pipe.parameters()]


def of_an_expert(mode: Mode) -> list[Tensor]:
    torch.manual_seed(0)
    module = nn.Linear(4, 4)
    adam = torch.optim.Adam(module.parameters(), lr=0.1)
    with mode():
        server = ab.ExpertServer([ab.ExpertBackend("ffn.0", module, adam, args_schema=[ab.TensorSpec(4)])])
    with server:
        with mode():
            expert = ab.RemoteExpert("ffn.0", server.endpoint)
            expert(torch.randn(3, 4))
        x = torch.randn(3, 4, requires_grad=True)
        y = expert(x)
        y.sum().backward()
        with mode():
            expert(x)
        return [y.detach(), x.grad, expert(x).detach()]


def of_a_client(mode: Mode) -> list[Tensor]:
    ids = torch.tensor([1, 2, 1])
    with mode():
        client = ab.ParameterClient()
        client.init("rows", (9, 4), kind="rows", init=0.5, optimizer=lambda rows: torch.optim.Adagrad(rows, lr=0.1))
        client.init("bias", (4,), init=1.0, optimizer=lambda values: torch.optim.Adam(values, lr=0.1))
    with client:
        with mode():
            client.sparse_pull("rows", ids)
            client.push_pull("bias", torch.ones(4))
        client.sparse_push("rows", ids, torch.ones(3, 4))
        client.push_pull("bias", torch.ones(4))
        return [client.sparse_pull("rows", ids).add_(1.0), client.pull("bias").add_(1.0)]


@pytest.mark.parametrize("boundary", [of_a_pipe, of_an_expert, of_a_client])
def test_other_boundaries_train_after_evaluations_in_inference_mode(boundary: Callable[[Mode], list[Tensor]]):
    for ours, theirs in zip(boundary(torch.inference_mode), boundary(nullcontext), strict=True):
        assert torch.equal(ours, theirs)
